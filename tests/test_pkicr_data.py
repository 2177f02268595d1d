"""Grounded turns: every form of FoCus, the own layout, the split, the sample set, and sets made of real text."""

import json
import os
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_lib.core.config import CdrError, data_dir
from cdr_lib.core.conversation import BadRecord, Turn
from cdr_lib.pkicr.focus import (
    GroundedSet,
    GroundedTurn,
    normalised,
    read_focus,
    read_grounded,
    read_references,
    read_submission,
    split_dialogues,
    write_grounded,
    write_submission,
)
from cdr_lib.pkicr.real import dstc11_set, persona_chat_set
from cdr_lib.pkicr.sample import SIZES, build_focus, load_focus_grammar, wordings, write_focus_sample

PERSONA = ["I like towers.", "I live in Paris.", "I hate rain.", "I am 30.", "I ski."]
ROUND_1 = {
    "dialogue1": ["Where is this tower?", "It is in Paris, your home."],
    "persona_candidates": PERSONA,
    "persona_grounding": [False, True, False, False, False],
    "knowledge_candidates": ["It opened in 1889.", "The tower stands in Paris.", "Rome is old."],
    "knowledge_answer_index": 1,
}
ROUND_2 = {
    "dialogue2": ["Where is this tower?", "It is in Paris, your home.", "How tall is it?", "It is 300 m tall."],
    "persona_candidates": PERSONA,
    "persona_grounding": [False] * 5,
    "knowledge_candidates": ["It is 300 m high.", "The tower stands in Paris.", "Rome is old."],
    "knowledge_answer_index": 0,
}
FOCUS = {"dialogID": "D1", "persona": PERSONA, "utterance": [ROUND_1, ROUND_2]}


def put(folder: Path, value, name: str = "focus.json") -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def one_round(**changes) -> dict:
    "A dialogue of the first round alone; a change to `...` removes the field."
    part = {key: value for key, value in {**ROUND_1, **changes}.items() if value is not ...}
    return {"dialogID": "D1", "utterance": [part]}


# The reference answer


def test_PKI_01_the_reference_answer_is_out_of_every_question(tmp_path):
    first, second = read_focus(put(tmp_path, {"data": [FOCUS]})).turns
    for history in (1, 2, 3, 99):
        assert "Where is this tower?" in first.question(history) and "your home" not in first.question(history)
        assert "How tall is it?" in second.question(history) and "300 m tall" not in second.question(history)
    assert second.question(1) == "How tall is it?" and "your home" in second.question(2)
    # Not in any other field either, and not in what is written.
    assert "your home" not in repr(first) and "300 m tall" not in repr(second)
    write_grounded((first, second), tmp_path / "own.jsonl")
    assert "300 m tall" not in (tmp_path / "own.jsonl").read_text()
    assert read_references(tmp_path / "focus.json") == {
        "D1/1": "It is in Paris, your home.",
        "D1/2": "It is 300 m tall.",
    }


@pytest.mark.parametrize(
    "said, question, answers",
    [
        (["Where is it?"], "Where is it?", 0),
        (["Where is it?", "In Paris."], "Where is it?", 1),
        (["Where is it?", "In Paris.", "How tall?"], "How tall?", 0),
        (["Where is it?", "In Paris.", "How tall?", "300 m."], "How tall?", 1),
        ("How tall?", "How tall?", 0),
    ],
)
def test_PKI_01_lists_of_odd_length_and_plain_text_keep_their_question(tmp_path, said, question, answers):
    found = read_focus(put(tmp_path, [one_round(dialogue1=said)]))
    assert found.turns[0].question() == question and found.turns[0].history[-1].role == "user"
    assert found.counts["answers"] == answers == len(read_references(tmp_path / "focus.json"))


def test_PKI_01_an_answer_at_the_end_of_another_layout_is_refused(tmp_path):
    row = {"dialogue": [{"role": "user", "text": "Where?"}, {"role": "assistant", "text": "In Paris."}]}
    with pytest.raises(BadRecord, match="ends with the assistant"):
        read_grounded(put(tmp_path, [row]))
    with pytest.raises(BadRecord, match="ends with the assistant"):
        GroundedTurn("a", 1, (Turn("user", "x"), Turn("assistant", "y")), (), ())


