"""Retrieval against reference libraries and plain programs, over random input."""
import gzip
import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_bm25 import BM25Okapi

from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import Conversation, is_blank, render
from cdr_lib.core.sources import load_source
from cdr_lib.core.store import Store
from cdr_lib.retrieval import dense
from cdr_lib.retrieval.bm25 import BM25, tokenize
from cdr_lib.retrieval.dense import dense_topk, exact_scores, parse_bytes
from cdr_lib.retrieval.fuse import fuse
from cdr_lib.retrieval.rerank import rerank
from cdr_lib.retrieval.run import Run, read_run, write_run
from cdr_lib.retrieval.search import best_units, search
from cdr_lib.retrieval.segment import GRANULARITIES, segment

# -- Units -------------------------------------------------------------------------------------------------------------

texts = st.sampled_from(["a", "b c", "", " ", "\u200b", "user: x\nassistant: y", "😀"])
conversations = st.lists(st.lists(texts, min_size=1, max_size=8), max_size=6).map(
    lambda rows: [Conversation.make(f"c{i}", *[(("user", "assistant")[j % 2], text) for j, text in enumerate(row)])
                  for i, row in enumerate(rows)])


@given(conversations, st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_units_follow_the_definition(corpus, k):
    for granularity in GRANULARITIES:
        expected = []
        for number, conversation in enumerate(corpus):
            shown = [i for i, turn in enumerate(conversation.turns) if not is_blank(turn.text)]
            size = {"turn": 1, "window": k, "session": len(shown)}[granularity]
            starts = range(max(1, len(shown) - size + 1)) if shown else ()
            for start in starts:
                part = shown[start:start + size]
                expected.append((number, part[0], part[-1] + 1, render([conversation.turns[i] for i in part])))
        units = segment(iter(corpus), granularity, k)
        assert list(zip(units.conversation, units.start, units.stop, units.texts)) == expected
        assert units.blank_turns == sum(is_blank(turn.text) for conversation in corpus for turn in conversation.turns)
        assert units.conversation_ids == [conversation.id for conversation in corpus]
        for number, conversation in enumerate(corpus):
            span = units.of(conversation.id)
            assert set(units.conversation[span]) <= {number}
            assert span.stop - span.start == sum(row[0] == number for row in expected)


# -- Runs --------------------------------------------------------------------------------------------------------------

ids = st.text(st.characters(exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]), min_size=1, max_size=5).filter(
    lambda text: len(text.split()) == 1 and text == text.strip())
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
results = st.dictionaries(ids, st.dictionaries(ids, numbers, max_size=6), max_size=4)


@given(results)
@settings(max_examples=150, deadline=None)
def test_run_file_round_trip(tmp_path_factory, found):
    folder = tmp_path_factory.mktemp("run")
    run = Run.from_dict(found, name="system")
    for file in ("x.run", "x.run.gz"):
        write_run(run, folder / file)
        assert read_run(folder / file, name="system", queries=found) == run
    assert gzip.decompress((folder / "x.run.gz").read_bytes()) == (folder / "x.run").read_bytes()


@given(results)
@settings(max_examples=100, deadline=None)
def test_run_order_is_trec_evals(found):
    """The reciprocal rank of each conversation, judged alone, is its place in our ranking."""
    run = Run.from_dict(found)
    for query in run.queries:
        for place, (hit, _) in enumerate(run[query], 1):
            judged = pytrec_eval.RelevanceEvaluator({query: {hit: 1}}, {"recip_rank"})
            assert judged.evaluate({query: found[query]})[query]["recip_rank"] == pytest.approx(1 / place)


def test_run_does_not_depend_on_the_order_of_its_making():
    rng = np.random.default_rng(0)
    hits = [(f"d{i}", float(rng.integers(3))) for i in range(40)]
    runs = [Run.from_dict({"q": [hits[i] for i in rng.permutation(40)]}) for _ in range(20)]
    assert all(run == runs[0] for run in runs)
    assert runs[0]["q"] == sorted(hits, key=lambda hit: (hit[1], hit[0]), reverse=True)


