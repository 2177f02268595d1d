"""Measures of grounding, thresholds, the null-positive rank test and costs: cases, brute force, reference libraries."""
import itertools
import json
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_lib.core.config import CdrError, json_dumps
from cdr_lib.core.conversation import Conversation
from cdr_lib.evaluation.metrics import score_matrix
from cdr_lib.evaluation.significance import bootstrap_ci
from cdr_lib.pkicr.cost import (
    ARCHITECTURES, COST_COLUMNS, Architecture, TurnTokens, bi_texts, concatenated, cost_table, cross_pairs, time_method,
)
from cdr_lib.pkicr.measure import (
    OBJECTIVES, PERSONA_MEASURES, Ragged, calibrate, choose_personas, flags_of, interval, knowledge_accuracy,
    persona_measures, persona_table, places, resampled_ratios, threshold_sweep,
)
from cdr_lib.pkicr.nullpos import (
    NRT_MEASURES, READINGS, adjusted_ranks, compare, compare_measures, from_run, null_positive_test, rank_example,
    rank_null,
)
from cdr_lib.reporting.published import beside_printed, load_published, verdict
from cdr_lib.retrieval.rerank import rerank
from cdr_lib.retrieval.run import Run, read_run, write_run
from cdr_lib.retrieval.segment import segment

pytestmark = pytest.mark.filterwarnings("error")


@st.composite
def graded(draw, max_turns=6, coarse=True):
    """Scores with many ties, gold places (some turns unlabelled) and null scores of a few turns."""
    turns = draw(st.integers(1, max_turns))
    number = st.integers(-3, 3).map(float) if coarse else st.floats(-1e6, 1e6)
    scores, gold, null = [], [], []
    for _ in range(turns):
        row = draw(st.lists(number, max_size=6))
        scores.append(row)
        chosen = draw(st.none() | st.sets(st.integers(0, len(row) - 1)) if row else st.just(set()))
        gold.append(None if chosen is None else tuple(sorted(chosen)))
        null.append(draw(number))
    return scores, gold, null


# -- PKI-02: accuracy over flags, turns without a persona --------------------------------------------------------------

GOLD = [[0, 0, 0, 0, 0], [1, 0, 0, 1, 0], [0, 0, 1, 0, 0]]
NEVER = [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
MODEL = [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 1, 0, 0]]


@pytest.mark.parametrize("predicted, expected", [
    (NEVER, {"flag_accuracy": 0.8, "exact_match": 0.333333, "micro_recall": 0.0, "micro_f1": 0.0}),
    (MODEL, {"flag_accuracy": 0.933333, "exact_match": 0.666667, "micro_precision": 1.0, "micro_recall": 0.666667,
             "micro_f1": 0.8}),
])
def test_PKI_02_never_choosing_is_seen_for_what_it_is(predicted, expected):
    found = persona_measures(places(GOLD), places(predicted), 5)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert found["never_flag_accuracy"] == pytest.approx(0.8)
    assert (found["turns_without_persona"], found["turns_with_several"]) == (1, 1)


def test_PKI_02_the_definition_stands_beside_the_number_and_nothing_is_nan():
    found = persona_measures(places(GOLD), places(NEVER), 5, dialogues=["a", "b", "c"])
    table = persona_table(found)
    assert table["measure"].tolist() == list(PERSONA_MEASURES)
    assert (table["definition"].str.len() > 20).all()
    assert found["micro_precision"] is None and found["undefined"] == {"micro_precision": "no persona was chosen"}
    json.loads(json_dumps(found))  # strict: NaN would be refused


@pytest.mark.parametrize("gold, predicted, undefined", [
    ([(), ()], [(), ()], {"micro_precision", "micro_recall", "micro_f1"}),
    ([(), ()], [(0,), ()], {"micro_recall"}),
    ([None, None], [(), ()], set(PERSONA_MEASURES)),
    ([], [], set(PERSONA_MEASURES)),
])
def test_PKI_02_undefined_ratios_are_none_with_a_reason(gold, predicted, undefined):
    found = persona_measures(gold, predicted, 5, dialogues=[str(turn) for turn in range(len(gold))], n_boot=50)
    assert set(found["undefined"]) == undefined == {name for name in PERSONA_MEASURES if found[name] is None}
    assert all(found["undefined"].values())
    assert all(found["intervals"][name] is None for name in undefined)