# Forms of the file


def test_all_forms_of_a_focus_file_give_the_same_turns(tmp_path):
    forms = [
        put(tmp_path, {"data": [FOCUS]}, "a.json"),
        put(tmp_path, {"version": 1, "note": ["data"], "data": [FOCUS], "more": {}}, "b.json"),
        put(tmp_path, json.dumps({"data": [FOCUS]}, indent=2), "c.json"),
        put(tmp_path, [FOCUS], "d.json"),
        put(tmp_path, json.dumps(FOCUS) + "\n\n", "e.jsonl"),
        put(tmp_path, json.dumps(FOCUS), "f.json"),
        put(tmp_path, "\ufeff" + json.dumps({"data": [FOCUS]}), "g.json"),
    ]
    turns = read_focus(forms[0]).turns
    assert len(turns) == 2 and turns[0].gold_personas == (1,) and turns[1].gold_personas == ()
    for path in forms:
        assert read_focus(path).turns == turns == read_grounded(path).turns, path.name


def test_the_test_form_has_other_names_and_no_labels(tmp_path):
    parts = [
        {f"dialogue{i}": text, "persona_candidate": PERSONA, "knowledge_candidate": ["a", "b"]}
        for i, text in ((1, "Where is it?"), (2, "How tall is it?"))
    ]
    found = read_focus(put(tmp_path, [{"dialogID": "D1", "utterance": parts}]))
    assert [turn.question() for turn in found] == ["Where is it?", "How tall is it?"]
    assert all(turn.gold_personas is None and turn.gold_knowledge is None for turn in found)
    assert found.counts["unlabelled_personas"] == found.counts["unlabelled_knowledge"] == 2


def test_unknown_fields_are_passed_over(tmp_path):
    record = {
        **one_round(hit_knowledge=["x"]),
        "landmark_link": "https://example.org",
        "knowledge": ["long"],
        "extra": {"a": [1]},
    }
    (turn,) = read_focus(put(tmp_path, [record]))
    assert turn.meta == {"link": "https://example.org"}


def test_personas_of_the_dialogue_serve_where_a_round_has_none(tmp_path):
    record = {**one_round(persona_candidates=...), "persona": PERSONA}
    assert read_focus(put(tmp_path, [record])).turns[0].personas == tuple(PERSONA)


def test_candidates_of_a_dialogue_are_held_once(tmp_path):
    first, second = read_focus(put(tmp_path, {"data": [FOCUS]})).turns
    assert first.personas is second.personas


# Labels


@pytest.mark.parametrize("value", [..., None, -1])
def test_an_absent_knowledge_label_is_no_label(tmp_path, value):
    found = read_focus(put(tmp_path, [one_round(knowledge_answer_index=value)]))
    assert found.turns[0].gold_knowledge is None and found.counts["unlabelled_knowledge"] == 1


