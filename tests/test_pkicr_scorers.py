"pkicr.prompts, pkicr.joint, pkicr.scorers: parity with the libraries underneath, packing, bad input; cases TRN-06, TRN-08."
import json
import warnings
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForNextSentencePrediction,
    BertForSequenceClassification,
    BertModel,
    DPRConfig,
    DPRContextEncoder,
    DPRQuestionEncoder,
    ElectraConfig,
    ElectraForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import Turn
from cdr_lib.core.encoders import HashEncoder, get_encoder
from cdr_lib.core.models import packaged_minilm
from cdr_lib.core.store import Store
from cdr_lib.pkicr.focus import GroundedTurn
from cdr_lib.pkicr.joint import CrossScorer, NliScorer, NspScorer, PairScorer, StsScorer, _sigmoid, distinct_pairs
from cdr_lib.pkicr.prompts import FORMS, Packer, Pair, get_form, make_pairs, pack, shares
from cdr_lib.pkicr.scorers import BiScorer, Bm25Scorer, DprScorer, TfidfScorer, get_scorer

pytestmark = pytest.mark.usefixtures("one_thread")

KNOWLEDGE = ("The tower stands in Paris.", "Rome is old.", "It opened in 1889 as the gate of a world fair.",
             "A lift takes visitors up, 退款 and naïve café 👍🏽.")
PERSONAS = ("I like towers.", "I hate heights.", "I have a dog.")


def turn(name: str, text: str, personas=PERSONAS, knowledge=KNOWLEDGE, before=()) -> GroundedTurn:
    return GroundedTurn(name, 1, (*before, Turn("user", text)), tuple(personas), tuple(knowledge))


TURNS = [turn("D1", "Where is this?"), turn("D2", "Would I like it up there, and is there anything to eat?", PERSONAS[:2])]


@cache
def minilm_tokenizer():
    return AutoTokenizer.from_pretrained(packaged_minilm())


@pytest.fixture(scope="module")
def tokenizer():
    return minilm_tokenizer()


def bert(**options) -> BertConfig:
    return BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, **options)


def saved(folder, model, tokenizer, seed: int = 0):
    "A tiny model with weights large enough that its outputs differ."
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(std=0.3, generator=generator)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def cross(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("models") / "cross"
    saved(folder, BertForSequenceClassification(bert(num_labels=1)), tokenizer)
    return folder


def scores_of(scorer, pairs):
    return scorer.score(pairs, progress=False)


# --- forms and pairs --------------------------------------------------------------------------------------------------

def test_the_papers_form_is_persona_then_dialogue():
    pairs = make_pairs(TURNS, "P+D&K")
    assert len(pairs) == 3 * 4 + 2 * 4
    assert pairs.pairs[0].texts == ("I like towers. Where is this?", "The tower stands in Paris.")
    assert list(zip(pairs.turn, pairs.persona, pairs.knowledge))[:5] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 0)]


@pytest.mark.parametrize("form, expected", [
    ("D&K", ("Where is this?", "Rome is old.")), ("P&K", ("I like towers.", "Rome is old.")),
    ("D&P", ("Where is this?", "I like towers.")), ("D&P+K", ("Where is this?", "I like towers. Rome is old.")),
    ("P+D&K (prefix)", ("I'm thinking 'I like towers.' Where is this?", "Rome is old.")),
    ("P+D&K (suffix)", ("'I like towers.' is what I'm thinking. Where is this?", "Rome is old."))])
def test_every_form(form, expected):
    pairs = make_pairs(TURNS[:1], form, knowledge=[1])
    assert pairs.pairs[0].texts == expected
    assert len(pairs) == (1 if form == "D&K" else 3)
    assert (pairs.persona[0] == -1) == (form == "D&K") and (pairs.knowledge[0] == -1) == (form == "D&P")


def test_null_positive_is_the_bare_dialogue_in_every_form_that_has_it():
    for name, form in FORMS.items():
        if not form.has_null:
            with pytest.raises(CdrError, match="no null-positive sample"):
                make_pairs(TURNS, name, personas="all+null")
            continue
        pairs = make_pairs(TURNS, name, personas="all+null", knowledge=[2, 1])
        nulls = [pair for pair, persona in zip(pairs.pairs, pairs.persona) if persona == -1]
        assert nulls == make_pairs(TURNS, "D&K", knowledge=[2, 1]).pairs
        assert make_pairs(TURNS, name, personas="null", knowledge=[2, 1]).pairs == nulls


def test_braces_in_a_persona_are_text():
    hostile = turn("D", "Hi {dialogue}", ("I like {persona} and {0}.",))
    assert make_pairs([hostile], "P+D&K (prefix)").pairs[0].texts[0] == "I'm thinking 'I like {persona} and {0}.' Hi {dialogue}"


