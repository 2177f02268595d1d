"The labelled set from dialogue acts: conditions, judgements, and the real corpus counted a second way."
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_lib.benchmark.sgd import (ACTS, Action, BadDefinition, Condition, LabelQuery, Message, Step, annotated,
                                   build_labelled, build_sgd, label, read_label_queries, write_labelled)
from cdr_lib.core.collection import TASK_AREAS
from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import BadRecord, Conversation, Turn
from cdr_lib.core.layouts import read_cdr

SERVICES = ("Hotels_4", "Hotels_2", "Weather_1")


def query(id="q", text="which ones?", area="Conversation Dynamics", **steps):
    return LabelQuery(id, text, area, **{name: tuple(map(Step.parse, lines)) for name, lines in steps.items()})


def message(role, *frames):
    "frames: (service, 'ACT slot=value', ...)"
    rows = {}
    for service, *acts in frames:
        for text in acts:
            act, _, rest = text.partition(" ")
            slot, _, value = rest.partition("=")
            rows[service] = (*rows.get(service, ()), Action(act, slot, frozenset([value] if value else [])))
    return Message(role, rows)


def dialogue(id, *turns):
    "turns: (role, text, service, 'ACT slot=value', ...)"
    made = []
    for role, text, service, *acts in turns:
        actions = []
        for line in acts:
            act, _, rest = line.partition(" ")
            slot, _, value = rest.partition("=")
            actions.append({"act": act, "slot": slot, "values": [value] * bool(value), "canonical_values": [value] * bool(value)})
        made.append(Turn(role, text, meta={"frames": [{"service": service, "slots": [], "actions": actions}]}))
    return Conversation(id, tuple(made))


BOOKS = dialogue("books", ("user", "A room in Rome", "Hotels_4", "INFORM_INTENT intent=ReserveHotel", "INFORM location=Rome"),
                 ("assistant", "That failed", "Hotels_4", "NOTIFY_FAILURE"), ("user", "Once more", "Hotels_4", "INFORM_INTENT intent=ReserveHotel"),
                 ("assistant", "Done", "Hotels_4", "NOTIFY_SUCCESS"))
FAILS = dialogue("fails", ("user", "A room in Bonn", "Hotels_4", "INFORM_INTENT intent=ReserveHotel", "INFORM location=Bonn"),
                 ("assistant", "Done", "Hotels_4", "NOTIFY_SUCCESS"), ("user", "And Ulm", "Hotels_4", "INFORM_INTENT intent=ReserveHotel"),
                 ("assistant", "That failed", "Hotels_4", "NOTIFY_FAILURE"))
RECOVERY = query("recovery", sequence=["assistant NOTIFY_FAILURE", "assistant NOTIFY_SUCCESS @same"])
ROME = query("rome", area="Intent & Purpose", anywhere=["user INFORM location=Rome @Hotels"])


# --- conditions

conditions = st.sampled_from(["AFFIRM", "INFORM", "INFORM*2", "INFORM city=Rome", "REQUEST price", "NEGATE + INFORM time"])
services = st.sampled_from(["", " @Hotels_4", " @Hotels", " @same", " @other"])


@given(st.booleans(), st.sampled_from(["", "first ", "last "]), conditions, services)
def test_a_step_is_its_own_text(following, place, condition, service):
    line = ("next " if following else "") + place + "user " + condition + service
    assert str(Step.parse(line)) == line
    assert Step.parse(str(Step.parse(line))) == Step.parse(line)


@pytest.mark.parametrize("line, word", [
    ("user NOTIFY_FAILURE", "no act of the user"), ("assistant AFFIRM", "no act of the assistant"), ("bot OFFER", "no role"),
    ("user INFORM*0", "form"), ("user INFORM =x", "form"), ("user AFFIRM +", "form"), ("next next user AFFIRM", "do not go together"),
    ("user AFFIRM @a b", "no service"), ("   ", "no role")])
def test_a_step_that_cannot_match_is_refused(line, word):
    with pytest.raises(BadDefinition, match=word) as error:
        Step.parse(line)
    assert repr(line) in str(error.value)


def test_least_counts_different_slots():
    twice_the_same = [Action("INFORM", "city", frozenset(["Rome"])), Action("INFORM", "city", frozenset(["Bonn"]))]
    assert not Condition("INFORM", least=2).holds(twice_the_same)
    assert Condition("INFORM", least=2).holds([*twice_the_same, Action("INFORM", "date")])
    assert Condition("INFORM", "city", "Bonn").holds(twice_the_same) and not Condition("INFORM", "city", "Ulm").holds(twice_the_same)


