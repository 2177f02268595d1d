"Grounding and fine-tuning: nothing of the answer gets in, loops and equations agree, training is repeatable and whole."
import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from cdr_lib.core.config import CdrError, file_hash, read_json
from cdr_lib.core.conversation import Turn
from cdr_lib.core.models import packaged_minilm
from cdr_lib.core.training import distinct_batches
from cdr_lib.pkicr.finetune import answer_pairs, cloze_pairs, finetune, pack_parts, training_pairs
from cdr_lib.pkicr.focus import GroundedTurn, read_focus, read_submission
from cdr_lib.pkicr.ground import (PairScores, ground, pool_knowledge, retrieve_knowledge, score_knowledge,
                                  score_personas)
from cdr_lib.pkicr.measure import choose_personas
from cdr_lib.pkicr.prompts import Pair

pytestmark = pytest.mark.usefixtures("one_thread")

torch = pytest.importorskip("torch")

PERSONAS = ["I like towers.", "I live in Paris.", "I hate rain.", "I am 30.", "I ski."]
LEAK = {"data": [{"dialogID": "D1", "persona": PERSONAS, "utterance": [
    {"dialogue1": ["Where is this tower?", "It is in Paris, your home."], "persona_candidates": PERSONAS,
     "persona_grounding": [False, True, False, False, False],
     "knowledge_candidates": ["It opened in 1889.", "The tower stands in Paris.", "Rome is old."],
     "knowledge_answer_index": 1},
    {"dialogue2": ["Where is this tower?", "It is in Paris, your home.", "How tall is it?", "It is 300 m tall."],
     "persona_candidates": PERSONAS, "persona_grounding": [False] * 5,
     "knowledge_candidates": ["It is 300 m high.", "The tower stands in Paris.", "Rome is old."],
     "knowledge_answer_index": 0}]}]}
ANSWERS = ("It is in Paris, your home.", "It is 300 m tall.")


class Recorder:
    "A scorer whose scores depend on the whole pair, in no simple way, and that remembers what it was shown."

    name, kind, scale, parameters, truncated, tokens = "recorder", "test", "probability", 0, 0, 0

    def __init__(self):
        self.shown = []

    def fingerprint(self):
        return {"kind": "recorder"}

    def score(self, pairs, progress=True):
        pairs = list(getattr(pairs, "pairs", pairs))
        self.shown += pairs
        return np.array([self.value(pair) for pair in pairs], float)

    @staticmethod
    def value(pair):
        import zlib
        return zlib.crc32("|".join(pair.texts).encode()) / 2 ** 32


def focus(tmp_path, value=LEAK):
    path = tmp_path / "focus.json"
    path.write_text(json.dumps(value))
    return read_focus(path).turns


def many_turns(n=30, seed=0):
    "Turns with 0 to 5 personas and 1 to 10 paragraphs."
    rng = np.random.default_rng(seed)
    return [GroundedTurn(f"D{i}", 1, (Turn("user", f"question {i} {rng.integers(99)}?"),),
                         tuple(f"persona {i} {k}" for k in range(rng.integers(0, 6))),
                         tuple(f"fact {i} {k} {rng.integers(9)}" for k in range(rng.integers(1, 11))))
            for i in range(n)]

# --- what a prompt may hold


def test_PKI_01_the_reference_answer_never_reaches_a_prompt(tmp_path):
    turns = focus(tmp_path)
    for history, earlier in ((1, ()), (2, ANSWERS[:1]), (9, ANSWERS[:1])):
        recorder = Recorder()
        scores = score_knowledge(turns, recorder, history=history, progress=False)
        score_personas(turns, retrieve_knowledge(scores), recorder, history=history, progress=False)
        score_personas(turns, None, recorder, "D&P", history, progress=False)
        made = training_pairs(turns, history=history), training_pairs(turns, "D&P", history=history), \
            training_pairs(turns, negatives="all", history=history), answer_pairs(turns, history=history)
        shown = [*recorder.shown, *(pair for trained in made for pair in trained.pairs)]
        texts = [" ".join(pair.texts) for pair in shown]
        assert any("Where is this tower?" in text for text in texts) and any("How tall is it?" in text for text in texts)
        assert not any(ANSWERS[1] in text for text in texts)
        second = [text for text in texts if "How tall is it?" in text]
        for answer in ANSWERS[:1]:
            # an earlier answer may be history; its own turn never sees it
            assert all(answer not in text for text in texts if text not in second)
            assert all((answer in text) == (answer in earlier) for text in second)


