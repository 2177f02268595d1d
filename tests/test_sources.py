"""core.formats, core.tasks, core.talks, core.sources: every adapter on sound, odd and hostile input, and on the public corpora."""

import json
import os
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import ROLES, BadRecord, Conversation, Turn
from cdr_lib.core.corpus import guess_format, open_corpus
from cdr_lib.core.formats import (
    content_text,
    read_long_csv,
    read_messages_jsonl,
    read_sharegpt,
    role_of,
    thread_utterances,
)
from cdr_lib.core.io import read_parquet, write_parquet
from cdr_lib.core.logs import read_mtbench101
from cdr_lib.core.sources import SOURCES, load_source, sources
from cdr_lib.core.talks import read_dailydialog, read_dialogsum
from cdr_lib.core.tasks import frame_acts, frame_spans, frame_states, read_sgd

QUIET = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pairs(conversation):
    return [(turn.role, turn.text) for turn in conversation.turns]


# ------------------------------------------------------------------------------------------------------------- content


@pytest.mark.parametrize(
    "content, text, kept",
    [
        ("x", "x", 0),
        (None, "", 0),
        ([], "", 0),
        (["a", {"type": "text", "text": "b"}], "a\nb", 0),
        ([{"type": "output_text", "text": "a", "annotations": []}], "a", 1),
        ([{"type": "text", "text": {"value": "a", "annotations": []}}], "a", 1),
        ([{"type": "refusal", "refusal": "No."}], "No.", 1),
        ({"type": "text", "text": "one part, no list"}, "one part, no list", 0),
        ([{"text": "no type"}], "no type", 0),
        ([{"type": "input_audio", "data": "…"}, {"type": "tool_use", "name": "f"}], "[audio]\n[tool_use]", 2),
        ([{"type": "]<script>"}, {"type": 5, "x": 1}], "[part]\n[part]", 2),
    ],
)
def test_content(content, text, kept):
    assert content_text(content)[0] == text and len(content_text(content)[1]) == kept


@pytest.mark.parametrize(
    "content", [0, 1.5, True, [None], [[]], [{"type": "text", "text": None}], [{"type": "text"}], [{}]]
)
def test_content_is_never_made_up(content):
    with pytest.raises(BadRecord):
        content_text(content)


def test_roles():
    for tag, role in (
        ("USER", "user"),
        (" human ", "user"),
        ("GPT", "assistant"),
        ("developer", "system"),
        ("observation", "tool"),
    ):
        assert role_of(tag)[0] == role
    assert role_of("Ana", {"Ana": "user"}) == ("user", {"tag": "Ana"})
    for tag in (None, "", " ", 5, ["user"]):
        with pytest.raises(BadRecord):
            role_of(tag, unmapped="keep")


# ------------------------------------------------------------------------------------------------- messages and ShareGPT


def test_messages_keep_everything(tmp_path):
    row = {
        "conversation_id": 12,
        "model": "m",
        "messages": [
            {"role": "user", "content": "hi", "name": "Ana", "time": 3},
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "null"},
            {"role": "assistant", "content": None, "refusal": "I cannot."},
        ],
    }
    reader = read_messages_jsonl(lines(tmp_path / "a.jsonl", row))
    conversation = next(reader)
    assert conversation.id == "12" and conversation.meta == {"model": "m"} and conversation.source == "messages"
    assert pairs(conversation) == [("user", "hi"), ("assistant", ""), ("tool", "null"), ("assistant", "I cannot.")]
    assert conversation.turns[0].speaker == "Ana" and conversation.turns[0].meta == {"time": 3}
    assert conversation.turns[2].meta == {"tag": "function"} and conversation.turns[3].meta == {"refusal": "I cannot."}
    write_parquet([conversation], tmp_path / "a.parquet")
    assert list(read_parquet(tmp_path / "a.parquet")) == [conversation]


