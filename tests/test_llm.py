"core.llm against a server that answers as it is told: every kind of failure, what it costs, what is kept, what is never kept."
import asyncio
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Generic, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from cdr_lib.core.config import CdrError
from cdr_lib.core.llm import LLM
from cdr_lib.core.reply import STATUSES, LLMError, Reply, Usage, read_response
from tests.fake_llm import FakeLLM

HELLO, T = [("user", "hello")], TypeVar("T")
WHOLE = '{"title":"kettle","features":[]}'


class Kettle(BaseModel):
    title: str
    features: list[str]


class Ok(BaseModel):
    ok: bool


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ask(tmp_path):
    "Play a script to one client; the waits are recorded and not waited for."
    opened = []

    def start(script, latency=0.0, **options):
        server = FakeLLM(script, latency).__enter__()
        server.waits = []

        async def sleep(seconds):
            server.waits.append(seconds)
            await asyncio.sleep(0)

        llm = LLM("fake", server.base_url, **{"sleep": sleep, "cache": tmp_path / "replay.jsonl", **options})
        opened.append((server, llm))
        return server, llm

    yield start
    for server, llm in opened:
        llm.close()
        server.__exit__()


def usage(prompt, completion):
    return {"prompt_tokens": prompt, "completion_tokens": completion}


def text_of(request):
    return "\n".join(str(message["content"]) for message in request["messages"])


# What one answer is

def test_LLM_04_cut_answers(ask):
    cut = [{"content": '{"title":"kettle","features":["quiet","1.7 L"', "finish_reason": "length", "usage": usage(50, 16)},
           {"content": None, "finish_reason": "length", "usage": usage(50, 16)}, {"content": WHOLE, "finish_reason": "length"}]
    for entry in cut:
        server, llm = ask([entry], retries=0)
        reply = llm.chat(HELLO, Kettle)
        assert (reply.status, reply.value, len(server.requests)) == ("truncated", None, 1)
        with pytest.raises(LLMError, match="truncated"):
            reply.unwrap()
    server, llm = ask(cut + [WHOLE], retries=2, max_tokens=16)
    reply = llm.chat(HELLO, Kettle)
    assert reply.status == "truncated" and [request["max_tokens"] for request in server.requests] == [16, 32, 64]
    assert reply.usage.prompt_tokens >= 100 and reply.usage.completion_tokens >= 32 and reply.usage.attempts == 3
    assert llm.chat(HELLO, Kettle).value == Kettle(title="kettle", features=[])  # not from the cache
    assert len(server.requests) == 4


def test_LLM_04_a_limit_that_cannot_be_raised_is_not_asked_again(ask):
    cut = {"content": "a b", "finish_reason": "length"}
    server, llm = ask([cut] * 3, max_tokens=None)
    assert llm.chat(HELLO).status == "truncated" and len(server.requests) == 1
    server, llm = ask([cut] * 3, max_tokens=90, context_limit=100)
    assert llm.chat(HELLO).status == "truncated" and [request["max_tokens"] for request in server.requests] == [90, 95]


@pytest.mark.parametrize("entry, status, attempts", [
    ({"content": None, "refusal": "I cannot help with that.", "finish_reason": "stop"}, "refused", 1),
    ({"content": "", "refusal": None, "finish_reason": "content_filter"}, "refused", 1),
    ({"choices": []}, "empty_response", 3),
    ({"content": '{"ok":true}', "refusal": None, "finish_reason": "content_filter"}, "ok", 1),
    # The same kind, elsewhere
    ("I'm sorry, but I can't help with that.", "refused", 1),
    ("I cannot assist with this request.", "refused", 1),
    ({"content": '{"ok":tr', "finish_reason": "content_filter"}, "refused", 1),
    ({"status": 400, "error": {"code": "content_filter", "message": "filtered"}}, "refused", 1),
    ({"message": {}}, "empty_response", 3),
    ({"message": None}, "empty_response", 3),
    ({"choices": None}, "empty_response", 3),
    ({"choices": [None]}, "empty_response", 3),
    ({"content": " \n\u200b"}, "empty_response", 3),
    ({"message": {"content": None, "tool_calls": [{"id": "t"}]}}, "empty_response", 3),
    ({"message": {"content": [{"type": "text", "text": '{"ok":'}, {"type": "text", "text": "true}"}]}}, "ok", 1)])
def test_LLM_05_refused_empty_filtered(ask, entry, status, attempts):
    server, llm = ask([entry] * 3)
    reply = llm.chat(HELLO, Ok)
    assert (reply.status, reply.usage.attempts, len(server.requests)) == (status, attempts, attempts)
    assert (reply.usage.refused, reply.usage.failed) == (status == "refused", status == "empty_response")
    assert reply.ok or reply.reason
    filtered = isinstance(entry, dict) and entry.get("finish_reason") == "content_filter"
    assert ("content_filter" in reply.flags) == (filtered and bool(entry["content"]))
    bodies = [json.dumps(request, sort_keys=True) for request in server.requests]
    assert len(set(bodies)) == attempts, "a request was repeated as it was"
    assert all(str(message["content"]).strip() for request in server.requests for message in request["messages"])


def test_LLM_05_one_refusal_never_stops_a_batch(ask):
    def script(request):
        text = text_of(request)
        return {"content": None, "refusal": "No."} if "3" in text else {"choices": []} if "5" in text else f"answer to {text}"

    _, llm = ask(script, retries=0)
    replies = llm.chat_many([[("user", f"q{number}")] for number in range(8)], progress=False)
    assert [reply.status for reply in replies] == ["ok"] * 3 + ["refused", "ok", "empty_response", "ok", "ok"]
    assert [reply.text for reply in replies if reply.ok] == [f"answer to q{number}" for number in (0, 1, 2, 4, 6, 7)]
    assert (llm.usage.refused, llm.usage.failed) == (1, 1)
    stored = [json.loads(line) for line in llm.cache.path.read_text().splitlines()]
    assert [row["answer"]["reason"] for row in stored if row["answer"]["status"] == "refused"] == ["No."]