def test_PKI_01_a_test_file_without_answers_keeps_its_question(tmp_path):
    value = json.loads(json.dumps(LEAK))
    for row in value["data"][0]["utterance"]:
        name = next(name for name in row if name.startswith("dialogue"))
        row[name] = row[name][:-1]
        del row["persona_grounding"], row["knowledge_answer_index"]
    turns, recorder = focus(tmp_path, value), Recorder()
    score_knowledge(turns, recorder, progress=False)
    assert {pair.question[-1] for pair in recorder.shown} == {"Where is this tower?", "How tall is it?"}
    with pytest.raises(CdrError, match="none of the 2 turns has the labels"):
        training_pairs(turns)

# --- the equations


@pytest.mark.parametrize("form", ["P+D&K", "P&K", "D&K"])
def test_all_pairs_equal_the_loop_of_equation_2(form):
    turns = [turn for turn in many_turns() if turn.personas]
    found = retrieve_knowledge(score_knowledge(turns, Recorder(), form, progress=False))
    for turn, index in zip(turns, found):
        best_value, best_j = -1.0, None
        for persona in turn.personas:
            for j, knowledge in enumerate(turn.knowledge):
                question = {"P+D&K": (persona, turn.question()), "P&K": (persona,), "D&K": (turn.question(),)}[form]
                if (value := Recorder.value(Pair(question, (knowledge,)))) > best_value:
                    best_value, best_j = value, j
        assert index == best_j


def test_mean_pool_equals_the_loop():
    turns = [turn for turn in many_turns(seed=1) if turn.personas]
    scores = score_knowledge(turns, Recorder(), progress=False)
    for turn, row, index in zip(turns, pool_knowledge(scores, "mean"), retrieve_knowledge(scores, "mean")):
        means = [sum(Recorder.value(Pair((persona, turn.question()), (knowledge,))) for persona in turn.personas)
                 / len(turn.personas) for knowledge in turn.knowledge]
        assert np.allclose(row, means) and index == int(np.argmax(means))


def test_persona_step_equals_the_loop_of_equations_6_and_7():
    turns = many_turns(seed=2)
    result = ground(turns, Recorder(), Recorder(), threshold=0.6, progress=False)
    null = {result.persona_scores.turns[t]: s for t, p, s in
            zip(result.persona_scores.turn, result.persona_scores.persona, result.persona_scores.score) if p < 0}
    for turn, j, chosen in zip(turns, result.knowledge, result.personas):
        p = [Recorder.value(Pair((persona, turn.question()), (turn.knowledge[j],))) for persona in turn.personas]
        best = max(range(len(p)), key=lambda i: p[i], default=None)
        assert chosen == ((best,) if p and p[best] >= 0.6 else ())
        if p:
            assert null[turn.id] == Recorder.value(Pair((turn.question(),), (turn.knowledge[j],)))


def test_null_scores_come_in_the_order_of_the_turns():
    turns = [turn for turn in many_turns(seed=3) if turn.personas]
    scores = score_personas(turns, [0] * len(turns), Recorder(), progress=False)
    assert np.array_equal(scores.null(), [Recorder.value(Pair((turn.question(),), (turn.knowledge[0],)))
                                          for turn in turns])
    assert scores.by_turn().sizes.tolist() == [len(turn.personas) for turn in turns]


def test_ties_go_to_the_first_whatever_the_row_order():
    turn, persona, knowledge = np.zeros(4, int), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]):
        scores = PairScores(("a",), turn, persona[order], knowledge[order], np.array([0.2, 0.7, 0.7, 0.1])[order])
        assert retrieve_knowledge(scores).tolist() == [0]
    assert choose_personas([[0.5, 0.5, 0.1]], 0.5) == [(0,)]


