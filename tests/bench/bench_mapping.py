"""Scoring pairs of query and conversation longest first, against pairs one by one in the order of the run.

Both sides are the same model on the first hits of a search: the network over message vectors that learns on a laptop, and a
cross-encoder (random weights: their scores mean nothing, their speed does). A cross-encoder on a CPU with one thread computes
the same either way; it gains where one pair leaves cores idle, so its row has no target. The time for the paper's 1,500
queries and 9,000 conversations at 100 hits each follows from the pairs per second. Run alone with `python tests/bench/bench_mapping.py [--quick]`, or with the others by `make bench`.
"""
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def _in_turn(texts: list, ours, reference) -> np.ndarray:  # seconds of both
    "Slices in turn, so that what else the machine does meets both."
    spent, found, expected = np.zeros(2), [], []
    for part in np.array_split(np.arange(len(texts)), 4):
        few = [texts[row] for row in part]
        start = time.perf_counter()
        found.append(ours(few))
        middle = time.perf_counter()
        expected.append([reference(pair) for pair in few])
        spent += middle - start, time.perf_counter() - middle
    assert np.allclose(np.concatenate(found), np.concatenate(expected), atol=1e-5)
    return spent


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    from sentence_transformers import CrossEncoder

    from cdr_lib.benchmark.reranker import pair_texts, score_pairs
    from cdr_lib.benchmark.turns import TurnReranker, train_turns
    from cdr_lib.core.config import data_dir
    from cdr_lib.core.encoders import CrossEncoderReranker
    from cdr_lib.core.layouts import read_cdr
    from cdr_lib.core.models import packaged_minilm, quiet
    from cdr_lib.core.store import Store
    from cdr_lib.retrieval.search import search

    collection = read_cdr(data_dir() / "sample" / "cdr")
    run = search(collection.queries, collection.conversations, "bm25", k=20, progress=False)
    frame = run.frame()
    texts = pair_texts(frame.assign(text=frame["query"].map(collection.queries)), collection.conversations)
    rows = []

    def row(case: str, n: int, spent: np.ndarray, target: float | None) -> dict:
        ours, reference = spent
        hours = 1500 * 100 / (n / ours) / 3600
        return {"case": f"{n} pairs by {case}", "ours_s": ours, "reference_s": reference, "ratio": reference / ours,
                "target": target, "note": f"{n / ours:,.0f} against {n / reference:,.0f} pairs/s; "
                                          f"1,500 queries x 100 hits: {hours:.2f} h"}

    with tempfile.TemporaryDirectory() as folder:
        few = texts[:: max(1, len(texts) // (400 if quick else 1200))]
        # The hash encoder: message vectors are there already in a benchmark, since the first search made them.
        labels = np.arange(len(few)) % 2
        reranker = TurnReranker(train_turns("hash", few[:64], labels[:64], Path(folder) / "turns", 1, device="cpu",
                                            progress=False), "cpu")
        reranker.score(few, progress=False)  # the vectors
        rows.append(row("a network over messages", len(few), _in_turn(
            few, lambda part: score_pairs(reranker, part, progress=False), lambda pair: reranker.score([pair], progress=False)[0]), 2.0))
        few = texts[:: max(1, len(texts) // (16 if quick else 100))]
        with quiet():
            CrossEncoder(packaged_minilm(), num_labels=1, device="cpu", local_files_only=True).save(
                str(Path(folder) / "model"), create_model_card=False)
        cross = CrossEncoderReranker(str(Path(folder) / "model"), "cpu", scale="probability")
        score_pairs(cross, few[:8], progress=False)  # warm
        spent = _in_turn(few, lambda part: score_pairs(cross, part, progress=False),
                         lambda pair: float(cross.model.predict([pair], batch_size=1, show_progress_bar=False,
                                                                activation_fn=cross._activation)[0]))
        rows.append(row("a cross-encoder", len(few), spent, None))
        store = Store(Path(folder) / "store")
        score_pairs(cross, few, store, progress=False)
        start = time.perf_counter()
        score_pairs(cross, few, store, progress=False)
        kept = time.perf_counter() - start
        rows.append({"case": f"{len(few)} pairs again, kept", "ours_s": kept, "reference_s": spent[1],
                     "ratio": spent[1] / kept, "target": 2.0})
    return rows


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.bench.__main__ import markdown

    print(markdown(bench("--quick" in sys.argv)))
