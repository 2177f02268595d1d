"Search by script: every operator against brute force, one conversation against all, odd corpora, bad input, memory, display."
import subprocess
import sys
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import Conversation
from cdr_lib.core.encoders import HashEncoder
from cdr_lib.core.store import Store
from cdr_lib.retrieval import alignment
from cdr_lib.retrieval.aligned import Blend, aligned_search, explain, prepare, rerank_parts, show_hits
from cdr_lib.retrieval.alignment import Costs, Scale, Side, View, align_one, aligned_topk, similarity_scale
from cdr_lib.retrieval.script import Part, Script
from cdr_lib.retrieval.segment import segment
from cdr_lib.retrieval.voice import voiced

pytestmark = pytest.mark.usefixtures("one_thread")

SCALE = Scale(0.1, 0.2)
ROLES = ["user", "assistant", "system", "tool"]


def unit(rows):
    rows = np.asarray(rows, dtype=np.float64)
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    return (rows / np.where(length > 0, length, 1)).astype(np.float32)


@st.composite
def scripts(draw, most=4):
    "Any script that is no contradiction, with all operators."
    parts = []
    for number in range(draw(st.integers(1, most))):
        given = {"role": draw(st.sampled_from(["", "user", "assistant"])), "after": draw(st.sampled_from(["", "later", "next"])),
                 "never": draw(st.integers(0, 4)) == 0, "times": draw(st.sampled_from([1, 1, 1, 2, 3])),
                 "place": draw(st.sampled_from(["", "", "first", "last"])), "change": draw(st.integers(0, 3)) == 0}
        if draw(st.integers(0, 6)) == 0:
            given = {"scope": "session", "never": given["never"]}
        try:
            part = Part(f"p{number}", **given)
            Script("q", "q", (*parts, part))
        except CdrError:
            continue
        parts.append(part)
    return Script("q", "q", tuple(parts) or (Part("p0"),))


def by_brute_force(script, near, roles, scale, costs, whole):
    "Every choice of messages for every chain, as the costs are described; no recurrence."
    n = len(roles)
    skip = scale.level - costs.skip * scale.spread

    def seen(number, t):
        part = script.parts[number]
        if costs.roles and part.role and part.role != roles[t]:
            return -np.inf
        where = t / max(1, n - 1)
        return near[number, t] - costs.place * scale.spread * {"": 0, "first": where, "last": 1 - where}[part.place]

    def above(number, start):
        return max([0.0, *(seen(number, t) - scale.level for t in range(start, n))])

    chains, total, played = [], 0.0, 0
    for number, part in enumerate(script.parts):
        if part.scope == "session":
            total += -costs.never * max(0, whole[number] - scale.level) if part.never else whole[number]
            played += not part.never
        elif part.never and part.after and chains and costs.order:
            chains[-1][-1]["never"].append(number)
        elif part.never:
            total -= costs.never * above(number, 0)
        else:
            played += 1
            if not (part.after and chains and costs.order):
                chains.append([])
            chains[-1] += [{"part": number, "share": 1 / part.times, "next": part.after == "next" and not copy,
                            "change": part.change and not copy, "never": []} for copy in range(part.times)]
    for chain in chains:
        best = -np.inf
        for choice in product([None, *range(n)], repeat=len(chain)):
            taken = [t for t in choice if t is not None]
            if taken != sorted(set(taken)):
                continue
            value, before = 0.0, None
            for j, (link, t) in enumerate(zip(chain, choice)):
                if t is None:
                    value += link["share"] * skip
                else:
                    value += link["share"] * seen(link["part"], t) - costs.never * sum(above(x, t + 1) for x in link["never"])
                    if j and before is not None:
                        if link["next"] and t != before + 1:
                            value -= costs.gap * scale.spread
                if j and before is not None and link["change"] and np.isfinite(held := seen(link["part"], before)):
                    value -= costs.change * max(0, held - scale.level)
                before = t
            best = max(best, value)
        total += best
    return total / max(1, played)


