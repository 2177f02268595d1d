"""Failure cases of loaders, one test per case with the case's own values."""

import json
import warnings

import pytest

from cdr_lib.core.collection import BadCollection, Collection
from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import BadRecord, Conversation, Turn, is_blank, render
from cdr_lib.core.corpus import open_corpus
from cdr_lib.core.formats import read_long_csv, read_messages_jsonl, read_sharegpt, thread_utterances
from cdr_lib.core.io import by_id, read_jsonl, read_parquet, write_jsonl, write_parquet
from cdr_lib.core.layouts import read_beir, read_cdr, write_cdr
from cdr_lib.core.records import json_lines
from cdr_lib.core.talks import read_bot_adversarial, read_dailydialog, read_opendialkg
from cdr_lib.core.tasks import frame_acts, frame_spans, frame_states, read_multiwoz, read_sgd


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pairs(conversation):
    return [[turn.role, turn.text] for turn in conversation.turns]


def stored(conversations, folder):
    """What comes back from both forms of a corpus, which must be the same."""
    write_jsonl(conversations, folder / "stored.jsonl")
    write_parquet(conversations, folder / "stored.parquet")
    back = list(read_jsonl(folder / "stored.jsonl"))
    assert back == list(read_parquet(folder / "stored.parquet"))
    return back


def test_LOA_04_null_value_is_a_blank_turn_not_the_word_None(tmp_path):
    record = {
        "id": "s1",
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": None},
            {"from": "human", "value": "Still there?"},
            {"from": "gpt"},
        ],
    }
    reader = read_sharegpt(lines(tmp_path / "a.jsonl", record))
    (conversation,) = reader
    assert pairs(conversation) == [["user", "Hi"], ["assistant", ""], ["user", "Still there?"], ["assistant", ""]]
    assert reader.counts["blank_turns"] == 2
    assert "None" not in render(conversation.turns) and stored([conversation], tmp_path) == [conversation]


def test_LOA_05_role_comes_from_the_tag(tmp_path):
    record = {
        "id": "s2",
        "system": "Be brief.",
        "conversations": [
            {"from": "gpt", "value": "Welcome!"},
            {"from": "human", "value": "Q1"},
            {"from": "gpt", "value": "A1"},
            {"from": "user", "value": "Q2"},
            {"from": "bing", "value": "A2"},
        ],
    }
    (conversation,) = read_sharegpt(lines(tmp_path / "a.jsonl", record))
    assert pairs(conversation) == [
        ["system", "Be brief."],
        ["assistant", "Welcome!"],
        ["user", "Q1"],
        ["assistant", "A1"],
        ["user", "Q2"],
        ["assistant", "A2"],
    ]
    assert conversation.turns[5].meta == {"tag": "bing"}
    # A tag that nobody has heard of is kept with its name, counted, and never the user's.
    record["conversations"][4]["from"] = "narrator"
    reader = read_sharegpt(lines(tmp_path / "a.jsonl", record))
    last = next(reader).turns[5]
    assert (
        last == Turn("assistant", "A2", "narrator", {"tag": "narrator", "unmapped": True})
        and reader.counts["unmapped_roles"] == 1
    )
    with pytest.raises(BadRecord, match="'narrator'"):
        next(read_sharegpt(tmp_path / "a.jsonl", unmapped="reject"))


def test_LOA_06_lines_end_at_newline_only(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"id":"1","text":"a\u2028b\u0085c"}\n{"id":"2","text":"d"}\r\n'.encode())
    records = list(json_lines(path))
    assert [record.value["text"] for record in records] == ["a\u2028b\u0085c", "d"]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 4
    whole = [Conversation.make("1", ("user", "a\u2028b\u0085c\u2029\x0b\x1c\r")), Conversation.make("2", ("user", "d"))]
    assert stored(whole, tmp_path) == whole
    write_cdr(Collection("x", {item.id: item for item in whole}, {"q": "?"}, {"q": {"1": 1}}), tmp_path / "cdr")
    assert list(read_cdr(tmp_path / "cdr").conversations.values()) == whole


