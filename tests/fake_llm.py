"""A chat server that speaks OpenAI's protocol and answers as it is told: slowly, wrongly, with any status, or not to the end.

    with FakeLLM(["Hello.", {"status": 429, "headers": {"retry-after": "1"}}, {"content": None, "refusal": "No."}]) as server:
        LLM("fake", base_url=server.base_url)

The script is a list, played in the order of the requests, or a function of the request's body. An entry is the text of an
answer, or a mapping of these fields, all optional:

    content, refusal, finish_reason, usage     of an ordinary answer; usage None leaves it out
    message, choices                           in their place, as they are
    body                                       the whole body, bytes or JSON data
    status, error, headers                     of the response; error is the mapping under "error"
    latency                                    seconds, for this answer
    drop                                       "before" the response or in the "middle" of its body the connection ends
"""
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def words(text: str | None) -> int:
    "What this server calls tokens."
    return len((text or "").split())


def completion(entry: Mapping, request: Mapping) -> dict:
    "The body of a chat completion from an entry of the script."
    message = entry.get("message", {"role": "assistant", "content": entry.get("content"), "refusal": entry.get("refusal")})
    prompt = sum(words(str(item.get("content") or "")) for item in request.get("messages", []))
    counts = {"prompt_tokens": prompt, "completion_tokens": words(entry.get("content"))}
    usage = entry.get("usage", {**counts, "total_tokens": sum(counts.values())})
    choices = entry.get("choices", [{"index": 0, "message": message, "finish_reason": entry.get("finish_reason", "stop")}])
    body = {"id": "fake", "object": "chat.completion", "created": 0, "model": request.get("model"), "choices": choices}
    return body if usage is None else {**body, "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave together

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        fake: FakeLLM = self.server.fake  # type: ignore[attr-defined]
        if fake.stopped:  # also for connections that are still open
            self.close_connection = True
            return
        with fake.counting(json.loads(data), {name.lower(): value for name, value in self.headers.items()}) as (request, entry):
            time.sleep(entry.get("latency", fake.latency))
            self.answer(entry, request)

    def answer(self, entry: Mapping, request: Mapping) -> None:
        status = entry.get("status", 200)
        body = entry["body"] if "body" in entry else completion(entry, request) if status == 200 else {
            "error": {"message": "as the script says", "type": None, "code": None, **entry.get("error", {})}}
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        if entry.get("drop") == "before":
            self.close_connection = True
            return
        self.send_response(status)
        head = {"content-type": "application/json", "content-length": str(len(payload)), **entry.get("headers", {})}
        for name, value in head.items():
            self.send_header(name, value)
        self.end_headers()
        if entry.get("drop") == "middle":
            payload, self.close_connection = payload[:len(payload) // 2], True
        self.wfile.write(payload)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away in the middle of an answer


class _Counting:
    def __init__(self, fake: "FakeLLM", request: dict, headers: dict):
        self.fake, self.request, self.headers = fake, request, headers

    def __enter__(self) -> tuple[dict, Mapping]:
        with self.fake.lock:
            self.fake.under_way += 1
            self.fake.most_under_way = max(self.fake.most_under_way, self.fake.under_way)
            number = len(self.fake.requests)
            self.fake.requests.append(self.request)
            self.fake.headers.append(self.headers)
        return self.request, self.fake.entry(number, self.request)

    def __exit__(self, *error: Any) -> None:
        with self.fake.lock:
            self.fake.under_way -= 1


class FakeLLM:
    "The server, while its block lasts."

    def __init__(
        self,
        script: Sequence[str | Mapping] | Callable[[dict], str | Mapping],
        latency: float = 0.0,  # seconds for every answer
    ):
        self.script, self.latency = script, latency
        self.requests: list[dict] = []  # bodies, in the order in which they came
        self.headers: list[dict] = []  # names in lower case
        self.lock, self.under_way, self.most_under_way = threading.Lock(), 0, 0
        self.stopped = False

    def counting(self, request: dict, headers: dict) -> _Counting:
        return _Counting(self, request, headers)

    def entry(self, number: int, request: dict) -> Mapping:
        if callable(self.script):
            entry = self.script(request)
        elif number < len(self.script):
            entry = self.script[number]
        else:
            entry = {"status": 418, "error": {"message": f"request {number + 1}, but the script has {len(self.script)} answers"}}
        return {"content": entry} if isinstance(entry, str) else entry

    def __enter__(self) -> "FakeLLM":
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.fake = self  # type: ignore[attr-defined]
        self.base_url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stopped = True
        self._server.shutdown()
        self._server.server_close()
