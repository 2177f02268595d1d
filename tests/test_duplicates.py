"""Duplicates: the cases of curation, properties against literal reference computations, and bad input."""

import json
import os
import subprocess
import sys
import unicodedata
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import Conversation, Turn
from cdr_lib.curation.exact import drop_exact, exact_duplicates, exact_keys, normal_text, repeated_turns
from cdr_lib.curation.fuzzy import (
    FuzzyConfig,
    Sketches,
    _Greedy,
    _shingles,
    drop_fuzzy,
    fuzzy_duplicates,
    fuzzy_pairs,
    score_kept,
    score_pairs,
    sketch,
)
from cdr_lib.curation.semantic import drop_semantic, neighbour_pairs, semantic_duplicates
from cdr_lib.curation.settle import Duplicates, in_evaluation, preference, settle, settle_groups


def chats(texts: dict, split: dict | None = None) -> list[Conversation]:
    return [
        Conversation(name, Conversation.make(name, ("user", text)).turns, meta={"split": split[name]} if split else {})
        for name, text in texts.items()
    ]


def removed(table) -> dict:
    return dict(zip(table.id, table.survivor))


def word_shingles(text: str, n: int) -> set:
    words = text.lower().split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)} or ({text.lower()} if words else set())


def jaccard(one: set, two: set) -> float:
    return len(one & two) / len(one | two) if one and two else 0.0


def literal(near: dict, order) -> set:
    "Rows kept by going through them in order, the obvious way."
    kept: set = set()
    for row in order:
        if not near.get(row, set()) & kept:
            kept.add(row)
    return kept


# The cases


def test_CUR_01_short_texts_are_one_shingle():
    texts = {"t1": "yes", "t2": "no", "t3": "yes", "t4": "", "t5": "thanks a lot", "t6": "thanks so much"}
    kept, dropped = drop_fuzzy(chats(texts), FuzzyConfig(0.8, words=5, shingle="word"), progress=False)
    assert removed(dropped) == {"t3": "t1"} and dropped.similarity.tolist() == [1.0]
    assert [chat.id for chat in kept] == ["t1", "t2", "t4", "t5", "t6"]


@pytest.mark.parametrize("shingle", ["auto", "word", "char"])
def test_CUR_01_empty_texts_are_copies_of_nothing(shingle):
    texts = {"a": "", "b": " \n", "c": "\u200b\ufeff", "d": "...", "e": "...", "f": "!", "g": "\u3002", "h": "?"}
    _, dropped = drop_fuzzy(chats(texts), FuzzyConfig(shingle=shingle), progress=False)
    assert removed(dropped) == {"e": "d"}
    sketches = sketch(texts.values(), FuzzyConfig(shingle=shingle))
    assert sketches.jaccard([0, 0, 0, 3], [0, 1, 3, 4]).tolist() == [0, 0, 0, 1]
    assert removed(drop_exact(chats(texts))[1]) == {"e": "d"}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)])
def test_CUR_03_no_chaining_in_any_order(order):
    texts = {
        "A": "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10",
        "B": "w2 w3 w4 w5 w6 w7 w8 w9 w10 w11",
        "C": "w3 w4 w5 w6 w7 w8 w9 w10 w11 w12",
    }
    config = FuzzyConfig(0.8, words=1, shingle="word")
    assert np.round(sketch(texts.values(), config).jaccard([0, 1, 0], [1, 2, 2]), 4).tolist() == pytest.approx(
        [0.8182, 0.8182, 0.6667]
    )
    names = [list(texts)[i] for i in order]
    kept, dropped = drop_fuzzy(chats({name: texts[name] for name in names}), config, progress=False)
    assert sorted(chat.id for chat in kept) == ["A", "C"] and removed(dropped) == {"B": "C"}
    assert dropped.similarity[0] >= 0.8


def test_CUR_03_the_same_for_vectors():
    angles = np.radians([0, 20, 40])
    vectors = np.c_[np.cos(angles), np.sin(angles)].astype(np.float32)
    found = semantic_duplicates(neighbour_pairs(vectors, 0.9, progress=False), 0.9, np.arange(3))
    assert found.survivor.tolist() == [0, 0, 2]


