"""Verdicts, agreement and annotation: durability, parity with reference computations, bad files, a real JupyterLab."""
import csv
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from fractions import Fraction

import nbformat
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_notebook
from sklearn.metrics import cohen_kappa_score

from cdr_lib.benchmark.annotate import (
    KEYS, AnnotationForm, Imported, SimulatedAnnotator, Sitting, Tasks, annotation_tasks, expected_agreement,
    expected_majority, export_tasks, import_verdicts, prompt_annotator, read_tasks,
)
from cdr_lib.benchmark.verdicts import (
    NO_CONSENSUS, VERDICTS, Verdict, VerdictLog, agreement, cohen_kappa, fleiss_kappa, krippendorff_alpha, majority,
    ratings,
)
from cdr_lib.core.config import CdrError, project_root
from cdr_lib.core.conversation import BadRecord, Conversation

from .browser import chromium

ENV = {**os.environ, "PYTHONPATH": str(project_root())}
TIME = "2026-01-31T09:30:00Z"


def verdict(query="q1", conversation="c1", judge="ada", word="relevant", **more):
    return Verdict(query, conversation, judge, more.pop("kind", "person"), word, time=more.pop("time", TIME), **more)


# The log

WRITER = """
import sys
from cdr_lib.benchmark.verdicts import Verdict, VerdictLog
log = VerdictLog(sys.argv[1])
for number in range(int(sys.argv[3])):
    log.add(Verdict(f"q{number}", "c", sys.argv[2], "person", "relevant", reason="x" * 500))
    print(number, flush=True)
"""


def writer(path, judge, n):
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), judge, str(n)], stdout=subprocess.PIPE, text=True, env=ENV)


