"core.store: keys, shards, concurrent and killed writers, damage, speed."
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from cdr_lib.core.config import CdrError
from cdr_lib.core.store import Store, content_key, vector_keys

SETTING = {"model": "m", "revision": "r1", "role": "query", "prompt": "", "dtype": "float32", "max_length": 256}


def vectors_for(texts, dim=16):
    "A vector that can be worked out from its text alone, in any process."
    return np.stack([np.random.default_rng(list(text.encode()) or [0]).standard_normal(dim)
                     for text in texts]).astype("f4")


def shards(root):
    return sorted(Path(root).glob("vectors/*/*.safetensors"))


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


# --- keys -------------------------------------------------------------------------------------------------------------

def test_LLM_06_every_setting_gives_its_own_key_and_equal_settings_share_one():
    base = {"base_url": "http://a.example/v1", "model": "m", "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0.0}
    variants = [
        {"temperature": 0.7}, {"max_tokens": 16}, {"seed": 1},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        {"base_url": "http://b.example/v1"}, {"model": "m2"}, {"sample_index": 1},
        {"messages": [{"role": "system", "content": "hi"}]}, {"extra_body": {"top_k": 5}}]
    keys = [base, *({**base, **variant} for variant in variants), {k: v for k, v in base.items() if k != "temperature"}]
    assert len({content_key(key) for key in keys}) == 11
    assert content_key(dict(reversed(base.items()))) == content_key(base)
    assert content_key({**base, "temperature": 0}) == content_key(base)


def test_key_is_the_same_in_another_process():
    code = ("from cdr_lib.core.store import content_key, vector_keys; "
            "print(content_key({'b': 0.1, 'a': ['ü', None, True]}), vector_keys({'x': 1}, ['ü']).digests[0].hex())")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                         env=os.environ | {"PYTHONHASHSEED": "7"}).stdout.split()
    assert out == [content_key({"a": ["ü", None, True], "b": 0.1}), vector_keys({"x": 1}, ["ü"]).digests[0].hex()]


@pytest.mark.parametrize("field", [*SETTING, "rendering", "code"])
def test_each_field_of_the_setting_changes_every_key(field):
    other = {**SETTING, field: "other"}
    texts = ["refund", "late"]
    assert vector_keys(SETTING, texts).space != vector_keys(other, texts).space
    assert not np.isin(vector_keys(SETTING, texts).digests, vector_keys(other, texts).digests).any()


@given(st.lists(st.text(), min_size=2, max_size=30, unique=True))
@settings(max_examples=25, deadline=None)
def test_different_texts_have_different_keys(texts):
    assert len(np.unique(vector_keys(SETTING, texts).digests)) == len(texts)


@pytest.mark.parametrize("value", [{"a": float("inf")}, {"a": object()}, {1: 2}, {"a": b"x"}, {"a": np.zeros(2)}])
def test_what_has_no_stable_form_is_refused(value):
    with pytest.raises(CdrError, match="key"):
        content_key(value)


# --- vectors ----------------------------------------------------------------------------------------------------------

@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_any_sequence_of_writes_is_read_back_exactly(tmp_path_factory, writes):
    store, known = Store(tmp_path_factory.mktemp("s")), set()
    for start, count in writes:
        texts = [f"t{i}" for i in range(start, start + count)]
        store.put_many(vector_keys(SETTING, texts), vectors_for(texts))
        known.update(texts)
    texts = [f"t{i}" for i in range(60)]
    found, vectors = Store(store.root).get_many(vector_keys(SETTING, texts))
    assert [text for text, hit in zip(texts, found) if hit] == [text for text in texts if text in known]
    assert np.array_equal(vectors, vectors_for([text for text in texts if text in known]))


def test_empty_questions_and_empty_store(store):
    found, vectors = store.get_many(vector_keys(SETTING, ["a"]))
    assert found.tolist() == [False] and vectors.shape == (0, 0)
    store.put_many(vector_keys(SETTING, []), np.empty((0, 4), "f4"))
    store.put_many(vector_keys(SETTING, ["a"]), np.ones((1, 4), "f4"))
    found, vectors = store.get_many(vector_keys(SETTING, []))
    assert found.shape == (0,) and vectors.shape == (0, 4)


def test_repeated_texts_and_first_vector_wins(store):
    keys = vector_keys(SETTING, ["a", "b", "a"])
    store.put_many(keys, np.array([[1, 0], [2, 0], [1, 0]], "f4"))
    store.put_many(keys[:1], np.array([[9, 9]], "f4"))
    assert store.get_many(keys)[1].tolist() == [[1, 0], [2, 0], [1, 0]]
    assert len(shards(store.root)) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_failures_are_never_stored(store, bad):
    keys = vector_keys(SETTING, ["a", "b"])
    with pytest.raises(CdrError, match="first: number 1"):
        store.put_many(keys, np.array([[1, 0], [bad, 0]], "f4"))
    assert not store.get_many(keys)[0].any() and not shards(store.root)