@pytest.mark.parametrize("seed", range(3))
def test_PKI_02_as_scikit_learn(seed):
    from sklearn.metrics import accuracy_score, precision_recall_fscore_support

    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 8, 200)
    gold, predicted = ([tuple(np.flatnonzero(rng.random(size) < share).tolist()) for size in sizes]
                       for share in (0.15, 0.2))
    y_true, y_pred = (np.concatenate(flags_of(rows, sizes)) for rows in (gold, predicted))
    precision, recall, f1, _ = precision_recall_fscore_support(y_true, y_pred, average="binary")
    found = persona_measures(gold, predicted, sizes)
    assert found["flag_accuracy"] == pytest.approx(accuracy_score(y_true, y_pred))
    assert [found[f"micro_{name}"] for name in ("precision", "recall", "f1")] == pytest.approx([precision, recall, f1])
    assert found["exact_match"] == pytest.approx(np.mean([a == b for a, b in zip(gold, predicted)]))
    assert found["never_flag_accuracy"] == pytest.approx(accuracy_score(y_true, np.zeros_like(y_true)))


def test_PKI_02_on_the_shape_of_focus_never_choosing_gets_the_printed_baseline():
    # 86.86 % of flags are right for never choosing when 0.657 personas are used per turn of five
    gold = [(0,)] * 557 + [(1, 3)] * 50 + [()] * 393
    assert persona_measures(gold, [()] * 1000, 5)["flag_accuracy"] == pytest.approx(0.8686)


@pytest.mark.parametrize("gold, predicted, sizes, message", [
    ([(5,)], [()], 5, "none at place 5"),
    ([(-1,)], [()], 5, "None says that a turn has no labels"),
    ([(0, 0)], [()], 5, "stands twice"),
    (GOLD, [(), (), ()], 5, r"use places\(flags\)"),
    ([(True, False)], [()], 2, r"use places\(flags\)"),
    ([(0.0,)], [()], 5, "places are whole numbers"),
    ([("0",)], [()], 5, "places are whole numbers"),
    ([3], [()], 5, "one sequence of places"),
    ([()], [None], 5, r"choosing no persona is \(\)"),
    ([()], [(7,)], 5, "chosen personas: turn 0 has 5 candidates"),
    ([(), ()], [()], 5, "1 turns"),
    ([(), ()], [(), ()], [5], "one number of candidates"),
    ([()], [()], [-5], "cannot have -5"),
])
def test_PKI_02_bad_labels_are_named(gold, predicted, sizes, message):
    with pytest.raises(CdrError, match=message):
        persona_measures(gold, predicted, sizes)


# -- knowledge ---------------------------------------------------------------------------------------------------------


def test_knowledge_accuracy_counts_what_cannot_be_right_or_wrong_apart():
    found = knowledge_accuracy([(3,), (0, 2), (1,), (), None], [3, 2, -1, 0, 0])
    assert found == {"value": 2 / 3, "n": 3, "correct": 2, "not_chosen": 1, "without_gold": 1, "unlabelled": 1}
    assert knowledge_accuracy([], [])["value"] is None
    assert knowledge_accuracy([(), None], [0, 0], dialogues=["a", "b"]) == {
        "value": None, "n": 0, "correct": 0, "not_chosen": 0, "without_gold": 1, "unlabelled": 1, "low": None, "high": None}


@pytest.mark.parametrize("gold, predicted, message", [
    ([(-1,)], [0], "None says"), ([0, 1], [0], "one choice per turn"), ([0], [0.5], "not float64"),
    ([0], [-2], "is no place"), ([0], ["a"], "not <U1"), ([[0.5]], [0], "whole numbers"),
])
def test_knowledge_accuracy_bad_input(gold, predicted, message):
    with pytest.raises(CdrError, match=message):
        knowledge_accuracy(gold, predicted)


# -- intervals ---------------------------------------------------------------------------------------------------------


def test_intervals_resample_dialogues_not_turns():
    rng = np.random.default_rng(1)
    right = rng.random((40, 5)) < rng.random((40, 1))
    draws = resampled_ratios(right.reshape(-1, 1), np.ones((200, 1)), np.repeat(np.arange(40), 5), seed=3)
    # dialogues of equal length: the same as the bootstrap of their means, with the same random stream
    assert interval(draws[:, 0], 40) == pytest.approx(bootstrap_ci(right.mean(axis=1), seed=3))


def test_intervals_equal_resampling_by_hand():
    rng = np.random.default_rng(0)
    above, below, names = rng.integers(0, 3, 30), rng.integers(0, 4, 30), rng.integers(0, 7, 30)
    draws = resampled_ratios(above[:, None], below[:, None], [f"d{name}" for name in names], n=200, seed=5)[:, 0]
    order = list(dict.fromkeys(names))
    picks = np.random.default_rng(5).integers(0, 7, size=(200, 7))
    for draw, pick in zip(draws, picks):
        turns = np.concatenate([np.flatnonzero(names == order[code]) for code in pick])
        assert draw == pytest.approx(above[turns].sum() / below[turns].sum())


