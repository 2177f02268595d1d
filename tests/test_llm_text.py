"core.schema, core.prompts, core.messages, core.replay: what is sent to a model, what its text holds, what is kept of it."
import hashlib
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Literal, Optional, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, RootModel

from cdr_lib.core.config import CdrError, data_dir
from cdr_lib.core.conversation import Turn
from cdr_lib.core.endpoint import check_base_url, redact, server_wait
from cdr_lib.core.messages import ContextOverflow, as_messages, estimate_tokens, fit_context, strict_view
from cdr_lib.core.prompts import Prompt, load_prompt, prompt_names, read_prompt
from cdr_lib.core.replay import Replay, request_key
from cdr_lib.core.schema import BadJSON, BadValue, parse_json, strict_schema, validate, without_thoughts


class Items(BaseModel):
    items: list[str]


# Text of an answer

@pytest.mark.parametrize("text, value", [
    ('{"items":["a"]}', {"items": ["a"]}),
    ('```json\n{"items":["a"]}\n```', {"items": ["a"]}),
    ('```\n{"items":["a"]}\n```', {"items": ["a"]}),
    ('Sure! Here it is:\n```JSON\r\n{"items":["a"]}\r\n```\nHope it helps {smile}.', {"items": ["a"]}),
    ('{"items":["use ```py\\nx\\n``` here"]}', {"items": ["use ```py\nx\n``` here"]}),
    ('Result: {"items":["brace } in text"]} done', {"items": ["brace } in text"]})])
def test_LLM_01_json_in_its_wrappings(text, value):
    assert validate(parse_json(text), Items) == Items(**value)


def test_LLM_01_a_list_is_not_the_object():
    with pytest.raises(BadValue, match="not a Items: the whole"):
        validate(parse_json('["a"]'), Items)


def test_LLM_01_an_error_shows_the_text():
    with pytest.raises(BadJSON, match="no json here"):
        parse_json("no json here")


@pytest.mark.parametrize("text, value", [
    ('<think>maybe {"items":["draft"]}</think>\n{"items":["final"]}', {"items": ["final"]}),
    ('{"items":["keep <think>this</think> text"]}', {"items": ["keep <think>this</think> text"]}),
    # The same kind, elsewhere
    ('maybe {"items":["draft"]}\n</think>\n\n{"items":["final"]}', {"items": ["final"]}),
    ('<THINKING>```json\n{"items":["draft"]}\n```</THINKING>\n```json\n{"items":["final"]}\n```', {"items": ["final"]}),
    ('Here: {"items":["keep <think>this</think> text"]}.', {"items": ["keep <think>this</think> text"]}),
    ('<think>{"items": [</think>{"items":["final"]}', {"items": ["final"]}),
    ('Well. <think>{"items":["draft"]}</think> {"items":["final"]}', {"items": ["final"]})])
def test_LLM_02_thoughts_before_the_answer(text, value):
    assert parse_json(text) == value


@pytest.mark.parametrize("text", [
    'Either {"items":["a"]} or {"items":["b"]}', '```json\n{"a":1}\n```\n```json\n{"a":2}\n```', '{"a":1}{"a":2}',
    '{"items": [{"name": "x"}, {"na', 'Here: {"items": [{"name": "x"}], "more": tru', 'x [{"a": 1}, {"b"', '{"a": 1, "a": 1}',
    '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e400}', '{"a": "\\udc00"}', "", "  ", "<think>", '<think>{"a": 1}',
    "{'items': ['a']}", '{"items": ["a",]}', '{"items": ["a"', "{" * 5000, '{"a":' * 100_000, '"' * 9])
def test_nothing_is_repaired_completed_or_chosen(text):
    with pytest.raises(BadJSON):
        parse_json(text)


def test_the_same_value_twice_is_one_value():
    assert parse_json('{"a": 1} that is, {"a":1}') == {"a": 1}


JSON = st.recursive(st.none() | st.booleans() | st.integers(-10**6, 10**6) | st.floats(allow_nan=False, allow_infinity=False)
                    | st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('`{}[]"\\<think></think>\n')),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
                    max_leaves=8)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5), JSON, min_size=1, max_size=3),
       st.sampled_from(["{}", "```json\n{}\n```", "Sure:\n~~~\n{}\n~~~\nDone {{smile}}.", "So: {} - that is it [1].",
                        '<think>{{"draft": [1]}} or {{"x"</think>\n{}', "hm, {{maybe}}</think>```\n{}\n```"]),
       st.sampled_from([None, 1]), st.booleans())