def test_history_is_a_parameter_and_holds_no_later_turn():
    talk = (Turn("user", "Where is it?"), Turn("assistant", "In Paris."))
    longer = turn("D", "How tall?", before=talk)
    assert make_pairs([longer]).pairs[0].question == ("I like towers.", "How tall?")
    assert make_pairs([longer], history=3).pairs[0].question[1] == "Where is it? In Paris. How tall?"


def test_turns_with_candidates_of_one_kind_only():
    no_persona, no_knowledge = turn("A", "Hi", ()), turn("B", "Hi", PERSONAS, ())
    assert make_pairs([no_persona]).persona.tolist() == [-1] * 4
    assert make_pairs([no_persona], personas="all+null").persona.tolist() == [-1] * 4
    assert make_pairs([no_knowledge], "D&P").persona.tolist() == [0, 1, 2]
    for turns, form, says in (([no_persona], "P&K", "A/1 has no candidates of persona"),
                              ([no_persona], "D&P", "A/1 has no candidates of persona"),
                              ([no_knowledge], "P+D&K", "B/1 has no candidates of knowledge")):
        with pytest.raises(CdrError, match=says):
            make_pairs(turns, form)


@pytest.mark.parametrize("options, says", [
    ({"form": "K&D"}, "must be one of D&K"), ({"personas": "some"}, "must be all, null"), ({"history": 0}, "history"),
    ({"knowledge": "best"}, "must be all"), ({"knowledge": [0]}, "1 positions of knowledge for 2 turns"),
    ({"knowledge": [0, 4]}, "D2/1: knowledge 4"), ({"knowledge": [0, -1]}, "knowledge -1"),
    ({"knowledge": [0, None]}, "knowledge None"), ({"knowledge": [True, 0]}, "knowledge True")])
def test_bad_questions_about_pairs(options, says):
    with pytest.raises(CdrError, match=says):
        make_pairs(TURNS, **options)


def test_blank_candidates_are_not_taken_for_none():
    with pytest.raises(CdrError, match="D/1: persona 1 shows nothing"):
        make_pairs([turn("D", "Hi", ("I ski.", " \u200b"))])
    assert len(make_pairs([turn("D", "Hi", ("I ski.", " "))], "D&K")) == 4  # the form does not read them


def test_pairs_show_hostile_text_escaped():
    shown = make_pairs([turn("D", "<script>alert(1)</script>", ("<img src=x>",))])._repr_html_()
    assert "<script" not in shown and "<img" not in shown and "&lt;script" in shown


# --- packing ----------------------------------------------------------------------------------------------------------

@given(st.lists(st.integers(0, 400), min_size=1, max_size=6), st.integers(6, 600))
@settings(max_examples=200, deadline=None)
def test_shares_are_those_of_cutting_the_longest_token_by_token(lengths, room):
    expected = list(lengths)
    while sum(expected) > room:
        longest = max(expected)
        expected[max(place for place, size in enumerate(expected) if size == longest)] -= 1
    assert shares(lengths, room) == expected


def words(n: int, tag: str) -> str:
    return " ".join(f"{tag}{'abcdefghij'[i % 10]}{'abcdefghij'[i // 10 % 10]}{'abcdefghij'[i // 100]}" for i in range(n))


@pytest.fixture(scope="module")
def word_tokenizer():
    "One token for each word, so that numbers of tokens can be chosen."
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"{tag}{word}" for tag in "qpmh" for word in
                                                        (w[1:] for w in words(1000, "x").split()))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
                                   sep_token="[SEP]", model_max_length=512)


def test_TRN_08_a_long_question_leaves_the_passage_alone(word_tokenizer):
    question, a, b = words(600, "q"), words(100, "p"), words(99, "p") + " m" + "aaa"
    packed = [pack(word_tokenizer, Pair((question,), (passage,)), 512) for passage in (a, b)]
    for (kept, answer, cut), passage in zip(packed, (a, b)):
        assert len(kept.split()) == 409 and question.endswith(kept)  # the newest words survive
        assert answer == passage and cut == 191
        assert len(word_tokenizer(kept, answer)["input_ids"]) == 512
    inputs = [word_tokenizer(*one[:2])["input_ids"] for one in packed]
    assert inputs[0] != inputs[1]


