"""Measures of simulated sessions, the viewer and the user study: reference libraries, hostile text, the paper's counts."""
import itertools
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest
from sklearn.metrics import ndcg_score

from cdr_lib.core.config import CdrError
from cdr_lib.d2d.catalog import Catalog, Item
from cdr_lib.d2d.outcomes import (MEASURES, by_turn, compare, outcome_table, session_measures, session_ndcg, trajectory,
                                  wins_and_losses)
from cdr_lib.d2d.respond import Asked, Response
from cdr_lib.d2d.shoppers import Shopper, ShoppingSet
from cdr_lib.d2d.simulate import STOPS, PatienceJudge, Sessions, run_session, simulate
from cdr_lib.d2d.users import ScriptedUser, Target
from cdr_lib.d2d.userstudy import GROUPS, SHARES, StudyForm, analyse, count_answers, printed_counts, read_answers, stratified_sample
from cdr_lib.d2d.viewer import patience_levels, show
from cdr_lib.evaluation.significance import paired_randomisation
from cdr_lib.reporting.published import load_published


def record(method="m", shopper="s0", stop="success", lists=(("t",),), relevance=None, patience=None, trial=0, source="x", ideal=(1, .5, .5, .5)):
    "A session that recommended `lists`, turn by turn."
    turns = []
    for place, items in enumerate(lists):
        last = place == len(lists) - 1
        after = None if last and stop == "success" else (patience or [0.9 - 0.1 * place] * len(lists))[place] if patience else 0.9 - 0.1 * place
        turns.append({"user": "u", "assistant": "a", "items": list(items),
                      "relevance": list(relevance[place]) if relevance else [float(item == "t") for item in items], "asked": None,
                      "explanation": {}, "patience": None if after is None else {"before": 1.0, "after": after, "pi_r": 0, "pi_a": 0, "pi_c": 0, "pi_i": 0},
                      "tokens": {"assistant": [100 * (place + 1), 10], "user": [0, 0], "rater": [0, 0]}})
    return {"set": source, "method": method, "shopper": shopper, "trial": trial, "seed": 0, "target": "t", "stop": stop,
            "error": "broken" if stop == "error" else None, "found_rank": None, "ideal": list(ideal), "turns": turns,
            "unread": None, "unread_tokens": [0, 0]}


# NDCG -----------------------------------------------------------------------------------------------------------------

def test_graded_ndcg_agrees_with_scikit_learn():
    rng = np.random.default_rng(3)
    for _ in range(50):
        rho = np.round(rng.random(30), 6)
        shown = rng.permutation(30)[:4]
        scores = np.zeros(30)
        scores[shown] = [4, 3, 2, 1]
        ideal = np.sort(rho)[::-1][:4]
        one = record(lists=[[f"i{k}" for k in shown]], relevance=[rho[shown]], ideal=ideal)
        assert session_ndcg(one)[1] == pytest.approx(ndcg_score([rho], [scores], k=4, ignore_ties=True), abs=1e-12)


@pytest.mark.parametrize("place", range(4))
def test_binary_ndcg_is_the_discount_of_the_place(place):
    items = ["a", "b", "c", "d"]
    items[place] = "t"
    assert session_ndcg(record(lists=[items]))[0] == pytest.approx(ndcg_score([[float(i == "t") for i in items]], [[4, 3, 2, 1]], k=4))


def test_fewer_than_four_items_score_as_empty_places():
    assert session_ndcg(record(lists=[["a", "t"]]))[0] == pytest.approx(1 / np.log2(3))
    assert session_ndcg(record(lists=[[]], stop="abandoned")) == (0, 0)
    assert session_ndcg(record(lists=[["a"] * 4 + ["t"]]))[0] == 0  # a fifth place does not exist


def test_an_item_listed_twice_gains_once():
    record = {"target": "t", "ideal": [1.0, 0.5, 0.5, 0.25], "turns": [{"items": ["t"] * 4, "relevance": [1.0] * 4}]}
    best = 1 + 0.5 / np.log2(3) + 0.5 / 2 + 0.25 / np.log2(5)
    assert session_ndcg(record) == (1.0, pytest.approx(1 / best))