def test_any_object_survives_any_wrapping(value, wrapping, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert parse_json(wrapping.format(text)) == value


def test_valid_json_of_any_kind_is_returned_as_it_is():
    for value in ([], {}, "text with ```fence```", 3, None, [{"a": 1}, {"a": 2}], {"a": {"b": [1, {"c": "</think>"}]}}):
        assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("text, spoken", [
    ("<think>K2?</think>\nTry K2.", "Try K2."), ("K2?\n</think>\n\nTry K2.", "Try K2."), ("Try K2.", "Try K2."),
    ("Use <think> tags </think> freely.", "Use <think> tags </think> freely."), ("<think>and on", ""),
    ("<think>a</think><think>b</think>c", "c"), (" as it is ", " as it is ")])
def test_thoughts_are_no_part_of_a_plain_answer(text, spoken):
    assert without_thoughts(text) == spoken


@pytest.mark.parametrize("value, fault", [
    ({"items": "a"}, "items"), ({"items": [1]}, "items.0"), ({}, "items: Field required"),
    ({"items": [], "more": 1}, "more: Extra"), (None, "the whole")])
def test_values_are_held_to_the_schema(value, fault):
    with pytest.raises(BadValue, match=fault):
        validate(value, Items)


# Schemas

class Tag(BaseModel):
    name: str = "x"


class Product(BaseModel):
    title: str
    price: Optional[float] = None
    tags: list[Tag]


def objects(schema):
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for name, value in schema.items():
            yield from objects(list(value.values()) if name in ("properties", "$defs") else value)
    elif isinstance(schema, list):
        for value in schema:
            yield from objects(value)


def test_LLM_11_strict_schema():
    before = json.dumps(Product.model_json_schema(), sort_keys=True)
    schema = strict_schema(Product)
    assert schema["required"] == ["title", "price", "tags"] and schema["$defs"]["Tag"]["required"] == ["name"]
    assert schema["additionalProperties"] is False and schema["$defs"]["Tag"]["additionalProperties"] is False
    assert {"type": "null"} in schema["properties"]["price"]["anyOf"]
    assert '"default"' not in json.dumps(schema)
    assert json.dumps(Product.model_json_schema(), sort_keys=True) == before


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    tag: Tag = Tag()


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    tags: list[Tag] = []


class Zoo(BaseModel):
    default: str = Field("x", description="a field with this name")
    main: Tag = Field(Tag(), description="beside a reference")
    animal: Annotated[Union[Cat, Dog], Field(discriminator="kind")]
    pairs: list[tuple[Tag, Optional[Dog]]] = []


def test_LLM_11_the_rule_holds_in_definitions_arrays_and_unions():
    schema = strict_schema(Zoo)
    found = list(objects(schema))
    assert len(found) == 4
    for one in found:
        assert one["required"] == list(one["properties"]) and one["additionalProperties"] is False
    text = json.dumps(schema)
    assert "oneOf" not in text and "discriminator" not in text and text.count('"default"') == 2  # the property, and required
    assert schema["properties"]["main"] == {"$ref": "#/$defs/Tag"}


class Node(BaseModel):
    name: str
    children: list["Node"] = []


def test_a_recursive_schema_starts_with_an_object():
    schema = strict_schema(Node)
    assert schema["type"] == "object" and schema["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}


class Open(BaseModel):
    attributes: dict[str, str]


class Anything(BaseModel, extra="allow"):
    name: str


@pytest.mark.parametrize("model", [Open, Anything, RootModel[list[str]], dict, "Product", Product(title="", tags=[])])
def test_what_strict_servers_cannot_be_asked_is_refused_here(model):
    with pytest.raises(CdrError):
        strict_schema(model)


# Messages

def pairs(messages):
    return [(message["role"], message["content"]) for message in messages]


def test_LLM_12_strict_view():
    stored = [["system", "S1"], ["system", "S2"], ["user", "a"], ["user", "b"], ["assistant", "c"], ["system", "note"],
              ["user", "d"]]
    before = json.dumps(stored)
    assert pairs(strict_view(stored)) == [("system", "S1\n\nS2"), ("user", "a\n\nb"), ("assistant", "c"), ("user", "note\n\nd")]
    assert json.dumps(stored) == before


@pytest.mark.parametrize("given_, wanted", [
    ([("user", "a"), ("system", "n"), ("system", "m"), ("assistant", "c")], [("user", "a\n\nn\n\nm"), ("assistant", "c")]),
    ([("system", "s"), ("assistant", "c"), ("system", "n")], [("system", "s\n\nn"), ("assistant", "c")]),
    ([("assistant", "c"), ("system", "n"), ("assistant", "d")], [("system", "n"), ("assistant", "c\n\nd")]),
    ([("user", ""), ("user", "a"), ("assistant", " \u200b"), ("user", "b")], [("user", "a\n\nb")]),
    ([("system", " "), ("user", "a")], [("user", "a")])])
def test_system_notes_and_blank_turns_elsewhere(given_, wanted):
    assert pairs(strict_view(given_)) == wanted


MESSAGES = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.sampled_from(["", " ", "a", "b", "c\n\nd"])),
                    min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(MESSAGES)
def test_a_strict_view_is_strict_and_loses_no_word(messages):
    spoken = sorted("".join(text for _, text in messages).replace(" ", "").replace("\n", ""))
    if not spoken:
        with pytest.raises(CdrError, match="blank"):
            strict_view(messages)
        return
    view = pairs(strict_view(messages))
    assert sorted("".join(text for _, text in view).replace(" ", "").replace("\n", "")) == spoken
    assert all(text.strip() for _, text in view) and "system" not in [role for role, _ in view[1:]]
    assert all(first[0] != second[0] for first, second in zip(view, view[1:]))
    assert strict_view(view) == strict_view(strict_view(messages))


CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "t", "function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"role": "tool", "tool_call_id": "t", "content": "tool2"}
DIALOGUE = [("system", "system"), ("user", "user1"), ("assistant", "assistant1"), ("user", "user2"), CALL, RESULT,
            ("assistant", "assistant2"), ("user", "user3")]


def test_LLM_10_fit_context():
    kept = fit_context(DIALOGUE, 30, lambda message: 8)
    names = [message["content"] or "call" for message in kept]
    assert names[0] == "system" and names[-1] == "user3" and 8 * len(kept) <= 30 and ("tool2" in names) == ("call" in names)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["system", "user", "assistant", "pair"]), min_size=1, max_size=14), st.integers(0, 120))
