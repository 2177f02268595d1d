"retrieval.late: the same numbers as a slow reference, tokenizers of all kinds, long and odd conversations, bad input."
import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import Conversation
from cdr_lib.core.encoders import get_encoder
from cdr_lib.core.models import ModelSpec, SentenceEncoder
from cdr_lib.core.store import Store
from cdr_lib.retrieval import late
from cdr_lib.retrieval.late import check_late, embed_late, message_sums, search_late, token_windows
from cdr_lib.retrieval.search import search
from cdr_lib.retrieval.segment import GRANULARITIES, segment

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = Conversation.make("chat", ("user", "I need a train to Leeds."), ("assistant", "The 9:15 has seats."),
                         ("user", "No, the later one 👍🏽."), ("assistant", "Booked:\n11:40."), ("user", "Thanks"))
ODD = Conversation.make("odd", ("user", "[SEP] [CLS]\n\nuser: <s> </s>"), ("assistant", "\x01"), ("user", "退款在哪里？"),
                        ("assistant", "   naïve café\u2028line "), ("user", "👍🏽👍🏽"))
LONG = Conversation.make("long", *[(role, f"The {n}th delay of the {role} is no surprise.") for n in range(30)
                                   for role in ("user", "assistant")])


def units_of(conversations, k=3, rendering="plain"):
    return {name: segment(conversations, name, k, rendering) for name in GRANULARITIES}


def tiny(folder, tokenizer="bytes", pooling="mean", dense=False, include_prompt=True, prompts=None, truncate=None):
    "A model with random weights that reads 120 tokens at once."
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaModel

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    if tokenizer == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    else:
        made = Tokenizer(models.Unigram())
        made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    made.train_from_iterator([turn.text for chat in (CHAT, ODD, LONG) for turn in chat.turns] * 3, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=made.get_vocab_size(), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                           intermediate_size=32, max_position_embeddings=140, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    RobertaModel(config).save_pretrained(folder / "raw")
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
                            unk_token="<unk>", model_max_length=120).save_pretrained(folder / "raw")
    modules = [Transformer(str(folder / "raw"), max_seq_length=120),
               Pooling(16, pooling_mode=pooling, include_prompt=include_prompt)]
    if dense:
        modules += [Dense(16, 12), Normalize()]
    SentenceTransformer(modules=modules, prompts=prompts, truncate_dim=truncate, device="cpu").save(str(folder / "model"))
    return SentenceEncoder(str(folder / "model"), device="cpu")


@pytest.fixture(scope="module")
def minilm():
    return get_encoder("minilm", device="cpu")


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def small(request, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp(request.param), request.param)


def slow_messages(encoder, messages):
    "Mean token state of each message, found character by character; the conversation fits the model."
    text = "\n".join(messages)
    owner = [number for number, message in enumerate(messages) for _ in message + "\n"]
    encoded = encoder.model.tokenizer(text, return_offsets_mapping=True)
    states = encoder.model.encode([text], output_value="token_embeddings", normalize_embeddings=False)[0].cpu().double().numpy()
    assert len(states) == len(encoded["input_ids"]) <= encoder.max_length
    found, current = [[] for _ in messages], 0
    for (_, stop), state in list(zip(encoded["offset_mapping"], states))[1:-1]:
        current = max(current, owner[stop - 1] if stop else 0)
        found[current].append(state)
    return [np.mean(part, axis=0) if part else None for part in found]


def close(a, b, eps=1e-5):
    np.testing.assert_allclose(a, b, atol=eps, rtol=0)


def unit(vector):
    return vector / np.linalg.norm(vector)


# ---------------------------------------------------------------- exactness

@pytest.mark.parametrize("chat", [CHAT, ODD], ids=["chat", "odd"])
def test_messages_are_means_of_their_token_states(minilm, chat):
    units = units_of([chat])
    vectors = embed_late(minilm, units, progress=False)
    for vector, mean in zip(vectors["turn"], slow_messages(minilm, units["turn"].texts), strict=True):
        close(vector, unit(mean))


def test_small_models_with_other_tokenizers(small):
    for turns in (CHAT.turns[:2], ODD.turns[4:], ODD.turns[1:2]):
        units = units_of([Conversation("c", turns)])
        vectors = embed_late(small, units, progress=False)
        close(vectors["session"], small.encode(units["session"].texts, progress=False))
        if len(turns) > 1:
            for vector, mean in zip(vectors["turn"], slow_messages(small, units["turn"].texts), strict=True):
                close(vector, unit(mean))