@pytest.mark.parametrize(
    "flags, gold",
    [
        ([False] * 5, ()),
        ([0, 1, 0, 0, 1], (1, 4)),
        ([True] * 5, (0, 1, 2, 3, 4)),
        (..., None),
        (None, None),
    ],
)
def test_no_persona_one_two_and_no_label(tmp_path, flags, gold):
    assert read_focus(put(tmp_path, [one_round(persona_grounding=flags)])).turns[0].gold_personas == gold


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"knowledge_answer_index": 3}, "gold_knowledge is 3, but there are 3"),
        ({"knowledge_answer_index": -2}, "gold_knowledge is -2"),
        ({"knowledge_answer_index": [0, -1]}, "gold_knowledge is -1"),
        ({"knowledge_answer_index": True}, "not a truth value"),
        ({"knowledge_answer_index": 1.0}, "not a number"),
        ({"knowledge_answer_index": "1"}, "not text"),
        ({"knowledge_answer_index": [1, 1]}, "names a candidate twice"),
        ({"knowledge_candidates": []}, "gold_knowledge is 1, but there are 0"),
        ({"persona_grounding": [True]}, "has 1 flags for 5 personas"),
        ({"persona_grounding": [False] * 6}, "has 6 flags for 5 personas"),
        ({"persona_grounding": {}}, "must be a list of flags"),
        ({"persona_grounding": [0, 2, 0, 0, 0]}, "not 2"),
        ({"persona_grounding": [0, None, 0, 0, 0]}, "not None"),
        ({"persona_candidates": "I ski."}, "must be a list of texts"),
        ({"persona_candidates": [1, 2, 3, 4, 5]}, r"persona_candidates\[0\] must be text"),
        ({"knowledge_candidates": [None, "b"]}, r"knowledge_candidates\[0\] must be text, not null"),
        ({"dialogue1": []}, "is empty"),
        ({"dialogue1": ""}, "utterance is blank"),
        ({"dialogue1": ["\u200b", "An answer."]}, "utterance is blank"),
        ({"dialogue1": [3]}, "must be text"),
        ({"dialogue1": ...}, "needs one field dialogue1"),
        ({"dialogue2": ["x"]}, "needs one field"),
        ({"knowledge_candidate": ["a"]}, "only one can be meant"),
    ],
)
def test_bad_rounds_are_named_raised_or_collected(tmp_path, changes, message):
    bad = {**one_round(**changes), "dialogID": "D2"}
    path = put(tmp_path, {"data": [FOCUS, bad]})
    with pytest.raises(CdrError, match=message) as error:
        read_focus(path)
    assert "focus.json:1" in str(error.value)
    found = read_focus(path, on_error="collect")
    assert [turn.id for turn in found] == ["D1/1", "D1/2"] and len(found.rejects) == 1


@pytest.mark.parametrize(
    "record, message",
    [
        ({"utterance": [ROUND_1]}, "no dialogID"),
        ({"dialogID": " ", "utterance": [ROUND_1]}, "no dialogID"),
        ({"dialogID": "D2"}, "must be a list of rounds"),
        ({"dialogID": "D2", "utterance": ["x"]}, "must be an object"),
        ({"dialogID": "D2", "utterance": [ROUND_1, ROUND_1]}, "dialogue1 occurs twice"),
        ([1], "must be an object"),
        ({"dialogID": "D1", "utterance": [{**ROUND_1, "knowledge_answer_index": 0}]}, "two different turns"),
    ],
)
def test_bad_dialogues(tmp_path, record, message):
    with pytest.raises(CdrError, match=message):
        read_focus(put(tmp_path, [FOCUS, record]))
    assert len(read_focus(put(tmp_path, [FOCUS, record]), on_error="collect").rejects) == 1


def test_the_same_dialogue_twice_is_one_and_counted(tmp_path):
    found = read_focus(put(tmp_path, [FOCUS, FOCUS]))
    assert len(found) == 2 and found.counts["repeats"] == 2


@pytest.mark.parametrize(
    "text, message",
    [
        (json.dumps({"data": [FOCUS, FOCUS]})[:-40], "rest of the file cannot be read"),
        (json.dumps({"data": [FOCUS]})[:-1], "cut"),
        (json.dumps([FOCUS])[:-1], "a comma or"),
        (json.dumps({"data": [one_round(knowledge_answer_index=float("nan"))]}), "NaN"),
        ('{"data": [{"dialogID": "D1", "dialogID": "D2", "utterance": []}]}', "occurs twice in one object"),
        ('{"data": {}}', "no dialogID"),
        ("not json", "not JSON"),
    ],
)
def test_broken_files(tmp_path, text, message):
    with pytest.raises(CdrError, match=message):
        read_focus(put(tmp_path, text))


def test_missing_files_and_options(tmp_path):
    with pytest.raises(CdrError, match="no such file"):
        read_focus(tmp_path / "none.json")
    with pytest.raises(CdrError, match="on_error"):
        read_focus(put(tmp_path, [FOCUS]), on_error="ignore")
    assert read_focus(put(tmp_path, {"data": []})).turns == () and read_focus(put(tmp_path, "", "a.jsonl")).turns == ()


