"""Aligned search against the plain search of messages: 1,583 queries of 2 to 3 parts over 9,146 conversations.

Both rank the same conversations for the same queries by the same vectors; the aligned one compares two to three times as many
rows, plays scripts and adds windows and sessions. It may take three times as long.

Run alone with `python -m tests.bench aligned [--quick]`, or with the others by `make bench`.
"""
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from cdr_lib.core.config import CdrError
from tests.bench.bench_search import best_times, vectors

K = 100
LIMIT = 1 / 3


def scripts(n: int) -> list:
    "What the grammar reads in queries of the benchmark's templates, those of 2 to 3 parts."
    from cdr_lib.benchmark.templates import expand, read_templates, sample_queries
    from cdr_lib.retrieval.grammar import parse_query

    drawn = sample_queries(expand(read_templates()), 3 * n, 0)
    found = [script for script in map(parse_query, drawn["text"]) if 2 <= len(script.parts) <= 3][:n]
    assert len(found) == n, "the templates give too few queries of 2 to 3 parts"
    return found


def odd_scripts(n: int, seed: int) -> list:
    "Scripts of 2 to 3 parts with operators at random: hardly any two are of one shape."
    from cdr_lib.retrieval.script import Part, Script

    rng, found = np.random.default_rng(seed), []
    for number in range(n):
        parts = []
        for place in range(rng.integers(2, 4)):
            kind, role = rng.random(), str(rng.choice(["", "user", "assistant"]))
            options: dict = {"after": str(rng.choice(["", "later", "next"]))} if place else {}
            if place and kind < 0.15:
                options |= {"never": True, "after": options["after"] and "later"}
            elif kind < 0.3 and options.get("after") != "next":
                options["times"] = int(rng.integers(2, 4))
            elif kind < 0.45 and options.get("after"):
                options["change"] = True
            elif kind < 0.6 and not options.get("after"):
                options["place"] = str(rng.choice(["first", "last"])) if not place else ""
            parts.append(Part(f"part {place}", role, **options))
        try:
            found.append(Script(f"query {number}", f"query {number}", tuple(parts)))
        except CdrError:  # what comes after the end
            found.append(Script(f"query {number}", f"query {number}", parts[:1]))
    return found


def owners(messages: int, seed: int) -> np.ndarray:
    "Messages of conversations of 2 and more, 5.5 on average; many are short and few are long, as in logs of chats."
    n = max(1, round(messages * 9_146 / 50_000))
    rng = np.random.default_rng(seed)
    return np.repeat(np.arange(n), 2 + rng.multinomial(messages - 2 * n, rng.dirichlet(np.ones(n))))


def corpus(owner: np.ndarray, n_queries: int) -> dict:
    "What a search needs, as `aligned_search` makes it of embeddings: messages, windows of three of them, sessions."
    def mean(rows: np.ndarray) -> np.ndarray:
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    turns, begins = vectors(owner, 2), np.flatnonzero(np.diff(owner, prepend=-1))
    inner = np.flatnonzero(owner[2:] == owner[:-2])
    short = begins[np.diff(np.append(begins, len(owner))) < 3]  # a short conversation is one window
    starts = np.sort(np.concatenate([inner, short]))
    window = turns[starts] + np.where((owner[np.minimum(starts + 2, len(owner) - 1)] == owner[starts])[:, None],
                                      turns[np.minimum(starts + 2, len(owner) - 1)], 0)
    return {"queries": vectors(np.arange(n_queries), 1), "turns": turns, "owner": owner, "window": mean(window),
            "window_owner": owner[starts], "session": mean(np.add.reduceat(turns, begins)),
            "roles": (np.arange(len(owner)) - np.repeat(begins, np.diff(np.append(begins, len(owner))))) % 2}


def aligned(data: dict, asked: list, views: bool = True, **options):
    "The search as `aligned_search` calls it."
    from cdr_lib.retrieval.alignment import Side, View, aligned_topk

    n = int(data["owner"][-1]) + 1
    counts = [len(script.parts) for script in asked]
    session = Side(data["session"], np.arange(n))
    parts = np.ascontiguousarray(np.repeat(data["queries"], counts, axis=0)[:, ::-1])  # other vectors than those of the queries
    return aligned_topk(
        asked, parts, Side(data["turns"], data["owner"]), np.array(["user", "assistant"])[data["roles"]],
        names(data), [View(0.25, data["queries"], Side(data["window"], data["window_owner"])),
                      View(0.15, data["queries"], session)] if views else (), (parts, session), k=K, **options)


def plain(data: dict):
    from cdr_lib.retrieval.dense import dense_topk

    return dense_topk(data["queries"], data["turns"], data["owner"], names(data), K)


