"""`cdr sources` and `cdr curate` as people call them: the README's section word by word, and all that goes wrong."""
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdr_lib.cli import main
from cdr_lib.core.config import read_json, write_json
from cdr_lib.core.conversation import Conversation
from cdr_lib.core.io import read_parquet, write_jsonl, write_parquet
from cdr_lib.curation.dirty import dirty_corpus, write_dirty
from cdr_lib.curation.ledger import counts
from cdr_lib.curation.pool import Input, open_pool

QUESTIONS = ("How do I reset the router after the storm took the power down?", "My kettle leaks from the bottom, what can I do?",
             "Could you explain how the tides depend on the moon?", "I need a birthday present for a colleague who likes plants.",
             "Why does my bread not rise although the yeast is fresh?", "Which train should I take from Lyon to Turin on Friday?")


def chats(n: int, source: str = "", start: int = 0) -> list[Conversation]:
    return [Conversation.make(f"{source or 'c'}{i}", ("user", f"{QUESTIONS[i % 6]} This is case {i} of {source}."),
                              ("assistant", f"Certainly. For case {i} there are three steps, which I will explain one by one."), source=source)
            for i in range(start, start + n)]


def call(*words) -> tuple[int, str, str]:
    "Exit code, what was printed, and what was said of errors."
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(map(str, words)))
        except SystemExit as stop:
            code = stop.code
    assert "Traceback" not in err.getvalue()
    return code, out.getvalue(), err.getvalue()


def curated(*words) -> str:
    code, out, err = call("curate", *words, "--quiet")
    assert code == 0, err
    return out


def refused(*words) -> str:
    code, _, err = call("curate", *words, "--quiet")
    assert code == 1, err
    return err


def ids(out: Path) -> list[str]:
    return sorted(chat.id for path in sorted((out / "corpus").glob("*.parquet")) for chat in read_parquet(path))


@pytest.fixture
def logs(tmp_path):
    "What the README's commands read."
    nodes = {"root": {"id": "root", "message": None, "parent": None, "children": ["a"]}}
    for name, parent, role, text in (("a", "root", "user", "How do I reset a router?"),
                                     ("b", "a", "assistant", "Hold the small button on its back for ten seconds. All lights go out; when the "
                                      "first one is green again, connect and choose a new password. Does the light come back?")):
        nodes[name] = {"id": name, "parent": parent, "children": ["b"] if name == "a" else [],
                       "message": {"author": {"role": role}, "content": {"content_type": "text", "parts": [text]}}}
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as file:
        file.writestr("conversations.json", json.dumps([{"title": "Router", "mapping": nodes, "current_node": "b", "conversation_id": "g1"}]))
    (tmp_path / "chat.txt").write_text("13/01/2024, 10:00 - Ana: Shall we meet at the lake on Sunday?\n13/01/2024, 10:01 - Ben: Yes, at noon "
                                       "near the boats.\nI bring bread.\n", encoding="utf-8")
    (tmp_path / "logs").mkdir()
    with open(tmp_path / "logs" / "tickets.csv", "w", encoding="utf-8") as file:
        file.write("conv_id,role,text\n" + "".join(f"t{i},user,\"{QUESTIONS[i]}\"\nt{i},assistant,\"Let us see, step by step.\"\n" for i in range(6)))
    (tmp_path / "logs" / "bot.jsonl").write_text("".join(
        json.dumps({"messages": [{"role": "user", "content": f"{text} Please answer in one sentence."},
                                 {"role": "assistant", "content": "It depends on a few things that you can check yourself."}]}) + "\n"
        for text in QUESTIONS))
    tides = Conversation.make("mail", ("user", f"{QUESTIONS[2]} Write to ana@example.com, please."), (
        "assistant", "The moon pulls on the oceans. The side of the earth that faces it is pulled more strongly than the centre, and the far "
        "side less, so two bulges of water form. As the earth turns, each coast passes through both of them in a day."), source="shop")
    write_parquet([*chats(5, "shop"), tides], tmp_path / "logs" / "train-00000.parquet")
    write_parquet(chats(5, "shop", 3), tmp_path / "logs" / "train-00001.parquet")
    return tmp_path


# -- cdr sources ---------------------------------------------------------------------------------------------------

def test_sources_are_listed_with_their_licences():
    code, out, _ = call("sources")
    assert code == 0 and all(name in out for name in ("lmsys", "wildchat", "chatgpt", "whatsapp", "telegram", "slack"))
    row = next(line for line in out.splitlines() if line.startswith("| lmsys"))
    assert "| no |" in row


