"""Known failures of metric code elsewhere, as tests. Each is named after its case and uses the case's values."""
import numpy as np
import pytest

from cdr_lib.core.config import CdrError
from cdr_lib.evaluation.evaluate import experiment
from cdr_lib.evaluation.metrics import MEASURES, BadQrels, Coverage, coverage, dangling, score_matrix, score_run
from cdr_lib.retrieval.run import Run, read_run, write_run


def scores(results, judged, *measures):
    """Scores of one query, from results (pairs or mapping) and grades."""
    return dict(zip(measures, score_matrix(Run.from_dict({"q": results}), {"q": judged}, measures)[0]))


def ordered(*ids):
    """Results in this order."""
    return [(name, float(-rank)) for rank, name in enumerate(ids)]


def relevant(*ids):
    return dict.fromkeys(ids, 1)


def near(**expected):
    """Expected scores, `ndcg_3` standing for nDCG@3."""
    names = {"ndcg": "nDCG", "recall": "R", "p": "P", "mrr": "RR", "success": "Success"}
    spelled = {}
    for name, value in expected.items():
        family, _, cutoff = name.partition("_")
        spelled[f"{names[family]}@{cutoff}" if cutoff else names[family]] = value
    return spelled


def check(results, judged, **expected):
    expected = near(**expected)
    assert scores(results, judged, *expected) == pytest.approx(expected, abs=1e-6)


# -- MET-01: ties ------------------------------------------------------------------------------------------------------

TIED = {"A": [("d1", 0.5), ("d2", 0.5), ("d3", 0.5)], "B": [("d3", 0.5), ("d2", 0.5), ("d1", 0.5)]}


@pytest.mark.parametrize("run", TIED)
def test_MET_01_ties_are_broken_by_id_whatever_the_order_of_results(run):
    check(TIED[run], {"d1": 1}, mrr=0.333333, ndcg_1=0.0, ndcg_3=0.5, recall_1=0.0, recall_3=1.0, p_3=0.333333)
    # accuracy and MRR with a cut-off share the ranking
    check(TIED[run], {"d1": 1}, success_1=0.0, success_3=1.0, mrr_10=0.333333, mrr_1=0.0, mrr_3=0.333333)


def test_MET_01_a_constant_system_gains_nothing_from_luck():
    # every conversation scores the same: the id alone decides, so the first of the alphabet stands last
    corpus = [f"c{i:02}" for i in range(30)]
    results = dict.fromkeys(corpus, 1.0)
    assert set(scores(results, {"c00": 1}, *MEASURES).values()) == {0.0}
    assert scores(results, {"c29": 1}, "RR@1", "Success@1", "nDCG@1") == {"RR@1": 1, "Success@1": 1, "nDCG@1": 1}


def test_MET_01_scores_that_differ_beyond_32_bits_are_ties_in_memory_and_in_the_file(tmp_path):
    run = Run.from_dict({"q": {"a": 0.30000000001, "b": 0.3}}, name="close")
    for version in (run, read_run(write_run(run, tmp_path / "close.run"))):
        assert score_matrix(version, {"q": {"a": 1}}, ["RR"])[0, 0] == 0.5


# -- MET-02: the ideal, the divisor, the list of cut-offs ---------------------------------------------------------------

def test_MET_02_the_ideal_comes_from_all_judged_and_precision_divides_by_k():
    check({"d1": 1.0}, relevant("d1", "d2", "d3", "d4", "d5"), ndcg_5=0.33916, recall_5=0.2, p_5=0.2, mrr=1.0)


@pytest.mark.parametrize("cutoffs", [[2], [2, 4], [4, 2], [1, 2, 4, 20]])
def test_MET_02_a_cutoff_does_not_depend_on_the_others(cutoffs):
    judged = {"i1": 7, "i2": 0, "i3": 2, "i4": 1}
    run = Run.from_dict({"q": [("i3", 0.9), ("i4", 0.8), ("i2", 0.7), ("i1", 0.1)]})
    found = dict(zip(cutoffs, score_matrix(run, {"q": judged}, [f"nDCG@{k}" for k in cutoffs])[0]))
    expected = {2: 0.318443, 4: 0.644345}
    for k in set(cutoffs) & set(expected):
        assert found[k] == pytest.approx(expected[k], abs=1e-6)