def test_a_killed_writer_loses_no_verdict_that_it_has_confirmed(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    running = writer(path, "ada", 100_000)
    confirmed = [running.stdout.readline() for _ in range(60)]
    running.send_signal(signal.SIGKILL)
    confirmed += running.stdout.readlines()
    running.wait()
    numbers = [int(line) for line in confirmed if line.endswith("\n")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log = VerdictLog(path)
    assert {f"q{number}" for number in numbers} <= set(log.frame()["query"])
    # The next sitting goes on behind the last one.
    left = log.pending([(f"q{number}", "c") for number in range(len(numbers) + 50)], "ada")
    log.add(verdict(*left[0]))
    assert len(VerdictLog(path)) == len(log)


def test_annotators_write_to_one_file_at_the_same_time(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    writers = [writer(path, name, 80) for name in ("ada", "bob", "cyn")]
    for process in writers:
        process.communicate(timeout=60)
        assert process.returncode == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frame = VerdictLog(path).frame()
    assert frame.groupby("judge").size().to_dict() == {"ada": 80, "bob": 80, "cyn": 80}
    assert len(majority(frame).query("verdict == 'relevant'")) == 80


def test_a_torn_line_at_any_byte(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    VerdictLog(path).extend([verdict(), verdict("q2", reason="ü\u2028{"), verdict("q3")])
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in range(len(lines[0]) + len(lines[1]), len(whole)):
        path.write_bytes(whole[:cut])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            log = VerdictLog(path)
            # Without its line end alone the verdict is whole.
            complete = 2 if cut < len(whole) - 1 else 3
            torn = cut not in (len(lines[0]) + len(lines[1]), len(whole) - 1)
            assert (len(log), bool(log.torn), bool(said)) == (complete, torn, torn)
            log.add(verdict("q4"))
        assert len(VerdictLog(path)) == complete + 1
        assert b'\n\n' not in path.read_bytes()


def test_a_failing_disk_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "verdicts.jsonl"
    log = VerdictLog(path)
    log.add(verdict())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            log.add(verdict(word="irrelevant", replaces=True))
    # What reached the file in spite of the error counts when the file is read again, and is not written twice.
    assert log.get("q1", "c1", "ada").verdict == "relevant"
    assert log.refresh().get("q1", "c1", "ada").verdict == "irrelevant"
    assert len(VerdictLog(path).frame(every=True)) == 2


@pytest.mark.parametrize(("line", "message"), [
    ("[1]", "a verdict is an object, not list"),
    ("{nonsense", "not JSON"),
    (json.dumps({**verdict().to_dict(), "verdict": "yes"}), "verdict 'yes' is unknown"),
    (json.dumps({**verdict().to_dict(), "kind": "oracle"}), "kind 'oracle' is unknown"),
    (json.dumps({**verdict().to_dict(), "score": "0.9"}), "score is str, not a number"),
    (json.dumps({**verdict().to_dict(), "replaces": 1}), "replaces is 1, neither true nor false"),
    ('{"query": "q1", "query": "q2"}', "not strict JSON"),
    (json.dumps({**verdict().to_dict(), "score": float("nan")}), "NaN"),
    (json.dumps({**verdict().to_dict(), "time": "yesterday"}), "time 'yesterday' is not ISO 8601"),
    (json.dumps({**verdict().to_dict(), "time": ""}), "a verdict lacks time"),
    (json.dumps(verdict().to_dict()), "a second verdict of 'ada' on query 'q1', conversation 'c1'"),
    (json.dumps(verdict("q9").to_dict()), "query 'q9' is unknown"),
    (json.dumps(verdict(conversation="c9").to_dict()), "conversation 'c9' is unknown"),
    (json.dumps(verdict("q2", replaces=True).to_dict()), "replaces an earlier one, but there is none"),
    (json.dumps(verdict("q2", kind="llm").to_dict()), "is a person in earlier verdicts, and a llm here"),
])
def test_a_bad_line_is_named_by_file_line_and_reason(tmp_path, line, message):
    path = tmp_path / "verdicts.jsonl"
    path.write_text(json.dumps(verdict().to_dict()) + "\n" + line + "\n" + json.dumps(verdict("q3").to_dict()) + "\n")
    with pytest.raises(CdrError) as error:
        VerdictLog(path, queries={"q1", "q2", "q3"}, conversations={"c1"})
    assert message in str(error.value) and "line 2" in str(error.value) and str(path) in str(error.value)


def test_the_file_only_grows(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    log = VerdictLog(path)
    log.extend([verdict(), verdict("q2")])
    before = path.read_bytes()
    log.add(verdict(word="unsure", replaces=True))
    log.add(verdict(word="irrelevant", replaces=True, round="review"))
    assert path.read_bytes().startswith(before) and path.read_bytes().count(b"\n") == 4
    assert [one.verdict for one in log.history("q1", "c1")] == ["relevant", "unsure", "irrelevant"]
    assert log.frame(every=True).standing.tolist() == [False, True, False, True]
    assert log.pending([("q1", "c1"), ("q2", "c1")], "ada", round="review") == [("q2", "c1")]
    path.write_bytes(before[:10])
    with pytest.raises(CdrError, match="has become shorter"):
        log.refresh()
    path.unlink()
    with pytest.raises(CdrError, match="is gone, with 4 verdicts"):
        log.add(verdict("q3"))


def test_values_that_are_no_verdict():
    for bad in ({"query": ""}, {"judge": "\u200b"}, {"score": True}, {"score": float("inf")}, {"time": "2026-01-31T09:30:00"},
                {"query": "\ud800"}):
        with pytest.raises((BadRecord, UnicodeError)):
            Verdict.from_dict({**verdict().to_dict(), **bad}).to_dict()
    assert Verdict.from_dict(verdict(score=np.float32(0.5)).to_dict()).score == 0.5
    assert verdict(time="2026-01-31T09:30:00+09:00").time.endswith("+09:00")


def test_a_long_log_does_not_slow_down_one_verdict(tmp_path):
    log = VerdictLog(tmp_path / "verdicts.jsonl")
    log.extend(verdict(f"q{n % 100}", f"c{n}", "net", kind="model", score=0.5) for n in range(20_000))
    start = time.perf_counter()
    for n in range(20):
        log.add(verdict(f"q{n}", "c0", "ada" if n else "bob"))
    assert time.perf_counter() - start < 2
    start = time.perf_counter()
    assert len(VerdictLog(log.path)) == 20_020
    assert time.perf_counter() - start < 10


# Majority

@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from(VERDICTS), min_size=1, max_size=6), min_size=1, max_size=8), st.integers(1, 4))
def test_majority_is_more_than_half_of_all_and_at_least_so_many(votes, least):
    frame = pd.DataFrame([(f"q{n}", "c", f"j{j}", word) for n, words in enumerate(votes) for j, word in enumerate(words)],
                         columns=["query", "conversation", "judge", "verdict"])
    result = majority(frame, least).set_index("query")
    for n, words in enumerate(votes):
        sides = [side for side in ("relevant", "irrelevant")
                 if words.count(side) >= least and Fraction(words.count(side), len(words)) > Fraction(1, 2)]
        assert len(sides) < 2 and result.verdict[f"q{n}"] == (sides or [NO_CONSENSUS])[0]
        assert result.loc[f"q{n}", list(VERDICTS)].tolist() == [words.count(word) for word in VERDICTS]


# Coefficients

answers = st.lists(st.tuples(st.sampled_from("rui"), st.sampled_from("rui")), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(answers)
def test_cohen_agrees_with_scikit_learn(pairs):
    a, b = zip(*pairs)
    found = cohen_kappa(a, b, n=20)
    if len({*a, *b}) == 1:
        assert found.value is None and found.observed == 1 and "0/0" in found.note
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert found.value == pytest.approx(cohen_kappa_score(a, b), abs=1e-12)


def plain_fleiss(table):
    "The definition, in fractions: pairs of raters that agree, against the pooled shares."
    n, m = len(table), len(table[0])
    labels = sorted({label for row in table for label in row})
    observed = sum(Fraction(sum(x == y for x, y in itertools.permutations(row, 2)), m * (m - 1)) for row in table) / n
    chance = sum(Fraction(sum(row.count(label) for row in table), n * m) ** 2 for label in labels)
    return None if chance == 1 else (observed - chance) / (1 - chance)


def plain_alpha(table):
    "The definition, in fractions: ordered pairs of different values within units, against those of all values."
    units = [[value for value in row if value is not None] for row in table]
    units = [unit for unit in units if len(unit) > 1]
    values = [value for unit in units for value in unit]
    if not values:
        return None
    n = len(values)
    observed = sum(Fraction(sum(x != y for x, y in itertools.permutations(unit, 2)), len(unit) - 1) for unit in units) / n
    chance = Fraction(sum(x != y for x, y in itertools.permutations(values, 2)), n * (n - 1))
    return None if chance == 0 else 1 - observed / chance


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5).flatmap(lambda m: st.lists(st.lists(st.sampled_from("rui"), min_size=m, max_size=m), min_size=1, max_size=12)))
def test_fleiss_agrees_with_its_definition(table):
    expected = plain_fleiss(table)
    found = fleiss_kappa(table, n=10).value
    assert found is None if expected is None else found == pytest.approx(float(expected), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5).flatmap(lambda m: st.lists(st.lists(st.sampled_from(["r", "u", "i", None]), min_size=m, max_size=m),
                                                    min_size=1, max_size=10)))
