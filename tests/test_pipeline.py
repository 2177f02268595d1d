"""The pipeline of curation: nothing lost, the same bytes however it ran, and plain words where it cannot go on."""
import dataclasses
import gzip
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdr_lib.core.config import CdrError, file_hash, read_json
from cdr_lib.core.conversation import Conversation, render
from cdr_lib.core.io import read_jsonl, read_parquet, write_jsonl, write_parquet
from cdr_lib.curation.dirty import dirty_corpus, planted, write_dirty
from cdr_lib.curation.ledger import CurationStopped
from cdr_lib.curation.pipeline import _Crew, curate
from cdr_lib.curation.pool import Input, read_shard
from cdr_lib.curation.stages import Fuzzy, run_stage

PLAN = {"stages": ["exact", "heuristics", {"fuzzy": {"threshold": 0.8}}, {"semantic": {"encoder": "hash", "threshold": 0.97}},
                   {"pii": "redact"}], "shard": 200}
PRODUCTS = ("ledger.parquet", "flags.parquet", "stages.csv", "reasons.csv", "manifest.json")


def hashes(out) -> dict:
    files = [*(out / name for name in PRODUCTS), *sorted((out / "corpus").iterdir())]
    return {str(path.relative_to(out)): file_hash(path) for path in files}


def chats(*texts, split=None) -> list[Conversation]:
    return [dataclasses.replace(Conversation.make(f"c{i}", ("user", text)), meta={"split": split} if split else {})
            for i, text in enumerate(texts)]


def kept(result) -> list[str]:
    return sorted(chat.id for chat in result.conversations())


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    write_dirty(dirty_corpus(1200, seed=7), folder, broken=0.02)
    return folder


@pytest.fixture(scope="module")
def corpus():
    "What `raw` holds, but for the broken records."
    return {chat.id: chat for chat in dirty_corpus(1200, seed=7)}


@pytest.fixture(scope="module")
def whole(raw, tmp_path_factory):
    return curate(PLAN, tmp_path_factory.mktemp("whole"), raw, progress=False)


# -- the account ---------------------------------------------------------------------------------------------------

def test_in_equals_kept_plus_dropped_everywhere(whole):
    table = whole.counts
    assert (table["in"] == table["kept"] + table["dropped"]).all()
    stages = list(dict.fromkeys(table["stage"]))
    assert stages == ["read", "exact", "heuristics", "fuzzy", "semantic", "pii"]
    for before, after in itertools.pairwise(stages):
        left, right = (table[table["stage"] == stage].set_index("source") for stage in (before, after))
        assert (left["kept"] == right["in"]).all()
    ledger = whole.ledger()
    assert len(ledger) == table["dropped"].sum() == whole.reasons["dropped"].sum()
    by_stage = ledger.groupby(["stage", "source"]).size()
    for row in table.itertuples():
        assert by_stage.get((row.stage, row.source), 0) == row.dropped


def test_every_conversation_is_in_the_corpus_or_in_the_ledger(whole, corpus):
    left = kept(whole)
    ledger = whole.ledger()
    gone = ledger[ledger["stage"] != "read"]["id"]
    assert len(left) == len(set(left)) and set(left) | set(gone) == set(corpus) and not set(left) & set(gone)
    refused = ledger[ledger["stage"] == "read"]
    assert len(refused) > 10 and refused["place"].str.contains(":").all() and refused["rule"].str.len().min() > 5


def test_a_copy_falls_to_a_conversation_that_was_kept_at_that_stage(whole):
    ledger = whole.ledger()
    order = {stage: number for number, stage in enumerate(dict.fromkeys(whole.counts["stage"]))}
    fell = dict(zip(ledger["id"], ledger["stage"].map(order)))
    copies = ledger[ledger["stage"].isin(["exact", "fuzzy", "semantic"])]
    assert len(copies) > 100 and copies["survivor"].notna().all() and copies["score"].notna().all()
    assert all(fell.get(row.survivor, 99) > order[row.stage] for row in copies.itertuples())