def test_CUR_04_normal_form():
    texts = {"a": "Caf\u00e9 menu", "b": "Cafe\u0301 menu", "c": "Caf\u00e9\u00a0 menu ", "d": "Cafe menu"}
    kept, dropped = drop_exact(chats(texts))
    # "c" is the longest as it stands: the survivor is the original, unmodified
    assert {chat.id: chat.turns[0].text for chat in kept} == {"c": texts["c"], "d": texts["d"]}
    assert removed(dropped) == {"a": "c", "b": "c"}
    keys = exact_keys(chats(texts))
    found = exact_duplicates(keys, np.arange(4))  # first come, first kept
    assert found.survivor.tolist() == [0, 0, 0, 3]


@pytest.mark.parametrize(
    "one, two",
    [
        ("a\tb", "a b"),
        ("a\r\nb", "a\nb"),
        (" a ", "a"),
        ("a\u2003b", "a b"),
        ("A", "a"),
        ("\u1e9e", "ss"),
        ("a\u00adb", "ab"),
        ("\u202ba\u202c", "a"),
        ("\ufeffa", "a"),
        ("a\u200bb", "ab"),
        ("\u212b", "\u00e5"),
        ("e\u0301\u0323", "\u1eb9\u0301"),
        ("a\x00", "a"),
        ("\u2066a\u2069", "a"),
        ("\uac00", "\u1100\u1161"),
        ("a\u3000b", "a b"),
        ("a\x85b", "a b"),
    ],
)
def test_CUR_04_the_same_to_a_reader(one, two):
    assert normal_text(one) == normal_text(two)
    assert len(drop_exact(chats({"1": one, "2": two}))[0]) == 1


@pytest.mark.parametrize(
    "one, two",
    [
        ("caf\u00e9", "cafe"),
        ("a b", "ab"),
        ("ｆｕｌｌ", "full"),
        ("yes!", "yes"),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u062e"),
        ("👍", "👎"),
        ("1²", "12"),
    ],
)
def test_CUR_04_not_the_same_to_a_reader(one, two):
    assert normal_text(one) != normal_text(two)


@given(st.text(max_size=40))
def test_CUR_04_normal_form_is_stable(text):
    form = normal_text(text)
    assert normal_text(form) == form and normal_text(f"  {text}\n") == form
    assert normal_text(unicodedata.normalize("NFD", text)) == form
    assert not form[:1].isspace() and not form[-1:].isspace() and "  " not in form


def test_CUR_06_a_repeated_turn_is_reported_and_nothing_changes():
    lines = {"k1": ["hi", "tell me a joke"], "k2": ["yo", "what is rain"], "k3": ["hey", "buy shoes"]}
    talks = [
        Conversation.make(
            name, *(("user", line) for line in said), ("assistant", "Shall we talk about something else?")
        )
        for name, said in lines.items()
    ]
    before = [talk.to_dict() for talk in talks]
    report = repeated_turns(talks)
    assert report.values.tolist() == [["shall we talk about something else?", "assistant", 3, 3, 3]]
    for kept, dropped in (drop_exact(talks), drop_fuzzy(talks, progress=False)):
        assert kept == talks and len(dropped) == 0
    assert [talk.to_dict() for talk in talks] == before and [len(talk) for talk in talks] == [3, 3, 3]
    assert len(repeated_turns(talks, least=4)) == 0


@pytest.mark.parametrize("stage", [drop_exact, drop_fuzzy, drop_semantic])
def test_a_shared_system_prompt_makes_nobody_alike(stage, one_thread):
    policy = " ".join(f"Rule {number} says that clause {number * 37} holds." for number in range(120))
    said = {
        "bag": ("how do I return a blue bag that I bought last week", "bring it back to the store with the receipt"),
        "rain": ("what is rain and where does it come from", "water that falls from clouds when they get cold"),
        "copy": ("how do I return a blue bag that I bought last week", "bring it back to the store with the receipt"),
    }
    talks = [
        Conversation.make(name, ("system", policy), ("user", ask), ("assistant", answer))
        for name, (ask, answer) in said.items()
    ]
    kept, dropped = stage(talks, **({} if stage is drop_exact else {"progress": False}))
    assert [talk.id for talk in kept] == ["bag", "rain"] and dropped["survivor"].tolist() == ["bag"]