def test_LLM_01_bad_answers_are_asked_for_again_with_what_was_wrong(ask):
    server, llm = ask(["no json here", '["a"]', "```json\n" + WHOLE + "\n```"])
    assert llm.chat([("system", "S"), ("user", "Q")], Kettle).value.title == "kettle"
    first, second, third = map(text_of, server.requests)
    assert first == "S\nQ" and "no json here" in second and "not a Kettle" in third and "no json here" not in third
    assert [request["messages"][0] for request in server.requests] == [{"role": "system", "content": "S"}] * 3
    server, llm = ask(["no json here"] * 3)
    reply = llm.chat(HELLO, Kettle)
    assert reply.status == "parse_error" and "no json here" in reply.reason and reply.text == "no json here"


def test_LLM_02_thoughts_never_become_an_answer_or_a_turn(ask):
    _, llm = ask(['<think>{"ok": false}</think>{"ok": true}', "<think>K2?</think>\nTry K2.", "<think>and on"], retries=0)
    assert llm.chat(HELLO, Ok).value.ok is True
    assert llm.chat(HELLO).text == "Try K2."
    assert llm.chat([("user", "other")]).status == "empty_response"


def test_every_status_is_known():
    for entry in ({}, {"choices": [{"message": {"content": "\ud800"}}]}, {"choices": [{"message": {"content": "x"}}]},
                  {"choices": [{"finish_reason": 3, "message": {"content": {"a": 1}}}]}, {"choices": "x", "usage": "y"}):
        assert read_response(entry, Kettle).status in STATUSES


ANY = st.recursive(st.none() | st.booleans() | st.integers(-2,
                                                           9) | st.sampled_from(["", "stop", "length", "content_filter",
                                                               WHOLE, "x", "\ud800"]),
                   lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(
                       ["choices", "message", "content", "refusal", "finish_reason", "usage", "prompt_tokens", "text"]),
                       inner), max_leaves=9)


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({"choices": ANY | st.lists(st.fixed_dictionaries(
    {"message": ANY | st.fixed_dictionaries({"content": ANY}, optional={"refusal": ANY}), "finish_reason": ANY}), max_size=2)},
    optional={"usage": ANY}), st.sampled_from([None, Kettle]))
def test_no_response_is_too_strange_to_be_named(data, schema):
    reply = read_response(data, schema)
    assert reply.status in STATUSES and reply.ok == (not reply.reason)
    assert schema is None or reply.ok == (reply.value is not None)
    if reply.ok:
        assert reply.text and "\ud800" not in reply.text


# Keys

VARIANTS = {"temp": {"temperature": 0.7}, "max": {"max_tokens": 16}, "seed": {"seed": 1},
            "url": {"base_url": "http://b.example/v1"},
            "model": {"model": "m2"}, "no_temp": {"temperature": None}, "extra": {"extra": {"top_k": 5}},
            "prompt": {"structured": "prompt"}}


def test_LLM_06_the_key_holds_everything_that_is_sent(monkeypatch):
    base = {"model": "m", "base_url": "http://a.example/v1", "temperature": 0.0}
    hi = [{"role": "user", "content": "hi"}]
    first = LLM(**base).key(hi)
    keys = [LLM(**{**base, **change}).key(hi) for name, change in VARIANTS.items() if name != "prompt"]
    keys += [LLM(**base).key(hi, Ok), LLM(**{**base, "structured": "prompt"}).key(hi, Ok), LLM(**base).key(hi, Kettle),
             LLM(**base).key(hi, sample=1), LLM(**base).key([{"role": "system", "content": "hi"}])]
    assert len({first, *keys}) == 13
    monkeypatch.setenv("OPENAI_API_KEY", "another key")
    assert first == LLM(**base).key([{"content": "hi", "role": "user"}])
    assert first == LLM(**{**base, "temperature": 0}).key([("user", "hi")])
    assert first == LLM("m", "http://a.example/v1/").key(hi) == LLM("m", "http://a.example/v1", retries=0, concurrency=1).key(hi)
    assert LLM("m", "http://a.example/v1", endpoint="lab").key(hi) == LLM("m", "http://b.example:81/v1", endpoint="lab").key(hi)


def test_LLM_06_another_sample_is_another_answer(ask):
    server, llm = ask(["one", "two"], seed=7)
    assert [llm.chat(HELLO, sample=number).text for number in (0, 1, 0, 1)] == ["one", "two", "one", "two"]
    assert [request["seed"] for request in server.requests] == [7, 8]


# What it costs

def test_LLM_08_usage_is_the_sum_over_all_attempts(ask):
    server, llm = ask([{"content": "not valid", "usage": usage(100, 20)}, {"status": 429},
                       {"content": WHOLE, "usage": usage(130, 25)}, {"content": WHOLE, "usage": None}])
    assert llm.chat(HELLO, Kettle).usage == Usage(230, 45, 275, attempts=3, billed=2)
    assert llm.chat(HELLO, Kettle).cached
    assert llm.usage == Usage(230, 45, 275, attempts=3, billed=2, cache_hits=1)
    assert llm.chat([("user", "another")], Kettle).usage == Usage(attempts=1, unmetered=1)
    assert llm.usage == Usage(230, 45, 275, attempts=4, billed=2, unmetered=1, cache_hits=1)