@settings(max_examples=150, deadline=None)
@given(scripts(3), st.integers(0, 4), st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_one_conversation_is_aligned_as_described(script, n, seed, by_role, in_order):
    rng = np.random.default_rng(seed)
    near, whole = rng.normal(0.1, 0.3, (len(script.parts), n)), rng.normal(0.1, 0.3, len(script.parts))
    roles = list(rng.choice(ROLES[:3], n, p=[0.45, 0.45, 0.1]))
    costs = Costs(*rng.random(5) * 2, roles=by_role, order=in_order)
    found = align_one(script, near, roles, SCALE, costs, whole)
    assert found.score == pytest.approx(by_brute_force(script, near, roles, SCALE, costs, whole), abs=1e-9)
    # The messages that it names are of the part's role, and in the order of the chain.
    for number, message, value in found.messages:
        assert value == near[number, message] and (not by_role or script.parts[number].role in ("", roles[message]))
    if not any(part.never or part.scope == "session" for part in script.parts) and in_order:
        starts = [number for number, part in enumerate(script.parts) if number and not part.after] + [99]
        low = 0
        for high in starts:
            taken = [message for number, message, _ in found.messages if low <= number < high]
            assert taken == sorted(set(taken))
            low = high


def world(rng, n=25, dim=8, longest=9, zeros=False):
    lengths = rng.integers(0, longest, n)
    owner = np.repeat(np.arange(n), lengths)
    vectors = unit(rng.normal(size=(len(owner), dim)) + 0.3)
    if zeros and len(vectors):
        vectors[rng.integers(0, len(vectors), 3)] = 0
    whole = unit(rng.normal(size=(n, dim)))
    return lengths, owner, vectors, np.array(rng.choice(ROLES, len(owner), p=[0.4, 0.4, 0.1, 0.1]), dtype=object), whole


@pytest.mark.parametrize("long", [512, 0])  # messages from which a conversation is aligned link by link
@settings(max_examples=60, deadline=None)
@given(st.lists(scripts(), min_size=1, max_size=6), st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 100]), st.booleans(),
       st.booleans(), st.sampled_from(["512MiB", "1KiB", 20_000]), st.booleans())
def test_all_conversations_as_each_alone(long, asked, seed, k, by_role, in_order, memory, given_scores):
    rng = np.random.default_rng(seed)
    lengths, owner, vectors, who, whole = world(rng, zeros=True)
    parts = unit(rng.normal(size=(sum(len(script.parts) for script in asked), 8)))
    queries = unit(rng.normal(size=(len(asked), 8)))
    costs = Costs(*rng.random(5) * 2, roles=by_role, order=in_order)
    ids = [f"c{n:02}" for n in rng.permutation(len(lengths))]
    sessions = Side(whole, np.arange(len(lengths)))
    turns, session, rows = Side(vectors, owner), (parts, sessions), parts
    views = [View(0.3, queries, turns), View(0.2, queries, sessions)]
    if given_scores:
        turns, rows = Side(None, owner), sparse.csr_array(parts @ vectors.T)
        views[0] = View(0.3, sparse.csr_array(queries @ vectors.T), turns)
        session = sparse.csr_array(parts @ whole.T), Side(None, np.arange(len(lengths)))
    with patch.object(alignment, "_LONG", long):
        hits = aligned_topk(asked, rows, turns, who, ids, views, session, SCALE, costs, k, memory)
    at = 0
    for row, script in enumerate(asked):
        mine = parts[at:at + len(script.parts)].astype(float)
        at += len(mine)
        expected = {}
        for c in np.flatnonzero(lengths):
            own = owner == c
            score = align_one(script, mine @ vectors[own].T, who[own], SCALE, costs, mine @ whole[c]).score
            expected[c] = score + 0.3 * (queries[row] @ vectors[own].T).max() + 0.2 * queries[row] @ whole[c]
        mask = hits.rows == row
        found = dict(zip(hits.conversations[mask].tolist(), hits.scores[mask].tolist()))
        assert len(found) == mask.sum() == min(k, len(expected))
        assert all(abs(expected[c] - score) < 1e-5 for c, score in found.items())
        assert list(found.values()) == sorted(found.values(), reverse=True)
        assert min(found.values(), default=0) >= max((expected[c] for c in expected if c not in found), default=-9) - 1e-5
        assert all(who_first == np.searchsorted(owner, c) for who_first, c in zip(hits.units[mask], hits.conversations[mask]))