def test_planted_copies_are_found_and_nothing_else(raw, corpus, tmp_path):
    result = curate({"stages": ["exact", "fuzzy"], "shard": 700}, tmp_path / "out", raw, progress=False)
    corpus = list(corpus.values())
    groups = dict(zip((chat.id for chat in corpus), planted(corpus)))
    blank = {chat.id for chat in corpus if chat.labels["kind"] == "blank"}
    ledger = result.ledger().query("stage != 'read'")
    assert all(groups[row.id] == groups[row.survivor] for row in ledger.itertuples() if row.id not in blank)
    evaluation = {chat.id for chat in corpus if chat.meta.get("split")}
    expected = sum(n - max(1, e) for n, e in pd.DataFrame({"group": groups, "evaluation": {id: id in evaluation for id in groups}}).query(
        "group >= 0").groupby("group")["evaluation"].agg(["size", "sum"]).itertuples(index=False))
    found = len(ledger[~ledger["id"].isin(blank)])
    # Two near copies of one original need not be near copies of each other, where that one falls to an evaluation copy.
    assert 0.98 <= found / expected <= 1


def test_texts_are_unchanged_but_for_personal_data(whole, corpus):
    for chat in whole.conversations():
        original = corpus[chat.id]
        if original.labels["kind"] == "pii":
            assert not any(value in str(chat) for name, values in original.labels["pii"].items() for value in values if name == "email")
        elif "[PHONE" not in str(chat) and "[IP" not in str(chat):
            assert chat.turns == original.turns
    flags = whole.flags()
    assert {"email replaced", "card replaced"} <= set(flags["finding"])
    values = [value for chat in corpus.values() for found in chat.labels.get("pii", {}).values() for value in found]
    told = whole.ledger().to_csv() + flags.to_csv() + whole.reasons.to_csv()
    assert len(values) > 25 and not any(value in told for value in values), "no account repeats what it found"


def test_manifest_has_hashes_and_no_path_of_this_machine(whole, raw):
    manifest = read_json(whole.out / "manifest.json")
    assert manifest["outputs"]["ledger.parquet"] == file_hash(whole.out / "ledger.parquet")
    assert {entry["file"] for entry in manifest["inputs"]} == {path.name for path in raw.iterdir()}
    assert str(raw) not in json.dumps(manifest) and str(whole.out) not in json.dumps(manifest)
    assert read_json(whole.out / "times.json")["peak_bytes"] > 1 << 20


# -- the same bytes ------------------------------------------------------------------------------------------------