def test_LLM_08_totals_of_calls_that_fail(ask):
    _, llm = ask([{"content": "bad", "usage": usage(100, 20)}] * 3)
    reply = llm.chat(HELLO, Kettle)
    assert reply.status == "parse_error" and reply.usage == llm.usage == Usage(300, 60, 360, attempts=3, billed=3, failed=1)


@pytest.mark.parametrize("given, counted", [
    ({"prompt_tokens": 3, "completion_tokens": None, "total_tokens": 5}, Usage(3, 2, 5, billed=1)),
    ({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 9}, Usage(3, 2, 9, billed=1)),
    ({"prompt_tokens": 3, "completion_tokens": 2}, Usage(3, 2, 5, billed=1)),
    ({"prompt_tokens": 3}, Usage(unmetered=1)), ({}, Usage(unmetered=1)), ([], Usage(unmetered=1)), ("many", Usage(unmetered=1)),
    ({"prompt_tokens": "3", "completion_tokens": 2}, Usage(unmetered=1)),
    ({"prompt_tokens": -3, "completion_tokens": 2}, Usage(unmetered=1))])
def test_LLM_08_servers_count_as_they_like(given, counted):
    assert read_response({"choices": [{"message": {"content": "x"}}], "usage": given}).usage == counted


def test_usage_is_a_sum():
    assert sum([Usage(1, 2, 3), Usage(4, 5, 9, failed=1)]) == Usage(5, 7, 12, failed=1)
    assert Usage(1, 2, 3).to_dict()["total_tokens"] == 3
    with pytest.raises(TypeError):
        Usage() + 1


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_budget_stops_before_it_is_exceeded(ask, concurrency):
    entry = {"content": "a", "usage": usage(40, 20)}
    server, llm = ask(lambda request: entry, latency=0.01, budget=500, max_tokens=20, concurrency=concurrency)
    replies = llm.chat_many([[("user", f"number {number}")] for number in range(30)], progress=False)
    sent = sum(reply.ok for reply in replies)
    assert len(server.requests) == sent and {reply.status for reply in replies} == {"ok", "budget"}
    # 60 tokens each; the last ones are not risked, since a prompt may be longer than the longest one seen.
    assert llm.usage.total_tokens == 60 * sent <= 500 and sent >= 7
    left_out = [reply for reply in replies if reply.status == "budget"]
    assert all(reply.usage == Usage(failed=1) and "500" in reply.reason for reply in left_out)
    assert all(json.loads(line)["answer"]["status"] == "ok" for line in llm.cache.path.read_text().splitlines())


def test_unmetered_answers_and_lost_ones_count_as_the_most_they_can_cost(ask):
    server, llm = ask(lambda request: {"content": "a", "usage": None}, budget=200, max_tokens=50, concurrency=1)
    replies = llm.chat_many([[("user", f"number {number}")] for number in range(9)], progress=False)
    assert sum(reply.ok for reply in replies) == 2 and len(server.requests) == 2
    server, llm = ask(lambda request: {"content": "a", "drop": "middle"}, budget=200, max_tokens=50)
    assert llm.chat(HELLO).status == "budget" and len(server.requests) == 2


def test_a_cached_answer_needs_no_budget(ask):
    server, llm = ask([{"content": "a", "usage": usage(80, 20)}], budget=110, max_tokens=20)
    assert [llm.chat(HELLO).text for _ in range(3)] == ["a"] * 3 and llm.chat([("user", "x")]).status == "budget"


# Waiting

def busy(status=429, **headers):
    return {"status": status, "headers": {name.replace("_", "-"): value for name, value in headers.items()}}


def test_LLM_09_the_servers_hint_is_honoured(ask):
    server, llm = ask([busy(retry_after="20"), busy(retry_after="1", retry_after_ms="250"), busy(503),
                       busy(500, retry_after="soon"), "a"])
    assert llm.chat(HELLO).text == "a" and llm.usage.attempts == 5
    assert server.waits[0] == pytest.approx(20, abs=0.5)
    # Nobody really waited, so the second hint still lies within the first.
    assert all(0 < wait <= 20 for wait in server.waits) and len({json.dumps(request) for request in server.requests}) == 1


def test_LLM_09_a_day_is_not_waited_for(ask):
    server, llm = ask([busy(retry_after="86400"), "a"])
    reply = llm.chat(HELLO)
    assert reply.status == "server_error" and "86400" in reply.reason and server.waits == [] and len(server.requests) == 1


@pytest.mark.parametrize("entry, says", [
    ({"status": 401}, "LAB_KEY"), ({"status": 403}, "may not use"), ({"status": 404}, "base_url"), ({"status": 400}, "400"),
    ({"status": 429, "error": {"code": "insufficient_quota"}}, "quota"),
    ({"status": 429, "error": {"type": "insufficient_quota"}}, "quota"),
    ({"status": 422, "error": {"code": 422}}, "422"), ({"status": 418, "body": b"<html>teapot</html>"}, "418")])
def test_LLM_09_what_waiting_cannot_mend_is_asked_once(ask, entry, says):
    server, llm = ask([entry] * 9, key_env="LAB_KEY")
    reply = llm.chat(HELLO)
    assert reply.status == "server_error" and says in reply.reason and len(server.requests) == 1 and server.waits == []
    assert reply.usage == Usage(attempts=1, failed=1)


def test_LLM_09_back_off_grows_and_ends(ask):
    server, llm = ask([busy(503)] * 9, busy_retries=4)
    reply = llm.chat(HELLO)
    assert reply.status == "server_error" and "after 5 attempts" in reply.reason and len(server.requests) == 5
    assert all(2 ** n / 2 <= wait <= 2 ** n for n, wait in enumerate(server.waits)) and len(server.waits) == 4


