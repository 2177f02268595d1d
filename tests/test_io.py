"""Strict records, streaming corpora, the account of a reading, test collections and their layouts."""

import gzip
import json
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdr_lib.core import io as core_io
from cdr_lib.core import records as core_records
from cdr_lib.core.collection import ERRORS, TASK_AREAS, WARNINGS, BadCollection, Collection
from cdr_lib.core.config import CdrError
from cdr_lib.core.conversation import ROLES, BadRecord, Conversation, Turn, render
from cdr_lib.core.io import Reader, by_id, read_jsonl, read_parquet, write_jsonl, write_parquet
from cdr_lib.core.layouts import (
    parse_turns,
    read_beir,
    read_cdr,
    read_collection,
    read_qrels,
    reads_back,
    write_beir,
    write_cdr,
    write_qrels,
)
from cdr_lib.core.records import Record, excerpt, json_items, json_lines, json_records, parse_json

settings.register_profile(
    "quiet",
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("quiet")

# Any text that UTF-8 can hold, line separators and tag-like beginnings often enough to matter.
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
    st.lists(
        st.sampled_from(
            ["user:", "assistant: ", "tool:x", "\n", "\r\n", "\u2028", "\u0085", "\x00", "a", " ", "\ufeff"]
        ),
        max_size=8,
    ).map("".join),
)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
META = st.dictionaries(TEXT, PLAIN, max_size=2)
TURN = st.builds(Turn, st.sampled_from(ROLES), TEXT, st.one_of(st.none(), TEXT), META)
CONVERSATION = st.builds(
    Conversation, TEXT.map(lambda text: "c" + text), st.lists(TURN, min_size=1, max_size=4), TEXT, META, META
)
CORPUS = st.lists(CONVERSATION, max_size=5, unique_by=lambda conversation: conversation.id)


def make(id, *texts):
    return Conversation.make(id, *(("user", text) for text in texts or ("hi",)))


def collection(**changes):
    parts = {
        "name": "demo",
        "conversations": {id: make(id) for id in ("c1", "c2")},
        "queries": {"q1": "who apologises?"},
        "qrels": {"q1": {"c1": 1}},
        "areas": {"q1": "Emotion & Feedback"},
    }
    return Collection(**{**parts, **changes})


# ---------------------------------------------------------------------------------------------------------- strict JSON


@pytest.mark.parametrize(
    "text, word",
    [
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": 1e400}', "too large"),
        ('{"a": 1, "a": 1}', "'a' occurs twice"),
        ('[{"b": {"k": 1, "k": 2}}]', "'k' occurs twice"),
        (r'"\ud83d"', "lone surrogate"),
        (r'{"\udc00": 1}', "lone surrogate"),
        ('{"a": ', "character"),
        ("", "character"),
        ('"tab\there"', "control character"),
        ("[" * 200_000, "nested too deeply"),
        ("1" * 5000, "digits"),
        ("{'a': 1}", "character 2"),
    ],
)
def test_json_is_strict(text, word):
    with pytest.raises(BadRecord, match=word):
        parse_json(text)


def test_surrogates_replaced_everywhere_and_counted():
    value, count = parse_json(r'{"\ud83dk": ["a\ude00\ud83d", {"x": "\ud83d\ude00"}]}', surrogates="replace")
    assert value == {"\ufffdk": ["a\ufffd\ufffd", {"x": "😀"}]} and count == 3


@given(st.lists(PLAIN, max_size=6), st.integers(1, 40), st.booleans(), st.sampled_from([None, 1]))
def test_array_items_equal_the_array(tmp_path, values, chunk, ascii, indent):
    path = tmp_path / "a.json"
    path.write_bytes(json.dumps(values, ensure_ascii=ascii, indent=indent).encode())
    before, core_records._CHUNK = core_records._CHUNK, chunk
    try:
        records = list(json_items(path))
    finally:
        core_records._CHUNK = before
    assert not any(record.problem for record in records)
    assert [record.value for record in records] == values


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    "data, values, lines",
    [
        (b'[1, {"a": NaN},\n"],[", {"b" 2}, [3,, 4],\n5]', [1, None, "],[", None, None, 5], [1, 1, 2, 2, 2, 3]),
        (b'[{"a": "caf\xe9"}, 7]', [None, 7], [1, 1]),
        (b"\xef\xbb\xbf [ ]\n", [], []),
        (b"[1,]", [1, None], [1, 1]),
        (b'[1, {"a": [2, "never closed', [1, None], [1, 1]),
        (b"[1] trailing", [1, None], [1, 1]),
        (b"[1 2, 3]", [None, 3], [1, 1]),
        (b'{"a": 1}', [None], [1]),
        (b"[12", [None], [1]),
        (b"[", [None], [1]),
        (b'[{"a": 1, "a": 2}, {"a": "\\ud83d"}, 3]', [None, None, 3], [1, 1, 1]),
    ],
)
def test_array_recovers_after_broken_items(tmp_path, monkeypatch, data, values, lines, chunk):
    monkeypatch.setattr(core_records, "_CHUNK", chunk)
    (tmp_path / "a.json").write_bytes(data)
    records = list(json_items(tmp_path / "a.json"))
    assert [record.value for record in records] == values
    assert [record.line for record in records] == lines
    assert all(bool(record.problem) == (record.value is None) for record in records)


