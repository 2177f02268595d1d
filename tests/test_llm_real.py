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
    return [[("system", "You read what a shopper wants."), ("user", f"I would like a {colour} kettle. Attribute, value, strength 1 to 5?")]
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
    llm = LLM(server.model, server.base_url, timeout=300, max_tokens=60, cache=tmp_path / "r.jsonl", endpoint="smollm2", concurrency=2)
    first = llm.chat_many(questions(3), Preference, progress=False)
    llm.close()
    offline = LLM(server.model, endpoint="smollm2", max_tokens=60, cache=tmp_path / "r.jsonl", offline=True)
    assert offline.chat_many(questions(3), Preference, progress=False) == first and offline.usage.total_tokens == 0