def test_alpha_agrees_with_its_definition(table):
    expected = plain_alpha(table)
    found = krippendorff_alpha(table, n=10).value
    assert found is None if expected is None else found == pytest.approx(float(expected), abs=1e-12)


def test_published_examples():
    # Cohen (1960) with the table that textbooks repeat: 45, 15, 25, 15 of 100.
    a, b = "y" * 60 + "n" * 40, "y" * 45 + "n" * 15 + "y" * 25 + "n" * 15
    assert cohen_kappa(a, b).value == pytest.approx(0.1304, abs=5e-5)
    # Krippendorff (2011), section B: two observers, binary, ten units: 0.095.
    observers = [(0, 1, 0, 0, 0, 0, 0, 0, 1, 0), (1, 1, 1, 0, 0, 1, 0, 0, 0, 0)]
    assert krippendorff_alpha(list(zip(*observers))).value == pytest.approx(0.095, abs=5e-4)
    # The same source: two observers, five categories, twelve units: 0.692.
    observers = ["aabbdcccedda", "babbbccceddd"]
    assert krippendorff_alpha(list(zip(*observers))).value == pytest.approx(0.692, abs=5e-4)


def test_what_is_missing_and_what_is_alike():
    nan = float("nan")
    assert cohen_kappa(["r", None, "i", nan], ["r", "i", "i", "r"]).pairs == 2
    assert cohen_kappa([None], ["r"]).value is None
    assert krippendorff_alpha(pd.DataFrame({"a": ["r", None], "b": ["r", "i"], "c": [None, None]})).pairs == 1
    # Judges may be named in any order, and pairs given in any order.
    table = [list(row) for row in ("rri", "iir", "rrr", "iii", "rir")]
    for function in (fleiss_kappa, krippendorff_alpha):
        assert function(table) == function([row[::-1] for row in table[::-1]])
    with pytest.raises(CdrError, match="one answer per pair says nothing"):
        fleiss_kappa([["r"], ["i"]])
    with pytest.raises(CdrError, match="level must lie between"):
        cohen_kappa("ri", "rr", level=95)
    frame = pd.DataFrame([("q", "c", "a", "relevant"), ("q", "c", "b", "relevant")], columns=["query", "conversation", "judge", "verdict"])
    table = agreement(frame)
    assert table.value.isna().all() and table.note.str.contains("0/0").all() and (table.observed == 1).all()
    with pytest.raises(CdrError, match="'yes' is unknown"):
        ratings(frame.assign(verdict="yes"))