def test_LLM_09_a_hint_to_one_holds_for_all(ask):
    script = iter([busy(retry_after_ms="300")])
    server, llm = ask(lambda request: next(script, "a"), latency=0.01, concurrency=2, sleep=asyncio.sleep)
    start = time.perf_counter()
    replies = llm.chat_many([[("user", str(number))] for number in range(6)], progress=False)
    assert all(reply.ok for reply in replies) and time.perf_counter() - start >= 0.3 and len(server.requests) == 7


@pytest.mark.parametrize("entry, says", [
    ({"content": "a", "drop": "before"}, "breaks the connection off"),
    ({"content": "a b c", "drop": "middle"}, "breaks the connection off"),
    ({"body": b"<html>Bad gateway</html>"}, "no response"), ({"body": b""}, "no response"), ({"body": b"[1]"}, "no response"),
    ({"body": b"\xff\xfe"}, "no response"), ({"body": {"error": {"message": "overloaded", "code": 502}}}, "overloaded"),
    ({"body": {"error": {"message": "broken \ud800"}}}, "broken ?"), ({"body": {"error": "broken", "choices": []}}, "broken")])
def test_a_server_that_breaks_off_or_answers_nonsense(ask, entry, says):
    server, llm = ask([entry, "a"])
    assert llm.chat(HELLO).text == "a" and llm.usage.attempts == 2 and len(server.waits) == 1
    server, llm = ask([entry] * 9, busy_retries=2)
    reply = llm.chat([("user", "other")])
    assert reply.status == "server_error" and says in reply.reason and len(server.requests) == 3


def test_a_server_in_time_out(ask):
    server, llm = ask(["a", {"content": "b", "latency": 2.0}, {"content": "b", "latency": 2.0}, "c"], timeout=1.0, busy_retries=1)
    assert llm.chat(HELLO).ok
    start = time.perf_counter()
    reply = llm.chat([("user", "slow")])
    assert reply.status == "timeout" and reply.usage.attempts == 2 and time.perf_counter() - start < 4
    assert llm.chat([("user", "again")]).text == "c"


def test_a_server_that_is_not_there_is_given_up_on_quickly(ask):
    server, llm = ask([])
    server.__exit__()
    server.__exit__ = lambda: None
    reply = llm.chat(HELLO)
    assert reply.status == "server_error" and "cannot be reached" in reply.reason and reply.usage.attempts == 3
    replies = llm.chat_many([[("user", str(number))] for number in range(20)], progress=False)
    assert {reply.status for reply in replies} == {"server_error"} and sum(reply.usage.attempts for reply in replies) == 20


# Servers that want it differently

def test_max_completion_tokens(ask):
    def script(request):
        if "max_tokens" in request:
            return {"status": 400, "error": {"code": "unsupported_parameter", "param": "max_tokens", "message":
                                             "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."}}
        return f"limit {request['max_completion_tokens']}"

    server, llm = ask(script, max_tokens=99)
    assert llm.chat(HELLO).text == "limit 99" and llm.chat([("user", "x")]).text == "limit 99" and len(server.requests) == 3


def test_LLM_11_a_server_without_schemas_is_asked_in_words_and_says_so(ask, caplog):
    def script(request):
        if "response_format" in request:
            return {"status": 400, "error": {"message": "response_format of type json_schema is not supported",
                                             "param": "response_format"}}
        return WHOLE if "quiet" not in text_of(request) else '{"title": 1}'

    server, llm = ask(script, retries=0)
    with caplog.at_level(logging.WARNING, "cdr_lib.llm"):
        reply = llm.chat([("system", "S"), ("user", "hi")], Kettle)
    assert reply.value == Kettle(title="kettle", features=[]) and reply.flags == ("schema_in_prompt",)
    assert "takes no JSON schema" in caplog.text
    assert server.requests[1]["messages"][0]["content"].startswith("S\n\n") and '"features"' in text_of(server.requests[1])
    assert llm.chat([("user", "quiet")], Kettle).status == "schema_error" and len(server.requests) == 3


def test_what_is_sent(ask):
    server, llm = ask([WHOLE, WHOLE, "a"], extra={"top_p": 0.9}, seed=1)
    llm.chat([("system", "S"), ("user", "a"), ("user", "b")], Kettle, max_tokens=5, temperature=0.3)
    sent = server.requests[0]
    assert sent["messages"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "a\n\nb"}]
    assert (sent["max_tokens"], sent["temperature"], sent["seed"], sent["top_p"]) == (5, 0.3, 1, 0.9)
    assert sent["response_format"]["json_schema"]["strict"] is True
    plain = LLM("fake", server.base_url, structured="prompt", merge_roles=False, temperature=None)
    assert plain.chat([("user", "a"), ("user", "b")], Kettle).ok
    sent = server.requests[1]
    assert "response_format" not in sent and "temperature" not in sent
    assert [message["role"] for message in sent["messages"]] == ["system", "user", "user"]


# Context

LONG = [("system", "S"), *[(role, f"{role} {number} " + "word " * 30) for number in range(5) for role in ("user", "assistant")],
        ("user", "the question")]


def test_LLM_10_the_server_says_that_the_context_is_full(ask):
    overflow = {"status": 400, "error": {"code": "context_length_exceeded", "message": "too long"}}
    server, llm = ask([overflow] * 5)
    reply = llm.chat(LONG)
    assert reply.status == "context_overflow" and "context_limit" in reply.reason and len(server.requests) == 1
    for entry in ({"status": 400, "error": {"message": "This model's maximum context length is 99 tokens."}},
                  {"status": 400, "error": {"type": "exceed_context_size_error", "code": 400}}):
        server, llm = ask([entry] * 5)
        assert llm.chat(LONG).status == "context_overflow" and len(server.requests) == 1