def test_only_the_last_turn_counts_unless_asked():
    two = record(lists=[["t"], []], stop="abandoned")
    assert session_ndcg(two)[0] == 0 and session_ndcg(two, "recommending")[0] == 1


def test_a_perfect_list_from_a_real_catalogue_scores_one():
    items = [Item(f"i{k}", f"Thing {k}", {"color": "black" if k % 2 else "white", "size": str(k % 5), "kind": "x"}) for k in range(20)]
    catalog = Catalog("c", items)
    target = Target(catalog, "i3")
    best = [catalog.ids[row] for row in np.argsort(-target.rho, kind="stable")[:4]]

    class Best:
        name, max_turns = "best", None

        def start(self, query, seed):
            return self

        def respond(self, dialogue):
            return Response("These.", tuple(best))

    shopper = Shopper("s", "i3", "a thing", ("black",))
    one = run_session("best", Best(), shopper, target, ScriptedUser(shopper, target), PatienceJudge(target))
    assert session_ndcg(one) == (1.0, pytest.approx(1.0))


# Tables ---------------------------------------------------------------------------------------------------------------

def crowd(seed=0, n=40):
    "Random sessions of three methods, some with errors, some of two trials."
    rng = np.random.default_rng(seed)
    rows = []
    for method, n_shopper, trial in itertools.product("abc", range(n), (0, 1)):
        stop = rng.choice(["success", "abandoned", "max_turns", "repetition", "error"], p=[.4, .3, .1, .1, .1])
        lists = [["x"] if rng.random() < 0.5 else [] for _ in range(rng.integers(1, 6))]
        if stop == "success":
            lists[-1] = ["x", "t"]
        rows.append(record(method, f"s{n_shopper}", str(stop), lists, patience=sorted(rng.random(len(lists)), reverse=True), trial=trial))
    return Sessions(rows)


def test_rates_sum_to_one_and_errors_stand_apart():
    sessions = crowd()
    table = outcome_table(sessions, n_boot=50)
    for method in "abc":
        own = [r for r in sessions if r["method"] == method]
        errors = sum(r["stop"] == "error" for r in own)
        assert (table.sessions[method], table.errors[method]) == (80, errors) and errors > 0
        by_shopper = pd.DataFrame([(r["shopper"], r["stop"] == "success") for r in own if r["stop"] != "error"]).groupby(0)[1].mean()
        assert table.success[method] == pytest.approx(by_shopper.mean())
    measures = session_measures(sessions)
    assert not (measures.stop == "error").any() and list(measures.columns[5:]) == list(MEASURES)
    shares = measures.groupby("method").stop.value_counts(normalize=True).unstack(fill_value=0)
    assert np.allclose(shares.sum(axis=1), 1) and set(shares.columns) <= set(STOPS)
    assert len(session_measures(sessions, errors="failure")) == len(sessions)


def test_tokens_are_means_per_turn_and_per_session():
    row = session_measures(Sessions([record(lists=[[], [], ["t"]])])).iloc[0]
    assert (row.tokens_in, row.tokens_out, row.tokens_in_turn, row.turns) == (600, 30, 200, 3)
    assert row.recommending == pytest.approx(1 / 3)


def test_paired_tests_are_the_library_s_on_shopper_means():
    sessions = crowd(1)
    frame = session_measures(sessions)
    means = frame.groupby(["method", "shopper"], sort=False)[list(MEASURES)].mean()
    table = compare(sessions, "a", n=2000, seed=4).set_index(["method", "measure"])
    for method in "bc":
        ours, theirs = means.loc[method].align(means.loc["a"], join="inner", axis=0)
        assert table.p[method, "success"] == pytest.approx(paired_randomisation(ours[["success", "abandoned", "ndcg_graded", "turns"]].to_numpy(),
                                                                               theirs[["success", "abandoned", "ndcg_graded", "turns"]].to_numpy(), 2000, 4)[0])
        assert table.delta[method, "turns"] == pytest.approx((ours.turns - theirs.turns).mean())
    assert len(table) == 8 and (table.p_holm >= table.p).all()