BAD_MESSAGES = {
    "no id": {"messages": [{"role": "user", "content": "a"}]},
    "id": {"id": 1.5, "messages": [{"role": "user", "content": "a"}]},
    "no 'messages'": {"id": "a", "conversations": []},
    "messages is null": {"id": "a", "messages": None},
    "no turns": {"id": "a", "messages": []},
    "messages[1]": {"id": "a", "messages": [{"role": "user", "content": "a"}, "b"]},
    "'narrator'": {"id": "a", "messages": [{"role": "narrator", "content": "a"}]},
    "role is null": {"id": "a", "messages": [{"content": "a"}]},
    "another format": {"id": "a", "messages": [{"role": "user", "text": "a"}]},
    "a number": {"id": "a", "messages": [{"role": "user", "content": 5}]},
    "speaker": {"id": "a", "messages": [{"role": "user", "content": "a", "name": 5}]},
    "no 'messages', only": {"a": 1},
}


@pytest.mark.parametrize("word", BAD_MESSAGES)
def test_bad_messages(tmp_path, word):
    path = lines(tmp_path / "a.jsonl", BAD_MESSAGES[word], {"id": "ok", "messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(BadRecord) as error:
        list(read_messages_jsonl(path))
    assert word in str(error.value) and "a.jsonl:1" in str(error.value)
    reader = read_messages_jsonl(path, on_error="collect")
    assert [conversation.id for conversation in reader] == ["ok"] and word in reader.rejects[0].reason


def test_missing_ids_are_stable_and_unique(tmp_path):
    rows = [[{"role": "user", "content": str(i)}] for i in range(3)]
    (tmp_path / "logs.v1.json").write_text(json.dumps([{"messages": row} for row in rows]))
    reader = read_messages_jsonl(tmp_path / "logs.v1.json", missing_id="number")
    assert [conversation.id for conversation in reader] == ["logs:1", "logs:2", "logs:3"]
    bare = read_messages_jsonl(lines(tmp_path / "bare.jsonl", *rows), missing_id="number", source="mine")
    assert [(conversation.id, conversation.source) for conversation in bare] == [
        ("bare:1", "mine"),
        ("bare:2", "mine"),
        ("bare:3", "mine"),
    ]


def test_unmapped_roles_on_request(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"id": "a", "messages": [{"role": "narrator", "content": "x"}]})
    reader = read_messages_jsonl(path, unmapped="keep")
    assert next(reader).turns[0] == Turn("assistant", "x", "narrator", {"tag": "narrator", "unmapped": True})
    assert reader.counts["unmapped_roles"] == 1
    assert next(read_messages_jsonl(path, roles={"narrator": "system"})).turns[0].role == "system"
    for options in ({"unmapped": "drop"}, {"roles": {"narrator": "teller"}}, {"missing_id": "line"}):
        with pytest.raises(CdrError, match="must be one of"):
            read_messages_jsonl(path, **options)


def test_sharegpt_array_and_odd_fields(tmp_path):
    (tmp_path / "a.json").write_text(
        json.dumps(
            [
                {
                    "id": "1",
                    "system": "",
                    "model": "m",
                    "conversations": [
                        {"from": "human", "value": "a", "text": None},
                        {"from": "function_call", "value": "{}"},
                        {"from": "observation", "value": [{"type": "image"}]},
                    ],
                },
                {"id": "2", "conversations": [{"from": "human", "content": "a"}]},
                {"id": "3", "system": 5, "conversations": [{"from": "human", "value": "a"}]},
                {"id": "4", "conversations": [{"value": "a"}]},
                {"id": "5", "conversations": {"from": "human"}},
                {"id": "6"},
                7,
            ]
        )
    )
    reader = read_sharegpt(tmp_path / "a.json", on_error="collect")
    (first,) = reader
    assert pairs(first) == [("user", "a"), ("tool", "{}"), ("tool", "[image]")] and first.meta == {"model": "m"}
    assert [reject.id for reject in reader.rejects] == ["2", "3", "4", "5", "6", ""]


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 5),
        st.sampled_from(["", "user", "human", "a", "USER", "#Person1#: a"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["id", "messages", "role", "content", "name", "conversations", "from", "value", "system", "type", "text", "tool_calls", "turns", "frames", "speaker", "utterance", "service", "slots", "actions", "state", "start", "exclusive_end", "dialogue_id", "fname", "dialogue", "topic", "history", "user", "bot", "task"]
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=25,
)
SHAPED = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {
            "id": st.one_of(st.just("a"), JSON),
            "messages": st.lists(st.fixed_dictionaries({"role": JSON, "content": JSON}), max_size=3),
        }
    ),
    st.fixed_dictionaries(
        {
            "id": st.just("a"),
            "system": JSON,
            "conversations": st.lists(st.fixed_dictionaries({"from": JSON, "value": JSON}), max_size=3),
        }
    ),
    st.fixed_dictionaries(
        {
            "dialogue_id": st.just("a"),
            "turns": st.lists(
                st.fixed_dictionaries(
                    {
                        "speaker": st.just("USER"),
                        "utterance": st.just("abc"),
                        "frames": st.lists(
                            st.fixed_dictionaries(
                                {"service": st.sampled_from(["s", "t"]), "slots": JSON, "actions": JSON, "state": JSON}
                            ),
                            max_size=2,
                        ),
                    }
                ),
                max_size=2,
            ),
        }
    ),
    st.fixed_dictionaries({"fname": st.just("test_0"), "dialogue": JSON, "topic": JSON}),
    st.fixed_dictionaries({"id": st.just(1), "history": st.lists(JSON, max_size=2)}),
)


