"""Evaluation against reference libraries and hand values, its invariants, its tables and files, and bad input."""
import html.parser
import json

import ir_measures
import numpy as np
import pandas as pd
import pytest
import pytrec_eval
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import Conversation
from cdr_lib.evaluation.evaluate import Experiment, experiment
from cdr_lib.evaluation.failures import (
    KINDS,
    NO_RESULT,
    UNLABELLED,
    area_loss,
    best_unit,
    compare,
    count_failures,
    find_failures,
    pick_examples,
)
from cdr_lib.evaluation.metrics import MEASURES, BadQrels, UnknownMeasure, parse_measure, score_matrix, score_run
from cdr_lib.evaluation.significance import bootstrap_ci, holm, paired_randomisation
from cdr_lib.retrieval.run import Run, write_run
from cdr_lib.retrieval.segment import segment

# -- metrics ------------------------------------------------------------------------------------------------------------

TREC = {"Success": "success", "P": "P", "R": "recall", "nDCG": "ndcg_cut"}


def random_benchmark(seed, n_queries=40, n_conversations=120, depth=60, levels=6, highest=3):
    """Graded judgements (some negative) and raw results with many ties; every seventh query has no result."""
    rng = np.random.default_rng(seed)
    # ids in which text order, byte order and order of creation differ
    corpus = [f"{mark}{i}" for i, mark in zip(rng.permutation(n_conversations), ["c", "C", "é", "漢", "😀", "z-"] * n_conversations)]
    qrels, results = {}, {}
    for query in (f"q{i}" for i in range(n_queries)):
        judged = rng.choice(corpus, 25, replace=False)
        qrels[query] = {str(name): int(grade) for name, grade in zip(judged, rng.integers(-1, highest + 1, 25))}
        qrels[query][str(judged[0])] = highest
        found = rng.choice(corpus, depth, replace=False)
        results[query] = {str(name): float(score) / 3 for name, score in zip(found, rng.integers(0, levels, depth))}
    for query in list(results)[::7]:
        del results[query]
    return qrels, results


@pytest.mark.parametrize("seed", range(6))
def test_values_are_those_of_trec_eval_on_runs_full_of_ties(seed):
    qrels, results = random_benchmark(seed, levels=[1, 2, 6, 6, 50, 1000][seed])
    cutoffs = (1, 3, 5, 10, 20, 100)
    measures = [f"{family}@{k}" for family in TREC for k in cutoffs] + ["nDCG", "RR"]
    ours = score_matrix(Run.from_dict(results), qrels, measures)
    wanted = {f"{name}.{k}" for name in TREC.values() for k in cutoffs} | {"ndcg", "recip_rank"}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, wanted).evaluate(results)
    for column, measure in enumerate(measures):
        family, k = parse_measure(measure)
        key = {"nDCG": "ndcg", "RR": "recip_rank"}[measure] if k is None else f"{TREC[family]}_{k}"
        expected = [theirs[query][key] if query in theirs else 0 for query in qrels]
        np.testing.assert_allclose(ours[:, column], expected, atol=1e-6, err_msg=measure)


@pytest.mark.parametrize("seed", range(3))
def test_rr_with_a_cutoff_is_that_of_ir_measures_where_nothing_ties(seed):
    qrels, results = random_benchmark(seed)
    rng = np.random.default_rng(seed)
    results = {query: dict(zip(found, rng.permutation(len(found)).astype(float))) for query, found in results.items()}
    names = [f"RR@{k}" for k in (1, 2, 5, 10, 20)]
    measures = [ir_measures.parse_measure(name) for name in names]
    theirs = {(metric.query_id, str(metric.measure)): metric.value
              for metric in ir_measures.iter_calc(measures, qrels, results)}
    ours = score_run(Run.from_dict(results), qrels, names)
    for row in ours.itertuples():
        assert row.value == pytest.approx(theirs.get((row.query, row.measure), 0), abs=1e-9)


