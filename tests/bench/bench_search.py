"""Exact dense search, against sentence_transformers.util.semantic_search and over growing collections.

Run alone with `python tests/bench/bench_search.py [--quick]`, or with the others by `make bench`.
"""
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

DIM = 384


def vectors(owner: np.ndarray, seed: int, topics: int = 200) -> np.ndarray:
    "Unit vectors as embeddings of a corpus lie: messages around their conversation, conversations around a topic."
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((topics, DIM), dtype=np.float32)
    about = centres[rng.integers(0, topics, owner[-1] + 1)]
    about += rng.standard_normal(about.shape, dtype=np.float32)
    rows = rng.standard_normal((len(owner), DIM), dtype=np.float32)
    rows += about[owner]
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def owners(n: int, seed: int) -> np.ndarray:
    "Conversations of 4 to 16 units, 10 on average."
    sizes = np.random.default_rng(seed).integers(4, 17, n)
    return np.repeat(np.arange(n), sizes)[:n]


def semantic_search_grouped(queries, units, owner, ids, k: int, top_k: int) -> list[list[tuple[str, float]]]:
    "What one writes with sentence-transformers: search units, keep the first of each conversation."
    from sentence_transformers.util import semantic_search

    results = []
    for hits in semantic_search(queries, units, top_k=top_k):
        best = {}
        for hit in hits:
            name = ids[owner[hit["corpus_id"]]]
            if name not in best:
                best[name] = hit["score"]
                if len(best) == k:
                    break
        results.append(list(best.items()))
    return results


def filling_top_k(queries, units, owner, ids, k: int, start: float, factor: float) -> int:
    "Units that the reference must fetch so that every query fills k conversations: found beforehand, not timed."
    top_k = start
    while min(map(len, semantic_search_grouped(queries, units, owner, ids, k, int(top_k)))) < k:
        top_k *= factor
    return int(top_k)


def agree(hits, ids, reference, k: int) -> str:
    "Scores rank by rank, and the same conversations wherever the reference's float32 noise does not decide."
    scores = hits.scores.reshape(-1, k)
    names = np.array(ids, dtype=object)[hits.conversations].reshape(-1, k)
    expected = np.array([[score for _, score in row] for row in reference])
    assert np.abs(scores - expected).max() < 1e-5, "scores differ"
    swapped = 0
    for row, other, values in zip(names, reference, scores):
        odd = set(row) ^ {name for name, _ in other}
        place = {name: score for name, score in zip(row, values)} | dict(other)
        assert all(abs(place[name] - values[-1]) < 1e-5 for name in odd), "conversations differ"
        swapped += len(odd) // 2
    return f"scores within 1e-5, {swapped} of {len(hits.rows):,} hits exchanged with a tie at the last rank"


def best_times(repeats: int, *calls) -> list[tuple[float, object]]:
    "The best time of each call, and what it gave. They take turns, so that a busy moment hits all."
    times, results = [[] for _ in calls], [None] * len(calls)
    for _ in range(repeats):
        for number, call in enumerate(calls):
            start = time.perf_counter()
            results[number] = call()
            times[number].append(time.perf_counter() - start)
    return [(min(own), result) for own, result in zip(times, results)]


_CHILD = """
import resource, sys
import numpy as np
from cdr_lib.retrieval.dense import dense_topk
queries, units, owner = (np.load(f"{sys.argv[1]}/{name}.npy") for name in ("queries", "units", "owner"))
hits = dense_topk(queries, units, owner, [f"c{i:07}" for i in range(int(owner[-1]) + 1)], k=int(sys.argv[2]))
if sys.platform == "linux":  # getrusage would count the parent's memory at the time of the fork
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 2**10
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(peak)
"""


def peak_mib(queries, units, owner, k: int) -> float:
    "Peak memory of a fresh process that loads the vectors and searches them, interpreter and libraries included."
    with tempfile.TemporaryDirectory() as folder:
        for name, array in (("queries", queries), ("units", units), ("owner", owner)):
            np.save(f"{folder}/{name}.npy", array)
        child = subprocess.run([sys.executable, "-c", _CHILD, folder, str(k)], stdout=subprocess.PIPE, text=True,
                               check=True)
    return float(child.stdout.splitlines()[-1])


