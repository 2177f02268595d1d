"The training loop: parity of its measure, states that survive a kill, one rule of cutting, bad input."
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from cdr_lib.core import training
from cdr_lib.core.config import CdrError, file_hash, read_json
from cdr_lib.core.encoders import get_reranker
from cdr_lib.core.models import packaged_minilm
from cdr_lib.core.training import average_precision, train, training_curve

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

PAIRS = [(f"I {verb} {thing}s. What is there?", f"There is a {other}.") for verb in ("like", "love", "hate", "avoid")
         for thing in ("tower", "river", "garden") for other in ("tower", "river", "garden")]
LABELS = [float(question.split()[1] in ("like", "love")) for question, _ in PAIRS]
FAST = {"learning_rate": 5e-3, "batch_size": 8, "max_length": 32, "device": "cpu", "dtype": "float32", "progress": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "A cross-encoder of two small layers with random weights."
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("tiny") / "cross"
    tokenizer = AutoTokenizer.from_pretrained(packaged_minilm())
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, num_labels=1, initializer_range=0.2)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def weights(path):
    return file_hash(path / "model.safetensors")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=40))
def test_average_precision_is_that_of_scikit_learn(rows):
    from sklearn.metrics import average_precision_score

    labels, scores = map(list, zip(*rows))
    if len(set(labels)) == 2:
        assert average_precision(labels, scores) == pytest.approx(average_precision_score(labels, scores), abs=1e-12)
    else:
        with pytest.raises(CdrError, match="both classes are needed"):
            average_precision(labels, scores)