@pytest.mark.parametrize("family, gain", [("nDCG-exp", lambda grade: 2.0 ** grade - 1), ("nDCG-binary", lambda grade: 1.0)])
def test_gain_variants_against_the_formula(family, gain):
    qrels, results = random_benchmark(5, levels=1000)
    run = Run.from_dict(results)
    for k in (1, 10, 20):
        expected = []
        for query, judged in qrels.items():
            gains = {name: gain(grade) if grade > 0 else 0 for name, grade in judged.items()}
            ranking = [gains.get(name, 0) for name, _ in run[query]][:k] if query in results else []
            ideal = sorted(gains.values(), reverse=True)[:k]
            discount = 1 / np.log2(np.arange(2, k + 2))
            expected.append(np.dot(ranking, discount[:len(ranking)]) / np.dot(ideal, discount[:len(ideal)]))
        np.testing.assert_allclose(score_matrix(run, qrels, [f"{family}@{k}"])[:, 0], expected, atol=1e-9)


ids = st.text("abcdé漢", min_size=1, max_size=2)
hits = st.lists(st.tuples(ids, st.integers(0, 3).map(float)), max_size=12)
judgements = st.dictionaries(ids, st.integers(-1, 3), min_size=1, max_size=6).filter(lambda j: max(j.values()) > 0)


@settings(max_examples=150, deadline=None)
@given(hits, judgements, st.randoms())
def test_every_score_lies_in_0_to_1_and_ignores_the_order_of_results(found, judged, random):
    once = list(dict(reversed(found)).items())
    shuffled = random.sample(once, len(once))
    names = [*MEASURES, "nDCG", "nDCG-exp@5", "nDCG-binary@5", "RR"]
    first, second = (score_matrix(Run.from_dict({"q": results}), {"q": judged}, names) for results in (once, shuffled))
    assert (first == second).all() and (first >= 0).all() and (first <= 1 + 1e-12).all()
    assert score_matrix(Run.from_dict({"q": found}), {"q": judged}, names).max() <= 1 + 1e-12


def test_the_long_table_keeps_the_order_of_queries_and_measures():
    table = score_run(Run.from_dict({"b": {"x": 1.0}, "a": {"y": 1.0}}), {"b": {"x": 1}, "a": {"x": 1}}, ["RR", "P@1"])
    assert table.astype({"query": str, "measure": str}).values.tolist() == [
        ["b", "RR", 1.0], ["b", "P@1", 1.0], ["a", "RR", 0.0], ["a", "P@1", 0.0]]


@pytest.mark.parametrize("name", ["MAP", "ndcg@10", "nDCG@-1", "nDCG@010", "P", "Accuracy@1", "", " P@1", "P@1 ", 10])
def test_unknown_measures_name_the_known(name):
    with pytest.raises(UnknownMeasure, match="nDCG"):
        score_run(Run.from_dict({"q": {"a": 1.0}}), {"q": {"a": 1}}, [name])
    with pytest.raises(UnknownMeasure):
        score_run(Run.from_dict({"q": {"a": 1.0}}), {"q": {"a": 1}}, [])


@pytest.mark.parametrize("qrels, words", [
    ({}, "no judgements"),
    ({"q": {}}, "no relevant conversation"),
    ({"q": {"a": 0, "b": -1}}, "no relevant conversation"),
    ({1: {"a": 1}}, "'7' is not 7"),
    ({"q": {1: 1}}, "'7' is not 7"),
    ({"q": {"a\0": 1}}, "zero byte"),
    ({"q": {"a": 2 ** 31}}, "more than trec_eval can take"),
    ({"q": {"a": 2 ** 64}}, "more than trec_eval can take"),
])
def test_judgements_that_would_mislead_trec_eval_are_refused(qrels, words):
    with pytest.raises(BadQrels, match=words):
        score_run(Run.from_dict({"q": {"a": 1.0}}), qrels)


def test_numpy_grades_and_booleans_are_whole_numbers():
    run = Run.from_dict({"q": {"a": 1.0}})
    for grade in (np.int64(1), np.int8(1), True):
        assert score_run(run, {"q": {"a": grade}}, ["nDCG@1"]).value.tolist() == [1.0]