@QUIET
@given(st.lists(SHAPED, max_size=4))
def test_no_structure_breaks_an_adapter(tmp_path, rows):
    path = lines(tmp_path / "rows.jsonl", *rows)
    for read in (read_messages_jsonl, read_sharegpt, read_sgd, read_dialogsum, read_mtbench101):
        reader = read(path, on_error="collect")
        kept = list(reader)
        # Every record is accounted for, and whatever was kept can be stored.
        assert reader.counts["records"] == len(rows) == len(kept) + len(reader.rejects) + reader.counts["repeats"]
        write_parquet(kept, tmp_path / "kept.parquet")
        assert list(read_parquet(tmp_path / "kept.parquet")) == kept
        for turn in (turn for conversation in kept for turn in conversation.turns):
            frame_acts(turn), frame_states(turn), frame_spans(turn)


# ---------------------------------------------------------------------------------------------------------- long form

IDS = st.one_of(st.none(), st.sampled_from("abcdefg"))


@QUIET
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefg"), st.one_of(st.none(), st.sampled_from("xyz")), IDS),
        max_size=9,
        unique_by=lambda row: row[:2],
    )
)
def test_threads_hold_every_row_once_and_no_reply_before_its_parent(rows):
    ids, conversations, replies = ([row[i] for row in rows] for i in range(3))
    threads = thread_utterances(ids, conversations, replies)
    assert sorted(row for thread in threads for row in thread.rows) == list(range(len(rows)))
    assert len({thread.id for thread in threads}) == len(threads)
    assert threads == thread_utterances(ids, conversations, replies)
    for thread in threads:
        place = {row: position for position, row in enumerate(thread.rows)}
        for row in thread.rows:
            assert conversations[row] in (None, thread.id)
            parents = [
                other
                for other in thread.rows
                if ids[other] == replies[row] and conversations[other] == conversations[row]
            ]
            assert all(place[other] <= place[row] for other in parents) or "cycle" in thread.notes.values()


def test_long_reply_chains_and_circles_end():
    count = 20_000
    ids = [str(i) for i in range(count)]
    backwards = thread_utterances(ids, [None] * count, [*ids[1:], None])
    assert len(backwards) == 1 and backwards[0].rows == tuple(range(count))[::-1]
    circle = thread_utterances(ids, [None] * count, [*ids[1:], ids[0]])
    assert len(circle) == 1 and len(circle[0].rows) == count and circle[0].notes == {0: "cycle"}