def test_a_shared_system_prompt_is_not_the_first_turn():
    told = [
        Conversation.make("a", ("system", "Be brief."), ("user", "Where is my bag?"), ("assistant", "In Oslo.")),
        Conversation.make("b", ("system", "Be brief."), ("user", "What is rain?"), ("assistant", "Water.")),
        Conversation.make("c", ("system", "Be brief."), ("user", "where is my bag?"), ("assistant", "In Rome.")),
    ]
    kept, dropped = drop_exact(told, first=1)
    assert [talk.id for talk in kept] == ["a", "b"] and dropped["survivor"].tolist() == ["a"]


@pytest.mark.parametrize("stage", [drop_exact, drop_fuzzy, drop_semantic])
@pytest.mark.parametrize("test_first", [True, False])
def test_CUR_07_the_training_copy_goes(stage, test_first, one_thread):
    train = {"1": "how do I return a bag", "2": "blue kettle price?", "3": "store hours"}
    test = {"4": "Blue kettle  price?", "5": "gift card"}
    texts = {**test, **train} if test_first else {**train, **test}
    talks = chats(texts, {name: "test" if name in test else "train" for name in texts})
    kept, dropped = stage(talks, **({} if stage is drop_exact else {"progress": False}))
    assert sorted(chat.id for chat in kept) == ["1", "3", "4", "5"] and removed(dropped) == {"2": "4"}


def test_CUR_07_overlap_and_copies_inside_the_evaluation_split():
    texts = {
        "t1": "same words here",
        "e1": "Same words here",
        "e2": "same  words here",
        "e3": "other",
        "t2": "other!",
        "t3": "other",
    }
    talks = chats(texts)
    evaluation = np.array([False, True, True, True, False, False])
    rank = preference([len(text) for text in texts.values()], list(texts), evaluation)
    found = exact_duplicates(exact_keys(talks), rank, evaluation)
    assert found.kept.tolist() == [False, True, True, True, True, False]
    assert found.overlap(evaluation).tolist() == [0, 5] and found.evaluation_copies.tolist() == [1]
    # the same when the rank does not know of the split
    assert exact_duplicates(exact_keys(talks), np.arange(6), evaluation).kept.tolist() == found.kept.tolist()


def test_CUR_07_a_leak_is_seen_even_where_a_training_copy_is_closer():
    found = settle([0, 1], [1, 2], [0.8, 0.99], np.arange(3), np.array([True, False, False]))
    assert found.survivor.tolist() == [0, 0, 2] and found.overlap(np.array([True, False, False])).tolist() == [1]


def test_CUR_14_characters_where_there_are_no_spaces():
    a, b = (
        "\u6211\u60f3\u9000\u6389\u4e0a\u5468\u4e70\u7684\u84dd\u8272\u6c34\u58f6\u56e0\u4e3a\u5b83\u6f0f\u6c34",
        "\u6211\u60f3\u9000\u6389\u4e0a\u5468\u4e70\u7684\u7ea2\u8272\u6c34\u58f6\u56e0\u4e3a\u5b83\u6f0f\u6c34",
    )
    for size, expected in ((1, 0.8824), (2, 0.7778), (3, 0.6667)):
        for shingle in ("auto", "char"):
            assert (
                round(float(sketch([a, b], FuzzyConfig(characters=size, shingle=shingle)).jaccard([0], [1])[0]), 4)
                == expected
            )
    assert sketch([a, b], FuzzyConfig(shingle="word", words=1)).jaccard([0], [1])[0] == 0
    for shingle in ("auto", "char"):
        _, dropped = drop_fuzzy(
            chats({"a": a, "b": b}), FuzzyConfig(0.6, characters=3, shingle=shingle), progress=False
        )
        assert removed(dropped) == {"b": "a"}


