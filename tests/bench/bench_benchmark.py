"""Expansion of query templates against a plain product loop, and the checks of a benchmark of the paper's size.

Run alone with `python tests/bench/bench_benchmark.py [--quick]`, or with the others by `make bench`.
"""
import json
import sys
import time
from itertools import product

import numpy as np


def plain_expansion(templates) -> list[tuple[str, str, str]]:
    "Query, template and values by replacing one place after the other, with a set against repeats."
    from cdr_lib.core.config import text_hash
    from cdr_lib.curation.exact import normal_text

    rows, seen = [], set()
    for template in templates.templates:
        for values in product(*(templates.placeholders[slot.partition(".")[0]] for slot in template.slots)):
            filled = dict(zip(template.slots, values))
            if any(filled[slot] == filled[other] for slot in filled for other in filled
                   if slot < other and slot.partition(".")[0] == other.partition(".")[0]):
                continue
            text = template.text
            for slot, value in filled.items():
                text = text.replace(f"{{{slot}}}", value)
            if normal_text(text) not in seen:
                seen.add(normal_text(text))
                rows.append((f"{template.id}-{text_hash(text)[:10]}", text, json.dumps(filled, ensure_ascii=False)))
    return rows


def made_up(n_conversations: int, n_queries: int, seed: int = 0):
    "A collection of random words in the paper's size: about 460 tokens in 5.4 messages, 20 relevant per query."
    from cdr_lib.core.collection import TASK_AREAS, Collection
    from cdr_lib.core.conversation import Conversation

    rng = np.random.default_rng(seed)
    words = np.array([f"word{i}" for i in range(20_000)])
    share = 1 / np.arange(1, len(words) + 1)
    share /= share.sum()
    conversations = {}
    for number in range(n_conversations):
        texts = [" ".join(rng.choice(words, 85, p=share)) for _ in range(rng.integers(4, 8))]
        turns = [("assistant" if place % 2 else "user", text) for place, text in enumerate(texts)]
        conversations[f"c{number:05}"] = Conversation.make(f"c{number:05}", *turns)
    ids = list(conversations)
    queries = {f"q{number:05}": f"Find {number} " + " ".join(rng.choice(words, 10)) for number in range(n_queries)}
    qrels = {query: {ids[place]: 1 for place in rng.choice(n_conversations, 20, replace=False)} for query in queries}
    areas = {query: TASK_AREAS[place % 5] for place, query in enumerate(queries)}
    return Collection("made-up", conversations, queries, qrels, areas)


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    from cdr_lib.benchmark.freeze import validate_benchmark
    from cdr_lib.benchmark.templates import expand, read_templates
    from cdr_lib.curation.exact import normal_text

    templates = read_templates()
    expand(templates)
    ours_s, reference_s = [], []
    for _ in range(1 if quick else 5):
        start = time.perf_counter()
        frame = expand(templates)
        ours_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        plain = plain_expansion(templates)
        reference_s.append(time.perf_counter() - start)
    ours, reference = min(ours_s), min(reference_s)
    assert list(zip(frame["query"], frame["text"], frame["values"])) == plain
    if ours > 2:
        raise AssertionError(f"{ours:.2f} s: the expansion must take less than 2 s")
    rows = [{"case": f"{len(frame):,} queries expanded and de-duplicated (limit 2 s)", "ours_s": ours, "reference_s": reference,
             "ratio": reference / ours, "target": None if quick else 1.0, "checked": "same ids, texts and values",
             "peak_mib": None, "note": "reference: replace place after place, JSON anew for each query"}]

    n, q, sample = (900, 150, 20) if quick else (9_146, 1_583, 40)
    collection = made_up(n, q)
    start = time.perf_counter()
    assert validate_benchmark(collection).ok
    ours = time.perf_counter() - start
    start = time.perf_counter()
    texts = [normal_text(turn.text) for item in collection.conversations.values() for turn in item.turns]
    read_s = time.perf_counter() - start
    start = time.perf_counter()
    for text in map(normal_text, list(collection.queries.values())[:sample]):
        assert not any(text in other for other in texts)
    reference = read_s + (time.perf_counter() - start) / sample * q
    rows.append({"case": f"All checks of {q:,} queries and {n:,} conversations", "ours_s": ours, "reference_s": reference,
                 "ratio": reference / ours, "target": None if quick else 1.0, "checked": "both find nothing", "peak_mib": None,
                 "note": f"reference: each query sought in each message, nothing else checked; {sample} queries timed, scaled"})
    return rows


if __name__ == "__main__":
    for row in bench("--quick" in sys.argv):
        print(json.dumps(row))