def test_intervals_cover_the_truth():
    # 95 % intervals of kappa over 60 samples of two simulated annotators: all but a few hold the value that they tend to.
    held = 0
    for seed in range(60):
        pairs = [(f"q{seed}", f"c{n}") for n in range(300)]
        truth = {f"q{seed}": {f"c{n}" for n in range(90)}}
        crew = [SimulatedAnnotator("a", truth, 0.15, 0.1, seed=seed), SimulatedAnnotator("b", truth, 0.2, 0.05, seed=seed)]
        found = cohen_kappa([crew[0].answer(*pair) for pair in pairs], [crew[1].answer(*pair) for pair in pairs], n=400)
        held += found.low <= expected_agreement(crew, 0.3).value[0] <= found.high
    assert held >= 52


# Tasks and sittings

QUERIES = {"=q": "Find conversations where a user <i>insists</i>.", "q2": "Find conversations with $5 in them."}
CONVERSATIONS = {id: Conversation.make(id, ("user", f"{text} </p><script>alert(1)</script>"), ("assistant", "@all, -1 + 2"))
                 for id, text in (("-c1", "=cmd()"), ("c2", "plain"), ("synthetic-7", "\x1b[31mred\x00"))}
PAIRS = [(query, id) for query in QUERIES for id in CONVERSATIONS]


@pytest.fixture
def tasks():
    return annotation_tasks(PAIRS, QUERIES, CONVERSATIONS)


def test_tasks_refuse_what_cannot_be_judged(tasks):
    with pytest.raises(CdrError, match="1 pairs name an unknown query, first 'q9'"):
        Tasks((("q9", "c2"),), QUERIES, CONVERSATIONS)
    with pytest.raises(CdrError, match="lacks conversation"):
        annotation_tasks(pd.DataFrame({"query": ["q2"]}), QUERIES, CONVERSATIONS)
    assert set(tasks.order("ada")) == set(PAIRS) and len(tasks) == 6
    orders = {tuple(tasks.order(name)) for name in "abcdefgh"}
    assert len(orders) > 4


