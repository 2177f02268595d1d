"""The pipeline of curation on generated dirty corpora: conversations a second by stage, growth, peak memory.

`python -m tests.bench curate` measures 30,000 and 100,000 conversations. `python -m tests.bench.bench_curate 1000000` runs one
size and prints all that it measured; the corpus is made in `.cache/bench-curate` (0.3 GB a million) and stays there.
"""
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STAGES = ["exact", "heuristics", {"fuzzy": {"threshold": 0.8}}, "language", {"pii": "redact"}]
PART = 100_000


def corpus(n: int) -> Path:
    "A folder of Parquet files with `n` generated conversations."
    from cdr_lib.core.config import cache_dir
    from cdr_lib.core.io import write_parquet
    from cdr_lib.curation.dirty import dirty_corpus

    folder = cache_dir() / "bench-curate" / str(n)
    for start in range(0, n, PART):
        path = folder / f"{start:09d}.parquet"
        if not path.is_file():
            write_parquet(dirty_corpus(min(PART, n - start), start=start), path)
    return folder


def run(n: int, workers: int = 1, stages: list | None = None) -> dict:
    "Curate in a process of its own, so that the peak of memory is its own."
    source = corpus(n)
    out = Path(tempfile.mkdtemp(dir=source.parent))
    plan = {"stages": stages or STAGES, "caps": {"share_per_source": None, "cluster": None}}
    code = ("import json, sys; from cdr_lib.curation.pipeline import curate\n"
            "result = curate(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3], workers=int(sys.argv[4]), progress=False)\n"
            "print(len(result))")
    try:
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, json.dumps(plan), str(out), str(source), str(workers)], check=True,
                              capture_output=True, text=True)
        found = json.loads((out / "times.json").read_text()) | {"wall": time.perf_counter() - began, "kept": int(done.stdout)}
        found["disk"] = {part: sum(path.stat().st_size for path in (out / part).rglob("*") if path.is_file())
                         for part in ("pool", "work", "corpus")}
        return found
    finally:
        shutil.rmtree(out)


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    from cdr_lib.curation.dirty import dirty_corpus

    began = time.perf_counter()
    small, large = (1_000, 3_000) if quick else (30_000, 100_000)
    count = sum(1 for _ in dirty_corpus(small))
    rows = [{"case": "curate: generate", "ours_s": time.perf_counter() - began, "note": f"{count:,} conversations"}]
    found = {n: run(n) for n in (small, large)}
    for name, seconds in found[large]["seconds"].items():
        rows.append({"case": f"curate: {name}", "ours_s": seconds, "note": f"{large / max(seconds, 1e-3):,.0f} conversations/s"})
    total = {n: sum(each["seconds"].values()) for n, each in found.items()}
    growth = math.log(total[large] / total[small]) / math.log(large / small)
    rows.append({"case": "curate: all stages", "ours_s": total[large], "peak_mib": found[large]["peak_bytes"] / 2**20,
                 "note": f"{large:,} conversations, {found[large]['kept']:,} left, 1 process; growth exponent from {small:,}: {growth:.2f}"})
    return rows


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1), indent=1))