def test_LOA_07_lone_surrogate(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        r'{"id": "1", "messages": [{"role":"user","content":"ok \ud83d done"}]}'
        "\n"
        r'{"id": "2", "messages": [{"role":"user","content":"smile \ud83d\ude00"}]}'
        "\n"
    )
    # Replacing is a choice that has to be made, and it is counted.
    reader = read_messages_jsonl(path, surrogates="replace")
    whole = list(reader)
    assert [item.turns[0].text for item in whole] == ["ok \ufffd done", "smile \U0001f600"]
    assert reader.counts["surrogates_replaced"] == 1
    assert stored(whole, tmp_path) == whole
    # Without it the record is bad: an error with its place, or a row of the rejects table.
    with pytest.raises(BadRecord, match=r"a\.jsonl:1.*lone surrogate.*surrogates='replace'"):
        list(read_messages_jsonl(path))
    reader = read_messages_jsonl(path, on_error="collect")
    assert [item.id for item in reader] == ["2"]
    assert [reject.line for reject in reader.rejects] == [1] and reader.rejects[0].excerpt.encode("utf-8")


def test_LOA_08_only_an_empty_cell_is_empty(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        "conv_id,role,text\n007,user,None\n007,bot,NA\n008,user,null\n008,bot,nan\n009,user,N/A\n009,bot,\n",
        encoding="utf-8",
    )
    reader = read_long_csv(path)
    rows = [(conversation.id, turn.text) for conversation in reader for turn in conversation.turns]
    assert rows == [("007", "None"), ("007", "NA"), ("008", "null"), ("008", "nan"), ("009", "N/A"), ("009", "")]
    assert reader.counts["blank_turns"] == 1


UTTERANCES = [
    ("u1", "a", None, "hi"),
    ("u2", None, None, "help"),
    ("u3", None, "u2", "sure"),
    ("u4", None, None, "order?"),
]


def test_LOA_10_rows_without_a_conversation_id(tmp_path):
    ids, conversations, replies, _texts = zip(*UTTERANCES)
    threads = thread_utterances(ids, conversations, replies)
    assert [[ids[row] for row in thread.rows] for thread in threads] == [["u1"], ["u2", "u3"], ["u4"]]
    path = tmp_path / "a.csv"
    path.write_text(
        "id,conv,reply_to,text\n" + "".join(",".join(cell or "" for cell in row) + "\n" for row in UTTERANCES)
    )
    first, second = ([*read_long_csv(path, conversation="conv", role=None, default_role="user")] for _ in range(2))
    assert first == second and sum(len(conversation) for conversation in first) == 4
    assert [[turn.meta["id"] for turn in conversation.turns] for conversation in first] == [
        ["u1"],
        ["u2", "u3"],
        ["u4"],
    ]
    assert [conversation.id for conversation in first] == ["a", "thread:u2", "thread:u4"]


def test_LOA_11_orphans_self_replies_and_cycles():
    ids, replies = list("abcdef"), [None, "a", "deleted", "d", "f", "e"]
    threads = thread_utterances(ids, [None] * 6, replies)
    assert [[ids[row] for row in thread.rows] for thread in threads] == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert [thread.notes for thread in threads] == [{}, {2: "orphan"}, {}, {4: "cycle"}]


def test_LOA_12_typed_parts_tool_calls_and_null_content(tmp_path):
    call = {"id": "t1", "type": "function", "function": {"name": "find", "arguments": '{"q": "bag"}'}}
    messages = [
        {"role": "user", "content": "plain"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "http://x.example/i.png"}},
                {"type": "text", "text": "b"},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "[]"},
        {"role": "developer", "content": "be kind"},
    ]
    path = lines(tmp_path / "a.jsonl", {"id": "odd", "messages": 5}, {"id": "c", "messages": messages})
    reader = read_messages_jsonl(path, on_error="collect")
    (conversation,) = reader
    assert pairs(conversation) == [
        ["user", "plain"],
        ["user", "a\n[image]\nb"],
        ["assistant", ""],
        ["tool", "[]"],
        ["system", "be kind"],
    ]
    assert not any("'type':" in turn.text or '{"type"' in turn.text for turn in conversation.turns)
    (back,) = stored([conversation], tmp_path)
    assert back.turns[2].meta["tool_calls"] == [call] and isinstance(
        back.turns[2].meta["tool_calls"][0]["function"]["arguments"], str
    )
    assert back.turns[1].meta["content_parts"] == [messages[1]["content"][1]] and back.turns[3].meta == {
        "tool_call_id": "t1"
    }
    assert [reject.id for reject in reader.rejects] == ["odd"]


def test_LOA_13_invisible_turns_are_blank_and_kept(tmp_path):
    texts = [
        "",
        "  ",
        "\u200b\t\u200b\u200c",
        "\ufeff",
        "\u2060\n",
        "\u200d",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "a\u200bb",
    ]
    assert list(map(is_blank, texts)) == [True] * 6 + [False] * 2
    path = lines(tmp_path / "a.jsonl", {"id": "c", "messages": [{"role": "user", "content": text} for text in texts]})
    reader = read_messages_jsonl(path)
    (conversation,) = reader
    assert [turn.text for turn in conversation.turns] == texts and reader.counts["blank_turns"] == 6
    assert stored([conversation], tmp_path) == [conversation]