@pytest.mark.parametrize("labels, scores", [([1, 0], [1]), ([1, 0], [1, float("nan")]), ([1, 0.5], [1, 2]), ([], [])])
def test_average_precision_refuses_what_has_none(labels, scores):
    with pytest.raises(CdrError, match="average precision"):
        average_precision(labels, scores)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_kill_in_the_middle_of_an_epoch_costs_nothing(tiny, tmp_path):
    "The state holds numbers, no code; the run that goes on from it gives the very weights."
    from safetensors import safe_open

    code = textwrap.dedent(f"""
        import os, signal
        import torch
        torch.set_num_threads(1)
        from cdr_lib.core import training
        def stop(loss, epoch, step):
            if (epoch, step) == (1, 3): os.kill(os.getpid(), signal.SIGKILL)
            return loss
        training._check_finite = stop
        training.train({str(tiny)!r}, {PAIRS!r}, {LABELS!r}, {str(tmp_path / 'm')!r}, epochs=3, frozen=1, save_seconds=0, **{FAST!r})
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    [state] = tmp_path.glob(".m.*.safetensors")
    with safe_open(state, "pt") as file:
        names = set(file.keys())
        progress = training.json_loads(file.metadata()["progress"])
    assert not (tmp_path / "m").exists() and (progress["steps"], progress["batches"], len(progress["history"])) == (8, 3, 1)
    # what never changes is not kept
    assert not any("embeddings" in name and name.startswith(("weight/", "moment/")) for name in names)
    assert {name.split("/")[0] for name in names} >= {"weight", "moment", "random"}
    seen, real = [], training._check_finite
    try:
        training._check_finite = lambda loss, epoch, step: seen.append((epoch, step)) or loss
        path = train(tiny, PAIRS, LABELS, tmp_path / "m", epochs=3, frozen=1, **FAST)
    finally:
        training._check_finite = real
    whole = train(tiny, PAIRS, LABELS, tmp_path / "whole", epochs=3, frozen=1, **FAST)
    assert seen == [(1, 3), (1, 4), *((2, step) for step in range(5))]
    assert weights(path) == weights(whole) and training_curve(path).equals(training_curve(whole))
    assert [row["loss"] for row in training_curve(path).attrs["history"]] == \
        [row["loss"] for row in training_curve(whole).attrs["history"]]
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_state_is_an_error_that_names_it(tiny, tmp_path, monkeypatch):
    def stop(loss, epoch, step):
        if epoch == 1:
            raise KeyboardInterrupt
        return loss

    monkeypatch.setattr(training, "_check_finite", stop)
    with pytest.raises(KeyboardInterrupt):
        train(tiny, PAIRS, LABELS, tmp_path / "m", epochs=2, **FAST)
    monkeypatch.undo()
    [state] = tmp_path.glob(".m.*.safetensors")
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(CdrError, match="delete it to begin anew") as error:
        train(tiny, PAIRS, LABELS, tmp_path / "m", epochs=2, **FAST)
    assert state.name in str(error.value)
    state.unlink()
    assert train(tiny, PAIRS, LABELS, tmp_path / "m", epochs=2, **FAST).is_dir()


def test_a_step_of_several_batches_is_that_of_one(tiny, tmp_path):
    "36 rows in batches of 4, five at once: the last step has four of them, and each row weighs the same."
    options = dict(FAST, epochs=2, dropout=0.0)
    small, large = (train(tiny, PAIRS, LABELS, tmp_path / str(size), **(options | {"batch_size": size, "accumulate": 20 // size}))
                    for size in (4, 20))
    curves = [training_curve(path).loss for path in (small, large)]
    assert len(curves[0]) == 4 and np.allclose(*curves, atol=1e-4)
    assert [row["steps"] for row in training_curve(small).attrs["history"]] == [2, 2]


def test_what_is_cut_in_training_is_cut_when_scored(tiny, tmp_path):
    "The finished model, scoring long pairs, has the average precision that the loop reported."
    rng = np.random.default_rng(0)
    long = [(question, answer + " " + " ".join(rng.choice(["very", "quite", "more"], 90))) for question, answer in PAIRS]
    path = train(tiny, long, LABELS, tmp_path / "m", epochs=3, valid=(long, LABELS), **dict(FAST, max_length=8192))
    about = read_json(path / "training.json")
    assert about["max_length"] == 64 and about["truncated"] == len(long)
    reranker = get_reranker(str(path), "cpu")
    assert reranker.max_length == 64
    assert average_precision(LABELS, reranker.score(long, progress=False)) == pytest.approx(about["history"][-1]["valid_ap"],
                                                                                            abs=1e-9)
    assert reranker.truncated == len(long)


def test_the_rate_rises_and_falls_as_said(tiny, tmp_path):
    path = train(tiny, PAIRS, LABELS, tmp_path / "m", epochs=4, warmup=0.25, **FAST)  # 20 steps, 5 of warm-up
    rates = training_curve(path).rate.to_numpy() / FAST["learning_rate"]
    assert np.allclose(rates, [0, .2, .4, .6, .8, *(np.arange(15, 0, -1) / 15)])


def test_a_long_curve_is_short(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_POINTS", 4)
    path = train(tiny, PAIRS, LABELS, tmp_path / "m", epochs=2, **FAST)  # 10 steps in windows of 3
    curve = training_curve(path)
    assert curve.index.tolist() == [3, 6, 9, 10] and curve.loss.notna().all()
    history = curve.attrs["history"]
    # rows weigh by their number: 8 in each step but the last of an epoch
    assert np.mean([row["loss"] for row in history]) == pytest.approx(np.average(curve.loss, weights=[3, 3, 3, 1]), abs=0.2)


@pytest.mark.parametrize("change, says", [
    ({"accumulate": 0}, "out of range"), ({"device": "cpu,cpu"}, "one device"), ({"labels": [1.0] * len(PAIRS)}, "nothing to tell"),
    ({"pairs": [("a", 1)] * len(PAIRS)}, "not a pair"), ({"valid": ([], [])}, "valid holds no pairs"),
    ({"valid": (PAIRS[:2], [1])}, "as many labels"), ({"max_length": 3}, "max_length=3 leaves")])
def test_bad_input_is_refused_before_anything_is_written(tiny, tmp_path, change, says):
    with pytest.raises(CdrError, match=says):
        train(**(dict(base=tiny, pairs=PAIRS, labels=LABELS, out=tmp_path / "m", **FAST) | change))
    assert not list(tmp_path.iterdir())