def test_intervals_do_not_depend_on_names_or_company():
    gold = [(0,), (), (1,), ()] * 5
    chosen = [(0,), (), (), (1,)] * 5
    a = persona_measures(gold, chosen, 3, dialogues=[turn // 4 for turn in range(20)])
    b = persona_measures(gold, chosen, 3, dialogues=[f"dialogue {turn // 4}" for turn in range(20)])
    assert a["intervals"] == b["intervals"]
    for name, span in a["intervals"].items():
        assert span[0] <= a[name] <= span[1]
    with pytest.raises(CdrError, match="belongs to no dialogue"):
        resampled_ratios(np.ones((2, 1)), np.ones((2, 1)), ["a", None])
    with pytest.raises(CdrError, match="must be at least 1"):
        resampled_ratios(np.ones((2, 1)), np.ones((2, 1)), n=0)


# -- TRN-01: ties at a threshold ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scores, labels, accuracy, f1", [
    ([0.3, 0.3, 0.3], [1, 0, 0], 0.666667, 0.5),
    ([0.9, 0.4, 0.4, 0.1], [1, 1, 0, 0], 0.75, 0.8),
])
def test_TRN_01_ties_are_not_split(scores, labels, accuracy, f1):
    # as turns of one candidate, and as one turn that may choose any number
    for rows, gold, at_most in (([[score] for score in scores], places([[label] for label in labels]), 1),
                                ([scores], places([labels]), None)):
        for objective, expected in (("flag_accuracy", accuracy), ("f1", f1)):
            found = calibrate(rows, gold, objective, at_most)
            assert found.score == pytest.approx(expected, abs=1e-6)
            again = persona_measures(gold, found.apply(rows), [len(row) for row in rows])
            assert again[found.objective] == found.score


def test_TRN_01_the_best_threshold_may_lie_above_all_scores():
    found = calibrate([[0.3], [0.3], [0.3]], places([[1], [0], [0]]))
    assert found.never and found.value > 0.3
    for kind in (np.float32, np.float64):
        scores = np.array([[0.3], [0.1]], dtype=kind)
        found = calibrate(scores, [(), ()])
        assert found.never and not (scores >= found.value).any() and not (scores >= kind(found.value)).any()


@pytest.mark.parametrize("constant", [0.0, 1.0, -7.1, 1e-30, 3e38])
def test_TRN_01_a_constant_model_gets_no_credit(constant):
    gold = places([[1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]])
    found = calibrate(np.full((3, 5), constant), gold)
    # all or nothing: the first persona of each turn is right once in three, so choosing none is the best
    assert found.never and found.score == 13 / 15 and np.isfinite(found.value)


@settings(max_examples=150, deadline=None)
@given(graded(), st.sampled_from(OBJECTIVES), st.sampled_from([1, 2, None]))
def test_TRN_01_reapplied_thresholds_give_the_reported_figure(drawn, objective, at_most):
    scores, gold, _ = drawn
    usable = [turn for turn, row in enumerate(scores) if row and gold[turn] is not None]
    if not usable or (objective == "micro_f1" and not any(gold[turn] for turn in usable)):
        with pytest.raises(CdrError):
            calibrate(scores, gold, objective, at_most)
        return
    sizes = [len(row) for row in scores]
    found = calibrate(scores, gold, objective, at_most)
    assert persona_measures(gold, found.apply(scores), sizes)[objective] == found.score
    # no threshold at all is better
    every = sorted({value for row in scores for value in row})
    for value in [*every, every[-1] + 1, *(np.array(every) - 0.5)]:
        other = persona_measures(gold, choose_personas(scores, value, at_most), sizes)[objective]
        assert other <= found.score
    # in 32 bits the same personas are chosen
    narrow = [np.array(row, dtype=np.float32) for row in scores]
    assert found.apply(narrow) == found.apply(scores)


@settings(max_examples=100, deadline=None)
@given(graded(), st.sampled_from([1, 2, None]))
def test_sweep_is_exact(drawn, at_most):
    scores, gold, _ = drawn
    if not any(row and gold[turn] is not None for turn, row in enumerate(scores)):
        return
    sizes = [len(row) for row in scores]
    for row in threshold_sweep(scores, gold, [-9, -1, 0, 0.5, 1, 9], at_most).to_dict("records"):
        direct = persona_measures(gold, choose_personas(scores, row["threshold"], at_most), sizes)
        for name in ("flag_accuracy", "micro_precision", "micro_recall", "micro_f1", "exact_match"):
            assert row[name] == direct[name] or (direct[name] is None and np.isnan(row[name]))
        assert row["chosen"] == direct["chosen"]


