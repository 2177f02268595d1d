"""Known failures of retrieval code elsewhere, as tests. Each is named after its case and uses the case's values."""
import math

import numpy as np
import pytest

from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import Conversation
from cdr_lib.evaluation.metrics import score_matrix
from cdr_lib.retrieval.bm25 import BM25, tokenize
from cdr_lib.retrieval.dense import dense_topk
from cdr_lib.retrieval.fuse import fuse
from cdr_lib.retrieval.rerank import rerank
from cdr_lib.retrieval.run import Run
from cdr_lib.retrieval.search import best_units, excluded_pairs, search
from cdr_lib.retrieval.segment import segment


def corpus(**texts: str) -> list[Conversation]:
    """Conversations of one message."""
    return [Conversation.make(name, ("user", text)) for name, text in texts.items()]


def found(run: Run, query: str) -> list[str]:
    return [hit for hit, _ in run[query]]


def scores(run: Run, qrels: dict, *measures: str) -> list[float]:
    return score_matrix(run, qrels, measures).mean(axis=0).tolist()


# -- RET-01: words in half of the documents ----------------------------------------------------------------------------


@pytest.mark.parametrize("documents, query, expected", [
    ({"d1": "blue kettle", "d2": "red toaster"}, "red toaster", [0.0, 1.386294]),
    ({"p1": "cats sleep much", "p2": "dogs sleep little"}, "sleep", [0.182322, 0.182322]),
    ({"q1": "refund policy", "q2": "refund form late", "q3": "refund now"}, "refund late",
     [0.142705, 0.987408, 0.142705]),
])
def test_RET_01_lucene_idf(documents, query, expected):
    index = BM25(documents.values())
    assert index.scores([query]).toarray()[0] == pytest.approx(expected, abs=1e-6)
    assert index.scores([query]).toarray()[0] / 2.5 == pytest.approx(np.array(expected) / 2.5, abs=1e-6)


def test_RET_01_case_and_punctuation_count_on_neither_side():
    documents = {"d1": "blue kettle", "d2": "Red toaster!"}
    for query in ("RED", "red?", "(Red)"):
        row = BM25(documents.values()).scores([query]).toarray()[0]
        assert row[1] > row[0] == 0
        assert found(search({"q": query}, corpus(**documents), "bm25", rendering="text"), "q") == ["d2"]


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_RET_01_no_score_is_negative_however_common_the_word(n):
    documents = ["refund"] * n + ["refund late fee"]
    values = BM25(documents).scores(["refund", "refund late", "fee fee"])
    assert (values.data > 0).all()
    # ln(1 + (N - n + 0.5) / (n + 0.5)) with n = N
    assert BM25(documents).idf[0] == pytest.approx(math.log(1 + 0.5 / (n + 1.5)))


def test_RET_01_okapi_is_kept_for_comparison_only():
    assert BM25(["blue kettle", "red toaster"], "okapi").scores(["red toaster"]).toarray()[0].tolist() == [0, 0]
    assert BM25(["cats sleep much", "dogs sleep little"], "okapi").scores(["sleep"]).toarray()[0] == pytest.approx(
        [-0.0805, -0.0805], abs=1e-4)


# -- RET-02: queries without a known word ------------------------------------------------------------------------------

DOCUMENTS = {"a": "alpha", "b": "beta", "c": "gamma", "d": "quick dog", "e": "quick fox"}


@pytest.mark.parametrize("variant", ["bm25", "bm25:okapi"])
def test_RET_02_no_known_word_no_hit(variant):
    queries = {"zzz": "zzz", "empty": "", "stop": "the of", "invisible": "\u200b", "script": "быстрая",
               "marks": "?!"}
    run = search(queries, corpus(**DOCUMENTS), variant, k=2, rendering="text")
    assert [found(run, query) for query in queries] == [[]] * 6
    assert run.without_hits == tuple(queries)
    assert scores(run, {"zzz": {"e": 1}}, "R@2") == [0.0]


def test_RET_02_the_query_still_counts():
    run = search({"zzz": "zzz", "fox": "fox"}, corpus(**DOCUMENTS), "bm25", k=2, rendering="text")
    assert scores(run, {"zzz": {"e": 1}, "fox": {"e": 1}}, "R@2", "RR") == [0.5, 0.5]