@pytest.mark.parametrize(
    "text",
    [
        "本当に申し訳ありませんが、注文した商品がまだ届いていません。",
        "สวัสดีครับผมต้องการคืนสินค้าที่ซื้อเมื่อสัปดาห์ที่แล้ว",
        "ខ្ញុំចង់ត្រឡប់ទំនិញដែលខ្ញុំបានទិញកាលពីសប្តាហ៍មុន",
        "我想退掉上周买的 blue kettle 因为它漏水了请帮我处理谢谢",
    ],
)
def test_CUR_14_kinds_near_copies_in_scripts_without_spaces(text):
    assert removed(drop_fuzzy(chats({"a": text, "b": text[:-1]}), progress=False)[1]) == {"b": "a"}
    assert len(drop_fuzzy(chats({"a": text, "b": text[::-1]}), progress=False)[1]) == 0


SCRIPT = """
import json, sys
import numpy as np
from cdr_lib.core.conversation import Conversation, Turn
from cdr_lib.curation.exact import drop_exact, exact_keys
from cdr_lib.curation.fuzzy import drop_fuzzy, sketch
from cdr_lib.curation.semantic import neighbour_pairs, semantic_duplicates
from cdr_lib.curation.settle import conversation_ranks
rng = np.random.default_rng(5)
words = [f"w{i}" for i in range(300)]
base = [list(rng.choice(words, 30)) for _ in range(20)]
texts = [" ".join(line) for line in base] + [" ".join([*line[:-1], "x"]) for line in base[:15]] + [" ".join(base[i]).upper() for i in range(15)]
vectors = rng.normal(size=(50, 8)).astype(np.float32)
vectors[30:] = vectors[:20] + np.float32(0.1) * vectors[10:30]
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
order = np.random.default_rng(int(sys.argv[1])).permutation(50)
talks = [Conversation.make(f"c{i:02}", ("user", texts[i])) for i in order]
kept_e, dropped_e = drop_exact(talks)
kept_f, dropped_f = drop_fuzzy(talks, progress=False)
rank, _ = conversation_ranks(talks)
kept_s = semantic_duplicates(neighbour_pairs(vectors[order], 0.9, progress=False), 0.9, rank)
def table(frame): return sorted(map(list, frame[["id", "survivor"]].values.tolist()))
back = np.argsort(order)
print(json.dumps([sorted(c.id for c in kept_e), table(dropped_e), sorted(c.id for c in kept_f), table(dropped_f),
    [talks[i].id for i in kept_s.survivor[back]], exact_keys(talks)[back].tolist(), sketch([texts[i] for i in order]).bands[back].tolist()]))
"""


def test_CUR_15_the_same_in_every_process_and_for_any_row_order():
    answers = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", SCRIPT, order],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "PYTHONHASHSEED": seed},
            ).stdout
        )
        for seed, order in (("0", "0"), ("1", "0"), ("1", "9"))
    ]
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0][1]) == 15 and len(answers[0][3]) == 30


# Properties against literal computations


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_settle_is_the_literal_greedy_choice(data):
    n = data.draw(st.integers(1, 14))
    rank = np.array(data.draw(st.permutations(range(n))))
    evaluation = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    pairs = data.draw(
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1), st.sampled_from([0.8, 0.9, 1.0])), max_size=40)
    )
    left, right, similarity = ([pair[i] for pair in pairs] for i in range(3))
    found = settle(left, right, similarity, rank, evaluation)
    near: dict = {}
    for a, b, _ in pairs:
        if a != b and not (evaluation[a] and evaluation[b]):
            near.setdefault(a, set()).add(b)
            near.setdefault(b, set()).add(a)
    kept = literal(near, sorted(range(n), key=lambda row: (not evaluation[row], rank[row])))
    assert set(np.flatnonzero(found.kept)) == kept and kept >= set(np.flatnonzero(evaluation))
    for row in range(n):
        if row not in kept:
            # the evaluation row, or the most similar, or the best ranked
            best = max(
                (
                    (evaluation[a if b == row else b], np.float32(s), -rank[a if b == row else b], a if b == row else b)
                    for a, b, s in pairs
                    if row in (a, b) and a != b and (a if b == row else b) in kept
                )
            )
            assert found.survivor[row] == best[3] and found.similarity[row] == best[1]
    inside = {max((a, b), key=lambda row: rank[row]) for a, b, _ in pairs if a != b and evaluation[a] and evaluation[b]}
    assert set(found.evaluation_copies.tolist()) == inside