def test_sweep_as_scikit_learn():
    from sklearn.metrics import precision_recall_curve

    rng = np.random.default_rng(0)
    scores = np.round(rng.random(300), 2)
    labels = rng.random(300) < scores
    precision, recall, thresholds = precision_recall_curve(labels, scores)
    sweep = threshold_sweep(scores[:, None], places(labels[:, None].astype(int)), thresholds)
    assert sweep["micro_precision"].to_numpy() == pytest.approx(precision[:-1])
    assert sweep["micro_recall"].to_numpy() == pytest.approx(recall[:-1])


@settings(max_examples=100, deadline=None)
@given(graded(), st.sampled_from([1, 2, None]), st.integers(-3, 3))
def test_choosing_is_the_arg_max_of_equation_7(drawn, at_most, threshold):
    scores, _, _ = drawn
    expected = []
    for row in scores:
        order = sorted(range(len(row)), key=lambda place: (-row[place], place))[:at_most]
        expected.append(tuple(sorted(place for place in order if row[place] >= threshold)))
    assert choose_personas(scores, threshold, at_most) == expected
    if at_most == 1:
        assert expected == [(int(np.argmax(row)),) if row and max(row) >= threshold else () for row in scores]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("call", [
    lambda rows: choose_personas(rows, 0.5), lambda rows: calibrate(rows, [(), ()]), lambda rows: rank_null(rows, [0, 0]),
    lambda rows: null_positive_test(rows, None, [0, 0]),
])
def test_scores_that_are_no_numbers_are_named(call, bad):
    for rows in ([[0.1], [0.2, bad]], [np.array([0.1]), np.array([0.2, bad])]):
        with pytest.raises(CdrError, match="candidate 1 of turn 1"):
            call(rows)
    with pytest.raises(CdrError, match="candidate 1 of turn 1"):
        call(Ragged(np.array([0.1, 0.2, bad]), np.array([0, 1, 3])))
    with pytest.raises(CdrError, match="the null score of turn 1"):
        rank_null([[0.1], [0.2]], [0.1, bad])


def test_a_table_lists_and_arrays_are_the_same():
    table = np.random.default_rng(0).random((50, 5))
    gold = [(turn % 5,) if turn % 2 else () for turn in range(50)]
    ways = table, table.tolist(), list(table), Ragged.make(table), iter(table.tolist())
    assert len({json.dumps([choose_personas(way, 0.7)]) for way in ways}) == 1
    found = calibrate(table, gold)
    assert found == calibrate(table.tolist(), gold)
    assert choose_personas(table, found) == choose_personas(table, found.value) == found.apply(table)


# -- TRN-02: what the first stage missed -------------------------------------------------------------------------------


class Prefers:
    name = "prefers"

    def __init__(self, first):
        self.first = first

    def score(self, pairs, batch_size=None, progress=True):
        return np.array([float(self.first in text) for _, text in pairs])


def test_TRN_02_a_reranker_is_scored_against_the_whole_gold_list():
    qrels = {"q": {"p1": 1, "p2": 1}}
    corpus = {name: Conversation.make(name, ("user", name)) for name in ("n1", "p1", "n2", "p2")}
    first = Run.from_dict({"q": {"n1": 3.0, "p1": 2.0, "n2": 1.0}})
    second = rerank(first, {"q": "?"}, segment(corpus, "session"), Prefers("p1"))
    assert second["q"][0][0] == "p1"
    measures = ("nDCG@10", "R@10", "RR@10")
    assert score_matrix(first, qrels, measures)[0] == pytest.approx([0.386853, 0.5, 0.5], abs=1e-6)
    assert score_matrix(second, qrels, measures)[0] == pytest.approx([0.613147, 0.5, 1.0], abs=1e-6)


def test_TRN_02_a_relevant_conversation_that_was_missed_counts_in_the_null_positive_test():
    qrels = {"q": {"p1": 1, "p2": 1}}
    shallow = Run.from_dict({"q": {"p1": 0.9, "n1": 0.2}})
    deep = Run.from_dict({"q": {"p1": 0.9, "n1": 0.2, "p2": 0.1}})
    for reading in READINGS:
        a, b = (from_run(run, qrels, null_scores={"q": 0.5}, reading=reading, n_boot=0) for run in (shallow, deep))
        assert a.measures == b.measures
    assert from_run(shallow, qrels, null_scores={"q": 0.5}, n_boot=0).ranks.r.tolist() == [-1]


# -- PKI-03: rank of the null-positive sample --------------------------------------------------------------------------


