"core.models, core.endpoint, core.encoders: parity with the libraries underneath, servers that misbehave, bad input."
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import CrossEncoder, SentenceTransformer

from cdr_lib.core.config import CdrError
from cdr_lib.core.encoders import (Encoder, HashEncoder, KeywordEncoder, OverlapReranker, Reranker, embed, get_encoder,
                                   get_reranker)
from cdr_lib.core.endpoint import EndpointEncoder, back_off, server_wait
from cdr_lib.core.models import (ModelSpec, check_texts, packaged_minilm, pick_device, pick_dtype, token_batches,
                                 unit_vectors, weights_id)
from cdr_lib.core.store import Store, vector_keys

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["user: Where is my refund?", "assistant: I am sorry about the delay, it is on its way.", "user: ok",
         "user: 退款在哪里？", "assistant: " + "The refund takes five working days. " * 40, "user: 👍🏽 naïve café", "?!"]


@pytest.fixture(scope="module")
def minilm():
    return get_encoder("minilm", device="cpu")


@pytest.fixture(scope="module")
def reference():
    return SentenceTransformer(packaged_minilm(), device="cpu", local_files_only=True)


# --- texts, vectors, batches ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("texts, says", [
    ("one string", "write"), (b"bytes", "write"), (["a", None], "text 1 of 2 is NoneType"),
    (["a", float("nan")], "text 1 of 2 is float"), (["a", 3], "int"), ([""], "is empty"),
    (["a", " \n\t"], "text 1 of 2 is empty"),
    (["\u200b\ufeff"], "shows nothing"), (["ok", "cut \ud83d"], "lone surrogate")])
def test_texts_that_cannot_be_embedded(texts, says, minilm):
    for encode in (HashEncoder().encode, minilm.encode, lambda texts: embed(HashEncoder(), texts)):
        with pytest.raises(CdrError, match=says):
            encode(texts)


def test_generators_are_texts_too():
    assert check_texts(text for text in ("a", "b")) == ["a", "b"]
    assert embed(HashEncoder(), (text for text in ("a", "b"))).shape == (2, 256)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_vectors_are_an_error_that_names_the_text(bad):
    with pytest.raises(CdrError, match="1 of 2 texts, first for 'user: broken'"):
        unit_vectors([[1.0, 2.0], [0.0, bad]], ["fine", "user: broken"], "demo")


def test_unit_vectors_keep_zero_rows_and_refuse_wrong_shapes():
    assert unit_vectors(np.array([[0, 0], [0, -2]], np.float16), ["a", "b"], "demo").tolist() == [[0, 0], [0, -1]]
    for wrong in (np.ones((3, 2)), np.ones(2)):
        with pytest.raises(CdrError, match="for 2 texts"):
            unit_vectors(wrong, ["a", "b"], "demo")


@given(st.lists(st.integers(1, 300), max_size=80), st.one_of(st.none(), st.integers(1, 40)), st.integers(1, 2000))
@settings(max_examples=100, deadline=None)
def test_batches_hold_every_text_once_longest_first_within_budget(lengths, size, budget):
    lengths = np.array(lengths, int)
    batches = token_batches(lengths, size, budget)
    flat = [int(i) for batch in batches for i in batch]
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[i] for i in flat] == sorted(lengths, reverse=True)
    for batch in batches:
        assert len(batch) <= size if size else len(batch) == 1 or len(batch) * lengths[batch].max() <= budget


@pytest.mark.parametrize("size", [0, -1])
def test_batch_size_must_be_positive(size, minilm):
    with pytest.raises(CdrError, match="batch_size"):
        minilm.encode(["a"], batch_size=size)


@pytest.mark.parametrize("device", ["gpu", "cpu:cuda", "cuda:0,tpu"])
def test_unknown_devices(device):
    with pytest.raises(CdrError, match="device"):
        pick_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_cuda_is_an_error_not_a_crash():
    with pytest.raises(CdrError, match="sees no CUDA devices"):
        get_encoder("minilm", device="cuda")
    assert pick_dtype("auto", pick_device()) == "float32"


# --- sentence-transformers --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_fp32_equals_sentence_transformers(minilm, reference, batch_size):
    expected = reference.encode(TEXTS, normalize_embeddings=True)
    got = minilm.encode(TEXTS, batch_size=batch_size, progress=False)
    assert got.dtype == np.float32 and got.shape == (len(TEXTS), minilm.dim)
    assert np.abs(got - expected).max() < 2e-6