def test_generated_names_do_not_collide():
    found = thread_utterances(["u", None], ["thread:u", None], [None, None])
    assert [thread.id for thread in found] == ["thread:u", "row:2"]
    assert [thread.id for thread in thread_utterances(["x", "u"], ["thread:u", None], [None, None])] == [
        "thread:u",
        "thread:u+",
    ]


def csv_file(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_csv_threads_speakers_and_further_columns(tmp_path):
    path = csv_file(
        tmp_path / "a.csv",
        "\ufeffid,conv_id,reply_to,role,speaker,text,stars\r\n"
        '1,,,user,Ana,hi,5\r\n2,,1,agent,,"a, ""b""\r\nc",\r\n3,k,gone,user,,ok,\r\n1,k,,user,Bo,id 1 again,\r\n3,k,gone,user,,ok,\r\n',
    )
    reader = read_long_csv(path)
    thread, k = reader
    assert thread == Conversation(
        "thread:1",
        (
            Turn("user", "hi", "Ana", {"id": "1", "stars": "5"}),
            Turn("assistant", 'a, "b"\r\nc', None, {"tag": "agent", "id": "2", "reply_to": "1"}),
        ),
        "long_csv",
    )
    assert k.turns[0].meta == {"id": "3", "reply_to": "gone", "orphan": True} and k.turns[1].speaker == "Bo"
    assert reader.counts["utterances"] == 4 and reader.counts["repeated_rows"] == 1


def test_csv_bad_rows(tmp_path):
    path = csv_file(
        tmp_path / "a.csv",
        b'conv_id,role,text\na,user,"never closed\nb,user,fine\nc,user\nd,user,caf\xe9\ne,narrator,x\n'
        b'f,user,one\nf,bot,"torn"x\ng,user,"two\nlines"\n',
    )
    reader = read_long_csv(path, on_error="collect")
    assert [(conversation.id, pairs(conversation)) for conversation in reader] == [
        ("b", [("user", "fine")]),
        ("g", [("user", "two\nlines")]),
    ]
    reasons = {reject.line: reject.reason for reject in reader.rejects if "incomplete" not in reject.reason}
    assert sorted(reasons) == [2, 4, 5, 6, 8]
    for line, word in (
        (2, "not CSV"),
        (4, "2 cells, the header has 3"),
        (5, "invalid UTF-8"),
        (6, "'narrator'"),
        (8, "not CSV"),
    ):
        assert word in reasons[line]
    assert [(reject.line, reject.id) for reject in reader.rejects if "incomplete" in reject.reason] == [(7, "f")]
    with pytest.raises(BadRecord, match="a.csv:2"):
        list(read_long_csv(path))


def test_csv_long_cells_and_other_delimiters(tmp_path):
    path = csv_file(tmp_path / "a.tsv", "conv_id\trole\ttext\na\tuser\t" + "x" * 300_000 + "\n")
    assert len(next(read_long_csv(path, delimiter="\t")).turns[0].text) == 300_000


@pytest.mark.parametrize(
    "text, options, word",
    [
        ("a,b\n", {}, "no column 'conv_id'"),
        ("conv_id,text\n", {}, "no column 'role'"),
        ("conv_id,role,text,text\n", {}, "'text' occurs twice"),
        ("", {}, "only nothing"),
        ("conv_id,text\n", {"role": None}, "default_role"),
        ('"conv_id,role\n', {}, "header"),
        ("conv_id,role,text\n", {"default_role": "bot"}, "default_role='bot'"),
    ],
)
def test_csv_headers(tmp_path, text, options, word):
    with pytest.raises(CdrError, match=word):
        read_long_csv(csv_file(tmp_path / "a.csv", text), **options)


def test_csv_without_roles_or_conversations(tmp_path):
    path = csv_file(tmp_path / "a.csv", "id,reply_to,text\n1,,a\n2,1,b\n")
    (found,) = read_long_csv(path, conversation=None, role=None, default_role="user")
    assert pairs(found) == [("user", "a"), ("user", "b")]


# ------------------------------------------------------------------------------------------------------ public corpora


def test_sgd_ids_do_not_collide_across_splits(tmp_path):
    row = {"dialogue_id": "1_00000", "services": [], "turns": [{"speaker": "USER", "utterance": "hi", "frames": []}]}
    for split in ("train", "dev", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "dialogues_001.json").write_text(json.dumps([row], indent=2))
        (tmp_path / split / "schema.json").write_text("[]")
    assert [conversation.id for conversation in read_sgd(tmp_path)] == [
        f"sgd:{split}:1_00000" for split in ("train", "dev", "test")
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(CdrError, match="no dialogues"):
        read_sgd(tmp_path / "empty")


@pytest.mark.parametrize(
    "turn, word",
    [
        ({"speaker": "BOT", "utterance": "a"}, "neither USER nor SYSTEM"),
        ({"speaker": "USER"}, "utterance is null"),
        (
            {
                "speaker": "USER",
                "utterance": "abc",
                "frames": [{"service": "s", "slots": [{"slot": "x", "start": 1, "exclusive_end": 4}]}],
            },
            "outside the text",
        ),
        ({"speaker": "USER", "utterance": "abc", "frames": [{"service": "s"}, {"service": "s"}]}, "service of its own"),
        ({"speaker": "USER", "utterance": "abc", "frames": {}}, "not a list"),
    ],
)
def test_sgd_bad_turns(tmp_path, turn, word):
    path = lines(tmp_path / "dialogues_1.jsonl", {"dialogue_id": "a", "turns": [turn]})
    with pytest.raises(BadRecord, match=word):
        list(read_sgd(path))


def test_dailydialog_with_records_of_something_else(tmp_path):
    with pytest.raises(BadRecord, match="needs 'dialogue'"):
        list(read_dailydialog(lines(tmp_path / "train.json", {"text": "a __eou__"})))


def test_dialogsum_with_line_ends_of_windows(tmp_path):
    (found,) = read_dialogsum(lines(tmp_path / "a.jsonl", {"fname": "x", "dialogue": "#Person1#: a\r\n#Person2#: b"}))
    assert pairs(found) == [("user", "a"), ("assistant", "b")]


def test_dialogsum_hidden_topics_join_their_dialogues(tmp_path):
    lines(tmp_path / "dialogsum.hiddentest.dialogue.jsonl", {"fname": "h_0", "dialogue": "#Person2#: a\n#Person1#:b"})
    topics = lines(
        tmp_path / "dialogsum.hiddentest.topic.jsonl", {"fname": "h_0", "topic": "t"}, {"fname": "h_9", "topic": "u"}
    )
    reader = read_dialogsum(tmp_path, on_error="collect")
    (found,) = reader
    assert found.labels == {"topics": ["t"]} and pairs(found) == [("assistant", "a"), ("user", "b")]
    assert [turn.speaker for turn in found.turns] == ["Person2", "Person1"]
    assert [(reject.id, reject.reason) for reject in reader.rejects] == [("h_9", "a topic without its dialogue")]
    with pytest.raises(CdrError, match="holds topics, not dialogues"):
        read_dialogsum(topics)


@pytest.mark.parametrize(
    "dialogue, word",
    [
        ("Hello", "begin with a speaker"),
        ("", "begin with a speaker"),
        (5, "a number"),
        ("#Person1#: a\n#Person2: b", "damaged speaker tag"),
        ("#Person1#: a\n#Person_2#: b", "damaged speaker tag"),
    ],
)
def test_dialogsum_bad_dialogues(tmp_path, dialogue, word):
    with pytest.raises(BadRecord, match=word):
        list(read_dialogsum(lines(tmp_path / "a.jsonl", {"fname": "x", "dialogue": dialogue})))


@pytest.mark.parametrize("history", [None, ["a"], [{}], [{"user": 5}], [{"user": "a", "bot": "b", "extra": 1}], []])
def test_mtbench_bad_history(tmp_path, history):
    with pytest.raises(BadRecord):
        list(read_mtbench101(lines(tmp_path / "a.jsonl", {"id": 1, "task": "GR", "history": history})))


# --------------------------------------------------------------------------------------------------------------- cards


def test_every_source_has_a_card():
    for name, source in SOURCES.items():
        assert name == source.name and source.loses and source.licence and source._repr_markdown_()
        assert not source.corpus or source.citation
        # A collection of corpora leaves it to its parts.
        assert not source.corpus or source.redistributable is not None or name == "dialogstudio"
        assert source.remote is None or (source.remote.files and source.remote.revision and source.url)
    assert list(sources()["name"]) == list(SOURCES)
    paper = [name for name, source in SOURCES.items() if source.paper]
    assert sorted(paper) == [
        "bitext", "bot-adversarial", "dailydialog", "dialogsum", "lmsys", "mobileconvrec", "multiwoz", "opendialkg", "sgd",
        "smoltalk", "wildchat"]
    assert [name for name in paper if not SOURCES[name].redistributable] == ["lmsys"]


FIRST = {
    "chatgpt": [{"title": "t", "mapping": {}, "current_node": "a"}], "claude": [{"uuid": "u", "chat_messages": []}],
    "telegram": {"name": "Ana", "type": "personal_chat", "messages": [{"id": 1, "date_unixtime": "1"}]},
    "discord": {"guild": {"id": "1"}, "channel": {"id": "2"}, "messages": []},
    "slack": [{"type": "message", "ts": "1.2", "text": "Hi", "user": "U1"}],
    "tau-bench": [{"task_id": 0, "traj": []}], "abcd": {"train": [{"convo_id": 1, "original": [], "scenario": {}}]},
    "multiwoz": {"PMUL1.json": {"goal": {}, "log": [{"text": "x", "metadata": {}}]}},
    "dialogstudio": {"A--train--1": {"original dialog id": "", "log": [{"user utterance": "x"}]}},
    "dstc11-track5": [[{"speaker": "U", "text": "x"}]], "sgd": [{"dialogue_id": "1_0", "services": [], "turns": []}],
    "dialogsum": {"fname": "dev_0", "dialogue": "#Person1#: x"}, "lmsys": {"conversation_id": "a", "conversation": []},
    "wildchat": {"conversation_hash": "a", "conversation": []}, "opendialkg": [{"Messages": "[]"}],
    "mobileconvrec": {"user_id": "a", "recommended_app": {}, "turns": []}, "dailydialog": {"fold": "train", "dialogue": []},
    "messages": {"id": "a", "messages": []}, "sharegpt": {"id": "a", "conversations": []}, "mt-bench-101": {"history": []},
    "cdr": {"id": "a", "turns": []},
}


@pytest.mark.parametrize("name", FIRST)
def test_a_json_file_is_known_by_what_is_in_it(tmp_path, name):
    for indent in (None, 1):
        text = json.dumps(FIRST[name], indent=indent)
        if indent and isinstance(FIRST[name], dict) and name not in (
                "telegram", "discord", "abcd", "multiwoz", "dialogstudio"):
            continue
        (tmp_path / "x.json").write_text(text)
        assert guess_format(tmp_path / "x.json") == name
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (
        FIRST[name] if isinstance(FIRST[name], list) else [FIRST[name]])))
    if isinstance(FIRST[name], list) or name not in ("abcd", "multiwoz", "dialogstudio"):
        assert guess_format(tmp_path / "x.jsonl") == name