def against_semantic_search(quick: bool) -> list[dict]:
    from cdr_lib.retrieval.dense import dense_topk

    q, n, repeats = (200, 5_000, 1) if quick else (1_583, 50_000, 5)
    owner = owners(n, 3)
    queries, units = vectors(np.arange(q), 1), vectors(owner, 2)
    ids = [f"c{i:07}" for i in range(int(owner[-1]) + 1)]
    rows = []
    mean = n / len(ids)
    usual = "as many units as k conversations hold on average, doubled till all queries fill"
    for k, start, factor, how in ((100, 100 * mean, 2, usual), (100, 100, 1.2, "the least that fills all queries"),
                                  (20, 20 * mean, 2, usual)):
        top_k = filling_top_k(queries, units, owner, ids, k, start, factor)
        (reference_s, reference), (ours_s, hits) = best_times(
            repeats, partial(semantic_search_grouped, queries, units, owner, ids, k, top_k),
            partial(dense_topk, queries, units, owner, ids, k))
        rows.append({"case": f"dense search, {q:,} queries x {n:,} units x {DIM}, top {k} conversations",
                     "ours_s": ours_s, "reference_s": reference_s, "ratio": reference_s / ours_s,
                     "target": 3.0 if factor == 2 and not quick else None,
                     "checked": agree(hits, ids, reference, k), "peak_mib": peak_mib(queries, units, owner, k),
                     "note": f"reference: semantic_search(top_k={top_k}), {how} (found beforehand), then grouping in "
                             f"Python; best of {repeats}; peak of a whole process, under 1,024 MiB wanted"})
    return rows


def growing(quick: bool) -> list[dict]:
    from cdr_lib.retrieval.dense import dense_topk

    sizes = (5_000, 10_000, 20_000) if quick else (250_000, 500_000, 1_000_000, 2_000_000)
    queries, piece = vectors(np.arange(100), 1), vectors(owners(min(sizes), 3), 2)
    rng, rows, first = np.random.default_rng(4), [], None
    with tempfile.TemporaryDirectory() as folder:
        # Shuffled dimensions make new vectors of old ones, much faster than a random generator.
        disk = np.memmap(Path(folder) / "units.f16", np.float16, "w+", shape=(max(sizes), DIM))
        for start in range(0, max(sizes), len(piece)):
            disk[start:start + len(piece)] = piece[:, rng.permutation(DIM)]
        disk.flush()
        owner = owners(max(sizes), 3)
        ids = [f"c{i:07}" for i in range(int(owner[-1]) + 1)]
        for n in sizes:
            mapped = np.memmap(Path(folder) / "units.f16", np.float16, "r", shape=(n, DIM))
            [(ours_s, hits)] = best_times(1 if quick else 3, partial(dense_topk, queries, mapped, owner[:n], ids, 100))
            if first is None:
                best = (queries[:3].astype(float) @ mapped.T.astype(float)).max(axis=1)
                assert np.allclose(hits.scores[hits.rows < 3].reshape(3, -1)[:, 0], best, atol=1e-6)
                first, checked = ours_s / n, "best score of 3 queries"
            else:
                checked = ""
            rows.append({"case": f"dense search, 100 queries x {n:,} units from disk (float16)", "ours_s": ours_s,
                         "reference_s": None, "ratio": first * n / ours_s,
                         "target": 0.75 if n == max(sizes) and not quick else None, "checked": checked,
                         "peak_mib": None, "note": f"{ours_s / n * 1e6:.2f} us a unit; ratio: time per unit at "
                                                   f"{min(sizes):,} units to the time per unit here, 1 is linear"})
    return rows


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    return against_semantic_search(quick) + growing(quick)


if __name__ == "__main__":
    for row in bench("--quick" in sys.argv):
        print(json.dumps(row))
