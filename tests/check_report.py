"""Run the sample report and compare its tables with the committed ones; a second run must find nothing to do.

Tables of measured times are marked as such by the report and may differ.
"""
import json
import subprocess
import sys
from pathlib import Path

from cdr_lib.core.config import reports_dir

FOLDER = reports_dir() / "sample"
CDR = str(Path(sys.executable).parent / "cdr")


def tables() -> dict[str, str]:
    found = {}
    for about in sorted(FOLDER.glob("*/tables/*.json")):
        if not json.loads(about.read_text(encoding="utf-8")).get("measured"):
            found[str(about.relative_to(FOLDER).with_suffix(""))] = about.with_suffix(".csv").read_text(encoding="utf-8")
    return found


def main() -> None:
    committed = tables()
    if subprocess.run([CDR, "report", "--profile", "sample"]).returncode:
        sys.exit("the sample report failed")
    made = tables()
    differing = sorted(name for name in committed.keys() | made.keys() if committed.get(name) != made.get(name))
    if differing:
        sys.exit("these tables of the sample report differ from the committed ones:\n  " + "\n  ".join(differing))
    again = subprocess.run([CDR, "report", "--profile", "sample", "--dry-run"], capture_output=True, text=True)
    if again.returncode or "would run" in again.stdout:
        sys.exit(f"a second run of the sample report would not find everything unchanged:\n{again.stdout}{again.stderr}")
    print(f"{len(made)} tables equal the committed ones; a second run has nothing to do")


if __name__ == "__main__":
    main()