# -- significance -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [2, 3, 7, 12])
def test_small_samples_give_the_exact_p_value(size):
    rng = np.random.default_rng(size)
    a, b = rng.integers(0, 5, (2, size)) / 5  # with ties in the statistic
    theirs = scipy.stats.permutation_test((a, b), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples",
                                          vectorized=True, n_resamples=np.inf)
    assert paired_randomisation(a, b) == pytest.approx(theirs.pvalue, abs=1e-12)


def test_large_samples_agree_with_scipy_within_simulation_error():
    rng = np.random.default_rng(0)
    a = rng.beta(0.5, 0.5, 200)
    for shift in (0.0, 0.02, 0.05):
        b = np.clip(a + rng.normal(shift, 0.3, 200), 0, 1)
        theirs = scipy.stats.permutation_test((a, b), lambda x, y, axis: np.mean(x - y, axis=axis),
                                              permutation_type="samples", vectorized=True, n_resamples=20_000, rng=1)
        p = paired_randomisation(a, b, n=20_000)
        assert p == pytest.approx(theirs.pvalue, abs=4 * np.sqrt(p / 20_000) + 2e-4)


def test_the_p_value_is_b_plus_1_over_n_plus_1_and_two_sided():
    better, worse = np.linspace(0.5, 1, 50), np.linspace(0, 0.4, 50)
    assert paired_randomisation(better, worse, n=99) == paired_randomisation(worse, better, n=99) == 1 / 100


def test_columns_are_tested_as_if_alone_and_blocks_do_not_matter():
    rng = np.random.default_rng(2)
    a, b = rng.random((2, 3000, 3))  # 3000 queries: several blocks
    together = paired_randomisation(a, b, n=2000, seed=5)
    assert together.tolist() == [paired_randomisation(a[:, i], b[:, i], n=2000, seed=5) for i in range(3)]
    low, high = bootstrap_ci(a, n=2000, seed=5)
    alone = [bootstrap_ci(a[:, i], n=2000, seed=5) for i in range(3)]
    np.testing.assert_allclose(np.c_[low, high], alone, rtol=1e-12)


def test_a_seed_gives_the_same_numbers_and_global_state_is_untouched():
    a, b = np.random.default_rng(3).random((2, 100))
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    assert paired_randomisation(a, b, seed=1) == paired_randomisation(a, b, seed=1)
    assert bootstrap_ci(a, seed=1) == bootstrap_ci(a, seed=1)
    assert (np.random.get_state()[1] == before).all()


def test_bootstrap_agrees_with_scipy():
    scores = np.random.default_rng(4).beta(0.4, 0.9, 300)
    theirs = scipy.stats.bootstrap((scores,), np.mean, method="percentile", n_resamples=20_000, rng=0).confidence_interval
    assert bootstrap_ci(scores, n=20_000) == pytest.approx(tuple(theirs), abs=2e-3)


def test_bootstrap_covers_the_true_mean_as_often_as_it_says():
    rng = np.random.default_rng(5)
    intervals = bootstrap_ci(rng.random((80, 400)), n=1000)
    assert 0.90 < ((intervals[0] < 0.5) & (intervals[1] > 0.5)).mean() < 0.99


def test_one_query_has_no_interval_and_equal_scores_have_a_point():
    assert np.isnan(bootstrap_ci([0.7])).all() and np.isnan(bootstrap_ci([[0.7, 0.1]])).all()
    assert bootstrap_ci([0.5, 0.5, 0.5]) == (0.5, 0.5)


def test_holm_by_hand():
    # the textbook example 0.01, 0.04, 0.03, 0.005: 4*0.005, 3*0.01, 2*0.03, and 0.06 again since it may not fall
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.2]) == pytest.approx([0.2]) and holm([0.5, 0.5, 0.5]).tolist() == [1, 1, 1]
    assert holm([0.02, 0.02, 0.02]) == pytest.approx([0.06] * 3)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_monotone_and_between_raw_and_bonferroni(p):
    adjusted, raw = holm(p), np.array(p)
    assert (adjusted >= raw - 1e-15).all() and (adjusted <= np.minimum(raw * len(p), 1) + 1e-12).all()
    assert (np.diff(adjusted[np.argsort(raw, kind="stable")]) >= 0).all()


