"""The command line as a script sees it: outputs, exit codes, one-line errors."""
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from cdr_lib.core.collection import Collection
from cdr_lib.core.conversation import Conversation, Turn
from cdr_lib.core.io import write_jsonl
from cdr_lib.core.layouts import write_cdr

CDR = str(Path(sys.executable).parent / "cdr")
AREA = "Emotion & Feedback"


def cdr(*args, cwd=None):
    done = subprocess.run([CDR, *map(str, args)], capture_output=True, text=True, cwd=cwd)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def folder(tmp_path):
    kettle = Conversation.make("kettle", ("user", "My kettle leaks."), ("assistant", "I am sorry. Since when?"))
    bag = Conversation.make("bag", ("user", "Do you have a red bag?"), ("assistant", "Here is one."), ("user", "Too small."))
    write_cdr(Collection("set", {"kettle": kettle, "bag": bag}, {"q1": "a leaking kettle", "q2": "red bag", "q3": "zzz"},
                         {"q1": {"kettle": 1}, "q2": {"bag": 1}, "q3": {"bag": 1}}, {"q1": AREA, "q2": AREA, "q3": AREA}),
              tmp_path / "set")
    return tmp_path


def test_evaluate_writes_what_it_promises(folder):
    done = cdr("evaluate", folder / "set", "--encoder", "keyword", "--bm25", "--granularity", "turn", "session",
               "--out", folder / "out", "--baseline", "bm25:session")
    assert done.returncode == 0, done.stderr
    rows = json.loads((folder / "out" / "metrics.json").read_text())
    assert {tuple(row) for row in rows} == {("system", "granularity", "measure", "value", "n_queries")}
    found = {(row["system"], row["granularity"], row["measure"]): row["value"] for row in rows}
    # "zzz" finds nothing and counts 0; the other two are found at rank 1
    assert found["bm25", "turn", "nDCG@10"] == pytest.approx(2 / 3) and all(row["n_queries"] == 3 for row in rows)
    scores = pd.read_parquet(folder / "out" / "per_query.parquet")
    assert set(scores["query"]) == {"q1", "q2", "q3"} and set(scores["area"]) == {AREA}
    run = (folder / "out" / "runs" / "bm25.turn.trec").read_text().splitlines()
    assert run[0].split()[:4] == ["q1", "Q0", "kettle", "1"]
    manifest = (folder / "out" / "manifest.json").read_text()
    assert str(folder) not in manifest and json.loads(manifest)["parameters"]["k"] == 100
    assert "bm25" in (folder / "out" / "table.md").read_text() and AREA.split()[0] in done.stdout


def test_evaluate_refuses_a_broken_collection_and_leaves_results_intact(folder):
    assert cdr("evaluate", folder / "set", "--bm25", "--out", folder / "out").returncode == 0
    before = (folder / "out" / "metrics.json").read_bytes()
    (folder / "set" / "relevant_docs.json").write_text('{"q1": ["nowhere"], "q2": ["bag"], "q3": ["bag"]}')
    done = cdr("evaluate", folder / "set", "--bm25", "--out", folder / "out")
    assert done.returncode == 1 and "nowhere" in done.stderr
    assert (folder / "out" / "metrics.json").read_bytes() == before


@pytest.mark.parametrize("args, code, word", [
    (["evaluate", "nowhere", "--bm25", "--out", "out"], 1, "no such folder"),
    (["evaluate", "set", "--out", "out"], 1, "name an encoder"),
    (["evaluate", "set", "--encoder", "no-such-org/no-such-model", "--out", "out"], 1, "no-such-org/no-such-model"),
    (["evaluate", "set", "--bm25", "--baseline", "splade", "--out", "out"], 1, "splade"),
    (["evaluate", "set", "--bm25", "--granularity", "word", "--out", "out"], 2, "invalid choice"),
    (["evaluate", "set", "--bm25"], 2, "--out"),
    (["search", "set", "  ", "--encoder", "bm25"], 1, "question is empty"),
    (["search", "set", "red", "-k", "0"], 2, "1 or more"),
    (["search", "set", "red", "--script", "user: red"], 1, "--granularity aligned"),
    (["search", "set", "red", "--granularity", "aligned", "--script", "customer: red"], 1, "'customer' is unknown"),
    (["report", "--profile", "nothing"], 1, "sample"),
    (["reprot"], 2, "invalid choice"),
])
def test_wrong_calls_get_one_clear_line(folder, monkeypatch, args, code, word):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = cdr(*args, cwd=folder)
    assert done.returncode == code and word in done.stderr, done.stderr
    if code == 1:
        assert len([line for line in done.stderr.splitlines() if line.startswith("cdr: ")]) == 1