def test_LOA_18_frames_of_several_services(tmp_path):
    turn = {
        "speaker": "USER",
        "utterance": "Thanks for the bus, now find me a car in Reno",
        "frames": [
            {
                "service": "Buses_1",
                "slots": [],
                "actions": [{"act": "THANK_YOU", "slot": "", "values": []}],
                "state": {
                    "active_intent": "BuyBusTicket",
                    "requested_slots": [],
                    "slot_values": {"from_location": ["SF", "San Francisco"]},
                },
            },
            {
                "service": "RentalCars_1",
                "slots": [{"slot": "pickup_city", "start": 41, "exclusive_end": 45}],
                "actions": [],
                "state": {
                    "active_intent": "GetCarsAvailable",
                    "requested_slots": [],
                    "slot_values": {"pickup_city": ["Reno"]},
                },
            },
        ],
    }
    (conversation,) = read_sgd(
        lines(
            tmp_path / "dialogues_001.jsonl",
            {"dialogue_id": "1", "services": ["Buses_1", "RentalCars_1"], "turns": [turn]},
        )
    )
    for item in (conversation, *stored([conversation], tmp_path)):
        (only,) = item.turns
        assert [frame["service"] for frame in only.meta["frames"]] == ["Buses_1", "RentalCars_1"]
        states = frame_states(only)
        assert states == {
            "Buses_1": {"from_location": ["SF", "San Francisco"]},
            "RentalCars_1": {"pickup_city": ["Reno"]},
        }
        assert frame_spans(only) == [("RentalCars_1", "pickup_city", "Reno")] and frame_acts(only) == [
            ("Buses_1", "THANK_YOU", "")
        ]
        states["Buses_1"]["from_location"].append("LA")
        only.meta["frames"][0]["state"]["slot_values"]["from_location"].append("LA")
        assert frame_states(only)["RentalCars_1"] == {"pickup_city": ["Reno"]}


ROWS = [["d1", "red bag"], ["d2", "blue bag"], ["d1", "red bag"], ["d2", "green shoe"]]


def test_RET_07_repeated_ids(tmp_path):
    bags = [Conversation.make(id, ("user", text)) for id, text in ROWS]
    with pytest.raises(BadRecord, match="'d2'"):
        by_id(bags)
    found, repeats = by_id(bags[:3])
    assert list(found) == ["d1", "d2"] and repeats == 1
    found, repeats = by_id(bags, on_duplicate="rename")
    assert {id: item.turns[0].text for id, item in found.items()} == {
        "d1": "red bag",
        "d2": "blue bag",
        "d2#2": "green shoe",
    }
    # The same in every layout.
    (tmp_path / "corpus.json").write_text("{" + ",".join(f'"{id}": "user: {text}"' for id, text in ROWS) + "}")
    (tmp_path / "queries.json").write_text('{"q": "bags"}')
    (tmp_path / "relevant_docs.json").write_text('{"q": ["d2", "d1", "d2"]}')
    lines(tmp_path / "corpus.jsonl", *({"_id": id, "text": text} for id, text in ROWS))
    lines(tmp_path / "queries.jsonl", {"_id": "q", "text": "bags"})
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td2\t1\nq\td1\t1\nq\td2\t1\n")
    for read, options in ((read_cdr, {}), (read_beir, {"plain_role": "user"})):
        with pytest.raises(CdrError, match="'d2'"):
            read(tmp_path, **options)
        kept = read(tmp_path, on_error="collect", **options)
        assert {id: item.turns[0].text for id, item in kept.conversations.items()} == {
            "d1": "red bag",
            "d2": "blue bag",
        }
        assert kept.counts["repeats"] == 1 and kept.counts["repeated_judgements"] == 1 and kept.rejects[0].id == "d2"
        assert kept.qrels == {"q": {"d2": 1, "d1": 1}}
        both = read(tmp_path, on_duplicate="rename", **options)
        assert sorted(item.turns[0].text for item in both.conversations.values()) == [
            "blue bag",
            "green shoe",
            "red bag",
        ]
    with pytest.raises(CdrError, match="'d1' occurs twice"):
        write_jsonl(bags, tmp_path / "out.jsonl")


