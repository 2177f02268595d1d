"""The sample collection: reproducible, valid, hard by construction, and the same on disk as its notebook writes."""
import json
import re
from collections import Counter

import pytest

from cdr_lib.benchmark.sample import RELEVANT, build_sample, load_grammar, matches, trace, write_sample
from cdr_lib.core.collection import TASK_AREAS
from cdr_lib.core.config import CdrError, data_dir
from cdr_lib.core.layouts import read_cdr
from cdr_lib.evaluation.metrics import score_run
from cdr_lib.retrieval.search import search

FOLDER = data_dir() / "sample" / "cdr"


@pytest.fixture(scope="module")
def sample():
    return build_sample()


def test_the_committed_files_are_what_the_generator_writes(sample, tmp_path):
    write_sample(sample, tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (FOLDER / path.name).read_bytes(), path.name


def test_the_committed_collection_is_valid_and_of_the_asked_size():
    collection = read_cdr(FOLDER)
    assert not collection.validate().problems
    lengths = Counter(len(item) for item in collection.conversations.values())
    assert sum(lengths.values()) >= 600 and min(lengths) >= 4 and max(lengths) <= 12
    assert len(collection.queries) >= 150 and set(collection.areas.values()) == set(TASK_AREAS)
    relevant = [len(grades) for grades in collection.qrels.values()]
    assert RELEVANT[0] <= min(relevant) and max(relevant) <= RELEVANT[1] and 15 <= sum(relevant) / len(relevant) <= 25


def test_hard_negatives_are_labelled_and_never_relevant():
    collection = read_cdr(FOLDER)
    negatives = json.loads((FOLDER / "hard_negatives.json").read_text())
    assert set(negatives) == set(collection.queries) and all(len(found) >= 3 for found in negatives.values())
    for query, found in negatives.items():
        assert not set(found) & collection.relevant(query) and set(found) <= set(collection.conversations)
    assert set(Counter(kind for found in negatives.values() for kind in found.values())) == {"role", "progression", "context"}


def test_no_query_stands_in_a_conversation():
    collection = read_cdr(FOLDER)
    everything = re.sub(r"\W+", " ", " ".join(map(str, collection.conversations.values())).lower())
    assert not [text for text in collection.queries.values() if re.sub(r"\W+", " ", text.lower()).strip() in everything]


def test_words_alone_do_not_solve_it():
    collection = read_cdr(FOLDER)
    run = search(collection.queries, collection.conversations, "bm25", "session")
    assert score_run(run, collection.qrels, ["nDCG@10"])["value"].mean() < 0.4


def test_another_seed_gives_another_collection_and_the_same_seed_the_same(sample):
    again, other = build_sample(), build_sample(seed=1)
    assert again.collection.conversations == sample.collection.conversations and again.negatives == sample.negatives
    assert not set(map(str, other.collection.conversations.values())) & set(map(str, sample.collection.conversations.values()))


def test_it_scales_with_the_corpus():
    collection = build_sample(n_conversations=3000).collection
    assert len(collection.conversations) == 3000 and len(set(map(str, collection.conversations.values()))) == 3000
    assert max(len(grades) for grades in collection.qrels.values()) <= RELEVANT[1]


@pytest.mark.parametrize("options", [{"n_conversations": 0}, {"n_queries": 0}, {"n_conversations": 20}])
def test_what_cannot_be_built_is_refused(options):
    with pytest.raises(CdrError, match="n_conversations"):
        build_sample(**options)


@pytest.mark.parametrize("pattern, roles, labels, found", [
    ("user.a > assistant.b", ["user", "assistant"], ["a", "b"], True),
    ("user.a > assistant.b", ["assistant", "user"], ["b", "a"], False),
    ("user.a > assistant.b", ["assistant", "user"], ["a", "b"], False),
    ("user.a > assistant.b", ["user", "assistant", "user", "assistant"], ["a", "x", "x", "b"], True),
    ("user.a >> assistant.b", ["user", "assistant", "user", "assistant"], ["a", "x", "x", "b"], False),
    ("user.a", ["assistant"], ["a"], False),
])
def test_patterns_read_roles_and_order(pattern, roles, labels, found):
    assert matches(pattern, trace(roles, [[label] for label in labels])) is found


def test_the_grammar_is_read_and_checked():
    grammar = load_grammar()
    assert len(grammar.domains) >= 8 and all(grammar.queries[area] for area in TASK_AREAS)