def test_top_is_the_start_of_the_ranking():
    rng = np.random.default_rng(0)
    found = {f"q{i}": {f"d{j}": float(rng.integers(5)) for j in range(i)} for i in range(12)}
    run = Run.from_dict(found)
    for k in (0, 1, 5, 100):
        assert {query: run[query][:k] for query in found} == {query: run.top(k)[query] for query in found}
        assert run.top(k) == Run.from_dict({query: run[query][:k] for query in found})


@pytest.mark.parametrize("line, reason", [
    ("q Q0 d 1 0.5", "5 columns"),
    ("q Q0 my chat 1 0.5 s", "7 columns"),
    ("q Q0 d 1 high s", "'high' is not a finite"),
    ("q Q0 d 1 inf s", "'inf' is not a finite"),
    ("q Q0 d 1 1e39 s", "'1e39' is not a finite"),
    ("q Q0 a 1 0.5 s", "stands twice"),
])
def test_a_bad_run_line_is_named(tmp_path, line, reason):
    path = tmp_path / "bad.run"
    path.write_text(f"q Q0 a 1 0.5 s\n\n{line}\n")
    with pytest.raises(CdrError, match=r"bad\.run, line 3: ") as error:
        read_run(path)
    assert reason in str(error.value)


def test_broken_gzip_and_missing_file(tmp_path):
    (tmp_path / "x.run.gz").write_bytes(gzip.compress(b"q Q0 a 1 0.5 s\n")[:-6])
    for name in ("x.run.gz", "none.run"):
        with pytest.raises(CdrError, match=name):
            read_run(tmp_path / name)


def test_repeats_in_a_file_on_request(tmp_path):
    path = tmp_path / "x.run"
    path.write_text("q Q0 a 1 0.5 s\nq Q0 b 2 0.4 s\nq Q0 a 3 0.9 s\n")
    run = read_run(path, on_repeat="first")
    assert run["q"] == [("a", 0.5), ("b", np.float32(0.4))] and run.meta == {"repeated": 1}


@pytest.mark.parametrize("name", ["my chat", "tab\tid", "nbsp\u00a0id", "line\u2028id", "", "nul\x00"])
def test_ids_that_would_shift_columns_are_refused_before_writing(tmp_path, name):
    path = tmp_path / "x.run"
    path.write_text("kept")
    runs = Run.from_dict({"q": {name: 1}}), Run.from_dict({name: {"d": 1}}), Run.from_dict({"q": {"d": 1}}, name=name)
    for run in runs:
        with pytest.raises(CdrError, match="rename it"):
            write_run(run, path)
    assert path.read_text() == "kept" and [file.name for file in tmp_path.iterdir()] == ["x.run"]


def test_run_shows_itself_escaped():
    shown = Run.from_dict({"<b>q</b>": {"$1 & $2": 1}}, name="<i>")._repr_html_()
    assert "<b>" not in shown and "<i>" not in shown and "$" not in shown


# -- BM25 --------------------------------------------------------------------------------------------------------------

words = st.lists(st.sampled_from(["red", "bag", "blue", "the", "a", "shoe", "Ünicode", "数字"]), max_size=8)
words = words.map(" ".join)
some_documents = st.lists(words, min_size=1, max_size=12).filter(lambda rows: any(map(tokenize, rows)))


@given(some_documents, st.lists(words, max_size=4))
@settings(max_examples=150, deadline=None)
def test_okapi_is_rank_bm25(documents, queries):
    reference = BM25Okapi([tokenize(text) for text in documents])
    expected = np.array([reference.get_scores(tokenize(query)) for query in queries]).reshape(-1, len(documents))
    assert BM25(documents, "okapi").scores(queries).toarray() == pytest.approx(expected, abs=1e-9)