@pytest.mark.parametrize("memory", ["1KiB", "512MiB"])
def test_ties_rank_by_id_over_blocks_and_duplicates_all_stay(memory):
    n = 700
    owner = np.repeat(np.arange(n), 2)
    ids = [f"c{number:03}" for number in np.random.default_rng(0).permutation(n)]
    asked = [Script.parse("user: a\nlater assistant: b")] * 3
    hits = aligned_topk(asked, unit(np.ones((6, 4))), Side(unit(np.ones((2 * n, 4))), owner), ["user", "assistant"] * n, ids, k=5,
                        max_memory=memory)
    for row in range(3):
        assert [ids[c] for c in hits.conversations[hits.rows == row]] == [f"c{number:03}" for number in range(n - 1, n - 6, -1)]
    every = aligned_topk(asked[:1], unit(np.ones((2, 4))), Side(unit(np.ones((2 * n, 4))), owner), ["user", "assistant"] * n, ids,
                         k=10 * n, max_memory=memory)
    assert len(every.rows) == n and np.allclose(every.scores, 1)


def test_nothing_to_search_and_nothing_asked():
    empty = Side(np.empty((0, 4), np.float32), np.empty(0, int))
    asked = [Script.parse("user: a"), Script("", "", ())]
    assert len(aligned_topk(asked, unit(np.ones((1, 4))), empty, [], ["a", "b"]).rows) == 0
    one = Side(unit(np.ones((1, 4))), np.array([0]))
    assert len(aligned_topk([], np.empty((0, 4), np.float32), one, ["user"], ["a"]).rows) == 0
    hits = aligned_topk(asked, np.zeros((1, 4), np.float32), Side(unit(np.ones((1, 4))), np.array([1])), ["user"], ["a", "b"])
    assert hits.conversations.tolist() == [1] and hits.rows.tolist() == [0]


def test_wrong_shapes_and_numbers_are_named():
    good = dict(scripts=[Script.parse("user: a")], parts=np.eye(1, 4, dtype=np.float32), roles=["user"] * 2,
                turns=Side(np.eye(2, 4, dtype=np.float32), np.array([0, 1])), conversation_ids=["a", "b"])
    whole = np.eye(1, 4, dtype=np.float32), Side(np.eye(2, 4, dtype=np.float32), np.array([0, 1]))
    bad = np.eye(1, 4, dtype=np.float32)
    bad[0, 2] = np.inf
    for change, words in (({"parts": bad}, "parts: row 0 holds NaN or infinity"),
                          ({"views": [View(1, bad, good["turns"])]}, "queries of view 1: row 0"),
                          ({"views": [View(1, np.eye(2, 4, dtype=np.float32), good["turns"])]}, "view 1: 2 rows"),
                          ({"session": (bad, whole[1])}, "parts for sessions: row 0"),
                          ({"session": (whole[0], whole[1]._replace(vectors=whole[1].vectors[:1]))}, "sessions: 2 conversation"),
                          ({"parts": sparse.csr_array(np.ones((1, 3)))}, "4 columns|3 columns"),
                          ({"turns": Side(None, np.array([0, 1])), "parts": sparse.csr_array(np.array([[np.nan, 1]]))}, "NaN"),
                          ({"turns": Side(np.eye(2, 4, dtype=np.float32), np.array([-1, 1]))}, "must be sorted and fit")):
        with pytest.raises(CdrError, match=words):
            aligned_topk(**{**good, **change})
    with pytest.raises(CdrError, match="whole conversation"):
        align_one(Script.parse("session: a"), np.ones((1, 2)), ["user"] * 2, SCALE)
    with pytest.raises(CdrError, match="1 parts and 3 messages"):
        align_one(Script.parse("user: a"), np.ones((1, 2)), ["user"] * 3, SCALE)
    assert len(aligned_topk(**good, device="cpu").rows) == 2


def test_the_scale_is_that_of_all_pairs():
    vectors = unit(np.random.default_rng(1).normal(size=(300, 6)) + 0.5)
    products = vectors.astype(float) @ vectors.T.astype(float)
    assert similarity_scale(vectors) == pytest.approx((products.mean(), products.std()), abs=1e-6)
    many = unit(np.random.default_rng(2).normal(size=(20_000, 6)) + 0.5)
    assert similarity_scale(many) == pytest.approx(similarity_scale(many[::3]), abs=0.01)


def chat(name, *lines):
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    return Conversation.make(name, *((roles[line[0]], line[3:]) for line in lines))


