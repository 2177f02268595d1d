"""A benchmark is built in stages that resume, keep what people said, and account for every pair."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from cdr_lib.benchmark import pipeline
from cdr_lib.benchmark.annotate import read_tasks
from cdr_lib.benchmark.freeze import read_benchmark, validate_benchmark
from cdr_lib.benchmark.judges import Judgement, Judgements
from cdr_lib.benchmark.pipeline import build, truth_table
from cdr_lib.benchmark.plan import BenchmarkPlan
from cdr_lib.benchmark.sample import make_sample
from cdr_lib.benchmark.verdicts import Verdict, VerdictLog
from cdr_lib.core.collection import Collection
from cdr_lib.core.config import CdrError, file_hash, read_json
from cdr_lib.core.conversation import Conversation, Turn
from cdr_lib.core.io import read_parquet, write_jsonl
from tests.fake_llm import FakeLLM

SMALL = {"kind": "turns", "base": "hash", "epochs": 2, "batch_size": 64, "valid": 0.3}
PLAN = {
    "name": "small", "date": "2026-01-01T00:00:00Z",
    "corpus": {"path": "sample", "conversations": 90, "training": 90, "licences": {"": "MIT"}},
    "queries": {"source": "own", "n": 15}, "candidates": {"retrievers": ["bm25"], "k": 5},
    "annotation": {"simulated": {"miss": 0.1, "false_alarm": 0.05}},
    "reranker": {"training": SMALL, "lessons": "own", "negatives": 3, "first": "bm25", "depth": 60, "threshold": 0.3},
    "classifier": {"training": SMALL, "generated": 1.0},
    "judges": {"simulated": {"one": {"misses": 0.05}, "two": {"accepts": 0.1}}},
}


def changed(**parts):
    return {name: {**PLAN[name], **parts.get(name, {})} if isinstance(PLAN[name], dict) else PLAN[name] for name in PLAN} | {
        name: value for name, value in parts.items() if not isinstance(value, dict) or name not in PLAN}


def bytes_of(out):
    "Hashes of all that a build made, without the times and what belongs to the training of a model."
    return {path.relative_to(out).as_posix(): file_hash(path) for path in sorted(out.rglob("*"))
            if path.is_file() and path.name not in ("times.json", "training.json", ".lock")}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    before = dict(os.environ)
    os.environ.update(CDR_CACHE=str(tmp_path_factory.mktemp("cache")), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small for more
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def first(tmp_path_factory, cache):
    return build(PLAN, tmp_path_factory.mktemp("build") / "out", progress=False)


def test_the_funnel_adds_up(first):
    funnel, reasons = first.funnel.set_index("stage"), first.reasons.groupby("stage")["count"].sum()
    for stage, row in funnel.iterrows():
        assert row["in"] - row["out"] == reasons.get(stage, 0), stage
    assert funnel.loc["annotation", "people"] == funnel.loc["annotation", "in"] == funnel.loc["candidates", "out"]
    assert funnel.loc["mapping", "in"] == funnel.loc["mapping", "out"] + reasons["mapping"]
    assert funnel.loc["classifier", "in"] == funnel.loc["mapping", "out"]
    assert funnel.loc["judges", "in"] == funnel.loc["classifier", "out"]
    assert len(first.pairs) == funnel.loc["freeze", "out"]


def test_every_relevant_pair_has_its_record(first):
    yes = first.provenance[first.provenance["verdict"] == "relevant"]
    said = set(zip(yes["query"], yes["conversation"]))
    relevant = {(query, id) for query in first.collection.queries for id in first.collection.relevant(query)}
    assert relevant == set(zip(first.pairs["query"], first.pairs["conversation"])) and relevant <= said
    assert set(first.pairs["by"]) <= {"people", "judges"} and first.provenance["time"].eq(PLAN["date"]).all()
    by_people = first.pairs[first.pairs["by"] == "people"]
    persons = yes[yes["kind"] == "person"].groupby(["query", "conversation"]).size()
    assert all(persons[pair] >= 2 for pair in zip(by_people["query"], by_people["conversation"]))


def test_the_frozen_folder_is_the_benchmark(first):
    found = read_benchmark(first.frozen)
    assert found.qrels == first.collection.qrels and list(found.queries) == list(first.collection.queries)
    assert validate_benchmark(found, read_parquet(first.out / "work" / "01 corpus" / "training.parquet")).ok
    assert "annotator-1" in (first.frozen / "card.md").read_text(encoding="utf-8")


def test_truth_table_by_hand(first):
    table = truth_table(first)
    known, ids = make_sample().qrels, set(first.collection.conversations)
    asked = pd.read_parquet(first.out / "work" / "02 queries" / "queries.parquet")["query"]
    truth = {(query, id) for query in asked for id in known[query] if id in ids}
    mine = {(query, id) for query in first.collection.queries for id in first.collection.relevant(query)}
    mine = {pair for pair in mine if first.collection.conversations[pair[1]].source != "synthetic"}
    row = table.loc["benchmark"]
    assert table.attrs["truth"] == len(truth) and row["pairs"] == len(mine) and row["right"] == len(mine & truth)
    assert row["precision"] == len(mine & truth) / len(mine) and row["recall"] == len(mine & truth) / len(truth)
    # Verification only takes pairs of the mapping away.
    assert table[table["set"] == "mapping"]["pairs"].is_monotonic_decreasing


def test_again_is_quick_and_changes_nothing(first):
    before, began = bytes_of(first.out), time.perf_counter()
    again = build(PLAN, first.out, progress=False)
    assert time.perf_counter() - began < 5 and bytes_of(first.out) == before and not again.notes
    pd.testing.assert_frame_equal(again.provenance, first.provenance)


def test_another_folder_gives_the_same_bytes_also_after_a_kill(first, tmp_path):
    out = tmp_path / "out"
    code = "import sys, json; from cdr_lib.benchmark.pipeline import build; build(json.loads(sys.argv[1]), sys.argv[2], progress=False)"
    process = subprocess.Popen([sys.executable, "-c", code, json.dumps(PLAN), str(out)], stderr=subprocess.DEVNULL)
    while process.poll() is None and not (out / "work" / "06 reranker").is_dir():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (out / "work" / "05 training pairs" / "done.json").is_file() and not (out / "manifest.json").is_file()
    build(PLAN, out, progress=False)
    assert bytes_of(out) == bytes_of(first.out)


def test_a_changed_setting_redoes_what_depends_on_it(first, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(first.out, out)
    marks = {path.name: file_hash(path / "key.json") for path in (out / "work").iterdir() if (path / "key.json").is_file()}
    built = build(changed(reranker={"threshold": 0.35}), out, progress=False)
    after = {path.name: file_hash(path / "key.json") for path in (out / "work").iterdir() if (path / "key.json").is_file()}
    same = {name for name in marks if marks[name] == after.get(name)}
    assert {"01 corpus", "02 queries", "03 candidates", "04 synthesis", "05 training pairs", "06 reranker", "simulated"} <= same
    assert "07 mapping" not in same and any(note.startswith("mapping: done again") for note in built.notes)


def test_people_are_waited_for_and_nothing_they_said_is_lost(tmp_path):
    plan = changed(annotation={"simulated": None}, synthesis={"references": 0})
    out, known = tmp_path / "out", make_sample()
    rounds = []
    for _ in range(6):
        built = build(plan, out, progress=False)
        if built.waiting is None:
            break
        rounds.append(built.waiting[0])
        assert built.collection is None and read_json(out / "people" / "open.json")["open"] == built.waiting[1] > 0
        log = VerdictLog(out / "verdicts.jsonl")
        for name in ("ann", "bob"):
            pairs = log.pending(read_tasks(out / "people" / f"{built.waiting[0]}.jsonl").pairs, name)
            log.extend([Verdict(*pair, name, "person", "relevant" if pair[1] in known.qrels[pair[0]] else "irrelevant",
                                round=built.waiting[0]) for pair in pairs])
    assert built.collection is not None and rounds[0] == "annotation" and len(set(rounds)) == len(rounds)
    assert not (out / "people" / "open.json").exists()
    # Nobody was asked twice about a pair, and another plan finds the verdicts again.
    assert all(not verdict.replaces for verdict in VerdictLog(out / "verdicts.jsonl"))
    fewer = build({**plan, "candidates": {"retrievers": ["bm25"], "k": 3}}, out, progress=False)
    assert fewer.waiting is None or fewer.waiting[0] != "annotation"


class Stubborn:
    "A judge that says yes to everything, or refuses."

    kind = "llm"

    def __init__(self, name, state="vote"):
        self.name, self.state = name, state

    def judge(self, pairs, queries, conversations, progress=False):
        return Judgements(tuple(Judgement(*pair, self.name, self.state, "relevant" if self.state == "vote" else "") for pair in pairs))


class Sure:
    "A classifier that lets everything pass."

    trained = SimpleNamespace(precision={"average_precision": 1.0}, counts={})
    train = classmethod(lambda cls, *args, **options: cls())

    def judge(self, pairs, queries, conversations, progress=False):
        return pairs.assign(probability=0.99, relevant=True, confidence=0.99)


def test_judges_that_refuse_leave_pairs_to_people(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "RelevanceClassifier", Sure)
    out = tmp_path / "out"
    built = build({**PLAN, "judges": {}}, out, progress=False, judges=[Stubborn("yes"), Stubborn("no", "refusal")])
    judged = built.funnel.set_index("stage").loc["judges"]
    assert judged["people"] == (built.provenance["judge"] == "yes").sum() > 10 and not (built.provenance["judge"] == "no").any()
    assert (built.pairs["by"] == "people").all()
    # Judges that only agree take nothing away, and judges that know the truth take away what is wrong.
    built = build({**PLAN, "judges": {}}, out, progress=False, judges=[Stubborn("yes"), Stubborn("also yes")])
    kept = built.funnel.set_index("stage").loc["judges"]
    assert kept["in"] == kept["out"] and kept["people"] == 0 and (built.pairs["by"] == "judges").sum() > 10
    exact = {name: {"misses": 0, "accepts": 0, "unsure": 0, "contradicts": 0, "refuses": 0} for name in ("one", "two")}
    built = build({**PLAN, "judges": {"simulated": exact}}, out, progress=False)
    table = truth_table(built)
    assert table.loc["review by people", "precision"] < 0.5 and table.loc["judges", "precision"] == 1
    assert table.loc["judges", "right"] == table.loc["review by people", "right"]


def test_models_write_and_judge_through_a_server_and_are_asked_once(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "RelevanceClassifier", Sure)

    def answer(request):
        asked = request["response_format"]["json_schema"]["schema"]["properties"]
        number = zlib.crc32(json.dumps(request["messages"]).encode())
        name = "".join(chr(97 + (number >> shift) % 26) for shift in range(0, 24, 3))
        if "verdict" in asked:
            return json.dumps({"reason": "It is all there.", "verdict": "relevant", "score": 9})
        if "messages" in asked:
            return json.dumps({"messages": []})
        return json.dumps({field: f"People who {field.replace('_', ' ')} {name}" for field in asked})

    with FakeLLM(answer) as server:
        models = [{"model": name, "base_url": server.base_url} for name in ("a", "b")]
        plan = changed(reranker={"lessons": "generated", "threshold": 0.2}) | {"llm": models[0], "judges": {"llms": models}}
        built = build(plan, tmp_path / "out", progress=False)
        many = len(server.requests)
        taught = pd.read_parquet(tmp_path / "out" / "work" / "05 training pairs" / "pairs.parquet")
        assert len(taught) == 90 * 5 and taught["label"].mean() == 0.4 and many > 180
        assert set(built.provenance["judge"]) >= {"a", "b"} and (built.pairs["by"] == "judges").any()
        tried = pd.read_parquet(tmp_path / "out" / "work" / "04 synthesis" / "tries.parquet")
        assert (tried["conversation"] == "").all() and tried["faults"].str.contains("no messages").all()
        shutil.rmtree(tmp_path / "out" / "work" / "05 training pairs")
        build(plan, tmp_path / "out", progress=False)
        assert len(server.requests) == many  # the answers were kept


def test_templates_and_a_plain_file(tmp_path):
    chats = [Conversation(f"c{i}", (Turn("user", f"My {thing} is broken, number {i}."), Turn("assistant", f"Try to turn the {thing} off."),
                                    Turn("user", "Thanks, it works now!"))) for i, thing in enumerate(["lamp", "phone", "oven", "car"] * 10)]
    write_jsonl([*chats, chats[0].__class__("copy", chats[0].turns)], tmp_path / "chats.jsonl")
    plan = {"corpus": {"path": str(tmp_path / "chats.jsonl"), "training": 20, "licences": {"": "MIT"}},
            "queries": {"source": "templates", "n": 10, "shares": "paper"}, "candidates": {"retrievers": ["bm25"]},
            "reranker": {"training": SMALL}}
    built = build(plan, tmp_path / "out", progress=False)
    assert built.waiting and built.waiting[0] == "annotation" and built.known is None
    reasons = built.reasons.set_index(["stage", "reason"])["count"]
    assert reasons["corpus", "reads like another"] == 1 and reasons["corpus", "for training"] == 20
    with pytest.raises(CdrError, match="truth is known"):
        build({**plan, "annotation": {"simulated": {}}}, tmp_path / "other", progress=False)
    with pytest.raises(CdrError, match="licences"):
        build({**plan, "corpus": {**plan["corpus"], "licences": {}}}, tmp_path / "other", progress=False)
    with pytest.raises(CdrError, match="different ones"):
        build({**plan, "corpus": {**plan["corpus"], "training": 40}}, tmp_path / "other", progress=False)
    with pytest.raises(CdrError, match="no such file, and no template"):
        BenchmarkPlan.read("nowhere.yaml")


def test_an_empty_benchmark_says_so(tmp_path):
    sample = make_sample()
    none = Collection("none", sample.conversations, sample.queries, {query: {} for query in sample.queries}, sample.areas)
    plan = changed(annotation={"simulated": {"miss": 0, "false_alarm": 0, "unsure": 0}}, reranker={"lessons": "generated", "threshold": 0},
                   synthesis={"references": 0})
    with pytest.raises(CdrError, match="no relevant pair: see funnel.csv"):
        build(plan, tmp_path / "out", progress=False, corpus=none)
    assert "too general" in (tmp_path / "out" / "reasons.csv").read_text()