def test_turns_with_one_kind_of_candidates():
    only_knowledge = [GroundedTurn("K", 1, (Turn("user", "When?"),), (), ("In 1889.", "Never."))]
    only_personas = [GroundedTurn("P", 1, (Turn("user", "When?"),), ("I ski.", "I read."), ())]
    result = ground(only_knowledge, Recorder(), Recorder(), progress=False)
    assert result.personas == ((),) and result.knowledge[0] in (0, 1)
    result = ground(only_personas, None, Recorder(), threshold=0.0, persona_form="D&P", progress=False)
    assert result.knowledge == (-1,) and len(result.personas[0]) == 1
    assert result.records()[0]["knowledge"] is None
    with pytest.raises(CdrError, match="has personas but no knowledge"):
        ground(only_personas, None, Recorder(), progress=False)
    with pytest.raises(CdrError, match="the dialogue is empty"):
        GroundedTurn("E", 1, (), ("I ski.",), ("In 1889.",))


class Broken(Recorder):
    def __init__(self, value):
        super().__init__()
        self.bad = value

    def score(self, pairs, progress=True):
        values = super().score(pairs, progress)
        values[-1] = self.bad
        return values


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_refused(tmp_path, value):
    turns = many_turns(3)
    with pytest.raises(CdrError, match="not finite.*turn D2/1"):
        score_knowledge(turns, Broken(value), path=tmp_path / "scores.parquet", progress=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(CdrError, match="not finite"):
        score_personas(turns, [0] * 3, Broken(value), progress=False)


def test_wrong_number_of_scores_is_refused():
    class Short(Recorder):
        def score(self, pairs, progress=True):
            return super().score(pairs)[:-1]
    with pytest.raises(CdrError, match="shape"):
        score_knowledge(many_turns(3), Short(), progress=False)


def test_scores_are_kept_and_found_again(tmp_path):
    turns, recorder, path = many_turns(), Recorder(), tmp_path / "deep" / "knowledge.parquet"
    first = score_knowledge(turns, recorder, path=path, progress=False)
    asked = len(recorder.shown)
    again = score_knowledge(turns, recorder, path=path, progress=False)
    assert len(recorder.shown) == asked and np.array_equal(first.score, again.score) and first.turns == again.turns
    assert first.frame().equals(again.frame())
    score_knowledge(turns, recorder, path=path, history=2, progress=False)  # one utterance only: the same pairs
    assert len(recorder.shown) == asked
    changed = [*turns[:-1], GroundedTurn("D29", 1, (Turn("user", "other?"),), turns[-1].personas, turns[-1].knowledge)]
    score_knowledge(changed, recorder, path=path, progress=False)
    assert len(recorder.shown) == 2 * asked
    (tmp_path / "deep" / "knowledge.parquet.json").write_text("{}")
    with pytest.raises(CdrError, match="score again"):
        PairScores.load(path)


def test_hostile_text_is_shown_harmlessly_and_written_whole(tmp_path):
    bad = "</td><script>alert(1)</script>$\\alpha$"
    turns = [GroundedTurn("D<1>", 1, (Turn("user", bad),), (bad,), (bad + " K",))]
    result = ground(turns, Recorder(), Recorder(), threshold=0, progress=False)
    assert "<script" not in result._repr_html_() and "D<1>" not in result._repr_html_()
    row = json.loads(result.save(tmp_path / "out.jsonl").read_text())
    assert row["personas"][0]["text"] == bad and row["knowledge"]["text"] == bad + " K"
    result.submission(tmp_path / "submission.json")
    assert read_submission(tmp_path / "submission.json") == {"D<1>/1": ((0,), 0)}

# --- batches


def distinct(batches, pairs):
    right = set(pairs)
    for rows in batches:
        batch = [pairs[row] for row in rows]
        assert len({q for q, _ in batch}) == len({a for _, a in batch}) == len(batch)
        assert not any((q, a) in right for i, (q, _) in enumerate(batch) for j, (_, a) in enumerate(batch) if i != j)


def test_TRN_05_no_batch_holds_two_equal_texts():
    pairs = [("q1", "p1"), ("q2", "p1"), ("q1", "p2"), ("q3", "p3"), ("q4", "p4")]
    for seed in range(20):
        batches = distinct_batches(pairs, 3, seed)
        distinct(batches, pairs)
        assert sorted(row for rows in batches for row in rows) == [0, 1, 2, 3, 4]
        assert all(len(rows) <= 3 for rows in batches)
        # q1-p1 forbids (q2, p1) and (q1, p2) in one batch: three batches, so one row is alone
        assert len(batches) == 3 and len(batches.alone) == 1


def test_TRN_05_rows_are_deferred_not_lost():
    rng = np.random.default_rng(0)
    pairs = [(f"q{rng.zipf(1.6) % 60}", f"a{rng.zipf(1.6) % 60}") for _ in range(500)]
    batches = distinct_batches(pairs, 16, 1)
    distinct(batches, pairs)
    assert sorted(row for rows in batches for row in rows) == list(range(500))
    assert batches.extra >= 0 and all(len(rows) > 1 for rows in batches) or len(batches.alone)
    # nothing repeats: no more batches than needed
    clean = distinct_batches([(f"q{i}", f"a{i}") for i in range(1000)], 32, 1)
    assert len(clean) == 32 and clean.extra == 0 and len(clean.alone) == 0


def test_TRN_05_rows_that_find_no_company_are_reported(tiny, tmp_path):
    with pytest.warns(UserWarning, match="teach nothing"):
        finetune(tiny["bi"], [("q", "a"), ("q", "b"), ("q", "c")], None, tmp_path / "m", "bi", "in_batch", epochs=1,
                 device="cpu", progress=False)

# --- training


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "A cross-encoder and a bi-encoder base of two small layers with random weights."
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertModel

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(packaged_minilm())
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=64, max_position_embeddings=64, num_labels=1, initializer_range=0.2)
    torch.manual_seed(0)
    for name, kind in (("cross", BertForSequenceClassification), ("plain", BertModel)):
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    transformer = Transformer(str(folder / "plain"))
    SentenceTransformer(modules=[transformer, Pooling(32, "mean")]).save(str(folder / "bi"), create_model_card=False)
    return {name: folder / name for name in ("cross", "bi")}


