"""Query templates, candidates and frozen benchmarks: bad files, grammar in every combination, sampling, refusals."""
import hashlib
import importlib.util
import json
import re
from collections import Counter
from itertools import product

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_lib.benchmark.candidates import contributions, pool
from cdr_lib.benchmark.freeze import (
    BadBenchmark, composition, count_tokens, freeze, leave_out, read_benchmark, validate_benchmark,
)
from cdr_lib.benchmark.templates import (
    PAPER_SHARES, BadTemplates, Template, TemplateSet, expand, read_templates, sample_queries, wording_problems,
)
from cdr_lib.core.collection import TASK_AREAS, Collection
from cdr_lib.core.config import CdrError, data_dir, project_root
from cdr_lib.core.conversation import Conversation
from cdr_lib.core.layouts import read_collection, read_qrels
from cdr_lib.retrieval.run import Run


@pytest.fixture(scope="module")
def ours():
    return read_templates()


@pytest.fixture(scope="module")
def queries(ours):
    return expand(ours)


# ---- the project's own templates
def test_counts_of_the_paper(ours, queries):
    assert len(ours) == 130 and abs(ours.values - 510) <= 5 and abs(len(queries) - 28_000) <= 500
    assert set(ours.areas().index) == set(TASK_AREAS)


def test_card_states_the_counts(ours, queries):
    card = (data_dir() / "templates" / "cdr" / "README.md").read_text()
    assert f"| templates | {len(ours)} | 130 |" in card
    assert f"| placeholder values | {ours.values} | about 510 |" in card
    assert f"| queries | {len(queries):,} | about 28,000 |" in card
    for area, row in ours.areas().iterrows():
        assert f"| {area} | {row['templates']} | {row['queries']:,} |" in card
    for row in ours.values_frame().itertuples():
        assert f"| `{row.placeholder}` | {row.form} | {len(ours.placeholders[row.placeholder])} | {row.templates} |" in card


def test_every_expansion_reads_well(queries):
    assert wording_problems(queries["text"]).empty


def test_every_expansion_by_a_plain_loop(ours, queries):
    # The same set of texts by another way: replace one place after the other.
    texts = []
    for template in ours.templates:
        slots = re.findall(r"\{([a-z_.0-9]+)\}", template.text)
        for values in product(*(ours.placeholders[slot.split(".")[0]] for slot in slots)):
            by_list = {}
            for slot, value in zip(slots, values):
                by_list.setdefault(slot.split(".")[0], []).append(value)
            if all(len(set(found)) == len(found) for found in by_list.values()):
                text = template.text
                for slot, value in zip(slots, values):
                    text = text.replace(f"{{{slot}}}", value)
                texts.append(text)
    assert texts == queries["text"].tolist()
    filled = queries.sample(200, random_state=0)
    for row in filled.itertuples():
        text = next(item.text for item in ours.templates if item.id == row.template)
        for slot, value in json.loads(row.values).items():
            text = text.replace(f"{{{slot}}}", value)
        assert text == row.text


def test_no_value_is_unused_and_no_property_is_missing(ours):
    assert (ours.values_frame()["templates"] > 0).all()
    assert all(len(template.asks.split()) >= 4 for template in ours.templates)
    assert len({template.asks for template in ours.templates}) == len(ours)


def test_openings_vary(ours):
    openings = Counter(" ".join(template.text.split()[:2]) for template in ours.templates)
    assert len(openings) >= 30 and openings.most_common(1)[0][1] < len(ours) / 3


def test_shares_of_the_paper(queries):
    drawn = sample_queries(queries, 1583, shares=PAPER_SHARES)
    shares = 100 * drawn["area"].value_counts(normalize=True)
    assert round(shares["Intent & Purpose"], 1) == 36.1 and round(shares["Emotion & Feedback"], 1) == 20.1
    assert abs(sum(PAPER_SHARES.values()) - 1) < 1e-12


# ---- bad files
def problems_of(tmp_path, content, default=False, **options) -> list[str]:
    path = tmp_path / "mine.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    try:
        read_templates(path, default=default, **options)
    except BadTemplates as error:
        assert all(str(path) in problem or "no template in" in problem for problem in error.problems)
        return error.problems
    return []