def test_the_form_is_blind_and_escaped(tasks, tmp_path):
    form = AnnotationForm(tasks, tmp_path / "v.jsonl", "<b>ada</b>", pause=0)
    while form.sitting.pair is not None:
        page = form.preview()
        assert not any(text in page for text in ("<script>", "<i>", "<b>", "synthetic", "-c1", "c2"))
        assert "mathjax_ignore" in page and "$5" not in page
        form._keys.value = "u"
    assert VerdictLog(tmp_path / "v.jsonl").frame().verdict.tolist() == ["unsure"] * 6


def test_an_error_in_a_callback_is_shown(tasks, tmp_path, monkeypatch):
    form = AnnotationForm(tasks, tmp_path / "v.jsonl", "ada", pause=0)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("no space left")))
    form._reason.value, form._keys.value = "says so", "y"
    assert "Nothing was recorded: no space left" in form._note.value and form._reason.value == "says so"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from("ynub"), max_size=30))
def test_any_way_through_the_form_ends_in_what_was_said_last(tmp_path_factory, keys):
    path = tmp_path_factory.mktemp("log") / "v.jsonl"
    tasks = annotation_tasks(PAIRS, QUERIES, CONVERSATIONS)
    sitting, said = Sitting(tasks, path, "ada"), {}
    for key in keys:
        if key == "b":
            sitting.back()
        elif (pair := sitting.pair) is not None:
            said[pair] = KEYS[key]
            sitting.answer(KEYS[key])
    log = VerdictLog(path)
    assert {one.pair: one.verdict for one in log} == said
    # Open pairs are met in their order, whatever happened between.
    assert list(said) == tasks.order("ada")[:len(said)] and sitting.done == len(said)


def test_a_second_round_asks_again_and_replaces(tasks, tmp_path):
    path = tmp_path / "v.jsonl"
    first = Sitting(tasks, path, "ada", round="first")
    for _ in PAIRS:
        first.answer("relevant")
    review = Sitting(annotation_tasks(PAIRS[:2], QUERIES, CONVERSATIONS), path, "ada", round="review")
    assert review.done == 0 and not review.back()
    review.answer("irrelevant")
    review.answer("relevant")
    log = VerdictLog(path)
    assert len(log) == 6 and len(log.frame(every=True)) == 8 and log.frame()["round"].value_counts().to_dict() == {"first": 4, "review": 2}
    with pytest.raises(CdrError, match="all pairs are judged"):
        review.answer("relevant")
    log.add(Verdict("q", "c", "net", "model", "relevant"))
    with pytest.raises(CdrError, match="'net' is the name of a model"):
        Sitting(tasks, path, "net")


def test_a_terminal_session_stops_and_goes_on(tasks, tmp_path):
    path, lines = tmp_path / "v.jsonl", []

    def session(*answers):
        replies = iter(answers)

        def read(prompt):
            reply = next(replies)
            if isinstance(reply, BaseException):
                raise reply
            return reply
        return prompt_annotator(tasks, path, "ada", read=read, write=lines.append)

    assert session("y because", KeyboardInterrupt()).done == 1
    assert session("  N  ", EOFError()).done == 2
    assert session("", "maybe", "u", "q").done == 3
    assert session("y", "y", "y").done == 6
    assert session().done == 6
    screen = "\n".join(lines)
    assert "\x1b" not in screen and "\\x1b[31mred\\x00" in screen and "synthetic" not in screen
    assert VerdictLog(path).frame().verdict.tolist() == ["relevant", "irrelevant", "unsure"] + ["relevant"] * 3


# Files