def test_PKI_03_one_tie_rule_and_ranks_from_one():
    ranks = rank_null([[0.7, 0.7, 0.2, 0.9, 0.1], [0.9, 0.4, 0.3, 0.2, 0.1]], [0.7, 0.5])
    assert (ranks.n_ranked[0], ranks.best[0], ranks.worst[0], ranks.mid[0]) == (6, 2, 4, 3.0)
    assert ranks.best[1] == ranks.worst[1] == ranks.mid[1] == 2
    assert ranks.ties.tolist() == [2, 0]


def test_PKI_03_any_order_of_the_personas():
    scores, null = [0.7, 0.7, 0.2, 0.9, 0.1], 0.7
    tests = [null_positive_test([list(order)], [[score == 0.9 for score in order]], [null], reading, n_boot=0).measures
             for order in itertools.permutations(scores) for reading in READINGS]
    assert all(found == tests[0] for found in tests)


@settings(max_examples=100, deadline=None)
@given(graded(), st.sampled_from(list(READINGS)), st.randoms(use_true_random=False))
def test_PKI_03_order_changes_nothing(drawn, reading, random):
    scores, gold, null = drawn
    labels = flags_of(gold, [len(row) for row in scores])
    before = null_positive_test(scores, labels, null, reading, n_boot=0)
    mixed = [random.sample(range(len(row)), len(row)) for row in scores]
    after = null_positive_test([[row[i] for i in order] for row, order in zip(scores, mixed)],
                               [None if row is None else [row[i] for i in order] for row, order in zip(labels, mixed)],
                               null, reading, n_boot=0)
    assert before.estimates == after.estimates
    assert before.histogram.equals(after.histogram)


def released_index(scores, null):
    """The released program's count: null appended last, stable sort by falling score, its index minus 1."""
    values = [*scores, null]
    order = sorted(range(len(values)), key=lambda place: -values[place])
    return order.index(len(scores)) - 1


@settings(max_examples=150, deadline=None)
@given(graded())
def test_PKI_03_ranks_as_sorting_lists(drawn):
    scores, gold, null = drawn
    ranks = rank_null(scores, null)
    index = adjusted_ranks(scores, None, null)
    assert index.r.tolist() == [released_index(row, value) for row, value in zip(scores, null)]
    for row, value, best, worst in zip(scores, null, ranks.best, ranks.worst):
        # the ranks that a sort gives if the sample is put at the front or at the end
        assert best == sorted([value, *row], reverse=True).index(value) + 1
        assert worst == released_index(row, value) + 2
    aware = adjusted_ranks(scores, flags_of(gold, [len(row) for row in scores]), null, "positive_aware")
    for turn, (row, value) in enumerate(zip(scores, null)):
        if aware.counted[turn]:
            assert aware.r[turn] == released_index(row, value) + 1 - len(gold[turn])
            above = {place for place, score in enumerate(row) if score >= value}
            assert aware.ideal[turn] == (above == set(gold[turn]))
    used = [turn for turn, row in enumerate(scores) if row and gold[turn] is not None]
    assert np.flatnonzero(aware.counted).tolist() == used
    assert aware.ties == sum(value in row for turn, (row, value) in enumerate(zip(scores, null)) if turn in used)


def paper(r, w):
    """Equations 9 to 13 from counts per rank."""
    n = {rank: int((r == rank).sum()) for rank in range(r.min(), r.max() + 1)}

    def mean(ranks, power=1, weight=lambda rank: 1):
        below = sum(weight(rank) * n[rank] for rank in ranks)
        return sum(weight(rank) * n[rank] * abs(rank) ** power for rank in ranks) / below if below else None

    return {"¬T": mean(n), "¬T+": mean([rank for rank in n if rank >= 0]), "¬T-": mean([rank for rank in n if rank <= 0]),
            "¬T²": mean(n, 2), "¬T_weighted": mean(n, 1, w.__getitem__)}


@pytest.mark.parametrize("seed, reading", list(itertools.product(range(3), READINGS)))
def test_non_triviality_as_in_the_equations(seed, reading):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 8, 150)
    scores = [np.round(rng.normal(size=size), 1) for size in sizes]
    labels = [(rng.random(size) < 0.25).astype(int) for size in sizes]
    null = np.round(rng.normal(size=150), 1)
    weights = dict(zip(range(-8, 9), rng.random(17)))
    found = null_positive_test(scores, labels, null, reading, weights=weights, n_boot=20)
    for scope in ("all", "with positive", "without positive"):
        r = found.ranks.r[found.ranks.scope(scope)]
        values = {row.measure: row.value for row in found.estimates if row.scope == scope}
        for name, expected in paper(r, weights).items():
            assert values[name] == (expected if expected is None else pytest.approx(expected)), (scope, name)
    histogram = found.histogram
    assert histogram["r"].tolist() == list(range(histogram["r"].min(), histogram["r"].max() + 1))
    assert histogram["n"].sum() == found.ranks.scope(found.headline).sum()
    assert (histogram["n_with_positive"] + histogram["n_without_positive"]).sum() == 150
    assert histogram["share"].sum() == pytest.approx(1)