def test_TRN_08_count_of_truncated_pairs_and_other_scores(cross):
    scorer = CrossScorer(cross, device="cpu", max_length=64)
    long = turn("D", words(600, "q"), ("I like towers.",), ("The tower is tall.", "Rome is old."))
    pairs = make_pairs([long, TURNS[0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = scores_of(scorer, pairs)
    assert scorer.truncated == 2 and scores[0] != scores[1]


def test_TRN_08_a_blind_model_is_reported(cross, tmp_path, tokenizer):
    model = BertForSequenceClassification.from_pretrained(cross)
    with torch.no_grad():
        model.classifier.weight.zero_()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="all answers the same score for 5 of 5 questions"):
        scores_of(CrossScorer(str(tmp_path), device="cpu"), make_pairs(TURNS))
    with warnings.catch_warnings():  # one answer for each question says nothing
        warnings.simplefilter("error")
        scores_of(CrossScorer(str(tmp_path), device="cpu"), make_pairs(TURNS, knowledge=[0, 0]))


def test_persona_dialogue_and_knowledge_all_keep_their_share(word_tokenizer):
    persona, dialogue, knowledge = words(10, "m"), words(600, "q"), words(700, "p")
    packed = Packer(word_tokenizer, 512).pack(Pair((persona, dialogue), (knowledge,)))
    kept = packed.question[1].split(), packed.answer[0].split()
    assert packed.question[0] == persona and [len(part) for part in kept] == [250, 249]
    assert dialogue.endswith(packed.question[1]) and knowledge.startswith(packed.answer[0])


def test_answers_that_begin_alike_stay_different(word_tokenizer):
    head, packer = words(700, "h"), Packer(word_tokenizer, 64)
    ends = ["paaa pbaa", "paaa pcaa", "maaa", "maaa pbaa", ""]
    pairs = [Pair((persona, "qaaa qbaa"), (f"{head} {end}".strip(),)) for persona in ("maaa", "mbaa") for end in ends]
    packed, cut = packer.pack_all(pairs)
    assert cut.all() and len(set(packed)) == len(pairs)
    for pair in packed:
        assert packer.over(pair) <= 0 and len(word_tokenizer(*pair.texts)["input_ids"]) <= 64
    # Each pair alone is the same as among others that are no danger to it.
    assert packer.pack_all(pairs[:1])[0][0] == packer.pack(pairs[0])


def test_what_the_tokenizer_cannot_tell_apart_stays_equal_without_end(tokenizer):
    head = "word " * 300
    packed, cut = Packer(tokenizer, 64).pack_all([Pair(("q",), (head + end,)) for end in ("Café", "café", "cafe")])
    assert cut.all() and len({pair.answer[0].casefold() for pair in packed}) <= 3


@given(st.lists(st.sampled_from(["tower", "Paris,", "unbelievableness", "a", "退款在哪里", "👍🏽", "don't", "x" * 90, "1889."]),
                min_size=1, max_size=120), st.lists(st.sampled_from(["Rome", "is", "supercalifragilistic", "old-fashioned", "é"]),
                                                    min_size=1, max_size=120), st.integers(16, 80))
@settings(max_examples=60, deadline=None)
def test_packed_pairs_fit_and_are_made_of_the_texts(question, answer, limit):
    tokenizer = minilm_tokenizer()
    pair = Pair(("I like towers.", " ".join(question)), (" ".join(answer),))
    left, right, cut = pack(tokenizer, pair, limit)
    assert len(tokenizer(left, right)["input_ids"]) <= limit
    assert (cut == 0) == (len(tokenizer(*pair.texts)["input_ids"]) <= limit)
    assert left.startswith("I like towers")
    dialogue = left.removeprefix("I like towers.").removeprefix("I like towers").strip()
    assert right and right in pair.answer[0] and dialogue and dialogue in pair.question[1]


def test_limits_that_leave_no_room(tokenizer):
    with pytest.raises(CdrError, match="give at least 11"):
        pack(tokenizer, Pair(("a",), ("b",)), 5)
    with pytest.raises(CdrError, match="fast tokenizer"):
        Packer(SimpleNamespace(is_fast=False), 64)
    assert pack(tokenizer, Pair(("a",), ("b",)), 11) == ("a", "b", 0)


# --- cross-encoder ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", FORMS)
def test_scores_are_those_of_sentence_transformers(cross, form):
    reference = CrossEncoder(str(cross), device="cpu", local_files_only=True)
    pairs = make_pairs(TURNS, form)
    scorer = CrossScorer(str(cross), device="cpu")
    expected = reference.predict([pair.texts for pair in pairs.pairs], activation_fn=torch.nn.Sigmoid())
    assert np.abs(scores_of(scorer, pairs) - expected).max() < 1e-6 and np.ptp(expected) > 1e-3
    assert scorer.scale == "probability" and scorer.truncated == 0 and isinstance(scorer, PairScorer)


def test_scores_do_not_depend_on_order_repetition_or_company(cross):
    scorer, pairs = CrossScorer(str(cross), device="cpu"), make_pairs(TURNS)
    scores = scores_of(scorer, pairs)
    assert np.allclose(scores_of(scorer, pairs.pairs[::-1])[::-1], scores, atol=1e-6)
    tokens = scorer.tokens
    assert np.allclose(scores_of(scorer, pairs.pairs * 3), np.tile(scores, 3), atol=1e-6)
    assert scorer.tokens - tokens == tokens / 2  # each different pair once
    assert np.allclose([scores_of(scorer, [pair])[0] for pair in pairs.pairs], scores, atol=1e-6)


def test_TRN_06_the_scale_is_stated_and_forced(cross, tmp_path, tokenizer):
    assert np.allclose(_sigmoid(np.array([-7.1, 0.2, 3.0])), [0.000825, 0.549834, 0.952574], atol=1e-6)
    # A head that gives exactly the logits of the case: its bias is set, its weights are zero.
    pairs = make_pairs(TURNS).pairs[:1]
    for logit, chance, label in ((-7.1, 0.000825, 0), (0.2, 0.549834, 1), (3.0, 0.952574, 1)):
        model = BertForSequenceClassification.from_pretrained(cross)
        with torch.no_grad():
            model.classifier.weight.zero_()
            model.classifier.bias.fill_(logit)
        model.save_pretrained(tmp_path / str(logit))
        tokenizer.save_pretrained(tmp_path / str(logit))
        by_scale = {scale: CrossScorer(str(tmp_path / str(logit)), device="cpu", scale=scale)
                    for scale in ("logit", "probability")}
        assert scores_of(by_scale["logit"], pairs)[0] == pytest.approx(logit, abs=1e-6)
        assert scores_of(by_scale["probability"], pairs)[0] == pytest.approx(chance, abs=1e-6)
        assert int(scores_of(by_scale["probability"], pairs)[0] >= 0.5) == label
        assert by_scale["logit"].fingerprint() != by_scale["probability"].fingerprint()
    with pytest.raises(CdrError, match="scale"):
        CrossScorer(str(cross), device="cpu", scale="raw")


@pytest.mark.parametrize("activation", ["torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"])
def test_TRN_06_a_models_own_setting_changes_nothing(cross, tmp_path, tokenizer, activation):
    reference = CrossEncoder(str(cross), device="cpu", local_files_only=True)
    reference.save_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": activation, "version": "5.0"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    pairs = make_pairs(TURNS)
    logits, chances = (scores_of(CrossScorer(str(tmp_path), device="cpu", scale=scale), pairs)
                       for scale in ("logit", "probability"))
    expected = reference.predict([pair.texts for pair in pairs.pairs], activation_fn=torch.nn.Identity())
    assert np.allclose(logits, expected, atol=1e-6) and np.allclose(chances, 1 / (1 + np.exp(-logits)), atol=1e-12)
    assert (np.argsort(logits, kind="stable") == np.argsort(chances, kind="stable")).all()


def test_TRN_06_order_survives_probabilities_near_one():
    logits = np.array([17.0, 17.5, 18.0, 30.0])
    assert (np.diff(_sigmoid(logits)) > 0).all()
    assert len(set((1 / (1 + np.exp(-logits.astype(np.float32)))).tolist())) < 4  # in 32 bits it does not


def test_roberta_pairs_are_joined_as_its_tokenizer_does(tmp_path):
    from tokenizers import trainers

    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train_from_iterator([" ".join(KNOWLEDGE + PERSONAS)] * 3, trainers.BpeTrainer(
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"], vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    bpe.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", pad_token="<pad>", cls_token="<s>",
                                        sep_token="</s>", model_max_length=128, model_input_names=["input_ids", "attention_mask"])
    config = RobertaConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                           intermediate_size=64, max_position_embeddings=130, num_labels=1)
    saved(tmp_path, RobertaForSequenceClassification(config), tokenizer)
    reference = CrossEncoder(str(tmp_path), device="cpu", local_files_only=True)
    scorer, pairs = CrossScorer(str(tmp_path), device="cpu"), make_pairs(TURNS)
    assert np.allclose(scores_of(scorer, pairs), reference.predict([pair.texts for pair in pairs.pairs],
                                                                  activation_fn=torch.nn.Sigmoid()), atol=1e-6)
    assert scorer.max_length == 128
    long = make_pairs([turn("D", words(300, "q"))])
    assert np.isfinite(scores_of(scorer, long)).all() and scorer.truncated == len(long)


def test_damaged_weights_are_an_error_that_names_the_pair(cross, tmp_path, tokenizer):
    model = BertForSequenceClassification.from_pretrained(cross)
    with torch.no_grad():
        model.classifier.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    store = Store(tmp_path / "cache")
    with pytest.raises(CdrError, match="NaN or infinity for 20 of 20 pairs, first for question 'I like towers. Where"):
        scores_of(CrossScorer(str(tmp_path), device="cpu", store=store), make_pairs(TURNS))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))  # failures are not stored


