"""`cdr d2d` from end to end, by rules and with a server, and what it refuses."""
import json

import pytest

from cdr_lib.cli import main
from cdr_lib.core.config import data_dir, read_json
from cdr_lib.d2d.simulate import read_sessions
from tests.fake_llm import FakeLLM

SHOP = ["--catalog", str(data_dir() / "sample" / "d2d" / "electronics"), "--encoder", "hash", "--quiet"]


def simulate(out, *more: str) -> int:
    return main(["d2d", "simulate", *SHOP, "--out", str(out), "--shoppers", "3", *more])


def test_what_is_printed_stands_in_files(tmp_path, capsys):
    assert simulate(tmp_path, "--method", "d2d", "bm25") == 0
    shown, sessions = capsys.readouterr().out, read_sessions(tmp_path)
    rate = sum(record["stop"] == "success" for record in sessions.select("d2d")) / 3
    assert f"| d2d | 3 | 0 | {rate:.4f} |" in shown and shown.startswith((tmp_path / "table.md").read_text()[:40])
    assert read_json(tmp_path / "manifest.json")["parameters"]["patience"] == "swapped"


def test_same_seed_same_bytes_and_a_second_call_changes_nothing(tmp_path):
    for name in ("a", "b", "a"):
        simulate(tmp_path / name)
    assert (tmp_path / "a" / "sessions.jsonl").read_bytes() == (tmp_path / "b" / "sessions.jsonl").read_bytes()


def test_other_settings_do_not_mix(tmp_path, capsys):
    simulate(tmp_path)
    before = (tmp_path / "sessions.jsonl").read_bytes()
    assert simulate(tmp_path, "--patience", "printed") == 1 and "other settings" in capsys.readouterr().err
    assert simulate(tmp_path, "--opinions", "0.5") == 1
    assert (tmp_path / "sessions.jsonl").read_bytes() == before


def answer(request: dict) -> str:
    "Whatever is asked: an object that fits the schema where there is one, else a sentence."
    schema = (request.get("response_format") or {}).get("json_schema", {}).get("schema")
    if not schema:
        return "I would like a black one."
    empty = {"string": "black", "integer": 1, "number": 0.5, "boolean": False, "array": [], "object": {}, "null": None}

    def fill(part: dict):
        part = schema["$defs"][part["$ref"].rsplit("/", 1)[-1]] if "$ref" in part else part
        part = part["anyOf"][-1] if "anyOf" in part else part
        if "enum" in part:
            return part["enum"][0]
        return {name: fill(of) for name, of in part.get("properties", {}).items()} if part.get("type") == "object" else empty[part["type"]]

    return json.dumps(fill(schema))


def test_a_server_plays_both_sides_and_its_answers_are_replayed(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-not-to-be-found")
    replay = ["--replay", str(tmp_path / "replay.jsonl"), "--model", "fake", "--max-turns", "2", "--workers", "2"]
    with FakeLLM(answer) as server:
        assert simulate(tmp_path / "a", "--method", "d2d", "full-llm", "--llm", server.base_url, *replay) == 0
        asked = len(server.requests)
    assert asked and simulate(tmp_path / "b", "--method", "d2d", "full-llm", "--llm", server.base_url, "--offline", *replay) == 0
    assert (tmp_path / "a" / "sessions.jsonl").read_bytes() == (tmp_path / "b" / "sessions.jsonl").read_bytes()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"sk-not-to-be-found" not in written


@pytest.mark.parametrize("call, says", [
    (["--method", "clairvoyant"], "clairvoyant is unknown"),
    (["--method", "full-llm"], "needs a language model"),
    (["--llm", "http://127.0.0.1:9/v1"], "--model"),
])
def test_a_wrong_call_is_one_line(tmp_path, capsys, call, says):
    assert simulate(tmp_path / "out", *call) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and not (tmp_path / "out" / "sessions.jsonl").exists()


def test_chat_ends_with_an_empty_line_or_the_end_of_input(monkeypatch, capsys):
    said = iter(["something for music", "black, please"])

    def read(prompt=""):
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert main(["d2d", "chat", *SHOP, "--method", "always"]) == 0
    assert "  1. " in capsys.readouterr().out
