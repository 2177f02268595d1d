"""The reporting package beyond the collected cases: fidelity of parameters, robustness of runs, safety of tables."""
import ast
import html.parser
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_lib.core.config import CdrError, read_json
from cdr_lib.core.tables import html_cell, latex_cell
from cdr_lib.reporting.index import make_report
from cdr_lib.reporting.parameters import BadParameter, check_parameters, plain_value
from cdr_lib.reporting.provenance import Scrubber
from cdr_lib.reporting.published import VERDICTS, beside_printed, load_published, other_collection, verdict
from cdr_lib.reporting.run import Job, Profile, load_profiles, plan, run_profile
from cdr_lib.reporting.tables import Table

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
PLAIN = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
                     lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12)


def write(root: Path, name: str, parameters: str, *cells: str) -> None:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (parameters, *cells)])
    made.cells[0].metadata["tags"] = ["parameters"]
    path = root / "nbs" / "reports" / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(made, path)


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "settings.ini").touch()
    monkeypatch.setenv("CDR_ROOT", str(tmp_path))
    monkeypatch.setattr("cdr_lib.reporting.run.library_hash", lambda: "fixed")
    return tmp_path


# Parameters


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), PLAIN))
@settings(max_examples=150, deadline=None)
def test_plain_values_reach_the_notebook_unchanged(values):
    """papermill's own translation, parsed back, is the value that was checked."""
    from papermill.translators import PythonTranslator

    plain = plain_value(values)
    assert plain == values and plain_value(plain) == plain and json.loads(json.dumps(plain, allow_nan=False)) == plain
    cell = ast.parse(PythonTranslator.codify(plain)).body
    assert {statement.targets[0].id: ast.literal_eval(statement.value) for statement in cell} == plain


@given(PLAIN)
@settings(max_examples=100, deadline=None)
def test_what_is_passed_is_never_changed_and_never_shared(value):
    before = json.dumps(value)
    made = plain_value(value)
    if isinstance(made, list):
        made.append("changed")
    if isinstance(made, dict):
        made["changed"] = True
    assert json.dumps(value) == before


def test_all_problems_of_all_jobs_are_said_at_once(project):
    write(project, "demo_one", "a = 1\nunused = 2", "print(a)")
    write(project, "demo_two", "b: list[int] = [1]", "print(b)")
    jobs = (Job("x", "demo_one", {"a": "1"}), Job("y", "demo_two", grid=[{"b": [1]}, {"b": ["2"]}, {"c": 1}]))
    with pytest.raises(BadParameter) as error:
        plan(Profile("t", jobs))
    assert len(error.value.problems) == 4
    for words in ("'unused' is declared but no cell reads it", "'a' must be int, not str '1'", "'b' must be list[int]", "'c' is unknown"):
        assert words in str(error.value)


@pytest.mark.parametrize("cell, given_values, words", [
    ("k: Optional[int] = None", {"k": "3"}, "must be Optional[int]"),
    ("k: int | None = None", {"k": 3.0}, "must be int | None"),
    ("ks = [1, 5]", {"ks": [1, "5"]}, "must be list"),
    ("rate = 0.5", {"rate": True}, "must be float, not bool True"),
    ("k = 1", {"k": 1.5}, "must be int, not float 1.5"),
    ("note = 'a=b'", {"note": None}, "must be str"),
    ("extra = {}", {"extra": {"hf_token": "x"}}, "'hf_token', which looks like a secret"),
    ("path: Path = Path('x')", {}, "convert in a later cell"),
])
def test_mistyped_values_and_declarations(cell, given_values, words):
    name = cell.partition(":" if ":" in cell.partition("=")[0] else "=")[0].strip()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell), nbformat.v4.new_code_cell(f"print({name})")])
    notebook.cells[0].metadata["tags"] = ["parameters"]
    with pytest.raises(BadParameter, match=words.replace("[", r"\[").replace("|", r"\|")):
        check_parameters(notebook, given_values)


# Runs