def test_hostile_text_is_shown_as_text(tmp_path):
    bad = "<script>alert(1)</script>"
    record = one_round(persona_candidates=[bad] * 5, knowledge_candidates=[bad] * 3, dialogue1=[bad, "x"])
    found = read_focus(put(tmp_path, [{**record, "dialogID": bad}, {"dialogID": "D2"}]), on_error="collect", name=bad)
    assert "<script" not in found.turns[0]._repr_html_() + found._repr_html_()
    assert found.counts["repeated_candidates"] == 6


# The own layout


def test_own_layout_keeps_all_there_is(tmp_path):
    turns = read_focus(put(tmp_path, {"data": [FOCUS]})).turns
    more = [
        replace(turns[0], dialogue="D2", gold_personas=None, gold_knowledge=(0, 2), meta={"a": [1, None]}),
        replace(turns[0], dialogue="D3", personas=(), gold_personas=()),
    ]
    for name in ("own.jsonl", "own.jsonl.gz"):
        assert write_grounded((*turns, *more), tmp_path / name) == 4
        assert read_grounded(tmp_path / name).turns == (*turns, *more)
    with pytest.raises(CdrError, match="occurs twice"):
        write_grounded((turns[0], turns[0]), tmp_path / "own.jsonl")
    assert read_grounded(tmp_path / "own.jsonl").turns == (*turns, *more)  # the old file stands


TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)
SPOKEN = st.text(st.characters(whitelist_categories=["L", "N"]), min_size=1, max_size=8)


@st.composite
def grounded_turns(draw):
    said = draw(st.lists(st.builds(Turn, st.sampled_from(["user", "assistant"]), TEXT), max_size=3))
    personas, knowledge = draw(st.lists(TEXT, max_size=4)), draw(st.lists(TEXT, max_size=4))

    def gold(size: int):
        some = st.sets(st.integers(0, size - 1)).map(lambda found: tuple(sorted(found))) if size else st.just(())
        return draw(st.one_of(st.none(), some))

    meta = draw(st.dictionaries(TEXT, st.one_of(TEXT, st.integers(-9, 9), st.none(), st.booleans()), max_size=2))
    return GroundedTurn(
        draw(SPOKEN),
        draw(st.integers(1, 99)),
        (*said, Turn("user", draw(SPOKEN))),
        personas,
        knowledge,
        gold(len(personas)),
        gold(len(knowledge)),
        meta,
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(grounded_turns(), max_size=5, unique_by=lambda turn: turn.id))
def test_own_layout_round_trip(turns):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.jsonl"
        write_grounded(turns, path)
        assert list(read_grounded(path)) == turns


def test_loose_layouts(tmp_path):
    found = read_grounded(
        put(
            tmp_path,
            [
                {"dialogue": "Is it steep?", "knowledges": ["Yes.", "No."], "gold_knowledge_index": 1, "unknown": 1},
                {
                    "id": 7,
                    "dialogue": ["Hello.", "Hi!", "Is it far?"],
                    "personas": ["I walk.", "I ride."],
                    "gold_personas": [0, 1],
                },
                {"id": "x", "number": 3, "dialogue": ["Why?"], "persona": ["I ask."], "persona_index": -1},
            ],
            "other.json",
        )
    )
    assert [turn.id for turn in found] == ["1/1", "7/1", "x/3"]
    assert [turn.gold_knowledge for turn in found] == [(1,), None, None]
    assert [turn.gold_personas for turn in found] == [None, (0, 1), None]
    for row, message in (
        ({"personas": []}, "dialogue is empty"),
        ({"dialogue": ["a"], "knowledge": ["x"], "gold_knowledge": 1}, "is 1"),
        ({"dialogue": [{"role": "bot", "text": "x"}]}, "role 'bot'"),
        ({"dialogue": ["a"], "number": 0}, "1 or more"),
        ({"dialogue": ["a"], "gold_knowledge": 0, "gold_knowledge_index": 0, "knowledge": ["x"]}, "only one"),
    ):
        with pytest.raises(BadRecord, match=message):
            read_grounded(put(tmp_path, [row]))


# The split