GOOD = {"area": TASK_AREAS[0], "placeholders": {"fee": ["a late fee", "a toll"]},
        "templates": [{"id": "A1", "text": "Users angry about {fee}", "asks": "anger about a cost"}]}


def changed(**fields):
    return {**GOOD, **fields}


def entry(**fields):
    return changed(templates=[{**GOOD["templates"][0], **fields}])


@pytest.mark.parametrize("content, words", [
    (entry(text="Users angry about {fees}"), "{fees} is not defined"),
    (changed(placeholders={"fee": []}), "placeholder fee: no values"),
    (changed(placeholders={"fee": None}), "placeholder fee: no values"),
    (changed(placeholders={"fee": {"form": "noun", "values": []}}), "placeholder fee: no values"),
    (changed(placeholders={"fee": ["a", ""]}), "value 2: str '', not text"),
    (changed(placeholders={"fee": ["a", "  "]}), "value 2"),
    (changed(placeholders={"fee": ["a", None]}), "value 2: empty"),
    (changed(placeholders={"fee": ["a", True]}), "value 2: bool True, not text (quote it)"),
    (changed(placeholders={"fee": ["a", 3.5]}), "value 2: float"),
    (changed(placeholders={"fee": ["a toll", "A  Toll"]}), "value 2"),
    (changed(placeholders={"fee": ["a toll", "A TOLL"]}), "stands there already"),
    (changed(placeholders={"fee": ["a {toll}"]}), "has braces"),
    (changed(placeholders={"fee": {"form": "nouns", "values": ["a"]}}), "unknown form 'nouns'"),
    (changed(placeholders={"fee": {"form": "verb", "values": ["pays a toll", "a toll"]}}), "'a toll' is not a verb"),
    (changed(placeholders={"fee": {"values": ["a"], "weight": 2}}), "unknown field 'weight'"),
    (changed(placeholders={"Fee": ["a"]}), "a name has small letters"),
    (changed(placeholders={"fee": ["a"], "spare": ["b"]}), "placeholder spare: no template asks for it"),
    (entry(area="Weather"), "unknown area 'Weather'"),
    ({**GOOD, "area": "Weather"}, "unknown area 'Weather'"),
    ({key: GOOD[key] for key in ("placeholders", "templates")}, "unknown area None"),
    (entry(id="A 1"), "the id may have letters"),
    (entry(id=7), "id missing, blank or not text"),
    (entry(text=""), "text missing"),
    (entry(asks="  "), "asks missing"),
    (entry(text="Users angry about the weather"), "no placeholder"),
    (entry(text="Users angry about {fee"), "brace that belongs to no placeholder"),
    (entry(text="Users angry about {Fee}"), "brace that belongs to no placeholder"),
    (entry(text="Users with {fee}, {fee.2}, {fee.3}"), "3 different values of {fee} are needed, it has 2"),
    (entry(weight=3), "unknown field 'weight'"),
    (changed(templates=GOOD["templates"] * 2), "the id 'A1' is taken"),
    (changed(templates=[GOOD["templates"][0], {"id": "A2", "text": "users ANGRY  about {fee}", "asks": "x"}]), "the same text as"),
    (changed(templates=["Users angry about {fee}"]), "a mapping with id, text and asks"),
    (changed(templates=[]), "no template in"),
    (changed(templates=None), "templates is empty"),
    (changed(template=[]), "unknown field 'template'"),
    ([], "a mapping with templates"),
    ("", "a mapping with templates"),
    ("templates: [", "cannot be read as YAML"),
    ("placeholders: {fee: [a], fee: [b]}", "is written twice"),
])
def test_bad_file_is_refused_with_file_and_entry(tmp_path, content, words):
    assert problems_of(tmp_path, GOOD) == []
    found = problems_of(tmp_path, content)
    assert any(words in problem for problem in found), found


def test_all_problems_are_told_at_once(tmp_path):
    content = changed(placeholders={"fee": [], "spare": ["b"]},
                      templates=[{"id": "A1", "text": "Users of {nothing}", "asks": "x"}, {"id": "A1", "text": "{fee}", "asks": "x"}])
    assert len(problems_of(tmp_path, content)) >= 4