def test_bf16_is_close_and_has_its_own_key(minilm, reference):
    half = get_encoder("minilm", device="cpu", dtype="bfloat16")
    got = half.encode(TEXTS, progress=False)
    assert got.dtype == np.float32 and np.allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)
    assert (got * reference.encode(TEXTS)).sum(axis=1).min() > 0.999
    assert half.fingerprint("query") != minilm.fingerprint("query")


def test_openvino_equals_torch(minilm):
    pytest.importorskip("openvino")
    expected = minilm.encode(TEXTS, progress=False)
    exact = get_encoder("minilm", backend="openvino")
    assert (exact.encode(TEXTS, progress=False) * expected).sum(axis=1).min() > 0.99999
    half = get_encoder("minilm", backend="openvino", dtype="bfloat16")
    assert (half.encode(TEXTS, progress=False) * expected).sum(axis=1).min() > 0.999
    prints = [json.dumps(encoder.fingerprint("query")) for encoder in (minilm, exact, half)]
    assert len(set(prints)) == 3 and half.truncated == 1
    with pytest.raises(CdrError, match="runs on the CPU"):
        get_encoder("minilm", backend="openvino", device="cuda")
    with pytest.raises(CdrError, match="float32 and bfloat16"):
        get_encoder("minilm", backend="openvino", dtype="float16")


def test_prompts_are_put_before_the_text_and_counted_as_the_library_does(reference):
    spec = ModelSpec("minilm", query_prompt="query: ", document_prompt="passage: ")
    encoder = get_encoder(spec, device="cpu")
    for role, text in (("query", "query: refund"), ("document", "passage: refund")):
        assert np.abs(encoder.encode(["refund"], role, progress=False) - reference.encode([text])).max() < 1e-6
    assert encoder.token_lengths(["refund"], "query")[0] == len(reference.tokenizer("query: refund")["input_ids"])


def test_the_model_folder_own_prompts_are_used(tmp_path, reference):
    model = SentenceTransformer(packaged_minilm(), device="cpu", local_files_only=True,
                                prompts={"query": "q: ", "passage": "p: "})
    model.save_pretrained(str(tmp_path / "prompted"))
    encoder = get_encoder(str(tmp_path / "prompted"), device="cpu")
    assert encoder.name == "prompted" and encoder.prompts == {"query": "q: ", "document": "p: "}
    assert np.abs(encoder.encode(["refund"], "query", progress=False) - reference.encode(["q: refund"])).max() < 1e-6
    # "" switches a prompt off
    bare = get_encoder(ModelSpec(str(tmp_path / "prompted"), query_prompt=""), device="cpu")
    assert np.abs(bare.encode(["refund"], "query", progress=False) - reference.encode(["refund"])).max() < 1e-6


def test_weights_are_named_by_content(tmp_path, minilm):
    import shutil

    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        shutil.copytree(packaged_minilm(), folder)
    (two / "README.md").write_text("other words")
    assert weights_id(str(one), None, None) == weights_id(str(two), None, None) == minilm.weights
    config = json.loads((two / "sentence_bert_config.json").read_text())
    (two / "sentence_bert_config.json").write_text(json.dumps(config | {"max_seq_length": 128}))
    assert weights_id(str(two), None, None) != minilm.weights


def test_fingerprint_is_plain_complete_and_without_paths(minilm):
    print_ = minilm.fingerprint("document")
    assert {"model", "weights", "role", "prompt", "max_length", "dtype", "backend", "device", "pooling", "code",
            "versions"} <= set(print_)
    assert os.sep + "site-packages" not in json.dumps(print_) and str(packaged_minilm()) not in json.dumps(print_)
    assert print_ != minilm.fingerprint("query")


def test_max_length(reference):
    short = get_encoder("minilm", device="cpu", max_length=16)
    long = TEXTS[4]
    reference_short = SentenceTransformer(packaged_minilm(), device="cpu", local_files_only=True)
    reference_short.max_seq_length = 16
    assert np.abs(short.encode([long], progress=False) - reference_short.encode([long])).max() < 1e-6
    assert short.truncated == 1 and short.fingerprint("query")["max_length"] == 16
    for bad in (1, 513, 100_000):
        with pytest.raises(CdrError, match="reads between 4 and 512 tokens"):
            get_encoder("minilm", device="cpu", max_length=bad)