PAIRS = [(f"I {verb} {thing}s. What is there?", f"There is a {other}.") for verb in ("like", "love", "hate", "avoid")
         for thing in ("tower", "river", "garden") for other in ("tower", "river", "garden")]
LABELS = [float(question.split()[1] in ("like", "love")) for question, _ in PAIRS]
FAST = {"learning_rate": 5e-3, "batch_size": 16, "max_length": 32, "device": "cpu", "dtype": "float32",
        "progress": False}


def weights(path):
    return file_hash(path / "model.safetensors")


def test_a_cross_encoder_learns_a_separable_task(tiny, tmp_path):
    from cdr_lib.pkicr.scorers import CrossScorer

    path = finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "m", epochs=25, **FAST)
    scorer = CrossScorer(str(path), device="cpu")
    scores = scorer.score([Pair((q,), (a,)) for q, a in PAIRS], progress=False)
    assert scorer.scale == "probability" and ((scores > 0.5) == (np.array(LABELS) == 1)).all()
    history = read_json(path / "training.json")["history"]
    assert len(history) == 25 and history[-1]["loss"] < 0.2 < history[0]["loss"]


@pytest.mark.parametrize("loss", ["cosine", "in_batch"])
def test_a_bi_encoder_learns_a_separable_task(tiny, tmp_path, loss):
    from cdr_lib.pkicr.scorers import BiScorer

    if loss == "cosine":
        path = finetune(tiny["bi"], PAIRS, LABELS, tmp_path / "m", "bi", epochs=25, **FAST)
        scores = BiScorer(str(path), device="cpu").score([Pair((q,), (a,)) for q, a in PAIRS], progress=False)
        assert ((scores > 0.5) == (np.array(LABELS) == 1)).all()
    else:
        right = [(f"the {thing}?", f"{thing} it is") for thing in ("tower", "river", "garden", "ship", "hill", "lake")]
        path = finetune(tiny["bi"], right, None, tmp_path / "m", "bi", "in_batch", epochs=30, **FAST)
        scorer = BiScorer(str(path), device="cpu")
        table = np.array([scorer.score([Pair((q,), (a,)) for _, a in right], progress=False) for q, _ in right])
        assert (table.argmax(axis=1) == np.arange(6)).all()