def test_missing_and_undecodable_files(tmp_path):
    with pytest.raises(BadTemplates, match="no such file"):
        read_templates(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes("area: Gefühl".encode("latin-1"))
    with pytest.raises(BadTemplates, match="cannot be read as YAML"):
        read_templates(tmp_path / "latin.yaml")
    with pytest.raises(BadTemplates, match="no files were given"):
        read_templates(default=False)


def test_unused_list_warns_where_not_strict(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(changed(placeholders={"fee": ["a toll"], "spare": ["b"]})))
    with pytest.warns(UserWarning, match="spare"):
        assert len(read_templates(path, default=False, strict=False)) == 1


def test_own_file_is_added_and_uses_our_lists(tmp_path, ours):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"area": TASK_AREAS[2], "placeholders": {"tariff": {"form": "noun", "values": ["a toll"]}},
                                    "templates": [{"id": "MY1", "text": "Users who compare {tariff} with {trouble}", "asks": "a cost"}]}))
    both = read_templates(path)
    assert len(both) == 131 and both.values == ours.values + 1
    assert set(expand(ours)["query"]) < set(expand(both)["query"])
    path.write_text(yaml.safe_dump(changed(placeholders={"tone": ["a dry tone"]}, templates=[
        {"id": "MY1", "text": "Users with {tone}", "asks": "x"}, {"id": "EF01", "text": "Users with {tone} {often}", "asks": "x"},
        {"id": "MY2", "text": "Users who {slip}", "asks": "x"}])))
    found = "\n".join(problems_of(tmp_path, path.read_text(), default=True))
    assert "tone: is defined in" in found and "'EF01' is taken by" in found and "cannot follow 'Users who'" not in found


# ---- properties of expansion and sampling
WORDS = st.lists(st.text("abcdefg", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["one", "two", "three"]), WORDS, min_size=1), st.data())
def test_expansion_is_complete_distinct_and_stable(lists, data):
    places = st.sampled_from([name for name in lists] + [f"{name}.2" for name, values in lists.items() if len(values) > 1])
    templates = []
    for number in range(data.draw(st.integers(1, 3))):
        slots = data.draw(st.lists(places, min_size=1, max_size=3))
        templates.append(Template(f"T{number}", TASK_AREAS[number], f"X{number} " + " / ".join(f"{{{slot}}}" for slot in slots), "x"))
    given_set = TemplateSet(tuple(templates), {name: tuple(values) for name, values in lists.items()})
    frame = expand(given_set)
    assert frame["query"].is_unique and frame["text"].is_unique and frame.equals(expand(given_set))
    assert frame.attrs["combinations"] == sum(map(given_set.combinations, templates)) == len(frame) + frame.attrs["repeated"]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 28_067), st.integers(0, 3))
def test_sample_has_its_size_and_even_parts(queries, n, seed):
    drawn = sample_queries(queries, min(n, 2_000), seed)
    assert len(drawn) == min(n, 2_000) and drawn["query"].is_unique
    parts = drawn["area"].value_counts()
    weights = queries.groupby("area")["template"].nunique() / 130 * len(drawn)
    assert ((parts.reindex(weights.index, fill_value=0) - weights).abs() < 1).all()


def test_sample_refuses_what_cannot_be_drawn(queries):
    for wrong in ({"n": 0}, {"n": 28_068}, {"n": 10, "shares": {"Weather": 1}}, {"n": 10, "shares": {TASK_AREAS[0]: float("nan")}},
                  {"n": 10, "shares": {}}, {"n": 2_722, "shares": {TASK_AREAS[4]: 1}}):
        with pytest.raises(CdrError, match="sample_queries"):
            sample_queries(queries, **wrong)


def test_id_does_not_depend_on_the_process(queries):
    row = queries.iloc[0]
    text = row["text"].encode()
    assert row["query"] == f"{row['template']}-{hashlib.sha256(len(text).to_bytes(8, 'big') + text).hexdigest()[:10]}"


# ---- candidates
@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("pqr"), st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5)), max_size=3),
                min_size=1, max_size=3), st.integers(1, 4))