@pytest.mark.parametrize(
    "name, columns",
    [
        ("cdr", ["id", "turns"]), ("wildchat", ["conversation_hash", "conversation"]), ("smoltalk", ["messages", "source"]),
        ("lmsys", ["conversation_id", "model", "conversation"]),
    ],
)
def test_a_shard_is_known_by_its_columns(tmp_path, name, columns):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({column: ["x"] for column in columns})
    pyarrow.parquet.write_table(table, tmp_path / "00000.parquet")
    assert guess_format(tmp_path / "00000.parquet") == name == guess_format(tmp_path)


@pytest.mark.parametrize(
    "name, text",
    [
        ("long_csv", "conv_id,role,text\n"), ("opendialkg", "Messages,User Rating\n"), ("discord", "AuthorID,Author,Date,Content\n"),
        ("bitext", "flags,instruction,category,intent,response\n"), ("long_csv", ""),
        ("synthetic-persona-chat", "user 1 personas,user 2 personas,Best Generated Conversation\n"),
    ],
)
def test_a_table_is_known_by_its_columns(tmp_path, name, text):
    (tmp_path / "x.csv").write_text("\ufeff" + text, encoding="utf-8")
    assert guess_format(tmp_path / "x.csv") == name


@pytest.mark.parametrize(
    "name, text",
    [
        ("whatsapp", "12/31/23, 9:05 PM - Ana: Hi\n"), ("dailydialog", "Hi . __eou__ Hello . __eou__\n"),
        ("bot-adversarial", "text:Hi\tlabels:__ok__\tepisode_done:True\n"),
    ],
)
def test_a_text_is_known_by_its_lines(tmp_path, name, text):
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    assert guess_format(tmp_path / "x.txt") == name