def test_same_seed_same_weights(tiny, tmp_path):
    found = [weights(finetune(tiny["cross"], PAIRS, LABELS, tmp_path / name, epochs=2, seed=seed, **FAST))
             for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    assert found[0] == found[1] != found[2]
    # the caller's own random numbers are left alone
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "d", epochs=1, seed=7, **FAST)
    assert torch.equal(torch.rand(1), expected)


def test_a_new_head_depends_on_the_seed_alone(tmp_path):
    settings = dict(FAST, learning_rate=1e-9, frozen=6, batch_size=4)
    found = []
    for number, noise in enumerate((1, 2)):
        torch.manual_seed(noise)
        found.append(weights(finetune("minilm", PAIRS[:4], [1, 0, 1, 0], tmp_path / str(number), epochs=1, **settings)))
    assert found[0] == found[1]


def test_the_manifest_says_what_was_done(tiny, tmp_path):
    path = finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "m", epochs=2, valid=(PAIRS[:6], LABELS[:6]), **FAST)
    about = read_json(path / "training.json")
    assert about["data"]["pairs"] == 36 and about["data"]["right"] == 18 and len(about["data"]["hash"]) == 64
    assert about["base"]["name"] == "cross" and about["base"]["weights"].startswith("files:")
    assert [row["steps"] for row in about["history"]] == [3, 3] and about["history"][0]["valid_loss"] > 0
    assert {"torch", "transformers", "sentence-transformers"} <= set(about["versions"])
    assert (about["kind"], about["loss"], about["epochs"], about["warmup"], about["seed"]) == ("cross", "bce", 2, 0.1, 0)
    assert str(tmp_path) not in json.dumps(about)
    assert (path / "model.safetensors").is_file() and not list(path.rglob("*.bin"))


class Stop(Exception):
    pass


def test_an_interrupted_run_leaves_nothing_half_and_goes_on(tiny, tmp_path, monkeypatch):
    from cdr_lib.core import training as module

    whole = weights(finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "whole", epochs=3, **FAST))
    calls, real = [], module._check_finite

    def stop(loss, epoch, step):
        calls.append(epoch)
        if epoch == 1 and step == 1:
            raise Stop
        return real(loss, epoch, step)

    monkeypatch.setattr(module, "_check_finite", stop)
    with pytest.raises(Stop):
        finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "m", epochs=3, **FAST)
    assert not (tmp_path / "m").exists()
    assert [path.suffix for path in tmp_path.glob(".m.*")] == [".safetensors"]
    calls.clear()
    monkeypatch.setattr(module, "_check_finite", lambda loss, epoch, step: calls.append(epoch) or loss)
    path = finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "m", epochs=3, **FAST)
    assert set(calls) == {1, 2} and weights(path) == whole
    assert not list(tmp_path.glob(".m.*"))
    # other settings do not continue from that state
    assert len(read_json(path / "training.json")["history"]) == 3