TEXT = st.lists(st.sampled_from(["a", "b", "c", "dd", "é", "ß", "店", "ก", "👍", "1"]), max_size=12).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(alphabet="ab \n.,é本\u0301\u200d\0-", max_size=30), max_size=8),
    st.integers(1, 4),
    st.sampled_from(["auto", "word", "char"]),
)
def test_a_text_has_the_same_shingles_alone_and_in_company(texts, size, shingle):
    config = FuzzyConfig(words=size, characters=size, shingle=shingle)
    together = sketch(texts, config)
    for row, text in enumerate(texts):
        alone = sketch([text], config)
        assert np.array_equal(together.sets([row])[0], alone.shingles)
        if len(alone.shingles):
            assert np.array_equal(together.bands[row], alone.bands[0])


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXT.filter(lambda text: text.isascii()), min_size=1, max_size=12), st.integers(1, 3))
def test_jaccard_is_that_of_sets_of_words(texts, size):
    sketches = sketch(texts, FuzzyConfig(words=size))
    truth = [word_shingles(text, size) for text in texts]
    for i, j in combinations(range(len(texts)), 2):
        assert sketches.jaccard([i], [j])[0] == pytest.approx(jaccard(truth[i], truth[j]), abs=1e-6)


def corpus(seed: int, n: int) -> list[str]:
    rng = np.random.default_rng(seed)
    words = np.array([f"w{i}" for i in range(200)])
    texts: list[str] = []
    while len(texts) < n:
        line = rng.choice(words, rng.integers(1, 60))
        for _ in range(rng.integers(1, 7)):
            copy = line.copy()
            copy[rng.integers(0, len(copy), rng.integers(0, 3))] = "x"
            texts.append(" ".join(copy))
    return texts[:n]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_fuzzy_is_settle_on_the_candidates_whatever_the_blocks(seed, threshold):
    texts = corpus(seed, 150)
    sketches = sketch(texts, FuzzyConfig(threshold, words=2))
    rng = np.random.default_rng(seed)
    rank, evaluation = rng.permutation(150), rng.random(150) < (0.2 if seed % 2 else 0)
    pairs = fuzzy_pairs(sketches)
    truth = [word_shingles(text, 2) for text in texts]
    wanted = {
        (i, j)
        for i, j in combinations(range(150), 2)
        if np.float32(jaccard(truth[i], truth[j])) >= np.float32(threshold)
    }
    found = set(zip(pairs.left.tolist(), pairs.right.tolist()))
    assert found <= wanted and len(found) >= 0.97 * len(wanted)
    expected = settle(pairs.left, pairs.right, pairs.similarity, rank, evaluation)
    for block in (1, 13, 8192):
        decided = fuzzy_duplicates(sketches, rank, evaluation=evaluation, progress=False, block=block)
        assert np.array_equal(decided.survivor, expected.survivor)
        assert np.array_equal(decided.similarity, expected.similarity, equal_nan=True)
        assert np.array_equal(decided.evaluation_copies, expected.evaluation_copies)
    leading = np.argsort(rank)[np.diff(sketches.offsets)[np.argsort(rank)] > 0]
    for budget in (1, 10, 1000):
        greedy = _Greedy(sketches, leading, threshold, 0, budget)
        early, late, similarity = greedy.run(50, False)
        assert np.array_equal(
            settle(leading[early], leading[late], similarity, rank).survivor,
            settle(pairs.left, pairs.right, pairs.similarity, rank).survivor,
        )


def test_recall_is_what_the_layout_promises():
    rng = np.random.default_rng(0)
    shared, own = 40, 5  # similarity 40 / 50 = the threshold
    flat, texts = rng.integers(0, 10**9, (1500, shared + 2 * own)), []
    for row in flat:
        texts += [" ".join(map(str, row[: shared + own])), " ".join(map(str, [*row[:shared], *row[shared + own :]]))]
    sketches = sketch(texts, FuzzyConfig(0.8, words=1))
    pairs = fuzzy_pairs(sketches)
    assert (pairs.similarity == np.float32(0.8)).all() and len(pairs) / 1500 >= 0.98 - 3 * (0.02 * 0.98 / 1500) ** 0.5


