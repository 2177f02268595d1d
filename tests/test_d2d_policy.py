"""Preferences and policy: against loops written from the equations, by properties, by hand, and at the edges."""
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_lib.core.config import CdrError, json_dumps
from cdr_lib.d2d.catalog import Catalog, Item
from cdr_lib.d2d.policy import PolicyConfig, attribute_worth, decide, top_set
from cdr_lib.d2d.preferences import Preferences, Space, indifferent, item_scores, prefer

from . import d2d_reference as reference


def make_space(seed: int, n: int = 40, width: int = 8, missing: float = 0.4, kinds: int = 5) -> Space:
    rng = np.random.default_rng(seed)
    items = [Item(f"{row:03}", f"item {row}", {f"a{j:02}": f"v{rng.integers(kinds)}" for j in range(width)
                                               if rng.random() > missing}) for row in range(n)]
    return Space.of(Catalog("made", items), range(n), np.sort(rng.random(n))[::-1])


def make_state(space: Space, seed: int, told: int = 3) -> Preferences:
    "A state as sessions reach it: some answers, some indifference, some partial knowledge, some items shown."
    rng = np.random.default_rng(seed)
    prefs = Preferences.start(space)
    for j in rng.permutation(len(space.attributes))[:told].tolist():
        pairs, how = list(space.pairs(j)), rng.integers(4)
        if how == 0:
            prefs = indifferent(space, prefs, j)
        elif how == 1:
            prefs = prefer(space, prefs, j, disliked=[int(rng.choice(pairs))])
        elif how == 2:
            prefs = prefs.put(pairs, rng.uniform(-1, 1, len(pairs)), rng.random(len(pairs)))
        else:
            prefs = prefer(space, prefs, j, liked=[int(rng.choice(pairs))])
        if rng.random() < 0.7:
            prefs = prefs.after_asking([j])
    if rng.random() < 0.5:
        prefs = prefs.after_showing(rng.choice(len(space), 3, replace=False).tolist())
    return prefs.ruling_out(rng.choice(len(space), 2, replace=False).tolist()) if rng.random() < 0.3 else prefs


def same(decision, expected) -> None:
    shown, asked, size = expected
    found = decision.question
    assert decision.recommend == shown
    assert (found and (found.kind, found.attributes, found.values, found.items)) == asked
    assert decision.explanation["top_set"] == size


CONFIGS = {
    "default": {}, "sum": {"uncertainty": "sum"}, "rms": {"uncertainty": "rms"},
    "no ace": {"ace": False}, "no apu": {"apu": False}, "always": {"timing": "always"}, "known": {"ask_known": True},
    "values": {"ace_scale": "values", "named_values": 5}, "different": {"delta_pairs": "different"},
    "top set": {"scope": "top_set"},
    "attributes": {"difference": "attributes", "item_differences": 4}, "one": {"attributes_per_question": 1, "m": 1},
    "bare": {"item_questions": False, "ask_with_recommendation": False, "exclude_shown": False, "fill": False, "tau": 0.6},
    "tau 0": {"tau": 0.0}, "tau 1": {"tau": 1.0, "m": 6, "item_differences": 9},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_same_decision_as_loops(name):
    config = PolicyConfig(**CONFIGS[name])
    for seed in range(60):
        space = make_space(seed, n=12 + seed % 30, width=1 + seed % 9, missing=(seed % 5) / 5, kinds=1 + seed % 6)
        prefs = make_state(space, seed, told=seed % 6)
        same(decide(space, prefs, config), reference.decide(space, prefs, config))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 25), st.integers(1, 6), st.integers(1, 5), st.floats(0, 0.95), st.integers(0, 5))
def test_same_decision_as_loops_anywhere(seed, n, width, kinds, missing, told):
    space = make_space(seed, max(n, 4), width, missing, kinds)
    prefs = make_state(space, seed, told)
    same(decide(space, prefs), reference.decide(space, prefs, PolicyConfig()))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_informativeness_equals_the_sums_it_replaces(seed):
    space, config = make_space(seed, 25, 5), PolicyConfig()
    prefs = make_state(space, seed)
    rows = np.random.default_rng(seed).permutation(25)[: 2 + seed % 20]
    ace, delta = attribute_worth(space, prefs, rows, config)
    expected = np.array(reference.worth(space, prefs, rows.tolist(), config))
    assert np.allclose(np.c_[ace, delta], expected, atol=1e-10)
    assert ((ace >= 0) & (ace <= 1 + 1e-12)).all() and (delta >= 0).all()


