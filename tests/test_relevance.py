"Reranker, message network and relevance classifier: splits without leaks, exact decisions, nothing lost, bad input."
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from cdr_lib.benchmark import reranker as module
from cdr_lib.benchmark.generate import GeneratedQuery
from cdr_lib.benchmark.relevance import (RelevanceClassifier, against_order, calibration_curve, inconsistent, override,
                                         review_queue, uncertain)
from cdr_lib.benchmark.reranker import (check_pairs, decide_pairs, labelled_pairs, load_reranker, map_pairs, score_pairs,
                                        split_pairs, train_reranker)
from cdr_lib.benchmark.turns import TurnReranker, train_turns
from cdr_lib.core.config import CdrError, file_hash
from cdr_lib.core.conversation import Conversation, content_hash
from cdr_lib.core.store import Store
from cdr_lib.retrieval.run import Run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

GOODS = ("lamp", "chair", "phone", "kettle", "jacket", "mirror", "carpet", "camera", "tent", "clock", "drum", "desk")


def talk(id, *texts):
    return Conversation.make(id, *((("user", "assistant")[i % 2], text) for i, text in enumerate(texts)))


WORLD = {f"{who}-{good}": talk(f"{who}-{good}", *([f"The {good} is broken.", "Let me look."][::step]))
         for who, step in (("user", 1), ("assistant", -1)) for good in GOODS}
ASKED = {"q-user": "the user says that something is broken", "q-assistant": "the assistant says that something is broken"}
PAIRS = pd.DataFrame([(text, id, int(id.startswith(query[2:]))) for query, text in ASKED.items() for id in WORLD],
                     columns=["text", "conversation", "label"])
TURNS = {"base": "hash", "kind": "turns", "valid": 0.25, "epochs": 40, "batch_size": 8, "learning_rate": 1e-2,
         "device": "cpu", "progress": False}


class Fixed:
    "A reranker whose score stands in the conversation."

    name = "fixed"

    def fingerprint(self):
        return {"kind": "fixed"}

    def score(self, pairs, batch_size=None, progress=True):
        return np.array([float(text.split()[1]) for _, text in pairs])


def scored(*values):
    return {f"c{number:03d}": talk(f"c{number:03d}", f"{value} {number}") for number, value in enumerate(values)}


def everything(conversations, queries=("q",)):
    return Run.from_dict({query: {id: 1.0 for id in conversations} for query in queries})

# --- pairs and splits


def test_generated_queries_become_pairs():
    made = [GeneratedQuery("a", "A", "c1", "rule"), GeneratedQuery("b", "B", "c1", "rule", "paraphrase", "a"),
            *(GeneratedQuery(kind, kind, "c1", "rule", kind, "a") for kind in ("role", "order", "outcome"))]
    assert labelled_pairs(made)["label"].tolist() == [1, 1, 0, 0, 0]
    assert list(labelled_pairs([])) == ["text", "conversation", "label"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=30), st.floats(0.01, 0.99), st.integers(0, 5))
def test_no_content_is_on_both_sides(contents, share, seed):
    world = {str(number): talk(str(number), f"text {content}") for number, content in enumerate(contents)}
    pairs = pd.DataFrame({"text": "q", "conversation": list(world), "label": 1})
    if len(set(contents)) == 1:
        with pytest.raises(CdrError, match="needs two"):
            split_pairs(pairs, world, share, seed)
        return
    split = split_pairs(pairs, world, share, seed)
    sides = [{content_hash(world[id]) for id in part["conversation"]} for part in split]
    assert sides[1] and not sides[0] & sides[1]
    # One query is asked on both sides; with a large share it is kept from training altogether.
    assert sorted(split.valid["conversation"]) == sorted(id for id in world if content_hash(world[id]) in sides[1])
    assert split.train.empty or sorted(pd.concat(split)["conversation"]) == sorted(world)


@pytest.mark.parametrize("share, held", [(0.1, 2), (0.25, 5), (0.5, 10)])
def test_queries_are_kept_from_training_too(share, held):
    world = {str(number): talk(str(number), f"text {number}") for number in range(20)}
    pairs = pd.DataFrame([(f"q{query}", id, query % 2) for query in range(20) for id in world]
                         + [("only here", "0", 1)], columns=["text", "conversation", "label"])
    train, valid = split_pairs(pairs, world, share)
    new = set(valid["text"]) - set(train["text"]) - {"only here"}
    assert len(new) == held and valid["conversation"].nunique() == round(20 * share)
    assert not set(train["conversation"]) & set(valid["conversation"])
    assert len(train) == (20 - held) * (20 - round(20 * share)) + ("only here" in set(train["text"]))


