"evaluation.efficiency: what is timed, how often, and what hardware() tells."
import getpass
import json
import os
import platform

import numpy as np
import pytest

from cdr_lib.core.config import CdrError, json_dumps
from cdr_lib.core.encoders import HashEncoder
from cdr_lib.evaluation.efficiency import efficiency, efficiency_summary, hardware


class Clock:
    "A clock that only moves when something takes its known time, so that the test does not depend on the machine."

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    import cdr_lib.evaluation.efficiency as module

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Slow(HashEncoder):
    "Takes a known time for each text and remembers each call."

    name = "slow"

    def __init__(self, clock, per_text=0.5):
        super().__init__(64)
        self.clock, self.per_text, self.calls = clock, per_text, []

    def encode(self, texts, role="document", batch_size=None, progress=True):
        self.calls.append((len(texts), role, batch_size))
        self.clock.now += self.per_text * len(texts)
        return super().encode(texts, role)


DOCUMENTS = [f"user: text {i % 25}" for i in range(100)]  # 25 distinct
QUERIES = [f"question {i}" for i in range(20)]


def test_times_are_those_of_the_phases(clock):
    def search(query_vectors, document_vectors):
        clock.now += 3
        return np.argsort(-query_vectors @ document_vectors.T)

    encoder = Slow(clock)
    table = efficiency(encoder, DOCUMENTS, QUERIES, search, progress=False)
    assert table.set_index(["setting", "phase", "step"])["seconds"].to_dict() == {
        ("paper", "ingestion", "embed and hold"): 50, ("paper", "ingestion", "total"): 50,
        ("paper", "inference", "embed queries"): 10, ("paper", "inference", "search and rank"): 3,
        ("paper", "inference", "total"): 13,
        # each distinct text once
        ("tuned", "ingestion", "embed and hold"): 12.5, ("tuned", "ingestion", "total"): 12.5,
        ("tuned", "inference", "embed queries"): 10, ("tuned", "inference", "search and rank"): 3,
        ("tuned", "inference", "total"): 13}
    # warm-up texts, then the whole data set with batches of 4; the tuned setting leaves the batch to the encoder
    assert encoder.calls == [(8, "document", 4), (8, "query", 4), (100, "document", 4), (20, "query", 4),
                             (8, "document", 4), (8, "query", 4), (25, "document", None), (20, "query", None)]
    totals = table[table["step"] == "total"]
    assert totals["texts"].tolist() == [100, 20, 100, 20] and totals["texts_per_s"].tolist() == [2, 20 / 13, 8, 20 / 13]
    json_dumps(table.astype(object).where(table.notna(), None).to_dict("records"))  # strict JSON


def test_another_encoder_for_the_tuned_setting_and_the_shortest_of_several_times(clock):
    slow, fast, waits = Slow(clock), Slow(clock, 0.25), iter([4, 2, 1, 5])

    def search(query_vectors, document_vectors):
        clock.now += next(waits)

    table = efficiency(slow, DOCUMENTS, QUERIES, search, tuned=fast, tuned_batch_size=64, repeats=2, progress=False)
    assert sum(size == 100 for size, *_ in slow.calls) == 2 and (25, "document", 64) in fast.calls
    (row,) = efficiency_summary(table).to_dict("records")
    assert row == {"encoder": "slow", "ingestion, paper (s)": 50, "ingestion, tuned (s)": 6.25,
                   "inference, paper (s)": 12, "inference, tuned (s)": 6, "ingestion, ratio": 8, "inference, ratio": 2}


@pytest.mark.parametrize("change", [{"documents": []}, {"queries": []}, {"documents": ["a", ""]}, {"queries": [None]},
                                    {"repeats": 0}])
def test_bad_input(change):
    with pytest.raises(CdrError):
        efficiency(**{"encoder": HashEncoder(), "documents": DOCUMENTS, "queries": QUERIES, "search": np.matmul,
                      "progress": False, **change})


def test_hardware_is_plain_and_names_no_one():
    machine = hardware()
    text = json.dumps(machine, allow_nan=False)
    assert machine["threads"] >= 1 and machine["cpu"] and machine["python"].startswith("3.")
    assert os.sep + "home" not in text and str(os.getcwd()) not in text
    for name in {platform.node(), getpass.getuser()} - {"", "root", "localhost"}:
        assert name not in text