@pytest.mark.parametrize("vectors", [np.ones(2, "f4"), np.ones((1, 4), "f4"), np.ones((2, 4), int)])
def test_wrong_shapes_are_refused(store, vectors):
    with pytest.raises(CdrError, match="2 keys need a float array"):
        store.put_many(vector_keys(SETTING, ["a", "b"]), vectors)


def test_another_dimension_in_one_space_is_refused(store):
    store.put_many(vector_keys(SETTING, ["a"]), np.ones((1, 4), "f4"))
    with pytest.raises(CdrError, match="dimension 5 do not belong"):
        store.put_many(vector_keys(SETTING, ["b"]), np.ones((1, 5), "f4"))


def test_shards_open_with_the_reference_reader_and_hold_no_pickle(store):
    texts = ["a", "b", "c"]
    store.put_many(vector_keys(SETTING, texts), vectors_for(texts))
    (path,) = shards(store.root)
    tensors = load_file(path)
    assert tensors["vectors"].shape == (3, 16) and tensors["keys"].shape == (3, 16)
    assert sorted(tensors["keys"].tolist()) == tensors["keys"].tolist()
    assert json.loads((path.parent / "space.json").read_text()) == SETTING


def test_many_small_writes_become_few_files_and_a_reader_with_an_old_list_follows(store):
    texts = [f"t{i}" for i in range(150)]
    keys, vectors = vector_keys(SETTING, texts), vectors_for(texts)
    reader = Store(store.root)
    for i in range(150):
        store.put_many(keys[i:i + 1], vectors[i:i + 1])
        if i in (10, 63, 64, 100):
            assert np.array_equal(reader.get_many(keys[:i + 1])[1], vectors[:i + 1])
    assert len(shards(store.root)) < 64
    assert np.array_equal(Store(store.root).get_many(keys)[1], vectors)


def test_a_shard_that_vanishes_between_search_and_read_is_not_found(store):
    texts = ["a", "b"]
    keys, vectors = vector_keys(SETTING, texts), vectors_for(texts)
    store.put_many(keys[:1], vectors[:1])
    store.put_many(keys[1:], vectors[1:])
    space = store._space(keys.space)
    space.refresh = lambda: None  # an old list: what another process does between our two looks
    gone = next(iter(space.shards))
    (space.folder / gone).unlink()
    found, got = store.get_many(keys)
    assert found.sum() == 1 and np.array_equal(got, vectors[found])


# --- damage -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["cut", "empty", "header", "index", "longer"])
def test_damaged_shard_is_reported_set_aside_and_recomputed(store, how):
    texts = [f"t{i}" for i in range(50)]
    keys, vectors = vector_keys(SETTING, texts), vectors_for(texts)
    store.put_many(keys[:40], vectors[:40])
    store.put_many(keys[40:], vectors[40:])
    path = max(shards(store.root), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    if how == "index":
        at = data.index(keys.digests[3])
        data[at] ^= 0xFF
    elif how == "header":
        data[10] ^= 0xFF
    damaged = {"cut": data[:-7], "empty": b"", "longer": data + b"x"}.get(how, data)
    path.write_bytes(bytes(damaged))
    with pytest.warns(UserWarning, match="is damaged"):
        found, got = Store(store.root).get_many(keys)
    assert found.tolist() == [False] * 40 + [True] * 10 and np.array_equal(got, vectors[40:])
    assert path.with_suffix(".damaged").read_bytes() == bytes(damaged)
    store.put_many(keys[:40], vectors[:40])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(Store(store.root).get_many(keys)[1], vectors)


@pytest.mark.parametrize("row", [0, 17, 39])
def test_one_flipped_bit_costs_one_vector(store, row):
    texts = [f"t{i}" for i in range(40)]
    keys, vectors = vector_keys(SETTING, texts), vectors_for(texts)
    store.put_many(keys, vectors)
    (path,) = shards(store.root)
    data = bytearray(path.read_bytes())
    data[data.index(vectors[row].tobytes()) + 33] ^= 0b100
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="1 of 40 vectors fail their checksum"):
        found, got = store.get_many(keys)
    assert np.flatnonzero(~found).tolist() == [row] and np.array_equal(got, np.delete(vectors, row, axis=0))


def test_cut_while_open(store):
    texts = [f"t{i}" for i in range(40)]
    keys, vectors = vector_keys(SETTING, texts), vectors_for(texts)
    store.put_many(keys, vectors)
    assert store.get_many(keys)[0].all()
    (path,) = shards(store.root)
    os.truncate(path, 300)
    with pytest.warns(UserWarning, match="is damaged"):
        assert not store.get_many(keys)[0].any()


# --- several processes, killed processes, full disks ------------------------------------------------------------------