def test_LLM_10_whatever_the_dialogue(kinds, limit):
    messages = []
    for number, kind in enumerate(kinds):
        messages += [{**CALL, "number": number}, {**RESULT, "number": number}] if kind == "pair" else [
            {"role": kind, "content": f"m{number}", "number": number}]
    must = [message for message in messages if message["role"] == "system"]
    users = [message for message in messages if message["role"] == "user"]
    must += users[-1:]
    try:
        kept = fit_context(messages, limit, lambda message: 8)
    except ContextOverflow:
        # Without a user message the newest group has to stay, which may be a call and its result.
        assert 8 * (len(must) + (0 if users else 2)) > limit
        return
    assert 8 * len(kept) <= limit or kept == messages
    assert all(message in kept for message in must) and [message for message in messages if message in kept] == kept
    for number in {message["number"] for message in kept}:
        assert sum(m["number"] == number for m in kept) == sum(m["number"] == number for m in messages)
    # No gap: what is left out is older than everything kept, apart from what must stay.
    others = [message for message in messages if message not in must and message["role"] != "system"]
    gone = [place for place, message in enumerate(others) if message not in kept]
    assert gone == list(range(len(gone)))


def test_a_dialogue_that_fits_is_left_alone():
    messages = as_messages(DIALOGUE)
    assert fit_context(messages, sum(map(estimate_tokens, messages))) == messages


@pytest.mark.parametrize("messages", [
    [], "hello", {"role": "user", "content": "a"}, [("speaker", "a")], [("user", None)], [("user", 3)], ["hello"],
    [("user", "a", "b")],
    [{"role": "user"}], [{"content": "a"}], [("user", "\ud800")], [{"role": "assistant", "content": None}]])
def test_unusable_messages_are_named(messages):
    with pytest.raises(CdrError, match="message"):
        as_messages(messages)


