"""Quality and domains: decisions, the offline models, classifiers by name in both forms that the hub knows, real labels."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from cdr_lib.core.config import CdrError, data_dir
from cdr_lib.core.conversation import Conversation, Turn
from cdr_lib.curation.domains import domain_descriptions, domain_shares, label_domains
from cdr_lib.curation.quality import (
    LABELS,
    LinearQuality,
    SequenceClassifier,
    TextClassifier,
    decide,
    labels_of,
    load_quality,
    quality_examples,
    quality_features,
    quality_scenes,
    train_quality,
    word_features,
)


def talk(*texts: str, id: str = "c", source: str = "") -> Conversation:
    return Conversation(id, tuple(Turn(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)), source)


def test_score_and_decision_are_separate():
    scores = np.array([[0.6, 0.3, 0.1], [0.4, 0.4, 0.2], [0.2, 0.3, 0.5]], np.float32)
    assert labels_of(scores).tolist() == ["high", "middle", "low"]  # a tie goes to the worse class
    assert decide(scores).tolist() == [True, False, False]
    assert decide(scores, keep=("high", "middle")).tolist() == [True, True, False]
    assert decide(scores, least=0.7).tolist() == [False, False, False]
    for wrong in (scores[:, :2], np.full((1, 3), np.nan)):
        with pytest.raises(CdrError):
            decide(wrong)
    with pytest.raises(CdrError, match="high, middle, low"):
        decide(scores, keep=["great"])


def test_offline_model_on_plain_cases():
    model = load_quality()
    good = talk(
        "The lamp I bought flickers after ten minutes. Is that a fault of the lamp or of the bulb?",
        "Most likely it is the bulb. Put the bulb into another lamp: if it flickers there too, replace it, and if not, send us "
        "the lamp. You do not have to pay for the parcel.",
        "It was the bulb, thank you!",
        "Glad to hear it. Have a good evening!",
    )
    spam = talk("BUY NOW https://a.example/1 BUY NOW https://a.example/1 BUY NOW", "BUY NOW https://a.example/1")
    mash = talk("asdf jkl; asdfjkl asdf", "asdfasdf sdfg dfgh")
    blank = talk("", " ")
    assert labels_of(model.scores([good, spam, mash, blank])).tolist() == ["high", "low", "low", "low"]
    scores = model.scores([good, spam, talk("a" * 1_000_000), talk("。"), talk("\u200b")])
    assert scores.dtype == np.float32 and np.isfinite(scores).all() and np.allclose(scores.sum(axis=1), 1, atol=1e-5)
    # a conversation is scored by itself
    assert np.allclose(scores[:1], model.scores([good]), atol=1e-6)


def test_tools_and_instructions_do_not_count():
    plain = talk("Where is my parcel?", "It is at the post office in Main Street; you can pick it up until Friday.")
    called = Conversation(
        "t",
        (
            Turn("system", "You are a shop."),
            plain.turns[0],
            Turn("assistant", ""),
            Turn("tool", json.dumps({"state": [1, 2, 3] * 20})),
            plain.turns[1],
        ),
    )
    assert np.array_equal(quality_features([plain]), quality_features([called]))
    assert (word_features([plain]) != word_features([called])).nnz == 0


def test_training_data_is_complete_and_the_same_everywhere():
    scenes = quality_scenes()
    assert {"retail", "german", "chinese", "low"} <= set(scenes)
    examples = quality_examples(3)
    assert len(examples) == 3 * 3 * (len(scenes) - 1) and {c.labels["quality"] for c in examples} == set(LABELS)
    script = (
        "import hashlib; from cdr_lib.curation.quality import quality_examples, word_features, quality_features; e = quality_examples(3);"
        "print(hashlib.sha256(repr(e).encode() + word_features(e).toarray().tobytes() + quality_features(e).tobytes()).hexdigest())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "CDR_ROOT": str(data_dir().parent)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(runs) == 1


def test_a_model_of_ones_own(tmp_path):
    examples = quality_examples(8)
    model = train_quality(examples)
    again = LinearQuality.load(model.save(tmp_path / "m.json", {"examples": len(examples)}))
    assert np.array_equal(model.scores(examples), again.scores(examples))
    assert (labels_of(model.scores(examples)) == [c.labels["quality"] for c in examples]).mean() > 0.9
    with pytest.raises(CdrError, match="needs all of"):
        train_quality([c for c in examples if c.labels["quality"] != "low"])
    with pytest.raises(CdrError, match="none of"):
        train_quality([Conversation("x", examples[0].turns, labels={"quality": "good"})])
    (tmp_path / "other.json").write_text('{"features": {"a": {}}}')
    with pytest.raises(CdrError, match="other features"):
        LinearQuality.load(tmp_path / "other.json")


def classifier_folder(folder, labels: list[str], form: str = "usual"):
    """A tiny BERT whose first token says "high" when the text holds the word good, and so on: real files, forced weights."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "fair", "bad"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=7,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
    )
    if form == "usual":
        BertForSequenceClassification(config).save_pretrained(folder)
    else:
        encoder, head = BertModel(config), torch.nn.Linear(16, len(labels))
        config.save_pretrained(folder)
        weights = {f"model.{key}": value for key, value in encoder.state_dict().items()}
        weights |= {f"fc.{key}": value for key, value in head.state_dict().items()} if form == "headed" else {}
        save_file(
            {key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"}
        )
        return encoder.eval(), head
    return None


TEXTS = ["good good", "fair", "bad bad bad good", "unknown words here " * 50]


def test_classifier_of_the_usual_form(tmp_path):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    classifier_folder(tmp_path, ["Low", "Medium", "High"])
    found = TextClassifier(str(tmp_path), device="cpu", batch_size=3).probabilities(TEXTS)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tmp_path),
        AutoModelForSequenceClassification.from_pretrained(tmp_path).eval(),
    )
    for row, text in enumerate(TEXTS):
        with torch.inference_mode():
            logits = model(**tokenizer(text, truncation=True, max_length=64, return_tensors="pt")).logits
        assert np.allclose(found[row], logits.softmax(-1)[0].numpy(), atol=1e-5)
    scores = SequenceClassifier(str(tmp_path), device="cpu").scores([talk(text) for text in TEXTS])
    assert scores.shape == (4, 3) and np.allclose(scores.sum(axis=1), 1, atol=1e-5)
    assert SequenceClassifier(str(tmp_path), device="cpu").scores([]).shape == (0, 3)