def test_sketches_survive_the_disk_and_join(tmp_path):
    texts = corpus(3, 100) + ["", "我想退掉上周买的蓝色水壶"]
    whole = sketch(texts)
    parts = [sketch(texts[low : low + 17]).save(tmp_path / str(low)) for low in range(0, len(texts), 17)]
    parts.insert(2, sketch([]).save(tmp_path / "none"))
    for mmap in (True, False):
        joined = Sketches.concat([Sketches.load(part, mmap) for part in parts])
        for name in ("bands", "shingles", "offsets", "lengths", "whole"):
            assert np.array_equal(getattr(joined, name), getattr(whole, name))
        rank = preference(joined.lengths, [f"{i:03}" for i in range(len(texts))])
        assert np.array_equal(
            fuzzy_duplicates(joined, rank, progress=False).survivor,
            fuzzy_duplicates(whole, rank, progress=False).survivor,
        )
        assert np.array_equal(joined.take([1, 50]).shingles, whole.sets([1, 50])[0])
    assert whole.lengths.tolist() == list(map(len, texts))
    (tmp_path / "0" / "shingles.npy").write_bytes((tmp_path / "0" / "shingles.npy").read_bytes()[:200])
    with pytest.raises(CdrError, match="make them again|belong together"):
        Sketches.load(tmp_path / "0")
    with pytest.raises(CdrError, match="no such file"):
        Sketches.load(tmp_path / "missing")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 40))