def test_shards_are_read_one_after_the_other(tmp_path):
    rows = [Conversation.make(f"c{i}", ("user", f"number {i}")) for i in range(6)]
    for shard in range(3):
        write_parquet(rows[2 * shard:2 * shard + 2], tmp_path / f"{shard:05}.parquet")
    assert list(open_corpus(tmp_path)) == rows == list(open_corpus(tmp_path, "cdr"))
    (tmp_path / "00001.parquet").write_bytes((tmp_path / "00001.parquet").read_bytes()[:100])
    with pytest.raises(CdrError, match="00001.parquet is not a readable Parquet file"):
        list(open_corpus(tmp_path))
    reader = open_corpus(tmp_path, on_error="collect")
    assert list(reader) == rows[:2] + rows[4:] and "00001.parquet" in reader.rejects[0].file
    # The same conversation in two shards is one.
    write_parquet(rows[:1], tmp_path / "00001.parquet")
    assert list(open_corpus(tmp_path)) == rows[:2] + rows[4:]


def test_load_source(tmp_path, monkeypatch):
    monkeypatch.delenv("CDR_DATA", raising=False)
    for name, path, word in (
        ("nothing", None, "known are"),
        ("messages", None, "say which file"),
        ("sgd", None, "CDR_DATA"),
        ("sgd", tmp_path / "none", "no such file"),
        ("sgd", tmp_path, "no dialogues"),
    ):
        with pytest.raises(CdrError, match=word):
            load_source(name, path)
    path = lines(tmp_path / "a.jsonl", {"id": "a", "conversations": [{"from": "human", "value": "x"}]}, {"id": "b"})
    reader = load_source("sharegpt", path, on_error="collect")
    assert len(list(reader)) == len(reader.rejects) == 1