def test_LOA_18_two_services_in_one_turn_are_kept_apart():
    frames = [{"service": "Buses_1", "slots": [], "actions": [{"act": "THANK_YOU", "slot": "", "values": []}],
               "state": {"active_intent": "BuyBusTicket", "requested_slots": [], "slot_values": {"from_location": ["SF", "San Francisco"]}}},
              {"service": "RentalCars_1", "slots": [{"slot": "pickup_city", "start": 41, "exclusive_end": 45}], "actions": [],
               "state": {"active_intent": "GetCarsAvailable", "requested_slots": [], "slot_values": {"pickup_city": ["Reno"]}}}]
    turn = Turn("user", "Thanks for the bus, now find me a car in Reno", meta={"frames": frames})
    messages = annotated(Conversation("c", (turn,)))
    assert len(messages) == 1 and list(messages[0].frames) == ["Buses_1", "RentalCars_1"]
    assert Step.parse("user THANK_YOU @Buses").services(messages, 0) == ["Buses_1"]
    assert Step.parse("user THANK_YOU @RentalCars").services(messages, 0) == []


def test_two_frames_of_one_message_do_not_add_up_and_one_message_is_one_step():
    messages = (message("user", ("Hotels_4", "NEGATE"), ("Weather_1", "INFORM city=Rome")),)
    assert query(sequence=["user NEGATE + INFORM"]).evidence(messages) is None
    assert query(sequence=["user NEGATE", "user INFORM @other"]).evidence(messages) is None
    assert query(anywhere=["user NEGATE", "user INFORM"]).evidence(messages) == (0,)


def test_a_service_call_is_an_act():
    frame = {"service": "Flights_4", "actions": [], "service_call": {"method": "SearchOnewayFlight", "parameters": {"destination_airport": "Atlanta"}}}
    messages = annotated(Conversation("c", (Turn("assistant", "There is one at 9.", meta={"frames": [frame]}),)))
    assert query(anywhere=["assistant CALL destination_airport=Atlanta @Flights_4", "assistant CALL method=SearchOnewayFlight"]).evidence(messages) == (0,)


# --- sequences, against trying every choice of messages

acts = {"user": ["AFFIRM", "NEGATE", "INFORM"], "assistant": ["OFFER", "CONFIRM"]}
messages_of_any_kind = st.lists(st.sampled_from(list(acts)).flatmap(lambda role: st.builds(
    lambda rows: message(role, *[(service, *sorted(chosen)) for service, chosen in rows.items()]),
    st.dictionaries(st.sampled_from(SERVICES), st.sets(st.sampled_from(acts[role]), min_size=1), min_size=1, max_size=2))), max_size=7).map(tuple)
one_step = st.builds(Step, st.just("user"), st.sampled_from(acts["user"]).map(lambda act: (Condition(act),)),
                     st.sampled_from([None, "Hotels", "Weather_1"]), st.sampled_from(["", "", "first", "last"]))
one_step |= st.builds(Step, st.just("assistant"), st.sampled_from(acts["assistant"]).map(lambda act: (Condition(act),)),
                      st.sampled_from([None, "Hotels", "Weather_1"]))


def brute_force(sequence, messages):
    "Every increasing choice of messages and services."
    found = set()
    for numbers in itertools.combinations(range(len(messages)), len(sequence)):
        for chosen in itertools.product(*(messages[number].frames for number in numbers)):
            good = True
            for index, (step, number, service) in enumerate(zip(sequence, numbers, chosen)):
                before = chosen[index - 1] if index else None
                role_turns = [i for i, other in enumerate(messages) if other.role == step.role]
                good &= messages[number].role == step.role
                good &= not step.next or number == numbers[index - 1] + 1
                good &= step.place == "" or number == (role_turns or [None])[0 if step.place == "first" else -1]
                good &= {None: True, "same": service == before, "other": service != before}.get(
                    step.service, step.service in (service, service.rsplit("_", 1)[0]))
                good &= all(any(action.act == condition.act for action in messages[number].frames[service]) for condition in step.conditions)
            if good:
                found.add(numbers)
    return found