CORPUS = [chat("asks", "u: dinner tonight", "a: suggests the restaurant Bella", "u: asks for another option", "a: Luna"),
          chat("early", "u: asks for another option", "a: which town", "u: dinner tonight", "a: suggests the restaurant Bella"),
          chat("one", "u: hello"), chat("mute", "a: hello", "a: anybody there"), chat("blank", "u:  ", "a: \u200b"),
          chat("tools", "s: be brief", "u: dinner tonight", "t: {restaurant}", "a: suggests the restaurant Bella"),
          chat("gaps", "u:  ", "u: dinner tonight", "a: ", "a: suggests the restaurant Bella", "u:  ",
               "u: asks for another option")]
QUERY = {"q": "The user asks for another option after the assistant suggests a restaurant"}


def roles_of(name, places):
    turns = next(chat for chat in CORPUS if chat.id == name).turns
    return [turns[place].role for place in places]


def test_every_kind_of_conversation():
    found = prepare(QUERY, CORPUS, "hash", progress=False)
    run = found.run()
    assert {name for name, _ in run["q"]} == {"asks", "early", "one", "mute", "tools", "gaps"}
    for name, score in run["q"]:
        assert np.isfinite(score)
        # Messages are numbered as in the conversation, blank ones included, and have the role of their part.
        turns = next(chat for chat in CORPUS if chat.id == name).turns
        for part, message, _ in found.align("q", name).messages:
            assert turns[message].role == found.scripts["q"].parts[part].role and turns[message].text.strip()
    assert [message for _, message, _ in found.align("q", "gaps").messages] == [3, 5]
    assert found.align("q", "blank").messages == () and run.meta["conversations"] == len(CORPUS)
    with pytest.raises(CdrError, match="not in the corpus"):
        found.align("q", "nobody")
    with pytest.raises(CdrError, match="'r' is not among"):
        found.align("r", "asks")


def test_corpora_of_all_forms():
    run = aligned_search(QUERY, CORPUS, "hash", progress=False)
    assert run == aligned_search(QUERY, iter(CORPUS), "hash", progress=False)
    assert run == aligned_search(QUERY, {chat.id: chat for chat in CORPUS}, "hash", progress=False)
    assert run == aligned_search(QUERY, [*CORPUS, CORPUS[0]], "hash", progress=False)
    turned = aligned_search(QUERY, CORPUS[::-1], "hash", progress=False)
    assert [name for name, _ in turned["q"]] == [name for name, _ in run["q"]]
    with pytest.raises(CdrError, match="under another id"):
        aligned_search(QUERY, {"other": CORPUS[0]}, "hash", progress=False)
    with pytest.raises(CdrError, match="two different conversations"):
        aligned_search(QUERY, [CORPUS[0], chat("asks", "u: else")], "hash", progress=False)
    with pytest.raises(CdrError, match="where a Conversation belongs"):
        aligned_search(QUERY, ["text"], "hash", progress=False)


def test_scores_are_the_sum_of_alignment_and_views(tmp_path):
    blend, encoder = Blend(0.4, 0.5, 0.3, 0.7), HashEncoder()
    queries = QUERY | {"s": "Conversations about travel where the user complains", "n": "The assistant never apologises"}
    asked = {"q": Script.parse("assistant: suggests the restaurant\nlater user: asks for another option", "restaurant option"),
             "s": Script.parse("session: dinner tonight\nuser: hello", "dinner hello"),
             "n": Script.parse("user: hello\nnever assistant: suggests the restaurant", "hello restaurant")}
    found = prepare(queries, CORPUS, encoder, asked, blend, store=Store(tmp_path), progress=False)
    run = found.run()
    units = {name: segment(CORPUS, name) for name in ("turn", "window", "session")}
    vectors = {name: encoder.encode(part.texts, "document", progress=False) for name, part in units.items()}
    for query, script in asked.items():
        whole = encoder.encode([script.plain], "query", progress=False)[0]
        rows = encoder.encode([part.text for part in script.parts], "query", progress=False)
        says = [0.7 * encoder.encode([said], "query", progress=False)[0] if (said := voiced(part)) else 0
                for part in script.parts]
        rows = unit([row + 0.4 * whole * (part.scope == "turn" and not part.never) + voice
                     for row, voice, part in zip(rows, says, script.parts)])
        for name, score in run[query]:
            spans = {key: part.of(name) for key, part in units.items()}
            roles = roles_of(name, units["turn"].start[spans["turn"]])
            alone = align_one(script, rows @ vectors["turn"][spans["turn"]].T, roles, similarity_scale(vectors["turn"]), Costs(),
                              rows @ vectors["session"][spans["session"]][0])
            window, session = (vectors[key][spans[key]] @ whole for key in ("window", "session"))
            assert score == pytest.approx(alone.score + 0.5 * window.max() + 0.3 * session[0], abs=1e-5)
            assert found.align(query, name).score == pytest.approx(alone.score, abs=1e-5)
    again = prepare(queries, CORPUS, encoder, asked, blend, store=Store(tmp_path), progress=False).run()
    assert again == run and again.meta == run.meta