def test_RET_02_a_shared_word_ties():
    run = search({"q": "quick"}, corpus(**DOCUMENTS), "bm25", k=2, rendering="text")
    assert found(run, "q") == ["e", "d"]
    assert run.scores[0] == run.scores[1] > 0


def test_RET_02_dense_blank_query_and_zero_vector():
    queries = {"blank": "\u200b ", "unknown": "zzz"}
    run = search(queries, corpus(**DOCUMENTS), "keyword", rendering="text", progress=False)
    assert run.without_hits == ("blank", "unknown")


# -- RET-04: more results than documents -------------------------------------------------------------------------------


def test_RET_04_k_beyond_the_corpus_dense():
    query, documents = np.array([[1, 0, 0]], np.float32), np.eye(3, dtype=np.float32)
    hits = dense_topk(query, documents, np.arange(3), ["x", "y", "z"], k=5)
    assert hits.conversations.tolist() == [0, 2, 1]
    assert hits.scores.tolist() == [1, 0, 0]
    run = Run.from_columns(["q"], hits.rows, ["x", "y", "z"], hits.conversations, hits.scores)
    # The cut-off stays 5: one relevant of five places.
    assert scores(run, {"q": {"x": 1}}, "P@5", "R@5") == pytest.approx([0.2, 1.0])


def test_RET_04_k_beyond_the_corpus_everywhere():
    texts = {"x": "red bag", "y": "red shoe", "z": "red hat"}
    for encoder in ("bm25", "bm25:okapi", "hash", "keyword"):
        run = search({"q": "red bag"}, corpus(**texts), encoder, k=5, rendering="text", progress=False)
        hits = found(run, "q")
        # With okapi, "red" in all three weighs less than nothing.
        assert len(hits) == len(set(hits)) == (1 if encoder == "bm25:okapi" else 3)
        assert hits[0] == "x" and np.isfinite(run.scores).all() and (run.scores > -1.01).all()
    assert len(fuse([run, run], k=50)["q"]) == 3
    assert len(rerank(run, {"q": "red bag"}, corpus(**texts), "overlap", depth=50)["q"]) == 3
    assert len(run.top(50)["q"]) == 3


# -- RET-05: sessions from turns ---------------------------------------------------------------------------------------

TURNS = [("S1", 3, 0.95), ("S1", 7, 0.93), ("S1", 1, 0.92), ("S2", 4, 0.6), ("S3", 2, 0.55)]


def session_run(k: int, **options) -> Run:
    turns = sorted(TURNS)
    vectors = np.array([[score, math.sqrt(1 - score**2)] for _, _, score in turns], np.float32)
    owner = np.array([int(name[1]) - 1 for name, _, _ in turns])
    hits = dense_topk(np.array([[1, 0]], np.float32), vectors, owner, ["S1", "S2", "S3"], k, **options)
    return Run.from_columns(["q"], hits.rows, ["S1", "S2", "S3"], hits.conversations, hits.scores, hits.units)


@pytest.mark.parametrize("memory", ["512MiB", "1kB"])
def test_RET_05_k_counts_sessions(memory):
    run = session_run(3, max_memory=memory)
    assert found(run, "q") == ["S1", "S2", "S3"] and run.scores == pytest.approx([0.95, 0.6, 0.55])
    run = session_run(2, max_memory=memory)
    assert found(run, "q") == ["S1", "S2"]
    assert scores(run, {"q": {"S2": 1}}, "R@2", "RR", "nDCG@2") == pytest.approx([1.0, 0.5, 0.63093], abs=1e-5)


def test_RET_05_one_chatty_session_never_fills_the_list():
    chatty = Conversation.make("chatty", *[("user", f"red bag {i}") for i in range(500)])
    others = [Conversation.make(f"o{i}", ("user", "a red thing"), ("assistant", "no")) for i in range(5)]
    for encoder in ("bm25", "keyword"):
        for granularity in ("turn", "window", "session"):
            run = search({"q": "red bag"}, [chatty, *others], encoder, granularity, k=6, progress=False)
            assert sorted(found(run, "q")) == ["chatty", "o0", "o1", "o2", "o3", "o4"]


