"""The collected failure cases of running notebooks with parameters, and of showing results."""
import datetime
import html.parser
import json
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbdev.clean import clean_jupyter

from cdr_lib.core.config import CdrError, project_root
from cdr_lib.reporting.figures import grouped_bars, metric_lines
from cdr_lib.reporting.index import write_index
from cdr_lib.reporting.parameters import BadParameter
from cdr_lib.reporting.run import Job, Profile, exit_code, run_profile
from cdr_lib.reporting.tables import Table, score_grid

SETTINGS = project_root() / "settings.ini"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty project of its own; edits of the library during the tests do not make its results stale."""
    shutil.copy(SETTINGS, tmp_path / "settings.ini")
    monkeypatch.setenv("CDR_ROOT", str(tmp_path))
    monkeypatch.setattr("cdr_lib.reporting.run.library_hash", lambda: "fixed")
    return tmp_path


def write(project: Path, name: str, parameters: str, *cells: str, tag: str = "parameters", before: str = "") -> Path:
    made = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "language": "python", "display_name": "python3"}})
    made.cells = [nbformat.v4.new_code_cell(source) for source in ([before] if before else []) + [parameters, *cells]]
    made.cells[1 if before else 0].metadata["tags"] = [tag] if tag else []
    path = project / "nbs" / "reports" / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(made, path)
    return path


def printed(project: Path, notebook: str) -> str:
    """Everything that an executed notebook printed."""
    cells = json.loads((project / notebook).read_text(encoding="utf-8"))["cells"]
    return "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))


def strictly_read(folder: Path) -> int:
    """Read every JSON file below a folder as a browser would; the number of files."""
    def refuse(name):
        raise AssertionError(f"{name} in {path}")

    count = 0
    for path in folder.rglob("*"):
        if path.suffix in (".ipynb", ".json", ".jsonl"):
            count += 1
            for text in path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text(encoding="utf-8")]:
                json.loads(text, parse_constant=refuse)
    return count


def refused(jobs: list[Job], *words: str) -> None:
    """The profile is refused in these words, and no notebook was run."""
    with pytest.raises(CdrError) as error:
        run_profile(Profile("t", tuple(jobs)), progress=False)
    for word in words:
        assert word in str(error.value)
    assert not list(project_root().glob("reports/t/*/notebooks/*"))


def test_PPM_01_the_cleaner_keeps_the_tag_and_a_missing_tag_is_refused(project):
    path = write(project, "demo_tag", "x = 1", "print(x)")
    subprocess.run([Path(sys.executable).with_name("nbdev_clean"), "--fname", str(path)], cwd=project, check=True)
    saved = {"type": "notebook", "content": nbformat.read(path, as_version=4)}
    clean_jupyter(path=project, model=saved)  # what JupyterLab's save hook calls
    for notebook in (nbformat.read(path, as_version=4), saved["content"]):
        assert notebook["cells"][0]["metadata"]["tags"] == ["parameters"]
    summary = run_profile(Profile("t", (Job("a", "demo_tag", {"x": 5}),)), progress=False)
    assert summary.status[0] == "ok" and printed(project, summary.notebook[0]) == "5\n"
    shutil.rmtree(project / "reports")
    write(project, "demo_untagged", "x = 1", "print(x)", tag="")
    refused([Job("a", "demo_untagged", {"x": 5})], "no cell tagged 'parameters'", "exactly one")
    twice = nbformat.read(path, as_version=4)
    twice.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(twice, project / "nbs/reports/demo_twice.ipynb")
    refused([Job("a", "demo_twice", {"x": 5})], "2 cells tagged 'parameters'")
    # The same loss without a missing tag: a later cell sets the default again.
    write(project, "demo_reset", "x = 1", "x = 1", "print(x)")
    refused([Job("a", "demo_reset", {"x": 5})], "sets parameter 'x' again")


def test_PPM_02_nan_is_refused_as_parameter_and_null_as_result(project):
    write(project, "demo_nan", "threshold = 0.5\nlimit = 1.0",
          "from cdr_lib.reporting.provenance import record_values\nrecord_values({'ndcg@10': float('nan'), 'p@10': threshold * limit})",
          "from IPython.display import display\ndisplay({'application/json': {'ndcg@10': float('nan')}}, raw=True)")
    refused([Job("a", "demo_nan", {"threshold": float("nan"), "limit": float("inf")})], "'threshold' is nan", "'limit' is inf")
    refused([Job("a", "demo_nan", {"threshold": np.float64("nan")})], "'threshold' is nan")
    summary = run_profile(Profile("t", (Job("a", "demo_nan"),)), progress=False)
    assert summary.status[0] == "ok", summary.error[0]
    assert pd.isna(summary["ndcg@10"][0]) and summary["p@10"][0] == 0.5
    state = json.loads((project / "reports/t/.state/a.json").read_text())
    assert state["values"] == {"ndcg@10": None, "p@10": 0.5}
    assert strictly_read(project) >= 4  # two notebooks, the state, the manifest
    # Unchanged: read back from the state, still missing and not 0.
    assert pd.isna(run_profile(Profile("t", (Job("a", "demo_nan"),)), progress=False)["ndcg@10"][0])


def test_PPM_03_unknown_names_are_errors_and_awkward_defaults_are_understood(project):
    write(project, "demo_names", "model: str = 'mini'\nsep = 'k=v'\nmode: Literal['u', 'v'] = 'u'", "print(model, sep, mode)",
          before="from typing import Literal")
    refused([Job("a", "demo_names", {"modle": "large"})], "'modle' is unknown", "model: str", "sep: str", "mode: Literal['u', 'v']")
    refused([Job("a", "demo_names", {"mode": "w"})], "'mode' must be Literal['u', 'v']")
    refused([Job("a", "demo_names", {"model": 3})], "'model' must be str, not int 3")
    summary = run_profile(Profile("t", (Job("a", "demo_names", grid=[{"sep": "x=y"}, {"mode": "v"}]),)), progress=False)
    assert [printed(project, path) for path in summary.notebook] == ["mini x=y u\n", "mini k=v v\n"]


def test_PPM_05_values_are_made_plain_before_the_first_run(project):
    text = 'C:\\new "q"\nline2 \u2603 {x} $5'
    write(project, "demo_plain", "d = None\np = None\nn = 0\nt = None\ns = ''", "print([d, p, n, t, s])")
    elsewhere = Path("/", "tmp", "x")
    grid = [{"d": datetime.date(2019, 1, 1)}, {"p": elsewhere}, {"n": np.int64(3)}, {"t": {"range": (1, 2)}}, {"s": text}]
    before = [dict(point) for point in grid]
    # The last point is bad: nothing may have run.
    refused([Job("a", "demo_plain", grid=[*grid, {"t": {1, 2}}])], "t is a set")
    refused([Job("a", "demo_plain", grid=[*grid, {"n": 2.5}])], "'n' must be int")
    # One run for all values, and one for the path, whose place among temporary files is not published.
    merged = {key: value for point in grid for key, value in point.items() if key != "p"}
    summary = run_profile(Profile("t", (Job("a", "demo_plain", merged), Job("b", "demo_plain", grid[1]))), progress=False)
    assert list(summary.status) == ["ok", "ok"]
    assert printed(project, summary.notebook[0]) == f"{['2019-01-01', None, 3, {'range': [1, 2]}, text]}\n"
    injected = json.loads((project / "reports/t/.state/b.json").read_text())["parameters"]
    assert injected == {"p": elsewhere.as_posix()}
    assert grid == before


@pytest.mark.parametrize("workers", [1, 2])
def test_PPM_06_a_failure_is_kept_listed_and_alone(project, workers):
    # `only_first` is declared without a default, so it exists only where it is given.
    write(project, "demo_grid", "a: float = 1\nonly_first: Optional[bool]", "print('only_first' in globals())",
          "from cdr_lib.reporting.provenance import record_values\nrecord_values({'inverse': 1/a})", before="from typing import Optional")
    shared = {"a": 1, "only_first": True}
    profile = Profile("t", (Job("grid", "demo_grid", grid=[shared, {"a": 0}, {"a": 2}]),))
    summary = run_profile(profile, workers=workers, progress=False)
    assert list(summary.status) == ["ok", "failed", "ok"] and len(summary) == 3
    assert summary.error[1].startswith("ZeroDivisionError") and exit_code(summary) != 0
    assert summary.notebook.notna().all() and all((project / path).is_file() for path in summary.notebook)
    assert [printed(project, path).strip() for path in summary.notebook] == ["True", "False", "False"]
    # Cell 5 of the executed notebook: imports, parameters, injected parameters, print, division.
    assert summary.cell[1] == 5
    cells = json.loads((project / summary.notebook[1]).read_text())["cells"]
    assert cells[4]["outputs"][0]["ename"] == "ZeroDivisionError" and len(cells) == 5
    assert summary.inverse[0] == 1.0 and pd.isna(summary.inverse[1]) and summary.inverse[2] == 0.5
    assert shared == {"a": 1, "only_first": True}
    page = write_index("t").read_text()
    assert "ZeroDivisionError" in page and "1 failed" in page and "cell 5" in page
    again = run_profile(profile, workers=workers, progress=False)
    assert list(again.status) == ["unchanged", "failed", "unchanged"] and again.inverse[2] == 0.5


def test_PPM_08_no_secret_and_no_local_path_in_anything(project, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-456")
    write(project, "demo_key", "model = 'm'",
          "import os, warnings\nfrom pathlib import Path\nfrom cdr_lib.reporting.provenance import record",
          "class Client:\n    def __init__(self, key): self.key = key\n    def __repr__(self): return f'<Client {model} key={self.key!r}>'\n"
          "client = Client(os.environ['OPENAI_API_KEY'])\nclient",
          "warnings.warn(str(client))\nprint(Path.cwd() / 'data', Path.home() / '.config')",
          "from IPython.display import HTML\nHTML(f'<b>{client.key}</b>')",
          "raise RuntimeError(f'cannot reach {client!r} from {Path.cwd()}')")
    refused([Job("a", "demo_key", {"model": "m", "api_key": "sk-test-123"})], "'api_key' looks like a secret", "environment variable")
    refused([Job("a", "demo_key", {"model": "sk-test-456"})], "OPENAI_API_KEY", "environment variable")
    refused([Job("a", "demo_key", {"model": "sk-test-123"})], "shaped like a key")
    with pytest.raises(BadParameter) as error:
        run_profile(Profile("t", (Job("a", "demo_key", {"api_key": "sk-test-123", "model": "sk-test-456"}),)), progress=False)
    assert "sk-test" not in str(error.value)
    # A file that a notebook writes is looked at too.
    write(project, "demo_leak", "out = 'reports/t/demo'", "import os\nfrom cdr_lib.reporting.provenance import record",
          "record(f'{out}/runs/log.txt').write_text('key ' + os.environ['OPENAI_API_KEY'])")
    summary = run_profile(Profile("t", (Job("a", "demo_key"), Job("b", "demo_leak"))), progress=False)
    assert list(summary.status) == ["failed", "failed"] and "SecretInFile" in summary.error[1]
    write_index("t")
    files = [path for path in project.rglob("*") if path.is_file()]
    assert len(files) >= 8
    for path in files:
        data = path.read_bytes()
        assert b"sk-test-" not in data, path
        if "reports" in path.relative_to(project).parts[:1]:
            assert str(project).encode() not in data and (str(Path.home()) + "/").encode() not in data, path
    assert "sk-test-" not in summary.to_csv() and str(project) not in summary.to_csv()
    shown = (project / summary.notebook[0]).read_text()
    assert "[OPENAI_API_KEY]" in shown and "data ~/.config" in shown and "from ." in shown


class _Cells(html.parser.HTMLParser):
    """Texts of the body cells of a table, tags that occur."""

    def __init__(self, text: str):
        super().__init__()
        self.rows, self.tags = [], set()
        self._in = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        self._in = self._in or tag == "td"
        if tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._in = self._in and tag != "td"

    def handle_data(self, data):
        if self._in:
            self.rows[-1][-1] += data


def test_DOC_01_prices_pipes_and_markup_stay_text():
    frame = pd.DataFrame([{"item": "kettle", "price": "$31.00 - $45.50"}, {"item": "a|b <i>x</i>", "price": "$5"},
                          {"item": "`code` *x* _y_ \\(z\\)", "price": "a\nb"}])
    table = Table(frame, "Prices from $5 to $9")
    expected = [["kettle", "$31.00 - $45.50"], ["a|b <i>x</i>", "$5"]]
    page = _Cells(table.to_html())
    assert [row for row in page.rows if row][:2] == expected and "i" not in page.tags
    assert page.rows[-1] == ["`code` *x* _y_ \\(z\\)", "ab"] and "br" in page.tags
    # MathJax reads text nodes: none of them may hold two delimiters, or a backslash with what follows it.
    class Nodes(html.parser.HTMLParser):
        def handle_data(self, data):
            assert data.count("$") < 2 and not ("\\" in data and len(data) > 1)

    Nodes().feed(table.to_html())

    # The Markdown, as the site's parser reads it with mathematics switched on.
    from docutils import nodes
    from docutils.core import publish_doctree
    from myst_parser.parsers.docutils_ import Parser

    settings = {"myst_enable_extensions": ["dollarmath", "amsmath", "html_image"], "report_level": 5}
    tree = publish_doctree(table.to_markdown(), parser=Parser(), settings_overrides=settings)
    assert not list(tree.findall(nodes.math)) and not list(tree.findall(nodes.math_block))
    rows = [[entry.astext() for entry in row.findall(nodes.entry)] for row in tree.findall(nodes.row)]
    assert rows[1:3] == expected


def test_DOC_03_holes_are_marked_gaps():
    results = pd.DataFrame([{"model": "A", "task": "t1", "ndcg": 0.5}, {"model": "A", "task": "t2", "ndcg": 0.7}, {"model": "B", "task": "t1", "ndcg": 0.6}])
    grid, incomplete = score_grid(results, "model", "task", "ndcg", ["A", "B"], ["t1", "t2"])
    assert grid.loc["A"].tolist() == pytest.approx([0.5, 0.7, 0.6])
    assert grid.loc["B", "t1"] == 0.6 and pd.isna(grid.loc["B", "t2"]) and grid.loc["B", "mean"] == 0.6
    assert incomplete == {("B", "mean"): "1 of 2"}
    text = Table(grid, "t", decimals=1, best="max", incomplete=incomplete).to_markdown().replace("\\", "")
    assert "| A | 0.5 | 0.7 | 0.6 |" in text and "| B | **0.6** | \u2014 | 0.6 (1 of 2) |" in text and "incomplete and not ranked" in text
    with pytest.raises(CdrError, match="leaves out B"):
        score_grid(results, "model", "task", "ndcg", ["A"], ["t1", "t2"])

    ax = grouped_bars(results, "task", "model", "ndcg", ["t1", "t2"], ["A", "B"])
    at = [[round(bar.get_x() + bar.get_width() / 2) for bar in group.patches] for group in ax.containers]
    assert at == [[0, 1], [0]]  # B has no bar at t2
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["t1", "t2"] and not ax.collections  # no error bars
    assert [round(bar.get_height(), 6) for group in ax.containers for bar in group.patches] == [0.5, 0.7, 0.6]

    curve = pd.DataFrame([("A", k, k / 100) for k in [1, 10, 5]] + [("B", 1, 0.2), ("B", 10, 0.3)], columns=["model", "k", "ndcg"])
    ax = metric_lines(curve, "k", "model", "ndcg", [1, 5, 10], ["A", "B"])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "5", "10"]
    assert list(ax.lines[0].get_ydata()) == [0.01, 0.05, 0.1] and np.isnan(ax.lines[1].get_ydata()[1])