def test_words_in_place_of_vectors():
    from rank_bm25 import BM25Okapi

    from cdr_lib.retrieval.bm25 import tokenize

    asked = {"q": Script.parse("assistant: suggests the restaurant Bella\nlater user: asks for another option\n"
                               "never user: hello anybody\nsession: dinner tonight", "another option restaurant Bella")}
    found = prepare(QUERY, CORPUS, "bm25:okapi", asked, progress=False)
    units = {name: segment(CORPUS, name) for name in ("turn", "window", "session")}

    def share(name, text):
        scores = BM25Okapi([tokenize(unit) for unit in units[name].texts]).get_scores(tokenize(text))
        return scores / (scores.max() if scores.max() > 0 else 1)

    parts, plain = asked["q"].parts, asked["q"].plain
    near = [(share("turn", part.text) + 0.3 * share("turn", plain)) / 1.3 if part.scope == "turn" and not part.never
            else share("turn", part.text) for part in parts]
    whole = [share("session", part.text) for part in parts]
    for name, score in found.run()["q"]:
        spans = {key: part.of(name) for key, part in units.items()}
        roles = roles_of(name, units["turn"].start[spans["turn"]])
        alone = align_one(asked["q"], np.array(near)[:, spans["turn"]], roles, Scale(0, 0.15), Costs(),
                          np.array(whole)[:, spans["session"].start])
        views = 0.25 * share("window", plain)[spans["window"]].max() + 0.15 * share("session", plain)[spans["session"].start]
        assert score == pytest.approx(alone.score + views, abs=1e-5)
        assert found.align("q", name).score == pytest.approx(alone.score, abs=1e-6)
    # What is said of the whole conversation may repeat a part, and stands in no chain.
    awkward = {"q": Script.parse("user: dinner tonight\nnever session: travel\nlater assistant: travel")}
    assert prepare(QUERY, CORPUS, "bm25", awkward).scripts == awkward
    assert len(prepare(QUERY, CORPUS, "bm25", awkward).run()["q"]) == 6


def test_units_take_a_share_of_their_context(tmp_path):
    from cdr_lib.core.encoders import embed, get_encoder
    from cdr_lib.retrieval.late import embed_late

    encoder, store = get_encoder("minilm"), Store(tmp_path)
    found = prepare(QUERY, CORPUS, encoder, blend=Blend(context=0.7), store=store, progress=False)
    units = {name: segment(CORPUS, name) for name in ("turn", "window", "session")}
    in_context = embed_late(encoder, units, store, progress=False)
    sides = {"turn": found.sides.turns, "window": found.sides.views[0].side, "session": found.sides.views[1].side}
    for name, part in units.items():
        alone = embed(encoder, part.texts, "document", store=store, progress=False)
        assert np.allclose(sides[name].vectors, unit(alone + 0.7 * in_context[name]), atol=1e-6)
    assert not np.allclose(sides["turn"].vectors, in_context["turn"], atol=0.01)
    plain = prepare(QUERY, CORPUS, encoder, blend=Blend(context=0), store=store, progress=False)
    assert np.array_equal(plain.sides.turns.vectors, embed(encoder, units["turn"].texts, "document", store=store, progress=False))
    assert found.run().meta["how"]["in_context"] and not plain.run().meta["how"]["in_context"]
    assert found.sides.scale != plain.sides.scale