@settings(max_examples=300, deadline=None)
@given(messages_of_any_kind, st.lists(st.tuples(one_step, st.booleans(), st.sampled_from([None, "same", "other"])), min_size=1, max_size=4))
def test_a_sequence_is_found_whenever_any_choice_of_messages_meets_it(messages, parts):
    sequence = tuple(step if not index else replace(step, next=following, service=relation or step.service)
                     for index, (step, following, relation) in enumerate(parts))
    expected = brute_force(sequence, messages)
    made = LabelQuery("q", "?", TASK_AREAS[0], sequence)
    evidence = made.evidence(messages)
    assert (evidence is None) == (not expected) and (evidence is None or evidence in expected)
    if len(sequence) > 1:
        loose = [replace(step, next=False, service=None if step.service in ("same", "other") else step.service) for step in sequence]
        orders = (numbers for numbers in itertools.permutations(range(len(messages)), len(loose))
                  if all(step.services(messages, number) for step, number in zip(loose, numbers)))
        assert made.scrambled(messages) == (not expected and next(orders, None) is not None)


@settings(max_examples=200, deadline=None)
@given(messages_of_any_kind.filter(bool), st.lists(one_step, min_size=1, max_size=3), st.booleans())
def test_label_passes_over_no_conversation_that_evidence_accepts(messages, steps, ordered):
    frames = [[{"service": service, "actions": [{"act": action.act, "slot": "", "values": []} for action in actions]}
               for service, actions in message.frames.items()] for message in messages]
    conversation = Conversation("c", tuple(Turn(message.role, "", meta={"frames": rows}) for message, rows in zip(messages, frames)))
    made = LabelQuery("q", "?", TASK_AREAS[0], **{"sequence" if ordered else "anywhere": tuple(steps)})
    assert annotated(conversation) == messages
    assert label([conversation], [made])["q"] == ["c"] * (made.evidence(messages) is not None)


def test_never_and_anywhere():
    messages = annotated(BOOKS)
    assert RECOVERY.evidence(messages) == (1, 3)
    assert query(sequence=["assistant NOTIFY_FAILURE"], never=["assistant NOTIFY_SUCCESS"]).evidence(messages) is None
    assert query(sequence=["assistant NOTIFY_FAILURE"], anywhere=["user INFORM location=Rome"]).evidence(messages) == (0, 1)
    assert query(anywhere=["user INFORM location=Bonn"]).evidence(messages) is None
    assert RECOVERY.scrambled(annotated(FAILS)) and not RECOVERY.scrambled(messages)


# --- the set

def test_relevance_comes_from_labels_alone():
    def disguised(conversation):
        return replace(conversation, turns=tuple(replace(turn, text=f"{number} ...") for number, turn in enumerate(conversation.turns)))
    expected = {"recovery": ["books"], "rome": ["books"]}
    assert label([BOOKS, FAILS], [RECOVERY, ROME]) == expected
    assert label(map(disguised, [BOOKS, FAILS]), [RECOVERY, ROME]) == expected


def test_the_set_holds_no_annotation_and_lists_what_was_left_out():
    everything = query("everything", anywhere=["user INFORM_INTENT"])
    twin = replace(FAILS, id="twin")
    made = build_labelled("tiny", [BOOKS, FAILS, twin], [RECOVERY, everything], min_relevant=1, max_relevant=1)
    assert list(made.conversations) == ["books", "fails"] and made.qrels == {"recovery": {"books": 1}}
    assert made.areas == {"recovery": "Conversation Dynamics"}
    assert [(row.id, row.reason) for row in made.rejects] == [("twin", "same text as fails"), ("everything", "2 relevant conversations, outside 1 to 1")]
    assert all(not turn.meta for conversation in made.conversations.values() for turn in conversation.turns)
    assert all(not conversation.labels for conversation in made.conversations.values())


def test_texts_that_differ_only_in_unicode_form_are_duplicates():
    one, two = (dialogue(id, ("user", text, "Hotels_4", "INFORM_INTENT intent=ReserveHotel")) for id, text in (("a", "caf\u00e9"), ("b", "cafe\u0301")))
    made = build_labelled("tiny", [one, two], [query(anywhere=["user INFORM_INTENT"])], min_relevant=1)
    assert list(made.conversations) == ["a"]


@pytest.mark.parametrize("text", ["a room in rome", "A  Room, in Rome!", "done"])
def test_a_query_that_stands_in_a_conversation_is_refused(text):
    with pytest.raises(BadDefinition, match="stands in conversation books"):
        build_labelled("tiny", [BOOKS, FAILS], [replace(RECOVERY, text=text)], min_relevant=1)


