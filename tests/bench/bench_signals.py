"""What is computed about each conversation: signals and rules beside datatrove's filters, then language, personal data, quality.

Run alone with `python tests/bench/bench_signals.py [--quick]`, or with the others by `make bench`. datatrove runs in the
environment of the peers (see bench_dedup.py). Everything is counted in CPU seconds, so that the rows are per core.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def peer_main(given: str, answer: str) -> None:
    "datatrove's Gopher filters, in its own environment: repetition and quality, as its pipelines chain them."
    from datatrove.data import Document
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter

    texts = json.loads(Path(given).read_text(encoding="utf-8"))
    # Each text goes through both filters; each stops at the first limit that is broken. The tokenizer is loaded before.
    filters = [GopherRepetitionFilter(), GopherQualityFilter(min_doc_words=1, min_stop_words=0)]
    list(map(filters[0].filter, [Document(text="one two three", id="0")] * 2))
    start = time.process_time()
    kept = [
        min(each.filter(Document(text=text, id=str(number))) is True for each in filters)
        for number, text in enumerate(texts)
    ]
    Path(answer).write_text(json.dumps({"seconds": time.process_time() - start, "kept": sum(kept)}))


def datatrove(texts: list[str]) -> dict:  # seconds and kept; or error
    from tests.bench.bench_dedup import environment

    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder, "given.json"), Path(folder, "answer.json")
        given.write_text(json.dumps(texts), encoding="utf-8")
        try:
            ran = subprocess.run(
                [environment(), __file__, "--peer", given, answer],
                capture_output=True,
                text=True,
                timeout=1800,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return {"error": f"datatrove could not be installed or run here: {type(error).__name__}"}
        if ran.returncode or not answer.is_file():
            return {"error": f"datatrove failed: {(ran.stderr.strip().splitlines() or ['?'])[-1][:150]}"}
        return json.loads(answer.read_text())


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    import numpy as np
    from threadpoolctl import threadpool_limits

    from cdr_lib.core.conversation import Conversation, render
    from cdr_lib.curation.dirty import dirty_corpus
    from cdr_lib.curation.language import detect_conversations
    from cdr_lib.curation.pii import redact
    from cdr_lib.curation.quality import load_quality
    from cdr_lib.curation.signals import judge, signals

    n, few = (1_000, 200) if quick else (50_000, 3_000)
    chats = list(dirty_corpus(n))
    chars = sum(len(turn.text) for chat in chats for turn in chat.turns) / n
    model = load_quality()
    rows = []

    def timed(work, count: int) -> float:
        with threadpool_limits(1):
            work(chats[:100])  # tables and models are loaded before
            start = time.process_time()
            work(chats[:count])
            return time.process_time() - start

    def row(
        case: str, seconds: float, count: int, note: str, reference: float | None = None, target: float | None = None
    ) -> dict:
        return {
            "case": case,
            "ours_s": seconds,
            "reference_s": reference,
            "ratio": reference / seconds if reference else None,
            "target": target,
            "peak_mib": None,
            "note": f"{count / seconds:,.0f} conversations a second and core; {note}",
        }

    seconds = timed(lambda part: judge(signals(part)), n)
    peer = datatrove([render(chat.turns, "text") for chat in chats[:few]])
    reference = peer["seconds"] / few * n if "seconds" in peer else None
    said = (
        peer.get("error")
        or f"datatrove's two Gopher filters, {few:,} timed and scaled: {few / peer['seconds']:,.0f} a second"
    )
    rows.append(
        row(
            f"signals and rules, {n:,} conversations of {chars:.0f} characters",
            seconds,
            n,
            said,
            reference,
            None if quick or reference is None else 1.0,
        )
    )
    assert quick or n / seconds >= 20_000 or reference / seconds >= 1, "slower than promised"

    count = min(n, 5_000)
    rows.append(
        row(
            f"language, {count:,} conversations",
            timed(detect_conversations, count),
            count,
            "no peer here; see nbs/curation/06_language",
        )
    )
    rows.append(
        row(
            f"personal data replaced, {count:,} conversations",
            timed(lambda part: [redact(chat) for chat in part], count),
            count,
            "no peer here",
        )
    )
    rows.append(
        row(f"quality, offline model, {count:,} conversations", timed(model.scores, count), count, "no peer here")
    )

    start = time.process_time()
    found = signals([Conversation.make("long", ("user", "one two three " * 71_429))])
    rows.append(
        {
            "case": "signals of one turn of a million characters",
            "ours_s": time.process_time() - start,
            "reference_s": None,
            "ratio": None,
            "target": None,
            "peak_mib": None,
            "note": "",
        }
    )
    assert all(np.isfinite(column).all() for column in found.values())
    return rows


if __name__ == "__main__":
    if "--peer" in sys.argv:
        peer_main(*sys.argv[-2:])
    else:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from tests.bench.__main__ import markdown

        print(markdown(bench("--quick" in sys.argv)))