def test_semantic_equals_the_long_way(seed, n):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(n, 4))
    vectors[rng.integers(0, n, n // 3)] = vectors[0]
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    vectors[n - 1] = 0
    rank, evaluation = rng.permutation(n), rng.random(n) < 0.2
    left, right = np.triu_indices(n, 1)
    cosines = np.einsum("nd,nd->n", vectors[left], vectors[right], dtype=np.float64).astype(np.float32)
    pairs = neighbour_pairs(vectors, 0.5, max_memory=int(rng.integers(100, 10**6)), progress=False)
    for threshold in (0.5, 0.9, 0.7):
        near = cosines >= np.float32(threshold)
        expected = settle(left[near], right[near], cosines[near], rank, evaluation)
        decided = semantic_duplicates(pairs, threshold, rank, evaluation)
        assert np.array_equal(decided.survivor, expected.survivor)
        assert np.array_equal(decided.evaluation_copies, expected.evaluation_copies)


def test_kmeans_blocks_are_deterministic_and_a_subset():
    rng = np.random.default_rng(0)
    vectors = np.repeat(rng.normal(size=(500, 16)), 3, axis=0) + rng.normal(size=(1500, 16)) * 0.2
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    exact = neighbour_pairs(vectors, 0.8, progress=False)
    one, two = (
        neighbour_pairs(vectors, 0.8, "kmeans", max_memory=memory, block_size=200, progress=False)
        for memory in ("1MiB", "1GiB")
    )
    assert np.array_equal(one.left, two.left) and np.array_equal(one.similarity, two.similarity)
    codes = exact.left * 1500 + exact.right
    assert np.isin(one.left * 1500 + one.right, codes).all() and len(one) > 0.95 * len(exact)


# Corpora at the edge

EDGES = {
    "empty": {},
    "one": {"a": "hello there my friend of old"},
    "all identical": {f"{i:03}": "the same words in the same order" for i in range(300)},
    "all blank": {f"{i:03}": " \u200b\n" * (i % 3) for i in range(50)},
    "mixed scripts": {
        "a": "hello мир 世界 สวัสดี 👍 " * 5,
        "b": "Hello МИР 世界 สวัสดี 👍 " * 5,
        "c": "नमस्ते दुनिया यह एक परीक्षण है",
        "d": "مرحبا بالعالم",
    },
    "hostile": {
        "a": "<script>alert(1)</script>\0\0|*_`",
        "b": "\u202e\u2066",
        "c": "\U0010ffff\ufffe",
        "d": "a" * 5000,
        "e": "! " * 5000,
    },
}


@pytest.mark.parametrize("name", EDGES)
def test_corpora_at_the_edge_lose_nothing(name, one_thread):
    talks = chats(EDGES[name])
    for stage in (drop_exact, drop_fuzzy, drop_semantic):
        kept, dropped = stage(talks, **({} if stage is drop_exact else {"progress": False}))
        assert len(kept) + len(dropped) == len(talks) and set(dropped.survivor) <= {chat.id for chat in kept}
        if name == "all identical":
            assert [chat.id for chat in kept] == ["000"] and set(dropped.survivor) == {"000"}
        if name == "all blank":
            assert len(dropped) == 0
        if name == "mixed scripts":
            assert removed(dropped) == {"b": "a"}


def test_a_megabyte_in_one_turn():
    text = " ".join(f"word{i}" for i in range(110_000))
    assert len(text) > 1_000_000
    texts = {
        "a": text,
        "b": text + " end",
        "c": "字" * 1_000_000,
        "d": "x" * 1_000_000,
        "e": "?" * 1_000_000,
        "f": "a\n" * 500_000,
        "g": "字" * 999_999,
    }
    _, dropped = drop_fuzzy(chats(texts), progress=False)
    assert removed(dropped) == {"a": "b", "g": "c"}


def test_a_huge_bucket_is_not_quadratic():
    message = " ".join(f"buy{i}" for i in range(40))
    texts = [f"{message} code {number}" for number in range(30_000)]
    found = fuzzy_duplicates(sketch(texts), np.arange(len(texts)), progress=False)
    assert found.clusters().to_dict() == {0: 30_000}
    same = fuzzy_duplicates(sketch([message] * 100_000), np.arange(100_000), progress=False)
    assert same.clusters().to_dict() == {0: 100_000}


def test_lone_surrogates_do_not_stop_a_sketch():
    assert sketch(["\ud800", "a \udfff b c d e f", "x"]).jaccard([0, 1], [0, 1]).tolist() == [1, 1]


def test_scores_by_hand():
    assert score_pairs([0, 1, 1, 3], [1, 0, 2, 4], [7, 7, 7, -1, 5, 5]) == pytest.approx(
        {"precision": 2 / 3, "recall": 0.5, "f1": 4 / 7}
    )
    assert score_pairs([], [], []) == {"precision": 1, "recall": 1, "f1": 1}
    assert score_kept([1, 0, 0, 1, 1], [4, 4, 4, 4, -1]) == pytest.approx({"precision": 1, "recall": 2 / 3, "f1": 0.8})
    assert score_kept([1, 0], [0, 1])["precision"] == 0


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: preference([1, 2], ["a", "a"]), "stands for two rows"),
        (lambda: preference([1], []), "as many lengths"),
        (lambda: preference([1], ["a"], [True, False]), "as many booleans"),
        (lambda: settle([0], [5], [1.0], [0, 1]), "must name rows"),
        (lambda: settle([0], [1], [float("nan")], [0, 1]), "not finite"),
        (lambda: settle([0], [1], [1.0], [0, 0]), "each of 0"),
        (lambda: settle([0], [1, 1], [1.0], [0, 1]), "one length"),
        (lambda: settle_groups([0.5], [], [], [], [0]), "whole number"),
        (lambda: exact_keys([], first=0), "at least 1"),
        (lambda: exact_duplicates(np.zeros((2, 2)), [0, 1]), "uint64"),
        (lambda: repeated_turns([], least=1), "at least 2"),
        (lambda: FuzzyConfig(1.5), "at most 1"),
        (lambda: FuzzyConfig(float("nan")), "at most 1"),
        (lambda: FuzzyConfig(shingle="byte"), "one of auto, word, char"),
        (lambda: FuzzyConfig(bands=500), "between 1 and"),
        (lambda: sketch("one text"), "put it in a list"),
        (lambda: Sketches.concat([]), "nothing to join"),
        (lambda: Sketches.concat([sketch([]), sketch([], FuzzyConfig(seed=1))]), "one FuzzyConfig"),
        (lambda: fuzzy_duplicates(sketch(["a"]), [0], FuzzyConfig(0.5), progress=False), "miss pairs below"),
        (lambda: fuzzy_duplicates(sketch(["a"]), [0], FuzzyConfig(words=3), progress=False), "other parameters"),
        (lambda: fuzzy_duplicates(sketch(["a"]), [0, 1], progress=False), "as many ranks"),
        (
            lambda: fuzzy_pairs(sketch([f"a b c d e {i}" for i in range(9)], FuzzyConfig(0.1, words=1)), most=5),
            "more than 5",
        ),
        (lambda: neighbour_pairs(np.ones(3)), "shape"),
        (lambda: neighbour_pairs(np.full((2, 2), np.nan)), "not finite"),
        (lambda: neighbour_pairs(np.ones((2, 2))), "length 1"),
        (lambda: neighbour_pairs(np.eye(2), 2), "between -1 and 1"),
        (lambda: neighbour_pairs(np.eye(2), blocks="faiss"), "'kmeans'"),
        (lambda: neighbour_pairs(np.eye(2), max_memory="much"), "amount of memory"),
        (lambda: semantic_duplicates(neighbour_pairs(np.eye(2), 0.8, progress=False), 0.7, [0, 1]), "lower floor"),
        (lambda: neighbour_pairs(np.array([[1, 0], [1, 1e-4], [1, 2e-4]]), 0.8, most=1, progress=False), "more than 1"),
    ],
)
def test_wrong_input_is_refused_with_a_reason(wrong, message):
    with pytest.raises(CdrError, match=message):
        wrong()