def test_a_method_of_errors_alone_is_a_row_of_holes():
    sessions = crowd() + Sessions([record("broken", f"s{n}", "error", []) for n in range(40)])
    table = outcome_table(sessions, n_boot=50)
    assert table.errors["broken"] == 40 and np.isnan(table.success["broken"]) and np.isnan(table.abandoned["broken"])
    assert "broken" not in set(compare(sessions, "a", n=100).method)
    assert "broken" not in set(by_turn(sessions).method)


def test_by_turn_counts_what_a_plain_loop_counts():
    sessions = crowd(2)
    table = by_turn(sessions).set_index(["method", "turn"])
    for method, turn in table.index:
        own = [r for r in sessions if r["method"] == method and r["stop"] != "error"]
        success = sum(r["stop"] == "success" and len(r["turns"]) <= turn for r in own) / len(own)
        open_ = [r["turns"][turn - 1]["patience"]["after"] for r in own if len(r["turns"]) > turn]
        row = table.loc[method, turn]
        assert row.success == pytest.approx(success) and row.in_progress == pytest.approx(len(open_) / len(own))
        assert row[["success", "failed", "in_progress"]].sum() == pytest.approx(1)
        assert (np.isnan(row.patience) and not open_) or row.patience == pytest.approx(np.mean(open_))
    assert by_turn(sessions, turns=2).turn.max() == 2


def test_trajectories_and_wins_count_every_session_once():
    sessions = crowd(3)
    assert trajectory(sessions).sessions.sum() == len(sessions)
    pairs = wins_and_losses(sessions, "a", "b")
    assert len(pairs) == 80 and set(pairs.outcome) == {"both", "only a", "only b", "neither", "error"}
    for row in pairs.to_dict("records"):
        won = [row["stop a"] == "success", row["stop b"] == "success"]
        if "error" not in (row["stop a"], row["stop b"]):
            assert row["outcome"] == {(True, True): "both", (True, False): "only a", (False, True): "only b", (False, False): "neither"}[tuple(won)]


def test_a_method_is_not_compared_with_itself():
    sessions = Sessions([])
    with pytest.raises(CdrError, match="both sides"):
        wins_and_losses(sessions, "a", "a")


def test_several_sets_stay_apart():
    one, two = Sessions([record(shopper="s", source="x")]), Sessions([record(shopper="s", source="y", stop="abandoned")])
    both = one + two
    assert outcome_table(both, n_boot=50).success["m"] == 0.5 and outcome_table(both.select(source="y"), n_boot=50).success["m"] == 0


def test_the_printed_binary_ndcg_is_below_what_a_success_is_worth():
    "Why no verdict is given on it: the paper's own numbers rule our reading of its normalisation out."
    published = load_published("d2d")
    for success, ndcg in (("success_electronics", "ablation_full_ndcg_binary"), ("success_mean", "ndcg_binary_mean"),
                          ("success_mean_full_llm", "ndcg_binary_mean_full_llm"), ("ablation_no_ace_success", "ablation_no_ace_ndcg_binary"),
                          ("ablation_no_apu_success", "ablation_no_apu_ndcg_binary")):
        assert published[ndcg].value / (published[success].value / 100) < 1 / np.log2(5)


# Viewer ---------------------------------------------------------------------------------------------------------------