def test_turns_are_messages():
    assert as_messages([Turn("user", "hi", speaker="Ann")]) == [{"role": "user", "content": "hi"}]


# Prompts

def test_values_are_text_and_never_templates():
    hostile = "{{ 7 * 7 }} {% for x in y %} <b>&amp;</b>"
    assert Prompt("p", 1, "ours", "", "Item: {{ title }}").render(title=hostile)[0]["content"] == f"Item: {hostile}"


def test_the_sandbox_holds():
    with pytest.raises(CdrError, match="prompt p, user"):
        Prompt("p", 1, "ours", "", "{{ x.__class__.__mro__ }}").render(x=1)


@pytest.mark.parametrize("variables, says", [
    ({}, "needs a, b"), ({"a": 1}, "needs b"), ({"a": 1, "b": 2, "c": 3}, "does not use c"),
    ({"a": {}, "b": 2}, "no attribute 'x'")])
def test_missing_and_unused_variables_are_named(variables, says):
    with pytest.raises(CdrError, match=says):
        Prompt("p", 1, "ours", "{{ b }}", "{% for i in range(2) %}{{ a.x }}{% endfor %}").render(**variables)


def test_prompt_hash_follows_the_wording_and_the_version():
    first = Prompt("p", 1, "ours", "", "a")
    assert first.hash == Prompt("p", 1, "another source", "", "a").hash
    assert len({first.hash, Prompt("p", 2, "ours", "", "a").hash, Prompt("p", 1, "ours", "a", "a").hash,
                Prompt("p", 1, "ours", "", "b").hash}) == 4


def test_every_prompt_of_the_project_can_be_read_and_says_its_source():
    for name in prompt_names():
        prompt = load_prompt(name)
        assert prompt.version >= 1 and prompt.source and prompt.user


@pytest.mark.parametrize("text", ["", "[]", "version: 1\nuser: x", "version: 1.5\nsource: s\nuser: x",
                                  "version: 1\nsource: s\nuser: 3",
                                  "version: true\nsource: s\nuser: x", "version: 1\nsource: s\nuser: '{{'",
                                  "version: 1\nsource: s\nuser: x\nsytem: y", "version: 1\nsource: ''\nuser: x", "a: b: c"])
def test_broken_prompt_files_are_errors(tmp_path, text):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(CdrError, match="p"):
        read_prompt(tmp_path / "p.yaml")


@pytest.mark.parametrize("name", ["d2d/none", "../published/d2d", "/etc/passwd", "d2d/", "D2D/elicit", ""])
def test_unknown_prompts_are_errors_that_list_the_known(name):
    with pytest.raises(CdrError, match="known are"):
        load_prompt(name)
    assert (data_dir() / "prompts" / "README.md").is_file()


# Keys and the replay file

BASE = {"base_url": "http://a.example/v1", "model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.0}
VARIANTS = [{"temperature": 0.7}, {"max_tokens": 16}, {"seed": 1},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            {"base_url": "http://b.example/v1"}, {"model": "m2"}, {"temperature": None}, {"sample_index": 1},
            {"messages": [{"role": "system", "content": "hi"}]}, {"extra_body": {"top_k": 5}}]


def test_LLM_06_keys():
    base = request_key(BASE)
    assert len({base, *(request_key({**BASE, **change}) for change in VARIANTS)}) == 11
    assert request_key(dict(reversed(BASE.items()))) == base == request_key({**BASE, "temperature": 0})
    with pytest.raises(CdrError, match="api_key"):
        request_key({**BASE, "api_key": "another"})


def test_LLM_06_keys_are_the_same_in_every_process():
    code = f"from cdr_lib.core.replay import request_key; print(request_key({BASE!r}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"})
    # The hash of these bytes, for ever: a change of the key would lose everybody's recorded answers.
    text = '{"base_url":"http://a.example/v1","messages":[{"content":"hi","role":"user"}],"model":"m","temperature":0}'
    assert out.stdout.strip() == request_key(BASE) == hashlib.sha256(text.encode()).hexdigest()


OK, BAD = {"status": "ok", "text": "x"}, {"status": "truncated", "text": "y"}


def test_the_file_is_in_order_whatever_the_order_of_answers(tmp_path):
    for name, keys in (("a", "bca"), ("b", "abc")):
        with_order = Replay(tmp_path / name)
        for key in keys:
            with_order.put(key, {**OK, "text": f"Grüße {key}"}, {"last": "hi"})
        with_order.close()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert "Grüße" in (tmp_path / "a").read_text(encoding="utf-8")


