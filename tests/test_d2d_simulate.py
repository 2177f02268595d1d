"""Patience, simulated users and the simulation: the cases D2D-01 and D2D-03, what an assistant receives, and interruptions."""
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_lib.core.config import CdrError, data_dir, project_root
from cdr_lib.core.conversation import Turn
from cdr_lib.core.llm import LLM, Usage
from cdr_lib.d2d.assistants import D2D
from cdr_lib.d2d.catalog import Catalog, Item
from cdr_lib.d2d.elicit import RuleElicitor
from cdr_lib.d2d.index import CatalogIndex
from cdr_lib.d2d.patience import (PRESETS, LlmRater, MeasuredRater, PatienceConfig, measured_complexity,
                                  measured_informativeness, next_patience, update)
from cdr_lib.d2d.respond import Asked, Response
from cdr_lib.d2d.shoppers import Shopper, ShoppingSet, stated
from cdr_lib.d2d.simulate import STOPS, PatienceJudge, Sessions, converse, read_sessions, run_session, session_seed, simulate
from cdr_lib.d2d.users import LlmUser, ScriptedUser, Target, UserReply, load_replies, true_answers, user_view
from tests.fake_llm import FakeLLM

RNG = np.random.default_rng(5)
COLOURS, SIZES, STUFF = ("black", "white", "red"), ("1 l", "1.7 l", "2 l"), ("steel", "glass", "plastic")