def test_the_card_of_a_source():
    code, out, _ = call("sources", "wildchat")
    assert code == 0 and "ODC-BY" in out and "loses" in out


@pytest.mark.parametrize("words, said", [
    (["nothing-like-it"], "known are"), (["chatgpt", "--download"], "nothing to download"), (["--download"], "which corpus"),
    (["--to", "x"], "which corpus"), (["lmsys", "--to", "x"], "--to is the folder for --download")])
def test_calls_of_sources_that_make_no_sense(words, said):
    code, out, err = call("sources", *words)
    assert code == 1 and said in err and not out


# -- the README ----------------------------------------------------------------------------------------------------

def test_the_first_command_of_the_readme(logs, monkeypatch):
    monkeypatch.chdir(logs)
    out = curated("chatgpt=export.zip", "whatsapp=chat.txt", "logs/", "--out", "clean")
    assert "corpus, ledger and counts are in clean" in out and (logs / "clean" / "table.md").read_text() in out
    clean = logs / "clean"
    ledger = pd.read_parquet(clean / "ledger.parquet")
    funnel = pd.read_csv(clean / "stages.csv")
    assert set(funnel["source"]) >= {"chatgpt", "whatsapp", "shop"}
    left = funnel[funnel["stage"] == "pii"]["kept"].sum()
    assert len(ids(clean)) == left and left + len(ledger) == funnel[funnel["stage"] == "read"]["in"].sum()
    text = " ".join(str(chat) for path in (clean / "corpus").iterdir() for chat in read_parquet(path))
    assert "[EMAIL_1]" in text and "ana@example.com" not in text
    assert {"bot:1", "t0"} <= {*ids(clean), *ledger["id"]}, "records without an id are named by file and number"
    before = {path: path.read_bytes() for path in clean.rglob("*.parquet") if "work" not in path.parts}
    again = call("curate", "chatgpt=export.zip", "whatsapp=chat.txt", "logs/", "--out", "clean", "--quiet")
    assert "nothing has changed" in again[2] and before == {path: path.read_bytes() for path in before}


def test_a_plan_in_a_file_names_its_inputs_and_what_a_reader_needs(tmp_path):
    (tmp_path / "tickets.csv").write_text("ticket,author,body\n7,customer,my kettle leaks\n7,agent,we send you another one\n")
    (tmp_path / "plan.yaml").write_text(
        "inputs:\n  - path: tickets.csv\n    options: {conversation: ticket, role: author, text: body, roles: {agent: assistant}}\nstages: [exact]\n")
    curated("--config", tmp_path / "plan.yaml", "--out", tmp_path / "out")
    chat, = read_parquet(tmp_path / "out" / "corpus" / "00000.parquet")
    assert [(turn.role, turn.text) for turn in chat.turns] == [("user", "my kettle leaks"), ("assistant", "we send you another one")]
    assert read_json(tmp_path / "out" / "manifest.json")["plan"]["inputs"][0]["options"]["role"] == "author"
    assert "options: {conversation: ...}" in refused(tmp_path / "tickets.csv", "--config", "duplicates", "--out", tmp_path / "other")