def names(data: dict) -> list[str]:
    return [f"c{i:06}" for i in range(int(data["owner"][-1]) + 1)]


_CHILD = """
import sys
import numpy as np
from tests.bench.bench_aligned import aligned, scripts
data = dict(np.load(sys.argv[1]))
asked = scripts(len(data["queries"]))
few = data | {"queries": data["queries"][:4]}
aligned(few, asked[:4])  # libraries are loaded
def kib(name): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
before = kib("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
aligned(data, asked)
print((kib("VmHWM") - before) / 2**10, kib("VmHWM") / 2**10)
"""


def peak_mib(data: dict) -> tuple[float | None, float | None]:
    "Peak memory of the call beyond its input, and of the whole process; None where the system does not tell."
    if sys.platform != "linux":
        return None, None
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/data.npz", **data)
        child = subprocess.run([sys.executable, "-c", _CHILD, f"{folder}/data.npz"], stdout=subprocess.PIPE, text=True,
                               check=True, cwd=Path(__file__).parents[2])
    call, whole = map(float, child.stdout.splitlines()[-1].split())
    return call, whole


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    n_queries, n_turns, repeats = (200, 5_000, 1) if quick else (1_583, 50_000, 3)
    owner = owners(n_turns, 3)
    data, asked = corpus(owner, n_queries), scripts(n_queries)
    n = int(owner[-1]) + 1
    parts = sum(len(script.parts) for script in asked)
    case = f"{n_queries:,} queries of {parts:,} parts x {n:,} conversations of {n_turns:,} messages"
    odd = odd_scripts(n_queries, 0)
    (plain_s, _), (alone_s, _), (views_s, _), (odd_s, _) = best_times(
        repeats, partial(plain, data), partial(aligned, data, asked, False), partial(aligned, data, asked),
        partial(aligned, data, odd, False))
    call, whole = peak_mib(data)
    rows = [{"case": f"{what}, {case}", "ours_s": seconds, "reference_s": plain_s, "ratio": plain_s / seconds,
             "target": target if not quick else None, "peak_mib": peak,
             "note": f"{seconds / plain_s:.2f} times the plain search of messages{more}; best of {repeats} in turns"}
            for what, seconds, target, peak, more in (
                ("alignment alone", alone_s, LIMIT, None, ", 3 allowed"),
                ("aligned search with windows and sessions", views_s, LIMIT, call,
                 ", 3 allowed; peak beyond the input, under 1,024 MiB wanted"
                 + (f", whole process {whole:.0f} MiB" if whole else "")),
                ("alignment alone, operators at random", odd_s, None, None,
                 f"; {sum(len(script.parts) for script in odd):,} parts in hardly two scripts of one shape"))]

    sizes = (2_500, 5_000, 10_000) if quick else (10_000, 20_000, 50_000, 100_000)
    few = scripts(n_queries // 4)
    grown = [corpus(owners(size, 3), len(few)) for size in sizes]
    times = [seconds for seconds, _ in best_times(repeats, *(partial(aligned, more, few) for more in grown))]
    exponent = np.polyfit(np.log(sizes), np.log(times), 1)[0]
    for size, seconds in zip(sizes, times):
        last = size == sizes[-1]
        rows.append({"case": f"aligned search, {len(few):,} queries x {size:,} messages", "ours_s": seconds,
                     "reference_s": None, "ratio": times[0] / sizes[0] * size / seconds,
                     "target": 0.75 if last and not quick else None,
                     "note": f"{seconds / size * 1e6:.1f} us a message; ratio: time per message at {sizes[0]:,} to that here, "
                             f"1 is linear{f'; exponent {exponent:.2f}' if last else ''}"})

    # The same messages, but one conversation goes on and on: its positions must not cost what those of all do.
    sizes = np.bincount(owner)
    tail = 200 if quick else 2_000
    cut = np.searchsorted(np.cumsum(sizes), n_turns - tail)
    long = np.concatenate([owner[owner < cut], np.full(n_turns - int((owner < cut).sum()), cut)])
    odd = corpus(long, len(few))
    usual = corpus(owner, len(few))
    (usual_s, _), (odd_s, _), (plain_s, _) = best_times(
        repeats, partial(aligned, usual, few), partial(aligned, odd, few), partial(plain, odd))
    rows.append({"case": f"aligned search, {len(few):,} queries x {n_turns:,} messages, one conversation of "
                         f"{int(np.bincount(long).max()):,}", "ours_s": odd_s, "reference_s": usual_s, "ratio": usual_s / odd_s,
                 "target": 0.5 if not quick else None,
                 "note": f"reference: as many messages in short conversations; plain search of the messages {plain_s:.3f} s"})
    return rows


if __name__ == "__main__":
    for row in bench("--quick" in sys.argv):
        print(json.dumps(row))