def make_shop(n=24):
    items = []
    for k in range(n):
        pairs = {"color": COLOURS[k % 3], "capacity": SIZES[k // 3 % 3], "material": STUFF[k // 9 % 3], "series": f"line {k}"}
        items.append(Item(f"id-{k:02}", f"Kettle model {k:02}", {name: value for place, (name, value) in enumerate(pairs.items())
                                                                 if (k + place) % 4}))
    return Catalog("kettles", items)


SHOP = make_shop()
CROWD = ShoppingSet("kettles", SHOP, [
    Shopper(f"shopper-{n}", f"id-{n * 2:02}", f"a kettle please {n}", ("keeps warm", "easy to clean", "not too loud"),
            f"secret profile {n}", f"secret scenario {n}") for n in range(8)])


class Shows:
    "Recommends the items in order, one at a time, and asks for the colour with it."

    name, max_turns = "shows", None

    def __init__(self, step=1, ask=True, pause=0.0):
        self.step, self.ask, self._pause = step, ask, pause

    def start(self, query, seed):
        return self

    def respond(self, dialogue):
        time.sleep(self._pause)
        turn = sum(part.role == "assistant" for part in dialogue)
        asked = Asked("attribute", ("color",)) if self.ask else None
        id = SHOP.ids[turn * self.step % len(SHOP)]
        return Response(f"What about {SHOP.item(id).title}?", (id,), asked, {"why": "next"}, Usage(10, 2, 12, 1, 1))


# Patience -------------------------------------------------------------------------------------------------------------

numbers = st.floats(0, 1, allow_nan=False)


@given(before=numbers, rho=st.lists(numbers, max_size=4), flags=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=3),
       complexity=numbers, informativeness=numbers, preset=st.sampled_from(sorted(PRESETS)))
@settings(max_examples=150, deadline=None)
def test_patience_is_the_equation(before, rho, flags, complexity, informativeness, preset):
    c = PRESETS[preset]
    beta = {(True, False): 0.10, (True, True): 0.50, (False, False): 0.15, (False, True): 0.40}
    pi_a = sum(beta[flag] for flag in flags) / len(flags) if flags else 0
    pi_r = sum(rho) / len(rho) - 0.75 if rho else 0
    expected = min(1, before + c.lambda_r * pi_r - 1.0 * pi_a - 0.2 * complexity + c.lambda_i * informativeness)
    step = update(before, rho, [flag[0] for flag in flags], [flag[1] for flag in flags], complexity, informativeness, preset)
    assert step.after == pytest.approx(expected, abs=1e-9)
    assert step.before == before and step.left == (step.after <= 0)
    assert float(next_patience(before, step.pi_r, step.pi_a, step.pi_c, step.pi_i, preset)) == pytest.approx(step.after, abs=1e-9)


def test_presets_differ_in_two_weights_alone():
    printed, swapped = PRESETS["printed"], PRESETS["swapped"]
    assert (printed.lambda_r, printed.lambda_i) == (0.05, 1) and (swapped.lambda_r, swapped.lambda_i) == (1, 0.05)
    same = [item.name for item in fields(PatienceConfig) if item.name not in ("lambda_r", "lambda_i")]
    assert all(getattr(printed, name) == getattr(swapped, name) for name in same)


def test_printed_weights_never_lose_a_shopper_who_learns_something():
    level = 1.0
    for _ in range(50):
        level = update(level, [0.0] * 4, [True], [True], 0.3, 0.7, "printed").after
    assert level > 0  # a useless recommendation and a repeated question at every turn


def test_next_patience_takes_many_sessions_at_once():
    before, terms = RNG.random(100), RNG.random((4, 100))
    terms[0] -= 0.75
    each = [float(next_patience(b, *t)) for b, t in zip(before, terms.T)]
    assert np.array_equal(next_patience(before, *terms), each)


@given(st.text(max_size=400))
@settings(max_examples=100, deadline=None)
def test_measured_ratings_stay_in_range(text):
    assert 1 <= measured_complexity(text) <= 10 and 1 <= measured_informativeness(text) <= 10
    rating = MeasuredRater().rate(text)
    assert 0 <= rating.complexity <= 1 and 0 <= rating.informativeness <= 1 and rating.error is None


def test_llm_rater_reads_two_ratings_and_never_guesses():
    with FakeLLM(['{"rating": 4}', '{"rating": 10}']) as server:
        rating = LlmRater(LLM("m", base_url=server.base_url)).rate("Which colour?")
        assert (rating.complexity, rating.informativeness) == (pytest.approx(3 / 9), 1.0)
        assert rating.usage.attempts == 2 and len(server.requests) == 2
    with FakeLLM(lambda request: '{"rating": 11}') as server:
        rating = LlmRater(LLM("m", base_url=server.base_url, retries=0)).rate("Which colour?")
        assert rating.complexity is None and "schema_error" in rating.error


# Users ----------------------------------------------------------------------------------------------------------------

def test_D2D_01_the_opening_stays_visible_to_the_user_model():
    transcript = [Turn("user", "I need a quiet kettle under $40"), Turn("assistant", "Try K2, $35.")]
    before = [turn.to_dict() for turn in transcript]
    view = user_view([{"role": "system", "content": "<user instructions>"}, {"role": "user", "content": "<start>"}], transcript)
    assert [(message["role"], message["content"]) for message in view] == [
        ("system", "<user instructions>"), ("user", "<start>"),
        ("assistant", "I need a quiet kettle under $40"), ("user", "Try K2, $35.")]
    assert [turn.to_dict() for turn in transcript] == before


def test_D2D_01_what_is_sent_holds_every_turn_in_order():
    shopper = CROWD.shoppers[1]
    with FakeLLM(lambda request: "Black, please.") as server:
        user = LlmUser(LLM("m", base_url=server.base_url), shopper, Target(SHOP, shopper.target))
        dialogue = [Turn("user", shopper.query), Turn("assistant", "Which colour?"), Turn("user", "Hm."), Turn("assistant", "Well?")]
        reply = user.reply(Response("Well?", (), Asked("attribute", ("color",))), dialogue)
        assert reply.text == "Black, please." and reply.usage.billed == 1
        sent = [(message["role"], message["content"]) for message in server.requests[0]["messages"]]
    assert [role for role, _ in sent] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [text for _, text in sent[2:]] == [shopper.query, "Which colour?", "Hm.", "Well?"]
    assert sent[1][1].startswith("(")  # the neutral start marker
    assert shopper.profile in sent[0][1] and SHOP.item(shopper.target).title not in sent[0][1]


def test_a_model_that_names_the_target_is_asked_again_and_then_an_error():
    shopper = CROWD.shoppers[1]
    title = SHOP.item(shopper.target).title

    def user(server):
        return LlmUser(LLM("m", base_url=server.base_url), shopper, Target(SHOP, shopper.target))

    dialogue = [Turn("user", shopper.query), Turn("assistant", "Well?")]
    with FakeLLM([f"I want the {title}.", "Something black."]) as server:
        assert user(server).reply(Response("Well?"), dialogue).text == "Something black."
    with FakeLLM(lambda request: f"I want the {title.upper()}.") as server:
        reply = user(server).reply(Response("Well?"), dialogue)
        assert reply.text == "" and "named the target twice" in reply.error and reply.usage.billed == 2
    with FakeLLM(lambda request: {"content": None, "refusal": "No."}) as server:
        assert "refused" in user(server).reply(Response("Well?"), dialogue).error


@pytest.mark.parametrize("id, title, heard, said", [
    ("14", "Kettle K2", "Well?", "14 in would be right."),  # an id that is also a fact
    ("k2", "Water bottle", "Well?", "Just a water bottle."),  # the title is the kind of product
    ("k", "Kettle K2", "Well?", "Black, like the last one."),  # letters inside words
    ("k2", "Kettle K2", "Kettle K1, or Kettle K2?", "Kettle K2 comes closer.")])  # the assistant has said it
def test_what_the_shopper_may_say_does_not_name_the_target(id, title, heard, said):
    shop = Catalog("c", [Item(id, title, {"size": "14 in", "product type": "water bottle"}), Item("k1", "Kettle K1", {})])
    shopper = Shopper("s", id, "something for water", ("keeps warm",))
    with FakeLLM([said, "Never asked."]) as server:
        user = LlmUser(LLM("m", base_url=server.base_url), shopper, Target(shop, id))
        reply = user.reply(Response(heard), [Turn("user", shopper.query), Turn("assistant", heard)])
        assert (reply.text, reply.error, len(server.requests)) == (said, None, 1)


def test_trials_of_a_model_are_samples_of_their_own(tmp_path):
    "Answers kept in a replay file must not make the second trial a copy of the first."
    numbers = itertools.count()
    with FakeLLM(lambda request: f"Hm, let me think, {next(numbers)}.") as server:
        llm = LLM("m", base_url=server.base_url, cache=tmp_path / "replay.jsonl")
        sessions = simulate(ShoppingSet("one", SHOP, [CROWD.shoppers[7]]), {"one": Shows(ask=False)}, user=llm, trials=2, max_turns=4, progress=False,
                            patience=PatienceConfig(lambda_r=0, lambda_c=0))
    said = [[turn["user"] for turn in record["turns"][1:]] for record in sessions]
    assert len(said[0]) == len(said[1]) == 3 and not set(said[0]) & set(said[1])


@pytest.mark.parametrize("side", ["assistant", "judge", "user"])
def test_an_error_raised_in_mid_session_keeps_the_turns_before_it(side):
    shopper, used = CROWD.shoppers[3], Usage(prompt_tokens=5, completion_tokens=2, total_tokens=7, attempts=1)
    calls = {"assistant": 0, "judge": 0, "user": 0}

    def tick(name):
        calls[name] += 1
        if side == name and calls[name] == 2:
            raise CdrError("gone")

    class Breaks:
        name, max_turns = "breaks", None

        def start(self, query, seed):
            return self

        def respond(self, dialogue):
            tick("assistant")
            return Response("Well?", usage=used)

    class Says(ScriptedUser):
        def reply(self, response, dialogue):
            tick("user")
            return UserReply(f"Hm {calls['user']}", used)

    target = Target(SHOP, shopper.target)
    patience = PatienceJudge(target)

    def judge(response):
        tick("judge")
        return patience(response)

    record = run_session("breaks", Breaks(), shopper, target, Says(shopper, target), judge)
    assert record["stop"] == "error" and record["error"] == "CdrError: gone"
    assert len(record["turns"]) == (1 if side == "assistant" else 2)
    spent = sum(sum(pair) for turn in record["turns"] for pair in turn["tokens"].values()) + sum(record["unread_tokens"])
    assert spent == 7 * (calls["assistant"] + calls["user"] - (side != "judge"))


def test_scripted_replies_are_true_complete_and_never_name_the_target():
    for shopper, seed in itertools.product(CROWD.shoppers, range(6)):
        target, item = Target(SHOP, shopper.target), SHOP.item(shopper.target)
        user = ScriptedUser(shopper, target, seed)
        for attribute in (*SHOP.attributes, "voltage"):
            text = user.reply(Response("?", (), Asked("attribute", (attribute,))), [Turn("user", "q"), Turn("assistant", "?")]).text
            values = [value for code, name in enumerate(SHOP.attributes) if name == attribute for value in SHOP.values[code]]
            told = [value for value in values if value.lower() in text.lower().replace(attribute, "")]
            if attribute in item.attributes:
                assert item.attributes[attribute].lower() in text.lower()
            else:
                assert not told, text
            assert item.title not in text and item.id not in text


def test_several_attributes_are_all_answered():
    shopper = CROWD.shoppers[1]
    target = Target(SHOP, shopper.target)
    known = sorted(target.item.attributes)[:2]
    text = ScriptedUser(shopper, target).reply(Response("?", (), Asked("attribute", (*known, "voltage"))), [Turn("assistant", "?")]).text
    assert all(target.item.attributes[name] in text for name in known) and "voltage" in text
    assert [answer.kind for answer in true_answers(Asked("attribute", (*known, "voltage")), target)] == ["states", "states", "no_preference"]


def test_item_questions_follow_the_relevance():
    shopper = CROWD.shoppers[2]
    target = Target(SHOP, shopper.target)
    for a, b in itertools.combinations(SHOP.ids[:12], 2):
        rho = dict(zip((a, b), target.relevance((a, b))))
        answer = true_answers(Asked("items", (), (), (a, b)), target)[0]
        if rho[a] == rho[b]:
            assert answer.kind == ("no_item" if rho[a] == 0 else "equal_items")
        else:
            assert answer.fields["title"] == SHOP.item(max(rho, key=rho.get)).title


def test_wordings_are_complete_and_plain():
    bank = load_replies()
    assert all(len(set(wordings)) >= 3 for wordings in bank.values())
    card = (data_dir() / "templates" / "shoppers" / "README.md").read_text()
    assert all(f"`{kind}`" in card for kind in bank)


def test_a_broken_bank_is_an_error(tmp_path):
    bank = yaml.safe_load((data_dir() / "templates" / "shoppers" / "replies.yaml").read_text())
    for change in ({"states": ["I want {value} in {size}"]}, {"rejects": ["No {title}"]}, {"greets": ["Hello"]}):
        path = tmp_path / f"{len(str(change))}.yaml"
        path.write_text(yaml.safe_dump({**bank, **change}))
        with pytest.raises(CdrError):
            load_replies(str(path))


# Conversation ---------------------------------------------------------------------------------------------------------

def thanks(guard, max_turns=3):
    calls = {"assistant": [], "user": []}
    agent = iter(["Hi, what do you need?", "Goodbye!", "Goodbye!", "Goodbye!", "Goodbye!"])

    def respond(dialogue):
        calls["assistant"].append(tuple(dialogue))
        return Response(next(agent), usage=Usage(100, 10, 110, 1, 1))

    def reply(response, dialogue):
        calls["user"].append(tuple(dialogue))
        return UserReply("Goodbye!", Usage(50, 5, 55, 1, 1))

    return converse("hello", respond, reply, max_turns=max_turns, repeat_guard=guard), calls


def test_D2D_03_guard_off_ends_at_the_limit_without_a_reply_that_no_one_reads():
    talk, calls = thanks(None)
    assert (len(talk.dialogue), len(calls["assistant"]), len(calls["user"])) == (6, 3, 2)
    assert talk.stop == "max_turns" and talk.stop in STOPS
    assert sum(e.response.usage.total_tokens for e in talk.exchanges) == 330
    assert sum(e.user_usage.total_tokens for e in talk.exchanges if e.user_usage) == 110 and talk.unread_usage is None


def test_D2D_03_guard_on_ends_by_repetition():
    talk, calls = thanks(2)
    assert talk.stop == "repetition" and len(calls["assistant"]) <= 3
    user = sum(e.user_usage.total_tokens for e in talk.exchanges if e.user_usage) + talk.unread_usage.total_tokens
    assert user == 55 * len(calls["user"]) and sum(e.response.usage.total_tokens for e in talk.exchanges) == 110 * len(calls["assistant"])


@pytest.mark.parametrize("guard, said, turns", [(2, ["a", "A ", "a"], 2), (3, ["a", "a", "a", "b"], 3), (2, ["a", "b", "a", "b"], None)])
def test_repetition_means_in_a_row_and_ignores_case(guard, said, turns):
    lines = iter(said)
    talk = converse("start", lambda d: Response("?"), lambda r, d: UserReply(next(lines)), max_turns=5 if turns else 4, repeat_guard=guard)
    assert (talk.stop, len(talk.exchanges)) == (("repetition", turns) if turns else ("max_turns", 4))


def test_an_opening_said_again_is_a_repetition_too():
    talk = converse("hello", lambda d: Response("?"), lambda r, d: UserReply("Hello"), repeat_guard=2)
    assert (talk.stop, len(talk.exchanges)) == ("repetition", 1)


def test_acceptance_comes_before_patience_and_ends_without_a_reply():
    shopper = CROWD.shoppers[0]
    target = Target(SHOP, shopper.target)
    strict = PatienceConfig(start=0.01, ceiling=1.0)  # the first answer would use it up

    class Right(Shows):
        def respond(self, dialogue):
            return Response("This one.", (shopper.target,), Asked("attribute", ("nonsense",)))

    record = run_session("right", Right(), shopper, target, ScriptedUser(shopper, target), PatienceJudge(target, strict))
    assert (record["stop"], record["found_rank"], len(record["turns"]), record["unread"]) == ("success", 1, 1, None)
    wrong = run_session("shows", Shows(), CROWD.shoppers[1], Target(SHOP, CROWD.shoppers[1].target),
                        ScriptedUser(CROWD.shoppers[1], Target(SHOP, CROWD.shoppers[1].target)),
                        PatienceJudge(Target(SHOP, CROWD.shoppers[1].target), strict))
    assert (wrong["stop"], len(wrong["turns"])) == ("abandoned", 1)


def test_an_assistant_with_one_turn_gets_one_turn():
    class Once(Shows):
        max_turns = 1

    assert {len(record["turns"]) for record in simulate(CROWD, {"once": Once()}, progress=False)} == {1}
    assert {record["stop"] for record in simulate(CROWD, {"once": Once()}, progress=False)} == {"success", "max_turns"}


# What an assistant receives -------------------------------------------------------------------------------------------

def strings(thing, seen=None):
    "Every text that can be reached from an object."
    seen = set() if seen is None else seen
    if isinstance(thing, str):
        yield thing
    elif id(thing) not in seen and not isinstance(thing, (int, float, bool, type(None))):
        seen.add(id(thing))
        if isinstance(thing, dict):
            parts = [*thing.keys(), *thing.values()]
        elif isinstance(thing, (list, tuple, set, frozenset)):
            parts = list(thing)
        elif is_dataclass(thing):
            parts = [getattr(thing, item.name) for item in fields(thing)]
        else:
            parts = [getattr(thing, "__dict__", {}), getattr(thing, "__self__", None), getattr(thing, "__closure__", None)]
        for part in parts:
            yield from strings(part, seen)


class Spy(Shows):
    "Keeps everything that it is given."

    def __init__(self):
        super().__init__(step=5)
        self.given, self.rows = [], []

    def start(self, *args, **kwargs):
        self.given.append((args, kwargs))
        return SpySession(self)


class SpySession:
    def __init__(self, spy):
        self.spy = spy

    def respond(self, *args, **kwargs):
        self.spy.given.append((args, kwargs))
        return Shows.respond(self.spy, args[0])


def test_no_assistant_receives_the_target():
    spy = Spy()
    sessions = simulate(CROWD, {"spy": spy}, progress=False)
    received = "\n".join(strings(spy.given))
    for shopper in CROWD.shoppers:
        shown = {id for record in sessions for turn in record["turns"] for id in turn["items"]}
        hidden = [shopper.profile, shopper.scenario, shopper.id]
        if shopper.target not in shown:
            hidden += [shopper.target, SHOP.item(shopper.target).title]
        assert shopper.query in received and not [text for text in hidden if text in received]
    # and structurally: a query, a seed, and turns of two roles that carry nothing but their text
    starts = [given for given in spy.given if isinstance(given[0][0], str)]
    assert all(len(args) == 2 and isinstance(args[1], int) and not kwargs for args, kwargs in starts)
    dialogues = [args[0] for args, kwargs in spy.given if not isinstance(args[0], str)]
    assert dialogues and all(turn.role in ("user", "assistant") and turn.speaker is None and not turn.meta
                             for dialogue in dialogues for turn in dialogue)
    assert len(starts) == len(CROWD.shoppers)


def test_a_description_reaches_the_assistant_only_when_the_user_says_it():
    class Asks(Spy):
        def start(self, *args):
            self.given.append((args, {}))
            return AsksSession(self)

    class AsksSession(SpySession):
        def respond(self, dialogue):
            self.spy.given.append(((dialogue,), {}))
            return Response("Which series?", (), Asked("attribute", ("series",)))

    spy = Asks()
    simulate(CROWD, {"asks": spy}, progress=False)
    received = "\n".join(strings(spy.given))
    assert not [point for shopper in CROWD.shoppers for point in shopper.description if point in received]


# Simulation -----------------------------------------------------------------------------------------------------------

def test_the_same_bytes_whatever_the_workers(tmp_path):
    assistants = {"one": Shows(), "three": Shows(3, ask=False)}
    for workers in (1, 2, 7):
        simulate(CROWD, assistants, out=tmp_path / str(workers), workers=workers, trials=2, progress=False)
    files = [(tmp_path / str(workers) / "sessions.jsonl").read_bytes() for workers in (1, 2, 7)]
    assert files[0] == files[1] == files[2] and files[0].count(b"\n") == 2 * 2 * 8


def test_methods_meet_the_same_users_and_trials_differ():
    sessions = simulate(CROWD, {"one": Shows(), "again": Shows()}, trials=2, progress=False)
    for shopper in CROWD.shoppers:
        for trial in (0, 1):
            a, b = sessions.one("one", shopper.id, trial), sessions.one("again", shopper.id, trial)
            assert a["seed"] == b["seed"] == session_seed(0, shopper.id, trial) and a["turns"] == b["turns"]
    texts = {trial: [turn["user"] for record in sessions.select("one", trial=trial) for turn in record["turns"]] for trial in (0, 1)}
    assert texts[0] != texts[1] and [r["stop"] for r in sessions.select("one", trial=0)] == [r["stop"] for r in sessions.select("one", trial=1)]


CHILD = """
import sys
from tests.test_d2d_simulate import CROWD, Counting, simulate
simulate(CROWD, {"slow": Counting(5, pause=0.03)}, out=sys.argv[1], workers=2, progress=False)
"""


def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    simulate(CROWD, {"slow": Counting(5)}, out=whole, progress=False)
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(cut)], cwd=project_root(), env={**os.environ, "PYTHONPATH": str(project_root())})
    part, limit = cut / "sessions.part.jsonl", time.time() + 60
    while not (part.is_file() and part.read_bytes().count(b"\n") >= 2):
        assert time.time() < limit and child.poll() is None
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    with open(part, "ab") as file:
        file.write(b'{"set": "kettles", "method"')  # torn
    finished = read_sessions(cut)
    assert 2 <= len(finished) < len(CROWD)
    counted = Counting(5)
    simulate(CROWD, {"slow": counted}, out=cut, progress=False)
    assert counted._started == len(CROWD) - len(finished)
    assert (cut / "sessions.jsonl").read_bytes() == (whole / "sessions.jsonl").read_bytes() and not part.exists()