def test_the_store_answers_for_the_same_weights_only(cross, tmp_path, tokenizer):
    pairs, store = make_pairs(TURNS), Store(tmp_path / "cache")
    first = CrossScorer(str(cross), device="cpu", store=store)
    expected = scores_of(first, pairs)
    second = CrossScorer(str(cross), device="cpu", store=store)
    assert np.array_equal(scores_of(second, pairs), expected) and second.tokens == 0 and second.truncated == 0
    saved(tmp_path / "other", BertForSequenceClassification(bert(num_labels=1)), tokenizer, seed=1)
    (tmp_path / "other").rename(tmp_path / "cross")  # even under the same name
    other = CrossScorer(str(tmp_path / "cross"), device="cpu", store=store)
    assert other.name == first.name and not np.allclose(scores_of(other, pairs), expected) and other.tokens > 0
    shorter = CrossScorer(str(cross), device="cpu", max_length=24, store=store)
    scores_of(shorter, pairs)
    assert shorter.tokens > 0


def test_interrupted_work_is_kept(cross, tmp_path, monkeypatch):
    store, pairs = Store(tmp_path), make_pairs([turn(f"D{i}", f"Where is number {i}?") for i in range(40)])
    scorer = CrossScorer(str(cross), device="cpu", store=store)
    forward, calls = scorer._reader._forward, []

    def stop(sides):
        calls.append(len(sides))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(sides)

    monkeypatch.setattr(scorer._reader, "_forward", stop)
    with pytest.raises(KeyboardInterrupt):
        scores_of(scorer, pairs)
    again = CrossScorer(str(cross), device="cpu", store=store)
    scores = scores_of(again, pairs)
    full = CrossScorer(str(cross), device="cpu")
    assert np.allclose(scores, scores_of(full, pairs), atol=1e-6) and 0 < again.tokens < full.tokens