def test_pool_against_a_plain_loop(results, k):
    runs = {f"r{number}": Run.from_dict(result, name=f"r{number}") for number, result in enumerate(results)}
    best: dict = {}
    for name, run in runs.items():
        for query in run.queries:
            for rank, (id, score) in enumerate(run[query][:k], 1):
                found = best.setdefault((query, id), {"rank": rank, "run": name, "score": score, "runs": ()})
                if rank < found["rank"]:
                    found.update(rank=rank, run=name, score=score)
                found["runs"] += (name,)
    frame = pool(runs, k)
    mine = {(row.query, row.conversation): {"rank": row.rank, "run": row.run, "score": row.score, "runs": row.runs}
            for row in frame.itertuples()}
    assert mine == best
    counts = frame.attrs
    assert counts["hits"] == counts["repeated"] + counts["excluded"] + counts["pairs"]
    assert (contributions(frame)["alone"] <= contributions(frame)["pairs"]).all()


# ---- frozen benchmarks
def tiny(name="tiny", extra=(), source="") -> Collection:
    made = [Conversation.make("c1", ("user", "Where is my parcel?"), ("assistant", "On its way."), source=source),
            Conversation.make("c2", ("user", "The soup was cold."), ("assistant", "I am sorry."), source=source),
            Conversation.make("c3", ("user", "Thanks a lot!"), ("assistant", "My pleasure."), source=source), *extra]
    return Collection(name, {item.id: item for item in made}, {"q1": "Users who ask about a delivery", "q2": "Users who complain"},
                      {"q1": {"c1": 1, "c2": 0}, "q2": {"c2": 1}}, {"q1": TASK_AREAS[1], "q2": TASK_AREAS[0]})


def verdicts(*pairs, judge="ann", kind="person", verdict="relevant") -> pd.DataFrame:
    return pd.DataFrame([(query, id, judge, kind, verdict, None, "", "2026-01-01T00:00:00Z", "first") for query, id in pairs],
                        columns=["query", "conversation", "judge", "kind", "verdict", "score", "reason", "time", "round"])


def kinds(report) -> list[str]:
    return [problem.kind for problem in report.problems]


def test_frozen_folder_reads_back_in_every_layout(tmp_path):
    folder = freeze(tiny(), tmp_path, "1.0", verdicts(("q1", "c1"), ("q2", "c2")), {"": "CC0"})
    assert folder == tmp_path / "tiny-1.0" and [path.name for path in tmp_path.iterdir()] == ["tiny-1.0"]
    back = read_benchmark(folder)
    assert (back.conversations, back.queries, back.qrels, back.areas) == (
        tiny().conversations, tiny().queries, tiny().qrels, tiny().areas)
    assert read_qrels(folder / "trec" / "qrels.txt") == tiny().qrels
    assert read_collection(folder / "beir").qrels == tiny().qrels
    # The CDR layout has no place for the pair judged not relevant, and the card says so.
    assert read_collection(folder).qrels == {"q1": {"c1": 1}, "q2": {"c2": 1}}
    assert "do not hold the judged pairs that are not relevant" in (folder / "card.md").read_text()
    kept = pd.read_parquet(folder / "parquet" / "verdicts.parquet")
    assert kept[["query", "conversation", "judge", "verdict"]].values.tolist() == [
        ["q1", "c1", "ann", "relevant"], ["q2", "c2", "ann", "relevant"]]


def test_same_content_gives_the_same_bytes(tmp_path):
    made = [freeze(tiny(), tmp_path / name, "1.0", licences={"": "CC0"}) for name in ("a", "b")]
    bytes_of = [{path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()} for folder in made]
    assert bytes_of[0] == bytes_of[1] and len(bytes_of[0]) == 13


def test_version_is_never_changed(tmp_path):
    folder = freeze(tiny(), tmp_path, "1.0", licences={"": "CC0"})
    before = (folder / "benchmark.json").read_bytes()
    other = tiny(extra=[Conversation.make("c4", ("user", "One more."))])
    with pytest.raises(CdrError, match="a version never changes"):
        freeze(other, tmp_path, "1.0", licences={"": "CC0"})
    assert (folder / "benchmark.json").read_bytes() == before
    assert freeze(other, tmp_path, "1.1", licences={"": "CC0"}).name == "tiny-1.1"


