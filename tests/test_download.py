"""core.download and the way from a source's name to its conversations, against servers on this machine."""

import fcntl
import hashlib
import io
import json
import os
import re
import tarfile
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdr_lib.core import download as module
from cdr_lib.core.config import CdrError, read_json
from cdr_lib.core.download import NOTE, Remote, fetch, fetch_file, unpack
from cdr_lib.core.sources import SOURCES, download, load_source


class Server(ThreadingHTTPServer):
    """Files by path, and one misbehaviour at a time."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []  # path, range
        self.tokens: list[str | None] = []
        self.ranges = True
        self.cut = None  # bytes after which every answer ends
        self.claim = 0  # added to the length that is promised
        self.first = []  # status codes of the first answers
        self.headers = {}
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self, body=True):
        server, wanted = self.server, self.headers.get("Range")
        path = self.path.partition("?")[0]
        server.asked.append((path, wanted))
        server.tokens.append(self.headers.get("Authorization"))
        data = server.files.get(path)
        status = server.first.pop(0) if server.first else 200 if data is not None else 404
        start = int(re.match(r"bytes=(\d+)-", wanted)[1]) if wanted and server.ranges and status == 200 else 0
        if start and start >= len(data):
            status = 416
        self.send_response(206 if start and status == 200 else status)
        for name, value in server.headers.items():
            self.send_header(name, value)
        if status != 200:
            if status == 416:
                self.send_header("Content-Range", f"bytes */{len(data)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data) - start + server.claim))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if body:
            self.wfile.write(data[start:][:server.cut])
        self.close_connection = True

    def do_HEAD(self):
        self.do_GET(body=False)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = Server()
    yield made
    made.shutdown()


DATA = bytes(range(256)) * 1000
SHA = hashlib.sha256(DATA).hexdigest()


def get(server, path, sha256="", **options):
    return fetch_file(f"{server.url}/data.bin", path, sha256, **{"wait": 0.01, "progress": False, **options})


# -- One file ----------------------------------------------------------------------------------------------------------


def test_a_file_comes_whole(server, tmp_path):
    server.files["/data.bin"] = DATA
    assert get(server, tmp_path / "deep/data.bin", SHA).read_bytes() == DATA
    assert server.asked == [("/data.bin", None)] and [item.name for item in (tmp_path / "deep").iterdir()] == ["data.bin"]
    get(server, tmp_path / "deep/data.bin", SHA)
    assert len(server.asked) == 1


def test_a_cut_transfer_goes_on_and_progress_is_not_a_failure(server, tmp_path):
    server.files["/data.bin"], server.cut = DATA, 20_000
    assert get(server, tmp_path / "data.bin", SHA, attempts=2).read_bytes() == DATA
    assert [wanted for _, wanted in server.asked][:3] == [None, "bytes=20000-", "bytes=40000-"]


def test_an_earlier_part_is_used(server, tmp_path):
    server.files["/data.bin"] = DATA
    (tmp_path / "data.bin.part").write_bytes(DATA[:100])
    assert get(server, tmp_path / "data.bin", SHA).read_bytes() == DATA and server.asked == [("/data.bin", "bytes=100-")]
    # Complete but for its name.
    (tmp_path / "again.bin.part").write_bytes(DATA)
    assert get(server, tmp_path / "again.bin", SHA).read_bytes() == DATA


def test_a_server_without_ranges_sends_all_again(server, tmp_path):
    server.files["/data.bin"], server.ranges = DATA, False
    (tmp_path / "data.bin.part").write_bytes(b"x" * 100)
    assert get(server, tmp_path / "data.bin", SHA).read_bytes() == DATA


def test_a_part_of_another_file_is_found_out_by_the_hash(server, tmp_path):
    server.files["/data.bin"] = DATA
    (tmp_path / "data.bin.part").write_bytes(b"x" * 100)
    assert get(server, tmp_path / "data.bin", SHA).read_bytes() == DATA
    assert [wanted for _, wanted in server.asked] == ["bytes=100-", None]


def test_a_part_longer_than_the_file_is_thrown_away(server, tmp_path):
    server.files["/data.bin"] = DATA
    (tmp_path / "data.bin.part").write_bytes(DATA + b"more")
    assert get(server, tmp_path / "data.bin").read_bytes() == DATA


def test_a_wrong_hash_leaves_nothing(server, tmp_path):
    server.files["/data.bin"] = DATA
    with pytest.raises(CdrError, match=f"has the SHA-256 {SHA}, it should have {'0' * 64}"):
        get(server, tmp_path / "data.bin", "0" * 64)
    assert not list(tmp_path.iterdir())


def test_a_file_shorter_than_promised_is_not_taken(server, tmp_path):
    server.files["/data.bin"], server.claim, server.ranges = DATA, 10, False
    with pytest.raises(CdrError, match="256,000 of 256,010 bytes came"):
        get(server, tmp_path / "data.bin", attempts=2)
    assert [item.name for item in tmp_path.iterdir()] == ["data.bin.part"]


@pytest.mark.parametrize("code", [401, 403, 404, 410])
def test_a_refusal_is_not_repeated(server, tmp_path, code):
    server.files["/data.bin"], server.first = DATA, [code]
    with pytest.raises(CdrError, match=f"the server answers {code}"):
        get(server, tmp_path / "data.bin")
    assert len(server.asked) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_busy_server_is_asked_again(server, tmp_path, code):
    server.files["/data.bin"], server.first, server.headers = DATA, [code, code], {"Retry-After": "0"}
    assert get(server, tmp_path / "data.bin", SHA).read_bytes() == DATA and len(server.asked) == 3
    server.first = [code] * 9
    with pytest.raises(CdrError, match=rf"{code}.*\(3 attempts\)"):
        get(server, tmp_path / "other.bin", attempts=3)


def test_nobody_there(tmp_path, server):
    server.shutdown()
    server.server_close()
    with pytest.raises(CdrError, match="refused"):
        get(server, tmp_path / "data.bin", attempts=2)


def test_a_name_that_nobody_knows_is_not_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waited"))
    with pytest.raises(CdrError, match="no such server, or this machine is offline"):
        fetch_file("https://no-such-server.invalid/a.txt", tmp_path / "a.txt", progress=False)


# -- Archives ----------------------------------------------------------------------------------------------------------


def tar(path, **members):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            item = tarfile.TarInfo(name.replace("__", "/"))
            item.size = len(data)
            archive.addfile(item, io.BytesIO(data))
    return path


def test_only_members_that_fit(tmp_path):
    path = tar(tmp_path / "a.tar.gz", **{"./x__train.txt": b"a", "x__notes.md": b"b"})
    assert unpack(path, tmp_path / "out", ("x/*.txt",)) == ["x/train.txt"]
    assert (tmp_path / "out/x/train.txt").read_bytes() == b"a" and not (tmp_path / "out/x/notes.md").exists()
    with pytest.raises(CdrError, match=r"no member fits \*.csv"):
        unpack(path, tmp_path / "out", ("*.csv",))


@pytest.mark.parametrize("name", ["../evil.txt", "/etc/evil.txt", "a/../../evil.txt", "C:\\evil.txt"])
def test_members_stay_inside(tmp_path, name):
    tar(tmp_path / "a.tar", **{name: b"x"})
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"x")
    for path in ("a.tar", "a.zip"):
        with pytest.raises(CdrError, match="would leave the folder"):
            unpack(tmp_path / path, tmp_path / "deep/out")
    assert not list(tmp_path.rglob("evil.txt"))


def test_links_are_not_followed(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        item = tarfile.TarInfo("link.txt")
        item.type, item.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(item)
    with pytest.raises(CdrError, match="no member fits"):
        unpack(tmp_path / "a.tar", tmp_path / "out")


def test_bombs_and_wrecks(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_UNPACKED", 1000)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", b"0" * 600)
        archive.writestr("b.txt", b"0" * 600)
    with pytest.raises(CdrError, match="more than 1,000 bytes"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    whole = tar(tmp_path / "b.tar.gz", **{"a.txt": os.urandom(900)}).read_bytes()
    (tmp_path / "c.tar.gz").write_bytes(whole[:300])
    (tmp_path / "d.zip").write_bytes(b"PK\x03\x04 hello")
    for name in ("c.tar.gz", "d.zip"):
        with pytest.raises(CdrError, match="cannot be read"):
            unpack(tmp_path / name, tmp_path / "out")


# -- A corpus from a repository or an archive --------------------------------------------------------------------------


@pytest.fixture
def raw(server, monkeypatch):
    monkeypatch.setattr(module, "RAW", server.url)
    return server


REMOTE = Remote("repository", "me/corpus", "abc", ("train/a b.txt", "test.txt"), root="data")


def test_a_repository(raw, tmp_path):
    raw.files |= {"/me/corpus/abc/data/train/a%20b.txt": b"one", "/me/corpus/abc/data/test.txt": b"two"}
    folder = fetch(REMOTE, tmp_path / "corpus", progress=False)
    assert (folder / "train/a b.txt").read_bytes() == b"one" and (folder / "test.txt").read_bytes() == b"two"
    note = read_json(folder / NOTE)
    assert (note["kind"], note["id"], note["revision"]) == ("repository", "me/corpus", "abc")
    assert note["files"]["test.txt"] == hashlib.sha256(b"two").hexdigest()
    assert [item.name for item in tmp_path.iterdir()] == ["corpus"]


def test_an_interrupted_corpus_goes_on(raw, tmp_path):
    raw.files["/me/corpus/abc/data/train/a%20b.txt"] = b"one"
    with pytest.raises(CdrError, match="404"):
        fetch(REMOTE, tmp_path / "corpus", progress=False)
    assert [item.name for item in tmp_path.iterdir()] == ["corpus.abc.part"]
    raw.files["/me/corpus/abc/data/test.txt"] = b"two"
    fetch(REMOTE, tmp_path / "corpus", progress=False)
    assert [path for path, _ in raw.asked].count("/me/corpus/abc/data/train/a%20b.txt") == 1
    # What was fetched of another revision is no half of this one.
    raw.files |= {"/me/corpus/def/data/train/a%20b.txt": b"three", "/me/corpus/def/data/test.txt": b"four"}
    (tmp_path / "corpus.abc.part").mkdir()
    other = fetch(replace(REMOTE, revision="def"), tmp_path / "other", progress=False)
    assert (other / "test.txt").read_bytes() == b"four"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["corpus", "corpus.abc.part", "other"]


def test_a_folder_that_is_there_is_used(raw, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "test.txt").write_text("my own copy")
    assert fetch(REMOTE, mine) == mine and not raw.asked
    (mine / NOTE).write_text(json.dumps({"revision": "abc", "id": "me/corpus"}))
    assert fetch(REMOTE, mine) == mine
    with pytest.raises(CdrError, match="holds revision abc of me/corpus, wanted is def"):
        fetch(replace(REMOTE, revision="def"), mine)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CdrError, match="is a file, not a folder"):
        fetch(REMOTE, tmp_path / "file")


def test_two_processes_do_not_build_in_one_folder(raw, tmp_path):
    part = tmp_path / "corpus.abc.part"
    part.mkdir()
    handle = os.open(part, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(CdrError, match="another process is downloading"):
            fetch(REMOTE, tmp_path / "corpus")
    finally:
        os.close(handle)


def test_an_archive(server, tmp_path):
    data = tar(tmp_path / "made.tar.gz", x__train__a=b"1").read_bytes()
    server.files["/v1.tar.gz"] = data
    address = f"{server.url}/v1.tar.gz"
    remote = Remote("archive", address, "v1", ("x/*",), {address: hashlib.sha256(data).hexdigest()})
    folder = fetch(remote, tmp_path / "corpus", progress=False)
    assert (folder / "x/train/a").read_bytes() == b"1" and sorted(item.name for item in folder.iterdir()) == [NOTE, "x"]


# -- A corpus from the hub ---------------------------------------------------------------------------------------------

HUB = Remote("hub", "me/chats", "a" * 40, ("data/*.parquet",), gated=True)


@pytest.fixture
def hub(server, monkeypatch):
    """A hub with one data set, as its client sees it."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    table = io.BytesIO()
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": "Hi"}]], "source": ["x"]}), table)
    server.files = {f"/datasets/me/chats/resolve/{'a' * 40}/data/train-00000-of-00001.parquet": table.getvalue(),
                    f"/datasets/me/chats/resolve/{'a' * 40}/README.md": b"hello"}
    names = [{"rfilename": path.split("a" * 40 + "/")[1]} for path in server.files]
    info = {"_id": "1", "id": "me/chats", "sha": "a" * 40, "private": False, "gated": "auto", "tags": [], "siblings": names}
    for path in ("", f"/revision/{'a' * 40}"):
        server.files[f"/api/datasets/me/chats{path}"] = json.dumps(info).encode()
    tree = [{"type": "file", "path": name["rfilename"], "size": 5, "oid": "1"} for name in names]
    server.files[f"/api/datasets/me/chats/tree/{'a' * 40}"] = json.dumps(tree).encode()
    server.headers = {"X-Repo-Commit": "a" * 40}
    return server


