"""core.llm against a small real model behind llama.cpp's own server: what a protocol on paper cannot show.

Fetch the model once with `python -m tests.real_llm --fetch`; without it, or without xllamacpp, everything here is skipped.
"""
from typing import Literal

import pytest
from pydantic import BaseModel

from cdr_lib.core.llm import LLM
from tests.real_llm import RealLLM, missing

pytestmark = [pytest.mark.llm, pytest.mark.skipif(missing() is not None, reason=missing() or "")]


class Preference(BaseModel):
    attribute: Literal["colour", "size", "brand"]
    value: str
    strength: int


@pytest.fixture(scope="module")
def server():
    with RealLLM(parallel=2, context=1024, threads=1) as running:
        yield running


def questions(n):
    return [[("system", "You read what a shopper wants."),
             ("user", f"I would like a {colour} kettle. Attribute, value, strength 1 to 5?")]
            for colour in ("red", "blue", "black", "white", "green", "grey", "pink", "silver")[:n]]


def test_structured_output(server):
    llm = LLM(server.model, server.base_url, timeout=300, max_tokens=60)
    replies = llm.chat_many(questions(4), Preference, progress=False)
    assert [reply.status for reply in replies] == ["ok"] * 4, replies
    assert all(isinstance(reply.value, Preference) and "schema_in_prompt" not in reply.flags for reply in replies)
    assert llm.usage.billed == 4 and llm.usage.prompt_tokens > 100 and llm.usage.unmetered == 0


def test_the_same_seed_gives_the_same_answer(server):
    llm = LLM(server.model, server.base_url, timeout=300, max_tokens=20, seed=3, concurrency=1)
    first, second = (llm.chat(questions(1)[0]) for _ in range(2))
    assert first.text and first.text == second.text


def test_two_at_a_time(server):
    llm = LLM(server.model, server.base_url, timeout=300, max_tokens=16, retries=0, concurrency=2)
    replies = llm.chat_many(questions(4), progress=False)
    assert all(reply.text for reply in replies) and {reply.status for reply in replies} <= {"ok", "truncated"}
    assert llm.usage.billed >= 4 and llm.usage.attempts == llm.usage.billed  # nothing was refused or lost


def test_a_cut_answer_is_cut(server):
    llm = LLM(server.model, server.base_url, timeout=300, max_tokens=3, retries=1)
    reply = llm.chat([("user", "Count from one to one hundred in words.")])
    assert reply.status == "truncated" and reply.usage.attempts == 2 and reply.usage.completion_tokens == 9


def test_a_full_context_is_named(server):
    long = [("system", "S"), ("user", "word " * 1500), ("assistant", "yes"), ("user", "Say hello.")]
    assert LLM(server.model, server.base_url, timeout=300, max_tokens=10).chat(long).status == "context_overflow"
    fitted = LLM(server.model, server.base_url, timeout=300, max_tokens=10, context_limit=1000).chat(long)
    assert fitted.text and "left_out:2" in fitted.flags


def test_a_recorded_run_is_replayed(server, tmp_path):
    llm = LLM(server.model, server.base_url, timeout=300, max_tokens=60, cache=tmp_path / "r.jsonl", endpoint="smollm2",
              concurrency=2)
    first = llm.chat_many(questions(3), Preference, progress=False)
    llm.close()
    offline = LLM(server.model, endpoint="smollm2", max_tokens=60, cache=tmp_path / "r.jsonl", offline=True)
    assert offline.chat_many(questions(3), Preference, progress=False) == first and offline.usage.total_tokens == 0


def kettles():
    from cdr_lib.d2d.catalog import Catalog, Item
    from cdr_lib.d2d.shoppers import Shopper, ShoppingSet

    kinds = [(c, m, s) for c in ("red", "black", "white") for m in ("steel", "glass") for s in ("1 l", "1.7 l")]
    items = [Item(f"K{number}", f"Kettle number {number}", dict(zip(("colour", "material", "capacity"), kind)))
             for number, kind in enumerate(kinds)]
    return ShoppingSet("kettles", Catalog("kettles", items), [
        Shopper("ann", "K9", "I need a kettle.", ("made of steel", "holds 1.7 l", "white"), "someone who drinks tea",
                "the old one broke")])


def test_a_whole_shopping_session_and_its_replay(server, tmp_path):
    "The model words both sides and rates the answers; attributes, acceptance and patience are computed."
    from cdr_lib.d2d.assistants import make_assistants
    from cdr_lib.d2d.elicit import RuleElicitor
    from cdr_lib.d2d.index import CatalogIndex
    from cdr_lib.d2d.patience import LlmRater
    from cdr_lib.d2d.policy import PolicyConfig
    from cdr_lib.d2d.simulate import simulate

    shopping = kettles()

    def run(out, **options):
        # One line is a message: so small a model does not know when to stop.
        words = LLM(server.model, server.base_url, max_tokens=100, extra={"repeat_penalty": 1.1, "stop": ["\n"]}, **options)
        rates = LLM(server.model, server.base_url, max_tokens=100, **options)
        assistants = make_assistants(["d2d"], shopping, CatalogIndex(shopping.catalog, "bm25"), llm=words,
                                     elicitor=RuleElicitor(), config=PolicyConfig(m=2))
        (record,) = simulate(shopping, assistants, user=words, rater=LlmRater(rates), max_turns=4, out=tmp_path / out,
                             progress=False)
        words.close()
        rates.close()
        return record, words.usage + rates.usage

    options = {"timeout": 300, "concurrency": 1, "endpoint": "smollm2", "cache": tmp_path / "answers.jsonl"}
    record, usage = run("first", **options)
    assert record["stop"] in {"success", "abandoned", "max_turns"} and record["error"] is None, record
    assert len(record["turns"]) >= 2 and usage.billed == usage.attempts > 6 and usage.failed == 0
    spent = [sum(turn["tokens"][who][side] for turn in record["turns"] for who in turn["tokens"]) for side in (0, 1)]
    assert [a + b for a, b in zip(spent, record["unread_tokens"])] == [usage.prompt_tokens, usage.completion_tokens]
    again, usage = run("second", **options, offline=True)
    assert again == record and usage.attempts == 0 and usage.cache_hits > 6
    assert (tmp_path / "second" / "sessions.jsonl").read_bytes() == (tmp_path / "first" / "sessions.jsonl").read_bytes()