WRITER = """
import sys, numpy as np
sys.path.insert(0, {tests!r})
from test_store import SETTING, vectors_for
from cdr_lib.core.store import Store, vector_keys
root, start, stop, step = sys.argv[1], *map(int, sys.argv[2:])
store = Store(root)
print("ready", flush=True)
for i in range(start, stop, step):
    texts = [f"t{{j}}" for j in range(i, i + step)]
    store.put_many(vector_keys(SETTING, texts), vectors_for(texts))
print("done", flush=True)
"""


def writer(root, start, stop, step, **options):
    code = WRITER.format(tests=str(Path(__file__).parent))
    return subprocess.Popen([sys.executable, "-c", code, str(root), str(start), str(stop), str(step)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_two_processes_write_the_same_space_at_once(tmp_path):
    # Overlapping ranges, small steps: both also merge shards under each other's feet.
    processes = [writer(tmp_path, 0, 600, 4), writer(tmp_path, 300, 900, 4)]
    for process in processes:
        out, err = process.communicate(timeout=50)
        assert out.split() == ["ready", "done"] and "damaged" not in err, err
    texts = [f"t{i}" for i in range(900)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, vectors = Store(tmp_path).get_many(vector_keys(SETTING, texts))
    assert found.all() and np.array_equal(vectors, vectors_for(texts))


def test_a_killed_writer_leaves_nothing_half_written(tmp_path):
    pause = random.Random(0)
    for attempt in range(3):
        process = writer(tmp_path, attempt * 10_000, attempt * 10_000 + 10_000, 50)
        assert process.stdout.readline() == "ready\n"
        time.sleep(pause.uniform(0.02, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    texts = [f"t{i}" for i in range(40_000)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, vectors = Store(tmp_path).get_many(vector_keys(SETTING, texts))
    assert found.any()
    known = [text for text, hit in zip(texts, found) if hit]
    assert np.array_equal(vectors, vectors_for(known)) and len(known) % 50 == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX resource limits")
def test_full_disk_is_one_clear_error_and_loses_nothing(tmp_path):
    import resource

    store, texts = Store(tmp_path), ["a", "b"]
    keys, vectors = vector_keys(SETTING, texts), vectors_for(texts)
    store.put_many(keys, vectors)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    many = [f"t{i}" for i in range(1000)]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(CdrError, match="cannot write to the vector cache.*is intact"):
            store.put_many(vector_keys(SETTING, many), vectors_for(many))
        with pytest.raises(CdrError, match="cannot write to the cache"):
            store.put({"a": 1}, "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert np.array_equal(Store(tmp_path).get_many(keys)[1], vectors)
    assert [p.name for p in tmp_path.rglob("*.tmp*")] == []


# --- JSON results -----------------------------------------------------------------------------------------------------

def test_json_results(store):
    key = {"prompt": "hi", "n": 1}
    assert store.get(key) is None and store.get(key, "absent") == "absent"
    store.put(key, None)
    assert store.get(key, "absent") is None
    store.put({"n": 1.0, "prompt": "hi"}, {"text": "naïve ☃", "list": [1, 2.5]})
    assert Store(store.root).get(key) == {"text": "naïve ☃", "list": [1, 2.5]}


def test_json_results_are_strict(store):
    with pytest.raises(CdrError, match="NaN|nan"):
        store.put({"a": 1}, {"score": float("nan")})
    assert store.get({"a": 1}, "absent") == "absent"


@pytest.mark.parametrize("content", [b"", b'{"key": {"a": 1}, "val', b'{"key": {"a": 2}, "value": 3}', b"[]", b"\xff"])
def test_damaged_json_result_is_set_aside(store, content):
    store.put({"a": 1}, 3)
    (path,) = Path(store.root).glob("json/*/*.json")
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="damaged"):
        assert store.get({"a": 1}, "absent") == "absent"
    assert path.with_suffix(".damaged").read_bytes() == content
    store.put({"a": 1}, 4)
    assert store.get({"a": 1}) == 4


# --- speed ------------------------------------------------------------------------------------------------------------

def test_reading_100k_vectors_is_fast(store):
    rng = np.random.default_rng(0)
    texts = [f"user: message number {i} of a corpus" for i in range(100_000)]
    vectors = rng.standard_normal((100_000, 384), dtype=np.float32)
    keys = vector_keys(SETTING, texts)
    for part in np.array_split(np.arange(100_000), 25):
        store.put_many(keys[part], vectors[part])
    fresh, order = Store(store.root), rng.permutation(100_000)
    start = time.process_time()
    found, got = fresh.get_many(vector_keys(SETTING, texts)[order])
    seconds = time.process_time() - start
    assert found.all() and np.array_equal(got, vectors[order])
    assert seconds < 3, f"{seconds:.2f} s"  # about 0.4 s on an idle core