def test_a_session_that_fits_has_the_vector_of_the_encoder(minilm):
    corpus = [CHAT, ODD, Conversation.make("one", ("user", "Hello?")), Conversation("two", CHAT.turns[:2])]
    for rendering in ("plain", "text"):
        units = units_of(corpus, rendering=rendering)
        vectors = embed_late(minilm, units, progress=False)
        close(vectors["session"], minilm.encode(units["session"].texts, progress=False))
        for name in ("one", "two"):  # no longer than a window
            close(vectors["window"][units["window"].of(name)], vectors["session"][units["session"].of(name)])
        close(vectors["turn"][units["turn"].of("one")], vectors["session"][units["session"].of("one")])


def test_windows_are_means_over_all_their_tokens(minilm):
    units = units_of([CHAT, LONG], k=2)
    vectors = embed_late(minilm, units, progress=False)
    messages = [units["turn"].texts[units["turn"].of(name)] for name in ("chat", "long")]
    sums = message_sums(minilm, messages, progress=False)
    assert len(sums) == len(CHAT.turns) + len(LONG.turns) + 2
    for name, first in (("chat", 0), ("long", len(CHAT.turns) + 1)):
        for place, vector in enumerate(vectors["window"][units["window"].of(name)]):
            total = sums[first + place].astype(float) + sums[first + place + 1]
            close(vector, unit(total[:-1]))
    count = len(minilm.model.tokenizer("\n".join(messages[1]))["input_ids"])
    assert sums[len(CHAT.turns) + 1:, -1].sum() == count > 256


def test_long_conversations_take_each_token_from_the_window_where_it_is_deepest(minilm):
    text = segment([LONG], "session").texts[0]
    ids = minilm.model.tokenizer(text, return_offsets_mapping=True)
    states = {}
    for start, stop, first, last in token_windows(len(ids["input_ids"]) - 2, 254):
        window = torch.tensor([[101, *ids["input_ids"][1:-1][start:stop], 102]])
        with torch.inference_mode():
            found = minilm.model[0]({"input_ids": window, "attention_mask": torch.ones_like(window)})["token_embeddings"]
        states |= {token: found[0, 1 + token - start].numpy() for token in range(first, last)}
    turns, begin = segment([LONG], "turn"), 0
    vectors = embed_late(minilm, {"turn": turns}, progress=False)["turn"]
    for message, vector in zip(turns.texts, vectors, strict=True):
        inside = [token for token, (start, _) in enumerate(ids["offset_mapping"][1:-1]) if begin <= start < begin + len(message)]
        close(vector, unit(np.mean([states[token] for token in inside], axis=0)))
        begin += len(message) + 1


@given(n=st.integers(1, 3000), room=st.integers(2, 600), overlap=st.sampled_from([0, 0.1, 0.25, 0.5, 0.75]))
@settings(max_examples=300, deadline=None)
def test_windows_take_every_token_once(n, room, overlap):
    start, stop, first, last = token_windows(n, room, overlap).T
    assert first[0] == start[0] == 0 and last[-1] == stop[-1] == n
    assert (first[1:] == last[:-1]).all() and (first < last).all()
    assert (start <= first).all() and (last <= stop).all() and (stop - start <= room).all()
    assert len(start) == 1 or (stop - start == stop[0] - start[0]).all()
    shared = int(overlap * room)
    assert (stop[:-1] - start[1:] >= shared - 1).all()
    # One window less could not hold the shared tokens.
    assert len(start) == 1 or (len(start) - 1) * (room - shared) + shared < n


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), texts), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_any_text(shared, turns):
    chat = Conversation.make("c", *turns)
    units = units_of([chat], k=2)
    vectors = embed_late(shared, units, progress=False)
    for name, part in units.items():
        assert vectors[name].shape == (len(part), 384) and np.isfinite(vectors[name]).all()
        close(np.linalg.norm(vectors[name], axis=1), 1)
    if len(units["session"]):
        close(vectors["session"], shared.encode(units["session"].texts, progress=False))


@pytest.fixture(scope="module")
def shared(minilm):
    return minilm


# ---------------------------------------------------------------- models

def test_prompts_are_read_and_counted_as_the_encoder_does(tmp_path):
    for number, included in enumerate((True, False)):
        encoder = tiny(tmp_path / str(number), include_prompt=included, prompts={"document": "search:"})
        chat = Conversation("c", CHAT.turns[:2])
        vectors = embed_late(encoder, units_of([chat]), progress=False)
        close(vectors["session"], encoder.encode(segment([chat], "session").texts, progress=False))
        bare = SentenceEncoder(str(tmp_path / str(number) / "model"), device="cpu", document_prompt="")
        assert np.abs(vectors["turn"] - embed_late(bare, units_of([chat]), progress=False)["turn"]).max() > 1e-4
    spec = ModelSpec("minilm", document_prompt="passage: ")
    encoder = get_encoder(spec, device="cpu")
    vectors = embed_late(encoder, units_of([CHAT]), progress=False)
    close(vectors["session"], encoder.encode(segment([CHAT], "session").texts, progress=False))


