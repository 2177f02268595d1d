"evaluation.efficiency: what is timed, how often, and what hardware() tells."
import getpass
import json
import os
import platform
import time

import numpy as np
import pytest

from cdr_lib.core.config import CdrError, json_dumps
from cdr_lib.core.encoders import HashEncoder
from cdr_lib.evaluation.efficiency import efficiency, efficiency_summary, hardware


class Slow(HashEncoder):
    "Takes a known time for each text and remembers each call."

    name = "slow"

    def __init__(self, per_text=0.002):
        super().__init__(64)
        self.per_text, self.calls = per_text, []

    def encode(self, texts, role="document", batch_size=None, progress=True):
        self.calls.append((len(texts), role, batch_size))
        time.sleep(self.per_text * len(texts))
        return super().encode(texts, role)


DOCUMENTS = [f"user: text {i % 25}" for i in range(100)]  # 25 distinct
QUERIES = [f"question {i}" for i in range(20)]


def search(query_vectors, document_vectors):
    time.sleep(0.03)
    return np.argsort(-query_vectors @ document_vectors.T)


def test_times_are_those_of_the_phases():
    encoder = Slow()
    table = efficiency(encoder, DOCUMENTS, QUERIES, search, progress=False)
    seconds = table.set_index(["setting", "phase", "step"])["seconds"]
    assert 0.2 <= seconds["paper", "ingestion", "total"] < 1
    assert 0.05 <= seconds["tuned", "ingestion", "total"] < 0.2  # each distinct text once
    assert 0.03 <= seconds["paper", "inference", "search and rank"] < 0.5
    for setting in ("paper", "tuned"):
        assert seconds[setting, "inference", "total"] == pytest.approx(
            seconds[setting, "inference", "embed queries"] + seconds[setting, "inference", "search and rank"])
    # warm-up texts, then the whole data set with batches of 4; the tuned setting leaves the batch to the encoder
    assert encoder.calls == [(8, "document", 4), (8, "query", 4), (100, "document", 4), (20, "query", 4),
                             (8, "document", 4), (8, "query", 4), (25, "document", None), (20, "query", None)]
    totals = table[table["step"] == "total"]
    assert totals["texts"].tolist() == [100, 20, 100, 20]
    assert np.allclose(totals["texts_per_s"], totals["texts"] / totals["seconds"])
    json_dumps(table.astype(object).where(table.notna(), None).to_dict("records"))  # strict JSON


def test_another_encoder_for_the_tuned_setting_and_the_shortest_of_several_times():
    slow, fast = Slow(), Slow(0)
    fast.name = "slow"
    table = efficiency(slow, DOCUMENTS, QUERIES, search, tuned=fast, tuned_batch_size=64, repeats=2, progress=False)
    assert sum(size == 100 for size, *_ in slow.calls) == 2 and (25, "document", 64) in fast.calls
    (row,) = efficiency_summary(table).to_dict("records")
    assert row["ingestion, ratio"] > 2 and row["encoder"] == "slow"


@pytest.mark.parametrize("change", [{"documents": []}, {"queries": []}, {"documents": ["a", ""]}, {"queries": [None]},
                                    {"repeats": 0}])
def test_bad_input(change):
    with pytest.raises(CdrError):
        efficiency(**{"encoder": HashEncoder(), "documents": DOCUMENTS, "queries": QUERIES, "search": search,
                      "progress": False, **change})


def test_hardware_is_plain_and_names_no_one():
    machine = hardware()
    text = json.dumps(machine, allow_nan=False)
    assert machine["threads"] >= 1 and machine["cpu"] and machine["python"].startswith("3.")
    assert os.sep + "home" not in text and str(os.getcwd()) not in text
    for name in {platform.node(), getpass.getuser()} - {"", "root", "localhost"}:
        assert name not in text