def test_array_of_small_items_is_read_in_linear_time(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[" + ",\n".join(['{"k": "some short text"}'] * 200_000) + "]", encoding="utf-8")
    start = time.process_time()
    assert sum(record.line for record in json_items(path)) == 200_000 * 200_001 // 2
    assert time.process_time() - start < 20


def test_lines_end_at_newline_only(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff"a\u2028\u2029\u0085b"\r\n\n   \n"c"'.encode())
    assert [(record.line, record.value) for record in json_lines(path)] == [(1, "a\u2028\u2029\u0085b"), (4, "c")]


def test_what_is_not_a_text_file_is_named(tmp_path):
    (tmp_path / "wide.jsonl").write_text('{"a": 1}', encoding="utf-16")
    (tmp_path / "wide.json").write_text("[1]", encoding="utf-16")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:30])
    for name, word in (
        ("wide.jsonl", "UTF-16"),
        ("cut.jsonl.gz", "gzip"),
        ("none.jsonl", "no such file"),
        (".", "folder"),
    ):
        with pytest.raises(CdrError, match=word):
            list(json_records(tmp_path / name))
    with pytest.raises(CdrError, match="UTF-16"):
        list(json_items(tmp_path / "wide.json"))


def test_excerpt_shows_nothing_invisible():
    shown = excerpt("\u202eevil\u200b\x1b[2J\n\ud83d" + "x" * 200)
    assert shown.isprintable() and shown.endswith("…") and len(shown) < 150
    assert excerpt(b"ok \xff") == r"ok \xff" and excerpt("short") == "short"


# ------------------------------------------------------------------------------------------------------------- corpora


@given(CORPUS)
def test_round_trips_keep_everything(tmp_path, corpus):
    for write, read, name in (
        (write_jsonl, read_jsonl, "a.jsonl"),
        (write_jsonl, read_jsonl, "a.jsonl.gz"),
        (write_parquet, read_parquet, "a.parquet"),
    ):
        assert write(iter(corpus), tmp_path / name) == len(corpus)
        back = list(read(tmp_path / name))
        assert back == corpus
        assert [(turn.meta, turn.speaker) for item in back for turn in item.turns] == [
            (turn.meta, turn.speaker) for item in corpus for turn in item.turns
        ]


def test_parquet_has_the_stated_shape(tmp_path):
    write_parquet((make(f"c{i}") for i in range(10)), tmp_path / "a.parquet", group_rows=4)
    file = pq.ParquetFile(tmp_path / "a.parquet")
    turns = pa.list_(pa.struct([("role", pa.string()), ("text", pa.string()), ("speaker", pa.string())]))
    assert file.schema_arrow.field("turns").type == turns
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [4, 4, 2]
    assert {file.metadata.row_group(0).column(i).compression for i in range(8)} == {"ZSTD"}
    write_parquet((make(f"c{i}", "x" * 100) for i in range(6)), tmp_path / "a.parquet", group_chars=200)
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 3


def test_equal_corpora_give_equal_bytes(tmp_path):
    for write, name in ((write_jsonl, "{}.jsonl.gz"), (write_parquet, "{}.parquet")):
        for copy in "ab":
            write([make("c1", "x"), make("c2", "y")], tmp_path / name.format(copy))
            time.sleep(0.01)
        assert (tmp_path / name.format("a")).read_bytes() == (tmp_path / name.format("b")).read_bytes()


def endless(count):
    return (
        Conversation(f"c{i}", (Turn("user", f"{i} " * 150), Turn("assistant", "word " * 150, meta={"i": i})))
        for i in range(count)
    )