def test_a_corpus_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("CDR_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "dialogsum").mkdir(parents=True)
    (tmp_path / "data" / "dialogsum" / "dialogsum.train.jsonl").write_text(json.dumps(
        {"fname": "train_0", "dialogue": "#Person1#: Hello.\n#Person2#: Good morning.", "summary": "They greet.", "topic": "greeting"}) + "\n")
    curated("dialogsum", "--config", "duplicates", "--out", tmp_path / "out")
    assert len(ids(tmp_path / "out")) == 1
    assert "the format 'dialogsun' is unknown" in refused(f"dialogsun={tmp_path / 'data'}", "--out", tmp_path / "other")


# -- folders -------------------------------------------------------------------------------------------------------

def test_nothing_is_deleted_that_curation_did_not_make(tmp_path, monkeypatch):
    """A project folder with folders of the names that a run uses, given as --out, in the ways one slips into it."""
    for name in ("corpus", "work", "pool/mine"):
        (tmp_path / name).mkdir(parents=True)
    write_jsonl(chats(5), tmp_path / "corpus" / "a.jsonl")
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    for out in (".", "corpus", "work"):
        assert "holds something that is no work of curation" in refused("corpus", "--out", out)
    assert "is a file" in refused("corpus", "--out", "work/thesis.txt")
    assert sorted(tmp_path.rglob("*")) == before
    curated("corpus", "--config", "duplicates", "--out", "clean")
    assert "lies inside" in refused("clean/corpus", "--config", "duplicates", "--out", "clean") and len(ids(tmp_path / "clean")) == 5


def test_what_a_folder_holds_beside_logs_is_named(tmp_path):
    folder = tmp_path / "logs"
    (folder / "2023").mkdir(parents=True)
    write_jsonl(chats(3), folder / "A.JSONL")
    (folder / "chat.txt").write_text("13/01/2024, 10:00 - Ana: hello, is somebody there?\n")
    for name in ("notes.md", "read me.txt", ".hidden"):
        (folder / name).write_text("about these logs")
    code, _, err = call("curate", folder, "--config", "duplicates", "--out", folder / "clean", "--quiet")
    assert code == 0 and "not read in logs: 2023/, notes.md, read me.txt\n" in err, err
    assert len(ids(folder / "clean")) == 4
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    assert "the folders in it (inner) are inputs of their own" in refused(tmp_path / "outer", "--out", tmp_path / "out")


def test_a_folder_that_cannot_be_written(tmp_path):
    write_jsonl(chats(2), tmp_path / "a.jsonl")
    assert "cdr: " in refused(tmp_path / "a.jsonl", "--out", "/proc/nothing/out")


# -- wrong calls ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("plan, said", [
    ("stages: [exact", "cannot be read"), ("stages: [exact]\nstages: [fuzzy]\n", "'stages' is written twice"), ("", "must be a mapping"),
    ("stages: [{fuzzy: {threshold: 0.8, threshold: 0.5}}]\n", "'threshold' is written twice"), ("stages: [exakt]\n", "known are exact"),
    ("stages: [exact]\ncaps: {clusters: 5}\n", "'clusters'"), ("stages: [{fuzzy: {words: 2.5}}]\n", "words=2.5"),
    ("stages: [{fuzzy: {threshold: '0.8'}}]\n", "threshold='0.8'"), ("stages: [{fuzzy: {seed: -1}}]\n", "seed=-1"),
    ("stages: [{fuzzy: {threshold: .nan}}]\n", "threshold=nan"), ("stages: [{exact: {first_turns: true}}]\n", "first_turns=True"),
    ("stages: [{exact: {roles: maybe}}]\n", "roles='maybe'"), ("stages: [{language: {keep: [english]}}]\n", "'english'"),
    ("stages: [{language: {keep: []}}]\n", "keep is empty"), ("stages: [{language: {keep: [en, no]}}]\n", "quotation marks"),
    ("stages: [{quality: {batch_size: 0}}]\n", "batch_size=0"), ("stages: [{quality: {labels: [1]}}]\n", "labels=[1]"),
    ("stages: [{quality: {model: 5}}]\n", "model=5"), ("stages: [{pii: {kinds: []}}]\n", "kinds is empty"),
    ("stages: [{pii: {region: XX}}]\n", "region='XX'"), ("stages: [{semantic: {max_memory: lots}}]\n", "max_memory='lots'"),
    ("stages: [{semantic: {max_memory: -1}}]\n", "max_memory=-1"), ("stages: [{semantic: {encoder: 5}}]\n", "encoder=5"),
    ("stages: [{domains: {encoder: 7}}]\n", "encoder=7"),
    ("stages: [{heuristics: {rules: [{signal: n_turns, least: 1, reason: 5}]}}]\n", "reason=5"),
    ("stages: [exact]\ninputs: 5\n", "inputs: 5"), ("stages: [exact]\ninputs: [{path: a, source: ''}]\n", "names nothing"),
    ("stages: [exact]\ninputs: [{path: a, options: x}]\n", "options='x'")])
