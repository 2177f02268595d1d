"""All persona x knowledge pairs of many turns in one call, against a cross-encoder asked persona by persona.

The reference is the loop of the paper's released program: turn by turn and persona by persona in the order given,
`CrossEncoder.predict` on the ten pairs of one persona. Both sides read the same few turns, spread evenly over all of them;
with `--full` they read all, which takes a CPU many minutes. Run alone with
`python tests/bench/bench_pkicr.py [--quick] [--full]`, or with the others by `make bench`.
"""
import json
import sys
import tempfile
import time

import numpy as np
import psutil


def paragraphs(n: int) -> list:
    "`n` turns in dialogues of five rounds, five personas and ten paragraphs of very different length, in real words."
    from cdr_lib.core.config import data_dir, read_json
    from cdr_lib.core.conversation import Turn
    from cdr_lib.pkicr.focus import GroundedTurn

    rng = np.random.default_rng(0)
    corpus = read_json(data_dir() / "sample" / "cdr" / "corpus.json")
    words = " ".join(corpus.values()).replace("user:", "").replace("assistant:", "").split()

    def text(least: int, most: int) -> str:
        size = int(rng.integers(least, most + 1))
        start = int(rng.integers(0, len(words) - size))
        return " ".join(words[start:start + size])

    found = []
    for number in range(-(-n // 5)):
        personas = tuple(text(5, 12) for _ in range(5))
        sizes = np.clip(rng.lognormal(np.log(60), 0.6, 10), 8, 220).astype(int)
        knowledge = tuple(text(size, size) for size in sizes)
        found += [GroundedTurn(f"D{number}", place + 1, (Turn("user", text(6, 18)),), personas, knowledge)
                  for place in range(5)]
    return found[:n]


def sample(n: int) -> list:
    "The first `n` turns of the project's sample."
    from cdr_lib.core.config import data_dir
    from cdr_lib.pkicr.focus import read_focus

    return list(read_focus(data_dir() / "sample" / "focus" / "train.json"))[:n]


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
        scorers = {"float32 in OpenVINO": CrossScorer(folder, backend="openvino"),
                   "float32": CrossScorer(folder, device="cpu", dtype="float32"),
                   "bfloat16": CrossScorer(folder, device="cpu", dtype="bfloat16")}
        for make, note, timed in ((paragraphs, "paragraphs of 8 to 220 words", 20), (sample, "the sample", 20)):
            every = make(500)
            size = 2 if quick else len(every) if "--full" in sys.argv else timed
            some = [every[place] for place in np.linspace(0, len(every) - 1, size).astype(int)]
            pairs = make_pairs(some)
            texts = [pair.texts for pair in pairs.pairs]

            def loop(texts=texts) -> np.ndarray:
                return np.concatenate([reference.predict(texts[start:start + 10]) for start in range(0, len(texts), 10)])

            reference.predict(texts[:10])  # warms up
            for scorer in scorers.values():
                scorer.score(pairs.pairs[:10], progress=False)
            runs = {**{dtype: lambda scorer=scorer, pairs=pairs: scorer.score(pairs, progress=False)
                       for dtype, scorer in scorers.items()}, "reference": loop}
            times, found = dict.fromkeys(runs, float("inf")), {}
            before, peak = process.memory_info().rss, 0
            # They take turns, so that a busy moment of the machine hits all of them.
            for _ in range(1 if quick else 2):
                for name, run in runs.items():
                    start = time.perf_counter()
                    found[name] = run()
                    times[name] = min(times[name], time.perf_counter() - start)
                    if "reference" not in found:
                        peak = max(peak, process.memory_info().rss)
            worst = {name: float(np.abs(found[name] - found["reference"]).max()) for name in scorers}
            assert all(off < (0.05 if name == "bfloat16" else 1e-5) for name, off in worst.items()), worst
            for name in scorers:
                rows.append({
                    "case": f"PK-ICR, all pairs by a cross-encoder, {name}: {note}", "ours_s": times[name],
                    "reference_s": times["reference"], "ratio": times["reference"] / times[name],
                    "target": 3.0 if "OpenVINO" in name else None,
                    "checked": f"scores within {worst[name]:.0e}", "peak_mib": max(peak - before, 0) / 2**20,
                    "note": f"{size} of {len(every)} turns, {len(pairs):,} pairs, {len(pairs) / times[name]:.0f} pairs/s; "
                            f"reference: fp32, persona by persona; {threads} threads on both sides"})
    every = sample(10 if quick else 100)
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