def rounds(id: str, texts, persona: str | None = None) -> list[GroundedTurn]:
    return [
        GroundedTurn(
            id, number, (Turn("user", text),), (persona or f"I am {id}.",), (f"About {id}.", "Other."), (), (0,)
        )
        for number, text in enumerate(texts, 1)
    ]


def test_TRN_03_split_is_by_dialogue_and_copies_stay_together():
    # conversations c1..c4 of 5 turns; c4 says what c1 says; test_fraction 0.25, seed 7
    turns = [
        turn
        for id in ("c1", "c2", "c3", "c4")
        for turn in rounds(id, [f"{'c1' if id == 'c4' else id} asks {i}" for i in range(5)])
    ]
    turns = [
        replace(turn, history=(Turn("user", turn.question().upper() + " !"),)) if turn.dialogue == "c4" else turn
        for turn in turns
    ]
    split = split_dialogues(turns, {"train": 0.75, "test": 0.25}, seed=7)
    sides = {side: {turn.dialogue for turn in part} for side, part in split.items()}
    assert not sides["train"] & sides["test"] and sides["train"] | sides["test"] == {"c1", "c2", "c3", "c4"}
    texts = {side: {normalised(turn.question()) for turn in part} for side, part in split.items()}
    assert not texts["train"] & texts["test"]
    assert {"c1", "c4"} <= sides["train"] or {"c1", "c4"} <= sides["test"]
    again = split_dialogues(turns, {"train": 0.75, "test": 0.25}, seed=7)
    assert again == split and again.report.equals(split.report)
    assert split.report.loc["test", "achieved"] == 0.25 and split.report.loc["train", "dialogues"] == 3


@pytest.mark.parametrize("seed", range(5))
def test_TRN_03_many_pairs_of_one_turn_and_shared_personas(seed):
    turns = [
        turn for i in range(60) for turn in rounds(f"c{i}", [f"{i} a", f"{i} b"], "I am we." if i % 6 == 0 else None)
    ]
    split = split_dialogues(turns, seed=seed)
    sides = [{turn.dialogue for turn in part} for part in split.values()]
    assert sum(map(len, sides)) == 60 and not any(a & b for i, a in enumerate(sides) for b in sides[:i])
    assert sum({f"c{i}" for i in range(0, 60, 6)} <= side for side in sides) == 1
    assert [len(side) for side in sides] == [48, 6, 6] and sum(split.report["groups"]) == 51


def test_TRN_03_an_equal_row_joins_and_an_equal_question_alone_does_not():
    turns = [turn for i in range(10) for turn in rounds(f"c{i}", ["Where is it?", f"And {i}?"])]
    assert [len(part) for part in split_dialogues(turns, {"a": 0.5, "b": 0.5}).values()] == [10, 10]
    with pytest.raises(CdrError, match="form 1 groups"):
        split_dialogues(turns, {"a": 0.5, "b": 0.5}, join=["utterance"])
    row = [
        replace(turn, knowledge=("Same.", "Other.")) if turn.number == 1 and turn.dialogue in ("c2", "c7") else turn
        for turn in turns
    ]
    for seed in range(8):
        sides = [{turn.dialogue for turn in part} for part in split_dialogues(row, {"a": 0.5, "b": 0.5}, seed).values()]
        assert any({"c2", "c7"} <= side for side in sides)


@pytest.mark.parametrize("fractions", [{}, {"a": 1.5}, {"a": 0.5, "b": 0.4}, {"a": 1.0, "b": 0.0}, {"a": -1, "b": 2}])
def test_impossible_fractions(fractions):
    with pytest.raises(CdrError, match="sum to 1"):
        split_dialogues(rounds("c1", ["a"]), fractions)


def test_unknown_join_and_no_dialogues():
    with pytest.raises(CdrError, match="join"):
        split_dialogues(rounds("c1", ["a"]), {"a": 1}, join=["rows"])
    with pytest.raises(CdrError, match="no dialogue is left for train, valid, test"):
        split_dialogues([])


# Submissions


