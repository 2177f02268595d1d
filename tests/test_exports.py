"""Exports that people have: account exports, messengers, workspaces, workbooks; whole, damaged, or something else."""

import datetime
import gzip
import json
import string
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openpyxl import Workbook

from cdr_lib.core.archives import ExportFiles, looks_like, media_placeholder
from cdr_lib.core.chat import Message, split_chat
from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import BadRecord
from cdr_lib.core.exports import read_chatgpt, read_claude, read_long_excel
from cdr_lib.core.io import read_jsonl, read_parquet, write_jsonl, write_parquet
from cdr_lib.core.messengers import read_telegram, read_whatsapp, stamp_of
from cdr_lib.core.workspaces import Directory, read_discord, read_slack, slack_text


def put(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(value if isinstance(value, bytes) else
                     (value if isinstance(value, str) else json.dumps(value)).encode("utf-8"))
    return path


def zipped(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in members.items():
            archive.writestr(name, value if isinstance(value, (str, bytes)) else json.dumps(value))
    return path


def pairs(conversation):
    return [(turn.role, turn.text) for turn in conversation.turns]


def said(conversation):
    return [(turn.speaker, turn.text) for turn in conversation.turns]


def stored(conversations, folder):
    """Both forms of a corpus give back what was written."""
    conversations = list(conversations)
    write_jsonl(conversations, folder / "stored.jsonl")
    write_parquet(conversations, folder / "stored.parquet")
    assert list(read_jsonl(folder / "stored.jsonl")) == conversations == list(read_parquet(folder / "stored.parquet"))
    return conversations


# --- ChatGPT ---------------------------------------------------------------------------------------------------------

LOA_01 = {
    "title": "kettles",
    "current_node": "n6",
    "mapping": {
        "root": {"id": "root", "message": None, "parent": None, "children": ["n1"]},
        "n1": {"id": "n1", "parent": "root", "children": ["n2"], "message": {
            "author": {"role": "system"}, "content": {"content_type": "text", "parts": [""]},
            "metadata": {"is_visually_hidden_from_conversation": True}}},
        "n2": {"id": "n2", "parent": "n1", "children": ["n3", "n4"], "message": {
            "author": {"role": "user"}, "create_time": 100.0, "metadata": {},
            "content": {"content_type": "text", "parts": ["Which kettle is quieter?"]}}},
        "n3": {"id": "n3", "parent": "n2", "children": [], "message": {
            "author": {"role": "assistant"}, "recipient": "all", "create_time": 101.0, "metadata": {},
            "content": {"content_type": "text", "parts": ["Discarded draft."]}}},
        "n4": {"id": "n4", "parent": "n2", "children": ["n5"], "message": {
            "author": {"role": "assistant"}, "recipient": "browser", "create_time": 102.0, "metadata": {},
            "content": {"content_type": "code", "text": "search('kettle')"}}},
        "n5": {"id": "n5", "parent": "n4", "children": ["n6"], "message": {
            "author": {"role": "tool", "name": "browser"}, "create_time": 103.0, "metadata": {},
            "content": {"content_type": "text", "parts": ["3 results"]}}},
        "n6": {"id": "n6", "parent": "n5", "children": [], "message": {
            "author": {"role": "assistant"}, "recipient": "all", "create_time": 104.0, "metadata": {},
            "content": {"content_type": "text", "parts": ["The K2 model."]}}},
    },
}
SEEN = [("user", "Which kettle is quieter?"), ("assistant", "The K2 model.")]


@pytest.mark.parametrize("form", ["array", "lines", "object", "zip", "folder", "zip in parts"])
def test_LOA_01_the_path_that_the_user_saw(tmp_path, form):
    path = {
        "array": lambda: put(tmp_path / "conversations.json", [LOA_01]),
        "lines": lambda: put(tmp_path / "chats.jsonl", json.dumps(LOA_01) + "\n"),
        "object": lambda: put(tmp_path / "kettles.json", json.dumps(LOA_01, indent=2)),
        "zip": lambda: zipped(tmp_path / "export.zip", {"user.json": {}, "chat.html": "<html>", "conversations.json": [LOA_01]}),
        "folder": lambda: put(tmp_path / "export" / "conversations.json", [LOA_01]).parent,
        "zip in parts": lambda: zipped(tmp_path / "export.zip", {"a/conversations-000.json": [LOA_01],
                                                                 "a/conversations-001.json": []}),
    }[form]()
    reader = read_chatgpt(path)
    (conversation,) = reader
    assert pairs(conversation) == SEEN
    assert reader.counts["tool_messages"] == 2 and reader.counts["hidden_messages"] == 1
    assert reader.counts["other_branches"] == 1
    assert conversation.meta["title"] == "kettles"
    assert conversation.turns[0].meta["time"] == "1970-01-01T00:01:40+00:00"
    stored([conversation], tmp_path)


def test_LOA_01_all_branches_and_tools(tmp_path):
    path = put(tmp_path / "conversations.json", [LOA_01])
    seen, draft = read_chatgpt(path, branches="all")
    assert pairs(seen) == SEEN and pairs(draft) == [SEEN[0], ("assistant", "Discarded draft.")]
    assert seen.id != draft.id and draft.id.startswith(seen.id)
    assert [conversation.id for conversation in read_chatgpt(path, branches="all")] == [seen.id, draft.id]
    (kept,) = read_chatgpt(path, tools=True)
    assert pairs(kept) == [SEEN[0], ("tool", "search('kettle')"), ("tool", "3 results"), SEEN[1]]
    assert kept.turns[1].meta["call"] == "browser" and kept.turns[2].speaker == "browser"


def test_LOA_01_a_branch_that_ends_in_nothing_new_is_told_once(tmp_path):
    chat = json.loads(json.dumps(LOA_01))
    chat["mapping"]["n7"] = {"id": "n7", "parent": "n6", "message": {
        "author": {"role": "tool", "name": "t"}, "content": {"content_type": "text", "parts": ["late"]}}}
    chat["mapping"]["n8"] = {"id": "n8", "parent": "n6", "message": {
        "author": {"role": "user"}, "content": {"content_type": "text", "parts": ["And cheaper?"]}}}
    found = list(read_chatgpt(put(tmp_path / "c.json", [chat]), branches="all"))
    assert [len(conversation) for conversation in found] == [2, 2, 3]
    chat["current_node"] = "n3"  # then n7 tells no more than n8 does
    found = list(read_chatgpt(put(tmp_path / "c.json", [chat]), branches="all"))
    assert [conversation.turns[-1].text for conversation in found] == ["Discarded draft.", "And cheaper?"]


def damaged_trees():
    def change(**parts):
        return {**json.loads(json.dumps(LOA_01)), **parts}

    circle = change()
    circle["mapping"]["n2"]["parent"] = "n5"
    dangling = change()
    dangling["mapping"]["n4"]["parent"] = "gone"
    stranger = change()
    stranger["mapping"]["n2"]["message"]["author"]["role"] = "oracle"
    odd_parts = change()
    odd_parts["mapping"]["n2"]["message"]["content"]["parts"] = [17]
    blind = change(current_node=None)
    return {
        "goes round in a circle": circle, "'gone' is missing": dangling, "oracle": stranger, "a number": odd_parts,
        "branches='all'": blind, "not in the tree": change(current_node="n99"), "no 'mapping'": {"title": "x"},
        "no turns": change(current_node="root"), "not an object": change(mapping={"a": 5}), "has no 'mapping'": 5,
    }


@pytest.mark.parametrize("words", damaged_trees())
def test_a_damaged_tree_is_a_reject_and_never_stops_the_rest(tmp_path, words):
    good = {**LOA_01, "conversation_id": "good"}
    path = put(tmp_path / "c.json", [good, damaged_trees()[words], {**good, "conversation_id": "good2"}])
    reader = read_chatgpt(path, on_error="collect")
    assert [conversation.id for conversation in reader] == ["good", "good2"]
    (reject,) = reader.rejects
    assert words.removeprefix("goes ") in reject.reason and reader.counts["records"] == 3
    with pytest.raises(BadRecord):
        list(read_chatgpt(path))


def test_without_current_node_a_single_branch_is_the_one_seen(tmp_path):
    chat = {"id": "x", "mapping": {key: LOA_01["mapping"][key] for key in ("root", "n1", "n2", "n3")}}
    (conversation,) = read_chatgpt(put(tmp_path / "c.json", [chat]))
    assert pairs(conversation)[1] == ("assistant", "Discarded draft.")


def test_chatgpt_contents_of_every_kind(tmp_path):
    contents = [
        ("user", {"content_type": "multimodal_text", "parts": [{"content_type": "image_asset_pointer"}, "What is it?"]}),
        ("assistant", {"content_type": "text", "parts": [None, "A kettle."]}),
        ("user", {"content_type": "multimodal_text", "parts": [
            {"content_type": "audio_transcription", "text": "How old?"}, {"content_type": "audio_asset_pointer"}]}),
        ("assistant", {"content_type": "tether_quote", "url": "u", "text": "From 1950."}),
        ("assistant", {"content_type": "thoughts", "thoughts": [{"content": "secret"}]}),
        ("user", {"content_type": "user_editable_context", "user_profile": "secret"}),
        ("user", {"content_type": "text", "parts": ["None"]}),
        ("assistant", {"content_type": "something_new", "data": 1}),
        ("assistant", None),
    ]
    nodes, before = {}, None
    for number, (role, content) in enumerate(contents):
        nodes[str(number)] = {"parent": before, "message": {"author": {"role": role}, "content": content}}
        before = str(number)
    reader = read_chatgpt(put(tmp_path / "c.json", [{"id": "x", "mapping": nodes, "current_node": before}]))
    (conversation,) = reader
    assert [turn.text for turn in conversation.turns] == [
        "[image]\nWhat is it?", "A kettle.", "How old?\n[audio]", "From 1950.", "None", "[something_new]", ""]
    assert reader.counts["hidden_messages"] == 2 and "secret" not in str(conversation.to_dict())
    stored([conversation], tmp_path)


@given(st.integers(1, 25).flatmap(lambda n: st.tuples(*[st.integers(0, max(0, i - 1)) for i in range(n)])), st.data())
@settings(max_examples=60, deadline=None)
def test_every_branch_of_a_random_tree_once(tmp_path_factory, before, data):
    folder = tmp_path_factory.mktemp("tree")
    parents = {str(i): str(j) if i else None for i, j in enumerate(before)}
    leaves = [node for node in parents if node not in parents.values()]
    seen = data.draw(st.sampled_from(leaves))
    nodes = {node: {"parent": parent, "message": {
        "author": {"role": "user" if int(node) % 2 else "assistant"}, "content": {"content_type": "text", "parts": [node]}}}
        for node, parent in parents.items()}
    path = put(folder / "c.json", [{"id": "t", "current_node": seen, "mapping": nodes}])

    def branch(node):
        return [*branch(parents[node]), node] if parents[node] is not None else [node]

    found = list(read_chatgpt(path, branches="all"))
    assert [turn.text for turn in found[0].turns] == branch(seen)
    assert sorted([turn.text for turn in each.turns] for each in found) == sorted(map(branch, leaves))
    assert len({each.id for each in found}) == len(found)


def test_chatgpt_lone_surrogates_are_rejected_or_replaced_and_counted(tmp_path):
    text = json.dumps([LOA_01]).replace("quieter?", "quieter \\ud83d")
    path = put(tmp_path / "c.json", text)
    with pytest.raises(BadRecord, match="surrogate"):
        list(read_chatgpt(path))
    reader = read_chatgpt(path, surrogates="replace")
    assert next(reader).turns[0].text == "Which kettle is quieter \ufffd" and reader.counts["surrogates_replaced"] == 1


# --- Claude ----------------------------------------------------------------------------------------------------------

def claude(id, *messages, **more):
    return {"uuid": id, "name": "n", "created_at": "2025-01-01T00:00:00Z", "chat_messages": list(messages), **more}


def word(id, sender, text, **more):
    return {"uuid": id, "sender": sender, "text": text, **more}


def test_claude_parts_files_and_blank_turns(tmp_path):
    chats = [
        claude("a", word("1", "human", "Hi"), word("2", "assistant", None), word("3", "human", "None", content=[])),
        claude("b", word("1", "human", "x", content=[{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                         attachments=[{"file_name": "a.pdf", "extracted_content": "long"}], files=[{"file_name": "b.png"}])),
    ]
    one, two = read_claude(zipped(tmp_path / "data.zip", {"conversations.json": chats, "users.json": []}))
    assert pairs(one) == [("user", "Hi"), ("assistant", ""), ("user", "None")]
    assert pairs(two) == [("user", "one\ntwo\n[file]\n[image]")]
    stored([one, two], tmp_path)


def test_claude_seen_branch(tmp_path):
    root = "00000000-0000-4000-8000-000000000000"
    messages = [word("a", "human", "Q", parent_message_uuid=root, created_at="2025-01-01T00:00:01Z"),
                word("b", "assistant", "old", parent_message_uuid="a", created_at="2025-01-01T00:00:02Z"),
                word("c", "assistant", "new", parent_message_uuid="a", created_at="2025-01-01T00:00:03Z")]
    path = put(tmp_path / "c.json", [claude("x", *messages)])
    assert pairs(next(read_claude(path))) == [("user", "Q"), ("assistant", "new")]
    told = put(tmp_path / "d.json", [claude("x", *messages, current_leaf_message_uuid="b")])
    assert pairs(next(read_claude(told))) == [("user", "Q"), ("assistant", "old")]
    assert len(list(read_claude(told, branches="all"))) == 2


@pytest.mark.parametrize("chat, words", [
    (claude("x"), "no turns"),
    (claude("x", word("1", "martian", "hi")), "martian"),
    (claude("x", {"uuid": "1", "text": "hi"}), "sender"),
    (claude("x", word("1", "human", "a"), word("1", "human", "b")), "two messages"),
    (claude("x", word("1", "human", "a", parent_message_uuid="9")), "'9' is missing"),
    (claude("x", word("1", "human", "a", parent_message_uuid="2"), word("2", "human", "b", parent_message_uuid="1")), "circle"),
    (claude("x", word("1", "human", 7)), "a number"),
    ({"uuid": "x"}, "chat_messages"),
    ("x", "chat_messages"),
])
def test_a_damaged_claude_chat_is_a_reject(tmp_path, chat, words):
    reader = read_claude(put(tmp_path / "c.json", [chat, claude("good", word("1", "human", "hi"))]), on_error="collect")
    assert [each.id for each in reader] == ["good"]
    assert words in reader.rejects[0].reason


# --- WhatsApp --------------------------------------------------------------------------------------------------------

def whatsapp(folder, text, name="WhatsApp Chat with Bo.txt", **options):
    return read_whatsapp(put(folder / name, text), **options)


ANDROID = "{day:02}/{month:02}/{year}, {hour:02}:{minute:02} - {who}: {text}"
FORMS = {
    "android 24h": ANDROID,
    "android 12h": "{month}/{day}/{short:02}, {hour12}:{minute:02}\u202f{half} - {who}: {text}",
    "android spanish": "{day}/{month}/{short:02}, {hour12}:{minute:02} {dots} - {who}: {text}",
    "android german": "{day:02}.{month:02}.{short:02}, {hour:02}:{minute:02} - {who}: {text}",
    "android iso": "{year}-{month:02}-{day:02} {hour:02}:{minute:02} - {who}: {text}",
    "ios 24h": "[{day:02}/{month:02}/{year}, {hour:02}:{minute:02}:07] {who}: {text}",
    "ios 12h": "\u200e[{month}/{day}/{short:02}, {hour12}:{minute:02}:07\u202f{half}] {who}: {text}",
    "ios german": "[{day:02}.{month:02}.{short:02}, {hour:02}:{minute:02}:07] {who}: {text}",
    "ios finnish": "[{day}.{month}.{year} klo {hour:02}.{minute:02}.07] {who}: {text}",
    "chinese": "{year}/{month}/{day} {chinese}{hour12}:{minute:02} - {who}: {text}",
}
TEXTS = st.text(st.characters(blacklist_categories=("Cs", "Cc")) | st.sampled_from("\n\u2028\u0085\u200d👩"), max_size=30)
NAMES = st.sampled_from(["Ana", "Bo", "+31 6 1234", "José María", "李雷"])


@pytest.mark.parametrize("form", FORMS)
@given(messages=st.lists(st.tuples(NAMES, TEXTS, st.integers(0, 5000)), min_size=1, max_size=12), crlf=st.booleans())
@settings(max_examples=25, deadline=None)
def test_whatsapp_whatever_telephone_wrote_it(tmp_path_factory, form, messages, crlf):
    folder = tmp_path_factory.mktemp("chat")
    now, expected, lines = datetime.datetime(2023, 12, 30, 23, 50), [], []
    for who, text, minutes in messages:
        now += datetime.timedelta(minutes=minutes if expected else 0)  # the 30th tells which number is the day
        # What would begin a line as a dated one, or is the program's own word, is another test.
        text = "".join(char for char in text if char not in "\u200e\u200f[<")
        text = "\n".join(part if stamp_of(part) is None else "x" for part in text.split("\n"))
        text = text.rstrip("\n") or "x"
        expected.append((who, text, now.replace(second=7 if form.startswith("ios") else 0).isoformat()))
        lines.append(FORMS[form].format(
            day=now.day, month=now.month, year=now.year, short=now.year % 100, hour=now.hour, minute=now.minute, who=who,
            hour12=now.hour % 12 or 12, half="PM" if now.hour > 11 else "AM", dots="p. m." if now.hour > 11 else "a. m.",
            chinese="下午" if now.hour > 11 else "上午", text=text))
    text = "\n".join(lines) + "\n"
    reader = whatsapp(folder, text.replace("\n", "\r\n") if crlf else text, gap=None)
    (conversation,) = reader
    assert [(turn.speaker, turn.text, turn.meta["time"]) for turn in conversation.turns] == expected
    assert reader.counts["messages"] == len(expected) and not reader.counts["service_messages"]


def test_whatsapp_what_the_program_wrote_is_not_what_people_said(tmp_path):
    reader = whatsapp(tmp_path, "\n".join([
        "13/12/2023, 21:00 - Messages and calls are end-to-end encrypted. Learn more: here",
        '13/12/2023, 21:00 - Ana created group "Camp: 2024"',
        "13/12/2023, 21:00 - Ana added Bo",
        "13/12/2023, 21:01 - Ana: None",
        "13/12/2023, 21:02 - Bo: <Media omitted>",
        "13/12/2023, 21:03 - Bo: \u200eIMG-1.jpg (file attached)",
        "Our tent",
        "13/12/2023, 21:04 - Ana: This message was deleted",
        "13/12/2023, 21:05 - Ana: yes <This message was edited>",
        "13/12/2023, 21:06 - Ana: at 10:30: be there",
        "13/12/2023, 21:07 - Ana:",
    ]))
    (conversation,) = reader
    assert said(conversation) == [("Ana", "None"), ("Bo", "[media]"), ("Bo", "[image]\nOur tent"), ("Ana", "[deleted]"),
                                  ("Ana", "yes"), ("Ana", "at 10:30: be there"), ("Ana", "")]
    assert reader.counts["service_messages"] == 3 and reader.counts["messages"] == 7
    assert reader.counts["deleted_messages"] == 1 and reader.counts["blank_turns"] == 1
    assert conversation.turns[2].meta["attachment"] == "IMG-1.jpg" and conversation.turns[4].meta["edited"]


def test_whatsapp_ios_marks_its_own_words(tmp_path):
    reader = whatsapp(tmp_path, "\n".join([
        "[13.12.23, 21:00:00] Camp: \u200eMessages and calls are end-to-end encrypted.",
        "[13.12.23, 21:00:01] Camp: \u200eAna added you",
        "\u200e[13.12.23, 21:01:00] Ana: \u200eimage omitted",
        "\u200e[13.12.23, 21:01:01] Ana: plan.pdf • \u200e2 pages \u200edocument omitted",
        "[13.12.23, 21:02:00] Ana: image omitted",
        "\u200e[13.12.23, 21:03:00] ~\u202fBo: see \u200e<attached: 0001-VIDEO.mp4>",
        "\u200e[13.12.23, 21:04:00] Ana: \u200ePOLL:",
        "Tea?",
    ]))
    (conversation,) = reader
    assert conversation.turns[1].meta["attachment"] == "plan.pdf • 2 pages"
    assert [turn.text for turn in conversation.turns] == ["[image]", "[file]", "image omitted", "see\n[video]", "POLL:\nTea?"]
    assert reader.counts["service_messages"] == 2 and reader.counts["notices"] == 1


@pytest.mark.parametrize("dates, first", [
    (["31/12/23", "1/1/24"], "2023-12-31"), (["12/31/23", "1/1/24"], "2023-12-31"),
    (["1/11/23", "2/3/23"], "2023-01-11"),  # the first of November would come before the second of March
    (["11/1/23", "3/2/23"], "2023-01-11"), (["3.4.23"], "2023-04-03"), (["5/5/23"], "2023-05-05"), (["2023/4/3"], "2023-04-03"),
    (["24/03/31", "24/04/01"], "2024-03-31"),  # day first would go back from 2031 to 2001; no month is the 24th
    (["10/12/30", "11/01/02"], "2010-12-30"),  # the others: from 2030 to 2002
    (["24.03.31", "24.04.01"], "2024-03-31"),
    (["24/03/15", "24/04/15"], "2015-03-24"),  # the year stands last where it can
    (["24/03/31", "23/03/31", "24/04/01"], "2031-03-24"),  # no reading is in order: a number over 12 is a day
])
def test_whatsapp_the_dates_of_a_file_tell_their_order(tmp_path, dates, first):
    reader = whatsapp(tmp_path, "".join(f"{date}, 21:05 - Ana: hi\n" for date in dates))
    assert next(reader).turns[0].meta["time"] == f"{first}T21:05:00"


def test_whatsapp_dates_that_could_be_either_ask(tmp_path):
    text = "3/4/23, 21:05 - Ana: hi\n4/4/23, 21:05 - Ana: ho\n"
    with pytest.raises(CdrError, match="day_first=True"):
        list(whatsapp(tmp_path, text))
    for day_first, first in ((True, "2023-04-03"), (False, "2023-03-04")):
        reader = whatsapp(tmp_path, text, day_first=day_first)
        assert next(reader).turns[0].meta["time"] == f"{first}T21:05:00"


@pytest.mark.parametrize("dates, says", [
    (["31/12/23", "12/31/23"], "31/12/23 and 12/31/23"),  # as day, month, year or the other way round, never both
    (["24/13/15"], "holds for 24/13/15"),
    (["24/03/31", "12/31/15"], "24/3/31 and 12/31/15"),
])
def test_whatsapp_dates_in_no_order_are_an_error(tmp_path, dates, says):
    text = "".join(f"[{date}, 10:00:00] Ana: hi\n" for date in dates)
    with pytest.raises(CdrError, match=says):
        list(whatsapp(tmp_path, text))
    reader = whatsapp(tmp_path, text, day_first=True, on_error="collect")
    list(reader)
    assert "no date" in reader.rejects[0].reason


def test_whatsapp_an_impossible_date_among_others_is_one_bad_message(tmp_path):
    text = "".join(f"[{date}, 10:00:00] Ana: hi\n" for date in ("13/12/23", "24/13/15", "14/12/23"))
    reader = whatsapp(tmp_path, text, on_error="collect")
    assert [each.turns[0].meta["time"] for each in reader] == ["2023-12-14T10:00:00"]
    assert [reject.line for reject in reader.rejects] == [2, 1] and "24/13/15" in reader.rejects[0].reason


def test_whatsapp_a_bad_message_spoils_its_conversation_only(tmp_path):
    text = (b"13/12/2023, 08:00 - Ana: morning\n13/12/2023, 18:00 - Ana: Gr\xfc\xdfe\n13/12/2023, 18:01 - Bo: hi\n"
            b"31/02/2024, 18:01 - Bo: never\n14/12/2023, 18:00 - Bo: bye\n")
    reader = whatsapp(tmp_path, text, on_error="collect")
    assert [said(each) for each in reader] == [[("Ana", "morning")], [("Bo", "bye")]]
    reasons = [reject.reason for reject in reader.rejects]
    assert [reject.line for reject in reader.rejects] == [2, 4, 3] and "UTF-8" in reasons[0]
    assert "no date" in reasons[1] and "incomplete: its message on line 2" in reasons[2]
    with pytest.raises(BadRecord, match="Bo.txt:2: invalid UTF-8"):
        list(whatsapp(tmp_path, text))


def test_whatsapp_roles(tmp_path):
    two = "13/12/2023, 08:00 - Ana: a\n13/12/2023, 08:01 - Bo: b\n"
    three = two + "13/12/2023, 08:02 - Cy: c\n"

    def roles(text, **options):
        return [turn.role for turn in next(whatsapp(tmp_path, text, **options)).turns]

    assert roles(two) == ["user", "assistant"] and roles(three) == ["user"] * 3
    assert roles(two, me="Bo") == ["assistant", "user"] and roles(three, assistant=["Bo"]) == ["user", "assistant", "user"]
    assert roles(three, assistant="Cy") == ["user", "user", "assistant"]
    with pytest.raises(CdrError, match="'bo' speaks nowhere.*'Ana'"):
        list(whatsapp(tmp_path, two, me="bo"))
    with pytest.raises(CdrError, match="one of them"):
        whatsapp(tmp_path, two, me="Bo", assistant=["Bo"])


def test_whatsapp_archives_and_folders(tmp_path):
    chat = "13/12/2023, 08:00 - Ana: a\n"
    ios = zipped(tmp_path / "WhatsApp Chat - Camp.zip", {"_chat.txt": chat, "letter.txt": "Dear all"})
    assert next(read_whatsapp(ios)).id == "whatsapp:Camp:2023-12-13T08:00:00"
    folder = put(tmp_path / "chats" / "WhatsApp Chat with Bo.txt", chat).parent
    put(folder / "WhatsApp Chat with Cy.txt", "not a chat")
    reader = read_whatsapp(folder, on_error="collect")
    assert [each.meta["chat"] for each in reader] == ["Bo"]
    assert "not a WhatsApp export: it looks like plain text" in reader.rejects[0].reason


def test_a_chat_grows_and_its_conversations_keep_their_names(tmp_path):
    text = "13/12/2023, 08:00 - Ana: a\n13/12/2023, 18:00 - Bo: b\n"
    before = [each.id for each in whatsapp(tmp_path, text)]
    assert [each.id for each in whatsapp(tmp_path, text + "14/12/2023, 18:00 - Bo: c\n")][:2] == before


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(["", "", "a", "b"])), max_size=30), st.integers(1, 10**5))
def test_splitting_keeps_every_message_once_and_in_order(times, gap):
    start = datetime.datetime(2024, 1, 1)
    messages = [Message("A", str(n), start + datetime.timedelta(seconds=at), thread=thread)
                for n, (at, thread) in enumerate(sorted(times, key=lambda item: item[0]))]
    pieces = split_chat(messages, f"{gap}s")
    assert sorted(int(m.text) for piece in pieces for m in piece) == list(range(len(messages)))
    for piece in pieces:
        assert len({m.thread for m in piece}) == 1 and [int(m.text) for m in piece] == sorted(int(m.text) for m in piece)
        if not piece[0].thread:
            assert all((b.time - a.time).total_seconds() <= gap for a, b in zip(piece, piece[1:]))
    loose = [piece for piece in pieces if not piece[0].thread]
    assert all((b[0].time - a[-1].time).total_seconds() > gap for a, b in zip(loose, loose[1:]))


# --- Telegram --------------------------------------------------------------------------------------------------------

LOA_14 = {
    "name": "Ana", "type": "personal_chat", "messages": [
        {"id": 1, "type": "message", "date_unixtime": "1700000000", "from": "Ana", "text": "hi"},
        {"id": 2, "type": "message", "date_unixtime": "1700000001", "from": "Bo", "text": [
            "See ", {"type": "link", "text": "https://a.example"}, ", ", {"type": "bold", "text": "now"}, "!"]},
        {"id": 3, "type": "service", "date_unixtime": "1700000002", "actor": "Bo", "action": "phone_call", "text": ""},
        {"id": 4, "type": "message", "date_unixtime": "1700000003", "from": None, "text": "from a deleted account"},
    ]}


def test_LOA_14_telegram_one_chat(tmp_path):
    reader = read_telegram(put(tmp_path / "result.json", LOA_14))
    (conversation,) = reader
    assert said(conversation) == [("Ana", "hi"), ("Bo", "See https://a.example, now!"),
                                  ("unknown", "from a deleted account")]
    assert reader.counts["service_messages"] == 1 and reader.counts["messages"] == 3
    stored([conversation], tmp_path)


def test_LOA_14_telegram_whole_account(tmp_path):
    account = {"chats": {"list": [{"id": 9, "name": "Ana", "type": "personal_chat", "messages": LOA_14["messages"][:1]}]}}
    (conversation,) = read_telegram(put(tmp_path / "result.json", account))
    assert said(conversation) == [("Ana", "hi")] and conversation.id == "telegram:9:1"
    assert list(read_telegram(tmp_path)) == [conversation]
    assert list(read_telegram(zipped(tmp_path / "x.zip", {"DataExport/result.json": account}))) == [conversation]


def test_telegram_media_and_damage(tmp_path):
    def entry(id, **more):
        return {"id": id, "type": "message", "date_unixtime": str(1_700_000_000 + id), "from": "Ana", "text": "", **more}

    chat = {"name": None, "type": "saved_messages", "id": 1, "messages": [
        entry(1, photo="x"), entry(2, media_type="sticker", file="s.webp"), entry(3, file="a.pdf", text="read"),
        entry(4, poll={"question": "Tea?"}), entry(5, text=None), entry(6, text=[{"type": "custom_emoji", "text": None}])]}
    (conversation,) = read_telegram(put(tmp_path / "a.json", chat))
    assert [turn.text for turn in conversation.turns] == ["[image]", "[sticker]", "[file]\nread", "[poll]", "", ""]
    assert conversation.meta["chat"] == "Saved Messages"
    chat["messages"] += [entry(50_000, text="good"), entry(50_001), entry(90_000, text=7), 5, entry(140_000, text="end")]
    chat["messages"][7]["text"] = "ok \ud83d"
    reader = read_telegram(put(tmp_path / "b.json", chat), on_error="collect")
    assert [each.turns[-1].text for each in reader] == ["", "end"]
    assert len(reader.rejects) == 4  # half an emoji, the message before it in the same conversation, a number, a 5
    replaced = read_telegram(tmp_path / "b.json", on_error="collect", surrogates="replace")
    assert [each.turns[-1].text for each in replaced] == ["", "ok \ufffd", "end"]
    assert replaced.counts["surrogates_replaced"] == 1


@pytest.mark.parametrize("value, words", [
    ("<!DOCTYPE html>", "HTML"), ("[]", "neither messages nor chats"), ('{"messages": 1}', "neither"),
    ('{"chats": {"list": [5]}}', "must be an object"), ('{"messages": [{"id": NaN}]}', "number nan"),
    ('{"messages": [{"id": 1, "id": 2}]}', "twice"), ("", "an empty file"),
    ("[" * 5000, "nested"),
])
def test_telegram_something_else(tmp_path, value, words):
    with pytest.raises(CdrError, match=words):
        list(read_telegram(put(tmp_path / "result.json", value)))


def test_a_message_that_stands_twice_is_taken_once(tmp_path):
    def entry(id, text):
        return {"id": id, "type": "message", "date_unixtime": str(1_700_000_000 + id), "from": "Ana", "text": text}

    chat = {"name": "Ana", "type": "personal_chat", "id": 1, "messages": [entry(1, "a"), entry(2, "b"), entry(1, "a")]}
    reader = read_telegram(put(tmp_path / "a.json", chat))
    assert [said(each) for each in reader] == [[("Ana", "a"), ("Ana", "b")]]
    assert reader.counts["repeated_messages"] == 1 and reader.counts["messages"] == 3
    chat["messages"][2]["text"] = "another"
    with pytest.raises(BadRecord, match="two different messages have the id '1'"):
        list(read_telegram(put(tmp_path / "b.json", chat)))


# --- Slack and Discord -----------------------------------------------------------------------------------------------

def post(ts, user, text, **more):
    return {"type": "message", "ts": f"{ts}.000100", "user": user, "text": text, **more}


SLACK = {
    "users.json": [{"id": "U1", "name": "ana", "profile": {"display_name": "Ana"}},
                   {"id": "U2", "name": "bo", "profile": {"display_name": "", "real_name": "Bo B"}},
                   {"id": "U3", "name": "ci", "is_bot": True}],
    "channels.json": [{"id": "C1", "name": "tents"}],
    "dms.json": [{"id": "D1", "members": ["U1", "U2"]}],
    "tents/2024-01-31.json": [post(1706700000, "U2", "late reply", thread_ts="1706600001.000100"),
                              post(1706690000, "U1", "None")],
    "tents/2024-01-30.json": [
        post(1706600000, "U1", "joined", subtype="channel_join"), post(1706600001, "U1", "<@U2> dry?", reply_count=1),
        post(1706600002, "U3", "build &lt;ok&gt;"), post(1706600003, "U9", "who am I?")],
    "D1/2024-01-30.json": [post(1706600000, "U1", "psst")],
}


@pytest.mark.parametrize("form", ["folder", "zip", "zip with a folder around"])
def test_slack_threads_mentions_and_silences(tmp_path, form):
    if form == "folder":
        for name, value in SLACK.items():
            put(tmp_path / "x" / name, value)
        path = tmp_path / "x"
    else:
        around = "export/" if "around" in form else ""
        path = zipped(tmp_path / "x.zip", {around + name: value for name, value in SLACK.items()})
    reader = read_slack(path)
    found = {each.id: each for each in reader}
    assert {id: said(each) for id, each in found.items()} == {
        "slack:D1:1706600000.000100": [("Ana", "psst")],
        "slack:C1:1706600001.000100": [("Ana", "@Bo B dry?"), ("Bo B", "late reply")],
        "slack:C1:1706600002.000100": [("ci", "build <ok>"), ("U9", "who am I?")],
        "slack:C1:1706690000.000100": [("Ana", "None")],
    }
    assert [turn.role for turn in found["slack:C1:1706600002.000100"].turns] == ["assistant", "user"]
    assert found["slack:D1:1706600000.000100"].meta["chat"] == "Ana, Bo B"
    assert reader.counts["messages"] == 6 and reader.counts["service_messages"] == 1 and reader.counts["chats"] == 2
    stored(found.values(), tmp_path)


def test_slack_edits_deletions_repeats_and_damage(tmp_path):
    put(tmp_path / "tents" / "2024-01-30.json", [
        post(1, "U1", "helo"), post(1, "U1", "helo"), post(2, "U1", "regret"), post(3, "U1", "a"), post(3, "U1", "b"),
        {"type": "message", "subtype": "message_changed", "ts": "9.1", "message": post(1, "U1", "hello")},
        {"type": "message", "subtype": "message_deleted", "ts": "9.2", "deleted_ts": "2.000100"},
        post(4, "U1", "orphan", thread_ts="0.5"), {"type": "message", "text": "when?"}, 7, post(10**6, "U1", {"a": 1})])
    put(tmp_path / "tents" / "2024-01-31.json", "[")
    reader = read_slack(tmp_path, on_error="collect")
    found = list(reader)
    assert [said(each) for each in found] == [[("U1", "hello"), ("U1", "a")], [("U1", "orphan")]]
    assert found[1].turns[0].meta["orphan"] is True
    assert reader.counts["repeated_messages"] == 1 and reader.counts["deleted_messages"] == 1
    assert len(reader.rejects) == 5  # two with ts 3, no ts, 7, a text that is an object, a cut day
    with pytest.raises(BadRecord):
        list(read_slack(tmp_path))


def test_slack_texts_of_programs(tmp_path):
    rows = [{"type": "message", "subtype": "bot_message", "ts": "1.1", "username": "CI", "text": "",
             "attachments": [{"fallback": "build ok"}, {"text": "details"}]},
            {"type": "message", "ts": "2.1", "bot_id": "B1", "bot_profile": {"name": "Poll"}, "text": "",
             "blocks": [{"type": "section", "text": {"type": "mrkdwn", "text": "Tea?"}},
                        {"type": "rich_text", "elements": [{"elements": [{"type": "text", "text": "or coffee"}]}]}]},
            post(3, "U1", "look", files=[{"name": "a.png"}, {"mimetype": "image/png"}])]
    (conversation,) = read_slack(put(tmp_path / "general" / "2024-01-30.json", rows))
    assert said(conversation) == [("CI", "build ok\ndetails"), ("Poll", "Tea?\nor coffee"), ("U1", "look\n[image]\n[image]")]
    assert [turn.role for turn in conversation.turns] == ["assistant", "assistant", "user"]


def test_slack_text_unescapes_once():
    none = Directory({}, frozenset(), {})
    assert slack_text("&amp;lt;b&amp;gt; <https://a.example?x=1&amp;y=2>", none) == "&lt;b&gt; https://a.example?x=1&y=2"


def discord(*messages, **channel):
    return {"guild": {"name": "G"}, "channel": {"id": "7", "name": "tents", **channel}, "messages": list(messages)}


def dpost(id, who, content, minute, **more):
    return {"id": str(id), "type": "Default", "timestamp": f"2024-01-31T10:{minute:02}:00.123+00:00", "content": content,
            "author": {"name": who, "isBot": who == "Bot"}, **more}


def test_discord_json(tmp_path):
    document = discord(
        dpost(1, "Ana", "Joined the server.", 0, type="GuildMemberJoin"), dpost(2, "Ana", "None", 1),
        dpost(3, "Bot", "", 2, type="Reply", embeds=[{"title": "T", "description": "D"}]),
        dpost(4, "Ana", "see", 3, attachments=[{"fileName": "x.mp4"}], stickers=[{"name": "s"}]))
    reader = read_discord(put(tmp_path / "a.json", document))
    (conversation,) = reader
    assert said(conversation) == [("Ana", "None"), ("Bot", "T\nD"), ("Ana", "see\n[video]\n[sticker]")]
    assert [turn.role for turn in conversation.turns] == ["user", "assistant", "user"]
    assert conversation.id == "discord:7:2" and reader.counts["service_messages"] == 1
    stored([conversation], tmp_path)


def test_discord_csv_and_a_folder_with_something_else(tmp_path):
    head = "AuthorID,Author,Date,Content,Attachments,Reactions\n"
    rows = ('1,Ana#1,31-Jan-24 10:01 AM,"a, ""b""\nc",,\n2,Bo,31-Jan-24 10:02 AM,NA,https://x.example/a.png,\n'
            "1,Ana#1,31-Jan-24 11:02 PM,,,\n")
    found = list(read_discord(put(tmp_path / "in" / "G - tents [77].csv", "\ufeff" + head + rows)))
    assert [said(each) for each in found] == [[("Ana#1", 'a, "b"\nc'), ("Bo", "NA\n[image]")], [("Ana#1", "")]]
    assert found[0].id == "discord:77:2024-01-31T10:01:00" and found[0].meta == {"chat": "G - tents"}
    put(tmp_path / "in" / "other.csv", "a,b\n1,2\n")
    put(tmp_path / "in" / "cut.json", '{"guild": {}, "channel": {}, "messages": [')
    reader = read_discord(tmp_path / "in", on_error="collect")
    assert len(list(reader)) == 2 and len(reader.rejects) == 2
    with pytest.raises(CdrError, match="no column 'Author'"):
        list(read_discord(tmp_path / "in" / "other.csv"))


def test_discord_csv_dates_with_slashes_ask_only_if_they_must(tmp_path):
    head = "AuthorID,Author,Date,Content,Attachments,Reactions\n"
    clear = put(tmp_path / "a.csv", head + "1,Ana,12/31/2023 9:05 PM,x,,\n1,Ana,1/1/2024 9:05 PM,x,,\n")
    assert next(read_discord(clear)).turns[0].meta["time"] == "2023-12-31T21:05:00"
    either = put(tmp_path / "b.csv", head + "1,Ana,3/4/2023 9:05 PM,x,,\n")
    with pytest.raises(CdrError, match="day_first"):
        list(read_discord(either))
    assert next(read_discord(either, day_first=False)).turns[0].meta["time"] == "2023-03-04T21:05:00"


# --- Excel -----------------------------------------------------------------------------------------------------------

def workbook(path, **sheets):
    book = Workbook()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    book.save(path)
    return path


LOA_08 = [["conv_id", "role", "text"], ["007", "user", "None"], ["007", "bot", "NA"], ["008", "user", "null"],
          ["008", "bot", "nan"], ["009", "user", "N/A"], ["009", "bot", None]]


def test_LOA_08_words_stay_words_and_ids_stay_text_in_excel(tmp_path):
    found = list(read_long_excel(workbook(tmp_path / "a.xlsx", log=LOA_08)))
    assert [each.id for each in found] == ["007", "008", "009"]
    assert [turn.text for each in found for turn in each.turns] == ["None", "NA", "null", "nan", "N/A", ""]
    stored(found, tmp_path)


def test_LOA_08_cells_that_are_no_text(tmp_path):
    rows = [LOA_08[0], [7, "user", 42], [7, "bot", 4.5], [7, "user", True], [7, "bot", datetime.date(2024, 1, 2)],
            ["=1/0", "user", "id of an error"]]
    reader = read_long_excel(workbook(tmp_path / "a.xlsx", log=rows))
    first, second = reader
    assert first.id == "7" and [turn.text for turn in first.turns] == ["42", "4.5", "TRUE", "2024-01-02"]
    assert second.id == "line:6" and reader.counts["dates_as_text"] == 1


def test_excel_sheets_rows_and_rounded_ids(tmp_path):
    rows = [*LOA_08, [None, None, None], [1234567890123456789, "user", "x"], ["010", "wizard", "y"], ["011", "user", "z"]]
    path = workbook(tmp_path / "a.xlsx", notes=[["by hand"]], log=rows)
    reader = read_long_excel(path, on_error="collect")
    assert [each.id for each in reader] == ["007", "008", "009", "011"]
    assert [reject.line for reject in reader.rejects] == [9, 10] and reader.rejects[0].file.endswith("a.xlsx[log]")
    assert "15 digits" in reader.rejects[0].reason and "wizard" in reader.rejects[1].reason
    with pytest.raises(CdrError, match="'a', 'b' all have"):
        read_long_excel(workbook(tmp_path / "b.xlsx", a=rows, b=rows))
    with pytest.raises(CdrError, match="no sheet 'x', only 'a', 'b'"):
        read_long_excel(tmp_path / "b.xlsx", sheet="x")
    with pytest.raises(CdrError, match="no sheet has the columns"):
        read_long_excel(workbook(tmp_path / "c.xlsx", a=[["x"]], b=[["y"]]))
    with pytest.raises(CdrError, match="no column 'conv_id'"):
        read_long_excel(workbook(tmp_path / "d.xlsx", a=[]))


def test_open_document_sheets_are_read_too(tmp_path):
    cells = "".join("<table:table-row>" + "".join(
        f'<table:table-cell office:value-type="string"><text:p>{cell}</text:p></table:table-cell>' for cell in row
    ) + "</table:table-row>" for row in [["conv_id", "role", "text"], ["007", "user", "None"]])
    content = ('<office:document-content xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0" '
               'xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0" '
               'xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0"><office:body><office:spreadsheet>'
               f'<table:table table:name="log">{cells}</table:table></office:spreadsheet></office:body>'
               '</office:document-content>')
    manifest = '<manifest:manifest xmlns:manifest="urn:oasis:names:tc:opendocument:xmlns:manifest:1.0"/>'
    path = zipped(tmp_path / "a.ods", {"mimetype": "application/vnd.oasis.opendocument.spreadsheet", "content.xml": content,
                                       "META-INF/manifest.xml": manifest})
    (conversation,) = read_long_excel(path)
    assert conversation.id == "007" and pairs(conversation) == [("user", "None")]


# --- what is not what its name says ----------------------------------------------------------------------------------

READERS = {"chatgpt": read_chatgpt, "claude": read_claude, "whatsapp": read_whatsapp, "telegram": read_telegram,
           "slack": read_slack, "discord": read_discord, "excel": read_long_excel}
OTHERS = {
    "page.json": "<!DOCTYPE html><html><body>Sign in</body></html>", "picture.zip": b"\x89PNG\r\n\x1a\n" + b"\0" * 40,
    "book.txt": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3", "old.json": "[1]".encode("utf-16"), "void.json": b"",
    "blanks.txt": "  \n\n\n" * 20_000, "cut.zip": b"PK\x03\x04" + b"\0" * 30, "table.dat": "x;y\n1;2\n",
    "packed.bin": gzip.compress(b"[]"), "noise.bin": bytes(range(256)) * 20,
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("reader", READERS)
def test_something_else_is_named(tmp_path, reader, name):
    path = put(tmp_path / name, OTHERS[name])
    with pytest.raises(CdrError) as error:
        list(READERS[reader](path, on_error="collect"))
    assert name in str(error.value)


@pytest.mark.parametrize("reader", READERS)
def test_no_such_file_and_an_empty_folder_and_archive(tmp_path, reader):
    with pytest.raises(CdrError, match="no such"):
        list(READERS[reader](tmp_path / "nothing"))
    with pytest.raises(CdrError, match="a folder of nothing"):
        list(READERS[reader](tmp_path))
    with pytest.raises(CdrError, match="nothing"):
        list(READERS[reader](zipped(tmp_path / "x.zip", {})))


@pytest.mark.parametrize("reader", set(READERS) - {"excel"})
def test_a_chat_of_another_kind_is_named(tmp_path, reader):
    samples = {
        "chatgpt": put(tmp_path / "a.json", [LOA_01]), "claude": put(tmp_path / "b.json", [claude("x", word("1", "human", "a"))]),
        "telegram": put(tmp_path / "c.json", LOA_14), "whatsapp": put(tmp_path / "d.txt", "13/12/2023, 08:00 - Ana: a\n"),
        "discord": put(tmp_path / "e.json", discord(dpost(1, "Ana", "a", 1))),
        "slack": put(tmp_path / "general" / "2024-01-30.json", [post(1, "U1", "a")]),
    }
    for name, path in samples.items():
        if name == reader:
            assert len(list(READERS[reader](path))) == 1 and reader in looks_like(path)
        else:
            with pytest.raises(CdrError):
                list(READERS[reader](path))


def test_archives_are_bounded_and_never_written_where_they_say(tmp_path):
    bomb = zipped(tmp_path / "bomb.zip", {"conversations.json": b"[" + b" " * (70 << 20) + b"]"})
    for read in (read_chatgpt, read_claude):
        with pytest.raises(CdrError, match="zip bomb"):
            list(read(bomb))
    with pytest.raises(CdrError, match="zip bomb"):
        list(read_long_excel(zipped(tmp_path / "bomb.xlsx", {"xl/workbook.xml": b" " * (70 << 20)})))
    slip = zipped(tmp_path / "slip.zip", {"../../conversations.json": [LOA_01]})
    assert len(list(read_chatgpt(slip))) == 1 and not (tmp_path.parent / "conversations.json").exists()
    data = bytearray(zipped(tmp_path / "x.zip", {"conversations.json": json.dumps([LOA_01])}).read_bytes())
    data[80] ^= 255
    with pytest.raises(CdrError, match="damaged zip"):
        list(read_chatgpt(put(tmp_path / "torn.zip", bytes(data))))


def test_export_files_lists_what_is_there(tmp_path):
    put(tmp_path / "a" / "b.json", "[]")
    assert ExportFiles.of(tmp_path).names == ("a/b.json",)
    assert media_placeholder("x") == "[file]" and media_placeholder("") == "[file]"
    assert all(media_placeholder(f"a.{end}") == "[image]" for end in ("jpg", "PNG", "webp"))


@pytest.mark.parametrize("reader, option", [
    ("chatgpt", {"branches": "both"}), ("chatgpt", {"roles": {"x": "boss"}}), ("claude", {"surrogates": "drop"}),
    ("whatsapp", {"gap": "soon"}), ("telegram", {"on_error": "skip"}), ("slack", {"gap": "-1h"}),
    ("discord", {"on_duplicate": "first"}),
])
def test_an_unknown_option_is_an_error_before_anything_is_read(tmp_path, reader, option):
    put(tmp_path / "general" / "2024-01-30.json", [])
    path = tmp_path if reader == "slack" else put(tmp_path / "x.json", "[]")
    with pytest.raises(CdrError):
        READERS[reader](path, **option)


@given(st.text(string.printable + "\u200e\u202f下午٣", max_size=200))
@settings(max_examples=200, deadline=None)
def test_a_dated_line_is_found_or_not_but_never_breaks(line):
    stamp = stamp_of("13/12/2023, 21:05 - " + line)
    assert stamp is not None and stamp.rest == line
    stamp_of(line)


def test_a_long_message_takes_no_time(tmp_path):
    text = "13/12/2023, 21:05 - Ana: \u200e" + "added changed the <a: .ab " * 40_000 + "\n" + ": " * 100_000 + "\n"
    (conversation,) = whatsapp(tmp_path, text)
    assert len(conversation.turns[0].text) > 10**6


# --- any damage at all -----------------------------------------------------------------------------------------------

JUNK = st.sampled_from([
    None, 5, 5.5, True, "x", "", [], {}, [None], {"a": 1}, [[]], "ok \ud83d", -1, 10**30, "9" * 400, [5], {"text": 5}])
FUZZED = {
    "chatgpt": [LOA_01],
    "claude": [claude("x", word("1", "human", "a", content=[{"type": "text", "text": "a"}, {"type": "tool_use", "name": "n"}],
                                attachments=[{"file_name": "f"}]), word("2", "assistant", "b", parent_message_uuid="1"),
                      current_leaf_message_uuid="2")],
    "telegram": {"chats": {"list": [{**LOA_14, "id": 3, "type": "bot_chat"}]}},
    "discord": discord(dpost(1, "Ana", "a", 1, attachments=[{"fileName": "x.png"}], reference={"messageId": "3"}),
                       dpost(2, "Bot", "", 2, embeds=[{"title": "T"}], stickers=[{"name": "s"}])),
    "slack": SLACK["tents/2024-01-30.json"] + [
        post(5, "U1", "", files=[{"name": "a.png"}], attachments=[{"text": "t"}], blocks=[{"text": {"text": "x"}}]),
        {"type": "message", "subtype": "message_changed", "ts": "9.1", "message": post(5, "U1", "hello")},
        post(6, None, "t", bot_profile={"name": "B"}, user_profile={"name": "B"}, thread_ts="5.000100")],
    "users": SLACK["users.json"],
    "dms": SLACK["dms.json"],
}


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def damaged(value, path, junk):
    if not path:
        return junk
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = damaged(value[path[0]], path[1:], junk)
    return copy


@pytest.mark.parametrize("kind", FUZZED)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_damage_is_an_error_that_says_so_or_a_reject(tmp_path_factory, kind, data):
    folder = tmp_path_factory.mktemp("damage")
    value = FUZZED[kind]
    for _ in range(data.draw(st.integers(1, 2))):
        value = damaged(value, data.draw(st.sampled_from(list(places(value)))), data.draw(JUNK))
    if kind in ("users", "dms"):
        for name, part in SLACK.items():
            put(folder / name, part)
        put(folder / f"{kind}.json", json.dumps(value))
        reader, path = read_slack, folder
    else:
        reader, path = READERS[kind], put(folder / "tents" / "2024-01-30.json", json.dumps(value))
    options = [{"on_error": mode, "surrogates": lone} for mode in ("raise", "collect") for lone in ("reject", "replace")]
    for option in [*options, *([{"branches": "all", "tools": True}] if kind in ("chatgpt", "claude") else [])]:
        try:
            found = reader(path, **option)
            conversations = list(found)
            counts = found.counts
            assert counts["records"] <= counts["conversations"] + counts["rejected"] + counts["repeats"]
            write_jsonl(conversations, folder / "out.jsonl")
        except CdrError as error:
            assert len(str(error)) > 20