@pytest.mark.parametrize("measure", MEASURES)
def test_MET_02_no_measure_depends_on_its_company(measure):
    rng = np.random.default_rng(3)
    corpus = [f"c{i}" for i in range(40)]
    judged = {"q": {name: int(grade) for name, grade in zip(corpus, rng.integers(0, 4, 40))}}
    run = Run.from_dict({"q": dict(zip(corpus, rng.integers(0, 5, 40).tolist()))})
    together = score_matrix(run, judged, [*MEASURES, "nDCG", "RR", "nDCG-exp@10"])[0][MEASURES.index(measure)]
    assert score_matrix(run, judged, [measure])[0, 0] == together


# -- MET-03: duplicates -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("retrieved, gold, k, expected", [
    (["a", "a"], ["a"], 2, {"recall_2": 1.0, "ndcg_2": 1.0, "p_2": 0.5}),
    (["a", "a", "b"], ["a", "c"], 3, {"recall_3": 0.5, "ndcg_3": 0.613147, "p_3": 0.333333, "mrr": 1.0}),
    (["a"], ["a", "a"], 1, {"recall_1": 1.0, "ndcg_1": 1.0, "p_1": 1.0}),
])
def test_MET_03_the_same_conversation_twice_counts_once(retrieved, gold, k, expected):
    check(ordered(*retrieved), relevant(*gold), **expected)
    found = scores(ordered(*retrieved), relevant(*gold), *MEASURES)
    assert all(0 <= value <= 1 for value in found.values())


def test_MET_03_the_first_occurrence_counts_even_with_a_lower_score():
    results = [("a", 0.1), ("b", 0.5), ("a", 0.9)]
    assert scores(results, {"a": 1}, "RR")["RR"] == 0.5


def test_MET_03_a_gold_list_is_not_taken_for_grades():
    with pytest.raises(BadQrels, match="dict.fromkeys"):
        score_run(Run.from_dict({"q": {"a": 1.0}}), {"q": ["a", "a"]})


# -- MET-04: missing queries --------------------------------------------------------------------------------------------

QRELS_04 = {"q1": {"a": 1}, "q2": {"b": 1}}


def test_MET_04_missing_queries_score_0_and_unjudged_ones_are_reported():
    run = Run.from_dict({"q1": [("a", 1.0)], "q9": [("a", 1.0)]})
    means = score_run(run, QRELS_04, ["R@1", "RR", "nDCG@1"]).groupby("measure", observed=True).value.mean()
    assert means.to_dict() == {"R@1": 0.5, "RR": 0.5, "nDCG@1": 0.5}
    fit = coverage(run, QRELS_04)
    assert fit == Coverage(n_queries=2, missing=("q2",), unasked=("q2",), unjudged=("q9",))


def test_MET_04_the_table_shows_the_denominator():
    run = Run.from_dict({"q1": [("a", 1.0)], "q9": [("a", 1.0)]})
    result = experiment({"s": run}, QRELS_04, measures=["R@1", "RR"])
    summary = result.summary()
    assert summary.value.tolist() == [0.5, 0.5] and summary.n_queries.tolist() == [2, 2]
    assert summary.missing.tolist() == [1, 1] and result.unjudged == (("q9",),)
    assert "s: queries without a result, which score 0: 1." in result.to_html()


@pytest.mark.parametrize("results", [{"q1": {"a": 1.0}, "q2": {}}, {"q1": {"a": 1.0}}])
def test_MET_04_an_empty_answer_and_no_answer_weigh_alike(results):
    assert score_run(Run.from_dict(results), QRELS_04, ["RR"]).value.tolist() == [1.0, 0.0]


def test_MET_04_a_run_of_another_benchmark_is_an_error():
    with pytest.raises(CdrError, match="none of its 1 queries is judged"):
        score_run(Run.from_dict({"1": {"a": 1.0}}), QRELS_04)


# -- MET-06: more relevant conversations than k -------------------------------------------------------------------------

def test_MET_06_a_perfect_first_page_is_perfect():
    ids = [f"d{i:02}" for i in range(12)]
    check(ordered(*ids[:10]), relevant(*ids), ndcg_10=1.0, recall_10=0.833333, p_10=1.0)


