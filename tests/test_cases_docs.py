"""Cases DOC-01 (text in Markdown and HTML) and DOC-02 (exported modules stand alone)."""
import ast
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from cdr_lib.core.config import project_root, write_json, write_text
from cdr_lib.reporting.site import build_site
from cdr_lib.reporting.tables import Table

from .browser import browse

ROOT = project_root()
SETTINGS = "[DEFAULT]\nlib_name = demo\nlib_path = demo\nnbs_path = nbs\nuser = someone\nrepo = demo\nauthor = A. Person\nrecursive = True\n"
EXPORTED = sorted(path for path in (ROOT / "cdr_lib").rglob("*.py") if path.name != "__init__.py" and path.name != "_modidx.py")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


# DOC-01

PRICES = [["kettle", "$31.00 - $45.50"], ["a|b <i>x</i>", "$5"]]


@pytest.mark.browser
def test_DOC_01_prices_pipes_and_markup_are_shown_as_written(tmp_path):
    """The case's table in every way that it can reach a page; what is rendered is what was written."""
    write_text(tmp_path / "settings.ini", SETTINGS)
    table = Table(pd.DataFrame(PRICES, columns=["item", "price"]), title="Prices from $5 to $6")
    cells = [new_markdown_cell("# Prices"), new_markdown_cell("A kettle costs $31.00 - $45.50, a formula is $a+b$."),
             new_markdown_cell(table.to_markdown())]
    for output in ({"text/html": table.to_html()}, {"text/markdown": table.to_markdown()}, {"text/html": table.frame.to_html(index=False)}):
        cells.append(new_code_cell("table", outputs=[nbformat.v4.new_output("display_data", data=output)]))
    for path, made in ((tmp_path / "nbs" / "index.ipynb", [new_markdown_cell("# Index")]), (tmp_path / "nbs" / "core" / "00_prices.ipynb", cells)):
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(new_notebook(cells=made), path)
    folder = tmp_path / "reports" / "sample" / "cdr" / "tables"
    write_text(folder / "prices.md", table.to_markdown())
    write_json(folder / "prices.json", {"kind": "table", "title": table.title, "note": "", "sources": []})

    site = build_site(root=tmp_path, execute=False).parent
    with browse(site) as browser:
        page = browser.open("core/00_prices.html")
        page.wait_for_selector("mjx-container svg")  # the one formula of the page is set, so MathJax has been over all of it
        assert page.locator("mjx-container").count() == 1
        assert "A kettle costs $31.00 - $45.50, a formula is" in page.locator("article").inner_text()
        shown = [[[cell.inner_text() for cell in row.locator("td").all()] for row in found.locator("tbody tr").all()]
                 for found in page.locator("article table").all()]
        assert shown == [PRICES] * 4
        assert page.locator("article table mjx-container, article table .math, article table i").count() == 0
        page = browser.open("reports/cdr_tables.html")
        assert [[cell.inner_text() for cell in row.locator("td").all()] for row in page.locator("article tbody tr").all()] == PRICES
        assert page.locator("article h2").inner_text().startswith("Prices from $5 to $6")
        assert page.locator("mjx-container, .math").count() == 0


# DOC-02

def undefined_names(*paths: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821,F822,F823",
                           "--output-format", "json", *map(str, paths)], capture_output=True, text=True)
    return [f"{Path(item['filename']).name}:{item['location']['row']}: {item['message']}" for item in json.loads(done.stdout)]


def export(root: Path) -> None:
    """Run the export in a project's folder, in a process of its own: nbdev keeps the configuration it first read."""
    done = subprocess.run([sys.executable, "-c", "from nbdev.doclinks import nbdev_export; nbdev_export()"],
                          cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_DOC_02_an_import_in_a_hidden_cell_is_found(tmp_path):
    """The case's notebook: its own test passes, the exported module does not."""
    write_text(tmp_path / "settings.ini", SETTINGS)
    cells = ["#| default_exp core", "#| hide\nimport json as J", "#| export\ndef f(x): return J.dumps(x)", "f(1)"]
    (tmp_path / "nbs").mkdir()
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells]), tmp_path / "nbs" / "00_core.ipynb")
    export(tmp_path)
    line = (tmp_path / "demo" / "core.py").read_text().splitlines().index("def f(x): return J.dumps(x)") + 1
    assert undefined_names(tmp_path / "demo" / "core.py") == [f"core.py:{line}: Undefined name `J`"]


def test_DOC_02_no_exported_module_uses_an_undefined_name():
    assert undefined_names(ROOT / "cdr_lib") == []


def test_DOC_02_every_exported_module_imports_in_a_fresh_process(tmp_path):
    """Outside of the project, with nothing but the module itself loaded before its names are looked up."""
    code = "import importlib, sys; module = importlib.import_module(sys.argv[1]); [getattr(module, name) for name in getattr(module, '__all__', ())]"

    def load(path: Path) -> str:
        done = subprocess.run([sys.executable, "-c", code, module_name(path)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return f"{module_name(path)}: {done.stderr}" if done.returncode else ""

    with ThreadPoolExecutor(2) as pool:
        assert [failure for failure in pool.map(load, EXPORTED) if failure] == []
    assert list(tmp_path.iterdir()) == []  # importing writes nothing


def test_DOC_02_heavy_libraries_are_not_imported_with_the_modules():
    """An import of torch at the top would make every command slow and break where an extra is missing."""
    heavy = {"torch", "sentence_transformers", "transformers", "openvino", "openai", "mteb"}
    for path in EXPORTED:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not heavy & {name.partition(".")[0] for name in names}, module_name(path)


def test_DOC_02_exported_code_works_outside_the_notebooks(tmp_path):
    """A smoke test of each package through its public names, in a fresh process in an empty folder."""
    code = """
from cdr_lib.core.conversation import Conversation
from cdr_lib.core.config import json_dumps
from cdr_lib.retrieval.segment import segment
from cdr_lib.retrieval.bm25 import BM25
from cdr_lib.retrieval.run import Run
from cdr_lib.evaluation.metrics import score_run
talks = [Conversation.make("a", ("user", "my kettle broke"), ("assistant", "I am sorry")), Conversation.make("b", ("user", "hello"))]
units = segment(talks, "session")
scores = BM25(units.texts).scores(["kettle broke"]).toarray()[0]
run = Run.from_dict({"q": {units.conversation_ids[i]: float(score) for i, score in zip(units.conversation, scores) if score > 0}}, name="bm25")
frame = score_run(run, {"q": {"a": 1}}, measures=["RR@10"])
print(json_dumps({"top": list(run.to_dict()["q"]), "value": float(frame["value"].iloc[0])}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"top": ["a"], "value": 1.0}


def test_DOC_02_export_leaves_no_difference(tmp_path):
    for name in ("nbs", "cdr_lib"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    shutil.copy(ROOT / "settings.ini", tmp_path)
    before = {path.relative_to(tmp_path): path.read_text(encoding="utf-8") for path in (tmp_path / "cdr_lib").rglob("*.py")}
    export(tmp_path)
    after = {path.relative_to(tmp_path): path.read_text(encoding="utf-8") for path in (tmp_path / "cdr_lib").rglob("*.py")}
    changed = sorted(str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    assert changed == [], "run nbdev_export and commit the result"