def test_an_answer_outlives_failures_and_a_failure_is_replaced(tmp_path):
    replay = Replay(tmp_path / "r.jsonl")
    replay.put("a", OK, {})
    replay.put("a", BAD, {})
    replay.put("b", BAD, {})
    replay.put("b", OK, {})
    for one in (replay, Replay(replay.path)):
        assert one.get("a") == OK and one.get("b") == OK
    replay.close()
    assert len(replay.path.read_text().splitlines()) == 2


def test_a_torn_last_line_is_left_out_and_the_next_answer_is_whole(tmp_path, caplog):
    path = tmp_path / "r.jsonl"
    replay = Replay(path)
    replay.put("a", OK, {})
    replay.close()
    path.write_bytes(path.read_bytes() + b'{"answer": {"status": "ok", "te')
    with caplog.at_level(logging.WARNING, "cdr_lib.llm"):
        torn = Replay(path)
    assert len(torn) == 1 and "torn" in caplog.text
    torn.put("b", OK, {})
    assert len(path.read_text().splitlines()) == 2 and len(Replay(path)) == 2


@pytest.mark.parametrize("line", ["not json", "[]", "{}", '{"key": 1, "answer": {"status": "ok"}}',
                                  '{"key": "a", "answer": "ok"}'])
def test_a_broken_line_is_an_error_with_its_number(tmp_path, line):
    path = tmp_path / "r.jsonl"
    path.write_text('{"key": "a", "answer": {"status": "ok"}}\n' + line + "\n")
    with pytest.raises(CdrError, match="line 2: not a recorded answer"):
        Replay(path)


WRITER = """
import sys
from cdr_lib.core.replay import Replay
replay = Replay(sys.argv[1])
for number in range(60):
    replay.put(f"{sys.argv[2]}{number:03}", {"status": "ok", "text": "x" * 5000}, {})
    if number % 20 == 19:
        replay.close()
"""


def test_several_processes_write_one_file(tmp_path):
    path = tmp_path / "r.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert len(Replay(path)) == 180
    keys = [json.loads(line)["key"] for line in path.read_text().splitlines()]
    assert keys == sorted(keys) and sorted(one.name for one in tmp_path.iterdir()) == ["r.jsonl"]


def test_the_end_of_the_process_settles_an_open_file(tmp_path):
    code = ("from cdr_lib.core.replay import Replay; r = Replay('r.jsonl'); "
            "[r.put(k, {'status': 'ok'}, {}) for k in 'ba']")
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env={"PYTHONPATH": str(root)})
    assert [json.loads(line)["key"] for line in (tmp_path / "r.jsonl").read_text().splitlines()] == ["a", "b"]

# Found by trying to break it

@pytest.mark.parametrize("date", ["Mon, 03 Mar 2025 10:00:30 -0000", "Mon, 03 Mar 2025 10:00:30", "Mon Mar  3 10:00:30 2025",
                                  "Monday, 03-Mar-25 10:00:30 GMT", "Mon, 03 Mar 2025 11:00:30 +0100"])
def test_LLM_09_a_date_without_a_zone_is_not_in_the_zone_of_this_machine(date, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert server_wait({"retry-after": date}, 1_740_996_000) == 30
    finally:
        monkeypatch.undo()
        time.tzset()


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=40), st.builds("Mon, {} Mar {} {}:00:30 {}".format, *[st.integers(-9, 10**12)] * 3,
                                                 st.sampled_from(["GMT", "+9999", "+99999999999999", "-0000", ""]))))
def test_LLM_09_no_header_is_too_strange(value):
    wait = server_wait({"retry-after": value}, 0.0)
    assert wait is None or 0 <= wait < float("inf")


@pytest.mark.parametrize("message", [
    "http://me:p@hush@host/x", "Authorization: Basic hushhush", "bearer hushhush", "GET /v1?key=hushhush&x=1",
    "api-key: hushhush", "{'Authorization': 'Bearer hushhush'}", "Bearer  hushhush", "key gsk_hushhush",
    "x" * 290 + " sk-hushhushhush"])
def test_a_message_of_a_server_shows_no_secret(message):
    assert "hush" not in redact(message)