def test_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cdr_lib.benchmark.freeze.write_beir", fail)
    with pytest.raises(CdrError, match="No space left"):
        freeze(tiny(), tmp_path, "1.0", licences={"": "CC0"})
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_is_cleared_away(tmp_path):
    (tmp_path / ".tiny-1.0.partial" / "beir").mkdir(parents=True)
    (tmp_path / ".tiny-1.0.partial" / "beir" / "stale.jsonl").write_text("{}")
    folder = freeze(tiny(), tmp_path, "1.0", licences={"": "CC0"})
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-1.0"] and not (folder / "beir" / "stale.jsonl").exists()


@pytest.mark.parametrize("damage", ["edit", "remove"])
def test_damaged_folder_is_refused(tmp_path, damage):
    folder = freeze(tiny(), tmp_path, "1.0", licences={"": "CC0"})
    path = folder / "trec" / "qrels.txt"
    path.unlink() if damage == "remove" else path.write_text("q1 0 c3 1\n")
    with pytest.raises(CdrError, match="is missing" if damage == "remove" else "was changed"):
        read_benchmark(folder)


def test_licence_of_every_source(tmp_path):
    with pytest.raises(CdrError, match="no licence is known for the source 'our logs'"):
        freeze(tiny(source="our logs"), tmp_path, "1.0")
    folder = freeze(tiny(source="sgd"), tmp_path, "1.0")
    card = (folder / "card.md").read_text()
    assert "CC BY-SA" in card and "yes, under its licence" in card
    hidden = freeze(tiny(name="other", source="lmsys"), tmp_path, "1.0")
    assert re.search(r"\| lmsys .* \| NO \|", (hidden / "card.md").read_text())


def test_refusals_name_the_place():
    spaced = Conversation.make("d1", ("user", " where is MY parcel? "), ("assistant", "On its\nway."))
    swapped = Conversation.make("d2", ("assistant", "Where is my parcel?"), ("user", "On its way."))
    report = validate_benchmark(tiny(extra=[spaced, swapped]), strict=False)
    assert kinds(report) == ["duplicate_conversation"] and "'d1' reads like 'c1'" in report.problems[0].detail
    with pytest.raises(BadBenchmark, match="'d1' reads like 'c1'"):
        validate_benchmark(tiny(extra=[spaced]))

    told = Conversation.make("t", ("user", "Please write: USERS who ask, about a\n delivery."), ("assistant", "Done."))
    near = Conversation.make("n", ("user", "Users who ask about the delivery; users who ask about a"), ("assistant", "delivery"))
    assert [(p.kind, p.id) for p in validate_benchmark(tiny(extra=[told, near]), strict=False).problems] == [
        ("query_in_conversation", "q1")]
    # Three words may stand anywhere.
    short = Conversation.make("s", ("user", "I know users who complain."))
    assert validate_benchmark(tiny(extra=[short])).ok

    broken = tiny()
    broken.queries["q3"], broken.queries["q4"] = "USERS who complain", "Nobody"
    broken.qrels.update(q3={"c2": 1}, q4={"c1": 0}, q1={"c9": 1, "c1": 1})
    assert sorted(kinds(validate_benchmark(broken, strict=False))) == [
        "dangling", "duplicate_query", "no_relevant", "query_without_area", "query_without_area"]


def test_leaks_from_training():
    seen = Conversation.make("x", ("user", "The SOUP was cold."), ("assistant", "I am sorry. "))
    report = validate_benchmark(tiny(), [seen], strict=False)
    assert [(p.kind, p.id) for p in report.problems] == [("training_conversation", "c2")]
    # The same id of the same source is the same conversation, however it was edited; of another source it is not.
    edited = Conversation.make("c1", ("user", "Anything else"), source="sgd")
    assert validate_benchmark(tiny(source="dialogsum"), [edited]).ok
    assert kinds(validate_benchmark(tiny(source="sgd"), [edited], strict=False)) == ["training_conversation"]
    trained = Collection("t", {"x": Conversation.make("x", ("user", "Hi"))}, {"t1": "users who COMPLAIN"}, {"t1": {"x": 1}})
    assert kinds(validate_benchmark(tiny(), trained, strict=False)) == ["training_query"]