def test_scores_by_hand():
    catalog = Catalog("two", [Item("a", "A", {"x": "1", "y": "1"}), Item("b", "B", {"x": "2"})])
    space = Space.of(catalog, [0, 1], [0.6, 0.2])
    prefs = Preferences([0.5, -1, 0.25], [0.3, 0.0, 0.4])  # x=1, x=2, y=1
    p, u = item_scores(space, prefs)
    # similarities scale to 1 and 0; (1 + 1)(0.5 + 0.25) and (1 + 0)(-1); 2 sqrt(0.09 + 0.16)
    assert p.tolist() == [1.5, -1] and np.allclose(u, [1.0, 0])
    assert np.allclose(item_scores(space, prefs, "sum")[1], [1.4, 0])
    assert np.allclose(item_scores(space, prefs, "rms")[1], [1 / 2**0.5, 0])


def test_pure_and_deterministic():
    space = make_space(3)
    prefs = make_state(space, 3)
    before = [array.copy() for array in (prefs.p, prefs.u, space.flat, space.similarity)]
    first, second = decide(space, prefs), decide(space, prefs)
    assert first == second and json_dumps(first.explanation) == json_dumps(second.explanation)
    assert all(np.array_equal(old, new) for old, new in zip(before, (prefs.p, prefs.u, space.flat, space.similarity)))
    rng = np.random.default_rng(0)
    decide(space, prefs, PolicyConfig(), rng)  # a deterministic policy leaves the generator alone
    assert rng.random() == np.random.default_rng(0).random()


def test_order_of_the_catalogue_does_not_matter():
    "Another order of items in the catalogue file gives the same items and the same question."
    rng = np.random.default_rng(5)
    items = [Item(f"{row:03}", f"item {row}", {f"a{j}": f"v{rng.integers(4)}" for j in range(6) if rng.random() < 0.7})
             for row in range(30)]
    cosine = np.linspace(1, 0, 30)
    wanted = None
    for order in (np.arange(30), rng.permutation(30)):
        catalog = Catalog("made", [items[row] for row in order])
        rows = np.argsort(order)  # the ranking by similarity stays the same
        space = Space.of(catalog, rows, cosine)
        liked = space.pair(space.attribute("a0"), "v1")
        prefs = prefer(space, Preferences.start(space), space.attribute("a0"), liked=[liked])
        decision = decide(space, prefs)
        found = [space.ids[row] for row in decision.recommend], [space.attributes[j] for j in decision.question.attributes]
        wanted = wanted or found
        assert found == wanted


def test_never_repeats_itself():
    "Asked until nothing is left: no attribute twice, no item twice, and every item is shown in the end."
    space = make_space(11, n=20, width=6)
    prefs, asked, shown = Preferences.start(space), [], []
    for _ in range(60):
        decision = decide(space, prefs)
        if not decision.recommend and decision.question is None:
            break
        if decision.question and decision.question.kind != "items":
            asked += decision.question.attributes
            for j in decision.question.attributes:
                prefs = prefer(space, prefs, j, liked=[space.pairs(j)[0]])
        shown += decision.recommend
        prefs = prefs.after_asking(decision.question.attributes if decision.question else ()).after_showing(decision.recommend)
    assert len(asked) == len(set(asked)) and len(shown) == len(set(shown)) and set(shown) == set(range(20))
    assert decision.explanation["why"].endswith("has been shown or ruled out.")


def test_settled_attributes_are_not_asked():
    space = make_space(2)
    prefs = Preferences.start(space)
    for j in range(len(space.attributes)):
        if j != 4:
            prefs = indifferent(space, prefs, j)  # volunteered, never asked
    assert decide(space, prefs).question.attributes == (4,)


def test_indifference_and_ignorance_differ():
    space = make_space(8)
    unknown = Preferences.start(space)
    settled = indifferent(space, unknown, 0)
    assert np.array_equal(item_scores(space, unknown)[0], item_scores(space, settled)[0])
    assert (item_scores(space, settled)[1] <= item_scores(space, unknown)[1]).all()
    assert 0 not in decide(space, settled).question.attributes


def test_recommends_exactly_up_to_m():
    "m items that may be the best are shown, m + 1 are not."
    p, u = np.zeros(9), np.r_[np.ones(4), np.full(5, 0.1)]
    assert len(top_set(p, u, np.arange(9), 0.2)) == 4
    items = [Item(f"{row}", "x", {"a": f"v{row}", "b": f"w{row % 2}", "c": "same"}) for row in range(9)]
    catalog = Catalog("row", items)
    space = Space.of(catalog, range(9), np.ones(9))
    prefs = Preferences.start(space).put(range(space.n_pairs), 0, 0)
    for count in (4, 5):
        high = [space.pair(0, f"v{row}") for row in range(count)]
        state = prefs.put([space.pair(0, f"v{row}") for row in range(9)], -1.0).put(high, 1.0)
        state = state.put([space.pair(1, "w0"), space.pair(1, "w1")], 0, 0.01)
        decision = decide(space, state, PolicyConfig(item_questions=False))
        assert (len(decision.recommend) > 0) == (count == 4) and decision.explanation["top_set"] == count
        assert decision.recommend == ((0, 1, 2, 3) if count == 4 else ())


