"""The generator of dirty corpora: labels that hold, a clean floor, the same bytes anywhere."""
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from scipy import sparse

from cdr_lib.core.config import CdrError, text_hash
from cdr_lib.core.conversation import render
from cdr_lib.core.io import read_jsonl
from cdr_lib.curation.dirty import COPIES, KINDS, dirty_corpus, planted, write_dirty


@pytest.fixture(scope="module")
def corpus():
    return list(dirty_corpus(6000, seed=3))


def shingles(chat) -> frozenset:
    text = render(chat.turns, "text").casefold()
    parts = "".join(text.split()) if chat.meta.get("language") in ("zh", "ja") else text.split()
    return frozenset(zip(*(parts[i:] for i in range(5)))) if len(parts) >= 5 else frozenset([tuple(parts)])


def greatest_jaccard(sets: list[frozenset]) -> float:
    names: dict = {}
    indices = [names.setdefault(shingle, len(names)) for found in sets for shingle in found]
    sizes = np.array([len(found) for found in sets])
    matrix = sparse.csr_matrix((np.ones(len(indices), np.int32), indices, np.r_[0, np.cumsum(sizes)]))
    shared = sparse.triu(matrix @ matrix.T, 1).tocoo()
    return float((shared.data / (sizes[shared.row] + sizes[shared.col] - shared.data)).max())


def test_conversations_that_are_no_copies_stay_apart(corpus):
    apart = [chat for chat in corpus if "copy_of" not in chat.labels and chat.labels["kind"] not in ("short", "blank")]
    assert len(apart) > 4000 and greatest_jaccard(list(map(shingles, apart))) < 0.5


def test_labels_say_how_alike_copies_are(corpus):
    by_id = {chat.id: chat for chat in corpus}
    seen = Counter()
    for chat in corpus:
        if (kind := chat.labels["kind"]) not in COPIES:
            continue
        seen[kind] += 1
        a, b = shingles(chat), shingles(by_id[chat.labels["copy_of"]])
        similarity = len(a & b) / len(a | b)
        if "jaccard" in chat.labels:
            assert similarity == pytest.approx(chat.labels["jaccard"], abs=1e-4)
        if kind == "exact" and chat.labels["how"] != "decomposed":
            assert similarity == 1
        assert {"exact": True, "near": 0.8 <= similarity < 1, "altered": similarity < 0.65, "paraphrase": similarity < 0.6}[kind], chat.id
    assert all(seen[kind] > 50 for kind in COPIES)


def test_every_kind_occurs_and_shares_come_out_as_asked(corpus):
    shares = Counter(chat.labels["kind"] for chat in corpus)
    assert set(shares) == set(KINDS)
    assert shares["near"] / 6000 == pytest.approx(0.06, abs=0.01) and shares["pii"] / 6000 == pytest.approx(0.03, abs=0.01)
    assert len({chat.source for chat in corpus}) == 5
    assert {"en", "de", "es", "ru", "zh", "ja", "ar", "hi"} <= {chat.meta.get("language") for chat in corpus}
    leaks = [chat for chat in corpus if chat.labels["kind"] in ("exact", "near") and chat.meta.get("split") == "test"]
    assert leaks, "copies lie on both sides of the split"


def test_the_same_in_every_process_and_in_parts():
    """CUR-15 for the generator: neither the hash seed nor the way of splitting changes a corpus."""
    code = ("from cdr_lib.curation.dirty import dirty_corpus; from cdr_lib.core.config import text_hash, json_dumps; "
            "print(text_hash(*(json_dumps(chat.to_dict()) for chat in dirty_corpus(300, seed=9))))")
    found = {subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, text=True,
                            capture_output=True, check=True).stdout for seed in "01"}
    assert len(found) == 1
    whole = list(dirty_corpus(300, seed=9))
    assert [chat for start in range(0, 300, 70) for chat in dirty_corpus(min(70, 300 - start), seed=9, start=start)] == whole
    assert text_hash(*(str(chat) for chat in whole)) != text_hash(*(str(chat) for chat in dirty_corpus(300, seed=10)))


def test_impossible_numbers_are_refused():
    for wrong in ({"n": -1}, {"n": True}, {"n": 3.0}, {"n": 1, "near": 2}, {"n": 1, "blank": float("nan")}, {"n": 1, "start": -1}):
        with pytest.raises(CdrError):
            dirty_corpus(**wrong)
    with pytest.raises(CdrError, match="forum.*lower them"):
        dirty_corpus(1, spam=0.3)


def test_planted_groups(corpus):
    exact, fuzzy, semantic = (planted(corpus, kinds) for kinds in (["exact"], ["exact", "near"], ["exact", "near", "paraphrase"]))
    assert len(set(exact)) > len(set(fuzzy)) > len(set(semantic))
    assert all((exact == -1) == np.array([chat.labels["kind"] == "blank" for chat in corpus]))
    with pytest.raises(CdrError, match="spam"):
        planted(corpus, ["spam"])


def test_broken_records_are_all_refused(tmp_path, corpus):
    written = write_dirty(corpus[:2000], tmp_path, broken=0.2)
    for source, (good, bad) in written.items():
        reader = read_jsonl(tmp_path / f"{source}.jsonl", on_error="collect")
        assert [len(list(reader)), len(reader.rejects)] == [good, bad]
    assert sum(bad for _, bad in written.values()) > 300