def test_an_encoder_that_cannot_pool_late_sees_units_by_themselves():
    found, plain = (prepare(QUERY, CORPUS, "hash", blend=Blend(context=weight), progress=False) for weight in (1, 0))
    assert found.run().to_dict() == plain.run().to_dict() and not found.meta["how"]["in_context"]
    assert prepare(QUERY, CORPUS, "bm25", blend=Blend(context=1)).run().to_dict() == prepare(
        QUERY, CORPUS, "bm25", blend=Blend(context=0)).run().to_dict()


def test_scripts_by_hand_and_blank_queries():
    queries = {"blank": "\u200b ", **QUERY, "fifty": "; then ".join(f"the user says {n}" for n in range(50))}
    asked = {"blank": Script("\u200b ", "", ()), "q": Script.parse("user: hello"),
             "fifty": Script.parse("\n".join(["user: x0"] + [f"later user: x{n}" for n in range(1, 50)]))}
    for encoder in ("hash", "bm25", "keyword"):
        run = prepare(queries, CORPUS, encoder, asked, progress=False).run(k=2)
        assert run["blank"] == [] and len(run["fifty"]) == len(run["q"]) == 2 and run["q"][0][0] == "one"
        assert run.queries == tuple(queries) and run.meta["blank_queries"] == 1
    assert prepare({"b": " "}, CORPUS, "hash", progress=False).run()["b"] == []
    with pytest.raises(CdrError, match="forbids"):
        Script.parse("user: hello\nnever user: hello")
    with pytest.raises(CdrError, match="k=0"):
        prepare(QUERY, CORPUS, "hash", progress=False).run(k=0)


def test_explanations_agree_with_the_scores():
    found = prepare(QUERY, CORPUS, "hash", blend=Blend(0, 0, 0, 0), progress=False)
    run, scale = found.run(), found.sides.scale
    table = explain(found, run, k=3)
    assert table["conversation"].drop_duplicates().tolist() == [name for name, _ in run["q"][:3]]
    for name, rows in table.groupby("conversation"):
        skipped = scale.level - scale.spread
        assert rows["similarity"].astype(float).fillna(skipped).sum() / 2 == pytest.approx(dict(run["q"])[name], abs=1e-5)
        assert rows["part"].tolist() == [0, 1]
    shown = show_hits(found, run, CORPUS, k=2)
    assert [hit[0] for hit in shown.hits] == [name for name, _ in run["q"][:2]]
    for row in explain(found, run, k=2).dropna().itertuples():
        played = next(hit[3] for hit in shown.hits if hit[0] == row.conversation)
        assert f"{row.asked} ({row.similarity:.2f})" in played[row.message]
    assert len(show_hits(found, run, CORPUS, k=99).hits) == len(run["q"])
    with pytest.raises(CdrError, match="not in the corpus"):
        show_hits(found, run, CORPUS[-1:])
    with pytest.raises(CdrError, match="'r' is not among"):
        show_hits(found, run, CORPUS, "r")


def test_hostile_text_is_shown_and_never_obeyed():
    evil = "<script>alert(1)</script> \x1b[31m [a](javascript:x) $x$ \u202e asks"
    hostile = [Conversation.make("id<b>\n1. forged\x1b[2J", ("user", evil), ("assistant", evil + "\n> user: forged"))]
    asked = {"<i>q": Script.parse(f"user: {evil}\nnever assistant: {evil}x", evil)}
    found = prepare({"<i>q": evil}, hostile, "hash", asked, progress=False)
    shown = show_hits(found, found.run(), hostile)
    page, lines = shown._repr_html_(), str(shown)
    assert "<script" not in page and "id<b>" not in page and "&lt;script&gt;" in page and "mathjax_ignore" in page
    assert "\x1b" not in lines and "\u202e" not in lines and "\n1. forged" not in lines and "\n> user: forged" not in lines
    assert "mark>" in page and "\\x1b" in lines


class _Reader:
    "Counts what it reads; the longer the message the better."

    name = "reader"

    def __init__(self, value=None):
        self.value, self.pairs = value, []

    def score(self, pairs, batch_size=None, progress=True):
        self.pairs += pairs
        return np.array([len(text) for _, text in pairs]) if self.value is None else self.value


