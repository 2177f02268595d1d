"""Many calls to a server with a fixed latency, against the ideal for the concurrency; and a recorded run, replayed.

The ideal is the number of calls times the latency over the number under way. Client and server share this process, so what
is measured above the ideal is the client's own work and the server's. The reference of the replay is the run that it
repeats. Run alone with `python -m tests.bench llm [--quick]`, or with the others by `make bench`.
"""
import json
import tempfile
import time
from pathlib import Path

import psutil
from pydantic import BaseModel

from cdr_lib.core.llm import LLM
from tests.fake_llm import FakeLLM


class Rating(BaseModel):
    complexity: int
    informativeness: int


def bench(quick: bool = False) -> list[dict]:
    "Rows of the benchmark table."
    process, rows = psutil.Process(), []
    answer = json.dumps({"complexity": 3, "informativeness": 7})
    context = "The shopper wants a quiet kettle. " * 40
    for concurrency, latency, calls in ((8, 0.25, 64 if quick else 320), (16, 1.0, 32 if quick else 128)):
        questions = [[("system", "You rate answers."), ("user", f"{number}. {context}")] for number in range(calls)]
        ideal = calls * latency / concurrency
        with tempfile.TemporaryDirectory() as folder, FakeLLM(lambda request: answer, latency=latency) as server:
            LLM("fake", server.base_url).chat([("user", "warms up")], Rating)
            path = Path(folder, "answers.jsonl")
            with LLM("fake", server.base_url, concurrency=concurrency, cache=path, endpoint="bench") as llm:
                start = time.perf_counter()
                replies = llm.chat_many(questions, Rating, progress=False)
                took = time.perf_counter() - start
            assert all(reply.ok for reply in replies) and server.most_under_way == concurrency
            rows.append({"case": f"{calls} calls, {concurrency} under way, {latency:g} s each", "ours_s": took,
                         "reference_s": ideal,
                         "ratio": ideal / took, "target": 0.8, "peak_mib": process.memory_info().rss / 2**20,
                         "note": "reference: the ideal; target: at most 1.25 times the ideal"})
            start = time.perf_counter()
            offline = LLM("fake", endpoint="bench", cache=path, offline=True)
            replayed = offline.chat_many(questions, Rating, progress=False)
            again = time.perf_counter() - start
            assert replayed == replies and offline.usage.attempts == 0
            rows.append({"case": f"the same {calls} calls replayed", "ours_s": again, "reference_s": took, "ratio": took / again,
                         "target": 5.0, "peak_mib": process.memory_info().rss / 2**20, "note": "reference: the recorded run"})
    return rows
