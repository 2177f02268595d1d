"Labelled sets from topics, emotions and tasks: conditions, judgements, and the corpora counted a second way."
import itertools
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_lib.benchmark.labels import (Mark, Marked, MarkQuery, MarkStep, build_dialogsum, build_mtbench101, build_xdailydialog,
                                      label_marks, marked, read_mark_queries)
from cdr_lib.benchmark.sgd import BadDefinition, build_labelled, write_labelled
from cdr_lib.core.collection import TASK_AREAS
from cdr_lib.core.config import CdrError, data_dir
from cdr_lib.core.conversation import BadRecord, Conversation, Turn
from cdr_lib.core.layouts import read_cdr

NAMES = ("xdailydialog", "dialogsum", "mtbench101")
CORPORA = Path(os.environ.get("CDR_DATA", "/nowhere"))
MAKERS = {"xdailydialog": (build_xdailydialog, "xdailydialog"), "dialogsum": (build_dialogsum, "dialogsum"),
          "mtbench101": (build_mtbench101, "mt-bench-101")}
real = pytest.mark.skipif("CDR_DATA" not in os.environ, reason="CDR_DATA is not set: the corpora are not here")


def query(id="q", text="which ones?", area="Conversation Dynamics", about=(), **steps):
    return MarkQuery(id, text, area, tuple(re.compile(one, re.I) for one in about),
                     **{name: tuple(map(MarkStep.parse, lines)) for name, lines in steps.items()})


def felt(id, *messages, topic=1):
    "messages: (text, emotion number, act number), the user first"
    turns = tuple(Turn(("user", "assistant")[n % 2], text) for n, (text, *_) in enumerate(messages))
    labels = {"topic": topic, "emotions": [one[1] for one in messages], "acts": [one[2] for one in messages]}
    return Conversation(id, turns, "xdailydialog", labels=labels)


def told(id, topics, *summaries):
    return Conversation(id, (Turn("user", f"Hello from {id}"), Turn("assistant", "Well")), "dialogsum",
                        labels={"topics": list(topics)} | ({"summaries": list(summaries)} if summaries else {}))


# --- one form for three annotations


def test_messages_bear_their_emotion_and_their_act():
    form = marked(felt("a", ("No!", 1, 2), ("Sorry", 5, 4), topic=10))
    assert form == Marked(("finance",), ((Mark("user", frozenset({"anger", "question"}), "No!"),
                                          Mark("assistant", frozenset({"sadness", "commissive"}), "Sorry")),))


@pytest.mark.parametrize("summary, marks", [
    ("#Person1# asks #Person2# why. #Person2# refuses.", [("user", "asks"), ("assistant", "why."), ("assistant", "refuses.")]),
    ("#Person2#'s dog barks at #Person1#'s.", []),
    ("Mary gets cold.", []),
    ("At last #Person1# agrees", [("user", "agrees")]),
    ("", []),
])
def test_a_summary_says_something_of_each_person_that_it_mentions(summary, marks):
    account = marked(told("a", ["x"], summary)).accounts[0]
    assert [(mark.role, mark.words) for mark in account] == marks


@pytest.mark.parametrize("labels", [{}, {"topic": 1}, {"topic": 1, "emotions": [0], "acts": [1]},
                                    {"topic": 1, "emotions": [0, 9], "acts": [1, 1]},
                                    {"topic": "1", "emotions": [0, 0], "acts": [1, 1]}])
def test_labels_that_are_missing_or_do_not_fit_are_named(labels):
    with pytest.raises(BadRecord, match="x1"):
        marked(Conversation("x1", (Turn("user", "a"), Turn("assistant", "b")), "xdailydialog", labels=labels))


def test_another_corpus_has_no_labels_that_are_read():
    with pytest.raises(BadRecord, match="xdailydialog"):
        marked(Conversation("c", (Turn("user", "a"),), "sgd"))


# --- conditions

ANGRY = felt("angry", ("Wrong again!", 1, 1), ("I am so sorry", 5, 4), ("Fine, thanks", 4, 1))
CALM = felt("calm", ("Nice day", 4, 1), ("Is it?", 0, 2), ("You liar!", 1, 1))


@pytest.mark.parametrize("steps, expected", [
    ({"sequence": ["user anger", "user happiness"]}, {"angry"}),
    ({"sequence": ["user happiness", "user anger"]}, {"calm"}),
    ({"anywhere": ["user happiness", "user anger"]}, {"angry", "calm"}),
    ({"sequence": ["either anger", "next other sadness"]}, {"angry"}),
    ({"sequence": ["either anger", "next same happiness"]}, set()),
    ({"sequence": ["either anger", "same happiness"]}, {"angry"}),
    ({"sequence": ["first user anger"]}, {"angry"}),
    ({"sequence": ["last either anger"]}, {"calm"}),
    ({"anywhere": ["user anger"], "never": ["assistant question"]}, {"angry"}),
    ({"anywhere": ["assistant !sadness"]}, {"calm"}),
    ({"anywhere": ["user anger ~ liar"]}, {"calm"}),
    ({"anywhere": ["user ~ THANKS"]}, {"angry"}),
    ({"sequence": ["user anger", "user anger"]}, set()),
    ({"about": ["^ordinary life$"]}, {"angry", "calm"}),
    ({"about": ["^work$"], "anywhere": ["user anger"]}, set()),
])
def test_conditions(steps, expected):
    found = label_marks([ANGRY, CALM], [query(**steps)])["q"]
    assert set(found) == expected


