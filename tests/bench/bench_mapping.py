"""The mapping of 1,500 queries to 9,000 conversations: a first search, then a reranker on its first 100 hits.

Our side scores the hits as the mapping does, longest first and in batches; the reference is the same model on pairs one by one,
in the order of the run, timed on a stated sample of them. Slices of both take turns, so that what else the machine does meets
both. Two rerankers: the network over message vectors that learns on a laptop, which scores all 150,000 pairs here, and a
cross-encoder of random weights (its scores mean nothing, its speed does), which on a CPU would need hours for them and
scores a sample. A cross-encoder gains where one pair leaves cores idle; on one core it computes the same either way, so
its target holds where there are more.

Run alone with `python -m tests.bench mapping [--quick]`, or with the others by `make bench`.
"""
import os
import tempfile
import time
from pathlib import Path

import numpy as np


def _in_turn(texts: list, few: list, ours, reference) -> tuple[float, float]:  # pairs a second of both
    "All of `texts` by `ours`, `few` of them by `reference` as well, in four slices each."
    spent, scores = np.zeros(2), {}
    for slices in zip(np.array_split(np.arange(len(texts)), 4), np.array_split(np.arange(len(few)), 4)):
        part, single = [texts[row] for row in slices[0]], [few[row] for row in slices[1]]
        start = time.perf_counter()
        scores |= zip(part, ours(part))
        middle = time.perf_counter()
        found = [reference(pair) for pair in single]
        spent += middle - start, time.perf_counter() - middle
        assert np.allclose(found, ours(single), atol=1e-5), "in company a pair scores differently"
    assert len(scores) == len(set(texts))
    return len(texts) / spent[0], len(few) / spent[1]


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    from sentence_transformers import CrossEncoder

    from cdr_lib.benchmark.reranker import map_pairs, pair_texts, score_pairs
    from cdr_lib.benchmark.sample import make_sample
    from cdr_lib.benchmark.templates import expand, read_templates, sample_queries
    from cdr_lib.benchmark.turns import TurnReranker, train_turns
    from cdr_lib.core.encoders import CrossEncoderReranker
    from cdr_lib.core.models import packaged_minilm, quiet
    from cdr_lib.core.store import Store
    from cdr_lib.retrieval.search import search

    n_queries, n_conversations, depth = (50, 720, 20) if quick else (1500, 9000, 100)
    conversations = make_sample(1, n_conversations).conversations
    drawn = sample_queries(expand(read_templates()), n_queries, 0)
    queries = dict(zip(drawn["query"], drawn["text"]))
    start = time.perf_counter()
    run = search(queries, conversations, "bm25", k=depth, progress=False)
    first = time.perf_counter() - start
    frame = run.frame()
    texts = pair_texts(frame.assign(text=frame["query"].map(queries)), conversations)
    size = f"{n_queries:,} queries x {n_conversations:,} conversations"
    # Every query with every conversation, which is what the first search saves.
    every = n_queries * n_conversations
    rows = []

    def row(case: str, rates: tuple[float, float], n: int, single: int, target: float | None) -> dict:
        ours, reference = rates
        return {"case": f"{case}, pairs of {size}", "ours_s": len(texts) / ours, "reference_s": len(texts) / reference,
                "ratio": ours / reference, "target": target,
                "note": f"{ours:,.0f} against {reference:,.0f} pairs a second; {len(texts):,} pairs, {n:,} timed, one by one "
                        f"{single:,}; without the first search {every / ours / 3600:,.1f} h"}

    with tempfile.TemporaryDirectory() as folder:
        # The hash encoder: message vectors are there already in a benchmark, since other steps made them.
        path = train_turns("hash", texts[:64], np.arange(64) % 2, Path(folder) / "turns", 1, device="cpu", progress=False)
        turns = TurnReranker(path, "cpu")
        start = time.perf_counter()
        turns.score([*{pair[side]: pair for side in (0, 1) for pair in texts}.values()], progress=False)  # makes the vectors
        cold = time.perf_counter() - start
        many = texts[:: max(1, len(texts) // 20_000)]
        few = many[:: max(1, len(many) // (100 if quick else 1000))]
        rates = _in_turn(many, few, lambda part: score_pairs(turns, part, progress=False),
                         lambda pair: float(turns.score([pair], progress=False)[0]))
        rows.append(row(f"A network over messages on the first {depth}", rates, len(many), len(few), 2.0))

        with quiet():
            CrossEncoder(packaged_minilm(), num_labels=1, device="cpu", local_files_only=True).save(
                str(Path(folder) / "model"), create_model_card=False)
        cross = CrossEncoderReranker(str(Path(folder) / "model"), "cpu", scale="probability")
        many = texts[:: max(1, len(texts) // (16 if quick else 60))]
        few = many[::3]
        score_pairs(cross, many[:8], progress=False)  # warm
        rates = _in_turn(many, few, lambda part: score_pairs(cross, part, progress=False),
                         lambda pair: float(cross.model.predict([pair], batch_size=1, show_progress_bar=False,
                                                                activation_fn=cross._activation)[0]))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        rows.append(row(f"A cross-encoder on the first {depth}", rates, len(many), len(few), 2.0 if cores >= 4 else None))

        store, options = Store(Path(folder) / "store"), dict(depth=depth, most=depth - 1, progress=False)
        start = time.perf_counter()
        mapped = map_pairs(queries, conversations, turns, run, store=store, **options)
        whole = first + time.perf_counter() - start
        start = time.perf_counter()
        again = map_pairs(queries, conversations, turns, run, store=store, **options)
        kept = time.perf_counter() - start
        assert again["score"].equals(mapped["score"])
        rows.append({"case": f"The mapping whole, {size}", "ours_s": whole,
                     "note": f"first search {first:.1f} s, then {len(mapped):,} pairs; message vectors by hash, {cold:.1f} s before it"})
        rows.append({"case": "The mapping again, scores kept", "ours_s": kept, "reference_s": whole, "ratio": whole / kept,
                     "note": "resumes: every pair is found in the store"})
    return rows


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.bench.__main__ import markdown

    print(markdown(bench("--quick" in sys.argv)))
