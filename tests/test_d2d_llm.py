"""D2D with language models on both sides: complete sessions, replay, a server that breaks down; and a small real model."""
import json

import pytest

from cdr_lib.core.llm import LLM
from cdr_lib.d2d.assistants import make_assistants
from cdr_lib.d2d.catalog import Catalog, Item
from cdr_lib.d2d.elicit import RuleElicitor
from cdr_lib.d2d.index import CatalogIndex
from cdr_lib.d2d.outcomes import outcome_table
from cdr_lib.d2d.shoppers import Shopper, ShoppingSet
from cdr_lib.d2d.simulate import STOPS, simulate
from tests.fake_llm import FakeLLM
from tests.real_llm import RealLLM, missing

COLOURS, STUFF, SIZES = ("black", "white", "red"), ("steel", "glass"), ("1 l", "2 l")
ITEMS = [Item(f"k{n:02}", f"Kettle number {n}", {"color": COLOURS[n % 3], "material": STUFF[n % 2], "capacity": SIZES[n // 6 % 2]})
         for n in range(18)]
SHOPS = ShoppingSet("kettles", Catalog("kettles", ITEMS), [
    Shopper(f"s{n}", f"k{n * 5:02}", "I am looking for a kettle", ("easy to clean", "keeps warm", "not loud"),
            "buys things that last", "moves into a first flat") for n in range(3)])
LLM_METHODS = ["d2d", "zs", "full-llm", "d2d-llm"]


@pytest.fixture(scope="module")
def index():
    return CatalogIndex(SHOPS.catalog, "bm25")


def answer(request):
    "Plays every part: reads nothing, chooses the first of everything."
    wanted = json.dumps(request.get("response_format") or "")
    if '"rating"' in wanted:
        return '{"rating": 5}'
    if '"indifferent"' in wanted:
        text = request["messages"][-1]["content"]
        said = text[text.index("<utterance>"):]
        values = [{"attribute": name, "value": value, "preference": 1, "uncertainty": 0}
                  for name, values in (("color", COLOURS), ("material", STUFF), ("capacity", SIZES)) for value in values if value in said]
        return json.dumps({"values": values, "indifferent": []})
    if wanted != '""':
        names = request["response_format"]["json_schema"]["schema"]["properties"]
        made = {"items": [1, 2, 3, 4], "attributes": ["color"], "asks_about": ["color"], "recommend": True, "message": "How about these?"}
        return json.dumps({name: made[name] for name in names})
    system = request["messages"][0]["content"]
    if system.startswith("You play a shopper"):
        return system.split("The truthful answer to the last message: ")[-1] if "truthful answer to the last" in system else "Not these."
    return "Which one would you like, and why?"


def run(server, index, out=None, methods=LLM_METHODS, **options):
    llm = LLM("fake", base_url=server if isinstance(server, str) else server.base_url, **options)
    assistants = make_assistants(methods, SHOPS, index, llm=llm)
    with_llm = simulate(SHOPS, assistants, user=llm, rater="llm", out=out, max_turns=5, workers=options.get("concurrency", 1), progress=False)
    return with_llm, llm


def test_complete_sessions_with_models_on_both_sides(index):
    with FakeLLM(answer) as server:
        sessions, llm = run(server, index)
    assert len(sessions) == 12 and set(sessions.frame().stop) <= set(STOPS) - {"error"}, sessions.frame().error.dropna().tolist()
    tokens = sum(sum(pair) for record in sessions for turn in record["turns"] for pair in turn["tokens"].values())
    assert tokens + sum(sum(record["unread_tokens"]) for record in sessions) == llm.usage.total_tokens
    table = outcome_table(sessions, n_boot=50)
    assert (table.errors == 0).all() and (table.tokens_in > 0).all() and table.success["d2d"] > 0


def test_a_run_is_replayed_offline_byte_for_byte(index, tmp_path):
    with FakeLLM(answer) as server:
        address = server.base_url
        _, llm = run(server, index, tmp_path / "first", cache=tmp_path / "replay.jsonl", concurrency=4)
        llm.close()
    # the server is gone
    _, llm = run(address, index, tmp_path / "second", cache=tmp_path / "replay.jsonl", offline=True)
    files = [(tmp_path / name / "sessions.jsonl").read_bytes() for name in ("first", "second")]
    assert files[0] == files[1] and llm.usage.attempts == 0 and llm.usage.cache_hits > 0


def test_nonsense_is_an_error_of_its_own_for_every_method(index):
    with FakeLLM(lambda request: "no JSON at all") as server:
        sessions, _ = run(server, index, retries=1)
    frame = sessions.frame()
    assert set(frame.stop) == {"error"} and frame.error.str.contains("parse_error").all()
    table = outcome_table(sessions, n_boot=50)
    assert (table.errors == 3).all() and table.success.isna().all()


def test_a_limited_rate_only_costs_time(index):
    state = {"number": 0}

    def limited(request):
        state["number"] += 1
        return {"status": 429, "headers": {"retry-after-ms": "5"}} if state["number"] % 4 == 0 else answer(request)

    with FakeLLM(answer) as server:
        free, _ = run(server, index, methods=["d2d"])
    with FakeLLM(limited) as server:
        slowed, _ = run(server, index, methods=["d2d"])
    assert [record["turns"] for record in slowed] == [record["turns"] for record in free]


@pytest.mark.llm
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_a_complete_session_with_a_small_real_model(index, tmp_path):
    # The model words both sides and rates; rules read, since it fills free lists without end. Greedy decoding would loop.
    options = {"timeout": 600, "max_tokens": 300, "concurrency": 1, "temperature": 0.6, "seed": 1, "extra": {"repeat_penalty": 1.3},
               "cache": tmp_path / "replay.jsonl"}
    few = SHOPS.take(1)

    def session(llm):
        assistants = make_assistants(["d2d"], few, index, llm=llm, elicitor=RuleElicitor())
        return simulate(few, assistants, user=llm, rater="llm", max_turns=2, progress=False)

    with RealLLM(parallel=1, context=4096, threads=1) as server:
        with LLM(server.model, server.base_url, **options) as llm:
            first = session(llm)
            assert llm.usage.billed >= 3 and llm.usage.completion_tokens > 0
    record = first.records[0]
    assert record["stop"] in ("success", "abandoned", "max_turns"), record["error"]
    assert all(turn["assistant"] and turn["tokens"]["assistant"][1] for turn in record["turns"])
    with LLM(server.model, server.base_url, **options, offline=True) as llm:
        assert session(llm).records == first.records and llm.usage.attempts == 0