def test_a_reranker_reads_aligned_messages_alone():
    found, reader = prepare(QUERY, CORPUS, "hash", progress=False), _Reader()
    run = found.run()
    read = rerank_parts(found, run, reader, depth=3, progress=False)
    assert {name for name, _ in read["q"]} == {name for name, _ in run["q"][:3]} and read.name == f"{run.name}+reader"
    assert len(reader.pairs) == len(set(reader.pairs)) <= 6
    texts = {part.text for part in found.scripts["q"].parts}
    messages = {text for text in found.units.texts}
    assert all(part in texts and message in messages for part, message in reader.pairs)
    for name, score in read["q"]:
        played = {part: found.units.texts[found.units.of(name)][list(found.units.start[found.units.of(name)]).index(message)]
                  for part, message, _ in found.align("q", name).messages}
        lowest = min(len(text) for _, text in reader.pairs)
        assert score == pytest.approx(np.mean([len(played[part]) if part in played else lowest for part in (0, 1)]))
    for value in (np.array([np.nan] * 99), np.array([1.0])):
        with pytest.raises(CdrError, match="did not give one finite score"):
            rerank_parts(found, run, _Reader(value), progress=False)
    with pytest.raises(CdrError, match="depth=0"):
        rerank_parts(found, run, reader, depth=0)
    blank = prepare({"b": " "}, CORPUS, "hash", progress=False)
    assert rerank_parts(blank, blank.run(), reader, progress=False)["b"] == []


def test_a_conversation_of_2000_messages_among_short_ones():
    rng = np.random.default_rng(0)
    lengths = np.array([2, 2000, 1, 3] + [4] * 50)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    vectors = unit(rng.normal(size=(len(owner), 8)))
    roles = np.array(["user", "assistant"], dtype=object)[np.arange(len(owner)) % 2]
    script = Script.parse("user x2: a\nlater assistant: b\nnext user: c\nlater never user: d\nlater change last user: e")
    parts = unit(rng.normal(size=(5, 8)))
    ids = [f"c{n:02}" for n in range(len(lengths))]
    for memory in ("512MiB", "64KiB"):  # link by link, or step by step
        hits = aligned_topk([script], parts, Side(vectors, owner), roles, ids, scale=SCALE, max_memory=memory)
        for c in range(5):
            own = owner == c
            expected = align_one(script, parts.astype(float) @ vectors[own].T, roles[own], SCALE).score
            assert hits.scores[hits.conversations == c] == pytest.approx([expected], abs=1e-5)


_MANY = """
import sys
import numpy as np, torch
from cdr_lib.retrieval.alignment import Side, View, aligned_topk
from cdr_lib.retrieval.script import Script
torch.set_num_threads(1)
n, dim = 100_000, 32
rng = np.random.default_rng(0)
rows = rng.standard_normal((3 * n, dim), dtype=np.float32)
rows /= np.linalg.norm(rows, axis=1, keepdims=True)
turns = Side(rows, np.repeat(np.arange(n), 3))
asked = [Script.parse("user: a\\nlater assistant: b\\nlater never user: c")] * 200
args = dict(scripts=asked, parts=np.tile(rows[:3], (200, 1)), turns=turns, roles=np.array(["user", "assistant", "user"] * n),
            conversation_ids=[f"c{i}" for i in range(n)], views=[View(0.2, np.tile(rows[:1], (200, 1)), turns)],
            max_memory="200MB")
def kib(name): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
before = kib("VmRSS")
hits = aligned_topk(**args)
assert len(hits.rows) == 200 * 100 and (hits.scores[:100] == hits.scores[-100:]).all()
print((kib("VmHWM") - before) / 2**10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_100_000_conversations_is_bounded():
    child = subprocess.run([sys.executable, "-c", _MANY], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert child.returncode == 0, child.stderr
    assert float(child.stdout.split()[-1]) < 500


def test_threads_do_not_change_the_ranking():
    import torch

    rng = np.random.default_rng(3)
    lengths, owner, vectors, who, whole = world(rng, 300)
    asked = [Script.parse("user: a\nlater assistant: b")] * 40 + [Script.parse("any: a\nnext user: b\nlater user: c")] * 40
    args = asked, unit(rng.normal(size=(200, 8))), Side(vectors, owner), who, [f"c{n}" for n in range(300)]
    one = aligned_topk(*args)
    torch.set_num_threads(3)
    try:
        three = aligned_topk(*args)
    finally:
        torch.set_num_threads(1)
    assert (one.conversations == three.conversations).all() and np.allclose(one.scores, three.scores, atol=1e-6)
