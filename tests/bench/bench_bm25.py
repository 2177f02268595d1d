"""Batch BM25 against rank_bm25.BM25Okapi.get_scores.

Run alone with `python tests/bench/bench_bm25.py [--quick]`, or with the others by `make bench`.
"""
import json
import sys
import time

import numpy as np


def texts(n: int, mean_words: int, seed: int, vocabulary: int = 20_000) -> list[str]:
    "Messages whose words follow Zipf's law, as words do."
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, vocabulary + 1) ** 1.05
    words = np.array([f"w{i}" for i in range(vocabulary)])
    sizes = rng.poisson(mean_words - 1, n) + 1
    drawn = np.split(words[rng.choice(vocabulary, sizes.sum(), p=share / share.sum())], np.cumsum(sizes)[:-1])
    return [" ".join(message) for message in drawn]


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    from rank_bm25 import BM25Okapi

    from cdr_lib.retrieval.bm25 import BM25, tokenize

    n, q, sample, chunk = (3_000, 100, 10, 50) if quick else (50_000, 1_583, 20, 200)
    units, queries = texts(n, 20, 0), texts(q, 12, 1)
    reference = BM25Okapi([tokenize(text) for text in units])
    start = time.perf_counter()
    expected = np.array([reference.get_scores(tokenize(query)) for query in queries[:sample]])
    reference_s = (time.perf_counter() - start) / sample * q

    start = time.perf_counter()
    index = BM25(units, "okapi")
    index_s = time.perf_counter() - start
    worst = np.abs(index.scores(queries[:sample]).toarray() - expected).max()
    assert worst < 1e-6, worst
    start = time.perf_counter()
    for first in range(0, q, chunk):
        index.scores(queries[first:first + chunk])
    scores_s = time.perf_counter() - start

    owner = np.arange(n) // 10
    ids = [f"c{i:06}" for i in range(owner[-1] + 1)]
    start = time.perf_counter()
    hits = index.topk(queries, owner, ids, k=100)
    topk_s = time.perf_counter() - start
    for row in range(sample):
        peaks = np.maximum.reduceat(expected[row], np.arange(0, n, 10)).astype(np.float32)
        best = sorted((hit for hit in zip(peaks, ids) if hit[0] > 0), reverse=True)[:100]
        mine = hits.rows == row
        assert [ids[code] for code in hits.conversations[mine]] == [name for _, name in best]

    target = None if quick else 50.0
    note = f"reference: {sample} queries timed, scaled to {q:,}; index ({index_s:.1f} s) not counted on either side"
    return [{"case": f"BM25 scores, {q:,} queries x {n:,} units", "ours_s": scores_s, "reference_s": reference_s,
             "ratio": reference_s / scores_s, "target": target,
             "checked": f"largest difference {worst:.0e} on {sample} queries", "peak_mib": None, "note": note},
            {"case": f"BM25 search, {q:,} queries x {n:,} units, top 100 conversations", "ours_s": topk_s,
             "reference_s": reference_s, "ratio": reference_s / topk_s, "target": target,
             "checked": f"same conversations on {sample} queries", "peak_mib": None,
             "note": note + "; the reference only scores, it does not sort"}]


if __name__ == "__main__":
    for row in bench("--quick" in sys.argv):
        print(json.dumps(row))