NURSERY = """
import glob, json, os, sys, threading, time
from cdr_lib.curation.pipeline import curate
for line in sys.stdin:
    plan, out, raw, seconds, pattern = json.loads(line)
    if not (child := os.fork()):
        def end():
            began = time.monotonic()
            while time.monotonic() - began < seconds and not (pattern and glob.glob(pattern)):
                time.sleep(0.001)
            os.kill(os.getpid(), 9)
        threading.Thread(target=end, daemon=True).start()
        curate(plan, out, raw, progress=False)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def start(raw):
    """Starts a run that is killed after some seconds, or once a file is there; says how it ended. Runs are forks of one
    process that has imported everything and started no thread."""
    with subprocess.Popen([sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        def run(out, seconds=600.0, pattern=None) -> int:
            print(json.dumps([PLAN, str(out), str(raw), seconds, pattern]), file=nursery.stdin, flush=True)
            return int(nursery.stdout.readline())

        yield run
        nursery.stdin.close()


def test_killed_at_any_moment_and_started_again(start, whole, tmp_path):
    rng, ends = random.Random(4), []
    while 0 not in ends:
        ends.append(start(tmp_path / "out", rng.uniform(0.02, 0.5) if len(ends) < 8 else 600))
    assert ends.count(-9) >= 3 and set(ends) == {0, -9}
    assert hashes(tmp_path / "out") == hashes(whole.out)


def test_killed_right_after_a_file_appeared(start, whole, raw, tmp_path):
    """Each kind of file, in the order in which they come: a run is killed once it is there, and the next one goes on."""
    out = tmp_path / "out"
    for moment in ("pool/*/00000.parquet", "pool/*/items.parquet", "work/01 exact", "work/03 fuzzy/decision.npz", "work/04 semantic/pairs.json",
                   "corpus.part/00000.parquet", "ledger.parquet", "reasons.csv"):
        assert start(out, pattern=str(out / moment)) == -9 or moment == "reasons.csv", moment
    curate(PLAN, out, raw, progress=False)
    assert hashes(out) == hashes(whole.out)


def test_several_processes(raw, whole, tmp_path):
    curate(PLAN, tmp_path / "out", raw, workers=2, progress=False)
    assert hashes(tmp_path / "out") == hashes(whole.out)


def test_a_dask_cluster(raw, whole, tmp_path):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        curate(PLAN, tmp_path / "out", raw, dask=cluster.scheduler_address, progress=False)
        with distributed.Client(cluster) as client, pytest.raises(CdrError, match="damaged"):
            # An error on a worker arrives as it is.
            next((tmp_path / "out" / "pool").glob("*/00000.parquet")).write_bytes(b"PAR1")
            curate({**PLAN, "stages": [{"exact": {"first_turns": 1}}]}, tmp_path / "out", raw, dask=client, progress=False)
    assert hashes(tmp_path / "out") == hashes(whole.out)
    import dask

    with dask.config.set({"distributed.comm.timeouts.connect": "0.5s"}), pytest.raises(CdrError, match="no Dask scheduler"):
        curate(PLAN, tmp_path / "none", raw, dask="tcp://127.0.0.1:9", progress=False)


def test_size_of_shards_changes_no_decision(raw, whole, tmp_path):
    stages = [stage for stage in PLAN["stages"] if "semantic" not in stage]
    results = [curate({"stages": stages, "shard": shard}, tmp_path / str(shard), raw, progress=False) for shard in (75, 5000)]
    assert results[0].ledger().equals(results[1].ledger()) and kept(results[0]) == kept(results[1])


def test_CUR_15_order_of_rows_and_hash_seed_change_nothing(tmp_path):
    corpus = list(dirty_corpus(400, seed=2))
    write_jsonl(corpus, tmp_path / "a.jsonl")
    random.Random(0).shuffle(corpus)
    write_jsonl(corpus, tmp_path / "b.jsonl")
    code = "import sys; from cdr_lib.curation.pipeline import curate; curate({'stages': ['exact', 'fuzzy']}, sys.argv[2], sys.argv[1], progress=False)"
    runs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / f"{name}.jsonl"), str(tmp_path / name)],
                             env={**os.environ, "PYTHONHASHSEED": seed}) for name, seed in (("a", "0"), ("b", "1"))]
    assert [run.wait() for run in runs] == [0, 0]
    one, two = (pd.read_parquet(tmp_path / name / "ledger.parquet").sort_values("id", ignore_index=True) for name in "ab")
    assert one.equals(two) and len(one) > 30


# -- plans that change ---------------------------------------------------------------------------------------------

def test_what_changed_is_done_again_and_said(raw, tmp_path):
    raw = raw / "helpdesk.jsonl"
    out, plan = tmp_path / "out", {"stages": ["exact", "heuristics", "fuzzy"], "shard": 1000}
    first = curate(plan, out, raw, progress=False)
    again = curate(plan, out, raw, progress=False)
    assert not first.notes and again.notes == ["nothing has changed: the corpus is the one that is there"]
    rules = {"heuristics": {"rules": ["default", {"signal": "n_turns", "least": 2, "reason": "one message"}]}}
    third = curate({**plan, "stages": ["exact", rules, "fuzzy"]}, out, raw, progress=False)
    assert [note.split(",")[0] for note in third.notes] == ["heuristics: decided again from what was measured", "fuzzy: measured again",
                                                           "the corpus is written again"]
    fresh = curate({**plan, "stages": ["exact", rules, "fuzzy"]}, tmp_path / "fresh", raw, progress=False)
    assert hashes(out) == hashes(fresh.out) and len(third) < len(first)
    assert "one message" in set(third.ledger()["reason"])


def test_changed_input_is_read_again(tmp_path):
    write_jsonl(dirty_corpus(200), tmp_path / "a.jsonl")
    write_jsonl(chats("one of a kind"), tmp_path / "b.jsonl")
    plan = {"stages": ["exact"], "inputs": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]}
    curate(plan, tmp_path / "out", progress=False)
    write_jsonl(dirty_corpus(300), tmp_path / "a.jsonl")
    result = curate(plan, tmp_path / "out", progress=False)
    assert any("not the same any more" in note for note in result.notes)
    assert hashes(tmp_path / "out") == hashes(curate(plan, tmp_path / "fresh", progress=False).out)


def test_lost_or_altered_output_is_written_again(raw, tmp_path):
    plan = {"stages": ["exact"], "shard": 1000}
    before = hashes(curate(plan, tmp_path / "out", raw, progress=False).out)
    next((tmp_path / "out" / "corpus").iterdir()).unlink()
    (tmp_path / "out" / "stages.csv").write_text("mine\n")
    curate(plan, tmp_path / "out", raw, progress=False)
    assert hashes(tmp_path / "out") == before


def test_two_runs_in_one_folder(tmp_path):
    import fcntl

    write_jsonl(chats("a"), tmp_path / "a.jsonl")
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CdrError, match="another run"):
            curate({"stages": ["exact"]}, tmp_path / "out", tmp_path / "a.jsonl", progress=False)


# -- bounds --------------------------------------------------------------------------------------------------------

def test_caps_stop_the_run_before_a_corpus_is_written(tmp_path):
    write_jsonl(chats(*["the same words again and again"] * 50, *[f"words of number {i}" for i in range(50)]), tmp_path / "a.jsonl")
    for caps, words in (({"cluster": 40}, ("exact", "50 conversations", "'c0' (a) stands for 50", "the same words", "raise the cap")),
                        ({"share_per_source": 0.4}, ("'a'", "51 of 100", "49.0%", "exact: exact copy 49"))):
        with pytest.raises(CurationStopped) as stop:
            curate({"stages": ["exact"], "caps": caps}, tmp_path / "out", tmp_path / "a.jsonl", progress=False)
        assert all(word in str(stop.value) for word in words), stop.value
        assert not list((tmp_path / "out").glob("corpus*")) and not (tmp_path / "out" / "manifest.json").exists()
    assert len(curate({"stages": ["exact"]}, tmp_path / "out", tmp_path / "a.jsonl", progress=False)) == 51


# -- splits --------------------------------------------------------------------------------------------------------

def test_CUR_07_evaluation_splits_are_never_shrunk(tmp_path):
    train = [Conversation.make(id, ("user", text)) for id, text in
             (("1", "how do I return a bag"), ("2", "blue kettle price?"), ("3", "store hours"))]
    test = [Conversation.make(id, ("user", text)) for id, text in (("4", "Blue kettle  price?"), ("5", "gift card"))]
    write_jsonl(train, tmp_path / "train.jsonl")
    write_jsonl(test, tmp_path / "test.jsonl")
    inputs = [{"path": str(tmp_path / "train.jsonl")}, {"path": str(tmp_path / "test.jsonl"), "split": "evaluation"}]
    for number, order in enumerate((inputs, inputs[::-1])):
        result = curate({"stages": ["exact", "fuzzy"]}, tmp_path / str(number), order, progress=False)
        assert kept(result) == ["1", "3", "4", "5"]
        fallen, = result.ledger().itertuples()
        assert (fallen.id, fallen.survivor, fallen.reason) == ("2", "4", "exact copy of an evaluation conversation")


def test_evaluation_conversations_pass_filters_and_are_reported(tmp_path):
    write_jsonl([*chats("", "https://a.example/b https://a.example/c", "a fine question", split="test"),
                 Conversation.make("x", ("user", " "))], tmp_path / "a.jsonl")
    result = curate({"stages": ["heuristics", {"pii": "drop"}]}, tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    assert kept(result) == ["c0", "c1", "c2"] and list(result.ledger()["id"]) == ["x"]
    assert set(result.flags()["finding"]) == {"evaluation conversation: empty", "evaluation conversation: urls"}
    forced = curate({"stages": ["heuristics"]}, tmp_path / "out", {"path": str(tmp_path / "a.jsonl"), "split": "train"}, progress=False)
    assert kept(forced) == ["c2"]


# -- inputs that are unlike ----------------------------------------------------------------------------------------

def test_one_conversation(tmp_path):
    write_jsonl(chats("only one"), tmp_path / "a.jsonl")
    result = curate(PLAN, tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    assert kept(result) == ["c0"] and len(result.ledger()) == 0 and len(result.flags()) == 0 and result.counts["dropped"].sum() == 0


def test_all_the_same(tmp_path):
    write_jsonl(chats(*["the very same thing"] * 300), tmp_path / "a.jsonl")
    with pytest.raises(CurationStopped, match="share_per_source"):
        curate(PLAN, tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    result = curate({**PLAN, "caps": {"share_per_source": None}}, tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    assert kept(result) == ["c0"] and set(result.ledger()["survivor"]) == {"c0"}


def test_all_empty(tmp_path):
    write_jsonl(chats(*["", " ", "\u200b"] * 5), tmp_path / "a.jsonl")
    result = curate(PLAN, tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    assert kept(result) == [] and list((tmp_path / "out" / "corpus").iterdir()) == []
    assert set(result.ledger()["reason"]) == {"empty"} and len(result.ledger()) == 15


def test_nothing_at_all(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(CdrError, match="no records"):
        curate(PLAN, tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    write_parquet([], tmp_path / "b.parquet")
    with pytest.raises(CdrError, match=r"no conversations in b\.parquet"):
        curate(PLAN, tmp_path / "out", tmp_path / "b.parquet", progress=False)
    (tmp_path / "c.jsonl").write_text('{"id": "x", "turns": []}\n' * 2)
    with pytest.raises(CdrError, match="all 2 records were refused.*no turns"):
        curate(PLAN, tmp_path / "out", tmp_path / "c.jsonl", progress=False)


def test_mixed_scripts_and_a_very_long_turn(tmp_path):
    texts = ["我想退掉上周买的蓝色水壶因为它漏水", "我想退掉上周买的红色水壶因为它漏水", "متى يفتح المتجر يوم الجمعة؟", "धन्यवाद, सब ठीक है।",
             "Когда открывается магазин?", "the kettle that I bought leaks " * 33_000, "\u05e9\u05dc\u05d5\u05dd 👋🏽 mixed Ελληνικά"]
    write_jsonl(chats(*texts), tmp_path / "a.jsonl")
    began = time.monotonic()
    result = curate({"stages": ["exact", {"fuzzy": {"threshold": 0.6, "characters": 3}}, "heuristics", {"pii": "redact"}]},
                    tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    assert time.monotonic() - began < 30
    ledger = result.ledger().set_index("id")
    assert set(ledger.index) == {"c1", "c5"} and ledger.loc["c1", "survivor"] == "c0" and ledger.loc["c5", "stage"] == "heuristics"
    assert ledger.loc["c1", "score"] == pytest.approx(0.6667, abs=1e-4)


def test_wrong_encoding_is_told_record_by_record(tmp_path):
    good = json.dumps(chats("fine")[0].to_dict()).encode()
    (tmp_path / "a.jsonl").write_bytes(good + b'\n{"id": "d", "turns": [{"role": "user", "text": "caf\xe9"}]}\n')
    result = curate({"stages": ["exact"]}, tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    row, = result.ledger().itertuples()
    assert kept(result) == ["c0"] and row.stage == "read" and "UTF-8" in row.rule and row.place == "a.jsonl:2"


def test_hostile_ids_and_a_first_record_that_is_broken(tmp_path):
    turn = '"turns": [{"role": "user", "text": "fine"}]'
    (tmp_path / "a.jsonl").write_text("\n".join([
        '{"id": "\\ud83d", ' + turn + "}", '{"id": 5, ' + turn + "}", '{"id": ["x"], ' + turn + "}", '{"id": "\\u0000 ", ' + turn + "}",
        '{"id": "ok, \\"q\\"\\nnew", ' + turn + "}", "{"]) + "\n")
    result = curate({"stages": ["exact"]}, tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    assert kept(result) == ['ok, "q"\nnew'] and len(result.ledger()) == 5
    assert [row.place for row in result.ledger().itertuples()] == [f"a.jsonl:{line}" for line in (1, 2, 3, 4, 6)]


def test_damaged_and_mistaken_files(tmp_path):
    write_parquet(dirty_corpus(300), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(data[:len(data) // 2])
    middle = bytearray(data)
    middle[2000:3000] = bytes(1000)
    (tmp_path / "middle.parquet").write_bytes(middle)
    pq.write_table(pa.table({"id": ["a"], "text": ["b"]}), tmp_path / "columns.parquet")
    (tmp_path / "renamed.parquet").write_bytes(gzip.compress(b"text"))
    (tmp_path / "x.docx").write_bytes(b"PK")
    for name, word in (("cut", "cut.parquet"), ("middle", "middle.parquet"), ("columns", "columns are id, text"), ("renamed", "not a readable Parquet")):
        with pytest.raises(CdrError, match=word):
            curate({"stages": ["exact"]}, tmp_path / "out", tmp_path / f"{name}.parquet", progress=False)
    with pytest.raises(CdrError, match="x.docx"):
        curate({"stages": ["exact"]}, tmp_path / "out", tmp_path / "x.docx", progress=False)
    with pytest.raises(CdrError, match="no such file"):
        curate({"stages": ["exact"]}, tmp_path / "out", tmp_path / "nothing.jsonl", progress=False)


def test_a_shard_of_the_pool_that_was_damaged(raw, tmp_path):
    curate({"stages": ["exact"], "shard": 1000}, tmp_path / "out", raw / "forum.jsonl", progress=False)
    shard = next((tmp_path / "out" / "pool").glob("*/00000.parquet"))
    shard.write_bytes(shard.read_bytes()[:500])
    with pytest.raises(CdrError, match="damaged.*delete its folder"):
        curate({"stages": ["heuristics"], "shard": 1000}, tmp_path / "out", raw / "forum.jsonl", progress=False)


def test_ids_that_occur_in_two_files(tmp_path):
    write_jsonl(chats("one", "two"), tmp_path / "a.jsonl")
    write_jsonl(chats("three", "two"), tmp_path / "b.jsonl")
    result = curate({"stages": ["exact"]}, tmp_path / "out", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], progress=False)
    found = {chat.id: chat for chat in result.conversations()}
    assert sorted(found) == ["c0", "c0#2", "c1"] and found["c0#2"].meta["original_id"] == "c0" and found["c0#2"].source == "b"
    assert list(result.ledger()[["id", "survivor"]].itertuples(index=False, name=None)) == [("c1#2", "c1")]


def test_repeated_records_stand_in_the_ledger(tmp_path):
    rows = [json.dumps(chat.to_dict()) for chat in chats("one", "two")]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, rows[0], rows[0].replace("one", "another")]) + "\n")
    result = curate({"stages": ["exact"]}, tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    assert kept(result) == ["c0", "c0#2", "c1"]
    assert list(result.ledger()[["id", "reason"]].itertuples(index=False, name=None)) == [("c0", "repeated record")]


def test_formats_of_others(tmp_path):
    (tmp_path / "m.json").write_text(json.dumps([{"id": "a", "messages": [{"role": "user", "content": "hello there"}]},
                                                 {"id": "b", "messages": [{"role": "nobody", "content": "hm"}]}]))
    (tmp_path / "s.jsonl").write_text(json.dumps({"id": "s", "conversations": [{"from": "human", "value": "hi you"}]}) + "\n")
    result = curate({"stages": ["exact"]}, tmp_path / "out", tmp_path, progress=False)
    assert kept(result) == ["a", "s"] and result.ledger()["id"].tolist() == ["b"]


def test_shards_hold_what_was_read(tmp_path):
    corpus = [dataclasses.replace(chat, turns=tuple(dataclasses.replace(turn, speaker="Ana" if i else None, meta={"n": i} if i else {})
                                                    for i, turn in enumerate(chat.turns))) for chat in dirty_corpus(300)]
    write_parquet(corpus, tmp_path / "a.parquet")
    assert read_shard(tmp_path / "a.parquet") == corpus == list(read_parquet(tmp_path / "a.parquet"))


def test_a_stage_alone_agrees_with_the_pipeline(tmp_path):
    corpus = list(dirty_corpus(500, seed=4))
    write_jsonl(corpus, tmp_path / "a.jsonl")
    left, table = run_stage(Fuzzy(), corpus)
    result = curate({"stages": ["fuzzy"]}, tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    assert sorted(chat.id for chat in left) == kept(result)
    assert dict(zip(table["id"], table["survivor"])) == dict(result.ledger()[["id", "survivor"]].itertuples(index=False, name=None))


def test_true_similarity_of_every_near_copy(whole, corpus):
    def shingles(id):
        words = render(corpus[id].turns, "text").casefold().split()
        return set(zip(*(words[i:] for i in range(5))))

    rows = [row for row in whole.ledger().query("stage == 'fuzzy'").itertuples() if corpus[row.id].meta.get("language") == "en"]
    assert len(rows) > 25
    for row in rows:
        a, b = shingles(row.id), shingles(row.survivor)
        # The stage takes a sign apart from the word before it, which moves the similarity a little.
        assert row.score >= np.float32(0.8) and len(a & b) / len(a | b) == pytest.approx(row.score, abs=0.03)


def test_inputs_and_outputs_do_not_touch(raw, tmp_path):
    before = {path: file_hash(path) for path in raw.iterdir()}
    curate({"stages": ["exact"]}, tmp_path / "out", raw, progress=False)
    assert before == {path: file_hash(path) for path in raw.iterdir()}
    assert Input(str(raw)).files()[0].path.startswith(str(raw)) and sum(1 for _ in read_jsonl(raw / "helpdesk.jsonl", on_error="collect")) > 300


def test_the_default_plan_notes_language_and_quality(tmp_path):
    write_jsonl(dirty_corpus(250, seed=11), tmp_path / "a.jsonl")
    result = curate("default", tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    assert list(dict.fromkeys(result.counts["stage"])) == ["read", "exact", "heuristics", "fuzzy", "language", "quality", "pii"]
    found = [chat.labels["curation"] for chat in result.conversations()]
    assert found and all(set(note) == {"language", "quality"} and note["quality"] != "low" for note in found)
    evaluation = [chat for chat in dirty_corpus(250, seed=11) if chat.meta.get("split")]
    assert {chat.id for chat in evaluation} <= set(kept(result))
    other = curate({"stages": ["exact", "heuristics", "fuzzy", "language", {"quality": {"keep": ["high"]}}, {"pii": "redact"}]},
                   tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    assert other.notes[0].startswith("quality: decided again") and len(other) <= len(result)


def test_domains_are_noted(tmp_path):
    write_jsonl(dirty_corpus(40), tmp_path / "a.jsonl")
    result = curate({"stages": ["heuristics", {"domains": {"encoder": "hash"}}]}, tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    assert all(isinstance(chat.labels["curation"]["domain"], str) for chat in result.conversations())


def test_output_inside_of_an_input(tmp_path):
    write_jsonl(chats("one"), tmp_path / "a.jsonl")
    assert kept(curate({"stages": ["exact"]}, tmp_path / "out", tmp_path, progress=False)) == ["c0"], "a folder of files may hold it"
    with pytest.raises(CdrError, match="lies inside the input"):
        curate({"stages": ["exact"]}, tmp_path / "out", {"path": str(tmp_path), "format": "sgd"}, progress=False)


def test_a_file_that_is_given_twice(tmp_path):
    write_jsonl(chats("one", "two"), tmp_path / "a.jsonl")
    result = curate({"stages": ["exact"]}, tmp_path / "out", [str(tmp_path / "a.jsonl")] * 2, progress=False)
    assert kept(result) == ["c0", "c1"] and dict(result.ledger()[["id", "survivor"]].itertuples(index=False, name=None)) == {
        "c0#2": "c0", "c1#2": "c1"}


def test_a_corpus_that_is_curated_again_keeps_what_was_noted(tmp_path):
    for name in "ab":
        write_jsonl(chats(f"the kettle of shop {name} leaks from its bottom, what now?"), tmp_path / f"{name}.jsonl")
    first = curate({"stages": ["language"]}, tmp_path / "first", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], progress=False)
    twice = [*map(str, first.files()), str(tmp_path / "b.jsonl")]
    second = curate({"stages": [{"domains": {"encoder": "hash"}}]}, tmp_path / "second", twice, progress=False)
    found = {chat.id: chat for chat in second.conversations()}
    assert sorted(found) == ["c0", "c0#2", "c0#3"] and found["c0#2"].meta["original_id"] == found["c0#3"].meta["original_id"] == "c0"
    assert set(found["c0"].labels["curation"]) == {"language", "domain"} and set(found["c0#3"].labels["curation"]) == {"domain"}


def test_pairs_of_a_search_that_was_stopped_are_not_taken_for_others(tmp_path, monkeypatch):
    """The note on what pairs were looked for must not outlive them."""
    from cdr_lib.curation import stages

    write_jsonl(dirty_corpus(200, seed=3), tmp_path / "a.jsonl")

    def plan(floor, threshold):
        return {"stages": [{"semantic": {"encoder": "hash", "floor": floor, "threshold": threshold}}]}

    curate(plan(0.7, 0.9), tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    save = stages.save_arrays

    def stopped(folder, **arrays):
        save(folder, **arrays)
        if "left" in arrays:
            raise KeyboardInterrupt

    monkeypatch.setattr(stages, "save_arrays", stopped)
    with pytest.raises(KeyboardInterrupt):
        curate(plan(0.95, 0.95), tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    monkeypatch.undo()
    curate(plan(0.7, 0.8), tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    assert hashes(tmp_path / "out") == hashes(curate(plan(0.7, 0.8), tmp_path / "fresh", tmp_path / "a.jsonl", progress=False).out)


@pytest.mark.real
@pytest.mark.skipif(not os.environ.get("CDR_DATA"), reason="CDR_DATA names no folder of public corpora")
def test_public_corpora_together(tmp_path):
    plan = {"stages": ["exact", "heuristics", "fuzzy", {"pii": "report"}], "inputs": [
        {"format": "dialogsum", "split": "train"}, {"format": "tau-bench"}, {"format": "mt-bench-101"}]}
    result = curate(plan, tmp_path / "out", progress=False)
    assert set(result.counts["source"]) == {"dialogsum", "tau-bench", "mt-bench-101"} and 2_400 < len(result) < 2_700
    assert curate(plan, tmp_path / "out", progress=False).notes == ["nothing has changed: the corpus is the one that is there"]
    assert len(result.ledger()) + len(result) == result.counts.query("stage == 'read'")["in"].sum()


def test_a_shared_system_prompt_makes_nobody_a_copy(tmp_path):
    prompt = "You are a careful assistant of a bank. " * 30
    chats = [Conversation.make(f"c{number}", ("system", prompt), ("user", f"question {number} about {word}"),
                               ("assistant", f"an answer on {word}, number {number}"))
             for number, word in enumerate(("cards", "loans", "savings", "fees"))]
    write_jsonl(chats, tmp_path / "in.jsonl")
    done = curate({"stages": ["exact", "fuzzy"]}, tmp_path / "out", tmp_path / "in.jsonl", progress=False)
    assert len(done) == 4


@pytest.fixture
def interruptible():
    "Interrupts as in a terminal: what runs in the background may have inherited that they are ignored."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_compiled_code_loses_is_raised_again(interruptible):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), _Crew(1, None) as crew:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
        crew.do(len, [("abc",)], "measure", False)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_manifest_has_the_caps_of_the_last_call(tmp_path):
    write_jsonl([Conversation.make(f"c{number}", ("user", f"question {number}"), ("assistant", "ok")) for number in range(4)],
                tmp_path / "in.jsonl")
    for share in (0.9, 0.5):
        curate({"stages": ["exact"], "caps": {"share_per_source": share}}, tmp_path / "out", tmp_path / "in.jsonl", progress=False)
        assert read_json(tmp_path / "out" / "manifest.json")["plan"]["caps"]["share_per_source"] == share
