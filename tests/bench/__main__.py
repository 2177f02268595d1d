"""Speed and memory as ratios: ours and the reference side by side in one process. `make bench` writes reports/bench/."""
import argparse
import importlib
import sys
import time
from pathlib import Path

from cdr_lib.core.config import CdrError, nan_to_null, read_json, reports_dir, write_json, write_text
from cdr_lib.evaluation.efficiency import hardware

MODULES = [path.stem.removeprefix("bench_") for path in sorted(Path(__file__).parent.glob("bench_*.py"))]


def markdown(rows: list[dict]) -> str:
    def cell(row: dict, key: str, form: str = "{}") -> str:
        return "" if row.get(key) is None else form.format(row[key])

    lines = ["| case | ours, s | reference, s | ratio | target | reached | peak, MiB | note |", "|---|--:|--:|--:|--:|---|--:|---|"]
    for row in rows:
        reached = "" if not row.get("target") or not row.get("ratio") else "yes" if row["ratio"] >= row["target"] else "NO"
        lines.append("| " + " | ".join([
            row["case"], cell(row, "ours_s", "{:.3f}"), cell(row, "reference_s", "{:.3f}"), cell(row, "ratio", "{:.2f}"),
            cell(row, "target", "{:.1f}"), reached, cell(row, "peak_mib", "{:.0f}"), cell(row, "note")]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="NAME", help=f"which benchmarks ({', '.join(MODULES)}); all by default")
    parser.add_argument("--quick", action="store_true", help="smaller inputs: checks that the benchmark runs, writes no file")
    args = parser.parse_args()
    if unknown := set(args.only) - set(MODULES):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}: known are {', '.join(MODULES)}")
    rows = []
    for name in args.only or MODULES:
        start = time.perf_counter()
        try:
            found = importlib.import_module(f"tests.bench.bench_{name}").bench(quick=args.quick)
        except CdrError as error:
            sys.exit(f"{name}: {error}")
        rows += [{"benchmark": name, **row} for row in found]
        print(f"\n## {name} ({time.perf_counter() - start:.0f} s)\n\n{markdown(found)}", flush=True)
    if not args.quick:
        folder = reports_dir() / "bench"
        machine = nan_to_null(hardware())
        before = read_json(folder / "bench.json") if (folder / "bench.json").is_file() else {}
        # What was not measured now stays as it was, if it was measured on such a machine.
        rest = [row for row in before.get("rows", ()) if row["benchmark"] in set(MODULES) - set(args.only or MODULES)]
        if rest and before["hardware"] != machine:
            print(f"left out: {len(rest)} rows that were measured on another machine")
        elif rest:
            rows += rest
        rows.sort(key=lambda row: MODULES.index(row["benchmark"]))
        write_json(folder / "bench.json", {"hardware": machine, "rows": nan_to_null(rows)})
        write_text(folder / "bench.md", f"# Benchmarks\n\nWritten by `make bench`: ours and the reference in one process.\n\n{markdown(rows)}")
        print(f"written to {folder.relative_to(reports_dir().parent)}")


if __name__ == "__main__":
    main()
