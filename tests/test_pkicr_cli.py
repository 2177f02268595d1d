"""`cdr pkicr` from end to end, and what it refuses."""
import json

import pytest

from cdr_lib.cli import main
from cdr_lib.core.config import data_dir, read_json
from cdr_lib.pkicr.focus import GroundedSet, read_grounded, write_grounded

SAMPLE = data_dir() / "sample" / "focus"
WORDS = ["--knowledge", "tfidf", "--persona", "tfidf", "--quiet"]


@pytest.fixture(scope="module")
def turns(tmp_path_factory):
    path = tmp_path_factory.mktemp("turns") / "turns.jsonl"
    write_grounded(GroundedSet("turns", read_grounded(SAMPLE / "test.json").turns[:15]), path)
    return path


@pytest.fixture(scope="module")
def grounded(turns, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "grounded"
    assert main(["pkicr", "ground", str(turns), "--out", str(out), *WORDS]) == 0
    return out


def test_ground_writes_every_number_that_it_prints(grounded, turns):
    rows = {row["measure"]: row for row in read_json(grounded / "metrics.json")}
    assert rows["knowledge accuracy"]["turns"] == 15 and 0 <= rows["knowledge accuracy"]["value"] <= 1
    found = [json.loads(line) for line in (grounded / "grounding.jsonl").read_text().splitlines()]
    right = sum(row["knowledge"]["index"] in turn.gold_knowledge for row, turn in zip(found, read_grounded(turns)))
    assert rows["knowledge accuracy"]["value"] == pytest.approx(right / 15)
    [first, *_] = read_json(grounded / "submission.json")
    assert [sorted(turn) for turn in next(iter(first.values()))] == [["kg", "pg"]] * 5
    manifest = read_json(grounded / "manifest.json")
    assert manifest["parameters"]["knowledge"] == "tfidf" and manifest["threshold"] == 0.5


def test_a_second_call_finds_the_scores(grounded, turns):
    before = (grounded / "persona.parquet").stat().st_mtime_ns
    assert main(["pkicr", "ground", str(turns), "--out", str(grounded), *WORDS]) == 0
    assert (grounded / "persona.parquet").stat().st_mtime_ns == before


def test_ranks_of_one_and_of_two_models(grounded, turns, tmp_path, capsys):
    out = tmp_path / "other"
    main(["pkicr", "ground", str(turns), "--out", str(out), "--knowledge", "tfidf", "--persona", "bm25", "--threshold", "1",
          "--quiet"])
    capsys.readouterr()
    assert main(["pkicr", "nrt", str(turns), str(grounded), "--after", str(out), "--out", str(tmp_path / "nrt.json")]) == 0
    shown, kept = capsys.readouterr().out, read_json(tmp_path / "nrt.json")
    value = next(row["value"] for row in kept["tests"][0]["estimates"] if (row["scope"], row["measure"]) == ("all", "¬T"))
    assert f"{value:.4f}" in shown and len(kept["tests"]) == 2


def test_finetune_chooses_a_threshold_on_other_turns(turns, tmp_path, capsys):
    few = tmp_path / "few.jsonl"
    write_grounded(GroundedSet("few", read_grounded(SAMPLE / "train.json").turns[:10]), few)
    call = ["pkicr", "finetune", str(few), "--kind", "bi", "--out", str(tmp_path / "model"), "--epochs", "1", "--frozen", "5",
            "--max-length", "64", "--valid", str(turns), "--knowledge", "tfidf", "--quiet"]
    assert main(call) == 0
    shown = capsys.readouterr().out
    assert "50 pairs" in shown and "threshold for flag_accuracy on 15 validation turns" in shown
    assert (tmp_path / "model" / "training.json").is_file() and not list(tmp_path.rglob("*.bin"))
    assert main(["pkicr", "ground", str(turns), "--out", str(tmp_path / "out"), "--knowledge", "tfidf", "--persona",
                 f"bi:{tmp_path / 'model'}", "--quiet"]) == 0


@pytest.mark.parametrize("call, words", [
    (["ground", "nowhere.json", "--out", "{out}"], "nowhere.json"),
    (["ground", "{turns}", "--out", "{out}", "--persona", "magic:model"], "unknown"),
    (["ground", "{turns}", "--out", "{out}", "--knowledge", "tfidf", "--persona", "bm25"], "threshold"),
    (["nrt", "{turns}", "{out}/nothing"], "nothing"),
    (["finetune", "{turns}", "--out", "{out}/m", "--kind", "bi", "--epochs", "0"], "epochs"),
])
def test_errors_are_one_line_and_exit_with_1(call, words, turns, tmp_path, capsys):
    call = [part.format(turns=turns, out=tmp_path) for part in call]
    assert main(["pkicr", *call, "--quiet"]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("cdr: ") and words in last


def test_a_wrong_call_exits_with_2():
    for call in (["pkicr"], ["pkicr", "gruond"], ["pkicr", "ground", "x", "--out", "y", "--pool", "median"]):
        with pytest.raises(SystemExit) as stop:
            main(call)
        assert stop.value.code == 2
