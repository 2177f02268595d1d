"""Rules of the house that a machine can check: layers, notebooks as small books, nothing private or generated in git."""
import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from cdr_lib.core.config import project_root

ROOT = project_root()
# An import only ever points down, inside a package to a lower number.
LAYERS = {"core": 0, "retrieval": 1, "curation": 1, "evaluation": 2, "pkicr": 3, "d2d": 3, "benchmark": 3,
          "reporting": 4, "cli_benchmark": 5, "cli_curation": 5, "cli_d2d": 5, "cli_pkicr": 5, "cli": 6}


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def notebooks(folder: str = "") -> list[Path]:
    return sorted(path for path in (ROOT / "nbs" / folder).rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)


def cells(path: Path) -> list[dict]:
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in found]


def number(module: str) -> tuple[int, str]:
    """Reading order of a module inside its package, from its notebook's number and letter."""
    package, _, name = module.removeprefix("cdr_lib.").partition(".")
    for path in notebooks(package):
        if re.sub(r"^\d+[a-z]?_", "", path.stem) == name:
            digits, letter = re.match(r"(\d*)([a-z]?(?=_))?", path.stem).groups()
            return int(digits or -1), letter or ""
    return -1, ""


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # nbdev writes the package's own imports relative to the module.
            base = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            found.add(".".join([*base, *([node.module] if node.module else [])]))
    return {name for name in found if name.startswith("cdr_lib.")}


def test_imports_point_down():
    wrong = []
    for path in (ROOT / "cdr_lib").rglob("*.py"):
        if path.name.startswith("_"):
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        package = module.split(".")[1]
        for target in imports(path):
            other = target.split(".")[1]
            ordered = number(target) < number(module) if other == package else LAYERS[other] < LAYERS[package]
            if not ordered and target != module:
                wrong.append(f"{module} imports {target}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: str(path.relative_to(ROOT / "nbs")))
def test_notebook_is_a_small_book(path):
    found = cells(path)
    first = found[0]["source"]
    assert found[0]["cell_type"] == "markdown" and re.match(r"# \S.*\n+> \S", first), "H1 title, then a one-line > blurb"
    assert not any(cell["cell_type"] == "code" and (cell["outputs"] or cell["execution_count"]) for cell in found), "outputs"
    for cell in found:
        if cell["cell_type"] == "code" and cell["source"].startswith("#| export"):
            body = ast.parse(cell["source"]).body
            kinds = {isinstance(node, (ast.Import, ast.ImportFrom)) for node in body}
            assert len(kinds) <= 1, f"imports stand alone in their cell:\n{cell['source'][:200]}"


@pytest.mark.parametrize("path", notebooks("reports"), ids=lambda path: path.stem)
def test_report_notebook_has_one_parameters_cell(path):
    assert sum("parameters" in cell["metadata"].get("tags", []) for cell in cells(path)) == 1


def test_no_machine_paths_or_large_files():
    wrong = []
    for path in tracked():
        name = path.relative_to(ROOT)
        if path.stat().st_size > 2 << 20:
            wrong.append(f"{name}: over 2 MiB")
        if path.suffix in (".png", ".parquet", ".npz", ".gz", ".npy", ".safetensors") or name.parts[0] == ".ci":
            continue
        text = path.read_text(encoding="utf-8")
        for hit in re.findall(r"(?<![\w.~<])/(?:tmp|root|home|work|Users)/[\w.-]+", text):
            wrong.append(f"{name}: {hit}")
    assert not wrong, "\n".join(wrong)


def test_every_exported_module_says_what_it_is():
    for path in (ROOT / "cdr_lib").rglob("*.py"):
        if not path.name.startswith("_"):
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_every_public_name_has_a_docstring():
    wrong = []
    for path in (ROOT / "cdr_lib").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_") and not ast.get_docstring(node):
                wrong.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not wrong, "\n".join(wrong)