@pytest.mark.parametrize("n_relevant", [1, 5, 10, 11, 50])
@pytest.mark.parametrize("k", [1, 5, 10, 20])
def test_MET_06_perfect_rankings_score_1_at_every_cutoff(n_relevant, k):
    ids = [f"d{i:02}" for i in range(n_relevant)]
    found = scores(ordered(*ids), relevant(*ids), f"nDCG@{k}", f"P@{k}", f"R@{k}")
    assert found == pytest.approx({f"nDCG@{k}": 1.0, f"P@{k}": min(k, n_relevant) / k, f"R@{k}": min(k / n_relevant, 1)})


# -- MET-07: grades -----------------------------------------------------------------------------------------------------

GRADED = {"D1": 2, "D2": 3, "D3": 0, "D4": 1, "D5": 3}


def test_MET_07_gain_is_linear_and_variants_have_a_name():
    found = scores(ordered("D1", "D2", "D3", "D4"), GRADED, "nDCG@4", "nDCG-exp@4", "nDCG-binary@4")
    # by hand: (2 + 3/log2(3) + 1/log2(5)) / (3 + 3/log2(3) + 2/2 + 1/log2(5)), and so on for gains 3, 7, 1, 7 and for 1s
    assert found["nDCG@4"] == pytest.approx(0.683718, abs=1e-6)
    assert found["nDCG-exp@4"] == pytest.approx(0.587928, abs=1e-6)
    log3, log5 = np.log2(3), np.log2(5)
    binary = (1 + 1 / log3 + 1 / log5) / (1 + 1 / log3 + 1 / 2 + 1 / log5)
    assert found["nDCG-binary@4"] == pytest.approx(binary, abs=1e-9)
    # the case prints 0.804775; its own formula gives 0.804810
    assert found["nDCG-binary@4"] == pytest.approx(0.804775, abs=5e-5)


def test_MET_07_second_example():
    found = scores(ordered("b", "a"), {"a": 3, "b": 1}, "nDCG@3", "nDCG-exp@3", "nDCG-binary@3")
    assert list(found.values()) == pytest.approx([0.796708, 0.70981, 1.0], abs=1e-6)


def test_MET_07_the_variant_is_named_in_tables():
    result = experiment({"s": Run.from_dict({"q": ordered("D1", "D2")})}, {"q": GRADED}, ["nDCG@4", "nDCG-exp@4"])
    assert "nDCG-exp@4" in result.to_html() and result.summary().measure.tolist() == ["nDCG@4", "nDCG-exp@4"]


def test_MET_07_grades_of_0_and_below_are_not_relevant():
    names = ["nDCG@3", "nDCG-exp@3", "nDCG-binary@3", "P@3", "R@3", "RR", "Success@1"]
    run = ordered("spam", "good")
    assert scores(run, {"good": 2, "spam": -2}, *names) == scores(run, {"good": 2, "spam": 0}, *names) \
        == scores(run, {"good": 2}, *names)


@pytest.mark.parametrize("grade", [0.5, "1", None, float("nan")])
def test_MET_07_a_grade_that_is_no_whole_number_is_refused(grade):
    with pytest.raises(BadQrels, match="not a whole number"):
        scores({"a": 1.0}, {"b": 1, "a": grade}, "P@1")


# -- MET-09: the first relevant conversation ----------------------------------------------------------------------------

def test_MET_09_mrr_stops_at_the_first_relevant():
    check(ordered("a", "b", "c", "d"), relevant("b", "d"), mrr_10=0.5, mrr_1=0.0, ndcg_5=0.650921)


@pytest.mark.parametrize("rank", range(1, 25))
@pytest.mark.parametrize("k", [1, 3, 5, 7, 10, 20])
def test_MET_09_mrr_counts_rank_k_and_not_rank_k_plus_1(rank, k):
    ids = [f"x{i:02}" for i in range(rank - 1)] + ["hit"] + [f"y{i:02}" for i in range(10)]
    assert scores(ordered(*ids), {"hit": 1}, f"RR@{k}")[f"RR@{k}"] == (1 / rank if rank <= k else 0)