def test_a_plan_with_a_slip_is_refused_before_anything_is_read(tmp_path, plan, said):
    (tmp_path / "plan.yaml").write_text(plan)
    inputs = [] if "inputs" in plan else [tmp_path / "never-looked-at.jsonl"]
    assert said in refused(*inputs, "--config", tmp_path / "plan.yaml", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_inputs_that_are_not_there_or_no_files(tmp_path):
    assert "no such file or folder" in refused(tmp_path / "nothing.jsonl", "--out", tmp_path / "out")
    assert "neither a file nor a folder" in refused("/dev/null", "--out", tmp_path / "out")
    assert "there are no inputs" in refused("--out", tmp_path / "out")
    assert "workers=0" in refused("/dev/null", "--workers", 0, "--out", tmp_path / "out")
    assert call("curate", "a.jsonl")[0] == 2, "--out is required"


def test_a_cap_says_where_it_stands(tmp_path):
    write_jsonl([Conversation.make(f"c{i}", ("user", "the very same words")) for i in range(40)], tmp_path / "a.jsonl")
    said = refused(tmp_path / "a.jsonl", "--out", tmp_path / "out")
    assert "caps.share_per_source" in said and "curation/default.yaml: copy it" in said and not (tmp_path / "out" / "corpus").exists()
    (tmp_path / "plan.yaml").write_text("stages: [exact]\n")
    assert "copy it" not in refused(tmp_path / "a.jsonl", "--config", tmp_path / "plan.yaml", "--out", tmp_path / "out")


# -- hostile text --------------------------------------------------------------------------------------------------

def test_names_that_would_act_on_a_terminal_or_a_page(tmp_path):
    names = ("\x1b[2J\x1b[31mred", "<script>alert(1)</script>", "a|b", "007", "1.0", "NA", "True", "line\rbreak", "all", "\u202eabc")
    write_jsonl([chat for name in names for chat in chats(2, name)], tmp_path / "a.jsonl")
    code, out, _ = call("curate", tmp_path / "a.jsonl", "--config", "duplicates", "--out", tmp_path / "out")
    assert code == 0 and not {"\x1b", "\u202e", "\r"} & set(out), out
    assert "<script>" not in out and "\\x1b" in out
    rows = pd.read_csv(tmp_path / "out" / "stages.csv", dtype={"source": str}, keep_default_na=False).query("stage == 'fuzzy'")
    assert sorted(rows["source"]) == sorted(names) and set(rows["kept"]) == {2}
    table = {line.split("|")[1].strip(): line for line in out.splitlines() if line.startswith("| ")}
    assert {"007", "1.0", "NA", "all", "(all)"} <= set(table) and "| 20 |" in table["(all)"]


def test_forty_thousand_sources(tmp_path):
    """A corpus whose records name their author as source."""
    n = 40_000
    items = {"id": [f"c{i}" for i in range(n)], "source": [f"user {i:05d}" for i in range(n)], "evaluation": [False] * n, "chars": [5] * n}
    pq.write_table(pa.table(items), tmp_path / "items.parquet")
    write_json(tmp_path / "read.json", {"file": "a.jsonl", "shards": [n], "source": "a", "rejected": [], "repeated": []})
    pool = open_pool([(Input("a.jsonl"), tmp_path)], "key")
    assert pool.sources[pool.source[n - 1]] == "user 39999" and len(pool.sources) == n == counts(pool, [])["kept"].sum()


# -- stopped -------------------------------------------------------------------------------------------------------

def test_interrupted_and_two_at_once(tmp_path):
    write_dirty(dirty_corpus(600, seed=5), tmp_path / "raw")
    words = ["curate", str(tmp_path / "raw"), "--config", "duplicates", "--out", str(tmp_path / "out"), "--quiet"]
    # In a group of its own, which is interrupted as a terminal does it: with its workers.
    # A shell that runs the tests in the background lets its children ignore interrupts.
    code = ("import signal\nfrom cdr_lib.cli import main\nif __name__ == '__main__':\n"
            "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            f"    raise SystemExit(main({[*words, '--workers', '2']!r}))")
    run = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list((tmp_path / "out").glob("pool/*/00000.parquet")):
        assert run.poll() is None
        time.sleep(0.002)
    os.killpg(run.pid, signal.SIGSTOP)
    assert "another run works in this folder" in refused(*words[1:-1])
    os.killpg(run.pid, signal.SIGINT)
    os.killpg(run.pid, signal.SIGCONT)
    error = run.stderr.read()
    assert run.wait() == 130 and error == "cdr: interrupted; the same call goes on where this one stopped\n"
    assert not (tmp_path / "out" / "corpus").exists()
    curated(*words[1:-1])
    curated(tmp_path / "raw", "--config", "duplicates", "--out", tmp_path / "fresh")
    assert ids(tmp_path / "out") == ids(tmp_path / "fresh")