@pytest.mark.parametrize("address", [
    "http://:hush@host/v1", "http://host/v1#key=hush", "http://@host", "http://[::1", "http://host:port/v1",
    "http://host:99999/v1", "http://ho st/v1", "ftp://host/v1", "http:///v1"])
def test_addresses_are_checked_before_anything_is_sent(address):
    with pytest.raises(CdrError, match="base_url") as error:
        check_base_url(address)
    assert "hush" not in str(error.value)


def test_a_deep_answer_does_not_hold_up_everybody():
    start = time.perf_counter()
    for text in ('{"a":' * 50_000, "So: " + '{"a":' * 50_000, "hm</think>" + '{"a":' * 50_000):
        with pytest.raises(BadJSON):
            parse_json(text)
        without_thoughts(text)
    assert time.perf_counter() - start < 5  # it was a minute


def test_LLM_01_a_fence_of_another_language_is_no_answer():
    text = '```python\nx = {"b": 1}\n```\n```json\n{"items": ["a"]}\n```'
    assert parse_json(text) == {"items": ["a"]}


def test_LLM_02_thoughts_in_square_brackets():
    assert parse_json('[THINK]{"items":["draft"]}[/THINK]{"items":["final"]}') == {"items": ["final"]}
    assert without_thoughts("[THINK]K2?[/THINK]Try K2.") == "Try K2."
    for text in ("[reasoning] is a word here", "[thought] too"):
        assert without_thoughts(text) == text


def test_LLM_10_a_note_between_call_and_result_does_not_part_them():
    apart = [("system", "s"), ("user", "u1"), CALL, ("system", "note"), RESULT, ("assistant", "a"), ("user", "u2")]
    for limit in range(24, 57, 8):
        kept = fit_context(apart, limit, lambda message: 8)
        assert any(m.get("tool_calls") for m in kept) == any(m["role"] == "tool" for m in kept)


def test_LLM_12_nobody_is_made_to_say_what_another_one_said():
    ann, bob = ({"role": "user", "name": name, "content": name.lower()} for name in ("Ann", "Bob"))
    assert strict_view([ann, bob]) == [{"role": "user", "content": "ann\n\nbob"}]
    assert strict_view([ann, ("system", "note"), ann])[0]["name"] == "Ann"


@pytest.mark.parametrize("messages", [None, 5, b"hello", [{"role": "user", "content": "a", "name": "\ud800"}],
                                      [{"role": "user", "content": "a", "name": object()}]])
def test_what_cannot_be_sent_is_named(messages):
    with pytest.raises(CdrError, match="message"):
        as_messages(messages)


def test_a_whole_last_line_without_its_end_is_kept(tmp_path):
    "As a kill between line and line end leaves it, or an editor."
    path = tmp_path / "r.jsonl"
    replay = Replay(path)
    replay.put("a", OK, {})
    replay.put("b", OK, {})
    replay.close()
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    again = Replay(path)
    assert again.get("b") == OK
    again.put("c", OK, {})
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a", "b", "c"]


def test_a_file_torn_at_any_byte_loses_one_answer_at_most(tmp_path):
    path = tmp_path / "r.jsonl"
    first, second = Replay(path), None
    first.put("a", OK, {})
    start = path.stat().st_size
    first.put("b", {**OK, "text": "Grüße"}, {})
    data = path.read_bytes()
    for cut in range(start, len(data) + 1):
        path.write_bytes(data[:cut])
        second = Replay(path)
        second.put("c", OK, {})
        assert set(Replay(path)._records) == set(second._records) >= {"a", "c"}


def test_a_replay_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CdrError, match="cannot be stored"):
        Replay(tmp_path / "file" / "r.jsonl").put("a", OK, {})


def test_LLM_06_no_secret_in_extra():
    for name in ("extra", "extra_body"):
        with pytest.raises(CdrError, match="api_key") as error:
            request_key({**BASE, name: {"api_key": "hush"}})
        assert "hush" not in str(error.value)


def test_a_template_that_fails_in_any_way_is_named():
    for template in ("{{ 1 / a }}", "{{ [][a] }}", "{{ 'x' | int(base=a) }}{{ range(10**9) }}"):
        with pytest.raises(CdrError, match="prompt p, user"):
            Prompt("p", 1, "ours", "", template).render(a=0)