def test_search_prints_ranked_conversations_with_the_best_unit(folder):
    done = cdr("search", folder / "set", "red bag", "--encoder", "bm25", "--granularity", "turn")
    assert done.returncode == 0
    assert done.stdout.startswith("1. bag") and "> user: Do you have a red bag?" in done.stdout and "kettle" not in done.stdout


def test_search_as_json_is_one_object_per_line(folder):
    done = cdr("search", folder / "set", "red bag", "--encoder", "keyword", "--json", "-k", "2")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["rank"] for row in rows] == [1, 2] and rows[0]["id"] == "bag" and rows[0]["turns"][0]["role"] == "user"


def test_aligned_search_shows_who_plays_which_part(folder):
    call = ("search", folder / "set", "the user asks for a red bag and the assistant shows one", "--granularity", "aligned")
    done = cdr(*call, "--quiet", "-k", "1")
    assert done.returncode == 0 and "user: asks for a red bag" in done.stdout.splitlines()[1]
    assert "1. bag" in done.stdout and "> user: Do you have a red bag?" in done.stdout
    edited = cdr("search", folder / "set", "a leak", "--granularity", "aligned", "--quiet", "--json",
                 "--script", "user: leaks; later assistant: is sorry")
    rows = [json.loads(line) for line in edited.stdout.splitlines()]
    assert rows[0]["id"] == "kettle" and [part["message"] for part in rows[0]["parts"]] == [0, 1]


def test_evaluate_ranks_aligned_beside_the_granularities(folder):
    assert cdr("evaluate", folder / "set", "--bm25", "--out", folder / "out").returncode == 0
    rows = json.loads((folder / "out/metrics.json").read_text())
    assert {row["granularity"] for row in rows} == {"turn", "window", "session", "aligned"}


def test_search_reads_any_log_and_never_obeys_it(folder):
    hostile = Conversation("c\u202e1", (Turn("user", "red bag \x1b]52;c;cm0=\x07\x1b[2J"), Turn("assistant", "ok")))
    write_jsonl([hostile], folder / "logs.jsonl")
    for granularity in ("window", "aligned"):
        done = cdr("search", folder / "logs.jsonl", "red bag", "--encoder", "bm25", "--granularity", granularity)
        assert done.returncode == 0 and "\x1b" not in done.stdout and "\x07" not in done.stdout and "\u202e" not in done.stdout
        assert "\\x1b]52" in done.stdout


def test_search_stops_quietly_when_its_reader_goes(folder):
    write_jsonl([Conversation.make(f"c{i}", ("user", "red bag " * 40)) for i in range(2000)], folder / "many.jsonl")
    command = f"{CDR} search {folder}/many.jsonl 'red bag' --encoder bm25 -k 2000 --quiet | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and "BrokenPipe" not in done.stderr and done.stdout.startswith("1. c")


def test_bad_records_stop_the_search_or_are_left_out_and_counted(folder):
    (folder / "logs.jsonl").write_text('{"id": "a", "messages": [{"role": "user", "content": "red bag"}]}\n{"id": "b"}\n')
    done = cdr("search", folder / "logs.jsonl", "red bag", "--encoder", "bm25")
    assert done.returncode == 1 and "logs.jsonl:2" in done.stderr
    done = cdr("search", folder / "logs.jsonl", "red bag", "--encoder", "bm25", "--on-error", "collect")
    assert done.returncode == 0 and "1 records were left out" in done.stderr and done.stdout.startswith("1. a")


@pytest.mark.parametrize("command", ["evaluate", "search", "report"])
def test_help_is_complete(command):
    done = cdr(command, "--help")
    assert done.returncode == 0 and "usage: cdr" in done.stdout