@given(st.lists(words, min_size=1, max_size=10), words, st.floats(0, 3), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_lucene_is_the_formula(documents, query, k1, b):
    rows = [tokenize(text) for text in documents]
    mean = sum(map(len, rows)) / len(rows)
    expected = []
    for row in rows:
        score = 0
        for word in tokenize(query):
            n, f = sum(word in other for other in rows), row.count(word)
            if f:
                score += (math.log(1 + (len(rows) - n + 0.5) / (n + 0.5)) * f * (k1 + 1)
                          / (f + k1 * (1 - b + b * len(row) / mean)))
        expected.append(score)
    scores = BM25(documents, k1=k1, b=b).scores([query]).toarray()[0]
    assert scores == pytest.approx(expected, abs=1e-9) and (scores >= 0).all()


def ranked(best: dict) -> list[tuple]:
    """Conversations with their best score and unit, in the order of a run."""
    return sorted(((score, name, unit) for name, (score, unit) in best.items()), key=lambda hit: hit[:2], reverse=True)


def test_bm25_topk_is_sorting_everything():
    rng = np.random.default_rng(0)
    vocabulary = [f"w{i}" for i in range(40)]
    documents = [" ".join(rng.choice(vocabulary, rng.integers(0, 6))) for _ in range(400)]
    owner = np.sort(rng.integers(0, 60, 400))
    names = [f"c{i}" for i in rng.permutation(60)]
    queries = [" ".join(rng.choice([*vocabulary, "zzz"], rng.integers(0, 4))) for _ in range(60)]
    banned = {(int(q), int(u)) for q, u in zip(rng.integers(0, 60, 300), rng.integers(0, 400, 300))}
    for variant, k in itertools.product(("lucene", "okapi"), (1, 7, 100)):
        index = BM25(documents, variant)
        hits = index.topk(queries, owner, names, k, np.array(sorted(banned)))
        scores = index.scores(queries).toarray().astype(np.float32)
        for row in range(60):
            best = {}
            for unit, score in enumerate(scores[row]):
                if score > 0 and (row, unit) not in banned and score > best.get(names[owner[unit]], (0,))[0]:
                    best[names[owner[unit]]] = score, unit
            expected = ranked(best)[:k]
            mine = hits.rows == row
            found = [names[code] for code in hits.conversations[mine]]
            assert list(zip(hits.scores[mine], found, hits.units[mine])) == expected


def test_a_score_does_not_depend_on_the_batch():
    documents = ["red bag", "blue bag", "red shoe red"] * 5
    queries = ["red bag", "bag red", "shoe", "red red"]
    batch = BM25(documents).scores(queries).toarray()
    alone = np.vstack([BM25(documents).scores([query]).toarray() for query in queries])
    assert (batch == alone).all() and (batch[0] == batch[1]).all()


# -- Dense search ------------------------------------------------------------------------------------------------------


def normal(rng, n: int, dim: int) -> np.ndarray:
    rows = rng.standard_normal((n, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def plain(queries, units, owner, names, k, banned=()):
    """Every pair by itself, sorted in Python."""
    rows, usable = [], units.any(axis=1) & np.isfinite(units).all(axis=1)
    for row, query in enumerate(queries):
        best = {}
        for unit, score in enumerate(exact_scores(query, units)):
            name, allowed = names[owner[unit]], usable[unit] and (row, unit) not in banned
            if allowed and (name not in best or score > best[name][0]):
                best[name] = score, unit
        rows += [(row, name, score, unit) for score, name, unit in ranked(best)[:k]] if query.any() else []
    return rows


def as_rows(hits, names):
    return [(row, names[code], score, unit) for row, code, score, unit in zip(*hits[:4])]


@pytest.fixture(params=[False, True], ids=["float32", "bfloat16"])
def product(request, monkeypatch):
    """Both kinds of matrix product: they only nominate, so the result must be the same."""
    monkeypatch.setattr(dense, "_half_is_faster", lambda *_: request.param)


@pytest.mark.parametrize("seed", range(6))
def test_dense_is_sorting_everything(seed, product):
    rng = np.random.default_rng(seed)
    dim, n, c = int(rng.integers(1, 40)), int(rng.integers(1, 3000)), int(rng.integers(1, 400))
    # Few distinct vectors: ties between and inside conversations everywhere, also at rank k.
    units = normal(rng, max(1, n // int(rng.integers(1, 30))), dim)
    units = units[rng.integers(0, len(units), n)]
    units[rng.integers(0, n, n // 20)] = 0
    units[rng.integers(0, n, n // 20), 0] = np.nan
    queries = normal(rng, 30, dim)
    queries[3] = 0
    owner = np.sort(rng.integers(0, c, n))
    names = [f"c{i}" for i in rng.permutation(c)]
    banned = {(int(q), int(u)) for q, u in zip(rng.integers(0, 30, 200), rng.integers(0, n, 200))}
    for k in (1, 10, 1000):
        expected = plain(queries, units, owner, names, k, banned)
        for memory in ("512MiB", "200kB", "1kB"):
            hits = dense_topk(queries, units, owner, names, k, memory, exclude=np.array(sorted(banned)))
            assert as_rows(hits, names) == expected


@pytest.mark.parametrize("lengths", [1.0, 1e-6, 1e6, "mixed"])
def test_lengths_other_than_one(lengths, product):
    rng = np.random.default_rng(1)
    factors = 10.0 ** rng.uniform(-3, 3, 2000) if lengths == "mixed" else np.full(2000, lengths)
    units = (normal(rng, 2000, 64) * factors[:, None]).astype(np.float32)
    queries = (normal(rng, 20, 64) * factors[:20, None]).astype(np.float32)
    owner, names = np.arange(2000) // 4, [f"{i:03}" for i in range(500)]
    assert as_rows(dense_topk(queries, units, owner, names, 10), names) == plain(queries, units, owner, names, 10)


@pytest.mark.parametrize("direction", [1, -1])
def test_growing_and_falling_scores(direction, product):
    """The worst orders for a running threshold: every tile better than all before, or the best first."""
    angle = np.linspace(0, 1.5, 20_000)[::direction]
    units = np.column_stack([np.cos(angle), np.sin(angle)]).astype(np.float32)
    names = [f"{i:05}" for i in range(10_000)]
    hits = dense_topk(np.array([[1, 0]] * 3, np.float32), units, np.arange(20_000) // 2, names, 10, "1MiB")
    assert as_rows(hits, names) == plain(np.array([[1, 0]] * 3, np.float32), units, np.arange(20_000) // 2, names, 10)


def test_one_conversation_larger_than_every_tile(product):
    rng = np.random.default_rng(2)
    units, queries = normal(rng, 12_000, 16), normal(rng, 5, 16)
    owner, names = np.repeat([0, 1, 2], [1, 11_000, 999]), ["a", "b", "c"]
    for k in (1, 2, 3):
        hits = dense_topk(queries, units, owner, names, k, "100kB")
        assert as_rows(hits, names) == plain(queries, units, owner, names, k)


def test_nothing_but_the_vectors_decides(tmp_path, monkeypatch, product):
    rng = np.random.default_rng(3)
    units, queries = normal(rng, 9000, 96), normal(rng, 70, 96)
    units[4000:8000] = units[:4000]
    owner, names = np.arange(9000) // 3, [f"c{i}" for i in range(3000)]
    expected = dense_topk(queries, units, owner, names, 20)

    def same(hits):
        return all(np.array_equal(a, b) for a, b in zip(expected, hits))

    disk = np.memmap(tmp_path / "units", np.float32, "w+", shape=units.shape)
    disk[:] = units
    assert same(dense_topk(queries, disk, owner, names, 20, "1MiB"))
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    for n in (1, 3):
        torch.set_num_threads(n)
        assert same(dense_topk(queries, units, owner, names, 20))
        assert torch.get_num_threads() == n
    torch.set_num_threads(threads)
    # Fast low-precision products must not leak in, nor be forgotten afterwards.
    torch.set_float32_matmul_precision("medium")
    assert same(dense_topk(queries, units, owner, names, 20))
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision(precision)
    for height, width in ((1, 64), (7, 100), (70, 9000)):
        monkeypatch.setattr(dense, "_tile", lambda *_, tile=(height, width): tile)
        assert same(dense_topk(queries, units, owner, names, 20))
    # A query's ranking does not depend on the other queries.
    monkeypatch.undo()
    alone = dense_topk(queries[5:6], units, owner, names, 20)
    assert np.array_equal(alone.scores, expected.scores[expected.rows == 5])
    assert np.array_equal(alone.conversations, expected.conversations[expected.rows == 5])


@pytest.mark.parametrize("dim", [1, 3, 384, 4096, 20_000])
def test_exact_scores_do_not_depend_on_their_neighbours(dim):
    rng = np.random.default_rng(dim)
    queries, units = normal(rng, 40, dim), normal(rng, 40, dim)
    together = exact_scores(queries, units)
    for part in (1, 3, 17):
        assert np.array_equal(together, np.concatenate([exact_scores(queries[i:i + part], units[i:i + part])
                                                        for i in range(0, 40, part)]))
    true = [math.fsum(map(float, query.astype(float) * unit)) for query, unit in zip(queries, units)]
    assert together == pytest.approx(true, abs=1e-7)


def test_half_precision_and_double_precision_vectors():
    rng = np.random.default_rng(4)
    units, queries = normal(rng, 500, 32), normal(rng, 4, 32)
    owner, names = np.arange(500), [f"{i:03}" for i in range(500)]
    half = units.astype(np.float16)
    assert as_rows(dense_topk(queries, half, owner, names, 9), names) == plain(
        queries, half.astype(np.float32), owner, names, 9)
    assert as_rows(dense_topk(queries.astype(float), units.astype(float), owner, names, 9), names) == plain(
        queries, units, owner, names, 9)


def test_vectors_are_not_changed():
    units = np.array([[np.nan, 1], [1, 0]], np.float32)
    before = units.copy()
    dense_topk(np.array([[1, 0]], np.float32), units, np.arange(2), ["a", "b"])
    assert np.array_equal(units, before, equal_nan=True)


def test_agrees_with_semantic_search():
    from sentence_transformers.util import semantic_search

    rng = np.random.default_rng(5)
    units, queries = normal(rng, 3000, 64), normal(rng, 20, 64)
    hits = dense_topk(queries, units, np.arange(3000), [f"{i:04}" for i in range(3000)], 10)
    for row, reference in enumerate(semantic_search(queries, units, top_k=10)):
        assert hits.conversations[hits.rows == row].tolist() == [hit["corpus_id"] for hit in reference]
        assert hits.scores[hits.rows == row] == pytest.approx([hit["score"] for hit in reference], abs=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_and_cpu_rank_alike():
    rng = np.random.default_rng(6)
    units, queries = normal(rng, 100_000, 384), normal(rng, 300, 384)
    owner, names = np.arange(100_000) // 5, [f"{i:05}" for i in range(20_000)]
    gpu, cpu = (dense_topk(queries, units, owner, names, 50, device=device) for device in ("cuda", "cpu"))
    assert all(np.array_equal(a, b) for a, b in zip(gpu, cpu))


@pytest.mark.parametrize("size, expected", [("512MiB", 2**29), ("2 GB", 2 * 10**9), (1000, 1000), ("1.5KiB", 1536)])
def test_amounts_of_memory(size, expected):
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "much", "-1MiB", "5 XB", None])
def test_no_amounts_of_memory(size):
    with pytest.raises(CdrError, match="512MiB"):
        parse_bytes(size)


# -- Search, fusion, reranking -----------------------------------------------------------------------------------------

CORPUS = [Conversation.make(f"c{i}", *[("user", f"{colour} {thing} {i % 3}") for colour in ("red", "blue")])
          for i, thing in enumerate(["bag", "shoe", "hat", "bag", "kettle"])]


@pytest.mark.parametrize("encoder", ["bm25", "hash", "keyword"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_search_is_the_best_unit_of_each_conversation(encoder, granularity):
    run = search({"q": "red bag"}, CORPUS, encoder, granularity, progress=False)
    assert run.name == f"{encoder}.{granularity}" and run.queries == ("q",)
    assert {hit for hit, _ in run["q"][:2]} == {"c0", "c3"}
    table = best_units(run, CORPUS, k=2)
    for name, start, stop, text in zip(table.conversation, table.start, table.stop, table.text):
        conversation = next(one for one in CORPUS if one.id == name)
        assert text == render(conversation.turns[start:stop])


def test_search_takes_every_form_of_a_corpus():
    runs = [search({"q": "red bag"}, corpus, "bm25", "turn")
            for corpus in (CORPUS, iter(CORPUS), {one.id: one for one in CORPUS}, (one for one in CORPUS))]
    runs.append(search({"q": "red bag"}, segment(CORPUS, "turn"), "bm25"))
    assert all(run == runs[0] for run in runs)


def test_search_with_a_store_gives_the_same(tmp_path):
    store = Store(tmp_path)
    runs = [search({"q": "red bag"}, CORPUS, "hash", "window", store=store, progress=False) for _ in range(2)]
    assert runs[0] == runs[1] == search({"q": "red bag"}, CORPUS, "hash", "window", progress=False)


def test_meta_is_plain_json():
    import json

    for encoder in ("bm25", "hash"):
        meta = search({"q": "red bag", "e": ""}, CORPUS, encoder, "window", progress=False).meta
        assert json.loads(json.dumps(meta)) == meta
        assert meta["granularity"] == "window" and meta["blank_queries"] == 1


@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), numbers, max_size=6), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_rrf_is_the_formula(lists):
    runs = [Run.from_dict({"q": hits}, name=f"r{i}") for i, hits in enumerate(lists)]
    expected = {}
    for run in runs:
        for rank, (hit, _) in enumerate(run["q"], 1):
            expected[hit] = expected.get(hit, 0) + 1 / (60 + rank)
    assert dict(fuse(runs)["q"]) == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(-9, 9), max_size=6), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_minmax_is_the_formula(lists):
    runs, expected = [Run.from_dict({"q": hits}) for hits in lists], {}
    for hits in lists:
        for hit, score in hits.items():
            low, high = min(hits.values()), max(hits.values())
            expected[hit] = expected.get(hit, 0) + ((score - low) / (high - low) if high > low else 1)
    assert dict(fuse(runs, "minmax")["q"]) == pytest.approx(expected, rel=1e-6)


def test_fusion_does_not_depend_on_the_order_of_runs():
    rng = np.random.default_rng(0)
    runs = [Run.from_dict({f"q{i}": {f"d{j}": float(rng.standard_normal()) for j in range(30)} for i in range(10)})
            for _ in range(3)]
    for method in ("rrf", "minmax"):
        fused = [fuse(order, method, name="f").to_dict() for order in itertools.permutations(runs)]
        assert all(other == fused[0] for other in fused)


class Table:
    """A reranker that looks scores up."""

    name = "table"

    def __init__(self, scores):
        self.scores, self.pairs = scores, []

    def score(self, pairs, batch_size=None, progress=True):
        self.pairs += pairs
        return np.array([self.scores[text] for _, text in pairs])


def test_rerank_orders_the_first_and_keeps_the_rest():
    corpus = {name: Conversation.make(name, ("user", name)) for name in "abcdef"}
    run = Run.from_dict({"q": {name: 6.0 - i for i, name in enumerate("abcdef")}, "r": {}})
    reranker = Table({f"user: {name}": -abs(ord(name) - ord("c")) * 100.0 for name in "abcdef"})
    second = rerank(run, {"q": "x", "r": "y"}, corpus, reranker, depth=4)
    assert [hit for hit, _ in second["q"]] == ["c", "d", "b", "a", "e", "f"]
    assert (np.diff(second.scores[2:]) < 0).all() and second.queries == run.queries
    assert sorted(text for _, text in reranker.pairs) == [f"user: {name}" for name in "abcd"]


def test_rerank_keeps_the_gold_list():
    """What the first search missed stays missed (p2): the denominator does not shrink to what was reranked."""
    from cdr_lib.evaluation.metrics import score_matrix

    corpus = {name: Conversation.make(name, ("user", name)) for name in ("n1", "p1", "n2", "p2")}
    run = Run.from_dict({"q": {"n1": 0.9, "p1": 0.8, "n2": 0.7}})
    second = rerank(run, {"q": "x"}, corpus, Table({"user: n1": 0.1, "user: p1": 0.9, "user: n2": 0.0}))
    judged = {"q": {"p1": 1, "p2": 1}}
    assert score_matrix(second, judged, ["nDCG@10", "R@10", "RR"])[0] == pytest.approx([0.613147, 0.5, 1.0], abs=1e-6)
    assert score_matrix(run, judged, ["nDCG@10", "RR"])[0] == pytest.approx([0.386853, 0.5], abs=1e-6)


def test_rerank_reads_the_best_unit_and_each_pair_once():
    corpus = [Conversation.make("a", ("user", "x"), ("user", "y")),
              Conversation.make("b", ("user", "y"), ("user", "y"))]
    reranker = Table({"user: x": 1.0, "user: y": 2.0})
    second = rerank(Run.from_dict({"q": {"a": 1, "b": 2}}), {"q": "?"}, corpus, reranker, granularity="turn")
    assert second["q"] == [("b", 2.0), ("a", 2.0)] and len(reranker.pairs) == 2


@pytest.mark.parametrize("scores", [[1.0], [[1.0], [2.0]], [1.0, float("nan")]])
def test_a_reranker_that_breaks_its_promise(scores):
    class Broken(Table):
        def score(self, pairs, batch_size=None, progress=True):
            return np.array(scores)

    corpus = [Conversation.make(name, ("user", name)) for name in "ab"]
    with pytest.raises(CdrError, match="table"):
        rerank(Run.from_dict({"q": {"a": 1, "b": 2}}), {"q": "?"}, corpus, Broken({}))


# -- Real conversations ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dialogues():
    folder = os.environ.get("CDR_DATA")
    if not folder:
        pytest.skip("CDR_DATA is not set: the folder of the public corpora")
    path = Path(folder) / "sgd" / "sgd_test.jsonl"
    if not path.is_file():
        pytest.skip("no sgd/sgd_test.jsonl in CDR_DATA")
    return list(itertools.islice(load_source("sgd", path), 400))


@pytest.mark.real
def test_real_messages_score_as_in_rank_bm25(dialogues):
    units = segment(dialogues, "turn")
    queries = units.texts[::400]
    reference = BM25Okapi([tokenize(text) for text in units.texts])
    expected = np.array([reference.get_scores(tokenize(query)) for query in queries])
    assert BM25(units.texts, "okapi").scores(queries).toarray() == pytest.approx(expected, abs=1e-6)


@pytest.mark.real
@pytest.mark.parametrize("encoder", ["bm25", "hash"])
def test_real_messages_find_their_conversation_unless_excluded(dialogues, encoder):
    units = segment(dialogues, "turn")
    rows = range(0, len(units), 501)
    names = [units.conversation_ids[units.conversation[row]] for row in rows]
    queries = {str(row): units.texts[row] for row in rows}
    sources = {str(row): (name, int(units.start[row])) for row, name in zip(rows, names)}
    run = search(queries, units, encoder, progress=False)
    for row, name in zip(rows, names):
        found = dict(run[str(row)])
        # The same sentence may stand in other conversations: they tie at the top, perhaps down to the last hit.
        assert found.get(name, min(found.values())) == pytest.approx(max(found.values()), abs=1e-6)
    without = search(queries, units, encoder, exclude=sources, progress=False)
    assert without.meta["excluded_pairs"] == len(rows)
    assert all(unit != int(without.queries[row]) for row, unit in zip(without.rows, without.units))