def test_MET_11_dangling_judgements_are_reported():
    corpus = {id: Conversation.make(id, ("user", id)) for id in ("d1", "d2")}
    collection = Collection("x", corpus, {"q": "?"}, {"q": {"d1": 1, "dX": 1}})
    assert collection.validate(strict=False).dangling == [("q", "dX")]
    with pytest.raises(BadCollection, match="'dX'") as error:
        collection.validate()
    assert error.value.report.dangling == [("q", "dX")]


def test_LOA_16_dailydialog_labels_do_not_shift(tmp_path):
    text = "Hi . __eou__ Hello . __eou__\n\nBye now . __eou__ Ok . __eou__ See you . __eou__\n"
    (tmp_path / "train").mkdir()
    (tmp_path / "train/dialogues_train.txt").write_text(text)
    (tmp_path / "train/dialogues_act_train.txt").write_text("1 1 \n\n1 4 1 \n")
    (tmp_path / "train/dialogues_emotion_train.txt").write_text("0 4 \n\n0 0 \n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test/dialogues_test.txt").write_text(text)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = list(read_dailydialog(tmp_path))
    assert len(found) == 4 == len({conversation.id for conversation in found})
    first, second = found[:2]
    assert [len(first), len(second)] == [2, 3] and [turn.text for turn in first.turns] == ["Hi .", "Hello ."]
    assert [conversation.labels.get("acts") for conversation in found[:2]] == [[1, 1], [1, 4, 1]]
    assert first.labels["emotions"] == [0, 4] and "emotions" not in second.labels
    assert len(heard) == 1 and second.id in str(heard[0].message) and "2 labels for 3 turns" in str(heard[0].message)
    # The same in the file that holds all dialogues, whose split is said.
    (tmp_path / "all").mkdir()
    (tmp_path / "all/dialogues_text.txt").write_text(text)
    (tmp_path / "all/dialogues_act.txt").write_text("1 1 \n\n1 4 1 \n")
    again = list(read_dailydialog(tmp_path / "all", split="train"))
    assert [conversation.id for conversation in again] == [first.id, second.id]
    # The hub's copy is a script: the message names the way out.
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/daily_dialog.py").write_text("import datasets\n")
    with pytest.raises(CdrError, match="loading script.*give the folder"):
        read_dailydialog(tmp_path / "hub")


def test_LOA_17_multiwoz_without_some_annotation(tmp_path):
    unset = {"hotel": {"semi": {"area": "not mentioned"}, "book": {"booked": []}}}
    booked = {"hotel": {"semi": {"area": "dontcare"}, "book": {"booked": [{"name": "A"}]}}}
    data = {"PMUL0001.json": {"log": [
        {"text": "need a hotel", "metadata": {}}, {"text": "which area?", "metadata": unset},
        {"text": "any", "metadata": {}}, {"text": "booked", "metadata": booked}]}}
    (tmp_path / "data.json").write_text(json.dumps(data))
    (tmp_path / "dialogue_acts.json").write_text(json.dumps(
        {"PMUL0001": {"1": {"Hotel-Request": [["Area", "?"]]}, "2": "No Annotation"}}))
    (tmp_path / "testListFile.json").write_text("PMUL0001.json\nSNG0002.json\n")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        conversation, = read_multiwoz(tmp_path)
    assert pairs(conversation) == [
        ["user", "need a hotel"], ["assistant", "which area?"], ["user", "any"], ["assistant", "booked"]]
    acts = [turn.meta.get("acts") for turn in conversation.turns]
    assert acts == [None, {"Hotel-Request": [["Area", "?"]]}, None, None]
    assert [("SNG0002.json" in str(warning.message)) for warning in heard] == [True]
    assert "state" not in conversation.turns[1].meta and conversation.turns[3].meta["state"] == {"hotel": {"area": "dontcare"}}
    assert conversation.turns[3].meta["booked"] == {"hotel": [{"name": "A"}]} and conversation.meta["split"] == "test"
    stored([conversation], tmp_path)


def test_LOA_19_bot_adversarial_turns_and_persona(tmp_path):
    line = ("text:I like tea.\\nDo you?\\nYes a lot.\tlabels:__ok__\tepisode_done:True\t"
            "bot_persona:your persona: i ski.\\nyour persona: i bake.\tspeaker_to_eval:bot")
    (tmp_path / "train.txt").write_text(line + "\n")
    conversation, = read_bot_adversarial(tmp_path)
    assert pairs(conversation) == [["assistant", "I like tea."], ["user", "Do you?"], ["assistant", "Yes a lot."]]
    assert conversation.meta["bot_persona"] == ["i ski.", "i bake."]
    assert [turn.meta.get("label") for turn in conversation.turns] == [None, None, "__ok__"]
    assert not any("\\n" in turn.text for turn in conversation.turns)
    (tmp_path / "train.txt").write_text(line.replace("speaker_to_eval:bot", "speaker_to_eval:human") + "\n")
    conversation, = read_bot_adversarial(tmp_path)
    assert [turn.role for turn in conversation.turns] == ["user", "assistant", "user"]