def test_default_weights_are_the_harmonic_mean_of_displaced_turns():
    five = np.tile([0.9, 0.7, 0.5, 0.3, 0.1], (3, 1))
    found = null_positive_test(five, [[1, 0, 0, 0, 0]] * 3, [0.6, 0.4, 0.2], n_boot=0)  # r = 1, 2, 3
    assert found["¬T_weighted"] == pytest.approx(3 / (1 + 1 / 2 + 1 / 3))


def test_zero_accuracy_is_choosing_the_best_at_any_score():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(300, 5)) - 3  # logits: a literal threshold of 0 would choose almost none
    gold = [(int(place),) if place < 5 else () for place in rng.integers(0, 9, 300)]
    found = null_positive_test(scores, flags_of(gold, [5] * 300), rng.normal(size=300), n_boot=0)
    chosen = choose_personas(scores, -np.inf)
    assert found["0-Acc"] == persona_measures(gold, chosen, 5)["flag_accuracy"]
    hits = [pick == row for pick, row in zip(chosen, gold) if row]
    assert found["top-1"] == pytest.approx(np.mean(hits))


@pytest.mark.parametrize("make", [
    lambda: null_positive_test([], [], []),
    lambda: null_positive_test([[]], [[]], [0.5]),
    lambda: null_positive_test([[0.1]], [None], [0.5], "positive_aware"),
    lambda: null_positive_test(np.zeros((0, 5)), np.zeros((0, 5)), []),
])
def test_nothing_to_count_is_said(make):
    found = make()
    assert set(found.measures) == set(NRT_MEASURES) and set(found.measures.values()) == {None}
    assert all(found.undefined.values()) and found.histogram["n"].sum() == 0
    assert json.loads(json_dumps(found.to_dict())) and "<table>" in found._repr_html_() and repr(found)
    assert len(compare(found, found)) == 1 and compare_measures(found, found, n_boot=10)["delta"].isna().all()


def test_turns_without_a_positive_stand_apart():
    scores, labels, null = [[0.9, 0.1]] * 4, [[1, 0], [0, 0], [1, 1], None], [0.5] * 4
    found = null_positive_test(scores, labels, null, "positive_aware", n_boot=0)
    n = {row.scope: row.n for row in found.estimates}
    assert n == {"all": 3, "with positive": 2, "without positive": 1}
    assert found.headline == "with positive" and found["¬T"] == 0.5  # r = 0 and -1
    assert [row.value for row in found.estimates if (row.scope, row.measure) == ("without positive", "¬T")] == [1.0]
    assert found.ranks.left_out == {"unlabelled": 1, "without candidates": 0}
    assert "1 unlabelled" in found._repr_html_()


def test_a_candidate_equal_to_the_null_sample_is_a_tie_that_is_counted():
    found = null_positive_test([[0.8, 0.5, 0.1]], [[1, 0, 0]], [0.5], n_boot=0)
    assert found.ranks.ties == 1 and found.ranks.r.tolist() == [1] and found["ideal"] == 0


def test_change_between_two_models_is_paired():
    rng = np.random.default_rng(0)
    labels = np.eye(5, dtype=int)[rng.integers(0, 5, 400)]
    noise, null = rng.normal(size=(400, 5)), rng.normal(size=400) * 0.5 + 0.8
    names = np.repeat(np.arange(80), 5)
    before, after = (null_positive_test(noise + gain * labels, labels, null + gain / 4, dialogues=names, n_boot=300)
                     for gain in (0.5, 3.0))
    change = compare(before, after)
    assert change["delta"].sum() == 0 and change["n_before"].sum() == change["n_after"].sum() == 400
    some = change["n_before"] > 0
    assert change.loc[some, "ratio"].to_numpy() == pytest.approx(
        (100 * change["delta"] / change["n_before"].where(some))[some].to_numpy())
    moved = compare_measures(before, after, n_boot=500).set_index("measure")
    assert moved.loc["¬T", "delta"] == pytest.approx(after["¬T"] - before["¬T"])
    assert moved.loc["¬T", "high"] < 0 and moved.loc["0-Acc", "low"] > 0
    # the interval of a difference is narrower than the two intervals laid end to end
    spans = [next(row for row in test.estimates if row[:2] == ("all", "¬T")) for test in (before, after)]
    assert moved.loc["¬T", "high"] - moved.loc["¬T", "low"] < sum(row.high - row.low for row in spans)
    assert (compare_measures(before, before, n_boot=50)[["delta", "low", "high"]] == 0).all(axis=None)
    with pytest.raises(CdrError, match="not of the same turns"):
        compare(before, null_positive_test(noise, 1 - labels, null, n_boot=0))
    with pytest.raises(CdrError, match="reads"):
        compare(before, null_positive_test(noise, labels, null, "positive_aware", n_boot=0))