def test_rules_give_each_query_right_and_wrong_conversations():
    from cdr_lib.benchmark.generate import augment, find_acts, generate_queries, holds
    from cdr_lib.benchmark.reranker import rule_pairs
    from cdr_lib.benchmark.sample import make_sample

    world = dict(list(make_sample().conversations.items())[:120])
    queries = generate_queries(world.values())
    made = [*queries, *augment(queries, world)]
    pairs = rule_pairs(made, world, right=3, wrong=2)
    asked = {one.text: one for one in made}
    for text, id, label in pairs.sample(300, random_state=0).values:
        text_of = module.render(world[id].turns, "text").lower()
        assert label == (holds(find_acts(world[id]), asked[text].steps) and asked[text].topic in text_of)
    share = pairs.groupby("text")["label"].agg(["mean", "sum", "size"])
    assert (share["sum"] <= 3).all() and (share["mean"] == 1 / 3).all() and len(share) > 100
    assert check_pairs(pairs, world).attrs == {"repeated": 0}
    assert pairs.equals(rule_pairs(made, dict(reversed(world.items())), right=3, wrong=2))


def test_one_class_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(CdrError, match="training set holds only right pairs"):
        train_reranker(PAIRS[PAIRS["label"] == 1], WORLD, tmp_path / "m", **TURNS)
    with pytest.raises(CdrError, match="training set holds only wrong pairs"):
        RelevanceClassifier.train(PAIRS[PAIRS["label"] == 0], WORLD, tmp_path / "m", **TURNS)
    one = PAIRS[(PAIRS["conversation"] == "user-lamp") & (PAIRS["label"] == 1)]
    with pytest.raises(CdrError, match="validation set holds only right pairs"):
        train_reranker(PAIRS[PAIRS["conversation"] != "user-lamp"], WORLD, tmp_path / "m", **TURNS | {"valid": one})
    # the same words under another id are known too
    twin = {**WORLD, "twin": talk("twin", "The lamp is broken.", "Let me look.")}
    with pytest.raises(CdrError, match="'twin' is also learned from"):
        train_reranker(PAIRS, twin, tmp_path / "m", **TURNS | {"valid": one.assign(conversation="twin")})
    assert not list(tmp_path.iterdir())


def test_pairs_that_contradict_each_other_are_refused():
    with pytest.raises(CdrError, match="both right and wrong"):
        check_pairs(pd.concat([PAIRS, PAIRS[:1].assign(label=lambda frame: 1 - frame["label"])]), WORLD)
    with pytest.raises(CdrError, match="neither 1"):
        check_pairs(PAIRS.assign(label=None), WORLD)

# --- scores and the mapping


def test_the_threshold_is_exclusive_and_fifty_are_not_too_many():
    world = scored(*[0.95] * 50, 0.9, 0.1)
    mapped = map_pairs({"q": "?"}, world, Fixed(), everything(world), progress=False)
    assert mapped["kept"].sum() == 50 and mapped.attrs["excluded"] == {}
    assert mapped.set_index("conversation").loc["c050", "reason"] == "score"
    world = scored(*[0.95] * 51, 0.1)
    mapped = map_pairs({"q": "?"}, world, Fixed(), everything(world), progress=False)
    assert not mapped["kept"].any() and mapped.attrs["excluded"] == {"q": 51}
    assert mapped["reason"].value_counts().to_dict() == {"too general": 51, "score": 1}
    assert mapped.attrs["above"] == 51 and mapped.attrs["kept"] == mapped.attrs["queries_with"] == 0
    # another decision needs no model
    assert decide_pairs(mapped, most=60)["kept"].sum() == 51 and decide_pairs(mapped, 0.05, 60)["kept"].sum() == 52


def test_a_depth_that_cannot_tell_is_refused():
    world = scored(*[0.95] * 60)
    with pytest.raises(CdrError, match="reading more than that"):
        map_pairs({"q": "?"}, world, Fixed(), everything(world), depth=50)
    assert map_pairs({"q": "?"}, world, Fixed(), everything(world), depth=51, progress=False).attrs["excluded"] == {"q": 51}