def test_submission_round_trip_and_faults(tmp_path):
    turns = read_focus(put(tmp_path, {"data": [FOCUS]})).turns
    write_submission(turns, [[1], []], [1, 0], tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text()) == [
        {"D1": [{"pg": [0, 1, 0, 0, 0], "kg": 1}, {"pg": [0, 0, 0, 0, 0], "kg": 0}]}
    ]
    assert read_submission(tmp_path / "s.json") == {"D1/1": ((1,), 1), "D1/2": ((), 0)}
    for arguments, message in (
        (([turns[1]], [[]], [0]), "every round"),
        ((turns[::-1], [[], []], [0, 0]), "every round"),
        ((turns, [[5], []], [0, 0]), "chosen persona is 5"),
        ((turns, [[], []], [0, -1]), "chosen knowledge is -1"),
        ((turns, [[]], [0, 0]), "do not match"),
    ):
        with pytest.raises(CdrError, match=message):
            write_submission(*arguments, tmp_path / "bad.json")
    assert not (tmp_path / "bad.json").exists()
    for value, message in (
        ([1], "list of objects"),
        ([{"D": [{"pg": [2], "kg": 0}]}], "not 2"),
        ([{"D": [{"kg": 0}]}], "pg of round 1"),
        ([{"D": [{"pg": [], "kg": True}]}], "kg of round 1"),
        ([{"D": [{"pg": [], "kg": 0}]}] * 2, "twice"),
    ):
        with pytest.raises(BadRecord, match=message):
            read_submission(put(tmp_path, value))


# The sample set


@pytest.fixture(scope="module")
def sample():
    return build_focus()


def test_committed_sample_is_what_the_generator_writes(sample, tmp_path):
    write_focus_sample(sample, tmp_path)
    committed = data_dir() / "sample" / "focus"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in committed.iterdir()}
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (committed / path.name).read_bytes(), path.name


def test_sample_has_the_promised_size_and_labels():
    sets = {split: read_focus(data_dir() / "sample" / "focus" / f"{split}.json") for split in SIZES}
    turns = [turn for one in sets.values() for turn in one]
    assert sum(len(one.dialogues) for one in sets.values()) >= 200
    assert {len(rounds) for one in sets.values() for rounds in one.dialogues.values()} == {5}
    assert {(len(turn.personas), len(turn.knowledge), len(turn.gold_knowledge)) for turn in turns} == {(5, 10, 1)}
    used = Counter(len(turn.gold_personas) for turn in turns)
    assert 0.45 < used[0] / len(turns) < 0.6 and 0.05 < used[2] / len(turns) < 0.12 and set(used) == {0, 1, 2}
    # Choosing nothing looks good, as on FoCus (86.86 % there).
    assert 0.85 < 1 - sum(len(turn.gold_personas) for turn in turns) / (5 * len(turns)) < 0.91
    for turn in turns:
        assert len(set(turn.personas)) == 5 and len(set(turn.knowledge)) == 10


def test_sample_splits_share_no_landmark_no_personas_no_row():
    found = {}
    for split in SIZES:
        turns = read_focus(data_dir() / "sample" / "focus" / f"{split}.json").turns
        found[split] = (
            {turn.meta["link"] for turn in turns}
            | {tuple(sorted(map(normalised, turn.personas))) for turn in turns}
            | {(normalised(turn.question()), turn.knowledge[turn.gold_knowledge[0]]) for turn in turns}
        )
    assert not (found["train"] & found["valid"] | found["train"] & found["test"] | found["valid"] & found["test"])


def test_sample_answers_tell_the_persona_exactly_where_it_is_used(sample):
    grammar = load_focus_grammar()
    for split in SIZES:
        path = data_dir() / "sample" / "focus" / f"{split}.json"
        answers = read_references(path)
        for turn in read_focus(path):
            you = grammar.facets[sample.labels[turn.id]["facet"]].you
            told = bool(you) and you in answers[turn.id]
            quoted = any(text in answers[turn.id] for text in turn.personas)
            assert (told or quoted) == bool(turn.gold_personas), turn.id


def test_sample_holds_unseen_wordings_in_its_test_split():
    grammar = load_focus_grammar()
    for facet in grammar.facets.values():
        if facet.family:
            assert not set(wordings(facet.persona, "test")) <= set(wordings(facet.persona, "train"))
        assert not set(wordings(facet.knows, "test")) <= set(wordings(facet.knows, "train"))