def test_part_of_a_word_is_no_giveaway():
    assert build_labelled("tiny", [BOOKS], [replace(RECOVERY, text="room in Rom")], min_relevant=1).queries == {"recovery": "room in Rom"}


def test_refusals():
    with pytest.raises(BadRecord, match="books: the id occurs twice"):
        build_labelled("tiny", [BOOKS, BOOKS], [RECOVERY])
    with pytest.raises(CdrError, match="none of 1 queries has 5 to 50"):
        build_labelled("tiny", [BOOKS], [RECOVERY])
    with pytest.raises(BadRecord, match="c, message 0"):
        label([Conversation.make("c", ("user", "hi"))], [RECOVERY])
    broken = Turn("user", "hi", meta={"frames": [{"service": "Hotels_4", "actions": [{"slot": ""}]}]})
    with pytest.raises(BadRecord, match="c, message 0.*'act'"):
        annotated(Conversation("c", (broken,)))


def sgd_file(path, conversations):
    names = {"user": "USER", "assistant": "SYSTEM"}
    lines = [json.dumps({"dialogue_id": conversation.id, "services": ["Hotels_4"], "turns": [
        {"speaker": names[turn.role], "utterance": turn.text, "frames": turn.meta["frames"]} for turn in conversation.turns]})
        for conversation in conversations]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_from_file_to_folder_and_back(tmp_path):
    path = sgd_file(tmp_path / "dialogues_001.jsonl", [BOOKS, FAILS])
    queries = [RECOVERY, ROME, query("unused", anywhere=["user AFFIRM"])]
    made = build_sgd(path, queries=queries, min_relevant=1)
    folders = [write_labelled(made, queries, tmp_path / name) for name in ("one", "two")]
    files = sorted(file.name for file in folders[0].iterdir())
    assert files == ["corpus.json", "definitions.json", "queries.json", "relevant_docs.json", "tasks.json"]
    assert all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in files)
    back = read_cdr(folders[0])
    assert back.queries == made.queries and back.areas == made.areas
    assert {id: set(grades) for id, grades in back.qrels.items()} == {id: set(grades) for id, grades in made.qrels.items()}
    definitions = json.loads((folders[0] / "definitions.json").read_text(encoding="utf-8"))
    assert definitions["recovery"] == {"area": "Conversation Dynamics", "text": "which ones?",
                                       "sequence": ["assistant NOTIFY_FAILURE", "assistant NOTIFY_SUCCESS @same"]}
    with pytest.raises(CdrError, match="no definition for 1 queries, such as 'rome'"):
        write_labelled(made, [RECOVERY], tmp_path / "three")


def test_a_sample_depends_on_the_seed_alone(tmp_path):
    many = [replace(BOOKS, id=f"c{number}", turns=(replace(BOOKS.turns[0], text=f"number {number}"), *BOOKS.turns[1:])) for number in range(40)]
    path = sgd_file(tmp_path / "dialogues_001.jsonl", many)
    first, same, other = (list(build_sgd(path, seed=seed, n_conversations=10, queries=[RECOVERY]).conversations) for seed in (1, 1, 2))
    assert first == same != other and len(first) == 10
    for n in (0, 41):
        with pytest.raises(CdrError, match=f"n_conversations={n} of 40"):
            build_sgd(path, n_conversations=n, queries=[RECOVERY])


# --- the project's queries

def test_the_queries_of_the_project():
    queries = read_label_queries()
    assert 100 <= len(queries) <= 200 and {query.area for query in queries} == set(TASK_AREAS)
    texts = [query.text for query in queries]
    assert len({text.casefold() for text in texts}) == len(texts)
    assert max(sum(text.split()[0] == word for text in texts) for word in {text.split()[0] for text in texts}) < len(texts) / 10, "one frame"
    assert {condition.act for query in queries for step in query.sequence + query.anywhere for condition in step.conditions} \
        <= {act for known in ACTS.values() for act in known}
    conditions = [json.dumps({name: value for name, value in query.to_dict().items() if name not in ("area", "text")}) for query in queries]
    assert len(set(conditions)) == len(conditions)