@pytest.mark.parametrize(
    "write, options, read, name",
    [(write_jsonl, {}, read_jsonl, "a.jsonl"), (write_parquet, {"group_rows": 500}, read_parquet, "a.parquet")],
)
def test_memory_does_not_grow_with_the_corpus(tmp_path, write, options, read, name):
    peaks = []
    for count in (1_000, 5_000):
        tracemalloc.start()
        write(endless(count), tmp_path / name, **options)
        assert sum(1 for _ in read(tmp_path / name)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # 5,000 conversations of some 1,500 characters are 7.5 MB of text alone, and were 4 MB more than 1,000 if they were held.
    assert peaks[1] < 2 * 2**20 + peaks[0], peaks


def test_ids_of_millions_fit_in_memory():
    seen = core_io._Seen()
    tracemalloc.start()
    for i in range(200_000):
        seen.add(f"conversation-{i}", i)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < 200_000 * 16 + 12 * 2**20
    assert seen.get("conversation-0") == 0 and seen.get("conversation-199999") == 199_999 and seen.get("x") is None


FOREIGN = {
    "no turns": ({"id": ["a"], "text": ["b"]}, "no column 'turns'"),
    "number id": ({"id": [1], "turns": [[{"role": "user", "text": "a"}]]}, "'id' is int64"),
    "text turns": ({"id": ["a"], "turns": [["user: a"]]}, "turns are string"),
    "no role": ({"id": ["a"], "turns": [[{"text": "a"}]]}, "turns are struct"),
}


@pytest.mark.parametrize("columns, word", FOREIGN.values(), ids=FOREIGN)
def test_foreign_parquet_is_refused_by_name(tmp_path, columns, word):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(CdrError, match=word):
        read_parquet(tmp_path / "a.parquet")


def test_bad_parquet_rows_are_collected(tmp_path):
    turn = pa.struct([("role", pa.string()), ("text", pa.string())])
    good = [{"role": "user", "text": "hi"}]
    broken_text = pa.StringArray.from_buffers(
        3, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0\4\0\0\0"), pa.py_buffer(b"a\xff\xfeb")
    )
    flat = pa.StructArray.from_arrays([pa.array(["user"] * 3), broken_text], names=["role", "text"])
    ids = ["ok", None, "no turns", "empty", "role", "meta", "meta2", "json"]
    turns = [good, good, None, [], [{"role": "bot", "text": "x"}], good, good, good]
    table = pa.table(
        {
            "id": pa.array([*ids, "a", "bytes", "b"]),
            "turns": pa.chunked_array([pa.array(turns, pa.list_(turn)), pa.ListArray.from_arrays([0, 1, 2, 3], flat)]),
            "turn_meta": pa.array([None] * 5 + [["{}", "{}"], ["[1]"], None] + [None] * 3, pa.list_(pa.string())),
            "labels": pa.array([None] * 7 + ['{"a": NaN}'] + [None] * 3),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    reader = read_parquet(tmp_path / "a.parquet", on_error="collect")
    assert [conversation.id for conversation in reader] == ["ok", "a", "b"]
    assert [reject.line for reject in reader.rejects] == [2, 3, 4, 5, 6, 7, 8, 10]
    reasons = [reject.reason for reject in reader.rejects]
    for reason, word in zip(
        reasons,
        ("id is", "no turns", "no turns", "'bot'", "2 entries for 1", "a list|not a mapping|list", "NaN", "UTF-8"),
    ):
        assert any(part in reason for part in word.split("|")), reason
    with pytest.raises(BadRecord, match="a.parquet:2"):
        list(read_parquet(tmp_path / "a.parquet"))


def test_large_text_and_damaged_parquet(tmp_path):
    turn = pa.large_list(pa.struct([("role", pa.large_string()), ("text", pa.large_string())]))
    pq.write_table(
        pa.table(
            {"id": pa.array(["a"], pa.large_string()), "turns": pa.array([[{"role": "user", "text": "x"}]], turn)}
        ),
        tmp_path / "a.parquet",
    )
    assert list(read_parquet(tmp_path / "a.parquet")) == [make("a", "x")]
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(CdrError, match="not a readable Parquet"):
        read_parquet(tmp_path / "b.parquet")


@pytest.mark.parametrize("write, name", [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet")])
@pytest.mark.parametrize(
    "meta, word",
    [
        ({"x": float("nan")}, "nan"),
        ({"x": {1: 2}}, "key is not text"),
        ({"x": {1, 2}}, "set"),
        ({"x": "\ud83d"}, "lone surrogate"),
    ],
)
def test_what_cannot_be_read_back_is_not_written(tmp_path, write, name, meta, word):
    write([make("old")], tmp_path / name)
    before = (tmp_path / name).read_bytes()
    with pytest.raises(CdrError, match=f"'new'.*{word}"):
        write([make("first"), Conversation("new", (Turn("user", "a"),), meta=meta)], tmp_path / name)
    with pytest.raises(CdrError, match="'c' occurs twice"):
        write([make("c"), make("c")], tmp_path / name)
    assert (tmp_path / name).read_bytes() == before and [path.name for path in tmp_path.iterdir()] == [name]


FILL = """
import itertools, resource, signal, sys
from cdr_lib.core.conversation import Conversation
from cdr_lib.core.io import write_jsonl, write_parquet
if sys.argv[3] == "full":  # a file may not grow beyond 64 KiB: what a full disk looks like to the writer
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
def talk():
    for i in itertools.count() if sys.argv[3] == "killed" else range(100_000):
        if i == 20_000: print("on its way", flush=True)
        yield Conversation.make(f"c{i}", ("user", f"{i * 7919 % 100003} " * 40))
(write_jsonl if sys.argv[1] == "jsonl" else write_parquet)(talk(), sys.argv[2])
"""


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_full_disk_leaves_the_old_file(tmp_path, form):
    path = tmp_path / f"a.{form}"
    path.write_text("old")
    command = [sys.executable, "-c", FILL, form, str(path), "full"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode and "CdrError" in done.stderr and "is unchanged" in done.stderr, done.stderr[-600:]
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_killed_run_leaves_the_old_file(tmp_path, form):
    path = tmp_path / f"a.{form}"
    path.write_text("old")
    running = subprocess.Popen([sys.executable, "-c", FILL, form, str(path), "killed"], stdout=subprocess.PIPE)
    assert running.stdout.readline()
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert path.read_text() == "old"


# ------------------------------------------------------------------------------------------------- the account of a reading


def test_counts_and_rejects(tmp_path):
    rows = [make("a", "x", "\u200b"), make("b", ""), make("a", "x", "\u200b"), make("b", "other")]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row.to_dict()) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(BadRecord, match=r"a\.jsonl:4.*'b'"):
        list(read_jsonl(path))
    reader = read_jsonl(path, on_error="collect")
    assert [conversation.id for conversation in reader] == ["a", "b"]
    assert reader.counts == Counter(records=4, conversations=2, turns=3, blank_turns=2, repeats=1, rejected=1)
    frame = reader.rejects.frame()
    assert (
        list(frame.columns) == ["file", "line", "id", "reason", "excerpt"]
        and frame.loc[0, "line"] == 4
        and frame.loc[0, "id"] == "b"
    )
    reader = read_jsonl(path, on_duplicate="rename")
    assert [conversation.id for conversation in reader] == ["a", "b", "b#2"] and reader.counts["renamed"] == 1


def test_equal_records_are_repeats_in_any_key_order(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"id":"a","turns":[{"role":"user","text":"x"}],"meta":{"p":1,"q":2}}\n'
        '{"meta":{"q":2,"p":1},"turns":[{"text":"x","role":"user"}],"id":"a"}\n',
        encoding="utf-8",
    )
    reader = read_jsonl(tmp_path / "a.jsonl")
    assert len(list(reader)) == 1 and reader.counts["repeats"] == 1


def test_renaming_never_collides():
    rows = [make("d", "1"), make("d", "2"), make("d#2", "3"), make("d", "2"), make("d", "4"), make("d#2", "3")]
    found, repeats = by_id(rows, on_duplicate="rename")
    assert {id: str(item) for id, item in found.items()} == {
        "d": "user: 1",
        "d#2": "user: 2",
        "d#2#2": "user: 3",
        "d#3": "user: 4",
    }
    assert repeats == 2 and found["d#3"].meta["original_id"] == "d"


def test_options_are_checked_at_once(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    for options in ({"on_error": "ignore"}, {"on_duplicate": "first"}, {"surrogates": "drop"}):
        with pytest.raises(CdrError, match="must be one of"):
            read_jsonl(tmp_path / "a.jsonl", **options)
    assert list(read_jsonl(tmp_path / "a.jsonl")) == []


def test_one_record_may_hold_many_conversations_or_none():
    records = [Record("export.json", 1, [["a", "x"], ["b", "y"]]), Record("export.json", 9, [])]
    reader = Reader(records, lambda record, counts: (make(*pair) for pair in record.value))
    assert [conversation.id for conversation in reader] == ["a", "b"] and reader.counts["records"] == 2


def test_rejects_show_hostile_text_escaped(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"id": "<img src=x onerror=alert(1)>", "turns": [], "</td>": "\u202e"}\n', encoding="utf-8"
    )
    reader = read_jsonl(tmp_path / "a.jsonl", on_error="collect")
    list(reader)
    page = reader.rejects._repr_html_()
    assert "<img" not in page and "</td>&quot;" not in page and "\u202e" not in page


# ---------------------------------------------------------------------------------------------------- test collections


@given(st.lists(st.builds(Turn, st.sampled_from(ROLES), TEXT), min_size=1, max_size=4))
def test_reads_back_is_exactly_right(turns):
    conversation = Conversation("c", tuple(turns))
    assert reads_back(conversation) == (parse_turns(render(turns)) == conversation.turns)


@pytest.mark.parametrize(
    "text, turns",
    [
        ("user: hi\nassistant: hello\nthere", [("user", "hi"), ("assistant", "hello\nthere")]),
        ("user:hi", [("user", "hi")]),
        ("user:  two spaces", [("user", " two spaces")]),
        ("user: \nassistant:", [("user", ""), ("assistant", "")]),
        ("tool: []\nsystem: be kind\nuser: a", [("tool", "[]"), ("system", "be kind"), ("user", "a")]),
        ("user: a\n user: b\nUser: c\nusers: d", [("user", "a\n user: b\nUser: c\nusers: d")]),
        ("user: a\r\nassistant: b\u2028user: c", [("user", "a\r"), ("assistant", "b\u2028user: c")]),
    ],
)
def test_parse_turns(text, turns):
    assert [(turn.role, turn.text) for turn in parse_turns(text)] == turns


@pytest.mark.parametrize("text", ["", "hello", "hello\nuser: hi", "\nuser: hi", "User: hi"])
def test_text_without_a_role_is_refused(text):
    with pytest.raises(BadRecord, match="before the first role|no turns"):
        parse_turns(text)


CHANGES = {
    "empty_corpus": ({"conversations": {}}, "no conversations"),
    "no_queries": ({"queries": {}, "qrels": {}, "areas": {}}, "no queries"),
    "not_text_id": ({"conversations": {"c1": make("c1"), 7: make("7")}}, "corpus: 1 ids are not text, first 7"),
    "id_mismatch": ({"conversations": {"c1": make("c1"), "c2": make("c3")}}, "'c2' holds the conversation 'c3'"),
    "blank_query": ({"queries": {"q1": "\u200b \ufeff"}}, "query 'q1'"),
    "no_relevant": ({"qrels": {"q1": {"c1": 0}}}, "query 'q1'"),
    "unknown_query": ({"qrels": {"q1": {"c1": 1}, "q9": {"c1": 1}}}, "'q9' is judged but not asked"),
    "dangling": ({"qrels": {"q1": {"c1": 1, "c9": 1}}}, "judges 'c9'"),
    "bad_grade": ({"qrels": {"q1": {"c1": 1, "c2": 0.5}}}, "0.5"),
    "unknown_area": ({"areas": {"q1": "Emotion and Feedback"}}, "'Emotion and Feedback' is not one of"),
    "query_without_area": ({"queries": {"q1": "a", "q2": "b"}, "qrels": {"q1": {"c1": 1}, "q2": {"c1": 1}}}, "'q2'"),
    "blank_conversation": ({"conversations": {"c1": make("c1"), "c2": make("c2", "", "\u200b")}}, "'c2'"),
}


def test_every_kind_of_problem_has_a_test():
    assert list(CHANGES) == [*ERRORS, *WARNINGS]


@pytest.mark.parametrize("kind", CHANGES)
def test_validation(kind):
    changes, detail = CHANGES[kind]
    broken = collection(**changes)
    report = broken.validate(strict=False)
    found = {problem.kind: problem.detail for problem in report.problems}
    assert detail in found[kind]
    assert report.ok == (kind in WARNINGS)
    assert set(report.frame()["kind"]) == set(found)
    if kind in ERRORS:
        with pytest.raises(BadCollection, match="refused") as error:
            broken.validate()
        assert error.value.report.problems == report.problems and detail in str(error.value)


def test_parts_of_another_shape_are_refused():
    with pytest.raises(CdrError, match="conversations must be a mapping.*by_id"):
        collection(conversations=[make("c1")])
    with pytest.raises(CdrError, match="'q1' must map"):
        collection(qrels={"q1": ["c1"]})


def test_a_sound_collection_has_no_problems():
    assert collection().validate().problems == []
    assert len(TASK_AREAS) == 5 and collection().relevant("q1") == {"c1"}


@pytest.mark.parametrize(
    "id, known, hint",
    [
        ("7", "007", "'007' is there, the same number"),
        ("7.0", "7", "'7' is there"),
        ("c1 ", "c1", "without the white space"),
        (7, "7", "the text '7' is there"),
        ("7", 7, "the number 7 is there"),
    ],
)
def test_number_against_text_ids_are_told_apart(id, known, hint):
    broken = collection(conversations={known: make(str(known))}, qrels={"q1": {id: 1}})
    assert hint in next(
        problem.detail for problem in broken.validate(strict=False).problems if problem.kind == "dangling"
    )


def test_cdr_round_trip(tmp_path):
    whole = collection(
        conversations={
            "c1": Conversation.make("c1", ("user", "a\nb"), ("assistant", ""), ("tool", " x\r")),
            "ü\u2028": make("ü\u2028"),
        }
    )
    losses = write_cdr(whole, tmp_path / "set")
    assert losses["messages"] == losses["grades"] == []
    back = read_cdr(tmp_path / "set")
    assert (back.name, back.conversations, back.queries, back.qrels, back.areas) == (
        "set",
        whole.conversations,
        whole.queries,
        whole.qrels,
        whole.areas,
    )
    # The layout as published: text, text, lists.
    assert (
        json.loads((tmp_path / "set" / "corpus.json").read_text("utf-8"))["c1"] == "user: a\nb\nassistant: \ntool:  x\r"
    )
    assert json.loads((tmp_path / "set" / "relevant_docs.json").read_text("utf-8")) == {"q1": ["c1"]}


def test_cdr_writer_refuses_what_would_not_read_back(tmp_path):
    write_cdr(collection(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    bad = collection(conversations={"c1": make("c1"), "c2": make("c2", "she said\nassistant: no")})
    with pytest.raises(CdrError, match="'c2'"):
        write_cdr(bad, tmp_path)
    with pytest.raises(CdrError, match="grades.*'q1'"):
        write_cdr(collection(qrels={"q1": {"c1": 2}}), tmp_path)
    for broken in (
        collection(queries={"q1": 5}),
        collection(qrels={"q1": {7: 1}}),
        collection(conversations={"c1": make("c2")}),
    ):
        with pytest.raises(BadCollection):
            write_cdr(broken, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    annotated = Conversation("c1", (Turn("user", "a", "Ana", {"n": 1}),), "shop", {"m": 1}, {"l": 1})
    losses = write_cdr(
        collection(conversations={"c1": annotated, "c2": bad.conversations["c2"]}, areas={}), tmp_path, on_loss="report"
    )
    assert losses == {
        "messages": ["c2"],
        "grades": [],
        "speakers": 1,
        "turn_meta": 1,
        "source": 1,
        "meta": 1,
        "labels": 1,
    }
    # Areas of the collection that stood here before are gone with it.
    assert read_cdr(tmp_path).areas == {}


def test_cdr_files_are_written_together_or_not_at_all(tmp_path, monkeypatch):
    write_cdr(collection(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    true_path, calls = core_io.atomic_path, []

    def full(path):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return true_path(path)

    monkeypatch.setattr(core_io, "atomic_path", full)
    with pytest.raises(CdrError, match="No space left"):
        write_cdr(collection(queries={"q1": "new"}), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def layout(
    folder, corpus='{"c1": "user: a", "c2": "user: b"}', queries='{"q1": "who?"}', docs='{"q1": ["c1"]}', tasks=None
):
    for name, text in (("corpus", corpus), ("queries", queries), ("relevant_docs", docs), ("tasks", tasks)):
        if text is not None:
            (folder / f"{name}.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.mark.parametrize(
    "parts, word",
    [
        ({"corpus": '{"c1": "user: a", "c1": "user: b"}'}, "'c1' stands for two different records"),
        ({"corpus": '{"c1": null}'}, "null, not text"),
        ({"corpus": '{"c1": {"role": "user"}}'}, "an object, not text"),
        ({"corpus": '{"": "user: a"}'}, "id is empty"),
        ({"corpus": '{"c1": ""}'}, "no turns"),
        ({"corpus": r'{"c1": "user: \ud83d"}'}, "lone surrogate"),
        ({"queries": '{"q1": "a", "q1": "b"}'}, "'q1' stands for two different texts"),
        ({"queries": '{"q1": ["a"]}'}, "a list, not text"),
        ({"docs": '{"q1": ["c1"], "q1": ["c2"]}'}, "two different lists"),
        ({"docs": '{"q1": "c1"}'}, "text, not a list"),
        ({"docs": '{"q1": {"c1": 1}}'}, "an object, not a list"),
        ({"docs": '{"q1": [1]}'}, "1 is a number.*number_ids='text'"),
        ({"docs": '{"q1": [true]}'}, "a truth value"),
        ({"tasks": '{"q1": 3}'}, "a number, not text"),
    ],
)
def test_cdr_bad_entries(tmp_path, parts, word):
    folder = layout(tmp_path, **parts)
    with pytest.raises(BadRecord, match=word):
        read_cdr(folder)
    found = read_cdr(folder, on_error="collect")
    assert len(found.rejects) == found.counts["rejected"] == 1


@pytest.mark.parametrize(
    "parts, word",
    [
        ({"corpus": '["user: a"]'}, "must hold a JSON object"),
        ({"corpus": '{"c1": '}, "not JSON"),
        ({"corpus": b'{"c1": "user: caf\xe9"}'}, "invalid UTF-8 at byte"),
        ({"queries": None}, "no such file"),
        ({"docs": '{"q1": [NaN]}'}, "NaN"),
    ],
)
def test_cdr_unreadable_files(tmp_path, parts, word):
    with pytest.raises(CdrError, match=word):
        read_cdr(layout(tmp_path, **parts), on_error="collect")


def test_cdr_repeats_are_counted(tmp_path):
    found = read_cdr(
        layout(
            tmp_path,
            corpus='\ufeff{"c1": "user: a", "c1": "user: a", "2": "user: b"}',
            queries='{"q1": "w", "q1": "w"}',
            docs='{"q1": ["c1", 2, "c1", "2"]}',
        ),
        number_ids="text",
    )
    assert found.qrels == {"q1": {"c1": 1, "2": 1}} and list(found.conversations) == ["c1", "2"]
    assert (found.counts["repeats"], found.counts["repeated_judgements"]) == (2, 2)
    assert found.validate().ok


@given(
    CORPUS.filter(bool), st.dictionaries(TEXT.filter(bool), TEXT.filter(str.strip), min_size=1, max_size=3), st.data()
)
def test_beir_round_trip_loses_nothing(tmp_path, corpus, queries, data):
    ids = [conversation.id for conversation in corpus]
    qrels = {
        query: data.draw(st.dictionaries(st.sampled_from(ids), st.integers(-1, 3), min_size=1)) for query in queries
    }
    areas = {query: data.draw(st.sampled_from(TASK_AREAS)) for query in queries}
    whole = Collection(tmp_path.name, {conversation.id: conversation for conversation in corpus}, queries, qrels, areas)
    if any(set(query + id) & set("\t\r\n\0") for query, grades in qrels.items() for id in grades):
        with pytest.raises(CdrError, match="cannot both stand in a table"):
            write_beir(whole, tmp_path)
        return
    write_beir(whole, tmp_path)
    back = read_beir(tmp_path)
    assert (back.conversations, back.queries, back.qrels, back.areas) == (whole.conversations, queries, qrels, areas)


def beir(
    folder,
    corpus='{"_id": "d1", "text": "user: a"}\n',
    queries='{"_id": "q1", "text": "w"}\n',
    qrels="query-id\tcorpus-id\tscore\nq1\td1\t1\n",
):
    (folder / "qrels").mkdir(exist_ok=True)
    for name, text in (("corpus.jsonl", corpus), ("queries.jsonl", queries), ("qrels/test.tsv", qrels)):
        (folder / name).write_bytes(text.encode())
    return folder


def test_foreign_beir(tmp_path):
    beir(
        tmp_path,
        corpus='{"_id": "d1", "title": "Kettles", "text": "A passage.", "metadata": {"url": "x", "labels": [1]}}\n',
        queries='{"_id": "q1", "text": "w"}\n{"_id": "q2", "text": "of another split"}\n',
        qrels="query-id\tcorpus-id\tscore\r\nq1\td1\t2\r\n\r\nq1\td1\t2\r\n",
    )
    found = read_beir(tmp_path, plain_role="user")
    assert found.conversations["d1"] == Conversation(
        "d1", (Turn("user", "A passage."),), meta={"url": "x", "labels": [1], "title": "Kettles"}
    )
    assert found.qrels == {"q1": {"d1": 2}} and list(found.queries) == ["q1"]
    assert found.counts["queries_of_other_splits"] == 1 and found.counts["repeated_judgements"] == 1
    assert read_beir(beir(tmp_path, qrels="q1\td1\t1\n")).qrels == {"q1": {"d1": 1}}


@pytest.mark.parametrize(
    "parts, word",
    [
        ({"corpus": '{"_id": 1, "text": "user: a"}\n'}, "_id is a number"),
        ({"corpus": '{"_id": "d1"}\n'}, "text is missing"),
        ({"corpus": '{"_id": "d1", "text": "user: a", "metadata": 3}\n'}, "metadata is a number"),
        (
            {
                "corpus": '{"_id": "d1", "text": "user: a", "metadata": {"cdr_lib": {"turns": [{"role": "user", "text": "b"}]}}}\n'
            },
            "disagree",
        ),
        ({"corpus": '{"_id": "d1", "text": "user: a", "metadata": {"cdr_lib": 1}}\n'}, "write_beir"),
        ({"corpus": "[]\n"}, "a list, not an object"),
        ({"queries": '{"_id": 1, "text": "w"}\n'}, "both text"),
        ({"queries": '{"_id": "q1", "text": "w"}\n{"_id": "q1", "text": "v"}\n'}, "two different texts"),
        ({"queries": '{"_id": "q1"\n'}, "queries.jsonl:1"),
        ({"qrels": "q1\td1\n"}, "test.tsv:1: 2 fields"),
        ({"qrels": "q1\td1\t0.5\n"}, "'0.5' is not a whole number"),
        ({"qrels": "q1\td1\t1\nq1\td1\t0\n"}, "test.tsv:2.*both 1 and 0"),
    ],
)
def test_beir_bad_entries(tmp_path, parts, word):
    with pytest.raises(BadRecord, match=word):
        read_beir(beir(tmp_path, **parts))
    found = read_beir(tmp_path, on_error="collect")
    assert len(found.rejects) == found.counts["rejected"] == 1


def test_trec_qrels(tmp_path):
    ir_measures = pytest.importorskip("ir_measures")
    qrels = {"q1": {"c1": 2, "c2": 0, "ü\u2028é": -1}, "q2": {"c1": 1}}
    for name in ("a.txt", "a.txt.gz"):
        write_qrels(qrels, tmp_path / name)
        assert read_qrels(tmp_path / name) == qrels
    assert gzip.decompress((tmp_path / "a.txt.gz").read_bytes()) == (tmp_path / "a.txt").read_bytes()
    write_qrels({"q1": {"c1": 2, "c2": 0}}, tmp_path / "a.txt")
    assert [tuple(row)[:3] for row in ir_measures.read_trec_qrels(str(tmp_path / "a.txt"))] == [
        ("q1", "c1", 2),
        ("q1", "c2", 0),
    ]
    for bad in ({"q 1": {"c": 1}}, {"q": {"": 1}}, {"q": {"c\t": 1}}, {"q": {"c": 0.5}}, {"q": {"c": True}}):
        with pytest.raises(CdrError):
            write_qrels(bad, tmp_path / "a.txt")
    assert read_qrels(tmp_path / "a.txt") == {"q1": {"c1": 2, "c2": 0}}


@pytest.mark.parametrize(
    "text, word",
    [
        (b"q1 0 c1\n", "a.txt:1: 3 columns"),
        (b"\nq1 0 c1 x\n", "a.txt:2.*'x'"),
        (b"q1 0 c1 1\nq1 0 c1 0\n", "both 1 and 0"),
        (b"q1 0 c\xff 1\n", "invalid UTF-8"),
    ],
)
def test_trec_bad_lines(tmp_path, text, word):
    (tmp_path / "a.txt").write_bytes(text)
    with pytest.raises(BadRecord, match=word):
        read_qrels(tmp_path / "a.txt")


def test_trec_repeats_warn(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfq1\t0  c1 1\r\n\nq1 0 c1 1\n")
    with pytest.warns(UserWarning, match="1 judgements are repeated"):
        assert read_qrels(tmp_path / "a.txt") == {"q1": {"c1": 1}}


def test_read_collection_finds_the_layout(tmp_path):
    write_cdr(collection(), tmp_path / "cdr")
    write_beir(collection(), tmp_path / "beir")
    assert read_collection(tmp_path / "cdr").conversations == read_collection(tmp_path / "beir").conversations
    write_beir(collection(), tmp_path / "cdr")
    for name, word in (
        ("cdr", "both layouts"),
        (".", "no test collection"),
        ("none", "no such folder"),
        ("cdr/corpus.json", "a file, not"),
    ):
        with pytest.raises(CdrError, match=word):
            read_collection(tmp_path / name)