@pytest.mark.parametrize("threads", [1, 3])
def test_workers_keep_order_and_give_the_threads_back(cross, threads, monkeypatch):
    pairs = make_pairs([turn(f"D{i}", f"Where is number {i}?" + " really" * (i % 7)) for i in range(40)])
    scorer = CrossScorer(str(cross), device="cpu")
    expected = scores_of(scorer, pairs)  # one thread, by the fixture
    torch.set_num_threads(threads)
    try:
        assert np.allclose(scores_of(scorer, pairs), expected, atol=1e-6) and torch.get_num_threads() == threads
        forward, calls = scorer._reader._forward, []

        def fail(sides):
            calls.append(len(sides))
            if len(calls) == 2:
                raise MemoryError("no more")
            return forward(sides)

        monkeypatch.setattr(scorer._reader, "_forward", fail)
        with pytest.raises(MemoryError):
            scores_of(scorer, pairs)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("pairs, says", [
    ([("a", "b")], "pair 0 is tuple"), (["ab"], "pair 0 is str"), ([Pair(("a",), ("b",)), None], "pair 1 is NoneType"),
    ([Pair(("a",), (" ",))], "empty or shows nothing"), ([Pair(("a \ud83d",), ("b",))], "lone surrogate")])
def test_pairs_that_cannot_be_read(pairs, says):
    for scorer in (TfidfScorer(), BiScorer(HashEncoder())):
        with pytest.raises(CdrError, match=says):
            scores_of(scorer, pairs)


@pytest.mark.parametrize("sides", [("a", ("b",)), (("a",), "b"), ((), ("b",)), (("a",), ()), (("a",), (None,)), (["a"], ("b",))])
def test_sides_of_a_pair_are_tuples_of_texts(sides):
    with pytest.raises(CdrError, match="tuples of texts"):
        Pair(*sides)


def test_no_pairs_no_scores(cross):
    for scorer in (CrossScorer(str(cross), device="cpu"), BiScorer("hash"), TfidfScorer(), Bm25Scorer()):
        assert scores_of(scorer, []).shape == (0,)


def test_models_with_a_wrong_head_are_refused(tmp_path, tokenizer):
    saved(tmp_path / "three", BertForSequenceClassification(bert(num_labels=3)), tokenizer)
    with pytest.raises(CdrError, match="3 outputs"):
        CrossScorer(str(tmp_path / "three"), device="cpu")
    with pytest.raises(CdrError, match="no classification head"):
        CrossScorer(packaged_minilm(), device="cpu")
    with pytest.raises(CdrError, match="at most 512"):
        saved(tmp_path / "one", BertForSequenceClassification(bert(num_labels=1)), tokenizer)
        CrossScorer(str(tmp_path / "one"), device="cpu", max_length=513)