def test_runs_that_end_badly_say_how_and_harm_nobody(project, monkeypatch):
    # A kernel specification that leads elsewhere, as one finds on shared machines.
    for kernel in ("python3", "cdr"):
        folder = project / "jupyter" / "kernels" / kernel
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(json.dumps({"argv": ["false", "{connection_file}"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(project / "jupyter"))
    record = "from cdr_lib.reporting.provenance import record, record_values\n"
    write(project, "demo_kernel", "expected = ''", record + "import sys\nrecord_values({'same': sys.executable.endswith(expected)})")
    write(project, "demo_dead", "n = 1", "import os\nos._exit(n)")
    write(project, "demo_exit", "n = 1", "import sys\nsys.exit(0)", "print(n)")
    write(project, "demo_promise", "out = 'x'", record + "record(f'{out}/runs/never.txt')")
    write(project, "demo_json", "out = 'x'", record + "record(f'{out}/runs/x.json').write_text('{\"a\": NaN}')")
    write(project, "demo_path", "out = 'x'", record + "from pathlib import Path\nrecord(f'{out}/runs/x.txt').write_text(f'{Path.cwd()}/x')")
    executable = Path(sys.executable).name
    names = ["dead", "exit", "promise", "json", "path"]
    profile = Profile("t", (Job("kernel", "demo_kernel", {"expected": executable}), *(Job(name, f"demo_{name}") for name in names),
                            Job("after", "demo_kernel", needs=("dead",)), Job("later", "demo_kernel", needs=("after",))))
    summary = make_report(profile, progress=False).set_index("task")
    assert summary.status["kernel"] == "ok" and summary.same["kernel"], summary.error["kernel"]
    assert list(summary.status[names]) == ["failed"] * 5 and list(summary.status[["after", "later"]]) == ["skipped"] * 2
    for name, kind in zip(names, ["DeadKernelError", "SystemExit", "MissingFile", "BadJson", "LocalPathInFile"]):
        assert summary.error[name].startswith(kind), summary.error[name]
    assert summary.cell["dead"] == 2 and summary.cell["exit"] == 2  # nothing was injected
    dead = json.loads((project / summary.notebook["dead"]).read_text())
    assert dead["cells"][1]["outputs"][0]["ename"] == "DeadKernelError"
    manifest = read_json(project / "reports/t/manifest.json")
    assert [task["status"] for task in manifest["tasks"]] == ["ok", *["failed"] * 5, "skipped", "skipped"]
    page = (project / "reports/t/index.html").read_text()
    assert "DeadKernelError" in page and "5 failed" in page and "2 skipped" in page


def test_only_what_changed_runs_again_and_gives_the_same_bytes(project):
    (project / "data").mkdir()
    (project / "data/numbers.txt").write_text("1 2 3")
    write(project, "demo_read", "source = 'data/numbers.txt'\nout = 'x'",
          "import sys, warnings\nfrom cdr_lib.reporting.provenance import locate, record",
          "numbers = [int(part) for part in locate(source).read_text().split()]\nrecord(f'{out}/runs/sum.txt').write_text(str(sum(numbers)))",
          "warnings.warn('careful')\nprint('out', flush=True)\nprint('err', file=sys.stderr, flush=True)\nobject()",
          "from tqdm.auto import tqdm\nfor _ in tqdm(range(3)): pass")
    write(project, "demo_use", "out = 'x'", "from cdr_lib.reporting.provenance import locate", "int((locate(out) / 'runs/sum.txt').read_text())")
    profile = Profile("t", (Job("read", "demo_read"), Job("use", "demo_use", needs=("read",))))

    def run(**options):
        return list(run_profile(profile, progress=False, **options).status)

    def state():
        folder = project / "reports/t/demo"
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert run() == ["ok", "ok"]
    first, manifest = state(), (project / "reports/t/manifest.json").read_bytes()
    assert b"<cell>:1: UserWarning: careful" in first["notebooks/read.ipynb"] and b"at 0x\xe2\x80\xa6" in first["notebooks/read.ipynb"]
    assert run() == ["unchanged", "unchanged"] and (project / "reports/t/manifest.json").read_bytes() == manifest
    assert run(force=True, only=["read"]) == ["ok"] and state() == first
    # Dependants follow results, not times.
    assert run() == ["unchanged", "unchanged"]
    (project / "data/numbers.txt").write_text("1 2 4")
    preview = run_profile(profile, dry_run=True)
    assert list(preview.status) == ["would run"] * 2 and preview.reason[0] == "data changed"
    assert run() == ["ok", "ok"]
    # A result that was edited or lost is made again.
    (project / "reports/t/demo/runs/sum.txt").write_text("8")
    assert run() == ["ok", "unchanged"] and (project / "reports/t/demo/runs/sum.txt").read_text() == "7"
    (project / "reports/t/demo/notebooks/use.ipynb").unlink()
    assert run() == ["unchanged", "ok"]
    # Files of no task are named.
    (project / "reports/t/demo/runs/old.txt").write_text("from another time")
    (project / "reports/t/manifest.json").unlink()
    assert run() == ["unchanged", "unchanged"]
    assert read_json(project / "reports/t/manifest.json")["unclaimed"] == ["reports/t/demo/runs/old.txt"]


def test_missing_data_stops_before_the_first_run_but_not_a_dry_run(project, monkeypatch):
    monkeypatch.delenv("CDR_DATA", raising=False)
    write(project, "demo_read", "source = 'a/b'", "print(source)")
    profile = Profile("t", (Job("a", "demo_read"), Job("b", "demo_read", {"source": "$CDR_DATA/sgd"}), Job("c", "demo_read", inputs=("data/none",))))
    with pytest.raises(CdrError, match=r"(?s)b: \$CDR_DATA/sgd is not there.*c: data/none is not there.*CDR_DATA.*not set"):
        run_profile(profile, progress=False)
    assert not (project / "reports/t/demo").exists()
    assert list(run_profile(profile, dry_run=True).status) == ["would run", "missing data", "missing data"]


def test_ctrl_c_leaves_what_is_done_and_no_process(project):
    import psutil

    write(project, "demo_sleep", "seconds: float = 0.0", "import time\ntime.sleep(seconds)")
    # Under a shell's background job the signal is ignored from birth.
    script = ("import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
              "from cdr_lib.reporting.run import *\n"
              "print(run_profile(Profile('t', (Job('quick', 'demo_sleep'), Job('slow', 'demo_sleep', {'seconds': 60.0}))), workers=1))")
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, cwd=project, env={**os.environ, "CDR_ROOT": str(project)}, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    kernels: list = []
    # Stop it once the second notebook's kernel is up.
    while time.monotonic() < deadline and not ((project / "reports/t/.state/quick.json").exists() and len(kernels) >= 2):
        time.sleep(0.2)
        kernels = psutil.Process(process.pid).children(recursive=True)
    # Another run of the same profile is refused meanwhile.
    with pytest.raises(CdrError, match="being run by another process"):
        run_profile(Profile("t", (Job("quick", "demo_sleep"),)), progress=False)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode != 0 and "KeyboardInterrupt" in said
    _, alive = psutil.wait_procs(kernels, timeout=10)
    assert not alive
    assert not (project / "reports/t/.state/slow.json").exists()
    assert not [path for path in project.rglob("*") if ".tmp" in path.name]
    state = read_json(project / "reports/t/.state/quick.json")
    assert state["status"] == "ok" and (project / state["notebook"]).is_file()


def test_profiles_of_the_project_are_sound():
    """Every profile plans without a GPU, a network or the corpora."""
    for profile in load_profiles().values():
        assert profile.title and plan(profile)


# Tables


class _Text(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        assert tag in ("span", "br")
        self.text += "\n" * (tag == "br")

    def handle_data(self, data):
        assert data.count("$") < 2 and (data == "\\" or "\\" not in data)
        self.text += data


PRINTABLE = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")) | st.sampled_from("$|<>&`*_\\[](){}#~^\n"), max_size=40)


@given(PRINTABLE)
@settings(max_examples=300, deadline=None)
def test_any_text_is_shown_as_it_is_in_html(text):
    assert _Text(html_cell(text)).text == text
    assert html_cell(text).isascii()


@given(PRINTABLE.map(lambda text: " ".join(text.split(" ")).strip()))
@settings(max_examples=300, deadline=None)
def test_any_text_is_shown_as_it_is_in_markdown(text):
    """Read back by a CommonMark parser with tables and dollar mathematics."""
    from markdown_it import MarkdownIt
    from mdit_py_plugins.dollarmath import dollarmath_plugin

    parser = MarkdownIt("commonmark", {"html": True}).enable("table").use(dollarmath_plugin, allow_space=True)
    tokens = parser.parse(Table(pd.DataFrame({"a": [f"x{text}x"], "b": [1]}), "t").to_markdown())
    assert sum(token.type == "td_open" for token in tokens) == 2
    children = next(after for before, after in zip(tokens, tokens[1:]) if before.type == "td_open").children
    shown = "".join("\n" if child.type == "html_inline" else child.content for child in children)
    assert {child.type for child in children} <= {"text", "text_special", "html_inline"} and shown == f"x{text}x"


@given(PRINTABLE)
@settings(max_examples=200, deadline=None)
def test_latex_cells_have_no_active_characters(text):
    import re

    rest = re.sub(r"\\(?:text[a-z]+\{\}|[&%$#_{}])", "", latex_cell(text))
    assert not set(rest) & set("&%$#_{}~^\\<>|")


def test_tables_never_rank_what_cannot_be_compared():
    frame = pd.DataFrame({"x": [0.5, None, 0.7], "n": [3, 4, 5]}, index=["a", "b", "c"])
    assert Table(frame, "t", best="max").to_markdown().count("**") == 4  # the title and one winner
    assert Table(frame, "t", best="max", incomplete={("c", "x"): "1 of 2"}).to_markdown().count("**") == 2
    assert "**0.5000**" in Table(frame, "t", best={"x": "min"}).to_markdown()
    for bad, words in [(dict(best="best"), "must be 'max' or 'min'"), (dict(best={"y": "max"}), "no column 'y'"),
                       (dict(incomplete={("z", "x"): ""}), "no cell at row 'z'"), (dict(decimals={"q": 1}), "no column 'q'")]:
        with pytest.raises(CdrError, match=words):
            Table(frame, "t", **bad).to_markdown()


def test_csv_keeps_full_precision_and_text(tmp_path):
    frame = pd.DataFrame({"text": ['a,"b"\nc', "NA"], "value": [1 / 3, None]})
    Table(frame, "t", decimals=1).save(tmp_path, "x")
    back = pd.read_csv(tmp_path / "x.csv", keep_default_na=False, na_values={"value": [""]})
    assert back.text.tolist() == frame.text.tolist() and back.value[0] == 1 / 3 and pd.isna(back.value[1])


# Published numbers


def test_printed_numbers_of_the_paper():
    published = load_published()
    printed = {"queries": "1,583", "conversations": "9,146", "messages_per_conversation": "5.4", "tokens_per_conversation": "464",
               "relevant_per_query": "20.44", "share_intent": "36.1", "share_emotion": "20.1", "models": "16", "templates": "130",
               "voyage_3_large_turn": "0.5079", "voyage_3_large_session": "0.5036", "text_embedding_3_large_window": "0.5130",
               "nv_embed_v2_turn": "0.3170", "nv_embed_v2_session": "0.4592", "dynamics_best": "0.17"}
    assert {key: published[key].printed for key in printed} == printed
    assert published["conversations_collected"].value == 2_400_000 and published["queries_generated"].value == 28_000


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(0, 1e3))
@settings(deadline=None)
def test_verdicts_grow_worse_with_distance(ours, printed, tolerance):
    judged = VERDICTS.index(verdict(ours, printed, tolerance))
    nearer = VERDICTS.index(verdict((ours + printed) / 2, printed, tolerance))
    assert nearer <= judged < 3 and verdict(printed, printed, tolerance) == "OK"


def test_no_verdict_without_comparable_data():
    table = beside_printed({"queries": 1583, "voyage_3_large_turn": 0.5079}, other_collection(160, 720))
    assert list(table.frame.verdict) == ["not comparable"] * 2 and other_collection(1583, 9146) == ""
    with pytest.raises(CdrError, match="no printed number 'querys'"):
        beside_printed({"querys": 1})


# Scrubbing


def test_scrubber_finds_keys_in_every_usual_spelling():
    from base64 import b64encode
    from urllib.parse import quote

    secret = "p&ss <wörd>/\"x\""
    scrubber = Scrubber({"SERVICE_PASSWORD": secret})
    for spelling in (secret, quote(secret, safe=""), json.dumps(secret), repr(secret), b64encode(secret.encode()).decode()):
        assert "[SERVICE_PASSWORD]" in scrubber.text(f"before {spelling} after"), spelling
    assert scrubber.text("ordinary password text") == "ordinary password text"