@pytest.mark.parametrize("call", [
    lambda: bootstrap_ci([]), lambda: bootstrap_ci([0.1, np.nan]), lambda: bootstrap_ci([0.1, 0.2], level=1),
    lambda: bootstrap_ci([0.1, 0.2], n=0), lambda: bootstrap_ci(np.zeros((2, 2, 2))),
    lambda: paired_randomisation([], []), lambda: paired_randomisation([0.1], [0.1, 0.2]),
    lambda: paired_randomisation([np.inf], [0.1]), lambda: holm([1.2]), lambda: holm([np.nan]), lambda: holm([[0.1]]),
])
def test_significance_refuses_what_it_cannot_use(call):
    with pytest.raises(CdrError):
        call()


# -- experiments --------------------------------------------------------------------------------------------------------

AREAS = ("t1", "t2", "t3")


@pytest.fixture(scope="module")
def bench():
    """Three systems (one at two granularities) on 60 queries in three areas."""
    rng = np.random.default_rng(7)
    corpus = [f"c{i:03}" for i in range(150)]
    areas = {f"q{i:02}": AREAS[i % 3] for i in range(60)}
    qrels = {query: {str(name): 1 for name in rng.choice(corpus, 8, replace=False)} for query in areas}

    def make(skill):
        return Run.from_dict({query: {name: float(score + skill * (name in qrels[query]))
                                      for name, score in zip(corpus, rng.random(len(corpus)))} for query in qrels}).top(30)

    systems = {"base": make(0.2), "model": {"turn": make(0.21), "session": make(0.6)}, "bad": make(-0.2)}
    return systems, qrels, areas


@pytest.fixture(scope="module")
def result(bench):
    systems, qrels, areas = bench
    return experiment(systems, qrels, areas=areas, baseline="base", resamples=2000, seed=3)


def test_the_per_query_table_holds_the_scores_of_each_run(bench, result):
    systems, qrels, areas = bench
    table = result.per_query
    assert list(table.columns) == ["system", "granularity", "query", "area", "measure", "value"]
    assert len(table) == 4 * 60 * 20
    assert (table["query"].astype(str).map(areas) == table.area.astype(str)).all()
    for (name, granularity), run in {("base", ""): systems["base"], ("model", "session"): systems["model"]["session"]}.items():
        part = table[(table.system == name) & (table.granularity == granularity)]
        expected = score_run(run, qrels).astype({"query": str, "measure": str}).set_index(["query", "measure"]).value
        found = part.astype({"query": str, "measure": str}).set_index(["query", "measure"]).value
        pd.testing.assert_series_equal(found.sort_index(), expected.sort_index(), check_names=False)


def test_means_and_intervals(result):
    table, summary, by_area = result.per_query, result.summary(), result.by_area()
    keys = ["system", "granularity", "measure"]
    means = table.groupby(keys, observed=True).value.mean()
    assert (summary.set_index(keys).value - means).abs().max() < 1e-12
    area_means = table.groupby([*keys, "area"], observed=True).value.mean()
    assert (by_area.set_index([*keys, "area"]).value - area_means).abs().max() < 1e-12
    assert (summary.low <= summary.value).all() and (summary.value <= summary.high).all()
    assert summary.complete.all() and (summary.n_queries == 60).all() and (by_area.n_queries == 20).all()
    one = table[(table.system == "base") & (table.measure == "nDCG@10")].value.to_numpy()
    row = summary[(summary.system == "base") & (summary.measure == "nDCG@10")].iloc[0]
    assert (row.low, row.high) == pytest.approx(bootstrap_ci(one, n=2000, seed=3))