class Counting(Shows):
    _started = 0

    def start(self, query, seed):
        self._started += 1
        return self


def test_a_finished_run_is_not_run_again_and_methods_can_be_added(tmp_path):
    counted = Counting()
    first = simulate(CROWD, {"one": counted}, out=tmp_path, progress=False)
    again = simulate(CROWD, {"one": counted}, out=tmp_path, progress=False)
    assert counted._started == len(CROWD) and again.records == first.records
    both = simulate(CROWD, {"two": Shows(3), "one": counted}, out=tmp_path, progress=False)
    assert counted._started == len(CROWD) and set(both.methods) == {"one", "two"}
    assert read_sessions(tmp_path).methods == ("one", "two")


def test_other_settings_data_or_assistants_are_refused(tmp_path):
    class Set(Shows):
        def __init__(self, tau):
            super().__init__()
            self.config = PatienceConfig(omega=tau)  # any configuration

    simulate(CROWD, {"d2d": Set(0.2)}, out=tmp_path, progress=False)
    for options, what in (({"seed": 1}, "seed"), ({"patience": "printed"}, "patience"), ({"max_turns": 3}, "max_turns")):
        with pytest.raises(CdrError, match=what):
            simulate(CROWD, {"d2d": Set(0.2)}, out=tmp_path, progress=False, **options)
    with pytest.raises(CdrError, match="assistant d2d"):
        simulate(CROWD, {"d2d": Set(0.3)}, out=tmp_path, progress=False)
    with pytest.raises(CdrError, match="data"):
        simulate(ShoppingSet("kettles", make_shop(23), CROWD.shoppers), {"d2d": Set(0.2)}, out=tmp_path, progress=False)