# --- other tasks ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("labels", [["contradiction", "entailment", "neutral"], ["ENTAILMENT", "NEUTRAL", "CONTRADICTION"]])
def test_nli_takes_the_class_by_its_name(tmp_path, tokenizer, labels):
    config = bert(num_labels=3, id2label=dict(enumerate(labels)), label2id={name: i for i, name in enumerate(labels)})
    model = saved(tmp_path, BertForSequenceClassification(config), tokenizer)
    scorer, pairs = NliScorer(str(tmp_path), device="cpu"), make_pairs(TURNS)
    inputs = tokenizer(*zip(*(pair.texts for pair in pairs.pairs)), padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs).logits.softmax(1)[:, [name.lower() for name in labels].index("entailment")]
    assert np.allclose(scores_of(scorer, pairs), expected, atol=1e-6) and scorer.scale == "probability"
    neutral = NliScorer(str(tmp_path), device="cpu", label="neutral")
    assert not np.allclose(scores_of(neutral, pairs), expected) and neutral.fingerprint() != scorer.fingerprint()


def test_nli_without_the_class_is_an_error(tmp_path, tokenizer):
    saved(tmp_path, BertForSequenceClassification(bert(num_labels=3)), tokenizer)
    with pytest.raises(CdrError, match="no class 'entailment': its configuration names label_0, label_1, label_2"):
        NliScorer(str(tmp_path), device="cpu")