def test_significance_is_the_paired_test_with_holm_per_measure(result):
    tests = result.significance()
    assert len(tests) == 3 * 20 and "base" not in set(tests.system)
    table = result.per_query[result.per_query.measure == "nDCG@10"]
    scores = {key: part.value.to_numpy() for key, part in table.groupby(["system", "granularity"], observed=True)}
    rows = tests[tests.measure == "nDCG@10"].set_index(["system", "granularity"])
    for key, row in rows.iterrows():
        delta = scores[key] - scores["base", ""]
        assert row.p == paired_randomisation(scores[key], scores["base", ""], n=2000, seed=3)
        assert row.difference == pytest.approx(delta.mean()) and row.value - row.baseline == pytest.approx(delta.mean())
        assert (row.win, row.tie, row.loss) == ((delta > 0).sum(), (delta == 0).sum(), (delta < 0).sum())
    assert rows.p_holm.to_numpy() == pytest.approx(holm(rows.p.to_numpy()))
    assert rows.p_holm["model", "session"] < 0.05 < rows.p_holm["model", "turn"]


def test_significance_by_area_corrects_over_systems_and_areas(result):
    tests = result.significance(["nDCG@10"], by_area=True)
    assert len(tests) == 9 and tests.n_queries.tolist() == [20] * 9
    assert tests.p_holm.to_numpy() == pytest.approx(holm(tests.p.to_numpy()))


def test_results_do_not_depend_on_the_order_or_company_of_systems(bench, result):
    systems, qrels, areas = bench
    alone = experiment({"bad": systems["bad"], "base": systems["base"]}, qrels, ["nDCG@10"], areas, baseline="base",
                       resamples=2000, seed=3)
    columns = ["value", "difference", "low", "high", "p", "win", "loss"]
    row = result.significance(["nDCG@10"]).query("system == 'bad'")[columns].to_numpy()
    np.testing.assert_allclose(alone.significance()[columns].to_numpy(), row, rtol=1e-12)


def test_runs_may_be_files(bench, tmp_path):
    systems, qrels, _areas = bench
    for suffix in ("run", "run.gz"):
        path = write_run(systems["base"], tmp_path / f"base.{suffix}")
        assert experiment({"base": path}, qrels).scores.tolist() == experiment({"base": systems["base"]}, qrels).scores.tolist()
        assert experiment({"base": {"turn": str(path)}}, qrels).systems == (("base", "turn"),)


def test_a_query_asked_in_vain_is_a_zero_and_an_area_never_asked_a_hole(bench):
    systems, qrels, areas = bench
    found = systems["base"].to_dict()
    silent = Run.from_dict({query: hits if areas[query] != "t3" else {} for query, hits in found.items()})
    absent = Run.from_dict({query: hits for query, hits in found.items() if areas[query] != "t3"})
    partly = Run.from_dict({query: hits for query, hits in found.items() if areas[query] != "t3" or query == "q02"})
    nothing = Run.from_dict({})
    result = experiment({"silent": silent, "absent": absent, "partly": partly, "nothing": nothing}, qrels, ["P@5"], areas)
    summary = result.summary().set_index("system")
    assert summary.complete.to_dict() == {"silent": True, "absent": False, "partly": True, "nothing": False}
    assert summary.n_queries.to_dict() == {"silent": 60, "absent": 40, "partly": 60, "nothing": 0}
    assert summary.missing.to_dict() == {"silent": 20, "absent": 0, "partly": 19, "nothing": 0}
    t3 = result.by_area().query("area == 't3'").set_index("system").value
    assert t3.silent == 0 and np.isnan(t3.absent) and t3.partly > 0 and np.isnan(t3.nothing)
    assert summary.value.silent == pytest.approx(summary.value.absent * 40 / 60)
    assert result.to_markdown().splitlines()[5] == "| nothing | — |"