def test_unit_that_does_not_fit_is_halved_until_it_does(minilm, monkeypatch):
    expected, real, sizes = minilm.encode(TEXTS, progress=False), minilm._forward, []

    def small(texts, role, batch_size):
        sizes.append(len(texts))
        if len(texts) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(texts, role, batch_size)

    monkeypatch.setattr(minilm, "_forward", small)
    assert np.abs(minilm.encode(TEXTS, batch_size=7, progress=False) - expected).max() < 2e-6
    assert sizes[0] == 7 and max(size for size in sizes[1:] if size <= 2) == 2

    def never(texts, role, batch_size):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(minilm, "_forward", never)
    with pytest.raises(CdrError, match="out of memory on a single text"):
        minilm.encode(TEXTS, progress=False)


def test_several_devices_share_the_work(tmp_path):
    # In a process of its own: workers are spawned and import the main module.
    code = """
import numpy as np
from cdr_lib.core.encoders import embed, get_encoder
if __name__ == "__main__":
    texts = [f"user: message {i}" for i in range(40)]
    encoder = get_encoder("minilm", device="cpu,cpu")
    both = embed(encoder, texts, progress=False)
    encoder.close()
    assert np.abs(both - get_encoder("minilm", device="cpu").encode(texts, progress=False)).max() < 2e-6
    print("same")
"""
    script = tmp_path / "pool.py"
    script.write_text(code)
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False,
                         env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert out.stdout.strip() == "same", out.stderr


# --- names, folders, networks -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, says", [("./nowhere", "no such folder"), ("/nowhere/model", "no such folder"),
                                        ("a/b/c", "no such folder"), ("", "give a name"), ("hash:big", "hash:512"),
                                        ("openai:", "lacks the model")])
def test_names_that_name_nothing(name, says):
    with pytest.raises(CdrError, match=says):
        get_encoder(name)


@pytest.mark.parametrize("make", [get_encoder, get_reranker])
def test_no_network_is_one_clear_error_within_seconds(make, monkeypatch):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    start = time.monotonic()
    with pytest.raises(CdrError, match="hub cannot be reached.*connect, or run  hf download someone/some-model"):
        make("someone/some-model")
    assert time.monotonic() - start < 10


def test_unknown_model_and_unknown_revision_are_told_apart(monkeypatch):
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    for kind, says in ((RepositoryNotFoundError, "neither a folder here nor a model of the hub: check the spelling"),
                       (RevisionNotFoundError, "has no revision 'v9'"), (GatedRepoError, "is gated")):
        def answer(*args, kind=kind, **kwargs):
            raise kind("no", response=httpx.Response(404, request=httpx.Request("GET", "http://hub.invalid")))

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", answer)
        with pytest.raises(CdrError, match=says):
            get_encoder("someone/some-model", revision="v9")


def test_damaged_folder_is_one_clear_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CdrError, match="cannot be loaded"):
        get_encoder(str(tmp_path))


@pytest.mark.parametrize("name, options", [
    ("hash", {"revision": "abc"}), ("hash", {"dtype": "bfloat16"}), ("keyword", {"max_length": 3}),
    ("minilm", {"base_url": "http://127.0.0.1/v1"}), ("minilm", {"revision": "main"}), ("openai:m", {"max_length": 5}),
    ("openai:m", {"backend": "openvino"}), ("mteb:x/y", {"dtype": "float16"})])
def test_options_that_nothing_would_read_are_refused(name, options):
    with pytest.raises(CdrError, match=f"takes no {next(iter(options))}"):
        get_encoder(name, **options)