def test_the_hub(hub, tmp_path):
    folder = fetch(HUB, tmp_path / "chats", progress=False)
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()) == [
        "data/train-00000-of-00001.parquet", NOTE]
    assert set(hub.tokens) == {None}
    conversation, = load_source("smoltalk", folder)
    assert conversation.turns[0].text == "Hi"


def test_the_token_comes_from_the_environment_alone(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(HUB, tmp_path / "chats", progress=False)
    assert set(hub.tokens) == {"Bearer hf_secret"}


@pytest.mark.parametrize("code, kind", [(401, "GatedRepo"), (403, "GatedRepo"), (401, "RepoNotFound")])
def test_gated_data_name_the_page_to_accept_them(hub, tmp_path, code, kind):
    hub.first, hub.headers = [code] * 9, {"X-Error-Code": kind}
    with pytest.raises(CdrError, match="huggingface.co/datasets/me/chats asks you to log in and accept.*HF_TOKEN"):
        fetch(HUB, tmp_path / "chats", progress=False)
    assert not (tmp_path / "chats").exists()


def test_a_file_that_did_not_come_is_missed(hub, tmp_path):
    hub.files.pop(f"/datasets/me/chats/resolve/{'a' * 40}/data/train-00000-of-00001.parquet")
    with pytest.raises(CdrError):
        fetch(HUB, tmp_path / "chats", progress=False)
    assert not (tmp_path / "chats").exists()


def test_no_file_fits(hub, tmp_path):
    with pytest.raises(CdrError, match=r"holds no file that fits \*.csv"):
        fetch(replace(HUB, files=("*.csv",)), tmp_path / "chats", progress=False)


def test_a_wrong_hash_on_the_hub(hub, tmp_path):
    remote = replace(HUB, sha256={"data/train-00000-of-00001.parquet": "0" * 64})
    with pytest.raises(CdrError, match="was thrown away"):
        fetch(remote, tmp_path / "chats", progress=False)


# -- Sources by name ---------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CDR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CDR_DATA", raising=False)
    return tmp_path / "cache"


def test_offline_names_address_licence_and_the_way_out(cache, server, monkeypatch):
    server.shutdown()
    server.server_close()
    monkeypatch.setattr(module, "RAW", server.url)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(CdrError) as error:
        download("dialogsum", progress=False)
    for word in ("DialogSum was not downloaded", "github.com/cylnlp/dialogsum", "CC BY-NC-SA 4.0", "path=", "CDR_DATA"):
        assert word in str(error.value)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    with pytest.raises(CdrError) as error:
        download("lmsys", progress=False)
    for word in ("LMSYS-Chat-1M was not downloaded", "huggingface.co/datasets/lmsys", "License Agreement", "path="):
        assert word in str(error.value)


def test_hub_offline_mode_is_an_error_of_ours(cache, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CdrError, match="SmolTalk was not downloaded.*offline"):
        download("smoltalk", progress=False)


SAMPLES = {
    "sgd": ("test/dialogues_001.json", [{"dialogue_id": "1_0", "services": [], "turns": [
        {"speaker": "USER", "utterance": "Hi", "frames": []}]}]),
    "multiwoz": ("dev/dialogues_001.json", [{"dialogue_id": "S.json", "services": [], "turns": [
        {"speaker": "USER", "utterance": "Hi", "frames": [], "turn_id": "0"}]}]),
    "dialogsum": ("dialogsum.dev.jsonl", {"fname": "dev_0", "dialogue": "#Person1#: Hi"}),
    "mt-bench-101": ("mtbench101.jsonl", {"id": 1, "task": "GR", "history": [{"user": "Hi"}]}),
    "tau-bench": ("gpt-4o-airline.json", [{"task_id": 0, "trial": 0, "traj": [{"role": "user", "content": "Hi"}]}]),
    "dstc11-track5": ("val/logs.json", [[{"speaker": "U", "text": "Hi"}]]),
    "opendialkg": ("opendialkg.csv",
                   'Messages\n"[{""type"": ""chat"", ""sender"": ""user"", ""message"": ""Hi""}]"\n'),
    "xdailydialog": ("dialogues_text_En.txt", "Hi __eou__\n"),
    "synthetic-persona-chat": ("Synthetic-Persona-Chat_test.csv",
                               "user 1 personas,user 2 personas,Best Generated Conversation\na,b,User 1: Hi\n"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_downloaded_can_be_read_by_name(raw, cache, monkeypatch, name):
    """Each repository source: the published layout, fetched under the address of its revision, fits its reader."""
    source = SOURCES[name]
    path, content = SAMPLES[name]
    assert path in source.remote.files
    remote = replace(source.remote, files=(path,), sha256={})
    monkeypatch.setitem(SOURCES, name, replace(source, remote=remote))
    data = content if isinstance(content, str) else json.dumps(content)
    root = f"{remote.root}/" if remote.root else ""
    raw.files[f"/{remote.id}/{remote.revision}/{root}{path}"] = data.encode()
    with pytest.raises(CdrError, match=f"download\\('{name}'\\)"):
        load_source(name)
    assert download(name, progress=False) == cache / "corpora" / name
    conversation, = load_source(name)
    assert conversation.turns[0].text == "Hi"


@pytest.mark.parametrize(
    "name, member, content",
    [
        ("bot-adversarial", "bot_adversarial_dialogue_datasets_with_persona/test.txt",
         "text:Hi\tlabels:__ok__\tepisode_done:True\tspeaker_to_eval:human\n"),
        ("dailydialog", "valid.json", '{"fold": "validation", "topic": "x", "dialogue": [{"text": "Hi"}]}\n'),
        ("dailydialog", "dailydialog/valid.json", '{"fold": "validation", "topic": "x", "dialogue": [{"text": "Hi"}]}\n'),
    ],
)
def test_archives_can_be_read_by_name(server, cache, tmp_path, monkeypatch, name, member, content):
    server.files["/a.tar.gz"] = tar(tmp_path / "a.tar.gz", **{member: content.encode()}).read_bytes()
    remote = replace(SOURCES[name].remote, id=f"{server.url}/a.tar.gz", sha256={})
    monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], remote=remote))
    download(name, progress=False)
    conversation, = load_source(name)
    assert conversation.turns[0].text == "Hi"


def test_a_path_wins_then_cdr_data_then_the_download(cache, tmp_path, monkeypatch):
    def corpus(folder, text):
        folder.mkdir(parents=True)
        row = {"id": 1, "task": "GR", "history": [{"user": text}]}
        (folder / "mtbench101.jsonl").write_text(json.dumps(row))
        return folder

    corpus(cache / "corpora/mt-bench-101", "downloaded")
    assert next(load_source("mt-bench-101")).turns[0].text == "downloaded"
    corpus(tmp_path / "data/mt-bench-101", "under CDR_DATA")
    monkeypatch.setenv("CDR_DATA", str(tmp_path / "data"))
    assert next(load_source("mt-bench-101")).turns[0].text == "under CDR_DATA"
    given = corpus(tmp_path / "mine", "given")
    assert next(load_source("mt-bench-101", given)).turns[0].text == "given"


def test_formats_are_not_downloaded():
    for name, word in (("sharegpt", "a format"), ("dialogstudio", "not published as one corpus"), ("nothing", "unknown")):
        with pytest.raises(CdrError, match=word):
            download(name)