HOSTILE = '<script>alert("x")</script> <img src=x onerror=alert(1)> </td></table> &amp; $x^2$ `code` \\(a\\) <b>bold'


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = set(), set(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("br", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("br", "line", "circle", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def hostile_record():
    one = record(HOSTILE, HOSTILE, "error", [["t", HOSTILE], []])
    for turn in one["turns"]:
        turn |= {"user": HOSTILE, "assistant": HOSTILE + "\nsecond line", "explanation": {"why": HOSTILE, "why_question": HOSTILE},
                 "asked": {"kind": HOSTILE, "attributes": [HOSTILE], "values": [], "items": []}}
    one |= {"error": HOSTILE, "unread": HOSTILE}
    return one


@pytest.mark.parametrize("reasons", [True, False])
def test_everything_shown_is_escaped(reasons):
    page = show(hostile_record(), reasons=reasons, title=None if reasons else HOSTILE).html
    parser = Tags()
    parser.feed(page)
    assert parser.tags <= {"div", "strong", "br", "small", "table", "tbody", "tr", "td", "ul", "li", "svg", "line", "text", "circle", "polyline", "em"}
    assert not parser.open and not [name for name in parser.attributes if name.startswith("on") or name in ("href", "src")]
    assert HOSTILE in "".join(parser.text) and "mathjax_ignore" in page


def test_titles_and_descriptions_are_escaped_too():
    catalog = Catalog("c", [Item("t", HOSTILE, {"color": "black"})])
    shopper = Shopper("s0", "t", "q", (HOSTILE,))
    parser = Tags()
    parser.feed(show(record(), catalog, shopper).html)
    assert "script" not in parser.tags and "img" not in parser.tags and "".join(parser.text).count(HOSTILE) >= 2


def test_the_curve_is_the_patience_of_the_record():
    one = record(stop="abandoned", lists=[[], [], ["x"]], patience=[0.6, 0.3, -0.1])
    assert patience_levels(one) == [1.0, 0.6, 0.3, -0.1]
    page = show(one).html
    assert "patience: 1.00, 0.60, 0.30, -0.10" in page and page.count("<circle") == 4
    assert patience_levels(record(lists=[])) == [] and "<svg" not in show(record(lists=[], stop="error")).html


# User study -----------------------------------------------------------------------------------------------------------

def test_the_printed_counts_give_the_printed_totals():
    printed = printed_counts()
    table = analyse(printed[printed.group != "total"])
    for row in printed[printed.group == "total"].to_dict("records"):
        assert table[row["choice"]]["total", row["question"]] == row["count"]
    # every row of the printed table sums to the conversations of its group
    published = load_published("d2d")
    sizes = {"both": "study_both", "only a": "study_only_d2d", "only b": "study_only_llm", "neither": "study_neither"}
    for group, key in sizes.items():
        assert (table.answers.loc[group] == published[key].value).all()
    assert (table.answers.loc["total"] == published["study_subjects"].value).all()
    assert table.p["total", "q3"] == pytest.approx(binomtest(31, 42).pvalue)


def test_weights_turn_sample_totals_into_population_shares():
    printed = printed_counts()
    counts = printed[printed.group != "total"]
    weights = {"both": 0.3, "only a": 0.2, "only b": 0.1, "neither": 0.4}
    table = analyse(counts, weights)
    assert table["a"]["total", "q1"] == pytest.approx(0.3 * 0.6 + 0.2 * 1 + 0.1 * 0.3 + 0.4 * 13 / 20)
    assert np.allclose(table.loc["total"][["a", "b", "both", "none"]].sum(axis=1), 1)
    assert (table.answers.loc["total"] == 50).all()
    with pytest.raises(CdrError, match="weights are needed"):
        analyse(counts, {"both": 1})


def paired_sessions(sizes):
    outcomes = [pair for pair, size in zip(((1, 1), (1, 0), (0, 1), (0, 0)), sizes) for _ in range(size)]
    sides = [Sessions([record(method, f"s{n}", "success" if pair[side] else "abandoned") for n, pair in enumerate(outcomes)])
             for side, method in enumerate(("ours", "theirs"))]
    return sides


def test_the_sample_has_the_paper_s_strata_and_blind_order():
    study = stratified_sample(*paired_sessions((30, 30, 30, 60)), n=50, seed=1)
    assert [sum(pair.group == group for pair in study.pairs) for group in GROUPS] == [10, 10, 10, 20]
    for pair in study.pairs:
        won = {side["method"]: side["stop"] == "success" for side in (pair.left, pair.right)}
        assert pair.group == {(True, True): "both", (True, False): "only a", (False, True): "only b", (False, False): "neither"}[won["ours"], won["theirs"]]
        assert pair.left["shopper"] == pair.right["shopper"]
    assert 10 < sum(pair.left["method"] == "ours" for pair in study.pairs) < 40
    assert [pair.group for pair in study.pairs] != sorted((pair.group for pair in study.pairs), key=GROUPS.index)
    assert sum(SHARES.values()) == pytest.approx(1)


def test_a_small_group_is_said_and_not_filled_up():
    study = stratified_sample(*paired_sessions((30, 3, 30, 60)), n=50)
    assert study.sizes().drawn.tolist() == [10, 3, 10, 20] and study.sizes().wanted.tolist() == [10, 10, 10, 20]


def test_errors_never_reach_a_subject():
    ours, theirs = paired_sessions((2, 2, 2, 2))
    broken = Sessions([{**r, "stop": "error"} if r["shopper"] == "s0" else r for r in ours])
    assert all(pair.left["shopper"] != "s0" for pair in stratified_sample(broken, theirs, n=8).pairs)


def test_answers_survive_restarts_and_several_subjects(tmp_path):
    path = tmp_path / "answers.csv"
    study = stratified_sample(*paired_sessions((3, 3, 3, 6)), n=10)
    forms = {name: StudyForm(study, path, name) for name in ("p1", "p2")}
    for number in range(4):
        forms["p1"].answer("left", "right", "both", HOSTILE)
        forms["p2"].answer("none", "none", "none")
    forms["p1"] = StudyForm(study, path, "p1")
    assert forms["p1"].pair.number == 5
    while forms["p1"].pair:
        forms["p1"].answer("left", "right", "both")
    frame = read_answers(path)
    assert len(frame) == 14 and frame.comment[0] == HOSTILE and not list(tmp_path.glob(".*tmp*"))
    for row in frame[frame.subject == "p1"].to_dict("records"):
        pair = study.pairs[int(row["number"]) - 1]
        assert row["q1"] == ("a" if pair.left["method"] == "ours" else "b") and row["q2"] == ("a" if row["q1"] == "b" else "b")
    counts = count_answers(frame)
    assert counts["count"].sum() == 14 * 3
    assert analyse(frame).answers.loc["total"].tolist() == [14] * 3


def test_the_form_shows_nothing_that_tells_the_methods_apart(tmp_path):
    items = [Item("t", "Target thing", {"color": "black"}), Item("x", "Other thing", {"color": "white"})]
    catalog = Catalog("x", items)
    shoppers = [Shopper(f"s{n}", "t", "q", ("it is dark",)) for n in range(15)]
    study = stratified_sample(*paired_sessions((3, 3, 3, 6)), n=10)
    form = StudyForm(study, tmp_path / "a.csv", "p", ShoppingSet("x", catalog, shoppers))
    shown = form._head.value + "".join(side.value for side in form._sides)
    assert "Target thing" in shown and "it is dark" in shown
    assert not [word for word in ("ours", "theirs", "success", "abandoned", "patience", "only a") if word in shown]


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(CdrError, match="not the answers"):
        read_answers(tmp_path / "a.csv")


# The whole way ----------------------------------------------------------------------------------------------------------

def test_from_simulation_to_tables():
    items = [Item(f"i{k:02}", f"Thing {k}", {"color": ("black", "white", "red")[k % 3], "size": str(k % 5), "kind": "x"}) for k in range(30)]
    catalog = Catalog("things", items)
    shoppers = [Shopper(f"s{n}", f"i{n:02}", f"thing {n}", ("it is good", "it lasts", "not too big")) for n in range(12)]

    class Shows:
        max_turns = None

        def __init__(self, step):
            self.name, self.step = f"shows {step}", step

        def start(self, query, seed):
            return self

        def respond(self, dialogue):
            turn = sum(part.role == "assistant" for part in dialogue)
            ids = [catalog.ids[(turn * 4 * self.step + k) % 30] for k in range(4)]
            return Response("These?", tuple(ids), Asked("attribute", ("color",)))

    sessions = simulate(ShoppingSet("things", catalog, shoppers), {f"shows {k}": Shows(k) for k in (1, 2)}, progress=False)
    table = outcome_table(sessions, n_boot=100)
    assert table.sessions.tolist() == [12, 12] and (table.success_low <= table.success).all() and (table.success <= table.success_high).all()
    # the first turn shows items 0 to 3, the second the next four: the first method finds 4, then 4 more
    first = by_turn(sessions).set_index(["method", "turn"]).success
    assert first["shows 1", 1] == first["shows 2", 1] == pytest.approx(4 / 12)
    assert all(show(one, catalog).html for one in sessions)