def test_code_of_a_repository_does_not_run_unasked(tmp_path):
    import shutil

    folder = tmp_path / "custom"
    shutil.copytree(packaged_minilm(), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(CdrError, match="trust_remote_code=True"):
        get_encoder(str(folder), device="cpu")


# --- encoders without weights -----------------------------------------------------------------------------------------

def test_hash_encoder_is_the_same_in_every_process():
    code = "from cdr_lib.core.encoders import HashEncoder as H; print(H(64).encode(['Refund, please'])[0].tolist())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                         env=os.environ | {"PYTHONHASHSEED": "3"}).stdout
    assert np.allclose(json.loads(out), HashEncoder(64).encode(["refund PLEASE"])[0])
    with pytest.raises(CdrError, match="multiple of 8"):
        HashEncoder(100)


def test_keyword_encoder_counts_words():
    encoder = KeywordEncoder(["Refund", "sorry"])
    assert np.allclose(encoder.encode(["refund refund", "sorry, refund", "nothing"]), [[1, 0], [2**-0.5] * 2, [0, 0]])
    for bad in ([], ["a", "A"], ["two words"]):
        with pytest.raises(CdrError, match="different single words"):
            KeywordEncoder(bad)
    with pytest.raises(CdrError, match="more than dim=2 different words"):
        KeywordEncoder(dim=2).encode(["one two three"])


# --- embed ------------------------------------------------------------------------------------------------------------

class Recorder(HashEncoder):
    "Remembers what it was asked."

    def __init__(self, dim=64):
        super().__init__(dim)
        self.calls = []

    def encode(self, texts, role="document", batch_size=None, progress=True):
        self.calls.append((list(texts), role, batch_size))
        return super().encode(texts, role)


@given(st.lists(st.sampled_from("abcdefgh"), max_size=40))
@settings(max_examples=40, deadline=None)
def test_embed_keeps_order_and_asks_once(letters):
    texts = [letter * (ord(letter) - 96) for letter in letters]
    recorder = Recorder()
    vectors = embed(recorder, texts, progress=False)
    assert np.allclose(vectors, HashEncoder(64).encode(texts)) and vectors.shape == (len(texts), 64)
    sent = [text for call, _, _ in recorder.calls for text in call]
    assert sent == sorted(set(texts), key=lambda text: (-len(text), text))


def test_embed_uses_the_store_for_its_own_setting_only(tmp_path):
    store = Store(tmp_path)
    for options in ({"role": "query"}, {"role": "document"}, {"rendering": "text"}):
        recorder = Recorder()
        first = embed(recorder, ["a", "b", "a"], store=store, progress=False, **options)
        assert len(recorder.calls) == 1
        again = embed(recorder, ["b", "a"], store=store, progress=False, **options)
        assert len(recorder.calls) == 1 and np.array_equal(again, first[:2][::-1])
    other = Recorder(128)
    assert embed(other, ["a"], store=store, progress=False).shape == (1, 128) and len(other.calls) == 1


def test_interrupted_work_is_kept_and_goes_on(tmp_path):
    store, texts = Store(tmp_path), [f"text {i:04}" for i in range(3000)]

    class Interrupted(Recorder):
        def encode(self, texts, *args):
            if len(self.calls) == 2:
                raise KeyboardInterrupt
            return super().encode(texts, *args)

    with pytest.raises(KeyboardInterrupt):
        embed(Interrupted(), texts, store=store, progress=False)
    recorder = Recorder()
    vectors = embed(recorder, texts, store=store, progress=False)
    assert sum(len(call) for call, _, _ in recorder.calls) == 3000 - 2048
    assert np.allclose(vectors, HashEncoder(64).encode(texts))


def test_a_killed_process_keeps_what_was_flushed(tmp_path):
    code = f"""
import time
import cdr_lib.core.encoders as encoders
from cdr_lib.core.store import Store
encoders._FLUSH = 0.0
class Slow(encoders.HashEncoder):
    def encode(self, texts, *args):
        time.sleep(0.05)
        print("batch", flush=True)
        return super().encode(texts, *args)
encoders.embed(Slow(64), [f"text {{i:05}}" for i in range(100_000)], store=Store({str(tmp_path)!r}), progress=False)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    for _ in range(4):
        assert process.stdout.readline() == "batch\n"
    process.kill()
    process.communicate()
    texts = [f"text {i:05}" for i in range(100_000)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, vectors = Store(tmp_path).get_many(
            vector_keys({**HashEncoder(64).fingerprint("document"), "rendering": "plain"}, texts))
    assert found.sum() >= 2048 and found.sum() % 1024 == 0
    assert np.allclose(vectors[:50], HashEncoder(64).encode([text for text, hit in zip(texts, found) if hit][:50]))


def test_failures_never_reach_the_store(tmp_path):
    class Broken(HashEncoder):
        def encode(self, texts, *args):
            vectors = super().encode(texts, *args)
            vectors[[text == "bad" for text in texts]] = np.nan
            return unit_vectors(vectors, texts, self.name)

    with pytest.raises(CdrError, match="first for 'bad'"):
        embed(Broken(), ["good", "bad"], store=Store(tmp_path), progress=False)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_embed_of_nothing():
    assert embed(HashEncoder(64), []).shape == (0, 64)
    with pytest.raises(CdrError, match="role 'passage' is unknown"):
        embed(HashEncoder(64), ["a"], role="passage")


def test_everything_meets_the_protocols(minilm):
    assert all(isinstance(encoder, Encoder) for encoder in (minilm, HashEncoder(), KeywordEncoder(["a"])))
    assert isinstance(OverlapReranker(), Reranker) and not isinstance(HashEncoder(), Reranker)


# --- a server ---------------------------------------------------------------------------------------------------------

def vector_of(text):
    return [float(len(text)), float(text.count("e")), 1.0]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        server.requests.append({"path": self.path, "key": self.headers.get("authorization"), **body})
        if server.script:
            status, headers, answer = server.script.pop(0)
            return self.reply(status, headers, answer)
        if any(len(text) > 200 for text in body["input"]):
            return self.reply(400, {}, {"error": {"message": "input is too long", "code": "context_length_exceeded"}})
        data = [{"object": "embedding", "index": number, "embedding": vector_of(text)}
                for number, text in enumerate(body["input"])]
        answer = {"object": "list", "model": body["model"], "data": server.change(data)}
        self.reply(200, {}, answer | ({"usage": {"prompt_tokens": 5, "total_tokens": 5}} if server.metered else {}))

    def reply(self, status, headers, answer):
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", "content-length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-456")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.script, server.change, server.metered, server.waits = [], [], lambda data: data, True, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.encoder = lambda **options: EndpointEncoder("m", f"http://127.0.0.1:{server.server_port}/v1",
                                                       sleep=server.waits.append, **options)
    yield server
    server.shutdown()
    server.server_close()


def error(status, message="no", code=None, **headers):
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, names, {"error": {"message": message, "code": code}}


def expected(texts):
    vectors = np.array([vector_of(text) for text in texts])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_order_is_by_index_and_requests_are_bounded_by_count_and_tokens(server):
    server.change = lambda data: data[::-1]
    texts = [f"text {'e' * (i % 7)} {i}" for i in range(23)]
    encoder = server.encoder(max_texts=5, max_tokens=12)
    assert np.allclose(encoder.encode(texts, progress=False), expected(texts), atol=1e-6)
    sizes = [len(request["input"]) for request in server.requests]
    assert max(sizes) <= 5 and sum(sizes) == 23 and len(sizes) > 5  # four texts are about 12 estimated tokens
    assert encoder.dim == 3
    assert encoder.usage == {"requests": len(sizes), "retries": 0, "tokens": 5 * len(sizes), "unmetered": 0}
    assert {request["path"] for request in server.requests} == {"/v1/embeddings"}


def test_prompts_reach_the_server(server):
    encoder = server.encoder(query_prompt="query: ")
    encoder.encode(["refund"], "query", progress=False)
    encoder.encode(["refund"], "document", progress=False)
    assert [request["input"] for request in server.requests] == [["query: refund"], ["refund"]]
    assert encoder.fingerprint("query") != encoder.fingerprint("document")


NOW = 1_740_996_000.0  # Monday, 3 March 2025, 10:00:00 GMT


@pytest.mark.parametrize("headers, wait", [
    ({"retry-after": "20"}, 20), ({"retry-after": "Mon, 03 Mar 2025 10:00:30 GMT"}, 30),
    ({"retry-after": "Mon, 03 Mar 2025 09:00:00 GMT"}, 0), ({"retry-after": "1", "retry-after-ms": "250"}, 0.25),
    ({"retry-after": "soon"}, None), ({"retry-after": "-5"}, None), ({"retry-after": "86400"}, 86400), ({}, None)])
def test_LLM_09_server_hints(headers, wait):
    assert server_wait(headers, NOW) == wait


def test_LLM_09_back_off_has_jitter_and_a_limit():
    rng = np.random.default_rng(0)
    waits = [back_off(attempt, rng) for attempt in range(200)]
    assert max(waits) <= 30 and min(waits) >= 0.5 and len(set(waits)) == 200


def test_LLM_09_waits_are_honoured_and_a_day_is_refused(server):
    date = formatdate(time.time() + 30, usegmt=True)
    server.script = [error(429, retry_after="2"), error(503, retry_after=date), error(500)]
    encoder = server.encoder()
    assert encoder.encode(["hello"], progress=False).shape == (1, 3)
    assert server.waits[0] == 2 and 25 < server.waits[1] <= 30 and 1 <= server.waits[2] <= 4
    assert encoder.usage["retries"] == 3
    server.script = [error(429, retry_after="86400")]
    with pytest.raises(CdrError, match="asks to wait 86400 s, more than 60 s"):
        encoder.encode(["hello"], progress=False)


@pytest.mark.parametrize("status, code, says", [
    (401, None, "OPENAI_API_KEY"), (403, None, "may not use"), (404, None, "base_url"),
    (429, "insufficient_quota", "quota is used up")])
def test_LLM_09_what_waiting_cannot_mend_is_not_retried(server, status, code, says):
    server.script = [error(status, code=code)]
    with pytest.raises(CdrError, match=f"answers {status}.*{says}"):
        server.encoder().encode(["hello", "world"], progress=False)
    assert len(server.requests) == 1 and server.waits == []


def test_retries_end(server):
    server.script = [error(503)] * 10
    with pytest.raises(CdrError, match="still answers 503 after 3 attempts"):
        server.encoder(max_retries=2).encode(["hello"], progress=False)
    assert len(server.requests) == 3 and len(server.waits) == 2


def test_the_text_at_fault_is_found_and_the_rest_is_not_lost(server, tmp_path):
    texts = [f"text {i}" for i in range(20)] + ["x" * 201]
    encoder = server.encoder()
    with pytest.raises(CdrError, match=r"answers 400 for the text 'x+\.*.*\(201 characters\): .*too long"):
        encoder.encode(texts, progress=False)
    assert len(server.requests) <= 12  # halving, not one by one


@pytest.mark.parametrize("change, says", [
    (lambda data: data[:-1], "cannot be matched"),
    (lambda data: [{**item, "index": 0} for item in data], "cannot be matched"),
    (lambda data: data + data[:1], "cannot be matched"),
    (lambda data: [], "sent"),
    (lambda data: [{**item, "embedding": [1.0] * (2 + item["index"])} for item in data], "different dimensions"),
    (lambda data: [{**item, "embedding": []} for item in data], "different dimensions"),
    (lambda data: [{**item, "embedding": [1.0, None, 2.0]} for item in data], "for 2 of 2 texts, first for 'a'"),
    (lambda data: [{**item, "embedding": [1.0, "x", 2.0]} for item in data], "not numbers")])
def test_answers_that_cannot_be_trusted(server, change, says):
    server.change = change
    with pytest.raises(CdrError, match=says):
        server.encoder().encode(["a", "b"], progress=False)


def test_a_server_that_changes_its_dimension_is_noticed(server):
    encoder = server.encoder(max_texts=1)
    server.change = lambda data: [{**item, "embedding": [1.0] * (2 + len(server.requests) % 2)} for item in data]
    with pytest.raises(CdrError, match=r"different dimensions \[2, 3\]"):
        encoder.encode(["a", "b"], progress=False)


def test_a_page_instead_of_an_answer(server):
    server.script = [(200, {"content-type": "text/html"}, b"<html>login</html>")]
    with pytest.raises(CdrError):
        server.encoder().encode(["a"], progress=False)


def test_servers_without_usage_count_as_unmetered(server):
    server.metered = False
    encoder = server.encoder()
    encoder.encode(["a"], progress=False)
    assert encoder.usage == {"requests": 1, "retries": 0, "tokens": 0, "unmetered": 1}


def test_no_server(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    waits = []
    encoder = EndpointEncoder("m", "http://127.0.0.1:9/v1", max_retries=1, sleep=waits.append)
    with pytest.raises(CdrError, match="cannot be reached .*after 2 attempts"):
        encoder.encode(["a"], progress=False)


def test_PPM_08_the_key_stands_in_no_message_fingerprint_or_file(server, tmp_path):
    server.script = [error(401, "Incorrect API key provided: sk-test-456.")]
    encoder = server.encoder()
    with pytest.raises(CdrError) as caught:
        encoder.encode(["a"], progress=False)
    assert "sk-test-456" not in str(caught.value) and "<key>" in str(caught.value) and caught.value.__cause__ is None
    embed(encoder, ["a", "b"], store=Store(tmp_path), progress=False)
    assert server.requests[-1]["key"] == "Bearer sk-test-456"
    assert all(b"sk-test-456" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "sk-test-456" not in repr(encoder) + json.dumps(encoder.fingerprint("query"))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http://", "http://user:sk-secret@host/v1",
                                 "http://host/v1?key=sk-secret"])
def test_bad_base_urls_are_refused_without_showing_secrets(url):
    with pytest.raises(CdrError, match="base_url must be like") as caught:
        EndpointEncoder("m", url)
    assert "sk-secret" not in str(caught.value)


def test_hosted_service_needs_a_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(CdrError, match="set the environment variable OPENAI_API_KEY"):
        get_encoder("openai:text-embedding-3-large")


# --- rerankers --------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def cross(tmp_path_factory):
    "A cross-encoder with a random head: its numbers mean nothing, its plumbing is real."
    folder = tmp_path_factory.mktemp("models") / "cross"
    torch.manual_seed(0)
    CrossEncoder(packaged_minilm(), num_labels=1, device="cpu", local_files_only=True).save_pretrained(str(folder))
    return str(folder)


PAIRS = [("Where is my refund?", text) for text in TEXTS] + [("Who apologises?", text) for text in TEXTS[:3]]


def test_scores_equal_the_library(cross):
    model = CrossEncoder(cross, device="cpu", local_files_only=True)
    expected = model.predict(PAIRS, activation_fn=torch.nn.Identity())
    for batch_size in (None, 1, 4):
        got = get_reranker(cross, device="cpu").score(PAIRS, batch_size=batch_size, progress=False)
        assert got.dtype == np.float32 and np.abs(got - expected).max() < 1e-5


def test_TRN_06_the_scale_is_stated_and_enforced(cross, monkeypatch):
    raw = np.array([-7.1, 0.2, 3.0], np.float32)
    chance = get_reranker(cross, device="cpu", scale="probability")
    logit = get_reranker(cross, device="cpu")
    assert (logit.scale, chance.scale) == ("logit", "probability")

    def predict(pairs, batch_size, activation_fn, show_progress_bar):
        return activation_fn(torch.tensor([raw[int(text)] for _, text in pairs])).numpy()

    pairs = [("q", "0"), ("q", "1"), ("q", "2")]
    for reranker in (chance, logit):
        monkeypatch.setattr(reranker.model, "predict", predict)
    chances = chance.score(pairs, progress=False)
    assert np.allclose(chances, [0.000825, 0.549834, 0.952574], atol=1e-6)
    assert (chances > 0.5).tolist() == [False, True, True]
    assert np.array_equal(logit.score(pairs, progress=False), raw)
    assert np.array_equal(np.argsort(chances), np.argsort(raw))
    with pytest.raises(CdrError, match="scale"):
        get_reranker(cross, scale="softmax")


def test_TRN_08_a_long_query_does_not_push_the_passage_out(cross, monkeypatch):
    reranker = get_reranker(cross, device="cpu", max_length=512)
    query = " ".join(["refund"] * 590 + ["newest"] * 10)
    passages = {"A": " ".join(["sorry"] * 100), "B": " ".join(["weather"] * 100)}
    seen, real = [], reranker.model.predict

    def predict(pairs, **options):
        seen.extend(pairs)
        return real(pairs, **options)

    monkeypatch.setattr(reranker.model, "predict", predict)
    scores = reranker.score([(query, passages["A"]), (query, passages["B"])], progress=False)
    tokenizer = reranker.model.tokenizer
    inputs = [tokenizer(*pair, truncation=True, max_length=512) for pair in seen]
    for (kept, _), passage, ids in zip(seen, passages.values(), inputs):
        assert len(tokenizer(kept, add_special_tokens=False)["input_ids"]) == 409
        assert kept.endswith("newest " * 9 + "newest")
        assert len(ids["input_ids"]) == 512
        assert tokenizer.decode(ids["input_ids"]).count(passage.split()[0]) == 100
    assert inputs[0]["input_ids"] != inputs[1]["input_ids"] and scores[0] != scores[1]
    assert reranker.truncated == 2
    # both sides long: they share the room
    seen.clear()
    reranker.score([(query, " ".join(["sorry"] * 600))], progress=False)
    assert len(tokenizer(seen[0][0], add_special_tokens=False)["input_ids"]) == 254


def test_TRN_08_a_model_that_sees_no_difference_is_reported(cross, monkeypatch):
    reranker = get_reranker(cross, device="cpu")
    monkeypatch.setattr(reranker.model, "predict", lambda pairs, **options: np.ones(len(pairs)))
    with pytest.warns(UserWarning, match="all texts of 1 of 2 queries the same score"):
        reranker.score([("q", "a"), ("q", "b"), ("alone", "a")], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reranker.score([("q", "a"), ("q", "a")], progress=False)


def test_what_is_no_reranker_is_refused(tmp_path):
    with pytest.raises(CdrError, match="no classification head"):
        get_reranker(packaged_minilm(), device="cpu")
    three = CrossEncoder(packaged_minilm(), num_labels=3, device="cpu", local_files_only=True)
    three.save_pretrained(str(tmp_path / "three"))
    with pytest.raises(CdrError, match="3 outputs"):
        get_reranker(str(tmp_path / "three"), device="cpu")


@pytest.mark.parametrize("pairs, says", [(["ab"], "is not"), ([("a",)], "is not"), ([("a", "")], "is empty"),
                                         ([("a", None)], "NoneType")])
def test_bad_pairs(pairs, says, cross):
    for reranker in (get_reranker("overlap"), get_reranker(cross, device="cpu")):
        with pytest.raises(CdrError, match=says):
            reranker.score(pairs)


def test_no_pairs_and_non_finite_scores(cross, monkeypatch):
    reranker = get_reranker(cross, device="cpu")
    assert reranker.score([], progress=False).shape == (0,) and OverlapReranker().score([]).shape == (0,)
    monkeypatch.setattr(reranker.model, "predict", lambda pairs, **options: np.full(len(pairs), np.nan))
    with pytest.raises(CdrError, match="NaN or infinity for query 'q'"):
        reranker.score([("q", "a")], progress=False)


def test_overlap():
    assert OverlapReranker().score([("Where is my refund", "MY refund!"), ("?", "?")]).tolist() == [0.5, 0.0]


# --- mteb's registry --------------------------------------------------------------------------------------------------

def test_without_mteb_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(CdrError, match=r"pip install 'cdr_lib\[mteb\]'"):
        get_encoder("mteb:openai/text-embedding-3-large")


def test_mteb_models():
    pytest.importorskip("mteb", reason="the mteb extra is not installed")
    encoder = get_encoder("mteb:mteb/baseline-random-encoder", device="cpu")
    vectors = encoder.encode(TEXTS, "query", progress=False)
    assert vectors.shape == (len(TEXTS), encoder.dim) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert np.allclose(vectors[::-1], encoder.encode(TEXTS[::-1], "query", progress=False))
    assert encoder.encode([]).shape == (0, encoder.dim)
    assert encoder.fingerprint("query")["weights"] == encoder.revision
    with pytest.raises(CdrError, match="not found"):
        get_encoder("mteb:nobody/nothing")
    with pytest.raises(CdrError, match="trust_remote_code=True"):
        get_encoder("mteb:nvidia/NV-Embed-v2")
    with pytest.raises(CdrError, match="not found for model"):
        get_encoder("mteb:intfloat/e5-large-v2", revision="other")


def test_an_interrupt_after_openvino_networks_are_gone_is_an_interrupt():
    pytest.importorskip("openvino")
    script = ("import gc, signal\n"
              "from cdr_lib.core.encoders import get_encoder\n"
              "first, second = (get_encoder('minilm', backend='openvino', dtype=dtype) for dtype in ('float32', 'bfloat16'))\n"
              "del first; gc.collect()\n"
              "del second; gc.collect()\n"
              "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
              "try: signal.raise_signal(signal.SIGINT)\n"
              "except KeyboardInterrupt: print('interrupted')\n")
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