def test_LLM_10_older_messages_are_left_out_and_never_the_same_is_sent_again(ask, caplog):
    def script(request):
        if len(text_of(request)) > 600:
            return {"status": 400, "error": {"code": "context_length_exceeded", "message": "too long"}}
        return "a"

    server, llm = ask(script, context_limit=1000, max_tokens=100, retries=4)
    with caplog.at_level(logging.WARNING, "cdr_lib.llm"):
        reply = llm.chat(LONG)
    sizes = [len(request["messages"]) for request in server.requests]
    assert reply.ok and sizes == sorted(set(sizes), reverse=True) and len(sizes) > 1
    for request in server.requests:
        assert request["messages"][0]["content"] == "S" and request["messages"][-1]["content"] == "the question"
    assert reply.flags == (f"left_out:{12 - sizes[-1]}",) and "are left out" in caplog.text


def test_LLM_10_a_known_limit_is_kept_from_the_first_request(ask):
    server, llm = ask(["a", "b"], context_limit=400, max_tokens=100)
    reply = llm.chat(LONG)
    assert reply.ok and len(server.requests[0]["messages"]) < 12 and reply.flags[0].startswith("left_out:")
    assert server.requests[0]["messages"][1]["role"] == "user"
    assert llm.chat([("system", "S " * 2000), ("user", "Q")]).status == "context_overflow" and len(server.requests) == 1


def test_LLM_10_a_length_stop_is_no_overflow(ask):
    server, llm = ask([{"content": "a", "finish_reason": "length"}, "b"], context_limit=1000, max_tokens=100)
    assert llm.chat(HELLO).text == "b" and server.requests[0]["messages"] == server.requests[1]["messages"]


# Replay

def test_a_run_is_replayed_byte_for_byte(ask, tmp_path):
    def script(request):
        text = text_of(request)
        return (WHOLE if "good" in text else {"content": None, "refusal": "No."} if "bad" in text
                else {"status": 400} if "ugly" in text else "never valid")

    questions = [[("user", f"{kind} {number}")] for number in range(5) for kind in ("good", "bad", "ugly", "odd")]
    server, llm = ask(script, endpoint="lab")
    first = llm.chat_many(questions, Kettle, progress=False)
    llm.close()
    recorded = llm.cache.path.read_bytes()
    offline = LLM("fake", endpoint="lab", cache=llm.cache.path, offline=True)
    second = offline.chat_many(questions, Kettle, progress=False)
    assert first == second and all(reply.cached for reply in second) and offline.usage == Usage(cache_hits=20)
    assert [reply.usage for reply in first] == [reply.usage for reply in second]
    offline.close()
    assert llm.cache.path.read_bytes() == recorded
    miss = offline.chat([("user", "good 0")])  # another schema
    assert miss.status == "replay_miss" and "differs" in miss.reason and offline.usage.attempts == 0
    # A run in another order, from an empty file, writes the same bytes.
    server, other = ask(script, endpoint="lab", cache=tmp_path / "other.jsonl", concurrency=1)
    other.chat_many(questions[::-1], Kettle, progress=False)
    other.close()
    assert other.cache.path.read_bytes() == recorded


def test_only_answers_are_a_cache(ask):
    for entry in ({"content": None, "refusal": "No."}, {"status": 400}, {"content": "x", "finish_reason": "length"}, "bad",
                  {"choices": []}):
        server, llm = ask([entry, WHOLE], retries=0)
        question = [("user", str(entry))]
        assert not llm.chat(question, Kettle).ok
        assert llm.chat(question, Kettle).ok and llm.chat(question, Kettle).cached and len(server.requests) == 2
        assert llm.usage.cache_hits == 1


def test_a_stopped_run_goes_on_where_it_stopped(ask):
    script = {"left": 5}

    def limited(request):
        script["left"] -= 1
        return "a" if script["left"] >= 0 else {"status": 401}

    questions = [[("user", str(number))] for number in range(12)]
    server, llm = ask(limited, concurrency=3, endpoint="lab")
    assert sum(reply.ok for reply in llm.chat_many(questions, progress=False)) == 5
    script["left"] = 99
    server, again = ask(limited, endpoint="lab")
    assert all(reply.ok for reply in again.chat_many(questions, progress=False)) and len(server.requests) == 7


def test_the_same_request_at_the_same_time_is_one_request(ask):
    server, llm = ask(lambda request: f"answer {len(server.requests)}", latency=0.05)
    replies = llm.chat_many([HELLO] * 6, progress=False)
    assert {reply.text for reply in replies} == {"answer 1"} and len(server.requests) == 1 and llm.usage.cache_hits == 5
    uncached = LLM("fake", server.base_url)
    assert len({reply.text for reply in uncached.chat_many([HELLO] * 3, progress=False)}) == 3


def test_who_waits_for_a_request_that_is_cancelled_asks_for_himself(ask):
    server, llm = ask(lambda request: "a", latency=0.5)

    async def main():
        first = asyncio.ensure_future(llm.achat(HELLO))
        while not server.requests:
            await asyncio.sleep(0.01)
        second = asyncio.ensure_future(llm.achat(HELLO))
        await asyncio.sleep(0.05)
        first.cancel()
        return await second

    assert asyncio.run(main()).text == "a" and len(server.requests) == 2


# Where it runs

def test_in_a_running_loop_as_in_a_notebook(ask):
    server, llm = ask(lambda request: "a")

    async def cell():
        many = llm.chat_many([HELLO], progress=False)
        return llm.chat(HELLO).text, (await llm.achat([("user", "b")])).text, [reply.text for reply in many]

    assert asyncio.run(cell()) == ("a", "a", ["a"]) == asyncio.run(cell())


