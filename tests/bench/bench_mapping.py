"""Scoring pairs of query and conversation longest first, against pairs one by one in the order of the run.

Both sides are the same cross-encoder (the packaged weights with a new head: its scores mean nothing, its speed does) on the
first hits of a search. The time for the paper's 1,500 queries and 9,000 conversations at 100 hits each follows from the
pairs per second. Run alone with `python tests/bench/bench_mapping.py [--quick]`, or with the others by `make bench`.
"""
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    from sentence_transformers import CrossEncoder

    from cdr_lib.benchmark.reranker import pair_texts, score_pairs
    from cdr_lib.core.config import data_dir
    from cdr_lib.core.encoders import CrossEncoderReranker
    from cdr_lib.core.layouts import read_cdr
    from cdr_lib.core.models import packaged_minilm, quiet
    from cdr_lib.core.store import Store
    from cdr_lib.retrieval.search import search

    collection = read_cdr(data_dir() / "sample" / "cdr")
    n = 64 if quick else 400
    run = search(collection.queries, collection.conversations, "bm25", k=10, progress=False)
    frame = run.frame().iloc[:: max(1, len(run.hits) // n)].head(n)
    frame = frame.assign(text=frame["query"].map(collection.queries))
    texts = pair_texts(frame, collection.conversations)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        with quiet():
            CrossEncoder(packaged_minilm(), num_labels=1, device="cpu", local_files_only=True).save(
                str(Path(folder) / "model"), create_model_card=False)
        reranker = CrossEncoderReranker(str(Path(folder) / "model"), "cpu", scale="probability")
        model = reranker.model
        score_pairs(reranker, texts[:16], progress=False)  # warm
        # Slices in turn: what else the machine does meets both.
        spent, found, expected = np.zeros(2), np.empty(n), np.empty(n)
        for part in np.array_split(np.arange(n), 4):
            few = [texts[row] for row in part]
            start = time.perf_counter()
            found[part] = score_pairs(reranker, few, progress=False)
            middle = time.perf_counter()
            expected[part] = [float(model.predict([pair], batch_size=1, activation_fn=reranker._activation,
                                                  show_progress_bar=False)[0]) for pair in few]
            spent += middle - start, time.perf_counter() - middle
        assert np.allclose(found, expected, atol=1e-5)
        ours, reference = spent
        hours = 1500 * 100 / (n / ours) / 3600
        rows.append({"case": f"{n} pairs by a cross-encoder", "ours_s": ours, "reference_s": reference,
                     "ratio": reference / ours, "target": 2.0,
                     "note": f"{n / ours:.0f} against {n / reference:.0f} pairs/s; 1,500 queries x 100 hits: {hours:.1f} h"})
        store = Store(Path(folder) / "store")
        score_pairs(reranker, texts, store, progress=False)
        start = time.perf_counter()
        again = score_pairs(reranker, texts, store, progress=False)
        kept = time.perf_counter() - start
        assert np.allclose(again, expected, atol=1e-5)
        rows.append({"case": f"{n} pairs again, kept", "ours_s": kept, "reference_s": reference, "ratio": reference / kept})
    return rows


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.bench.__main__ import markdown

    print(markdown(bench("--quick" in sys.argv)))