def test_RET_05_the_best_turn_is_kept():
    talk = Conversation.make("s", ("user", "hello"), ("user", "red bag"), ("user", "red red bag bag"), ("user", "bye"))
    for encoder in ("bm25", "keyword"):
        table = best_units(search({"q": "red bag"}, [talk], encoder, "turn", rendering="text", progress=False), [talk])
        assert table[["conversation", "start", "stop"]].values.tolist() in ([["s", 1, 2]], [["s", 2, 3]])
        assert "red" in table.text[0]


# -- RET-07: the same id twice -----------------------------------------------------------------------------------------


def test_RET_07_exact_repeat_once_conflict_refused():
    rows = [("d1", "red bag"), ("d2", "blue bag"), ("d1", "red bag"), ("d2", "green shoe")]
    conversations = [Conversation.make(name, ("user", text)) for name, text in rows]
    units = segment(conversations[:3], "turn")
    assert units.conversation_ids == ["d1", "d2"] and len(units) == 2 and units.repeated == 1
    run = search({"q": "bag"}, iter(conversations[:3]), "bm25")
    assert sorted(found(run, "q")) == ["d1", "d2"] and run.meta["repeated_conversations"] == 1
    for granularity in ("turn", "window", "session"):
        with pytest.raises(CdrError, match="'d2'"):
            search({"q": "bag"}, conversations, "bm25", granularity)


def test_RET_07_a_conflict_hidden_in_one_message_or_role():
    first = Conversation.make("d", ("user", "red bag"), ("assistant", "here"))
    for other in (Conversation.make("d", ("user", "red bag"), ("assistant", "gone")),
                  Conversation.make("d", ("user", "red bag")),
                  Conversation.make("d", ("user", "red bag"), ("user", "here")),
                  Conversation.make("d", ("user", "red bag"), ("user", "\u200b"), ("assistant", "here"))):
        with pytest.raises(CdrError, match="'d'"):
            segment([first, other], "turn")


def test_RET_07_search_over_vectors_refuses_repeated_ids():
    with pytest.raises(CdrError, match="distinct"):
        dense_topk(np.eye(2, dtype=np.float32), np.eye(2, dtype=np.float32), np.arange(2), ["d", "d"])
    with pytest.raises(CdrError, match="two conversations"):
        Run.from_columns(["q"], [0, 0], ["d", "d"], [0, 1], [0.5, 0.4])


# -- RET-08: queries from the corpus -----------------------------------------------------------------------------------

MESSAGES = {"t1": "red bag?", "t2": "here is one", "t3": "blue bag?", "t4": "also here"}


@pytest.mark.parametrize("granularity", ["turn", "window", "session"])
def test_RET_08_only_the_own_source_is_excluded(granularity):
    run = search({name: MESSAGES[name] for name in ("t1", "t3")}, corpus(**MESSAGES), "hash", granularity, k=3,
                 exclude={name: (name, 0) for name in ("t1", "t3")}, rendering="text", progress=False)
    assert set(found(run, "t1")) == {"t2", "t3", "t4"}
    assert set(found(run, "t3")) == {"t1", "t2", "t4"}


def test_RET_08_name_spaces_may_collide():
    run = search({"0": "any bag"}, corpus(**{"0": "a bag", "1": "a shoe"}), "bm25", rendering="text")
    assert scores(run, {"0": {"0": 1}}, "R@1") == [1.0]
    run = search({"0": "any bag"}, corpus(**{"0": "a bag", "1": "a shoe"}), "keyword", rendering="text", progress=False)
    assert scores(run, {"0": {"0": 1}}, "R@1") == [1.0]