def test_no_cell_of_an_export_is_a_formula(tasks, tmp_path):
    path = export_tasks(tasks, tmp_path / "out.csv", "@ada")
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 7 and not any(cell[:1] in ("=", "+", "-", "@", "\t", "\r") for row in rows for cell in row)
    assert "\x00" not in path.read_text(encoding="utf-8")
    # Ids come back as they were.
    frame = pd.DataFrame(rows[1:], columns=rows[0])
    frame["verdict"] = "y"
    frame.to_csv(tmp_path / "in.csv", index=False)
    log = VerdictLog(tmp_path / "v.jsonl")
    assert import_verdicts(tmp_path / "in.csv", tasks, log) == Imported(6, 0, 0)
    assert set(log.frame().judge) == {"@ada"} and not log.pending(PAIRS, "@ada")


def test_tasks_travel_as_json_lines(tasks, tmp_path):
    back = read_tasks(export_tasks(tasks, tmp_path / "t.jsonl", "ada"))
    assert sorted(back.pairs) == sorted(PAIRS) and back.queries == QUERIES
    assert {id: one.turns for id, one in back.conversations.items()} == {id: one.turns for id, one in CONVERSATIONS.items()}
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    for changed, message in (({"query_text": "another"}, "has another text"), ({"turns": [{"role": "boss", "text": ""}]}, "role 'boss'"),
                             ({"turns": None}, "not a task"), ({"query": 1}, "must be text")):
        (tmp_path / "bad.jsonl").write_text(lines[0] + "\n" + json.dumps({**row, **changed}) + "\n")
        with pytest.raises(CdrError, match=message) as error:
            read_tasks(tmp_path / "bad.jsonl")
        assert "line 2" in str(error.value)


def write_rows(path, *rows, names=("query", "conversation", "verdict", "annotator", "reason"), delimiter=","):
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([names, *rows])
    return path


def test_a_bad_file_is_refused_whole_with_all_its_lines(tasks, tmp_path):
    log = VerdictLog(tmp_path / "v.jsonl")
    path = write_rows(tmp_path / "in.csv", ("q2", "c2", "y", "ada", "two\nlines"), ("q9", "c2", "y", "ada", ""),
                      ("q2", "c8", "y", "ada", ""), ("q2", "c2", "n", "ada", ""), ("q2", "'-c1", "perhaps", "ada", ""),
                      ("q2", "'-c1", "y", "", ""), ("q2", "'-c1"), ("", "", "", "", ""), ("q2", "c2", "n", "bob", ""))
    with pytest.raises(CdrError) as error:
        import_verdicts(path, tasks, log)
    said = str(error.value)
    # The reason of the first row takes two lines of the file.
    for line, what in ((4, "unknown query 'q9'"), (5, "unknown conversation 'c8'"), (6, "a second verdict of 'ada'"),
                       (6, "after line 2"), (7, "'perhaps' is no verdict"), (8, "nobody is named"), (9, "2 cells under 5 columns")):
        assert any(row.startswith(f"  line {line}: ") and what in row for row in said.split("\n")), (line, what, said)
    assert "nothing was taken, 6 rows" in said and not (tmp_path / "v.jsonl").exists() and not len(log)


def test_rows_of_spreadsheets_in_other_lands(tasks, tmp_path):
    log = VerdictLog(tmp_path / "v.jsonl")
    for number, (delimiter, word) in enumerate(zip(",;\t", ("Relevant", "NO", " ? "))):
        path = write_rows(tmp_path / f"{number}.csv", ("q2", "c2", word, f"p{number}", ""), ("'=q", "c2", "", "", ""), delimiter=delimiter)
        assert import_verdicts(path, tasks, log) == Imported(1, 0, 1)
    assert log.frame().verdict.tolist() == list(VERDICTS)
    for name, text, message in (("x.txt", "", "read from .csv or .jsonl"), ("x.csv", "query,query,verdict\n", "a column stands twice"),
                                ("y.csv", "", "no rows"), ("x.jsonl", "[]\n{\n", "line 1: not an object")):
        (tmp_path / name).write_text(text)
        with pytest.raises(CdrError, match=message):
            import_verdicts(tmp_path / name, tasks, log)