def test_an_incomplete_system_is_tested_on_common_queries(bench):
    systems, qrels, areas = bench
    half = Run.from_dict({query: hits for query, hits in systems["bad"].to_dict().items() if areas[query] == "t1"})
    result = experiment({"base": systems["base"], "half": half}, qrels, ["P@5"], areas, baseline="base")
    row = result.significance().iloc[0]
    t1 = result.by_area().query("area == 't1'").set_index("system").value
    assert row.n_queries == 20 and row.baseline == pytest.approx(t1.base) and row.value == pytest.approx(t1.half)
    by_area = result.significance(by_area=True)
    assert by_area.n_queries.tolist() == [20, 0, 0] and by_area.p.notna().tolist() == [True, False, False]
    assert by_area.p_holm[0] == by_area.p[0]  # tests that were not made are not corrected for


@pytest.mark.parametrize("options, words", [
    ({"measures": ["nope"]}, "unknown measure"), ({"measures": ["P@1", "P@1"]}, "named twice"),
    ({"measures": []}, "no measure"), ({"baseline": "model"}, "several granularities"),
    ({"baseline": "Base"}, "not among"), ({"baseline": ("model", "window")}, "not among"),
    ({"areas": {"q00": "t1"}}, "59 of 60"), ({"area_order": ["t1"]}, "area_order lacks 't2', 't3'"),
])
def test_bad_requests_are_refused(bench, options, words):
    systems, qrels, areas = bench
    with pytest.raises(CdrError, match=words):
        experiment(systems, qrels, **{"areas": areas, **options})


@pytest.mark.parametrize("systems", [{}, {"a": {}}, {"a": 3}, {"a": {"q00": {"c000": 1.0}}}, {3: Run.from_dict({"q00": {"a": 1}})}])
def test_bad_systems_are_refused(bench, systems):
    with pytest.raises(CdrError):
        experiment(systems, bench[1])


def test_questions_without_an_answer_say_what_to_do(bench):
    systems, qrels, _areas = bench
    plain = experiment({"base": systems["base"]}, qrels, ["P@5"])
    for call, words in ((plain.significance, "baseline"), (plain.by_area, "areas"),
                        (lambda: plain.table(by_area="P@5"), "areas"), (lambda: plain.summary(["P@1"]), "was not measured")):
        with pytest.raises(CdrError, match=words):
            call()


# -- tables and files ---------------------------------------------------------------------------------------------------

HOSTILE = 'm|1 <script>alert(1)</script> & "q" $x_1$ \\cmd{} 50% #~^\r\nnext `c` *b*'


class Tags(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.cells = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data):
        if self.tags[-1] in ("td", "b", "br", "span") and self.cells:
            self.cells[-1] += data


def test_hostile_names_stay_text_in_every_dialect():
    run = Run.from_dict({"q": {"a": 1.0}})
    result = experiment({HOSTILE: {"tu|rn": run}, "b": {"turn": run}}, {"q": {"a": 1}}, ["P@1"], {"q": "<i>&|$area$"})
    for by_area in (None, "P@1"):
        page = Tags(result.to_html(by_area=by_area))
        assert set(page.tags) <= {"div", "table", "thead", "tbody", "tr", "th", "td", "b", "br", "span", "p", "small"}
        assert "tex2jax_ignore mathjax_ignore" in result.to_html(by_area=by_area)
        assert page.cells[0] == HOSTILE.replace("\r\n", "") and "$" not in result.to_html(by_area=by_area)
        lines = result.to_markdown(by_area=by_area).split("\n\n")[0].splitlines()
        bars = [line.replace("\\|", "").count("|") for line in lines]
        assert len(lines) == 4 and len(set(bars)) == 1
        assert "<" not in result.to_markdown(by_area=by_area).replace("<br>", "") and "$" not in result.to_markdown(by_area=by_area)
        body = result.to_latex(by_area=by_area)
        rows = [line for line in body.splitlines() if line.endswith(r" \\")]
        assert [line.replace(r"\&", "").count("&") for line in rows] == [2 + (by_area is not None)] * 3
        assert r"\textbackslash{}cmd\{\} 50\% \#\textasciitilde{}\textasciicircum{} next" in body
    assert result.systems[0] == (HOSTILE, "tu|rn")