def test_LOA_20_opendialkg_cells_hold_dialogues(tmp_path):
    csv = (
        'Messages,User Rating\n"[{""type"": ""chat"", ""sender"": ""user"", ""message"": ""Do you like \\""Dune\\"", the '
        'book?\\nor film""}, {""type"": ""action"", ""sender"": ""assistant"", ""action_id"": ""kgwalk/choose_path"", '
        '""metadata"": {""path"": [0.5, [[""Dune"", ""written_by"", ""Herbert""]], ""x""]}}, {""type"": ""chat"", '
        '""sender"": ""assistant"", ""message"": ""The book, yes""}]",5\n"[]",\n')
    (tmp_path / "opendialkg.csv").write_text(csv)
    reader = read_opendialkg(tmp_path, on_error="collect")
    conversation, = reader
    assert pairs(conversation) == [["user", 'Do you like "Dune", the book?\nor film'], ["assistant", "The book, yes"]]
    assert conversation.turns[1].meta["path"] == [["Dune", "written_by", "Herbert"]]
    # No row is passed over silently: the one without messages is a reject with its place.
    assert reader.counts["records"] == 2 and [(reject.line, reject.reason[-8:]) for reject in reader.rejects] == [(3, "no turns")]


def test_rows_in_the_order_of_their_times(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        "conv_id,role,text,at\n"
        "a,assistant,third,2024-03-31T03:10:00+02:00\n"
        "a,user,first,2024-03-31T00:59:00Z\n"
        "a,user,second,2024-03-31 01:05\n"
        "a,user,second too,2024-03-31 01:05:00.0000000\n"
        "b,user,lost,soon\n"
        "c,user,found,10\n",
        encoding="utf-8",
    )
    reader = read_long_csv(path, order="at", on_error="collect")
    # a time without a zone counts as UTC; rows of one moment keep the order of the file
    found = {item.id: [turn.text for turn in item.turns] for item in reader}
    assert found == {"c": ["found"], "a": ["first", "second", "second too", "third"]}
    assert [(reject.line, reject.reason.partition(",")[0]) for reject in reader.rejects] == [
        (6, "'soon' is neither a number nor an ISO 8601 time")
    ]
    # without it the file decides, and numbers are not compared as text
    assert [turn.text for turn in next(read_long_csv(path)).turns] == ["third", "first", "second", "second too"]
    path.write_text("conv_id,role,text,at\na,assistant,2,10\na,user,1,9\n", encoding="utf-8")
    assert [turn.text for turn in next(read_long_csv(path, order="at")).turns] == ["1", "2"]
    with pytest.raises(CdrError, match="no column 'time'.*order="):
        read_long_csv(path, order="time")


def test_a_table_of_another_kind_says_so(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("conv_id;role;text\na;user;hi, you\n", encoding="utf-8")
    with pytest.raises(CdrError, match="delimiter=';'"):
        read_long_csv(path)
    assert next(read_long_csv(path, delimiter=";")).turns[0].text == "hi, you"
    path.write_text("conv_id,role,text\na,user,hi\n", encoding="utf-16")
    with pytest.raises(CdrError, match="UTF-16 text; save it as UTF-8"):
        read_long_csv(path)


def test_one_record_over_several_lines(tmp_path):
    record = {"id": "a", "messages": [{"role": "user", "content": "hi"}]}
    path = tmp_path / "a.json"
    for indent in (1, 4, None):
        path.write_text(json.dumps(record, indent=indent), encoding="utf-8-sig")
        assert [item.id for item in read_messages_jsonl(path)] == ["a"] == [item.id for item in open_corpus(path)]
    # lines stay lines, also where the first is cut
    path.write_text('{"id": "x", "mess\n' + json.dumps(record) + "\n", encoding="utf-8")
    reader = read_messages_jsonl(path, on_error="collect")
    assert [item.id for item in reader] == ["a"] and reader.rejects[0].line == 1


def test_sharegpt_with_roles_names_the_reader_that_fits(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"id": "a", "conversations": [{"role": "user", "content": "hi"}]})
    with pytest.raises(BadRecord, match="read_messages_jsonl"):
        list(read_sharegpt(path))
    assert pairs(next(read_messages_jsonl(path, field="conversations"))) == [["user", "hi"]]