def test_sample_depends_on_its_seed_alone(sample):
    assert build_focus().splits == sample.splits and build_focus(seed=1).splits != sample.splits


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: text.replace("{name}", "{nome}", 1), "unknown slot 'nome'"),
        (lambda text: text.replace("gist:", "gust:", 1), "unknown entry|gist is needed"),
        (lambda text: text.replace("    near:", "    far:", 1), "near must be a list"),
        (lambda text: text.replace("{part}", "{part", 1), "expected"),
    ],
)
def test_a_broken_grammar_is_an_error(tmp_path, change, message):
    import shutil

    folder = shutil.copytree(data_dir() / "sample" / "focus_grammar", tmp_path / "grammar")
    path = folder / "facets" / "body.yaml"
    path.write_text(change(path.read_text()))
    with pytest.raises(CdrError, match=message):
        load_focus_grammar(folder)


# Real text

real = pytest.mark.skipif(not os.environ.get("CDR_DATA"), reason="CDR_DATA is not set: the public corpora are not here")


@pytest.fixture(scope="module")
def dstc11() -> GroundedSet:
    return dstc11_set()


@pytest.fixture(scope="module")
def persona_chat() -> GroundedSet:
    return persona_chat_set()


@pytest.mark.real
@real
def test_real_dstc11(dstc11):
    found = dstc11
    # Counted in the files: 4,173 records, of which 2,129 seek knowledge.
    assert found.counts["records"] == 4173 and len(found) == 2129
    for turn in found:
        assert turn.personas == () and turn.gold_personas is None and turn.gold_knowledge
        assert len(turn.knowledge) == len(turn.gold_knowledge) + 9 == len(set(turn.knowledge))
    assert found.turns == dstc11_set().turns != dstc11_set(seed=1).turns
    gold = [{turn.knowledge[i] for i in turn.gold_knowledge} for turn in found]
    assert gold == [{turn.knowledge[i] for i in turn.gold_knowledge} for turn in dstc11_set(distractors=3, seed=5)]
    folder = Path(os.environ["CDR_DATA"]) / "dstc11-track5"
    replies = [
        label["response"] for label in json.loads((folder / "val" / "labels.json").read_text()) if label["target"]
    ]
    assert not any(
        reply in said.text for reply, turn in zip(replies, found) if len(reply) > 40 for said in turn.history
    )
    with pytest.raises(CdrError, match="labels, but"):
        dstc11_set(split="test")


@pytest.mark.real
@real
def test_real_persona_chat(persona_chat):
    found = persona_chat
    assert found.counts["records"] == 1000 and 1980 <= len(found) <= 2000
    for turn in found:
        own = {normalised(turn.personas[i]) for i in turn.gold_personas}
        others = {normalised(text) for i, text in enumerate(turn.personas) if i not in turn.gold_personas}
        assert 4 <= len(own) <= 5 and len(others) == 15 and not own & others and turn.knowledge == ()
        assert not any(f" {a} " in f" {b} " or f" {b} " in f" {a} " for a in own for b in others)
        assert all(said.role == "user" for said in turn.history)
    assert found.turns == persona_chat_set().turns


@pytest.mark.real
@real
def test_real_sets_survive_the_own_layout(dstc11, persona_chat, tmp_path):
    for found in (dstc11, persona_chat):
        write_grounded(found, tmp_path / "own.jsonl")
        assert read_grounded(tmp_path / "own.jsonl").turns == found.turns


def test_absent_corpora_say_how_to_get_them(monkeypatch):
    monkeypatch.delenv("CDR_DATA", raising=False)
    for make in (dstc11_set, persona_chat_set):
        with pytest.raises(CdrError, match="CDR_DATA"):
            make()


def test_a_set_refuses_a_turn_twice():
    turn = GroundedTurn("a", 1, (Turn("user", "x"),), (), ())
    with pytest.raises(BadRecord, match="occurs twice"):
        GroundedSet("s", (turn, turn))
