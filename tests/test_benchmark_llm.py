"""A benchmark whose queries, conversations and judgements a small real model writes: the prompts end to end, and their replay.

Fetch the model once with `python -m tests.real_llm --fetch`; without it, or without xllamacpp, everything here is skipped. The
model obeys a schema and is not sensible: what is tested is that everything it says is asked once, checked, counted and kept.
"""
import pandas as pd
import pytest

from cdr_lib.benchmark import pipeline
from cdr_lib.benchmark.annotate import read_tasks
from cdr_lib.benchmark.generate import augment, generate_queries
from cdr_lib.benchmark.pipeline import build
from cdr_lib.benchmark.reranker import train_reranker
from cdr_lib.benchmark.sample import make_sample
from cdr_lib.benchmark.verdicts import Verdict, VerdictLog
from cdr_lib.core.conversation import render
from cdr_lib.core.io import write_jsonl
from cdr_lib.core.llm import LLM
from tests.real_llm import RealLLM, missing
from tests.test_benchmark_build import Sure, bytes_of

pytestmark = [pytest.mark.llm, pytest.mark.skipif(missing() is not None, reason=missing() or "")]
DATE = "2026-01-01T00:00:00Z"


@pytest.fixture(scope="module")
def server():
    with RealLLM(threads=2) as running:
        yield running


def test_a_build_by_a_real_model_and_its_replay(server, tmp_path, monkeypatch):
    monkeypatch.setenv("CDR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pipeline, "RelevanceClassifier", Sure)  # a handful of verdicts teaches nothing
    chats = sorted(make_sample().conversations.values(), key=lambda one: (len(render(one.turns)), one.id))[:12]
    write_jsonl(chats, tmp_path / "chats.jsonl")
    world = {one.id: one for one in chats}
    lessons = pd.DataFrame([("Users with a question", id, place % 2) for place, id in enumerate(world)],
                           columns=["text", "conversation", "label"])
    train_reranker(lessons, world, tmp_path / "reranker", "hash", "turns", 0.5, epochs=1, device="cpu", progress=False)

    def settings(name, **more):
        return {"model": server.model, "base_url": server.base_url, "endpoint": "smollm2", "cache": str(tmp_path / name),
                "timeout": 300, "concurrency": 1, "max_tokens": 120, "retries": 1, "extra": {"repeat_penalty": 1.1}, **more}

    def run(out, **more):
        plan = {"name": "tiny", "date": DATE, "llm": settings("writer.jsonl", **more),
                "corpus": {"path": str(tmp_path / "chats.jsonl"), "conversations": 6, "licences": {"": "MIT"}},
                "queries": {"source": "generated"}, "candidates": {"retrievers": ["bm25"], "k": 1},
                "annotation": {"annotators": 1, "least": 1}, "synthesis": {"references": 1},
                "reranker": {"model": str(tmp_path / "reranker"), "first": "bm25", "depth": 6, "threshold": 0.0, "most": 6},
                "judges": {"least": 2, "llms": [settings(f"judge-{seed}.jsonl", seed=seed, **more) | {"model": f"smollm2-{seed}"}
                                                for seed in (1, 2)]}}
        for _ in range(8):
            built = build(plan, out, progress=False)
            if built.waiting is None:
                return built
            log, round = VerdictLog(out / "verdicts.jsonl"), built.waiting[0]
            pairs = log.pending(read_tasks(out / "people" / f"{round}.jsonl").pairs, "ann")
            # Every second pair, so that some queries have a conversation and others need one made.
            log.extend([Verdict(*pair, "ann", "person", "irrelevant" if place % 2 and round == "annotation" else "relevant",
                                round=round, time=DATE) for place, pair in enumerate(pairs)])
        raise AssertionError("people are asked without end")

    built = run(tmp_path / "first")
    funnel = built.funnel.set_index("stage")
    reasons = built.reasons.groupby("stage")["count"].sum()
    for stage, row in funnel.iterrows():
        assert row["in"] - row["out"] == reasons.get(stage, 0), (stage, built.funnel)
    assert {"person", "llm"} <= set(built.provenance["kind"]) or not funnel.loc["judges", "in"]

    # The rest of the prompts: hard negatives and a paraphrase, each either sound or turned down with a reason.
    def more_queries(**more):
        with_model = LLM(**settings("writer.jsonl", **more))
        queries = generate_queries(world.values(), with_model)
        found = augment(queries, world, with_model)
        with_model.close()
        return queries, found, with_model.usage

    queries, made, usage = more_queries()
    assert len(queries) + len(queries.rejected) == len(world) and usage.failed == 0
    assert len(made) == 4 * (len(queries) - len(made.rejected)) and all(one.reason for one in made.rejected)

    # Again without a server: nothing is asked, and every byte is the same.
    replay, again, usage = more_queries(offline=True)
    assert (replay, again) == (queries, made) and usage.attempts == 0 and usage.cache_hits >= len(world)
    run(tmp_path / "again", offline=True)
    first, second = bytes_of(tmp_path / "first"), bytes_of(tmp_path / "again")
    assert first.keys() == second.keys()
    # Settings stand in the account of a build, and `offline` is one of them.
    differ = {name for name in first if first[name] != second[name]}
    assert differ <= {"manifest.json", *(name for name in first if name.endswith("key.json"))}, differ