real = pytest.mark.skipif(not os.environ.get("CDR_DATA"), reason="CDR_DATA is not set: the public corpora are not here")


def data(name):
    return Path(os.environ["CDR_DATA"]) / name


@pytest.mark.real
@real
def test_real_sgd_whole():
    start = time.process_time()
    counts, services, kept = Counter(), Counter(), None
    reader = load_source("sgd")
    for conversation in reader:
        kept = kept or conversation
        for turn in conversation.turns:
            frames = turn.meta["frames"]
            counts[turn.role] += 1
            counts["frames"] += len(frames)
            counts["acts"] += len(frame_acts(turn))
            counts["spans"] += len(frame_spans(turn))
            counts["states"] += len(frame_states(turn))
            services.update(frame["service"] for frame in frames)
    assert time.process_time() - start < 30
    # Counted in the file itself with json alone; the two blank turns are goodbyes of 3_00055 and 6_00009.
    assert reader.counts == Counter(records=2921, conversations=2921, turns=49726, blank_turns=2)
    assert counts == Counter(user=24863, assistant=24863, frames=51665, acts=89644, spans=34197, states=26802)
    assert (
        len(services) == 21
        and kept.id == "sgd:test:1_00000"
        and kept.labels == {"services": ["Restaurants_2"], "intents": ["ReserveRestaurant"]}
    )