def test_the_test_works_on_runs_in_memory_and_from_files(tmp_path):
    rng = np.random.default_rng(0)
    run = Run.from_dict({f"q{q}": {f"c{c}": rng.random() for c in range(20)} for q in range(10)}, name="<i>run</i>")
    qrels = {f"q{q}": {f"c{q}": 1, f"c{q + 5}": 2, "c1": 0} for q in range(10)}
    null = {query: 0.5 for query in run.queries}
    found = from_run(run, qrels, null, n_boot=100)
    assert "<i>run" not in found._repr_html_()
    path = write_run(Run.from_dict(run.to_dict(), name="run"), tmp_path / "run.trec")
    again = from_run(read_run(path), qrels, null, n_boot=100)
    assert again.estimates == found.estimates
    # the sample as a conversation of the run, wherever its id stands in the alphabet
    for name in ("aaa", "zzz"):
        inside = Run.from_dict({query: hits | {name: 0.5} for query, hits in run.to_dict().items()})
        assert from_run(inside, qrels, null_id=name, n_boot=100).estimates == found.estimates


def test_rank_example_shows_the_sample_in_its_place():
    shown = rank_example(["a", "b", "c"], [0, 1, 0], [0.5, 0.9, 0.5], 0.5)
    assert shown["kind"].tolist() == ["positive", "negative", "negative", "null-positive"]  # it loses ties
    assert shown.loc[shown["kind"] == "null-positive", "adjusted"].item() == adjusted_ranks(
        [[0.5, 0.9, 0.5]], [[0, 1, 0]], [0.5], "positive_aware").r[0]
    with pytest.raises(CdrError, match="as many"):
        rank_example(["a"], [0, 1], [0.5], 0.5)


# -- speed -------------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_turns_take_no_loop():
    import time

    rng = np.random.default_rng(0)
    scores, labels = rng.random((100_000, 5)), rng.random((100_000, 5)) < 0.13
    gold = places(labels[:1000].astype(int).tolist()) * 100
    for call in (lambda: threshold_sweep(scores, gold), lambda: calibrate(scores, gold),
                 lambda: persona_measures(gold, gold, 5), lambda: choose_personas(scores, 0.8),
                 lambda: null_positive_test(scores, labels, scores[:, 0], n_boot=0)):
        start = time.process_time()
        call()
        assert time.process_time() - start < 2  # about 0.2 on an idle core


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MiniLM-L6", "MiniLM-L12", "DistilBERT", "BERT-base", "BART-base encoder",
                                  "BART-large encoder"])
def test_parameters_are_those_of_the_real_classes(name):
    import torch
    from transformers import BartConfig, BertConfig, BertModel, DistilBertConfig, DistilBertModel
    from transformers.models.bart.modeling_bart import BartEncoder

    shape = ARCHITECTURES[name]
    with torch.device("meta"):
        if name.startswith("BART"):
            large = "large" in name
            config = BartConfig(vocab_size=50_265) if large else BartConfig(
                vocab_size=50_265, d_model=768, encoder_layers=6, encoder_ffn_dim=3072, encoder_attention_heads=12)
            model = BartEncoder(config)
        elif name == "DistilBERT":
            config = DistilBertConfig()
            model = DistilBertModel(config)
        else:
            small = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": shape.layers}
            config = BertConfig(**(small if "MiniLM" in name else {}))
            model = BertModel(config, add_pooling_layer=False)
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    assert Architecture.from_config(config, name) == shape


def test_operations_are_those_that_torch_counts():
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import BertConfig, BertModel

    shape = Architecture("small", 3, 32, 128, 4, 100, 64, 2, limit=64)
    config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                        intermediate_size=128, max_position_embeddings=64, attn_implementation="eager")
    model = BertModel(config, add_pooling_layer=False).eval()
    for batch, length in ((1, 64), (5, 17)):
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            model(input_ids=torch.ones(batch, length, dtype=torch.long))
        assert counter.get_total_flops() == batch * shape.flops([length])[0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), max_size=4), st.lists(st.integers(1, 9), max_size=4)),
                min_size=1, max_size=5))