def test_pair_that_nobody_vouches_for():
    report = validate_benchmark(tiny(), provenance=pd.concat([
        verdicts(("q1", "c1")), verdicts(("q2", "c2"), verdict="irrelevant"), verdicts(("q2", "c2"), judge="bob", verdict="unsure")]),
        strict=False)
    assert [(p.kind, p.id) for p in report.problems] == [("no_provenance", "q2")]
    with pytest.raises(CdrError, match="lacks judge"):
        validate_benchmark(tiny(), provenance=verdicts(("q1", "c1")).drop(columns="judge"))


def test_general_queries_are_left_out_and_listed(tmp_path):
    many = [Conversation.make(f"m{number}", ("user", f"Complaint {number}")) for number in range(60)]
    wide = tiny(extra=many)
    wide.qrels["q2"].update({item.id: 1 for item in many[:50]})
    report = validate_benchmark(wide)
    assert report.excluded == {"q2": 51} and report.ok
    wide.qrels["q2"].pop("m0")
    assert validate_benchmark(wide).excluded == {}
    wide.qrels["q2"]["m0"] = 1
    folder = freeze(wide, tmp_path, "1.0", licences={"": "CC0"})
    assert read_benchmark(folder).queries.keys() == {"q1"} and "Users who complain (51)" in (folder / "card.md").read_text()
    assert set(leave_out(wide, ["q1"]).queries) == {"q2"} and len(wide.queries) == 2
    only = Collection("only", wide.conversations, {"q2": wide.queries["q2"]}, {"q2": wide.qrels["q2"]})
    with pytest.raises(BadBenchmark, match="no queries"):
        freeze(only, tmp_path, "1.0", licences={"": "CC0"})


def test_agreement_and_judges_on_the_card(tmp_path):
    pairs = [("q1", "c1"), ("q1", "c2"), ("q2", "c2")]
    table = pd.concat([verdicts(*pairs[:1], *pairs[2:]), verdicts(pairs[1], verdict="irrelevant"),
                       verdicts(*pairs[:1], *pairs[2:], judge="bob"), verdicts(pairs[1], judge="bob", verdict="irrelevant")])
    card = (freeze(tiny(), tmp_path, "1.0", table, {"": "CC0"}) / "card.md").read_text()
    assert re.search(r"\| ann \| person \| 3 \| 2 \| 1 \| 0 \| first \|", card)
    assert re.search(r"\| person \| Cohen's kappa \| ann, bob \| 1\\?\.000", card)


def test_hostile_text_on_the_card(tmp_path):
    item = tiny()
    item.queries["q1"] = "Users who paste <script>alert(1)</script> | and **bold** into a chat"
    card = (freeze(item, tmp_path, "1.0", licences={"": "<b>|x"}, limits=["<img src=x>"], most=1) / "card.md").read_text()
    assert "<script>" not in card and "<b>" not in card and "<img" not in card


def test_composition_by_hand():
    numbers = composition(tiny(), "words")
    assert numbers["messages_per_conversation"] == 2 and numbers["relevant_per_query"] == 1 and numbers["judged_pairs"] == 3
    # "user: Where is my parcel?" is 2 + 5 marks and words, "assistant: On its way." 2 + 4; and so on.
    assert numbers["tokens"] == (7 + 6) + (7 + 6) + (6 + 5)
    assert count_tokens(["user: hello"], "minilm").tolist() == [3]
    with pytest.raises(CdrError, match="cannot be loaded"):
        count_tokens(["x"], str(project_root() / "nowhere"))


@pytest.mark.skipif(importlib.util.find_spec("mteb") is None, reason="needs the extra [mteb]")
def test_mteb_task_gives_our_numbers(tmp_path):
    from cdr_lib.benchmark.freeze import mteb_task

    folder = freeze(tiny(), tmp_path, "1.0", licences={"": "Apache-2.0"})
    task = mteb_task(folder)()
    task.load_data()
    split = task.dataset["default"]["test"]
    assert split["corpus"]["id"] == ["c1", "c2", "c3"] and split["relevant_docs"] == tiny().qrels
    assert split["queries"]["text"] == list(tiny().queries.values()) and task.metadata.license == "apache-2.0"


def test_ranks_and_scores_are_numbers():
    frame = pool({"a": Run.from_dict({"q": {"c": np.float32(0.5)}})})
    assert frame["rank"].tolist() == [1] and frame["score"].tolist() == [0.5]