@pytest.mark.real
@real
def test_real_sgd_round_trip_and_upstream_form(tmp_path):
    corpus = list(islice(load_source("sgd"), 400))
    write_parquet(corpus, tmp_path / "sgd.parquet")
    assert list(read_parquet(tmp_path / "sgd.parquet")) == corpus
    upstream = list(read_sgd(data("sgd/original_format_sample/test_dialogues_001.json")))
    assert len(upstream) == 128 and upstream == corpus[:128]


@pytest.mark.real
@real
def test_real_dialogsum_whole():
    reader = load_source("dialogsum")
    corpus = {conversation.id: conversation for conversation in reader}
    assert reader.counts == Counter(records=1100, conversations=1100, turns=10631)
    assert Counter(conversation.meta["split"] for conversation in corpus.values()) == {
        "dev": 500,
        "test": 500,
        "hiddentest": 100,
    }
    speakers = Counter(turn.speaker for conversation in corpus.values() for turn in conversation.turns)
    assert speakers == {"Person1": 5513, "Person2": 5075, "Person3": 37, "Person4": 6}
    assert corpus["dialogsum:hiddentest_0"].labels == {"topics": ["financial service"]}
    assert corpus["dialogsum:test_0"].labels["topics"] == ["communication method", "company policy", "dictation"]
    # Of two spaces after a tag one belongs to the text.
    assert any(turn.text == " That sounds good." for turn in corpus["dialogsum:test_146"].turns)


@pytest.mark.real
@real
def test_real_mtbench101_whole():
    reader = load_source("mt-bench-101")
    tasks = Counter(conversation.labels["task"] for conversation in reader)
    # 4,208 rounds of a user's and a bot's part.
    assert reader.counts == Counter(records=1388, conversations=1388, turns=8416)
    assert tasks == {
        "AR": 153,
        "IC": 150,
        "SI": 149,
        "CC": 147,
        "CR": 136,
        "MR": 108,
        "PI": 87,
        "TS": 83,
        "CM": 80,
        "SC": 77,
        "FR": 74,
        "SA": 73,
        "GR": 71,
    }


@pytest.mark.real
@real
def test_real_samples_of_other_hands():
    reader = read_sharegpt(data("fastchat/dummy_conversation.json"))
    assert Counter(turn.role for conversation in reader for turn in conversation.turns) == {
        "user": 1000,
        "assistant": 1000,
    }
    assert reader.counts["conversations"] == 500
    folder = data("dialogstudio-samples")
    for read, path, turns in (
        (read_sharegpt, "open-domain-dialogues/ShareGPT/original_example.json", None),
        (read_sgd, "task-oriented-dialogues/SGD/original_examples.json", None),
        (read_sgd, "task-oriented-dialogues/MULTIWOZ2_2/original_examples.json", None),
        (read_dialogsum, "dialogue-summarization/DialogSum/original_examples.json", None),
    ):
        rows = json.loads((folder / path).read_text(encoding="utf-8"))
        reader = read(folder / path)
        kept = list(reader)
        assert len(kept) == len(rows) == 5 and {turn.role for item in kept for turn in item.turns} <= set(ROLES)