def test_json_rows_and_rounds(tasks, tmp_path):
    log = VerdictLog(tmp_path / "v.jsonl", QUERIES, CONVERSATIONS)
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"query": "q2", "conversation": "c2", "verdict": "y", "annotator": "ada", "other": 1}) + "\n")
    assert import_verdicts(path, tasks, log, round="first").added == 1
    assert import_verdicts(path, tasks, log, round="first") == Imported(0, 1, 0)
    assert import_verdicts(path, tasks, log, round="review").added == 1
    path.write_text(json.dumps({"query": "q2", "conversation": "c2", "verdict": "n", "annotator": "ada"}) + "\n")
    with pytest.raises(CdrError, match="replace=True takes the change"):
        import_verdicts(path, tasks, log)
    assert import_verdicts(path, tasks, log, replace=True).added == 1
    path.write_text(json.dumps({"query": "q2", "conversation": "c2", "verdict": 1, "annotator": "ada"}) + "\n")
    with pytest.raises(CdrError, match="verdict is int, not text"):
        import_verdicts(path, tasks, log)


# Simulated annotators

def test_simulated_annotators_err_at_their_rates(tmp_path):
    pairs = [(f"q{n % 50}", f"c{n}") for n in range(6_000)]
    truth = {f"q{n}": {f"c{m}": int(m % 10 < 3) for m in range(n, 6_000, 50)} for n in range(50)}
    one = SimulatedAnnotator("sim", truth, miss=0.2, false_alarm=0.1, unsure=0.05, seed=4)
    said = pd.crosstab([one.relevant(*pair) for pair in pairs], [one.answer(*pair) for pair in pairs], normalize="index")
    for relevant in (True, False):
        for word, chance in one.chances(relevant).items():
            assert said.loc[relevant, word] == pytest.approx(chance, abs=0.025)
    assert sum(one.chances(True).values()) == pytest.approx(1)
    # Interrupted and resumed: the same verdicts as in one go.
    log, again = VerdictLog(tmp_path / "a.jsonl"), VerdictLog(tmp_path / "b.jsonl")
    one.annotate(pairs[:70], log, time=TIME)
    one.annotate(pairs[:100], log, time=TIME)
    one.annotate(pairs[:100], again, time=TIME)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert SimulatedAnnotator("never", truth, 1, 1).answer("q0", "c0") == "irrelevant"
    assert SimulatedAnnotator("cannot", truth, unsure=1).answer("q0", "c0") == "unsure"


def test_expectations_by_hand():
    # Both right with 0.9: they agree on 0.82; shares are 0.5 each, so kappa is (0.82 - 0.5) / 0.5.
    two = [SimulatedAnnotator(name, {}, 0.1, 0.1) for name in "ab"]
    assert expected_agreement(two, 0.5).value.tolist() == pytest.approx([0.64] * 3)
    # Three who are right with 0.9 are outvoted with 3 * 0.01 * 0.9 + 0.001.
    three = expected_majority([*two, SimulatedAnnotator("c", {}, 0.1, 0.1)])
    assert three.loc["relevant", "irrelevant"] == pytest.approx(0.028) and three.loc["relevant", NO_CONSENSUS] == pytest.approx(0)
    assert expected_agreement([SimulatedAnnotator(name, {}, 0, 0) for name in "ab"], 1).value.isna().all()


# A real JupyterLab

CELL = """
from cdr_lib.benchmark.annotate import AnnotationForm, annotation_tasks
from cdr_lib.core.conversation import Conversation
queries = {"q1": "Find conversations where a user <b>insists</b>.", "q2": "Find conversations where $x$ costs $5."}
conversations = {f"secret{n}": Conversation.make(f"secret{n}", ("user", f"<script>window.hacked = 1</script> item {n} for $5"),
                                                 ("assistant", "It is $6. " * 200)) for n in range(6)}
form = AnnotationForm(annotation_tasks([(q, c) for q in queries for c in conversations], queries, conversations),
                      "verdicts.jsonl", "ada")
form
"""