def test_a_query_without_candidates_is_counted():
    world = scored(0.95, 0.2)
    run = Run.from_dict({"q": {"c000": 1.0}, "empty": {}})
    mapped = map_pairs({"q": "?", "empty": "!"}, world, Fixed(), run, progress=False)
    assert mapped.attrs["queries"] == 2 and mapped.attrs["queries_without_candidates"] == 1 and len(mapped) == 1


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_killed_mapping_goes_on(tmp_path):
    code = textwrap.dedent(f"""
        import os, signal, sys
        sys.path.insert(0, {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))!r})
        from tests.test_relevance import *
        module._CHUNK, module._FLUSH = 10, 0
        class Dying(Fixed):
            asked = 0
            def score(self, pairs, *rest):
                self.asked += 1
                if self.asked == 4: os.kill(os.getpid(), signal.SIGKILL)
                return super().score(pairs, *rest)
        world = scored(*(n / 100 for n in range(55)))
        map_pairs({{"q": "?"}}, world, Dying(), everything(world), store=Store({str(tmp_path / 's')!r}), progress=False)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()

    class Counting(Fixed):
        asked = 0

        def score(self, pairs, *rest):
            self.asked += len(pairs)
            return super().score(pairs, *rest)

    world, counting = scored(*(n / 100 for n in range(55))), Counting()
    mapped = map_pairs({"q": "?"}, world, counting, everything(world), store=Store(tmp_path / "s"), progress=False)
    assert counting.asked == 55 - 30
    assert np.allclose(mapped.sort_values("conversation")["score"], np.arange(55) / 100)


def test_each_distinct_pair_is_scored_once_longest_first():
    seen = []

    class Recorder(Fixed):
        def score(self, pairs, *rest):
            seen.extend(pairs)
            return super().score(pairs, *rest)

    texts = [("q", "user: 0.5 " + "x" * size) for size in (3, 9, 1, 9, 3)]
    assert score_pairs(Recorder(), texts, progress=False).tolist() == [0.5] * 5
    assert [len(text) for _, text in seen] == [19, 13, 11]


@pytest.mark.parametrize("values", [[1.5], [float("nan")], [-0.1]])
def test_scores_that_are_no_probabilities_are_refused(values):
    world = scored(*values)
    with pytest.raises(CdrError, match="no probabilities"):
        map_pairs({"q": "?"}, world, Fixed(), everything(world), progress=False)


def test_a_store_needs_a_fingerprint(tmp_path):
    class Nameless:
        name = "nameless"

    with pytest.raises(CdrError, match="no fingerprint"):
        score_pairs(Nameless(), [("q", "text")], Store(tmp_path), progress=False)

# --- the network over messages


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_reranker(PAIRS, WORLD, tmp_path_factory.mktemp("turns") / "m", **TURNS)


def test_roles_alone_are_learned(trained):
    assert trained.average_precision == 1.0 and trained.counts["validation conversations"] == 6
    reranker = load_reranker(trained, "cpu")
    assert isinstance(reranker, TurnReranker)
    mapped = map_pairs(ASKED, WORLD, reranker, everything(WORLD, ASKED), threshold=0.5, progress=False)
    right = [id.split("-")[0] == query[2:] for query, id in zip(mapped["query"], mapped["conversation"])]
    assert (mapped["kept"] == right).mean() > 0.9
    assert trained.validation.equals(pd.read_parquet(trained.path / "validation.parquet"))


def test_nothing_is_cut_from_a_long_conversation(trained):
    reranker = TurnReranker(trained.path, "cpu")
    talks = ["\n".join(["user: hello", "assistant: yes?"] * 150 + [f"user: {end}"]) for end in ("The lamp is broken.", "Bye.")]
    found = reranker.score([(ASKED["q-user"], text) for text in talks], progress=False)
    assert found[0] != found[1] and np.isfinite(found).all()


def test_scores_do_not_depend_on_company(trained):
    reranker = TurnReranker(trained.path, "cpu")
    texts = module.pair_texts(PAIRS, WORLD)
    together = reranker.score(texts, progress=False)
    assert np.allclose(together, [reranker.score([pair], progress=False)[0] for pair in texts], atol=1e-5)


def test_same_seed_same_network_and_a_stop_costs_nothing(tmp_path, monkeypatch):
    from cdr_lib.core import training

    texts = module.pair_texts(PAIRS, WORLD)
    options = {"epochs": 3, "batch_size": 8, "device": "cpu", "progress": False}
    whole, other = (train_turns("hash", texts, PAIRS["label"], tmp_path / str(seed), seed=seed, **options) for seed in (0, 1))

    def stop(loss, epoch, step):
        if (epoch, step) == (1, 2):
            raise KeyboardInterrupt
        return loss

    monkeypatch.setattr(training, "_check_finite", stop)
    with pytest.raises(KeyboardInterrupt):
        train_turns("hash", texts, PAIRS["label"], tmp_path / "m", save_seconds=0, **options)
    monkeypatch.undo()
    again = train_turns("hash", texts, PAIRS["label"], tmp_path / "m", **options)
    hashes = [file_hash(path / "model.safetensors") for path in (whole, again, other)]
    assert hashes[0] == hashes[1] != hashes[2]

# --- the classifier


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=60), st.integers(1, 12))
def test_calibration_by_hand(rows, bins):
    labels, scores = map(list, zip(*rows))
    frame = calibration_curve(labels, scores, bins)
    edges = np.linspace(0, 1, bins + 1)
    ece = 0.0
    for place, row in frame.iterrows():
        inside = [(label, score) for label, score in rows
                  if edges[place] <= score and (score < edges[place + 1] or place == bins - 1)]
        assert row["n"] == len(inside)
        if inside:
            share, mean = np.mean([label for label, _ in inside]), np.mean([score for _, score in inside])
            assert row["relevant"] == pytest.approx(share) and row["score"] == pytest.approx(mean)
            ece += len(inside) / len(rows) * abs(share - mean)
        else:
            assert np.isnan(row["score"]) and np.isnan(row["relevant"])
    assert frame.attrs["ece"] == pytest.approx(ece, abs=1e-12)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.booleans(), max_size=14))
def test_boundaries_by_trying_all(relevant):
    n = len(relevant)
    wrong = {cut: {place for place, flag in enumerate(relevant) if flag != (place < cut)} for cut in range(n + 1)}
    least = min(map(len, wrong.values()))
    expected = set().union(*(places for places in wrong.values() if len(places) == least))
    assert set(np.flatnonzero(against_order(relevant)).tolist()) == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.booleans()), min_size=1, max_size=30))
def test_queries_do_not_mix(rows):
    frame = pd.DataFrame(rows, columns=["query", "rank", "relevant"])
    expected = np.zeros(len(frame), bool)
    for _, part in frame.groupby("query"):
        part = part.sort_values("rank", kind="stable")
        expected[part.index] = against_order(part["relevant"])
    assert inconsistent(frame).tolist() == expected.tolist()


def test_the_queue_has_every_pair_once_least_confident_first():
    frame = pd.DataFrame({"query": "q", "conversation": list("abcdef"), "rank": range(6),
                          "relevant": [True, False, True, True, False, False],
                          "confidence": [.9, .6, .99, .899999, .95, .5]})
    queue = review_queue(frame)
    assert queue["conversation"].tolist() == ["f", "b", "d"]
    assert queue["why"].tolist() == ["uncertain", "uncertain, boundary", "uncertain"]
    assert uncertain(frame).tolist() == [False, True, False, True, False, True]  # 0.9 itself is sure enough
    assert review_queue(frame, decided=frame[["query", "conversation"]]).attrs["queue"] == 0


def test_people_override_and_everything_is_counted():
    rng = np.random.default_rng(0)
    judged = pd.DataFrame([(f"q{q}", f"c{c}") for q in range(6) for c in range(20)], columns=["query", "conversation"])
    judged["probability"] = rng.random(len(judged))
    judged["relevant"] = judged["probability"] >= 0.5
    people = judged.sample(40, random_state=1)[["query", "conversation"]].assign(
        verdict=rng.choice(["relevant", "irrelevant", "no consensus"], 40))
    people = pd.concat([people, pd.DataFrame({"query": ["q9"], "conversation": ["c9"], "verdict": ["relevant"]})])
    final = override(judged, people)
    said = {(query, id): verdict for query, id, verdict in people.itertuples(index=False)}
    assert len(final) == 121 and final["query"].tolist()[:120] == judged["query"].tolist()
    for row in final.itertuples():
        pair = (row.query, row.conversation)
        if pair in said:
            assert (row.verdict, row.by) == (said[pair], "person")
        else:
            assert (row.verdict, row.by) == ("relevant" if row.probability >= 0.5 else "irrelevant", "model")
    counts = final.attrs
    assert counts["by model"] == 80 and counts["added"] == 1
    assert counts["confirmed"] + counts["changed"] + counts["discarded"] == 40


def test_the_classifier_from_end_to_end(trained, tmp_path):
    classifier = RelevanceClassifier(trained, Store(tmp_path / "s"), device="cpu")
    candidates = pd.DataFrame([(query, id, place) for query in ASKED for place, id in enumerate(WORLD, 1)],
                              columns=["query", "conversation", "rank"])
    judged = classifier.judge(candidates, ASKED, WORLD, progress=False)
    truth = [id.split("-")[0] == query[2:] for query, id in zip(judged["query"], judged["conversation"])]
    assert (judged["relevant"] == truth).mean() > 0.9
    assert np.allclose(judged["confidence"], np.where(judged["relevant"], judged["probability"], 1 - judged["probability"]))
    assert classifier.calibration(5)["n"].sum() == len(trained.validation)
    with pytest.raises(CdrError, match="'nobody' is not there"):
        classifier.judge(candidates.assign(conversation="nobody"), ASKED, WORLD)