@pytest.mark.parametrize("text, words", [
    ("Intent & Purpose: {a: {text: t, anywhere: [user AFFIRM], text: u}}", "'text' is written twice"),
    ("Moods: {a: {text: t, anywhere: [user AFFIRM]}}", "'Moods' is not one of"),
    ("Intent & Purpose: {a: {text: t}}", "every conversation would be relevant"),
    ("Intent & Purpose: {a: {text: t, sequence: [user AFFIRM @same]}}", "refers to a step before"),
    ("Intent & Purpose: {a: {text: t, never: [next user AFFIRM], anywhere: [user AFFIRM]}}", "refers to a step before"),
    ("Intent & Purpose: {a: {text: ' ', anywhere: [user AFFIRM]}}", "no text"),
    ("Intent & Purpose: [a]", "not of the form"), ("{", "not of the form"), ("", "not of the form")])
def test_a_broken_file_of_queries_is_named(tmp_path, text, words):
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadDefinition, match=words) as error:
        read_label_queries(path)
    assert str(path) in str(error.value)


def test_a_missing_file_of_queries(tmp_path):
    with pytest.raises(BadDefinition, match="no such file"):
        read_label_queries(tmp_path / "none.yaml")


# --- the real corpus

@pytest.fixture(scope="module")
def corpus():
    folder = os.environ.get("CDR_DATA")
    if not folder:
        pytest.skip("CDR_DATA is not set: the folder of the public corpora")
    if not (Path(folder) / "sgd" / "sgd_test.jsonl").is_file():
        pytest.skip("no sgd/sgd_test.jsonl in CDR_DATA")
    return Path(folder) / "sgd"


@pytest.fixture(scope="module")
def sgd(corpus):
    return build_sgd(corpus)


@pytest.mark.real
def test_every_query_is_as_specific_as_the_paper_asks(sgd):
    assert len(sgd.conversations) == 2921 and not sgd.rejects
    assert list(sgd.queries) == [query.id for query in read_label_queries()]
    assert all(5 <= len(grades) <= 50 for grades in sgd.qrels.values())


@pytest.mark.real
def test_judgements_of_conversations_that_were_read(sgd):
    # Each was read in full: the number of its messages says where.
    for id, name in [("dyn-02", "15_00099"), ("dyn-05", "6_00006"), ("dyn-22", "34_00014"), ("dyn-39", "32_00057"), ("dyn-42", "20_00050"),
                     ("emo-01", "7_00095"), ("tru-02", "8_00057"), ("int-19", "21_00119"), ("sty-16", "30_00052")]:
        assert f"sgd:test:{name}" in sgd.qrels[id], (id, name)
    for id, name in [("dyn-02", "5_00118"), ("dyn-07", "15_00099"), ("dyn-66", "18_00069"), ("emo-05", "5_00118"), ("tru-01", "24_00110")]:
        assert f"sgd:test:{name}" not in sgd.qrels[id], (id, name)


@pytest.mark.real
def test_judgements_counted_a_second_way(corpus, sgd):
    "Four queries, written as plain loops over the file."
    expected = {id: set() for id in ("dyn-03", "dyn-35", "dyn-19", "int-32")}
    with open(corpus / "sgd_test.jsonl", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    for record in records:
        turns, id = record["turns"], f"sgd:test:{record['dialogue_id']}"
        rows = [(number, turn["speaker"], frame["service"], action["act"], action["slot"], action["canonical_values"])
                for number, turn in enumerate(turns) for frame in turn["frames"] for action in frame["actions"]]
        fails = [number for number, _, service, act, *_ in rows if service == "Restaurants_2" and act == "NOTIFY_FAILURE"]
        works = [number for number, _, service, act, *_ in rows if service == "Restaurants_2" and act == "NOTIFY_SUCCESS"]
        if fails and works and min(fails) < max(works):
            expected["dyn-03"].add(id)
        homes = {(number, act, slot) for number, _, service, act, slot, _ in rows if service == "Homes_2"}
        if any(act == "CONFIRM" and (number + 1, "NEGATE", "") in homes and (number + 1, "INFORM", "visit_date") in homes for number, act, _ in homes):
            expected["dyn-35"].add(id)
        asks = sorted({number for number, speaker, _, act, *_ in rows if speaker == "USER" and act == "REQUEST_ALTS"})
        picks = [number for number, speaker, _, act, *_ in rows if speaker == "USER" and act == "SELECT"]
        if len(asks) >= 3 and any(number > asks[2] for number in picks):
            expected["dyn-19"].add(id)
        if any(speaker == "USER" and act == "INFORM" and slot == "subtitle_language" and "Hindi" in values for _, speaker, _, act, slot, values in rows):
            expected["int-32"].add(id)
    for id, found in expected.items():
        assert set(sgd.qrels[id]) == found, id
