"""Export, test and clean the notebooks; fail if any of it changes a file (`--write`: keep the changes instead).

A difference means that somebody edited `cdr_lib/` by hand, or a notebook without exporting, or left outputs in it.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

from cdr_lib.core.config import file_hash, project_root, write_text

ROOT = project_root()
BIN = Path(sys.executable).parent


def notebooks() -> list[Path]:
    return sorted(path for path in (ROOT / "nbs").rglob("*.ipynb") if not any(part[0] in "._" for part in path.relative_to(ROOT).parts))


def snapshot() -> dict[str, str]:
    files = [*notebooks(), *(ROOT / "cdr_lib").rglob("*.py"), ROOT / "README.md"]
    return {str(path.relative_to(ROOT)): file_hash(path) for path in files if path.exists()}


def strip_outputs(path: Path) -> None:
    """Notebooks are kept without outputs: the site executes them, and diffs show what a person changed."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if any(cell["outputs"] or cell["execution_count"] for cell in cells):
        for cell in cells:
            cell["outputs"], cell["execution_count"] = [], None
        write_text(path, json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n")


def run(*command: str) -> None:
    done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed")


def main() -> None:
    before = snapshot()
    run("nbdev_export")
    if "--no-test" not in sys.argv:
        print(f"testing {len(notebooks())} notebooks", flush=True)
        run("nbdev_test", "--n_workers", "2", "--do_print")
    for path in notebooks():
        strip_outputs(path)
    run("nbdev_clean")
    run("python", "-c", "from cdr_lib.reporting.book import write_readme; write_readme()")
    after = snapshot()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed and "--write" not in sys.argv:
        sys.exit("export, test and clean changed files; run `make nbs` and commit them:\n  " + "\n  ".join(changed))
    print(f"{len(after)} files, {len(changed)} changed", *changed, sep="\n  ")


if __name__ == "__main__":
    main()