def test_best_is_bold_ties_share_it_and_a_single_system_does_not_boast(bench, result):
    systems, qrels, _ = bench
    rows = result.to_markdown(["nDCG@10"]).splitlines()[2:6]
    assert ["**" in row for row in rows] == [False, False, True, False]
    assert "\u25b2" in rows[2] and "\u25bc" in rows[3] and not {"\u25b2", "\u25bc"} & set(rows[0])
    twice = experiment({"a": systems["base"], "b": systems["base"]}, qrels, ["P@1"]).to_markdown()
    assert twice.startswith("| system | P@1 |") and twice.count("**") == 4
    assert "**" not in experiment({"a": systems["base"]}, qrels, ["P@1"]).to_markdown()


def test_saved_and_loaded_is_the_same_experiment(result, tmp_path):
    result.save(tmp_path)
    again = Experiment.load(tmp_path)
    assert again.systems == result.systems and again.queries == result.queries and again.areas == result.areas
    np.testing.assert_array_equal(again.scores, result.scores)
    assert again.to_html(by_area="P@5") == result.to_html(by_area="P@5")
    pd.testing.assert_frame_equal(again.significance(["P@5"]), result.significance(["P@5"]))
    stored = pd.read_parquet(tmp_path / "per_query.parquet")
    assert list(stored.columns) == ["system", "granularity", "query", "area", "measure", "value"]
    rows = json.loads((tmp_path / "metrics.json").read_text())
    summary = result.summary().astype({"system": str, "granularity": str, "measure": str})
    assert [(r["system"], r["granularity"], r["measure"], r["n_queries"]) for r in rows] == list(
        summary[["system", "granularity", "measure", "n_queries"]].itertuples(index=False, name=None))
    assert [row["value"] for row in rows] == pytest.approx(summary.value.tolist())


def test_holes_and_hostile_ids_survive_the_file(tmp_path):
    qrels = {"q|1\n": {"a b": 1}, "q2": {"x": 1}}
    result = experiment({HOSTILE: Run.from_dict({"q|1\n": {"a b": 1.0}})}, qrels, ["P@1"], {"q|1\n": "é", "q2": "b"},
                        corpus=["a b"])
    again = Experiment.load(result.save(tmp_path / "new" / "folder"))
    np.testing.assert_array_equal(again.scores, result.scores)
    assert again.queries == ("q|1\n", "q2") and again.dangling == (("q2", "x"),) and again.areas == ("é", "b")


def test_a_failed_save_leaves_the_old_files(result, tmp_path, monkeypatch):
    result.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.raises(OSError):
        result.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# -- failures -----------------------------------------------------------------------------------------------------------

CHATS = {name: Conversation.make(name, ("user", f"<img src=x onerror=alert(1)> | $1 {name}"), ("assistant", "ok"))
         for name in ("r1", "r2", "w1", "w2", "w3")}


def test_wrong_conversations_above_the_first_relevant_one():
    qrels = {"a": {"r1": 1, "r2": 2}, "b": {"r1": 1}, "c": {"r1": 1, "r2": 2}, "d": {"r1": 1, "w1": 0}}
    run = Run.from_dict({"a": {"w1": 5, "w2": 4, "r1": 3, "w3": 2, "r2": 1}, "b": {"r1": 2, "w1": 1},
                         "c": {"w1": 2, "w2": 1}})
    table = find_failures(run, qrels, {"a": {"w1": "role", "w3": "context"}, "c": {"w2": KINDS["progression"]}}, depth=10)
    rows = table[["query", "kind", "wrong", "wrong_rank", "missed", "missed_rank"]].astype(object)
    assert rows.where(rows.notna(), None).values.tolist() == [
        ["a", KINDS["role"], "w1", 1, "r1", 3], ["a", UNLABELLED, "w2", 2, "r1", 3],
        ["c", UNLABELLED, "w1", 1, "r2", None], ["c", KINDS["progression"], "w2", 2, "r2", None],
        ["d", NO_RESULT, None, None, "r1", None]]


def test_ties_are_those_of_the_run():
    run = Run.from_dict({"q": {"w1": 1.0, "r1": 1.0}})
    assert find_failures(run, {"q": {"r1": 1}}).wrong.tolist() == ["w1"]  # w1 > r1: the larger id stands first