def test_an_elicitor_with_other_numbers_is_another_assistant(tmp_path):
    index = CatalogIndex(SHOP, "bm25")

    def run(tolerance):
        return simulate(CROWD.take(1), {"d2d": D2D(index, RuleElicitor(tolerance=tolerance))}, out=tmp_path, progress=False)

    assert run(0.1).records == run(0.1).records
    with pytest.raises(CdrError, match="assistant d2d"):
        run(0.2)


def test_another_kind_of_shopper_is_another_experiment(tmp_path):
    some = partial(ScriptedUser, opinions=0.5)
    fewer = simulate(CROWD, {"shows": Shows(5)}, user=some, out=tmp_path, progress=False)
    assert json.loads((tmp_path / "run.json").read_text())["user"] == "ScriptedUser(opinions=0.5)"
    assert simulate(CROWD, {"shows": Shows(5)}, user=some, out=tmp_path, progress=False).records == fewer.records
    with pytest.raises(CdrError, match="user"):
        simulate(CROWD, {"shows": Shows(5)}, user=partial(ScriptedUser, opinions=0.6), out=tmp_path, progress=False)
    assert fewer.records != simulate(CROWD, {"shows": Shows(5)}, progress=False).records


def test_a_damaged_file_is_an_error_that_names_the_line(tmp_path):
    simulate(CROWD, {"one": Shows()}, out=tmp_path, progress=False)
    lines = (tmp_path / "sessions.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "sessions.jsonl").write_bytes(b"".join([*lines[:2], b"{broken\n", *lines[3:]]))
    for call in (lambda: read_sessions(tmp_path), lambda: simulate(CROWD, {"one": Shows()}, out=tmp_path, progress=False)):
        with pytest.raises(CdrError, match="line 3"):
            call()
    with pytest.raises(CdrError, match="no sessions"):
        read_sessions(tmp_path / "..")


@pytest.mark.parametrize("line", ["{}", "null", "[1]", '{"set": "x"}'])
def test_a_line_that_is_no_record_is_named_unless_it_is_torn(tmp_path, line):
    file = tmp_path / "sessions.jsonl"
    whole = simulate(CROWD.take(2), {"one": Shows()}, progress=False).save(file).read_bytes()
    file.write_bytes(line.encode() + b"\n" + whole)
    with pytest.raises(CdrError, match="line 1: this is not the record of a session"):
        read_sessions(file)
    run = tmp_path / "run"
    simulate(CROWD.take(2), {"one": Shows()}, out=run, progress=False)
    (run / "sessions.jsonl").rename(run / "sessions.part.jsonl")
    with open(run / "sessions.part.jsonl", "ab") as part:
        part.write(line.encode())  # no newline: cut off by the interruption
    assert simulate(CROWD.take(2), {"one": Shows()}, out=run, progress=False).records == read_sessions(run).records


def test_a_wrong_option_is_an_error_before_anything_is_written(tmp_path):
    for options in ({"repeat_guard": 1}, {"rater": "foo"}, {"patience": "nope"}, {"trials": 0}, {"user": "nobody"}):
        with pytest.raises(CdrError):
            simulate(CROWD.take(1), {"one": Shows()}, out=tmp_path / "run", progress=False, **options)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(CdrError, match="not the settings"):
        simulate(CROWD.take(1), {"one": Shows()}, out=tmp_path / "run", progress=False)


def test_half_a_character_of_an_assistant_is_an_error_that_can_be_stored(tmp_path):
    class Half(Shows):
        def respond(self, dialogue):
            return Response("cut \ud83d")

    sessions = simulate(CROWD.take(2), {"half": Half()}, out=tmp_path, progress=False)
    assert set(sessions.frame().stop) == {"error"} and len(read_sessions(tmp_path)) == 2


def test_two_simulations_cannot_write_to_one_folder(tmp_path):
    begun = threading.Event()

    class Waits(Shows):
        def respond(self, dialogue):
            begun.set()
            time.sleep(0.3)
            return super().respond(dialogue)

    few = CROWD.take(1)
    thread = threading.Thread(target=simulate, args=(few, {"waits": Waits()}), kwargs={"out": tmp_path, "progress": False})
    thread.start()
    begun.wait(10)
    with pytest.raises(CdrError, match="another simulation"):
        simulate(few, {"waits": Waits()}, out=tmp_path, progress=False)
    thread.join()
    assert len(read_sessions(tmp_path)) == 1


def test_an_exception_that_is_no_error_of_a_model_is_raised_and_loses_nothing(tmp_path):
    class Bug(Shows):
        def start(self, query, seed):
            if query.endswith("5"):
                raise ZeroDivisionError
            return self

    with pytest.raises(ZeroDivisionError):
        simulate(CROWD, {"bug": Bug()}, out=tmp_path, progress=False)
    assert len(read_sessions(tmp_path)) == 5
    Bug.start = lambda self, query, seed: self
    assert len(simulate(CROWD, {"bug": Bug()}, out=tmp_path, progress=False)) == len(CROWD)


def test_waiting_is_done_at_the_same_time():
    start = time.perf_counter()
    simulate(CROWD, {"slow": Shows(pause=0.05)}, workers=8, progress=False, max_turns=6)
    wall = time.perf_counter() - start
    start = time.perf_counter()
    simulate(CROWD, {"slow": Shows(pause=0.05)}, workers=1, progress=False, max_turns=6)
    assert wall < 0.5 * (time.perf_counter() - start)


def test_a_server_that_fails_half_way_leaves_errors_apart_and_they_can_be_redone(tmp_path):
    replies = itertools.count()

    def script(request):
        return "Yes, as I said." if next(replies) < 6 else {"content": None, "refusal": "No more."}

    with FakeLLM(script) as server:
        sessions = simulate(CROWD, {"shows": Shows(5)}, user=LLM("m", base_url=server.base_url), out=tmp_path, progress=False)
    stops = sessions.frame().stop
    assert (stops == "error").any() and (stops != "error").any()
    failed = [record for record in sessions if record["stop"] == "error"]
    assert all("refused" in record["error"] and record["turns"] for record in failed)
    with FakeLLM(lambda request: "Yes, as I said.") as server:
        kept = simulate(CROWD, {"shows": Shows(5)}, user=LLM("m", base_url=server.base_url), out=tmp_path, progress=False)
        assert not server.requests and kept.records == sessions.records
        redone = simulate(CROWD, {"shows": Shows(5)}, user=LLM("m", base_url=server.base_url), out=tmp_path, redo_errors=True, progress=False)
        assert server.requests and not (redone.frame().stop == "error").any()
    assert len(read_sessions(tmp_path)) == len(CROWD)


def test_tokens_of_a_record_are_those_of_its_calls():
    with FakeLLM(lambda request: "Yes, as I said.") as server:
        llm = LLM("m", base_url=server.base_url)
        sessions = simulate(CROWD.take(3), {"shows": Shows(5)}, user=llm, progress=False)
        spent = sum(sum(turn["tokens"]["user"]) for record in sessions for turn in record["turns"]) + sum(
            sum(record["unread_tokens"]) for record in sessions)
        assert spent == llm.usage.total_tokens > 0
    assert all(turn["tokens"]["assistant"] == [10, 2] for record in sessions for turn in record["turns"])


@pytest.mark.parametrize("catalog", [
    Catalog("bare", [Item(f"b{n}", f"Thing {n}", {}) for n in range(5)]),
    Catalog("equal", [Item(f"b{n}", "The same thing", {"color": "black"}) for n in range(5)]),
    Catalog("one", [Item("b0", "The only thing", {"color": "black"})]),
], ids=lambda catalog: catalog.name)
def test_poor_catalogues_give_documented_results(catalog):
    class All(Shows):
        def respond(self, dialogue):
            turn = sum(part.role == "assistant" for part in dialogue)
            return Response("?", (catalog.ids[-1 - turn % len(catalog)],), Asked("attribute", ("color",)))

    crowd = ShoppingSet(catalog.name, catalog, [Shopper("s", "b0", "a thing", ("plain",))])
    record = simulate(crowd, {"all": All()}, progress=False).records[0]
    assert record["stop"] in ("success", "abandoned") and record["ideal"][0] == 1.0
    json.dumps(record, allow_nan=False)


def test_sessions_reject_twins_and_unknown_names():
    sessions = simulate(CROWD, {"one": Shows()}, progress=False)
    with pytest.raises(CdrError, match="two records"):
        sessions + sessions
    with pytest.raises(CdrError, match="0 sessions"):
        sessions.one("one", "nobody")
    assert "<script" not in sessions._repr_html_() and isinstance(sessions.select("one", trial=0), Sessions)


def test_the_saved_file_is_enough(tmp_path):
    sessions = simulate(CROWD, {"one": Shows()}, progress=False)
    path = sessions.save(Path(tmp_path) / "s.jsonl")
    assert read_sessions(path).records == sessions.records


def test_a_shopper_cares_about_what_it_has_said():
    "With few opinions, what the description or the first query names is answered all the same."
    for shopper in CROWD.shoppers:
        target = Target(CROWD.catalog, shopper.target)
        named = [name for text in (shopper.query, *shopper.description) for name in stated(text, target.item)]
        user = ScriptedUser(shopper, target, opinions=0.0)
        assert all(user.cares(name) for name in named)
        assert not any(user.cares(name) for name in set(CROWD.catalog.attributes) - set(named))