def test_a_higher_threshold_needs_no_new_sketches():
    texts = corpus(1, 120)
    rank = np.arange(120)
    low = sketch(texts, FuzzyConfig(0.5, words=2))
    high = FuzzyConfig(0.9, words=2)
    truth = [word_shingles(text, 2) for text in texts]
    near: dict = {}
    for i, j in combinations(range(120), 2):
        if np.float32(jaccard(truth[i], truth[j])) >= np.float32(0.9):
            near.setdefault(i, set()).add(j)
            near.setdefault(j, set()).add(i)
    assert set(np.flatnonzero(fuzzy_duplicates(low, rank, high, progress=False).kept)) == literal(near, range(120))


def test_duplicates_show_themselves():
    found = Duplicates(np.array([0, 0, 2]), np.array([np.nan, 0.9, np.nan], np.float32))
    assert "3 rows: 2 kept, 1 fall to 1 of them" in found._repr_html_() and len(found) == 3
    assert _shingles([], FuzzyConfig())[0].dtype == np.uint64


@pytest.mark.parametrize("own", [60, 40, 20])  # similarity 0.4, 0.57, 0.76
def test_long_common_prompts_do_not_make_it_quadratic(own):
    rng = np.random.default_rng(0)
    prompt = " ".join(f"rule{i}" for i in range(150 - own))
    texts = [f"{prompt} " + " ".join(map(str, rng.integers(0, 5000, own))) for _ in range(15_000)]
    texts += [f"{text} bye" for text in texts[:50]]
    found = fuzzy_duplicates(sketch(texts), np.arange(len(texts)), progress=False)
    assert found.survivor.tolist() == [*range(15_000), *range(50)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threshold", [0.3, 0.55, 0.8, 1.0])
def test_crowded_buckets_miss_no_similar_pair(seed, threshold):
    texts = corpus(seed, 120)
    sketches = sketch(texts, FuzzyConfig(threshold, words=2))
    rows = np.flatnonzero(np.diff(sketches.offsets))
    greedy = _Greedy(sketches, rows, threshold, 0, large=1)
    crowded = np.flatnonzero(np.diff(_Greedy(sketches, rows, threshold, 0).buckets.of_text))  # have company in a band
    early, late, _ = greedy.verify(*greedy.inside(np.arange(len(rows)))[1:])
    truth = [word_shingles(texts[row], 2) for row in rows]
    wanted = {
        (i, j)
        for i, j in combinations(crowded.tolist(), 2)
        if np.float32(jaccard(truth[i], truth[j])) >= np.float32(threshold)
    }
    assert wanted <= set(zip(early.tolist(), late.tolist()))


@pytest.mark.parametrize("split, held_out", [("TEST ", True), ("test_seen", True), ("dev-clean", True), ("validation", True),
                                             ("train", False), ("", False), ("testimonials", False), ("unseen_test", True)])
def test_a_split_is_known_by_a_word(split, held_out):
    chat = Conversation("c", (Turn("user", "hello"),), meta={"split": split})
    assert in_evaluation(chat) == held_out