def test_inputs_as_written_out(turns):
    tokens = TurnTokens(np.array([d for d, _, _ in turns]), Ragged.make([p for _, p, _ in turns]),
                        Ragged.make([k for _, _, k in turns]))
    shape = Architecture("s", 1, 4, 8, 2, 10, 16, limit=16)
    median = [sorted(k, reverse=True)[len(k) // 2] if k else 0 for _, _, k in turns]
    knowledge, persona = (reads.wanted.tolist() for reads in cross_pairs(tokens, shape).reads)
    assert knowledge == [d + a + b + 3 for d, p, k in turns if p or k for a in p or [0] for b in k or [0]]
    assert persona == [d + a + m + 3 for (d, p, _), m in zip(turns, median) for a in p]
    texts = sorted(bi_texts(tokens, shape).reads[0].wanted.tolist())
    assert texts == sorted([d + a + 2 for d, p, k in turns if p or k for a in p or [0]] + [b + 2 for _, _, k in turns for b in k])
    both = concatenated(tokens, shape)
    assert both.reads[1].wanted.tolist() == [sum(p) + sum(k) + 2 for _, p, k in turns]
    table = cost_table([cross_pairs(tokens, shape), both])
    assert table["tokens_cut"].iloc[1] == pytest.approx(
        sum(max(0, sum(p) + sum(k) + 2 - 16) for _, p, k in turns) / len(turns))
    assert not table.isna().any(axis=None) or (table["gflop"] == 0).any()


def test_tokens_are_the_models_own():
    from transformers import AutoTokenizer

    from cdr_lib.core.conversation import Turn
    from cdr_lib.core.models import packaged_minilm
    from cdr_lib.pkicr.cost import token_counter
    from cdr_lib.pkicr.focus import GroundedTurn

    tokenizer = AutoTokenizer.from_pretrained(packaged_minilm())
    turns = [GroundedTurn("D", 1, (Turn("user", "Hi!"), Turn("assistant", "Hello."), Turn("user", "Where is this tower?")),
                          ("I like towers.", "I ski."), ("It stands in Paris.", "word " * 600)),
             GroundedTurn("D", 2, (Turn("user", "Why?"),), (), ("It stands in Paris.",))]
    tokens = TurnTokens.of(turns, token_counter(tokenizer))
    assert tokens.dialogue.tolist() == [5, 2]
    assert tokens.personas.values.tolist() == [4, 3] and tokens.knowledge.values.tolist() == [5, 600, 5]
    pairs = cross_pairs(tokens, ARCHITECTURES["MiniLM-L6"]).reads[0]
    real = tokenizer("I like towers. Where is this tower?", "It stands in Paris.")["input_ids"]
    assert pairs.wanted[0] == len(real) and pairs.lengths.max() == 512
    assert TurnTokens.of(turns, token_counter(tokenizer), history=3).dialogue.tolist() == [9, 2]


def test_time_is_measured_and_named():
    tokens = TurnTokens(np.array([5, 9]), Ragged.make(np.full((2, 5), 8)), Ragged.make(np.full((2, 10), 30)))
    shape = Architecture("small", 1, 32, 64, 2, 100, 64, limit=64)
    method = cross_pairs(tokens, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, at import
        seconds = time_method(method, device="cpu")
    table = cost_table([method, concatenated(tokens, shape)], {method.name: seconds})
    assert set(table.columns) == set(COST_COLUMNS)
    assert table["seconds"].iloc[0] == seconds > 0 and pd.isna(table["seconds"].iloc[1])


# -- what the paper prints ---------------------------------------------------------------------------------------------


def test_printed_numbers_are_read_and_the_shapes_agree_with_them():
    printed = load_published("pkicr")
    accuracies = {key: number.printed for key, number in printed.items() if key.startswith("persona_") and number.measure}
    assert list(accuracies.values()) == ["86.86", "86.86", "71.82", "87.75", "86.78", "75.54", "78.64", "86.75", "89.12",
                                         "74.76", "77.90", "83.83", "85.55", "91.57"]  # Table H2 from top to bottom
    for key, name in (("minilm_parameters", "MiniLM-L12"), ("tas_b_parameters", "DistilBERT"),
                      ("bert_base_parameters", "BERT-base")):
        number = printed[key]
        assert verdict(ARCHITECTURES[name].parameters / 1e6, number.value, number.tolerance) == "OK", key
    assert ARCHITECTURES["MiniLM-L12"].layers == printed["minilm_layers"].value
    table = beside_printed({"persona_baseline": 86.9, "persona_pdk_cross_tuned": None}, paper="pkicr")
    assert [row["verdict"] for row in table.verdicts] == ["OK", "not comparable"]
