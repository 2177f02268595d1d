"""Run the sample report and compare its tables with the committed ones; a second run must find nothing to do.

Tables of measured times are marked as such by the report and may differ. Tables that rest on models trained in the report
may differ on another kind of processor: they are named, and their rows and columns must be the same.
"""
import json
import subprocess
import sys
from pathlib import Path

from cdr_lib.core.config import reports_dir

FOLDER = reports_dir() / "sample"
CDR = str(Path(sys.executable).parent / "cdr")


def tables() -> tuple[dict[str, str], set[str]]:
    "CSV text of each table, and which of them rest on models trained in the report."
    found, trained = {}, set()
    for path in sorted(FOLDER.glob("*/tables/*.json")):
        about, name = json.loads(path.read_text(encoding="utf-8")), str(path.relative_to(FOLDER).with_suffix(""))
        if not about.get("measured"):
            found[name] = path.with_suffix(".csv").read_text(encoding="utf-8")
        if about.get("trained"):
            trained.add(name)
    return found, trained


def frame_of(text: str) -> list[str]:
    "The head and the number of rows."
    lines = text.splitlines()
    return [lines[0], str(len(lines))]


def main() -> None:
    committed, _ = tables()
    if subprocess.run([CDR, "report", "--profile", "sample"]).returncode:
        sys.exit("the sample report failed")
    made, trained = tables()
    differing = sorted(name for name in committed.keys() | made.keys() if committed.get(name) != made.get(name))
    rounded = [name for name in differing if name in trained & committed.keys()
               and frame_of(committed[name]) == frame_of(made[name])]
    if rounded:
        print("these tables rest on models trained here and differ from the committed ones:\n  " + "\n  ".join(rounded))
    if wrong := [name for name in differing if name not in rounded]:
        sys.exit("these tables of the sample report differ from the committed ones:\n  " + "\n  ".join(wrong))
    again = subprocess.run([CDR, "report", "--profile", "sample", "--dry-run"], capture_output=True, text=True)
    if again.returncode or "would run" in again.stdout:
        sys.exit(f"a second run of the sample report would not find everything unchanged:\n{again.stdout}{again.stderr}")
    print(f"{len(made) - len(rounded)} tables equal the committed ones; a second run has nothing to do")


if __name__ == "__main__":
    main()