def test_RET_08_windows_and_sessions_that_contain_the_message():
    talk = Conversation.make("talk", *[("user", text) for text in MESSAGES.values()])
    other = corpus(other="a blue bag")
    pairs = {granularity: excluded_pairs({"q": ("talk", 0)}, ["q"], segment([talk, *other], granularity)).tolist()
             for granularity in ("turn", "window", "session")}
    assert pairs == {"turn": [[0, 0]], "window": [[0, 0]], "session": [[0, 0]]}
    for encoder in ("bm25", "keyword"):
        hits = {granularity: found(search({"q": "red bag?"}, [talk, *other], encoder, granularity, progress=False,
                                          rendering="text", exclude={"q": ("talk", 0)}), "q")
                for granularity in ("turn", "window", "session")}
        # Another message or window of the conversation may answer; the whole conversation may not.
        assert hits == {"turn": ["talk", "other"], "window": ["other", "talk"], "session": ["other"]} or (
            set(hits["turn"]) == set(hits["window"]) == {"talk", "other"} and hits["session"] == ["other"])


def test_RET_08_other_queries_keep_the_message():
    run = search({"a": "red bag?", "b": "red bag?"}, corpus(**MESSAGES), "bm25", rendering="text",
                 exclude={"a": ("t1", 0)})
    assert found(run, "a") == ["t3"] and found(run, "b") == ["t1", "t3"]


def test_RET_08_an_unknown_source_is_an_error():
    for exclude in ({"q": ("nowhere", 0)}, {"q": "nowhere"}, {"other": ("t1", 0)}):
        with pytest.raises(CdrError, match="nowhere|other"):
            search({"q": "bag"}, corpus(**MESSAGES), "bm25", exclude=exclude)


# -- Of the same kinds -------------------------------------------------------------------------------------------------


def test_vectors_that_cannot_rank():
    """NaN sorts as the greatest or the least, by library and by chance; a zero vector is equally near to everything."""
    vectors = np.array([[np.nan, 0], [0, 0], [1, 0], [-1, 0], [np.inf, 0], [-np.inf, 1]], np.float32)
    hits = dense_topk(np.array([[1, 0]], np.float32), vectors, np.arange(6), list("abcdef"), k=6)
    assert hits.conversations.tolist() == [2, 3] and hits.skipped == 4
    with pytest.raises(CdrError, match="query 1 holds NaN"):
        dense_topk(np.array([[1, 0], [np.nan, 0]], np.float32), vectors, np.arange(6), list("abcdef"))


def test_a_good_unit_saves_a_conversation_with_a_broken_one():
    vectors = np.array([[np.nan, 0], [0.6, 0.8], [0.5, 0]], np.float32)
    hits = dense_topk(np.array([[1, 0]], np.float32), vectors, np.array([0, 0, 1]), ["a", "b"])
    assert hits.conversations.tolist() == [0, 1] and hits.units.tolist() == [1, 2]


def test_constant_scores_rank_by_id():
    vectors = np.ones((500, 8), np.float32)
    ids = [f"d{i:03}" for i in np.random.default_rng(0).permutation(500)]
    for memory in ("512MiB", "10kB"):
        hits = dense_topk(vectors[:2], vectors, np.arange(500), ids, k=7, max_memory=memory)
        assert [ids[i] for i in hits.conversations] == sorted(ids, reverse=True)[:7] * 2


def test_scripts_without_spaces_are_found_by_their_parts():
    documents = corpus(zh="我想退货，这个水壶漏水", ja="東京都に行きたいです", th="ฉันต้องการคืนเงิน", hi="मुझे पैसे वापस चाहिए")
    for query, expected in (("水壶", "zh"), ("東京", "ja"), ("คืนเงิน", "th"), ("पैसे", "hi"), ("ﾄｳｷｮｳ 東京", "ja")):
        assert found(search({"q": query}, documents, "bm25", rendering="text"), "q")[:1] == [expected]


def test_composed_and_decomposed_accents_are_the_same_word():
    assert tokenize("re\u0301sume\u0301") == tokenize("résumé") != tokenize("resume")
    assert tokenize("STRASSE") == tokenize("straße")


def test_empty_inputs():
    with pytest.raises(CdrError, match="corpus is empty"):
        search({"q": "bag"}, {}, "bm25")
    silent = [Conversation.make("s", ("user", "\u200b"))]
    for encoder in ("bm25", "hash"):
        assert search({"q": "bag"}, silent, encoder, progress=False).without_hits == ("q",)
        assert search({}, silent, encoder, progress=False).queries == ()