def test_a_stop_while_saving_leaves_nothing(tiny, tmp_path, monkeypatch):
    from sentence_transformers import CrossEncoder

    def fail(self, path, **options):
        os.makedirs(path)
        open(os.path.join(path, "model.safetensors"), "wb").close()
        raise KeyboardInterrupt

    monkeypatch.setattr(CrossEncoder, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "m", epochs=1, **FAST)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_killed_process_leaves_no_model(tiny, tmp_path):
    code = textwrap.dedent(f"""
        import os, signal
        import cdr_lib.core.training as module
        from cdr_lib.pkicr.finetune import finetune
        def stop(loss, epoch, step):
            if epoch == 1: os.kill(os.getpid(), signal.SIGKILL)
            return loss
        module._check_finite = stop
        finetune({str(tiny['cross'])!r}, {PAIRS!r}, {LABELS!r}, {str(tmp_path / 'm')!r}, epochs=2, **{FAST!r})
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "m").exists()
    path = finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "m", epochs=2, **FAST)
    assert len(read_json(path / "training.json")["history"]) == 2


def test_models_are_not_overwritten_silently(tiny, tmp_path):
    path = finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "m", epochs=1, **FAST)
    before = weights(path)
    with pytest.raises(CdrError, match="differs in epochs"):
        finetune(tiny["cross"], PAIRS, LABELS, path, epochs=2, **FAST)
    assert weights(path) == before
    finetune(tiny["cross"], PAIRS, LABELS, path, epochs=2, replace=True, **FAST)
    assert weights(path) != before and not list(tmp_path.glob(".m*"))
    (tmp_path / "mine").mkdir()
    with pytest.raises(CdrError, match="holds no model of ours"):
        finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "mine", replace=True, **FAST)


def test_pieces_give_the_gradient_of_the_whole_batch(tiny):
    from cdr_lib.core.training import Learner

    for kind, loss in (("cross", "bce"), ("bi", "cosine"), ("bi", "in_batch")):
        gradients = []
        for budget in (10 ** 6, 24):
            learner = Learner(kind, str(tiny[kind]), "cpu", None, 32, True, pack_parts)
            learner.model.eval()  # no dropout
            learner.budget = budget
            texts = learner.read([Pair((q + " really" * (i % 4),), (a,)) for i, (q, a) in enumerate(PAIRS[:8])])
            learner.loss(texts, torch.tensor(LABELS[4:12]), loss).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]))
        assert gradients[0].norm() > 0 and torch.allclose(*gradients, atol=1e-5)


def test_the_loss_is_that_of_sentence_transformers(tiny):
    "One batch, no dropout: our losses are the reference's."
    from sentence_transformers import CrossEncoder, SentenceTransformer, util
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from sentence_transformers.sentence_transformer import losses

    from cdr_lib.core.training import Learner

    labels = torch.tensor(LABELS[14:22])
    pairs = [Pair((q,), (a,)) for q, a in PAIRS[14:22]]
    questions, answers = map(list, zip(*(pair.texts for pair in pairs)))
    learner = Learner("cross", str(tiny["cross"]), "cpu", None, 32, True, pack_parts)
    learner.model.eval()
    reference = BinaryCrossEntropyLoss(CrossEncoder(str(tiny["cross"]), num_labels=1, device="cpu").eval())
    assert torch.allclose(learner.loss(learner.read(pairs), labels, "bce"), reference([questions, answers], labels),
                          atol=1e-6)
    learner = Learner("bi", str(tiny["bi"]), "cpu", None, 32, True, pack_parts)
    learner.model.eval()
    model = SentenceTransformer(str(tiny["bi"]), device="cpu").eval()
    features = [model.preprocess(questions), model.preprocess(answers)]
    assert torch.allclose(learner.loss(learner.read(pairs), labels, "cosine"),
                          losses.CosineSimilarityLoss(model)([dict(f) for f in features], labels), atol=1e-6)
    expected = losses.MultipleNegativesRankingLoss(model, scale=20.0, similarity_fct=util.cos_sim)
    assert torch.allclose(learner.loss(learner.read(pairs), labels, "in_batch"),
                          expected([dict(f) for f in features], labels), atol=1e-5)


def test_frozen_layers_stay_as_they_are(tiny, tmp_path):
    from safetensors.torch import load_file

    path = finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "m", epochs=1, frozen=1, **FAST)
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny["cross"], path))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any("embeddings" in name or "layer.0." in name for name in changed)
    assert any("layer.1." in name for name in changed)
    with pytest.raises(CdrError, match="frozen=3"):
        finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "n", frozen=3, **FAST)


def test_long_pairs_are_packed_and_counted(tiny, tmp_path):
    long = [(f"persona {i} " + "word " * 200 + "end?", f"fact {i} " + "more " * 200) for i in range(4)]
    path = finetune(tiny["cross"], long, [1, 0, 1, 0], tmp_path / "m", epochs=1, **FAST)
    assert read_json(path / "training.json")["truncated"] == 4


@pytest.mark.parametrize("change, says", [
    ({"labels": [1.0]}, "need as many labels"), ({"labels": [1.0] * len(PAIRS)}, "nothing to tell apart"),
    ({"labels": [float("nan"), *LABELS[1:]]}, "between 0 and 1"), ({"pairs": [], "labels": []}, "no pairs"),
    ({"kind": "triple"}, "kind 'triple' is unknown"), ({"loss": "cosine"}, "not for kind 'cross'"),
    ({"epochs": 0}, "out of range"), ({"warmup": float("nan")}, "out of range"), ({"dtype": "float16"}, "float16"),
    ({"pairs": ["ab"] * len(PAIRS)}, "not a pair"), ({"base": "./no/such/folder"}, "no such folder"),
    ({"kind": "bi", "loss": "in_batch"}, "not right ones"),
])
def test_bad_input_says_what_is_wrong(tiny, tmp_path, change, says):
    given = dict(base=tiny["cross"], pairs=PAIRS, labels=LABELS, out=tmp_path / "m", **FAST) | change
    with pytest.raises(CdrError, match=says):
        finetune(**given)
    assert not list(tmp_path.iterdir())


def test_a_diverging_run_is_an_error(tiny, tmp_path, monkeypatch):
    from cdr_lib.core.training import Learner

    monkeypatch.setattr(Learner, "loss", lambda self, texts, labels, loss:
                        next(self.model.parameters()).sum() * float("nan"))
    with pytest.raises(CdrError, match="epoch 1, step 1"):
        finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "m", **FAST)
    assert not list(tmp_path.iterdir())


def test_cloze_pairs_come_from_the_knowledge_alone(tmp_path):
    turns = [GroundedTurn("D", i, (Turn("user", f"question {i}"),), ("persona",),
                          tuple(" ".join(f"w{i}{k}{n}" for n in range(12)) for k in range(3))) for i in (1, 2)]
    pairs, labels, counts = cloze_pairs(turns, seed=1)
    assert counts == {"passages": 6, "left out": 0, "pairs": 12, "right": 6} and labels.tolist() == [1, 0] * 6
    passages = {turn.number: set(turn.knowledge) for turn in turns}
    for right, wrong in zip(pairs[::2], pairs[1::2]):
        question, text = right.texts
        assert wrong.texts[0] == question and question in text and question not in wrong.texts[1]
        assert 4 <= len(question.split()) <= 8
        assert any({text, wrong.texts[1]} <= group for group in passages.values())
    assert cloze_pairs(turns, seed=1).pairs == pairs != cloze_pairs(turns, seed=2).pairs
    with pytest.raises(CdrError, match="nothing to cut"):
        cloze_pairs(focus(tmp_path))


def test_without_dropout_order_is_all_the_chance_there_is(tiny, tmp_path):
    one = dict(FAST, batch_size=len(PAIRS), epochs=1)
    with_it, again, without = (finetune(tiny["cross"], PAIRS, LABELS, tmp_path / name, dropout=dropout, **one)
                               for name, dropout in (("a", None), ("b", 0.1), ("c", 0.0)))
    losses = [read_json(path / "training.json")["history"][0]["loss"] for path in (with_it, again, without)]
    assert losses[0] == losses[1] != losses[2]
    with pytest.raises(CdrError, match="dropout=1"):
        finetune(tiny["cross"], PAIRS, LABELS, tmp_path / "d", dropout=1, **FAST)


def test_training_pairs_follow_the_labels():
    turns = many_turns(40, seed=4)
    turns = [GroundedTurn(t.dialogue, 1, t.history, t.personas, t.knowledge,
                          tuple(range(min(i % 3, len(t.personas)))), (i % len(t.knowledge),))
             for i, t in enumerate(turns)]
    pairs, labels, counts = training_pairs(turns)
    with_personas = [turn for turn in turns if turn.personas]
    assert counts["turns"] == len(with_personas) and counts["left out"] == 40 - len(with_personas)
    expected = [(f"{p} {t.question()}", t.knowledge[t.gold_knowledge[0]], float(i in t.gold_personas))
                for t in with_personas for i, p in enumerate(t.personas)]
    assert [(*pair.texts, label) for pair, label in zip(pairs, labels.tolist())] == expected
    asked = answer_pairs(turns, negatives=2, seed=3)
    for turn in turns:
        mine = [(pair.texts[1], label) for pair, label in zip(asked.pairs, asked.labels) if pair.texts[0] == turn.question()]
        assert sum(label for _, label in mine) == 1
        assert len(mine) == min(3, len(turn.knowledge)) == len(set(mine))
        assert next(text for text, label in mine if label) == turn.knowledge[turn.gold_knowledge[0]]