def test_nsp_is_the_probability_of_following(tmp_path, tokenizer):
    model = saved(tmp_path, BertForNextSentencePrediction(bert()), tokenizer)
    scorer, pairs = NspScorer(str(tmp_path), device="cpu"), make_pairs(TURNS)
    inputs = tokenizer(*zip(*(pair.texts for pair in pairs.pairs)), padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits
        # In training, label 0 says that the second sentence follows the first.
        loss = model(**inputs, labels=torch.zeros(len(pairs), dtype=torch.long)).loss
    assert np.allclose(scores_of(scorer, pairs), logits.softmax(1)[:, 0], atol=1e-6)
    assert -np.log(scores_of(scorer, pairs)).mean() == pytest.approx(float(loss), abs=1e-5)


def test_random_heads_are_refused(cross, tmp_path, tokenizer):
    saved(tmp_path, BertModel(bert()), tokenizer)
    for make, says in ((NliScorer, "classifier"), (NspScorer, "seq_relationship")):
        with pytest.raises(CdrError, match=f"lacks . weights .*{says}.*trained for this task"):
            make(str(tmp_path), device="cpu")
    with pytest.raises(CdrError, match="lacks"):
        NspScorer(str(cross), device="cpu")


def test_sts_is_a_cross_encoder_of_another_kind(cross):
    pairs = make_pairs(TURNS)
    sts = get_scorer(f"sts:{cross}", device="cpu")
    assert isinstance(sts, StsScorer) and sts.kind == "STS"
    assert np.array_equal(scores_of(sts, pairs), scores_of(CrossScorer(str(cross), device="cpu"), pairs))


# --- both sides apart -------------------------------------------------------------------------------------------------

def test_bi_encoder_is_the_cosine_of_its_vectors():
    reference = SentenceTransformer(packaged_minilm(), device="cpu", local_files_only=True)
    pairs, scorer = make_pairs(TURNS), BiScorer("minilm", device="cpu")
    left, right = (reference.encode(side, normalize_embeddings=True) for side in
                   zip(*(pair.texts for pair in pairs.pairs)))
    assert np.allclose(scores_of(scorer, pairs), (left * right).sum(1), atol=1e-6)
    assert scorer.scale == "cosine" and scorer.parameters > 20e6 and isinstance(scorer, PairScorer)


class Counting(HashEncoder):
    def __init__(self):
        super().__init__()
        self.seen = []

    def encode(self, texts, role="document", batch_size=None, progress=True):
        texts = list(texts)
        self.seen += [(role, text) for text in texts]
        return super().encode(texts, role, batch_size, progress)


def test_distinct_texts_are_embedded_once_for_all_turns(tmp_path):
    encoder = Counting()
    scorer, pairs = BiScorer(encoder, store=Store(tmp_path)), make_pairs(TURNS, personas="all+null")
    scores = scores_of(scorer, pairs)
    assert len(encoder.seen) == len(set(encoder.seen)) == 7 + 4
    assert np.array_equal(scores_of(scorer, pairs), scores) and len(encoder.seen) == 11  # stored


def test_dot_products_of_vectors_as_they_come(tmp_path, tokenizer):
    saved(tmp_path / "bert", BertModel(bert()), tokenizer)
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    reference = SentenceTransformer(modules=[Transformer(str(tmp_path / "bert")), Pooling(32, "cls")], device="cpu",
                                    similarity_fn_name="dot")
    reference.save(str(tmp_path / "tas"))
    pairs = make_pairs(TURNS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dot = BiScorer(str(tmp_path / "tas"), device="cpu", scale="dot")
    left, right = (reference.encode(side) for side in zip(*(pair.texts for pair in pairs.pairs)))
    assert np.allclose(scores_of(dot, pairs), (left * right).sum(1), rtol=1e-5, atol=1e-5)
    with pytest.warns(UserWarning, match="dot similarity"):
        cosine = BiScorer(str(tmp_path / "tas"), device="cpu")
    assert np.abs(scores_of(cosine, pairs)).max() <= 1 + 1e-6 < np.abs(scores_of(dot, pairs)).max()
    assert dot.fingerprint() != cosine.fingerprint()
    for bad, says in (("cosin", "scale"), ("dot", "normalised")):
        with pytest.raises(CdrError, match=says):
            BiScorer("hash", scale=bad)


def test_bi_encoder_keeps_persona_and_newest_words():
    scorer = BiScorer("minilm", device="cpu", max_length=32)
    long = turn("D", words(200, "q") + " Where is the tower in Paris?", ("I like towers.", "I hate rain."))
    scores = scores_of(scorer, make_pairs([long]))
    assert scorer.truncated == 8 and scores[0] > scores[1] and scores[0] != scores[4]
    with pytest.raises(CdrError, match="loaded already"):
        BiScorer(get_encoder("hash"), device="cpu")


@pytest.mark.parametrize("kind", ["dpr", "bert"])
def test_dpr_puts_the_title_before_the_passage(tmp_path, tokenizer, kind):
    if kind == "dpr":
        config = DPRConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
        towers = DPRQuestionEncoder(config), DPRContextEncoder(config)
    else:
        towers = BertModel(bert()), BertModel(bert())
    for seed, (name, model) in enumerate(zip("qc", towers)):
        saved(tmp_path / name, model, tokenizer, seed)
    scorer, pairs = DprScorer(str(tmp_path / "q"), str(tmp_path / "c"), device="cpu"), make_pairs(TURNS)
    questions, answers = zip(*(pair.texts for pair in pairs.pairs))

    def vectors(model, texts):
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            found = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return found.pooler_output if kind == "dpr" else found.last_hidden_state[:, 0]

    # The released program's way to write it: the tokenizer knows "[SEP]".
    expected = (vectors(towers[0], list(questions)) * vectors(towers[1], [f"Title [SEP] {text}" for text in answers])).sum(1)
    assert np.allclose(scores_of(scorer, pairs), expected, rtol=1e-4, atol=1e-4) and scorer.scale == "dot"
    other = DprScorer(str(tmp_path / "q"), str(tmp_path / "c"), title="Tower", device="cpu")
    assert not np.allclose(scores_of(other, pairs), expected) and other.fingerprint() != scorer.fingerprint()
    assert scorer.parameters == sum(weights.numel() for tower in towers for weights in tower.parameters())


def test_dpr_towers_in_the_wrong_order_or_of_other_sizes(tmp_path, tokenizer):
    config = DPRConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    saved(tmp_path / "q", DPRQuestionEncoder(config), tokenizer)
    saved(tmp_path / "c", DPRContextEncoder(config), tokenizer)
    with pytest.raises(CdrError, match="wrong order"):
        DprScorer(str(tmp_path / "c"), str(tmp_path / "q"), device="cpu")
    saved(tmp_path / "b", BertModel(BertConfig(hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)),
          tokenizer)
    with pytest.raises(CdrError, match="not trained together"):
        DprScorer(str(tmp_path / "q"), str(tmp_path / "b"), device="cpu")


# --- words ------------------------------------------------------------------------------------------------------------

def test_tfidf_is_that_of_scikit_learn():
    text = pytest.importorskip("sklearn.feature_extraction.text")
    from cdr_lib.retrieval.bm25 import tokenize

    pairs = make_pairs(TURNS)
    questions, answers = zip(*(pair.texts for pair in pairs.pairs))
    reference = text.TfidfVectorizer(tokenizer=tokenize, token_pattern=None, lowercase=False).fit(KNOWLEDGE)
    left, right = reference.transform(questions), reference.transform(answers)
    assert np.allclose(scores_of(TfidfScorer(), pairs), np.asarray(left.multiply(right).sum(1)).ravel())
    assert np.allclose(scores_of(TfidfScorer(KNOWLEDGE), pairs.pairs[:2]), scores_of(TfidfScorer(), pairs)[:2])


def test_bm25_is_that_of_retrieval():
    from cdr_lib.retrieval.bm25 import BM25

    pairs = make_pairs(TURNS)
    table = BM25(KNOWLEDGE).scores([pair.texts[0] for pair in pairs.pairs]).toarray()
    assert np.allclose(scores_of(Bm25Scorer(), pairs), table[np.arange(len(pairs)), pairs.knowledge])
    shuffled = np.random.default_rng(0).permutation(len(pairs))
    assert np.allclose(scores_of(Bm25Scorer(KNOWLEDGE), [pairs.pairs[i] for i in shuffled]),
                       table[np.arange(len(pairs)), pairs.knowledge][shuffled])


def test_texts_without_any_word_score_zero():
    for scorer in (TfidfScorer(), Bm25Scorer()):
        assert scores_of(scorer, [Pair(("?!",), ("...",)), Pair(("?!",), ("tower",))]).tolist() == [0, 0]


def test_many_questions_in_blocks():
    pairs = make_pairs([turn(f"D{i}", f"Where is the tower number {i}?") for i in range(300)], "D&K")
    scores = scores_of(Bm25Scorer(), pairs).reshape(300, 4)
    assert np.allclose(scores, scores[0]) and scores[0].argmax() == 0


# --- by name ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("spec, says", [
    ("", "is unknown"), ("clip:x", "is unknown"), ("bi", "lacks its model"), ("cross:", "lacks its model"),
    ("dpr:a", "two models"), ("dpr:a|b|c", "two models"), ("tfidf:x", "has no model"), ({"name": "x"}, "is unknown"),
    ({"kind": "cross", "name": "x", "size": 3}, "no option 'size'"), ("nli:./no/such", "no such folder"),
    ("nsp:./no/such", "no such folder"), ("dpr:./no/such|./no/such", "no such folder")])
