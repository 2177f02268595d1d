"""All persona x knowledge pairs of many turns in one call, against a cross-encoder asked persona by persona.

The reference is the loop of the paper's released program: turn by turn and persona by persona in the order given,
`CrossEncoder.predict` on the ten pairs of one persona. Both sides read the same few turns, spread evenly over all; with
`--full` they read all of them, which takes many minutes on a CPU. Run alone with `python tests/bench/bench_pkicr.py [--quick] [--full]`, or with the
others by `make bench`.
"""
import json
import sys
import tempfile
import time

import numpy as np
import psutil


def turns(n: int, knowledge_words: str) -> list:
    "`n` turns in dialogues of five rounds, five personas and ten paragraphs, cut from the sample's conversations."
    from cdr_lib.core.config import data_dir, read_json
    from cdr_lib.core.conversation import Turn
    from cdr_lib.pkicr.focus import GroundedTurn

    rng = np.random.default_rng(0)
    corpus = read_json(data_dir() / "sample" / "cdr" / "corpus.json")
    words = " ".join(corpus.values()).replace("user:", "").replace("assistant:", "").split()

    def text(size: int) -> str:
        start = int(rng.integers(0, len(words) - size))
        return " ".join(words[start:start + size])

    def paragraph() -> str:
        if knowledge_words == "even":
            return text(int(rng.integers(15, 41)))
        return text(int(np.clip(rng.lognormal(np.log(60), 0.6), 8, 220)))

    found = []
    for number in range(-(-n // 5)):
        personas = tuple(text(int(rng.integers(5, 13))) for _ in range(5))
        knowledge = tuple(paragraph() for _ in range(10))
        found += [GroundedTurn(f"D{number}", place + 1, (Turn("user", text(int(rng.integers(6, 19)))),), personas, knowledge)
                  for place in range(5)]
    return found[:n]


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    import torch
    from sentence_transformers import CrossEncoder

    from cdr_lib.core.models import packaged_minilm
    from cdr_lib.pkicr.joint import CrossScorer
    from cdr_lib.pkicr.prompts import make_pairs
    from cdr_lib.pkicr.scorers import BiScorer

    process, rows = psutil.Process(), []
    threads = torch.get_num_threads()

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        reference = CrossEncoder(packaged_minilm(), num_labels=1, device="cpu", local_files_only=True)
        reference.save_pretrained(folder)
        scorers = {dtype: CrossScorer(folder, device="cpu", dtype=dtype) for dtype in ("float32", "bfloat16")}
        for lengths, note, total, timed in (
                ("uneven", "paragraphs of 8 to 220 words, as in an encyclopaedia", 500, 5),
                ("even", "knowledge of 15 to 40 words, as in the sample", 500, 10)):
            every = turns(total, lengths)
            size = 2 if quick else total if "--full" in sys.argv else timed
            some = [every[place] for place in np.linspace(0, total - 1, size).astype(int)]
            pairs = make_pairs(some)
            texts = [pair.texts for pair in pairs.pairs]

            def loop() -> np.ndarray:
                return np.concatenate([reference.predict(texts[start:start + 10]) for start in range(0, len(texts), 10)])

            reference.predict(texts[:10])  # warms up
            for scorer in scorers.values():
                scorer.score(pairs.pairs[:10], progress=False)
            runs = {"reference": loop, **{dtype: lambda scorer=scorer: scorer.score(pairs, progress=False)
                                          for dtype, scorer in scorers.items()}}
            times, found = dict.fromkeys(runs, float("inf")), {}
            before, peak = process.memory_info().rss, 0
            # They take turns, so that a busy moment of the machine hits all of them.
            for _ in range(1 if quick else 2):
                for name, run in runs.items():
                    start = time.perf_counter()
                    found[name] = run()
                    times[name] = min(times[name], time.perf_counter() - start)
                    peak = max(peak, process.memory_info().rss)
            worst = {dtype: float(np.abs(found[dtype] - found["reference"]).max()) for dtype in scorers}
            assert worst["float32"] < 1e-5 and worst["bfloat16"] < 0.05, worst
            for dtype, target in (("float32", 3.0), ("bfloat16", None)):
                rows.append({
                    "case": f"PK-ICR, all pairs by a cross-encoder, {dtype}: {note}", "ours_s": times[dtype],
                    "reference_s": times["reference"], "ratio": times["reference"] / times[dtype], "target": target,
                    "checked": f"scores within {worst[dtype]:.0e}", "peak_mib": (peak - before) / 2**20,
                    "note": f"{size} of {total} turns, {len(pairs):,} pairs, {len(pairs) / times[dtype]:.0f} pairs/s; reference: "
                            f"fp32, persona by persona; {threads} threads on both sides; scores within {worst[dtype]:.0e}"})
    every = turns(50 if quick else 500, "even")
    bi, pairs = BiScorer("minilm", device="cpu"), make_pairs(every)
    start = time.perf_counter()
    bi.score(pairs, progress=False)
    fast = time.perf_counter() - start
    rows.append({"case": "PK-ICR, all pairs by a bi-encoder, float32", "ours_s": fast, "reference_s": None, "ratio": None,
                 "target": None, "checked": "", "peak_mib": None,
                 "note": f"{len(every)} turns, {len(pairs):,} pairs of which each distinct text is embedded once"})
    return rows


if __name__ == "__main__":
    for line in bench("--quick" in sys.argv):
        print(json.dumps(line))