def test_classifier_with_an_encoder_and_a_linear_layer(tmp_path):
    import torch
    from transformers import AutoTokenizer

    encoder, head = classifier_folder(tmp_path, ["High", "Medium", "Low"], "headed")
    found = TextClassifier(str(tmp_path), device="cpu").probabilities(TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for row, text in enumerate(TEXTS):
        with torch.inference_mode():
            states = encoder(**tokenizer(text, truncation=True, max_length=64, return_tensors="pt")).last_hidden_state
            expected = head(states)[:, 0].softmax(-1)[0].numpy()
        assert np.allclose(found[row], expected, atol=1e-5)


def test_weights_are_never_left_random(tmp_path):
    classifier_folder(tmp_path, ["high", "low"], "headless")
    with pytest.raises(CdrError, match="lacks"):
        TextClassifier(str(tmp_path), device="cpu")


def test_labels_must_be_understood(tmp_path):
    classifier_folder(tmp_path / "a", ["LABEL_0", "LABEL_1"])
    with pytest.raises(CdrError, match="LABEL_0, LABEL_1.*labels="):
        SequenceClassifier(str(tmp_path / "a"), device="cpu")
    with pytest.raises(CdrError, match="missing: LABEL_1"):
        SequenceClassifier(str(tmp_path / "a"), labels={"LABEL_0": "high"}, device="cpu")
    with pytest.raises(CdrError, match="no label toxic"):
        SequenceClassifier(
            str(tmp_path / "a"), labels={"LABEL_0": "high", "LABEL_1": "low", "toxic": "low"}, device="cpu"
        )
    scores = SequenceClassifier(str(tmp_path / "a"), labels={"LABEL_0": "high", "LABEL_1": "low"}, device="cpu").scores(
        [talk("good")]
    )
    assert scores[0, 1] == 0 and np.isclose(scores.sum(), 1)
    classifier_folder(tmp_path / "b", ["high quality", "fine", "medium", "low"])
    with pytest.raises(CdrError, match="missing: fine"):
        SequenceClassifier(str(tmp_path / "b"), device="cpu")


def test_missing_or_unsafe_files_are_one_clear_error(tmp_path):
    classifier_folder(tmp_path / "a", ["high", "low"])
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(CdrError, match="cannot be loaded"):
        TextClassifier(str(tmp_path / "a"), device="cpu")
    with pytest.raises(CdrError, match="no such folder"):
        TextClassifier(str(tmp_path / "none"), device="cpu")
    shutil.rmtree(tmp_path / "a")


def test_domains_of_the_figure():
    described = domain_descriptions()
    assert len(described) == 26 and {"People_and_Society", "Business_and_Industrial"} <= set(described)
    texts = {
        "Food_and_Drink": "How do I bake bread without yeast?",
        "Finance": "Please transfer money to my savings account.",
        "Pets_and_Animals": "My cat is ill. Which vet looks after kittens?",
        "Law_and_Government": "Do I need a lawyer in court?",
    }
    labels, scores = label_domains([talk(text) for text in texts.values()] + [talk(" "), talk("")], progress=False)
    assert labels.tolist() == [*texts, "", ""] and (scores[:4] > 0.2).all() and (scores[4:] == 0).all()


def test_domains_by_descriptions_of_ones_own(tmp_path):
    (tmp_path / "d.yaml").write_text("plants: [a plant needs water]\ncars: [a car needs fuel]\n")
    own = domain_descriptions(tmp_path / "d.yaml")
    assert label_domains([talk("My roses are dry."), talk("The engine is loud.")], descriptions=own, progress=False)[
        0
    ].tolist() == ["plants", "cars"]
    (tmp_path / "d.yaml").write_text("plants: water")
    with pytest.raises(CdrError, match="at least two"):
        domain_descriptions(tmp_path / "d.yaml")
    with pytest.raises(CdrError, match="no such file"):
        domain_descriptions(tmp_path / "none.yaml")


def test_domains_by_a_classifier(tmp_path):
    classifier_folder(tmp_path, ["News", "Sports"])
    labels, scores = label_domains([talk("good"), talk(""), talk("bad")], model=str(tmp_path), device="cpu")
    expected = TextClassifier(str(tmp_path), device="cpu").probabilities(["good", "bad"])
    assert labels.tolist() == [["News", "Sports"][row.argmax()] for row in expected[:1]] + [""] + [
        ["News", "Sports"][row.argmax()] for row in expected[1:]
    ]
    assert np.allclose(scores[[0, 2]], expected.max(axis=1), atol=1e-6)


def test_domain_shares():
    table = domain_shares(["a", "", "b", "b"], ["s", "s", "s", "t"])
    assert table.index.tolist() == ["b", "a", "(none)"] and table["share"].tolist() == [0.5, 0.25, 0.25]
    assert table["s"].tolist() == [1, 1, 1] and table["t"].tolist() == [1, 0, 0]
    with pytest.raises(CdrError, match="2 sources for 1"):
        domain_shares(["a"], ["s", "t"])


@pytest.mark.real
def test_domains_of_real_services():
    from cdr_lib.core.config import corpora_dir
    from cdr_lib.core.sources import load_source

    if not corpora_dir() or not (corpora_dir() / "sgd").is_dir():
        pytest.skip("needs CDR_DATA with sgd")
    services = {
        "Restaurants": "Food_and_Drink",
        "Buses": "Travel_and_Transportation",
        "Flights": "Travel_and_Transportation",
        "Movies": "Arts_and_Entertainment",
        "Music": "Arts_and_Entertainment",
        "Homes": "Real_Estate",
    }
    found = [
        (c, services.get(c.labels["services"][0].split("_")[0]))
        for c in load_source("sgd")
        if len(c.labels["services"]) == 1
    ]
    found = [(c, domain) for c, domain in found if domain][:60]
    labels, _ = label_domains([c for c, _ in found], progress=False)
    assert (labels == [domain for _, domain in found]).mean() >= 0.9