def test_unknown_scorers(spec, says):
    with pytest.raises(CdrError, match=says):
        get_scorer(spec, device="cpu")


def test_options_reach_the_scorer(cross):
    scorer = get_scorer({"kind": "cross", "name": str(cross), "scale": "logit", "max_length": 32}, device="cpu")
    assert (scorer.scale, scorer.max_length, scorer.device) == ("logit", 32, "cpu")
    json.dumps(scorer.fingerprint())
    assert get_scorer("bi:hash").name == "hash" and get_scorer({"kind": "bm25", "documents": ["a"]}).name == "BM25"


def test_distinct_pairs_take_a_table_of_pairs():
    pairs = make_pairs(TURNS)
    distinct, places = distinct_pairs(pairs)
    assert [distinct[place] for place in places] == pairs.pairs and get_form("D&K") is FORMS["D&K"]


def test_the_last_layer_is_shortened_where_the_head_reads_the_first_token(cross, tmp_path, tokenizer):
    "Same scores from BERT and its relatives with less work; a head that reads all tokens keeps its whole layer."
    pairs = make_pairs(TURNS).pairs
    electra = ElectraConfig(hidden_size=32, embedding_size=32, num_hidden_layers=2, num_attention_heads=4,
                            intermediate_size=64, vocab_size=len(tokenizer), num_labels=1)
    saved(tmp_path / "electra", ElectraForSequenceClassification(electra), tokenizer)
    for folder in (cross, tmp_path / "electra"):
        scorer, whole = CrossScorer(folder, device="cpu", scale="logit"), CrossEncoder(str(folder), device="cpu")
        assert type(scorer._reader.model.base_model.encoder.layer[-1]).__name__ == "FirstToken"
        expected = whole.predict([pair.texts for pair in pairs], activation_fn=torch.nn.Identity())
        assert np.abs(scores_of(scorer, pairs) - expected).max() < 1e-5

    class Mean(torch.nn.Module):
        def forward(self, states, *_):
            return states.mean(dim=1)

    scorer = CrossScorer(cross, device="cpu", scale="logit")
    model = BertForSequenceClassification.from_pretrained(cross).eval()
    model.bert.pooler = Mean()
    reader = type(scorer._reader)(model, scorer._reader.tokenizer, "cpu", None, "mean")
    assert type(reader.model.bert.encoder.layer[-1]).__name__ == "BertLayer"


def test_openvino_scores_as_torch_does(cross):
    pytest.importorskip("openvino")
    pairs = make_pairs(TURNS)
    exact, half = (get_scorer({"kind": "cross", "name": str(cross), "scale": "logit", "backend": "openvino"}, dtype=dtype)
                   for dtype in ("auto", "bfloat16"))
    expected = scores_of(get_scorer({"kind": "cross", "name": str(cross), "scale": "logit"}, device="cpu"), pairs)
    assert np.abs(scores_of(exact, pairs) - expected).max() < 1e-5
    assert 0 < np.abs(scores_of(half, pairs) - expected).max() < 0.1
    assert len({str(scorer.fingerprint()) for scorer in (exact, half)}) == 2
    with pytest.raises(CdrError, match="runs on the CPU"):
        CrossScorer(cross, device="cuda", backend="openvino")
    with pytest.raises(CdrError, match="torch or openvino"):
        CrossScorer(cross, backend="onnx")
