"""Scoring runs with all measures at all cut-offs: one pass here against one ir_measures call per measure."""
import tempfile
import time
from pathlib import Path

import ir_measures
import numpy as np

from cdr_lib.evaluation.evaluate import experiment
from cdr_lib.evaluation.metrics import MEASURES, score_matrix
from cdr_lib.retrieval.run import Run, read_run, write_run


def _benchmark(n_systems: int, n_queries: int, depth: int = 100, n_conversations: int = 9146, n_relevant: int = 20):
    """Judgements of the size of CDR-Benchmark, and rankings that hold about half of the relevant conversations.

    Scores under a query are distinct: on ties, RR of ir_measures ranks otherwise than its other measures."""
    rng = np.random.default_rng(0)
    ids = [f"conversation-{i:05}" for i in range(n_conversations)]
    relevant = [rng.choice(n_conversations, n_relevant, replace=False) for _ in range(n_queries)]
    qrels = {f"query-{q:04}": {ids[i]: 1 for i in row} for q, row in enumerate(relevant)}
    results = {}
    for system in range(n_systems):
        found = {}
        for query, row in zip(qrels, relevant):
            hits = np.unique(np.concatenate([rng.choice(row, n_relevant // 2, replace=False),
                                             rng.integers(0, n_conversations, 2 * depth)]))
            hits = rng.permutation(hits)[:depth]
            found[query] = dict(zip((ids[i] for i in hits), rng.permutation(depth).astype(float).tolist()))
        results[f"system-{system}"] = found
    return qrels, results


def bench(quick: bool = False) -> list[dict]:
    """Rows of the benchmark; `quick` only shows that it runs."""
    n_systems, n_queries = (2, 50) if quick else (10, 1583)
    qrels, results = _benchmark(n_systems, n_queries)
    runs = {name: Run.from_dict(found, name) for name, found in results.items()}
    measures = [ir_measures.parse_measure(name) for name in MEASURES]

    start = time.perf_counter()
    ours = {name: score_matrix(run, qrels) for name, run in runs.items()}
    ours_s = time.perf_counter() - start

    # each library gets the runs in its own form
    start = time.perf_counter()
    single = {name: [list(ir_measures.iter_calc([measure], qrels, found)) for measure in measures]
              for name, found in results.items()}
    single_s = time.perf_counter() - start

    start = time.perf_counter()
    for found in results.values():
        list(ir_measures.iter_calc(measures, qrels, found))
    joint_s = time.perf_counter() - start

    rows = {query: row for row, query in enumerate(qrels)}
    for name, columns in single.items():
        theirs = np.zeros_like(ours[name])
        for column, found in enumerate(columns):
            for metric in found:
                theirs[rows[metric.query_id], column] = metric.value
        np.testing.assert_allclose(ours[name], theirs, atol=1e-6)

    with tempfile.TemporaryDirectory() as folder:
        paths = {name: write_run(run, Path(folder) / f"{name}.run") for name, run in runs.items()}
        start = time.perf_counter()
        for name, path in paths.items():
            assert read_run(path) == runs[name]
        ours_read_s = time.perf_counter() - start
        start = time.perf_counter()
        for name, path in paths.items():
            found: dict[str, dict[str, float]] = {}
            for row in ir_measures.read_trec_run(str(path)):
                found.setdefault(row.query_id, {})[row.doc_id] = row.score
            assert found == results[name]
        their_read_s = time.perf_counter() - start

    start = time.perf_counter()
    result = experiment(runs, qrels, baseline="system-0")
    result.summary()
    result.significance()
    full_s = time.perf_counter() - start

    size = f"{n_systems} systems x {n_queries:,} queries x {len(MEASURES)} measures"
    return [
        {"case": f"{size}, one call per measure", "ours_s": ours_s, "reference_s": single_s, "ratio": single_s / ours_s,
         "target": 1.0, "checked": True, "note": "ir_measures, one call per measure; scores equal to 1e-6"},
        {"case": f"{size}, one call for all", "ours_s": ours_s, "reference_s": joint_s, "ratio": joint_s / ours_s,
         "target": 1.0, "checked": True, "note": "ir_measures, one call with all measures"},
        {"case": f"{size}, from run files", "ours_s": ours_read_s + ours_s, "reference_s": their_read_s + single_s,
         "ratio": (their_read_s + single_s) / (ours_read_s + ours_s), "target": 1.0, "checked": True,
         "note": f"each file read once; reading took {ours_read_s:.1f} s here, {their_read_s:.1f} s there"},
        {"case": f"{size}, with intervals and tests", "ours_s": full_s, "reference_s": single_s, "ratio": single_s / full_s,
         "target": None, "checked": True, "note": "ours adds 10,000 bootstrap resamples, 10,000 swaps and Holm; theirs as above"},
    ]