@pytest.mark.browser
def test_the_form_in_jupyterlab(tmp_path):
    path = chromium()
    from playwright.sync_api import sync_playwright

    notebook = new_notebook(cells=[new_code_cell(CELL)], metadata={"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}})
    work = tmp_path / "work"
    work.mkdir()
    nbformat.write(notebook, work / "form.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base, out = f"http://127.0.0.1:{port}", open(tmp_path / "log", "wb")
    env = {**ENV, **{name: str(tmp_path / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}}
    server = subprocess.Popen([sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--IdentityProvider.token=",
                               "--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={work}"], env=env, stdout=out, stderr=out)

    def verdicts():
        file = work / "verdicts.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait(what, seconds=90):
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end and server.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.1)

    def up():
        try:
            return urllib.request.urlopen(f"{base}/api", timeout=5).status == 200
        except OSError:
            return False

    def press(page, key, lines):
        time.sleep(0.5)  # longer than the form's pause
        page.keyboard.press(key)
        wait(lambda: len(verdicts()) == lines, 20)
        page.wait_for_function("document.activeElement.value === ''")

    def show(page):
        "Run the cell, and click into the field."
        page.locator("text=| Idle").first.wait_for(timeout=90_000)
        page.locator(".jp-CodeCell .cm-content").first.click()
        page.keyboard.press("Control+Enter")
        page.locator("small", has_text="pairs judged").last.wait_for(timeout=90_000)
        page.locator("input[placeholder^='click, then']").last.click()

    try:
        wait(up)
        with sync_playwright() as playwright:
            window = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
            page = window.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(60_000)
            problems = []
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.goto(f"{base}/lab/tree/form.ipynb")
            show(page)
            press(page, "y", 1)
            press(page, "n", 2)
            # A reason by the keyboard alone, then the key.
            page.keyboard.press("Tab")
            page.keyboard.type("both could be meant")
            page.keyboard.press("Enter")
            page.wait_for_function("(document.activeElement.placeholder || '').startsWith('click, then')")
            press(page, "u", 3)
            assert [row["verdict"] for row in verdicts()] == ["relevant", "irrelevant", "unsure"]
            assert verdicts()[2]["reason"] == "both could be meant"
            # Back to the last pair, and a change of mind.
            page.keyboard.press("b")
            page.locator("small", has_text="you said unsure").wait_for()
            press(page, "n", 4)
            assert verdicts()[3]["replaces"] and verdicts()[3]["conversation"] == verdicts()[2]["conversation"]
            # Typing ahead gives no verdicts on pairs that were not seen: of six keys the first counts, and one or two
            # more where the machine is so slow that they come in long after it.
            time.sleep(0.5)
            page.keyboard.type("yyyyyy")
            time.sleep(3)
            lines = len(verdicts())
            assert 5 <= lines <= 7
            form = page.locator(".jp-OutputArea").first.inner_text()
            assert "<script>window.hacked = 1</script>" in form and "secret" not in form and "$6." in form
            assert page.evaluate("window.hacked") is None and not page.locator(".jp-OutputArea mjx-container").count()
            assert page.locator(".jp-Notebook .jp-CodeCell").count() == 1  # no key has reached the notebook
            # A new kernel goes on where the old one stopped.
            for kernel in json.load(urllib.request.urlopen(f"{base}/api/kernels")):
                urllib.request.urlopen(urllib.request.Request(f"{base}/api/kernels/{kernel['id']}/restart", method="POST"))
            page.reload()
            show(page)
            page.locator("small", has_text=f"{lines - 1} of 12 pairs judged").last.wait_for()
            while lines < 13:
                lines += 1
                press(page, "y", lines)
            page.locator("text=All 12 pairs are judged").last.wait_for()
            assert not problems
            window.close()
    finally:
        server.terminate()
        server.wait(20)
        out.close()
    assert len(verdicts()) == 13 and len(VerdictLog(work / "verdicts.jsonl")) == 12
