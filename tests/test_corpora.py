"""core.files, core.logs, core.tasks, core.talks: every corpus in its published shape, whole and damaged."""

import datetime
import gzip
import json
import os
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdr_lib.core import files
from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import BadRecord, Conversation
from cdr_lib.core.corpus import open_corpus
from cdr_lib.core.files import corpus_files, json_entries, parquet_records, split_of, text_lines
from cdr_lib.core.io import read_parquet, write_jsonl, write_parquet
from cdr_lib.core.logs import (
    read_bitext,
    read_lmsys,
    read_mobileconvrec,
    read_smoltalk,
    read_tau_bench,
    read_wildchat,
)
from cdr_lib.core.talks import (
    read_bot_adversarial,
    read_dailydialog,
    read_opendialkg,
    read_synthetic_persona_chat,
    read_xdailydialog,
)
from cdr_lib.core.tasks import read_abcd, read_dialogstudio, read_dstc11, read_multiwoz


def lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def text(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def table(path, *rows, group_rows=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=group_rows)
    return path


def pairs(conversation):
    return [[turn.role, turn.text] for turn in conversation.turns]


def survives(conversations, folder):
    """Whatever a reader makes can be stored and read back."""
    conversations = list(conversations)
    write_parquet(conversations, folder / "stored.parquet")
    assert list(read_parquet(folder / "stored.parquet")) == conversations
    return conversations


@pytest.fixture
def heard():
    """The warnings of a test."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


# -- Files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, split",
    [
        ("x/train/dialogues_001.json", "train"), ("x/validation/dialogues_validation.txt", "dev"), ("valid.txt", "dev"),
        ("x/val/logs.json", "dev"), ("MobileConvRec_testing.jsonl", "test"), ("test-00000-of-00001.parquet", "test"),
        ("test_data/contrast/attested.json", ""), ("test_data/chat.jsonl", ""), ("data/data.json", ""),
    ],
)
def test_a_split_is_a_word_of_the_name_or_its_folder(path, split):
    assert split_of(Path(path)) == split


def test_a_folder_without_the_files_says_what_is_there(tmp_path):
    text(tmp_path / "readme.md", "hello")
    with pytest.raises(CdrError, match=r"holds no conversations: \*.parquet is expected.*there is readme.md"):
        corpus_files(tmp_path, ("*.parquet",), "conversations")
    with pytest.raises(CdrError, match="no such file"):
        corpus_files(tmp_path / "missing.parquet", ("*.parquet",), "conversations")


def test_lines_end_at_line_feeds_and_bad_bytes_spoil_one(tmp_path):
    path = text(tmp_path / "a.txt", "\ufeffone\u2028still one\r\ntwo\x85\n".encode() + b"\xff\nlast")
    assert text_lines(path) == ["one\u2028still one", "two\x85", None, "last"]
    with pytest.raises(CdrError, match="UTF-16"):
        text_lines(text(tmp_path / "b.txt", "hello".encode("utf-16")))


def test_entries_of_an_object_larger_than_a_chunk(tmp_path):
    big = "x" * (3 << 20)
    path = text(tmp_path / "o.json", json.dumps({"a": 1, "b": big, "c": {"d": [1, 2]}}, indent=1))
    assert [record.value for record in json_entries(path)] == [("a", 1), ("b", big), ("c", {"d": [1, 2]})]
    packed = tmp_path / "o.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert len(list(json_entries(packed))) == 3


@settings(deadline=None, max_examples=80)
@given(st.dictionaries(st.text(max_size=6), st.recursive(
    st.none() | st.booleans() | st.integers(-10**6, 10**6) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)), max_size=6),
    st.sampled_from([None, 0, 3]), st.booleans())
def test_entries_whatever_the_size_of_a_chunk(tmp_path_factory, content, indent, ascii_only):
    path = tmp_path_factory.mktemp("entries") / "o.json"
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=ascii_only), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        for size in (1, 7, 1 << 20):
            patch.setattr(files, "_CHUNK", size)
            found = list(json_entries(path))
            assert not any(record.problem for record in found)
            assert [record.value for record in found] == list(content.items())


@pytest.mark.parametrize(
    "content, problems",
    [
        (b"", ["the file is empty"]), (b"[1]", ["not a JSON object"]), (b"{}", []), (b'{"a": 1', ["the rest"]),
        (b'{"a": 1,', ["", "ends before"]), (b'{"a": 12', ["the rest"]), (b'{"a": {"b": 1, "b": 2}, "c": 3}', ["twice", ""]),
        (b'{"a": 1 "b": 2}', ["the rest"]), (b'{"a": "\xff", "c": 3}', ["invalid UTF-8", ""]), (b'{"a" 1}', ["the rest"]),
        (b'{"a": ' + b"[" * 100_000 + b"}", ["the rest"]),
    ],
)
def test_damaged_objects(tmp_path, content, problems):
    found = list(json_entries(text(tmp_path / "o.json", content)))
    assert len(found) == len(problems)
    for record, problem in zip(found, problems):
        assert problem in record.problem and bool(problem) == bool(record.problem)


def test_a_damaged_shard_spoils_itself_only(tmp_path):
    rows = [{"conversation_id": f"c{i}", "conversation": [{"role": "user", "content": f"{i} " * 50}]} for i in range(40)]
    table(tmp_path / "data/train-00000-of-00003.parquet", *rows[:20], group_rows=5)
    table(tmp_path / "data/train-00002-of-00003.parquet", *rows[20:])
    whole = (tmp_path / "data/train-00000-of-00003.parquet").read_bytes()
    # A hole in the third row group: the footer is sound, a page is not.
    group = pq.ParquetFile(tmp_path / "data/train-00000-of-00003.parquet").metadata.row_group(2)
    start = min(group.column(i).dictionary_page_offset or group.column(i).data_page_offset for i in range(3))
    hole = whole[:start] + b"\xff" * 60 + whole[start + 60:]
    text(tmp_path / "data/train-00000-of-00003.parquet", hole)
    text(tmp_path / "data/train-00001-of-00003.parquet", whole[: len(whole) // 2])
    reader = read_lmsys(tmp_path, on_error="collect")
    found = [conversation.id for conversation in reader]
    assert found == [f"lmsys:c{i}" for i in range(40) if not 10 <= i < 15]
    assert [Path(reject.file).name[:11] for reject in reader.rejects] == ["train-00000", "train-00001"]
    assert "the rows 11 to 15 cannot be read" in reader.rejects[0].reason and "not a readable Parquet" in reader.rejects[1].reason
    with pytest.raises(BadRecord, match="train-0000"):
        list(read_lmsys(tmp_path))


def test_text_that_is_not_utf8_is_one_bad_row(tmp_path):
    texts = pa.array([b"ok", b"bad \xff", b"ok too"], pa.binary()).cast(pa.binary()).view(pa.string())
    table_ = pa.table({"id": pa.array(["a", "b", "c"]), "text": texts})
    pq.write_table(table_, tmp_path / "t.parquet")
    found = list(parquet_records(tmp_path / "t.parquet"))
    assert [record.problem for record in found] == ["", "invalid UTF-8", ""] and found[2].value["text"] == "ok too"


# -- Logs of assistants ------------------------------------------------------------------------------------------------


def moderation(*raised):
    categories = {"hate": "hate" in raised, "violence": "violence" in raised}
    return {"flagged": bool(raised), "categories": categories, "category_scores": {"hate": 0.5, "violence": 0.25}}


LMSYS = {
    "conversation_id": "33f0", "model": "vicuna-13b", "turn": 1, "language": "English", "redacted": True,
    "conversation": [{"content": "Hi", "role": "user"}, {"content": "Hello NAME_1", "role": "assistant"}],
    "openai_moderation": [moderation("hate"), moderation()],
}


def test_lmsys(tmp_path):
    path = table(tmp_path / "data/train-00000-of-00006-4feeb3f83346a0e9.parquet", LMSYS)
    conversation, = survives(read_lmsys(tmp_path), tmp_path)
    assert pairs(conversation) == [["user", "Hi"], ["assistant", "Hello NAME_1"]]
    assert conversation.id == "lmsys:33f0" and conversation.meta == {"model": "vicuna-13b", "redacted": True}
    assert conversation.labels == {"language": "English", "flagged": True}
    assert [turn.meta for turn in conversation.turns] == [{"moderation": {"flagged": ["hate"]}}, {}]
    scored, = read_lmsys(path, scores=True)
    assert scored.turns[1].meta == {"moderation": {"scores": {"hate": 0.5, "violence": 0.25}}}
    assert next(read_lmsys(lines(tmp_path / "lmsys.jsonl", LMSYS))) == conversation


def test_moderation_that_does_not_fit_the_turns_is_counted(tmp_path):
    reader = read_lmsys(lines(tmp_path / "a.jsonl", {**LMSYS, "openai_moderation": [moderation("hate")]}))
    conversation, = reader
    assert reader.counts["unaligned_moderation"] == 1 and not conversation.turns[0].meta
    assert conversation.labels["flagged"] is True


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"conversation_id": None}, "no id"), ({"conversation": None}, "conversation is null"),
        ({"conversation": []}, "no turns"), ({"conversation": ["Hi"]}, "a message is text"),
        ({"conversation": [{"role": "narrator", "content": "x"}]}, "'narrator' is unknown"),
    ],
)
def test_bad_chats(tmp_path, change, reason):
    reader = read_lmsys(lines(tmp_path / "a.jsonl", {**LMSYS, **change}, LMSYS), on_error="collect")
    assert len(list(reader)) == 1 and reason in reader.rejects[0].reason
    with pytest.raises(BadRecord, match="a.jsonl:1"):
        list(read_lmsys(tmp_path / "a.jsonl"))


def test_a_file_of_something_else_says_what_it_has(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"messages": []})
    with pytest.raises(BadRecord, match="no 'conversation_id', only 'messages'"):
        list(read_lmsys(path))
    with pytest.raises(BadRecord, match="not a readable Parquet file"):
        list(read_smoltalk(text(tmp_path / "b.parquet", "hello")))
    # A column that is missing is one reject, not a million.
    other = table(tmp_path / "c.parquet", {"messages": [], "source": "x"}, {"messages": [], "source": "x"})
    reader = read_lmsys(other, on_error="collect")
    assert not list(reader) and [reject.reason for reject in reader.rejects] == [
        "there is no column 'conversation_id', only 'messages', 'source'"]


@pytest.mark.parametrize("read", [read_lmsys, read_bitext, read_dailydialog, read_multiwoz, read_dialogstudio, read_abcd])
@pytest.mark.parametrize(
    "name, head, kind",
    [
        ("a.json", b"PAR1" + b"x" * 20, "a Parquet file"), ("a.csv", b"%PDF-1.7", "a PDF document"),
        ("a.txt", b"PK\x03\x04" + b"x" * 20, "a damaged or cut zip archive"), ("a.jsonl", b"\x1f\x8b\x08", "a gzip file"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(tmp_path, read, name, head, kind):
    with pytest.raises(CdrError, match=f"looks like {kind}"):
        list(read(text(tmp_path / name, head)))


def wildchat(hash, *said, **more):
    shared = {"language": "English", "toxic": False, "redacted": False, "country": "Peru", "state": None}
    turns = [{"content": content, "role": role, "turn_identifier": 7 + len(said), "timestamp": None, **shared, **extra}
             for role, content, extra in said]
    when = datetime.datetime.fromisoformat("2023-04-09T00:02:00+00:00")
    return {"conversation_hash": hash, "model": "gpt-4", "timestamp": when, "conversation": turns, "turn": 1,
            "openai_moderation": [moderation()] * len(said), **shared, **more}


def test_wildchat(tmp_path):
    same = [("user", "Hi", {"language": "Spanish"}), ("assistant", None, {"toxic": True})]
    path = table(tmp_path / "train-00000-of-00014.parquet", wildchat("9f", *same), wildchat("9f", *same[:1]))
    first, second = survives(read_wildchat(path), tmp_path)
    assert (first.id, second.id) == ("wildchat:9f:9", "wildchat:9f:8")
    assert pairs(first) == [["user", "Hi"], ["assistant", ""]]
    assert first.turns[0].meta == {"language": "Spanish", "turn_identifier": 9}
    assert first.turns[1].meta == {"toxic": True, "turn_identifier": 9}
    assert first.meta == {"model": "gpt-4", "timestamp": "2023-04-09T00:02:00+00:00", "redacted": False, "country": "Peru"}
    assert first.labels == {"language": "English", "toxic": False, "flagged": False}


def test_wildchat_of_the_first_release_has_an_id(tmp_path):
    row = {"conversation_id": "ab", "model": "gpt-4", "conversation": [{"content": "Hi", "role": "user"}]}
    assert next(read_wildchat(lines(tmp_path / "a.jsonl", row))).id == "wildchat:ab"


def test_smoltalk(tmp_path):
    row = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}], "source": "numina"}
    table(tmp_path / "data/all/train-00000-of-00009.parquet", row, row)
    table(tmp_path / "data/all/test-00000-of-00001.parquet", {**row, "source": "ultra"})
    found = survives(read_smoltalk(tmp_path), tmp_path)
    assert [item.id for item in found] == [
        "smoltalk:test-00000-of-00001:1", "smoltalk:train-00000-of-00009:1", "smoltalk:train-00000-of-00009:2"]
    assert found[0].meta == {"source": "ultra", "split": "test"}
    part = table(tmp_path / "other/train-00000-of-00001.parquet", row)
    assert next(read_smoltalk(part)).id == "smoltalk:train-00000-of-00001:1"


def test_bitext(tmp_path):
    path = text(tmp_path / "Bitext_Sample_27K.csv", 'flags,instruction,category,intent,response\n'
                'BQZ,"question about ""cancelling"" order {{Order Number}}",ORDER,cancel_order,"One:\n\n1. {{Site}}"\n'
                'B,NA,ORDER,cancel_order,None\n')
    first, second = survives(read_bitext(tmp_path), tmp_path)
    assert pairs(first) == [["user", 'question about "cancelling" order {{Order Number}}'], ["assistant", "One:\n\n1. {{Site}}"]]
    assert pairs(second) == [["user", "NA"], ["assistant", "None"]] and (first.id, second.id) == ("bitext:2", "bitext:5")
    assert first.labels == {"category": "ORDER", "intent": "cancel_order"} and first.meta == {"flags": "BQZ"}
    with pytest.raises(CdrError, match="not a Bitext corpus: it has no column 'instruction', only 'a', 'b'"):
        list(read_bitext(text(tmp_path / "Bitext_other.csv", "a,b\n1,2\n")))
    assert path.exists()


def test_mobileconvrec(tmp_path):
    said = {"turn": 1, "is_rec": False, "user_accept_recommendation": False, "COMPUTER": "What for?", "HUMAN": "Walking"}
    row = {"user_id": "u", "user_previous_interactions": [{"app_name": "A"}], "recommended_app": {"app_name": "Maps"},
           "negative_recommended_app": [], "turns": [said, {"turn": 2, "is_rec": True, "COMPUTER": "Maps", "HUMAN": None}]}
    lines(tmp_path / "mobile_conv_rec/MobileConvRec_validation.jsonl", row, {**row, "turns": [{"turn": 1}]})
    reader = read_mobileconvrec(tmp_path, on_error="collect")
    conversation, = survives(reader, tmp_path)
    assert pairs(conversation) == [["assistant", "What for?"], ["user", "Walking"], ["assistant", "Maps"]]
    assert conversation.id == "mobileconvrec:dev:1" and conversation.meta["split"] == "dev"
    assert conversation.turns[1].meta == {"user_accept_recommendation": False}
    assert conversation.turns[0].meta == {"turn": 1, "is_rec": False}
    assert "neither COMPUTER nor HUMAN" in reader.rejects[0].reason


def test_tau_bench(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": '{"a": 1}'}}
    trajectory = [{"role": "user", "content": "Book"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                  {"role": "tool", "name": "book", "tool_call_id": "c1", "content": "[]"}]
    rows = [{"task_id": 0, "trial": trial, "reward": 1.0, "info": {}, "traj": trajectory} for trial in (0, 1)]
    path = text(tmp_path / "gpt-4o-retail.json", json.dumps(rows))
    first, second = survives(read_tau_bench(path), tmp_path)
    assert second.id == "tau-bench:gpt-4o-retail:0:1" and first.turns[1].meta == {"tool_calls": [call]}
    assert pairs(first) == [["user", "Book"], ["assistant", ""], ["tool", "[]"]]


# -- Tasks -------------------------------------------------------------------------------------------------------------


def woz22(id, *said):
    state = {"active_intent": "find_hotel", "requested_slots": [], "slot_values": {"hotel-area": ["north"]}}
    turns = []
    for number, (speaker, utterance) in enumerate(said):
        frame = {"service": "hotel", "actions": [], "slots": []} | ({"state": state} if speaker == "USER" else {})
        turns.append({"speaker": speaker, "turn_id": str(number), "utterance": utterance, "frames": [frame]})
    return {"dialogue_id": id, "services": ["hotel"], "turns": turns}


def test_multiwoz_22_with_its_acts(tmp_path):
    said = [("USER", "A hotel in the north"), ("SYSTEM", "Any price?")]
    text(tmp_path / "train/dialogues_001.json", json.dumps([woz22("PMUL1.json", *said)]))
    text(tmp_path / "test/dialogues_001.json", json.dumps([woz22("SNG2.json", *said[:1])]))
    acts = {"PMUL1.json": {"1": {"dialog_act": {"Hotel-Request": [["price", "?"]]}, "span_info": []}}}
    text(tmp_path / "dialog_acts.json", json.dumps(acts))
    first, second = survives(read_multiwoz(tmp_path), tmp_path)
    assert pairs(first) == [["user", "A hotel in the north"], ["assistant", "Any price?"]]
    assert (first.id, second.id) == ("multiwoz:PMUL1", "multiwoz:SNG2")
    assert [turn.meta.get("acts") for turn in first.turns] == [None, {"Hotel-Request": [["price", "?"]]}]
    assert first.labels == {"services": ["hotel"], "intents": ["find_hotel"]} and second.meta["split"] == "test"
    # A file alone finds the acts beside its folder.
    assert next(read_multiwoz(tmp_path / "train/dialogues_001.json")) == first


def test_spans_outside_the_text_are_counted_in_multiwoz(tmp_path):
    row = woz22("PMUL1.json", ("USER", "short"))
    row["turns"][0]["frames"][0]["slots"] = [{"slot": "area", "start": 90, "exclusive_end": 95, "value": "north"}]
    reader = read_multiwoz(text(tmp_path / "dialogues_001.json", json.dumps([row])))
    assert len(list(reader)) == 1 and reader.counts["odd_spans"] == 1


def woz21(*said):
    return {"goal": {}, "log": [{"text": said_, "metadata": {"hotel": {"semi": {"area": "x"}, "book": {"booked": []}}}
                                 if number % 2 else {}} for number, said_ in enumerate(said)]}


def test_multiwoz_21_splits_and_shifted_turns(tmp_path, heard):
    shifted = {"log": woz21("a", "b", "c", "d")["log"][1:]}
    text(tmp_path / "data.json", json.dumps({"A.json": woz21("a", "b"), "B.json": woz21("c", "d"), "C.json": shifted}))
    text(tmp_path / "valListFile.json", "B.json\n")
    text(tmp_path / "system_acts.json", json.dumps({"A": {"1": "No Annotation"}, "B": {"1": {"X": []}, "7": {"Y": []}}}))
    reader = read_multiwoz(tmp_path, on_error="collect")
    first, second = survives(reader, tmp_path)
    assert (first.meta["split"], second.meta["split"]) == ("train", "dev") and not heard
    assert "acts" not in first.turns[1].meta and second.turns[1].meta["acts"] == {"X": []}
    assert reader.counts["unplaced_acts"] == 1 and "a turn is missing" in reader.rejects[0].reason
    assert first.turns[1].meta["state"] == {"hotel": {"area": "x"}} and first.meta["goal"] == {}


def test_abcd(tmp_path):
    row = {"convo_id": 7, "scenario": {"flow": "f", "subflow": "s", "personal": {"customer_name": "c"}},
           "original": [["agent", "Hi!"], ["customer", "Refund"], ["action", "Pulled up"]],
           "delexed": [{"targets": ["s", "retrieve_utterance", None, None, 3], "candidates": [1]}, {}, {}]}
    packed = tmp_path / "abcd_v1.1.json.gz"
    packed.write_bytes(gzip.compress(json.dumps({"train": [row], "dev": [{**row, "convo_id": 8}]}).encode()))
    first, second = survives(read_abcd(tmp_path), tmp_path)
    assert pairs(first) == [["assistant", "Hi!"], ["user", "Refund"], ["tool", "Pulled up"]]
    assert (first.meta["split"], second.meta["split"], second.id) == ("train", "dev", "abcd:8")
    assert first.turns[0].meta == {"targets": ["s", "retrieve_utterance", None, None, 3]}
    plain, = read_abcd(text(tmp_path / "abcd_sample.json", json.dumps([row])))
    assert plain.turns == first.turns


def test_dstc11_labels_that_are_too_few(tmp_path):
    text(tmp_path / "val/logs.json", json.dumps([[{"speaker": "U", "text": "a"}], [{"speaker": "S", "text": "b"}]]))
    text(tmp_path / "val/labels.json", json.dumps([{"target": True}]))
    reader = read_dstc11(tmp_path, on_error="collect")
    first, second = reader
    assert first.labels == {"target": True} and second.labels == {} and second.turns[0].role == "assistant"
    assert "1 labels for 2 logs" in reader.rejects[0].reason


def test_dialogstudio(tmp_path):
    log = [{"turn id": 1, "user utterance": "", "system response": "Hi", "dialog history": "", "dst": "a b",
            "original user side information": {}, "original system side information": {"act": "greet"}},
           {"turn id": 2, "user utterance": "A film?", "system response": "Dune", "intent": "find"}]
    entry = {"original dialog id": "9", "dialog index": 1, "original dialog info": {"k": 1}, "log": log, "prompt": ["x"]}
    path = text(tmp_path / "a/B/converted_examples.json", json.dumps({"B--val--1": entry, "B--val--2": {"log": None}}))
    reader = read_dialogstudio(tmp_path, on_error="collect")
    conversation, = survives(reader, tmp_path)
    assert pairs(conversation) == [["assistant", "Hi"], ["user", "A film?"], ["assistant", "Dune"]]
    assert conversation.id == "dialogstudio:B--val--1" and conversation.turns[0].meta == {"act": "greet"}
    assert conversation.meta == {"corpus": "B", "original_id": "9", "split": "dev", "original": {"k": 1}}
    assert reader.counts["silent_sides"] == 1 and "log is null" in reader.rejects[0].reason and path.exists()


# -- Talk between people -----------------------------------------------------------------------------------------------


def daily(folder, content, split="train", **labels):
    stem = f"_{split}" if split else "_text"
    path = text(folder / f"dialogues{stem}.txt", content)
    for name, lines_ in labels.items():
        text(folder / (f"dialogues_{name}_{split}.txt" if split else f"dialogues_{name}.txt"), lines_)
    return path


def test_dailydialog_splits_have_ids_of_their_own(tmp_path):
    for split in ("train", "validation", "test"):
        daily(tmp_path / split, "a __eou__ b __eou__\n", split, act="1 2 \n", emotion="0 0 \n")
    found = survives(read_dailydialog(tmp_path), tmp_path)
    assert sorted(item.id for item in found) == ["dailydialog:dev:1", "dailydialog:test:1", "dailydialog:train:1"]
    assert all(item.labels == {"acts": [1, 2], "emotions": [0, 0]} for item in found)


def test_dailydialog_whole_with_topics(tmp_path):
    daily(tmp_path, "a __eou__ b __eou__\nc __eou__\n", "", act="1 2\n3\n", emotion="0 0\n4\n", topic="1\n10\n")
    found = list(read_dailydialog(tmp_path))
    assert [item.id for item in found] == ["dailydialog:1", "dailydialog:2"]
    assert found[1].labels == {"acts": [3], "emotions": [4], "topic": 10}


def test_dailydialog_turns(tmp_path, heard):
    content = "a __eou__  __eou__ c __eou__\nd __eou__ no marker at the end\ne__eou__f__eou__\r\n"
    found = list(read_dailydialog(daily(tmp_path, content)))
    assert [[turn.text for turn in item.turns] for item in found] == [
        ["a", "", "c"], ["d", "no marker at the end"], ["e", "f"]]
    assert [turn.role for turn in found[0].turns] == ["user", "assistant", "user"] and not heard


@pytest.mark.parametrize("labels", ["1 x 1\n", "1 1 1 1\n", "1.0 1 1\n", "-1 1 1\n"])
def test_dailydialog_odd_labels_are_left_out_and_reported(tmp_path, heard, labels):
    conversation, = reader = read_dailydialog(daily(tmp_path, "a __eou__ b __eou__ c __eou__\n", act=labels))
    assert conversation.labels == {} and reader.counts["odd_labels"] == 1
    assert len(heard) == 1 and "dailydialog:train:1" in str(heard[0].message)


def test_dailydialog_labels_for_other_dialogues_stop(tmp_path):
    with pytest.raises(CdrError, match="labels 3 dialogues, dialogues_train.txt has 2"):
        list(read_dailydialog(daily(tmp_path, "a __eou__\nb __eou__\n", act="1\n1\n1\n")))


def test_dailydialog_bad_lines(tmp_path):
    path = daily(tmp_path, b"a __eou__ b __eou__\n\xff __eou__\nno marker here\nc __eou__\n", act="1 1\n1\n1\n1\n")
    reader = read_dailydialog(path, on_error="collect")
    assert [item.id for item in reader] == ["dailydialog:train:1", "dailydialog:train:4"]
    assert [reject.line for reject in reader.rejects] == [2, 3] and "UTF-8" in reader.rejects[0].reason


def test_dailydialog_of_parlai(tmp_path, heard):
    said = [{"text": "Hi .", "act": "inform", "emotion": "no_emotion"}, {"text": "Hi !", "act": "question", "emotion": "joy"}]
    lines(tmp_path / "valid.json", {"fold": "validation", "topic": "tourism", "dialogue": said}, {"fold": "x"})
    reader = read_dailydialog(tmp_path, on_error="collect")
    conversation, = survives(reader, tmp_path)
    assert conversation.id == "dailydialog:dev:1" and conversation.labels == {"topic": "tourism", "acts": [1, 2]}
    assert "'joy' is none of" in str(heard[0].message) and "needs 'dialogue'" in reader.rejects[0].reason


def test_dailydialog_a_dialogue_without_labels_keeps_the_others_in_place(tmp_path, heard):
    daily(tmp_path, "a __eou__\nb __eou__\nc __eou__\n", act="1\n\n3\n")
    found = list(read_dailydialog(tmp_path))
    assert [item.labels for item in found] == [{"acts": [1]}, {}, {"acts": [3]}]
    assert len(heard) == 1 and "0 labels for 1 turns" in str(heard[0].message)


def test_dailydialog_labels_that_are_not_text(tmp_path, heard):
    daily(tmp_path, "a __eou__\nb __eou__\n", act=b"1\n\xff\n", emotion="0\n0\n")
    first, second = read_dailydialog(tmp_path)
    assert first.labels == {"acts": [1], "emotions": [0]} and second.labels == {"emotions": [0]}
    assert "not UTF-8" in str(heard[0].message)


def test_the_hub_copy_is_a_script(tmp_path):
    text(tmp_path / "daily_dialog.py", "import datasets\n")
    with pytest.raises(CdrError, match="loading script.*dialogues_train.txt"):
        read_dailydialog(tmp_path)


def test_xdailydialog_has_languages(tmp_path):
    text(tmp_path / "dialogues_text_De.txt", "Guten Tag . __eou__ Hallo . __eou__\n")
    text(tmp_path / "dialogues_text_En.txt", "Good day . __eou__ Hello . __eou__\n")
    text(tmp_path / "dialogues_action.txt", "1 1\n")
    text(tmp_path / "en_test_human.txt", "So ? __eou__ Fine . __eou__\t1\t2 1\t0 4\n")
    found = survives(read_xdailydialog(tmp_path), tmp_path)
    assert [item.id for item in found] == ["xdailydialog:de:1", "xdailydialog:en:1", "xdailydialog:en:test:1"]
    assert found[0].labels == {"acts": [1, 1]} and found[0].meta == {"language": "de"}
    assert found[2].labels == {"topic": 1, "acts": [2, 1], "emotions": [0, 4]}


def chat(sender, message, **more):
    return {"type": "chat", "sender": sender, "message": message, **more}


def walk(*triples, sender="assistant"):
    return {"type": "action", "sender": sender, "action_id": "kgwalk/choose_path",
            "metadata": {"path": [0.5, [list(triple) for triple in triples], "x"]}}


def opendialkg(path, *rows):
    cells = ['"' + json.dumps(row).replace('"', '""') + '"' for row in rows]
    return text(path, "Messages,User Rating,Assistant Rating\n" + "".join(f'{cell},4,"{{""a"": 1}}"\n' for cell in cells))


def test_opendialkg_actions(tmp_path):
    path = opendialkg(tmp_path / "data/opendialkg.csv", [
        chat("user", "Films?"), walk(("Dune", "has_genre", "SF")), walk(("SF", "x", "y"), ("y", "z", "w")),
        chat("assistant", "Dune"), walk(("Dune", "by", "Herbert"))])
    conversation, = reader = read_opendialkg(tmp_path)
    assert conversation.turns[1].meta["path"] == [["Dune", "has_genre", "SF"], ["SF", "x", "y"], ["y", "z", "w"]]
    assert len(conversation.turns[1].meta["actions"]) == 2 and len(conversation.meta["last_actions"]) == 1
    assert conversation.labels == {"user_rating": 4, "assistant_rating": {"a": 1}} and reader.counts["actions"] == 3
    assert conversation.id == "opendialkg:2" and path.exists()


@pytest.mark.parametrize(
    "entries, reason",
    [
        ([chat("narrator", "x")], "neither an action"), ([{"type": "chat", "sender": "user"}], "neither an action"),
        ([{"sender": "user", "message": "x"}], "neither an action"), (["x"], "neither an action"), ([], "no turns"),
        ([walk(("a", "b", "c"))], "no turns"), ({"a": 1}, "Messages is an object"),
    ],
)
def test_opendialkg_bad_rows(tmp_path, entries, reason):
    reader = read_opendialkg(opendialkg(tmp_path / "o.csv", entries, [chat("user", "ok")]), on_error="collect")
    assert [item.id for item in reader] == ["opendialkg:3"] and reason in reader.rejects[0].reason


def test_opendialkg_cell_that_is_not_json(tmp_path):
    path = text(tmp_path / "o.csv", 'Messages,User Rating\nhello,4\n"[{""type"": ""chat"", ""sender"": ""user"", ""message"": ""ok""}]",\n')
    reader = read_opendialkg(path, on_error="collect")
    assert len(list(reader)) == 1 and "not JSON" in reader.rejects[0].reason and reader.rejects[0].line == 2
    with pytest.raises(CdrError, match="not OpenDialKG: it has no column 'Messages'"):
        list(read_opendialkg(text(tmp_path / "p.csv", "a,b\n1,2\n")))


def bad(said, label="__ok__", speaker="bot", persona=r"your persona: i ski.\nyour persona: i bake."):
    return "\t".join([f"text:{said}", f"labels:{label}", "episode_done:True", f"speaker_to_eval:{speaker}",
                      f"bot_persona:{persona}"]) + "\n"


def test_bot_adversarial_dialogues_grow(tmp_path):
    content = (bad("Hi", speaker="human") + bad(r"Hi\nGo away", "__notok__") + bad(r"Hi\nGo away\nWhy?", speaker="human")
               + bad("Hi", speaker="human") + bad(r"Hi\nHello\nHow are you?\nFine"))
    path = text(tmp_path / "bot_adversarial_dialogue_datasets_with_persona/valid.txt", content)
    reader = read_bot_adversarial(tmp_path)
    first, second = survives(reader, tmp_path)
    assert pairs(first) == [["user", "Hi"], ["assistant", "Go away"], ["user", "Why?"]]
    assert [turn.meta["label"] for turn in first.turns] == ["__ok__", "__notok__", "__ok__"]
    assert first.labels == {"offensive": True} and first.id == "bot-adversarial:dev:1"
    assert pairs(second)[-1] == ["assistant", "Fine"] and second.id == "bot-adversarial:dev:4"
    assert [turn.meta.get("label") for turn in second.turns] == ["__ok__", None, None, "__ok__"]
    assert reader.counts["lines"] == 5 == reader.counts["records"] + 3
    assert len(list(read_bot_adversarial(path, merge=False))) == 5


def test_bot_adversarial_lines_that_do_not_continue(tmp_path):
    other = r"your persona: i sing."
    content = bad("Hi", speaker="human") + bad(r"Hi\nOk", persona=other) + bad(r"Hi\nOk", speaker="human", persona=other)
    found = list(read_bot_adversarial(text(tmp_path / "test.txt", content)))
    assert [len(item) for item in found] == [1, 2, 2] and [item.turns[-1].role for item in found] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    "line, reason",
    [
        (bad("Hi").replace("speaker_to_eval:bot\t", ""), "speaker_to_eval is None"),
        (bad("Hi", speaker="both"), "speaker_to_eval is 'both'"), ("hello\n", "no 'text'"),
        (bad("Hi").replace("labels", "label"), "no 'labels'"), (b"text:\xff\n", "invalid UTF-8"),
        (bad(r"your persona: i ski."), "no turns"),
    ],
)
def test_bot_adversarial_bad_lines(tmp_path, line, reason):
    good = bad("Hi")
    content = (line if isinstance(line, bytes) else line.encode()) + good.encode()
    reader = read_bot_adversarial(text(tmp_path / "test.txt", content), on_error="collect")
    assert len(list(reader)) == 1 and reason in reader.rejects[0].reason and reader.rejects[0].line == 1


def test_persona_lines_in_the_text_are_no_turns(tmp_path):
    line = bad(r"your persona: i run.\nHi\nHello", persona="")
    conversation, = read_bot_adversarial(text(tmp_path / "test.txt", line))
    assert pairs(conversation) == [["user", "Hi"], ["assistant", "Hello"]] and conversation.meta["bot_persona"] == ["i run."]


def test_synthetic_persona_chat(tmp_path):
    rows = [("I ski.\nI bake.", "I run.", "User 1: Hi!\nUser 2: Hello!\n\n(The next day)\nUser 1: User 2: x"),
            ("a", "b", "* * *\nUser 2: Hi"), ("a", "b", "Hi!\n\nHello!"), ("a", "b", "")]
    quoted = ['"' + '","'.join(cell.replace('"', '""') for cell in row) + '"' for row in rows]
    path = text(tmp_path / "Synthetic-Persona-Chat_valid.csv",
                "user 1 personas,user 2 personas,Best Generated Conversation\n" + "\n".join(quoted) + "\n")
    reader = read_synthetic_persona_chat(path, on_error="collect")
    first, second = survives(reader, tmp_path)
    assert pairs(first) == [["user", "Hi!"], ["assistant", "Hello!\n\n(The next day)"], ["user", "User 2: x"]]
    assert first.meta["personas"] == [["I ski.", "I bake."], ["I run."]] and first.meta["split"] == "dev"
    assert pairs(second) == [["assistant", "Hi"]] and len(reader.rejects) == 2


# -- Any reader --------------------------------------------------------------------------------------------------------

SGD_LIKE = woz22("PMUL1.json", ("USER", "A hotel"), ("SYSTEM", "Where?"))
SOUND = {
    "lmsys": (read_lmsys, "a.jsonl", LMSYS),
    "wildchat": (read_wildchat, "a.jsonl", {"conversation_hash": "a", "model": "m", "language": "English", "conversation": [
        {"role": "user", "content": "Hi", "turn_identifier": 3, "language": "English"}], "openai_moderation": [moderation()]}),
    "smoltalk": (read_smoltalk, "a.jsonl", {"messages": [{"role": "user", "content": "Hi"}], "source": "x"}),
    "mobileconvrec": (read_mobileconvrec, "a.jsonl", {"user_id": "u", "recommended_app": {"app_name": "A"}, "turns": [
        {"turn": 1, "COMPUTER": "Hi", "HUMAN": "Ho", "user_accept_recommendation": True}]}),
    "tau-bench": (read_tau_bench, "a.jsonl", {"task_id": 1, "trial": 0, "traj": [{"role": "user", "content": "Hi"}]}),
    "multiwoz": (read_multiwoz, "a.jsonl", SGD_LIKE),
    "multiwoz21": (read_multiwoz, "data.json", {"A.json": woz21("a", "b", "c", "d")}),
    "abcd": (read_abcd, "a.jsonl", {"convo_id": 7, "scenario": {"flow": "f", "subflow": "s"}, "original": [["agent", "Hi"]],
                                    "delexed": [{"targets": ["s"]}]}),
    "abcd whole": (read_abcd, "a.json", {"train": [{"convo_id": 7, "original": [["agent", "Hi"]]}]}),
    "dstc11": (read_dstc11, "a.jsonl", [{"speaker": "U", "text": "a"}]),
    "dialogstudio": (read_dialogstudio, "a.json", {"B--val--1": {"original dialog id": "9", "original dialog info": {}, "log": [
        {"user utterance": "a", "system response": "b", "original user side information": {"x": 1}}]}}),
    "opendialkg": (read_opendialkg, "a.jsonl", {"Messages": [chat("user", "Hi"), walk(("a", "b", "c")), chat("assistant", "x")],
                                                "User Rating": "5"}),
    "dailydialog": (read_dailydialog, "a.jsonl", {"fold": "train", "topic": "x", "dialogue": [
        {"text": "Hi", "act": "inform", "emotion": "anger"}]}),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6)


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(value, path, new):
    """The value with something else at one place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("name", SOUND)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_one_place_is_read_or_rejected(tmp_path, name, data):
    read, file, sound = SOUND[name]
    place = data.draw(st.sampled_from(list(places(sound))))
    broken = changed(sound, place, data.draw(JSON))
    path = tmp_path / file
    path.write_text(json.dumps(broken) + "\n", encoding="utf-8", errors="surrogatepass")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reader = read(path, on_error="collect")
            found = list(reader)
        except CdrError:
            return
    counts = reader.counts
    assert counts["records"] == counts["conversations"] + counts["rejected"] + counts["repeats"]
    write_parquet(found, tmp_path / "stored.parquet")
    assert list(read_parquet(tmp_path / "stored.parquet")) == found


SOUND_TEXTS = {
    "dailydialog": (read_dailydialog, "dialogues_train.txt", "Hi . __eou__ Hello . __eou__\nBye . __eou__\n"),
    "xdailydialog": (read_xdailydialog, "en_test_human.txt", "So ? __eou__ Fine . __eou__\t1\t2 1\t0 4\nA . __eou__\t1\t1\t0\n"),
    "bot-adversarial": (read_bot_adversarial, "test.txt", bad("Hi", speaker="human") + bad(r"Hi\nGo away", "__notok__")),
    "bitext": (read_bitext, "Bitext.csv", 'flags,instruction,category,intent,response\nB,"a ""b""",C,d,"e\nf"\nB,a,C,d,e\n'),
    "synthetic-persona-chat": (
        read_synthetic_persona_chat, "Synthetic-Persona-Chat_test.csv",
        'user 1 personas,user 2 personas,Best Generated Conversation\na,b,"User 1: Hi\nUser 2: Ho"\n'),
    "multiwoz21": (read_multiwoz, "data.json", json.dumps({"A.json": woz21("a", "b"), "B.json": woz21("c", "d")})),
    "dialogstudio": (read_dialogstudio, "converted_examples.json", json.dumps({"B--val--1": {"log": [
        {"user utterance": "a", "system response": "b"}]}})),
}


@pytest.mark.parametrize("name", SOUND_TEXTS)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_are_read_or_rejected(tmp_path, name, data):
    read, file, sound = SOUND_TEXTS[name]
    whole = sound.encode()
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, min(len(whole), start + 40)))
    path = tmp_path / file
    path.write_bytes(whole[:start] + data.draw(st.binary(max_size=6)) + whole[stop:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reader = read(path, on_error="collect")
            found = list(reader)
        except CdrError:
            return
    write_parquet(found, tmp_path / "stored.parquet")
    assert list(read_parquet(tmp_path / "stored.parquet")) == found
    # A line of the adversarial form may join the one before.
    lost = reader.counts["records"] - reader.counts["conversations"] - reader.counts["rejected"] - reader.counts["repeats"]
    assert lost == 0


# -- Real files --------------------------------------------------------------------------------------------------------

REAL = os.environ.get("CDR_DATA")


@pytest.mark.real
@pytest.mark.skipif(not REAL, reason="CDR_DATA is not set")
@pytest.mark.parametrize(
    "read, path, conversations, turns, rejected",
    [
        # Counted with grep and jq-like one-liners over the files, not with this package.
        (read_tau_bench, "tau-bench", 200, None, 0),
        (read_abcd, "abcd-sample", 3, 72, 0),
        (read_dstc11, "dstc11-track5", 4173, None, 0),
        (read_dialogstudio, "dialogstudio-samples", 155, None, 0),
        (read_multiwoz, "dialogstudio-samples/task-oriented-dialogues/MULTIWOZ2_2/original_examples.json", 5, None, 0),
        (read_opendialkg, "dialogstudio-samples/conversational-recommendation-dialogues/OpenDialKG/original_examples.json",
         5, None, 0),
    ],
)
def test_public_files(read, path, conversations, turns, rejected, tmp_path):
    reader = read(Path(REAL) / path, on_error="collect")
    found = survives(reader, tmp_path)
    assert len(found) == conversations == reader.counts["records"] and len(reader.rejects) == rejected
    assert turns is None or sum(map(len, found)) == turns


@pytest.mark.real
@pytest.mark.skipif(not REAL, reason="CDR_DATA is not set")
def test_xdailydialog_matches_the_markers_of_its_files(tmp_path, heard):
    folder = Path(REAL) / "xdailydialog"
    found = survives(read_xdailydialog(folder), tmp_path)
    files = [*folder.glob("en_*_human.txt"), *folder.glob("1k_part_data/dialogues_text_*.txt")]
    spoken = [line for file in files for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    assert len(found) == len(spoken)
    # Whatever follows the last marker of a line is a turn too.
    text_only = [line.split("\t")[0] for line in spoken]
    expected = sum(line.count("__eou__") + bool(line.rpartition("__eou__")[2].strip()) for line in text_only)
    assert sum(map(len, found)) == expected
    mismatched = [item for item in found if "odd_labels" in item.meta]
    assert len(mismatched) == len(heard) == 24 and all("acts" not in item.labels for item in mismatched)


@pytest.mark.real
@pytest.mark.skipif(not REAL, reason="CDR_DATA is not set")
def test_synthetic_persona_chat_leaves_out_only_what_has_no_speakers(tmp_path):
    reader = read_synthetic_persona_chat(Path(REAL) / "synthetic-persona-chat", on_error="collect")
    found = survives(reader, tmp_path)
    assert len(found) + len(reader.rejects) == 1968 and len(reader.rejects) == 3


@pytest.mark.parametrize("name", ["chats.PARQUET", "chats.JSONL", "chats.jsonl.GZ"])
def test_the_case_of_an_ending_does_not_matter(tmp_path, name):
    chats = [Conversation.make("c1", ("user", "hello"), ("assistant", "hi"))]
    write = write_parquet if name.endswith("PARQUET") else write_jsonl
    write(chats, tmp_path / name)
    assert [chat.turns for chat in open_corpus(tmp_path / name)] == [chats[0].turns]