def test_one_summary_has_to_tell_everything():
    halves = told("h", ["x"], "#Person1# complains.", "#Person2# apologizes.")
    whole = told("w", ["x"], "#Person1# leaves.", "#Person1# complains. #Person2# apologizes.")
    asked = query(sequence=["user ~ ^complains", "assistant ~ ^apolog"])
    assert label_marks([halves, whole], [asked]) == {"q": ["w"]}


def test_topics_of_different_people_may_together_fit_what_is_asked():
    assert label_marks([told("t", ["a lost bag", "at the airport"])], [query(about=["bag", "airport"])]) == {"q": ["t"]}


def test_a_dialogue_without_summaries_can_be_found_by_its_topic_only():
    bare = told("b", ["quarrel"])
    assert label_marks([bare], [query("a", about=["quarrel"]), query("b", about=["quarrel"], never=["user ~ x"]),
                                query("c", anywhere=["user ~ x"])]) == {"a": ["b"], "b": [], "c": []}


SIGNS = ("anger", "happiness")
marks = st.builds(lambda role, sign: Mark(role, frozenset([sign])),
                  st.sampled_from(["user", "assistant"]), st.sampled_from(SIGNS))
lines = st.tuples(st.sampled_from(["", "next "]),
                  st.sampled_from(["user", "assistant", "either", "same", "other"]), st.sampled_from(SIGNS))


@settings(deadline=None, max_examples=200)
@given(st.lists(marks, max_size=7), st.lists(lines, min_size=1, max_size=3))
def test_a_sequence_is_found_exactly_where_trying_all_ways_finds_one(account, steps):
    steps[0] = ("", "user", steps[0][2])
    asked = query(sequence=["".join((flag, role, " ", sign)) for flag, role, sign in steps])

    def fits(numbers):
        for place, (number, (flag, role, sign)) in enumerate(zip(numbers, steps)):
            before = account[numbers[place - 1]].role if place else None
            wanted = {"either": account[number].role, "same": before,
                      "other": "assistant" if before == "user" else "user"}.get(role, role)
            if account[number].role != wanted or sign not in account[number].signs:
                return False
            if flag and place and number != numbers[place - 1] + 1:
                return False
        return True

    slow = any(map(fits, itertools.combinations(range(len(account)), len(steps))))
    found = asked.evidence(Marked((), (tuple(account),)))
    assert (found is not None) == slow
    assert found is None or fits(found)


@pytest.mark.parametrize("line", ["", "user", "speaker anger", "user rage", "user anger happiness", "user ~", "user ~ (",
                                  "first last user anger",
                                  "next next user anger", "user !", None, 7])
def test_lines_that_cannot_be_read_are_errors(line):
    with pytest.raises(BadDefinition):
        MarkStep.parse(line)


@pytest.mark.parametrize("line", ["user anger", "next other !sadness",
                                  "last same anger + question ~ why\\b", "next first either ~ a ~ b"])
def test_a_step_writes_the_line_that_it_reads(line):
    assert str(MarkStep.parse(line)) == line and MarkStep.parse(str(MarkStep.parse(line))) == MarkStep.parse(line)


# --- files