@pytest.mark.parametrize("size, kind", [(4, "attribute"), (5, "items"), (8, "items"), (9, "attribute")])
def test_item_questions_only_between_m_and_2m(size, kind):
    equal = {f"b{j}": "same" for j in range(5)}
    catalog = Catalog("row", [Item(f"{row}", "x", {"a": f"v{row}", **equal}) for row in range(size)])
    space = Space.of(catalog, range(size), np.linspace(1, 0.9, size))
    decision = decide(space, Preferences.start(space), PolicyConfig(scope="top_set", named_values=0))
    assert decision.explanation["top_set"] == size and decision.question.kind == kind
    assert bool(decision.recommend) == (size == 4)


def test_item_question_needs_a_small_difference():
    rng = np.random.default_rng(0)
    items = [Item(f"{row}", "x", {f"a{j}": f"v{rng.integers(50)}" for j in range(6)}) for row in range(6)]
    space = Space.of(Catalog("far", items), range(6), np.ones(6))
    assert decide(space, Preferences.start(space)).question.kind == "attribute"
    assert decide(space, Preferences.start(space), PolicyConfig(item_differences=6)).question.items == (0, 1)


# The documented results of bad or odd catalogues


def test_catalogue_without_attributes_shows_the_best_fits():
    space = Space.of(Catalog("bare", [Item(str(row), "x", {}) for row in range(6)]), range(6), np.linspace(1, 0, 6))
    decision = decide(space, Preferences.start(space))
    assert decision.recommend == (0, 1, 2, 3) and decision.question is None and decision.explanation["top_set"] == 6


def test_all_items_equal_are_shown_in_order():
    space = Space.of(Catalog("same", [Item(str(row), "x", {"a": "1", "b": "2"}) for row in range(10)]), range(10), np.ones(10))
    prefs = Preferences.start(space)
    seen = []
    for _ in range(4):
        decision = decide(space, prefs)
        seen += decision.recommend
        assert decision.question is None
        prefs = prefs.after_showing(decision.recommend)
    assert seen == list(range(10)) and decision.recommend == ()


def test_one_item_is_recommended():
    space = Space.of(Catalog("one", [Item("a", "x", {"a": "1"})]), [0], [0.3])
    decision = decide(space, Preferences.start(space))
    assert decision.recommend == (0,) and decision.question is None


def test_one_attribute_only():
    space = Space.of(Catalog("thin", [Item(str(row), "x", {"a": f"{row % 3}"}) for row in range(9)]), range(9), np.ones(9))
    decision = decide(space, Preferences.start(space), PolicyConfig(item_questions=False))
    assert decision.recommend == () and decision.question.attributes == (0,)


def test_bad_input_is_refused():
    space = make_space(0)
    with pytest.raises(CdrError, match="different sessions"):
        decide(space, Preferences.start(make_space(1, kinds=9)))
    with pytest.raises(CdrError, match="generator"):
        decide(space, Preferences.start(space), PolicyConfig(timing="random"))
    with pytest.raises(CdrError, match="uncertainty"):
        PolicyConfig(uncertainty="product")
    for bad in ({"m": 0}, {"tau": -0.1}, {"tau": math.nan}, {"p_recommend": 2}, {"attributes_per_question": 0},
                {"m": 2.5}, {"m": True}, {"m": "4"}, {"tau": "a"}, {"named_values": None}):
        with pytest.raises(CdrError):
            PolicyConfig(**bad)
    with pytest.raises(CdrError):
        Preferences([0.0, math.nan], [1.0, 1.0])
    with pytest.raises(CdrError):
        Preferences([0.0], [1.0, 1.0])


def test_random_timing_recommends_as_often_as_asked():
    space = make_space(4)
    prefs, rng = Preferences.start(space), np.random.default_rng(1)
    shown = [bool(decide(space, prefs, PolicyConfig(timing="random"), rng).recommend) for _ in range(2000)]
    assert abs(np.mean(shown) - 0.26) < 0.03  # three standard deviations


def test_explanation_says_what_happened():
    space = make_space(9)
    decision = decide(space, make_state(space, 9))
    told = decision.explanation
    assert set(told) == {"top_set", "in_race", "recommended", "items", "attributes", "why", "why_question"}
    p, u = item_scores(space, make_state(space, 9))
    first = told["items"][0]
    row = space.ids.index(first["id"])
    assert math.isclose(first["low"], p[row] - u[row], abs_tol=1e-6) and first["in_top_set"]
    assert all(abs(entry["ace"] * entry["delta"] - entry["informativeness"]) < 1e-3 for entry in told["attributes"])
    assert told["why"] and told["why_question"]


def test_fast_enough():
    space = make_space(1, n=200, width=50, missing=0.5, kinds=25)
    prefs = make_state(space, 1)
    decide(space, prefs)
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        decide(space, prefs)
        best = min(best, time.perf_counter() - start)
    assert best < 0.005