def test_counts_by_kind_and_their_rate():
    qrels = {"a": {"r1": 1}, "b": {"r1": 1}}
    kinds = {"a": {"w1": "role", "w2": "role"}, "b": {"w1": "context"}, "gone": {"w1": "role"}}
    runs = {"z": Run.from_dict({"a": {"w1": 3, "w2": 2, "r1": 1}, "b": {"w2": 2, "r1": 1}}),
            "a": Run.from_dict({"a": {"w1": 3, "r1": 2, "w2": 1}, "b": {"w1": 2, "r1": 1}})}
    table = count_failures(runs, qrels, kinds).set_index(["system", "kind"])
    assert table.loc[("z", KINDS["role"])].tolist() == [1, 2, 2, 1.0]
    assert table.loc[("a", KINDS["role"])].tolist() == [1, 1, 2, 0.5]
    assert table.loc[("a", KINDS["context"])].tolist() == [1, 1, 1, 1.0]
    assert table.loc[("z", UNLABELLED)].tolist()[:3] == [1, 1, 0] and np.isnan(table.loc[("z", UNLABELLED)].rate)
    assert list(table.index.get_level_values(0).categories) == ["z", "a"]


def test_loss_by_area_leaves_holes_out(bench):
    systems, qrels, areas = bench
    part = Run.from_dict({query: hits for query, hits in systems["base"].to_dict().items() if areas[query] != "t2"})
    result = experiment({"base": systems["base"], "part": part}, qrels, ["nDCG@10"], areas)
    loss = area_loss(result).set_index(["system", "area"])
    means = result.by_area().set_index(["system", "area"]).value
    assert (loss.loss + means).dropna().to_numpy() == pytest.approx(1)
    assert loss.loc[("base", slice(None)), :].share.sum() == pytest.approx(1)
    assert np.isnan(loss.loss["part", "t2"]) and loss.n_queries["part", "t2"] == 0
    assert loss.loc[("part", slice(None)), :].share.sum() == pytest.approx(1)
    with pytest.raises(CdrError, match="was not measured"):
        area_loss(result, "P@1")


def test_a_comparison_is_escaped_and_marks_the_best_unit():
    units = segment(CHATS, "turn")
    codes = [units.conversation_ids.index(name) for name in ("w1", "r1")]
    run = Run.from_columns(["q"], [0, 0], units.conversation_ids, codes, [2.0, 1.0],
                           units=[units.of("w1").start + 1, units.of("r1").start])
    failure = find_failures(run, {"q": {"r1": 1}}).iloc[0]
    shown = compare(failure, {"q": "<b>find</b> $it$ | now"}, CHATS, run, units)
    assert shown.wrong_mark == (1, 2) and shown.missed_mark == (0, 1) == best_unit(run, units, "q", "r1")
    page = shown._repr_html_()
    assert set(Tags(page).tags) <= {"p", "div", "strong", "small", "br", "em"} and "$" not in page
    lines = shown._repr_markdown_().splitlines()
    assert len({line.replace("\\|", "").count("|") for line in lines[2:]}) == 1 and "$" not in "".join(lines)
    # rows of itertuples work as well, and without units nothing is marked
    row = next(find_failures(run, {"q": {"r1": 1}}).itertuples())
    assert compare(row, {"q": "find it"}, CHATS).wrong_mark is None


def test_examples_are_picked_alike_whatever_the_order_of_rows():
    qrels = {name: {"r1": 1} for name in "abcd"}
    run = Run.from_dict({name: {"w1": 3, "w2": 2, **({"r1": 1} if name != "c" else {})} for name in "abcd"})
    failures = find_failures(run, qrels, {"a": {"w1": "role"}, "b": {"w1": "role"}})
    picked = pick_examples(failures, 1)
    assert picked[["query", "wrong"]].values.tolist() == [["a", "w1"], ["c", "w1"]]
    assert pick_examples(failures.sample(frac=1, random_state=0), 1).equals(picked)