@pytest.mark.parametrize("text, message", [
    ("Conversation Dynamics:\n  a: {text: x}", "every conversation"),
    ("Moods:\n  a: {text: x, about: [y]}", "Moods"),
    ("Conversation Dynamics:\n  a: {text: '', about: [y]}", "a: no text"),
    ("Conversation Dynamics:\n  a: {text: x, about: y}", "about is not a list"),
    ("Conversation Dynamics:\n  a: {text: x, about: ['(']}", "a: about"),
    ("Conversation Dynamics:\n  a: {text: x, abuot: [y]}", "abuot"),
    ("Conversation Dynamics:\n  a: {text: x, about: [y]}\n  a: {text: z, about: [y]}", "twice"),
    ("Conversation Dynamics:\n  a: {text: x, about: [y]}\nIntent & Purpose:\n  a: {text: x, about: [y]}", "two areas"),
    ("Conversation Dynamics:\n  a: {text: x, sequence: [next user anger]}", "step before"),
    ("- a", "not of the form"), ("a: [", "not of the form"), ("", "not of the form"),
])
def test_files_that_cannot_be_read_are_errors_that_name_them(tmp_path, text, message):
    (tmp_path / "q.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(BadDefinition, match=message) as caught:
        read_mark_queries(tmp_path / "q.yaml")
    assert "q.yaml" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadDefinition, match="no such file"):
        read_mark_queries(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_the_projects_queries_are_many_and_worded_once(name):
    queries = read_mark_queries(name)
    texts = [asked.text.lower() for asked in queries]
    assert 40 <= len(queries) <= 120 and len(set(texts)) == len(texts)
    assert {asked.area for asked in queries} == set(TASK_AREAS)
    # A definition that is written is read as the same query.
    for asked in queries:
        again = asked.to_dict()
        assert query(asked.id, again["text"], again["area"], again.get("about", ()),
                     **{part: again.get(part, ()) for part in ("sequence", "anywhere", "never")}) == asked
    frames = sum(bool(re.match(r"(find|show|which|conversations|sessions|users)\b", text)) for text in texts)
    assert frames < len(texts) / 2  # varied wording


def test_queries_do_not_name_labels_of_tasks():
    for asked in read_mark_queries("mtbench101"):
        named = re.search(r"anaphora|self-(correct|affirm)|context memory|topic shift|rephras|proactive", asked.text.lower())
        assert not named, asked.id


def test_a_set_is_built_and_written(tmp_path):
    queries = [query("mood", sequence=["user anger", "user happiness"]), query("rare", anywhere=["either fear"])]
    again = felt("again", ("Wrong again!", 1, 1), ("I am so sorry", 5, 4), ("Fine, thanks", 4, 1))
    collection = build_labelled("t", [ANGRY, CALM, again], queries, 1, 1, label_marks)
    assert collection.qrels == {"mood": {"angry": 1}} and not any(one.labels for one in collection.conversations.values())
    assert {(reject.id, reject.reason.split(",")[0]) for reject in collection.rejects} == {
        ("again", "same text as angry"), ("rare", "0 relevant conversations")}
    write_labelled(collection, queries, tmp_path)
    assert json.loads((tmp_path / "definitions.json").read_text())["mood"]["sequence"] == ["user anger", "user happiness"]
    assert read_cdr(tmp_path).qrels.keys() == {"mood"}


# --- the corpora


@pytest.fixture(scope="module")
def built():
    made = {}

    def get(name):
        if name not in made:
            maker, folder = MAKERS[name]
            made[name] = maker(CORPORA / folder)
        return made[name]

    return get


@real
@pytest.mark.real
@pytest.mark.parametrize("name, conversations", [("xdailydialog", 2944), ("dialogsum", 1100), ("mtbench101", 650)])
def test_all_queries_find_two_to_fifty_conversations(built, name, conversations):
    collection = built(name)
    assert len(collection.conversations) == conversations
    counts = [len(collection.relevant(asked)) for asked in collection.queries]
    assert len(counts) == len(read_mark_queries(name)) and 2 <= min(counts) and max(counts) <= 50
    assert set(collection.areas.values()) == set(TASK_AREAS)


@real
@pytest.mark.real
def test_turning_moods_counted_from_the_files(built):
    "The user's anger gives way to joy, read from the published lines without our reader."
    pairs = []
    for file in ("en_dev_human.txt", "en_test_human.txt"):
        for line in (CORPORA / "xdailydialog" / file).read_text(encoding="utf-8").splitlines():
            text, _, _, emotions = line.split("\t")
            pairs.append((text, emotions))
    folder = CORPORA / "xdailydialog" / "1k_part_data"
    pairs += zip((folder / "dialogues_text_En.txt").read_text(encoding="utf-8").splitlines(),
                 (folder / "dialogues_emotion.txt").read_text(encoding="utf-8").splitlines())
    texts = set()
    for text, emotions in pairs:
        said = [one.strip() for one in text.split("__eou__")]
        said = said if said[-1] else said[:-1]
        if len(said) == len(emotions.split()) and re.search("1.*4", "".join(emotions.split()[::2])):
            texts.add("\n".join(said))
    collection = built("xdailydialog")
    found = {"\n".join(turn.text for turn in collection.conversations[id].turns) for id in collection.relevant("dyn-01")}
    assert found == texts


@real
@pytest.mark.real
def test_topics_counted_from_the_files(built):
    rows = [json.loads(line) for file in ("dev", "test", "hiddentest.topic")
            for line in (CORPORA / "dialogsum" / f"dialogsum.{file}.jsonl").read_text(encoding="utf-8").splitlines()]
    names = {f"dialogsum:{row['fname']}" for row in rows
             if any("taxi" in re.findall(r"[a-z]+", value.lower()) for key, value in row.items() if key.startswith("topic"))}
    assert set(built("dialogsum").relevant("int-15")) == names


@real
@pytest.mark.real
def test_samples_are_drawn_by_the_seed():
    path = CORPORA / "mt-bench-101"
    one, same, other = (build_mtbench101(path, seed, 20) for seed in (0, 0, 1))
    assert list(one.conversations) == list(same.conversations) != list(other.conversations)
    assert len(one.conversations) == 13 * 20
    for wrong in (0, 1101):
        with pytest.raises(CdrError, match="n_conversations"):
            build_dialogsum(CORPORA / "dialogsum", n_conversations=wrong)
    with pytest.raises(CdrError, match="per_task"):
        build_mtbench101(path, per_task=0)


def test_the_card_names_every_file():
    folder = data_dir() / "templates" / "labels"
    assert {file.stem for file in folder.glob("*.yaml")} == set(NAMES)