def test_a_prompt_that_leaves_no_room(tmp_path):
    encoder = tiny(tmp_path, prompts={"document": "the delay of the train " * 40})
    with pytest.raises(CdrError, match="shorten the prompt"):
        embed_late(encoder, units_of([CHAT]), progress=False)


def test_what_follows_the_mean_is_applied_to_it(tmp_path):
    for number, truncate in enumerate((None, 8)):
        encoder = tiny(tmp_path / str(number), dense=True, truncate=truncate)
        chat = Conversation("c", CHAT.turns[:2])
        vectors = embed_late(encoder, units_of([chat]), progress=False)
        assert vectors["turn"].shape == (2, truncate or 12)
        close(vectors["session"], encoder.encode(segment([chat], "session").texts, progress=False))


@pytest.mark.parametrize("pooling", ["cls", "lasttoken", "mean_sqrt_len_tokens", ("mean", "max")])
def test_models_that_do_not_average_are_refused(tmp_path, pooling):
    with pytest.raises(CdrError, match="averages its token states"):
        check_late(tiny(tmp_path, pooling=pooling))


def test_static_models_are_refused():
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models

    static = StaticEmbedding(Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")), embedding_dim=8)
    encoder = object.__new__(SentenceEncoder)
    encoder.model, encoder.name = SentenceTransformer(modules=[static], device="cpu"), "static"
    with pytest.raises(CdrError, match="made of StaticEmbedding"):
        check_late(encoder)


@pytest.mark.parametrize("name", ["hash", "keyword"])
def test_encoders_without_tokens_are_refused(name):
    with pytest.raises(CdrError, match="none to give"):
        embed_late(get_encoder(name), units_of([CHAT]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_openvino_agrees(minilm, dtype):
    if importlib.util.find_spec("openvino") is None:
        pytest.skip("openvino is not installed")
    encoder = get_encoder("minilm", backend="openvino", dtype=dtype)
    units = units_of([CHAT, ODD, LONG])
    ours, theirs = (embed_late(one, units, progress=False) for one in (encoder, minilm))
    for name in GRANULARITIES:
        assert (ours[name] * theirs[name]).sum(axis=1).min() > (0.9999 if dtype == "float32" else 0.995)


def test_bfloat16_is_summed_in_32_bits(minilm):
    encoder = get_encoder("minilm", device="cpu", dtype="bfloat16")
    units = units_of([CHAT, LONG])
    ours, theirs = (embed_late(one, units, progress=False) for one in (encoder, minilm))
    for name in GRANULARITIES:
        assert (ours[name] * theirs[name]).sum(axis=1).min() > 0.99


# ---------------------------------------------------------------- conversations

def test_two_thousand_messages_and_a_message_of_many_windows(small):
    huge = Conversation.make("huge", *[(role, f"number {n}") for n in range(1000) for role in ("user", "assistant")])
    speech = Conversation.make("speech", ("user", "Trains are late. " * 300), ("assistant", "Yes."), ("user", "No." * 500))
    units = units_of([huge, speech])
    vectors = embed_late(small, units, progress=False)
    assert len(vectors["turn"]) == 2003 and len(vectors["session"]) == 2
    for name in GRANULARITIES:
        close(np.linalg.norm(vectors[name], axis=1), 1)


def test_order_company_and_repeats_do_not_matter(minilm):
    corpus = [CHAT, LONG, ODD, Conversation("twin", CHAT.turns)]
    forward, backward = units_of(corpus), units_of(corpus[::-1])
    a = embed_late(minilm, forward, progress=False)
    b = embed_late(minilm, backward, batch_size=1, progress=False)
    for name in GRANULARITIES:
        for chat in corpus:
            close(a[name][forward[name].of(chat.id)], b[name][backward[name].of(chat.id)])
        assert (a[name][forward[name].of("twin")] == a[name][forward[name].of("chat")]).all()


def test_message_borders_are_part_of_the_content(minilm, tmp_path):
    "One message that looks like two renders to the same text, and must not get its sums from the store."
    two = Conversation.make("c", ("user", "Hi"), ("assistant", "Hello"))
    one = Conversation.make("c", ("user", "Hi\nassistant: Hello"))
    store = Store(tmp_path)
    for chat in (two, one):
        units = units_of([chat])
        vectors = embed_late(minilm, units, store=store, progress=False)
        close(vectors["session"], minilm.encode(["user: Hi\nassistant: Hello"], progress=False))
        assert len(vectors["turn"]) == len(chat.turns)


def test_interrupted_work_is_kept(minilm, tmp_path, monkeypatch):
    corpus = [Conversation("a", LONG.turns), Conversation("b", CHAT.turns), Conversation("c", ODD.turns)]
    expected = embed_late(minilm, units_of(corpus), progress=False)
    monkeypatch.setattr(late, "_CHUNK", 1)
    read, calls = late._read, []

    def killed(*args):
        calls.append(args[2])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return read(*args)

    monkeypatch.setattr(late, "_read", killed)
    with pytest.raises(KeyboardInterrupt):
        embed_late(minilm, units_of(corpus), store=Store(tmp_path), progress=False)
    calls.clear()
    found = embed_late(minilm, units_of(corpus), store=Store(tmp_path), progress=False)
    assert len(calls) == 1
    for name in GRANULARITIES:
        close(found[name], expected[name])


def test_the_store_serves_every_size_of_window(minilm, tmp_path, monkeypatch):
    embed_late(minilm, units_of([CHAT, LONG]), store=Store(tmp_path), progress=False)
    monkeypatch.setattr(late, "_read", lambda *args: pytest.fail("read again"))
    found = embed_late(minilm, units_of([LONG, CHAT], k=5), store=Store(tmp_path), progress=False)
    assert len(found["window"]) == len(LONG.turns) - 4 + 1


def test_the_store_does_not_serve_another_rendering_or_model(minilm, tmp_path, monkeypatch):
    chat = Conversation.make("c", ("user", "user: Hi"))
    store = Store(tmp_path)
    embed_late(minilm, units_of([chat], rendering="text"), store=store, progress=False)
    read, calls = late._read, []
    monkeypatch.setattr(late, "_read", lambda *args: calls.append(1) or read(*args))
    embed_late(minilm, units_of([Conversation.make("c", ("user", "Hi"))]), store=store, progress=False)
    shorter = get_encoder("minilm", device="cpu", max_length=64)
    embed_late(shorter, units_of([chat], rendering="text"), store=store, progress=False)
    assert len(calls) == 2


def test_empty_corpora(minilm):
    silent = Conversation.make("silent", ("user", " "), ("assistant", "\ufeff"))
    for corpus in ([], [silent]):
        vectors = embed_late(minilm, units_of(corpus), progress=False)
        assert {name: part.shape for name, part in vectors.items()} == dict.fromkeys(GRANULARITIES, (0, 384))
    vectors = embed_late(minilm, units_of([silent, CHAT, silent]), progress=False)
    close(vectors["session"], minilm.encode(segment([CHAT], "session").texts, progress=False))


def test_units_that_do_not_fit_together(minilm):
    turns = segment([CHAT], "turn")
    for units, message in (({"session": segment([CHAT], "session")}, "'turn' among session"), ({}, "'turn' among nothing"),
                           ({"turn": segment([CHAT], "session")}, "'turn' among turn"),
                           ({"turn": turns, "session": segment([ODD], "session")}, "other conversations"),
                           ({"turn": turns, "session": segment([CHAT], "session", rendering="text")}, "another rendering"),
                           ([turns], "`segment` first")):
        with pytest.raises(CdrError, match=message):
            embed_late(minilm, units, progress=False)


def test_units_of_other_messages_under_the_same_ids(minilm):
    shorter = Conversation("chat", CHAT.turns[:2])
    with pytest.raises(CdrError, match="not made of the messages given"):
        embed_late(minilm, {"turn": segment([shorter], "turn"), "session": segment([CHAT], "session")}, progress=False)


def test_broken_weights_are_named(tmp_path):
    encoder = tiny(tmp_path)
    with torch.no_grad():
        encoder.model[0].model.embeddings.word_embeddings.weight[5:] = float("nan")
    with pytest.raises(CdrError, match="weights are damaged"):
        embed_late(encoder, units_of([CHAT]), progress=False)


# ---------------------------------------------------------------- search

def test_a_search_ranks_as_dense_search_does(minilm):
    corpus = [Conversation("a", CHAT.turns[:2]), Conversation("b", ODD.turns[2:4]), Conversation("c", CHAT.turns[3:])]
    queries = {"q1": "train to Leeds", "q2": "thank you", "blank": ""}
    ours = search_late(queries, units_of(corpus), minilm, progress=False)["session"]
    theirs = search(queries, corpus, minilm, progress=False)
    assert ours.queries == theirs.queries and ours.without_hits == theirs.without_hits == ("blank",)
    for query in queries:
        assert list(ours.to_dict()[query]) == list(theirs.to_dict()[query])
        close(list(ours.to_dict()[query].values()), list(theirs.to_dict()[query].values()))