def test_from_many_threads(ask):
    server, llm = ask(lambda request: text_of(request).upper(), latency=0.02, concurrency=4)
    found = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: llm.chat([("user", f"q{n}")]).text})) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: f"Q{n}" for n in range(16)} and server.most_under_way == 4 and llm.usage.attempts == 16


def test_concurrency_is_a_bound_and_is_used(ask):
    server, llm = ask(lambda request: "a", latency=0.1, concurrency=5)
    start = time.perf_counter()
    llm.chat_many([[("user", str(number))] for number in range(20)], progress=False)
    assert server.most_under_way == 5 and 0.4 <= time.perf_counter() - start < 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_after_a_fork(ask):
    server, llm = ask(lambda request: "a", cache=None)
    assert llm.chat(HELLO).ok
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, llm.chat(HELLO).text.encode())
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 9) == b"a"
    os.waitpid(child, 0)
    assert llm.chat(HELLO).ok


# Secrets

def test_no_secret_anywhere(ask, monkeypatch, caplog, tmp_path):
    secret = "top-secret-4711"
    monkeypatch.setenv("LAB_KEY", secret)
    echo = {"status": 400, "error": {"message":
                                     f"Wrong key {secret}, Bearer {secret}, http://me:{secret}@host/ sk-proj-abcdef"}}
    with caplog.at_level(logging.DEBUG):
        server, llm = ask([f"your key is {secret}", echo, {**echo, "status": 503}, "a"], key_env="LAB_KEY", budget=10**6,
                          sleep=asyncio.sleep)
        replies = [llm.chat([("user", f"{number} {secret}")]) for number in range(3)]
        llm.close()
    assert server.headers[0]["authorization"] == f"Bearer {secret}"
    with pytest.raises(LLMError) as error:
        replies[1].unwrap()
    everything = [repr(llm), str(vars(llm)), repr(replies), str(error.value), pickle.dumps(llm).decode("latin-1"),
                  llm.cache.path.read_text(), caplog.text, pickle.dumps(error.value).decode("latin-1")]
    assert not [number for number, text in enumerate(everything) if secret in text or "sk-proj" in text]
    assert replies[2].text == "a"