# -- MET-11: judgements outside the corpus ------------------------------------------------------------------------------

def test_MET_11_dangling_judgements_cap_the_score_and_are_reported():
    judged = {"q": {"d1": 1, "dX": 1}}
    run = Run.from_dict({"q": [("d1", 1.0), ("d2", 0.5)]})
    check([("d1", 1.0), ("d2", 0.5)], judged["q"], recall_3=0.5, ndcg_3=0.613147)
    assert dangling(judged, ["d1", "d2"]) == [("q", "dX")]
    result = experiment({"s": run}, judged, ["R@3"], corpus=["d1", "d2"])
    assert result.dangling == (("q", "dX"),) and "Judgements of conversations outside the corpus" in result.to_html()


def test_MET_11_nothing_is_reported_where_all_is_there():
    assert dangling({"q": {"d1": 1}}, {"d1": "text"}) == []


# -- DOC-03: holes in the grid ------------------------------------------------------------------------------------------

@pytest.fixture
def grid():
    """Recall of A: 0.5 on t1, 0.7 on t2; of B: 0.6 on t1, never run on t2."""
    ids = [f"c{i}" for i in range(10)]
    qrels = {"q1": relevant(*ids), "q2": relevant(*ids)}
    a = Run.from_dict({"q1": ordered(*ids[:5]), "q2": ordered(*ids[:7])})
    b = Run.from_dict({"q1": ordered(*ids[:6])})
    return experiment({"A": a, "B": b}, qrels, ["R@10", "R@1", "R@5"], {"q1": "t1", "q2": "t2"}, area_order=["t1", "t2"])


def test_DOC_03_a_hole_is_neither_0_nor_averaged(grid):
    areas = grid.by_area(["R@10"]).set_index(["system", "area"]).value
    assert areas["A", "t1"] == 0.5 and areas["A", "t2"] == 0.7 and areas["B", "t1"] == 0.6 and np.isnan(areas["B", "t2"])
    whole = grid.summary(["R@10"]).set_index("system")
    assert whole.value.to_dict() == pytest.approx({"A": 0.6, "B": 0.6})
    assert whole.complete.to_dict() == {"A": True, "B": False} and whole.n_queries.to_dict() == {"A": 2, "B": 1}


def test_DOC_03_the_table_marks_the_incomplete_system_and_does_not_rank_it(grid):
    lines = grid.to_markdown(by_area="R@10").replace("\\", "").splitlines()
    assert lines[0] == "| system | R@10 | t1 | t2 |" and lines[2] == "| A | 0.6000 | 0.5000 | 0.7000 |"
    assert lines[3] == "| B | 0.6000 (1 of 2) | **0.6000** | — |"  # bold on t1, where both were run
    assert "over 1 of 2 areas, 1 of 2 queries" in lines[-1] and "not ranked" in "".join(lines)


def test_DOC_03_orders_are_those_given_never_alphabetical(grid):
    qrels = {"q1": {"a": 1}, "q2": {"a": 1}}
    run = Run.from_dict({"q1": {"a": 1.0}, "q2": {"a": 1.0}})
    result = experiment({"z": run, "a": run}, qrels, ["R@1", "R@10", "R@5"], {"q1": "x", "q2": "b"}, area_order=["x", "b"])
    table = result.per_query
    assert list(table.system.cat.categories) == ["z", "a"] and list(table.area.cat.categories) == ["x", "b"]
    assert list(table.measure.cat.categories) == ["R@1", "R@10", "R@5"]
    assert result.by_area().area.cat.ordered and result.summary().measure.cat.ordered


def test_DOC_03_one_query_gets_no_interval(grid):
    single = grid.by_area(["R@10"])
    assert single.low.isna().all() and single.high.isna().all()


def test_DOC_03_metrics_json_does_not_pass_an_incomplete_mean_for_a_mean(grid, tmp_path):
    import json
    rows = json.loads((grid.save(tmp_path) / "metrics.json").read_text())
    assert {row["value"] for row in rows if row["system"] == "B"} == {None}
    assert [row["value"] for row in rows if row["system"] == "A" and row["measure"] == "R@10"] == pytest.approx([0.6])
    assert set(rows[0]) == {"system", "granularity", "measure", "value", "n_queries"}