@pytest.mark.parametrize("address", ["http://me:hush@host/v1", "http://host/v1?key=hush", "host/v1", "ftp://host", ""])
def test_addresses_with_secrets_or_without_sense(address, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", address)
    with pytest.raises(CdrError) as error:
        LLM("m", address)
    assert "hush" not in str(error.value)


def test_a_key_that_no_header_can_carry_is_not_shown(ask, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "hush\u00e9hush")
    with pytest.raises(CdrError, match="OPENAI_API_KEY") as error:
        LLM("m", "http://localhost/v1")
    assert "hush" not in str(error.value)
    monkeypatch.setenv("OPENAI_API_KEY", "hushhush\n")
    server, llm = ask(["a"])
    assert llm.chat(HELLO).text == "a" and server.headers[0]["authorization"] == "Bearer hushhush"


def test_a_dummy_key_is_no_secret(ask, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    _, llm = ask(["none of them"])
    assert llm.chat(HELLO).text == "none of them"


def test_hosted_needs_a_key_and_offline_does_not(tmp_path):
    with pytest.raises(CdrError, match="OPENAI_API_KEY"):
        LLM("gpt")
    (tmp_path / "r.jsonl").touch()
    assert LLM("gpt", cache=tmp_path / "r.jsonl", offline=True).chat(HELLO).status == "replay_miss"


def test_a_client_and_its_errors_can_be_pickled(ask):
    server, llm = ask(["a", "b"], sleep=asyncio.sleep)
    assert llm.chat(HELLO).ok
    again = pickle.loads(pickle.dumps(llm))
    assert again.chat(HELLO).cached and again.chat([("user", "x")]).text == "b" and again.usage.attempts == 1
    reply = Reply(None, status="refused", reason="No.")
    assert pickle.loads(pickle.dumps(LLMError(reply))).reply == reply


# Arguments

@pytest.mark.parametrize("options", [
    {"structured": "json"}, {"concurrency": 0}, {"retries": -1}, {"max_tokens": 0}, {"budget": 5, "max_tokens": None},
    {"offline": True},
    {"extra": {"model": "x"}}, {"extra": {"stream": True}}, {"extra": {"x": object()}}, {"context_limit": 0}, {"cache": "."},
    {"offline": True, "cache": "missing.jsonl"}])
def test_senseless_options_are_errors(options):
    with pytest.raises(CdrError):
        LLM("m", "http://localhost/v1", **options)


@pytest.mark.parametrize("arguments", [
    {"messages": []}, {"messages": "hello"}, {"schema": dict}, {"sample": -1}, {"sample": "a"}, {"max_tokens": 0},
    {"temperature": float("nan")}])
def test_senseless_arguments_are_errors_before_anything_is_sent(ask, arguments):
    server, llm = ask(["a"])
    with pytest.raises(CdrError):
        llm.chat(**{"messages": HELLO, **arguments})
    assert server.requests == []


def test_a_server_that_takes_a_schema_and_ignores_it_learns_it_from_the_note(ask):
    server, llm = ask(lambda request: WHOLE if '"additionalProperties"' in text_of(request) else "A quiet kettle.")
    reply = llm.chat(HELLO, Kettle)
    assert reply.ok and reply.usage.attempts == 2 and reply.flags == ()


def test_a_limit_that_the_server_does_not_allow_leaves_the_answer_cut(ask):
    too_high = {"status": 400, "error": {"message": "max_tokens is too large"}}
    _, llm = ask([{"content": "a b", "finish_reason": "length"}, too_high])
    reply = llm.chat(HELLO)
    assert reply.status == "truncated" and reply.text == "a b" and "too large" in reply.reason and reply.usage.attempts == 2


def test_a_recorded_answer_that_is_not_ours_or_no_longer_valid(ask):
    server, llm = ask([WHOLE, WHOLE])
    llm.chat(HELLO, Kettle)
    llm.close()
    path = llm.cache.path
    record = json.loads(path.read_text())
    assert record["key"] == llm.key(HELLO, Kettle)
    record["answer"]["text"] = '{"title": 3}'
    path.write_text(json.dumps(record) + "\n")
    assert LLM("fake", server.base_url, cache=path, offline=True).chat(HELLO, Kettle).status == "schema_error"
    assert LLM("fake", server.base_url, cache=path).chat(HELLO, Kettle).ok and len(server.requests) == 2
    record["answer"] = {"status": "ok"}
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(CdrError, match="not one of ours"):
        LLM("fake", server.base_url, cache=path).chat(HELLO, Kettle)


# Found by trying to break it

@pytest.mark.parametrize("status, attempts", [(520, 2), (524, 2), (507, 2), (425, 2), (408, 2), (501, 1), (402, 1), (418, 1)])
def test_LLM_09_whatever_a_server_blames_on_itself_is_asked_again(ask, status, attempts):
    server, llm = ask([{"status": status}, "a"])
    assert llm.chat(HELLO).ok == (attempts == 2) and len(server.requests) == attempts


@pytest.mark.parametrize("error", [
    {"message": "You exceeded your current quota, please check your plan."}, {"code": "quota_exceeded"},
    {"message": "Insufficient credits"}, {"type": "billing_not_active"}])
def test_LLM_09_a_quota_that_is_used_up_in_other_words(ask, error):
    server, llm = ask([{"status": 429, "error": error}] * 9)
    assert "quota is used up" in llm.chat(HELLO).reason and len(server.requests) == 1


def test_LLM_09_a_header_that_no_date_parser_takes(ask):
    server, llm = ask([busy(retry_after="Mon, 03 Mar 2025 10:00:30 +99999999999999"), "a"])
    assert llm.chat(HELLO).text == "a"


@pytest.mark.parametrize("message", [
    "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: 3000", "input is too long for requested model",
    "The input token count (40000) exceeds the maximum number of tokens allowed (32768).", "context overflow",
    "Please reduce the length of the messages or completion."])
def test_LLM_10_overflow_in_other_words(ask, message):
    server, llm = ask([{"status": 400, "error": {"message": message}}] * 3)
    assert llm.chat(HELLO).status == "context_overflow" and len(server.requests) == 1


@pytest.mark.parametrize("text", [
    "<think>They ask for harm.</think>I'm sorry, but I can't help with that.", "I apologize, but I cannot do this.",
    "My apologies, but no.", "I must respectfully decline.", "I don't feel comfortable with this.", "We cannot help with that.",
    "As a language model I cannot.", "I'm so sorry, no.", "Unfortunately, I can’t."])
def test_LLM_05_refusals_in_other_words(ask, text):
    server, llm = ask([text] * 3)
    reply = llm.chat(HELLO, Ok)
    assert reply.status == "refused" and len(server.requests) == 1 and "think" not in reply.reason


@pytest.mark.parametrize("text", ["The answer is fine.", "I see a kettle.", "I would not know.", "Apologetic kettles exist."])
def test_LLM_05_a_sentence_is_no_refusal(text):
    assert read_response({"choices": [{"message": {"content": text}}]}, Ok).status == "parse_error"


@pytest.mark.parametrize("finish, whole, part", [
    ("SAFETY", "ok", "refused"), ("CONTENT_FILTER", "ok", "refused"), ("refusal", "ok", "refused"),
    ("MAX_TOKENS", "truncated", "truncated"), ("model_context_window_exceeded", "truncated", "truncated"),
    ("error", "server_error", "server_error"), ("abort", "server_error", "server_error"), ("eos_token", "ok", "parse_error")])
def test_LLM_04_05_finish_reasons_in_other_words(finish, whole, part):
    for text, status in (('{"ok":true}', whole), ('{"ok":tr', part)):
        reply = read_response({"choices": [{"message": {"content": text}, "finish_reason": finish}]}, Ok)
        assert reply.status == status and (reply.value is None) == (status != "ok")


def test_half_a_key_is_a_secret_too(ask, monkeypatch, tmp_path):
    secret = "first-half-second-half"
    monkeypatch.setenv("LAB_KEY", secret)

    class Echo(BaseModel):
        ok: bool
        echo: str

    server, llm = ask([{"status": 400, "error": {"message": "x" * 260 + " " + secret}}, "y" * 285 + secret,
                       "I cannot " + "z" * 280 + secret,
                       json.dumps({"ok": True, "echo": secret}), {"status": 401}], key_env="LAB_KEY", retries=0)
    replies = [llm.chat([("user", f"{number}")], Echo) for number in range(4)] + [llm.chat([("user", "u" * 90 + secret)])]
    assert [reply.status for reply in replies] == ["server_error", "parse_error", "refused", "ok", "server_error"]
    assert "first" not in str(replies) and "first" not in llm.cache.path.read_text()
    llm.close()
    offline = LLM("fake", server.base_url, cache=llm.cache.path, offline=True)
    assert offline.chat([("user", "3")], Echo) == replies[3]  # what is played back is what was given


@pytest.mark.parametrize("options", [
    {"key_env": "sk-hushhush"}, {"key_env": None}, {"endpoint": "http://me:hush@host/v1"}, {"extra": {"api_key": "hush"}},
    {"extra": {"stop": "\ud800"}}, {"timeout": 0}, {"timeout": None}, {"max_wait": "a"}, {"seed": "x"}, {"model": ""},
    {"model": None}])
def test_more_senseless_options_are_errors_that_show_no_key(options):
    with pytest.raises(CdrError) as error:
        LLM(**{"model": "m", "base_url": "http://localhost/v1", **options})
    assert "hush" not in str(error.value)


def test_more_senseless_arguments(ask):
    server, llm = ask(["a"])
    for arguments in ({"max_tokens": 1.5}, {"max_tokens": "5"}, {"temperature": "hot"}, {"messages": None}):
        with pytest.raises(CdrError):
            llm.chat(**{"messages": HELLO, **arguments})
    with pytest.raises(CdrError, match="call 1: message 0"):
        llm.chat_many([HELLO, [("user", None)]], progress=False)
    assert llm.chat_many([], progress=False) == [] and server.requests == []


def test_a_schema_has_a_name_that_servers_take(ask):
    class Box(BaseModel, Generic[T]):
        value: T

    server, llm = ask(['{"value": 1}'])
    assert llm.chat(HELLO, Box[int]).value.value == 1
    assert server.requests[0]["response_format"]["json_schema"]["name"] == "Box_int_"


def test_a_large_batch_is_prepared_at_once(tmp_path):
    llm = LLM("m", "http://localhost/v1")
    llm.key(HELLO, Kettle)
    start = time.process_time()
    for number in range(2000):
        llm.key([("user", f"question {number}")], Kettle)
    assert time.process_time() - start < 1.5  # it was 4 s: the schema was made anew each time


def test_a_budget_counts_tools_before_the_first_answer(ask):
    tools = [{"type": "function", "function": {"name": f"f{number}", "description": "x" * 100}} for number in range(20)]
    server, llm = ask(["a"], extra={"tools": tools}, budget=1000, max_tokens=10)
    assert llm.chat(HELLO).status == "budget" and server.requests == []


_INTERRUPTED = """
import signal, sys, threading, time
from cdr_lib.core.llm import LLM
from tests.fake_llm import FakeLLM

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores Ctrl-C
done = []
def script(request):
    if len(server.requests) >= 20 and not done:
        done.append(signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    return "a"
with FakeLLM(script, latency=0.05) as server:
    llm = LLM("m", server.base_url, concurrency=4, budget=10**6, cache=sys.argv[1])
    try:
        llm.chat_many([[("user", str(number))] for number in range(400)], progress=False)
        sys.exit("not interrupted")
    except KeyboardInterrupt:
        time.sleep(0.1)
        sent, kept = len(server.requests), llm.usage.billed
    time.sleep(0.15)
    assert 0 < kept <= sent < 100 and len(llm.cache.path.read_text().splitlines()) == kept, (kept, sent)
    assert len(server.requests) == sent and llm.chat([("user", "hello")]).text == "a"
"""


def test_an_interrupt_stops_a_batch_and_keeps_what_was_answered(tmp_path):
    "In a process of its own: a signal is for a whole process, and this one holds other libraries' threads."
    ran = subprocess.run([sys.executable, "-c", _INTERRUPTED, str(tmp_path / "replay.jsonl")], capture_output=True, text=True,
                         cwd=Path(__file__).parents[1], timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_a_server_that_stops_in_the_middle_of_a_run(ask):
    questions = [[("user", str(number))] for number in range(200)]

    def script(request):
        if len(server.requests) == 30:
            threading.Thread(target=server.__exit__).start()
        return "a"

    server, llm = ask(script, latency=0.01, concurrency=4, endpoint="lab")
    replies = llm.chat_many(questions, progress=False)
    done = sum(reply.ok for reply in replies)
    assert 25 < done < 200 and {reply.status for reply in replies if not reply.ok} == {"server_error"}
    assert all("run again later" in reply.reason for reply in replies if not reply.ok)
    llm.close()
    again, llm = ask(lambda request: "b", endpoint="lab")
    texts = [reply.text for reply in llm.chat_many(questions, progress=False)]
    assert texts == ["a" if reply.ok else "b" for reply in replies] and len(again.requests) == 200 - done


@pytest.mark.parametrize("parts, text", [
    ([{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "a"}], "a"),
    ([{"text": "a"}, {"type": "image"}, None, 3], "a"),
    ([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "a"}], "a")])
def test_LLM_02_thoughts_that_come_as_a_part(parts, text):
    assert read_response({"choices": [{"message": {"content": parts}}]}).text == text


def test_a_reason_is_said_once(ask):
    _, llm = ask([{"status": 400, "error": {"message": "No such field."}}, {"status": 400, "body": b""}])
    assert llm.chat(HELLO).reason == "the server answers 400: No such field."
    assert llm.chat(HELLO).reason == "the server answers 400: no reason given"


def test_LLM_11_a_batch_learns_once_what_a_server_wants(ask, caplog):
    def script(request):
        if "response_format" in request:
            return {"status": 400, "error": {"message": "json_schema is not supported"}}
        if "max_tokens" in request:
            return {"status": 400, "error": {"message": "use max_completion_tokens"}}
        return WHOLE

    server, llm = ask(script, latency=0.005, concurrency=4)
    with caplog.at_level(logging.WARNING, "cdr_lib.llm"):
        replies = llm.chat_many([[("user", str(number))] for number in range(40)], Kettle, progress=False)
    assert all(reply.ok and reply.flags == ("schema_in_prompt",) for reply in replies)
    assert len(server.requests) <= 40 + 2 * 4 and len(caplog.records) == 2  # it was 120 requests and 80 warnings


def test_LLM_09_a_server_that_says_at_once_and_stays_busy_is_not_hammered(ask):
    server, llm = ask([busy(retry_after="0")] * 3 + ["a"])
    assert llm.chat(HELLO).text == "a" and len(server.waits) == 2
    assert all(2 ** n / 2 <= wait <= 2 ** n for n, wait in enumerate(server.waits, 1))
