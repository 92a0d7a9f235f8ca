"""Downloads go on where they stopped, are checked, and say clearly what is wrong."""

import hashlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest

from affinage.data import downloads
from affinage.data.collect import collect
from affinage.data.documents import read_documents
from affinage.data.downloads import cached, cached_path
from affinage.errors import UserError
from affinage.recipe.data import DataSettings

CONTENT = b"".join(json.dumps({"text": f"line {i} of many {i * 7919}"}).encode() + b"\n" for i in range(3_000))
SHA = hashlib.sha256(CONTENT).hexdigest()


class Server:
    """A file behind HTTP, with the faults that networks have."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.etag = '"one"'
        self.cuts: list[int] = []  # bytes after which each of the next answers breaks off
        self.ranges = True
        self.status = 200
        self.asked: list[str | None] = []  # the Range of every request
        handler = self._handler()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/corpus/lines.jsonl"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self._answer(body=False)

            def do_GET(self):
                server.asked.append(self.headers.get("Range"))
                self._answer(body=True)

            def _answer(self, body):
                if server.status != 200:
                    self.send_error(server.status)
                    return
                start, content = 0, server.content
                wanted = self.headers.get("Range")
                if wanted and server.ranges and self.headers.get("If-Range") == server.etag:
                    start = int(wanted.removeprefix("bytes=").partition("-")[0])
                    if start >= len(content):
                        self.send_error(416)
                        return
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(content) - start))
                self.send_header("ETag", server.etag)
                self.end_headers()
                if body:
                    cut = server.cuts.pop(0) if server.cuts else len(content)
                    self.wfile.write(content[start : start + cut])

            def log_message(self, *_):
                pass

        return Handler


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv(downloads.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(downloads, "_PAUSE", 0.0)
    monkeypatch.setattr(downloads, "_CHUNK_BYTES", 1_000)
    served = Server()
    yield served
    served.close()


def test_a_download_that_breaks_off_goes_on(server):
    server.cuts = [50_000, 20_000]
    assert cached(server.url, SHA).read_bytes() == CONTENT
    assert server.asked[0] is None and len(server.asked) == 3
    assert all(asked and asked.startswith("bytes=") for asked in server.asked[1:])
    assert cached(server.url, SHA).read_bytes() == CONTENT and len(server.asked) == 3, "fetched once"
    assert sorted(path.suffix for path in cached_path(server.url).parent.iterdir()) == [".json", ".jsonl", ".lock"]


def test_the_next_run_goes_on(server):
    server.cuts = [50_000] + [0] * 10
    with pytest.raises(UserError, match=r"ended after 50000 of 114482 bytes; 0.1 MB are kept"):
        cached(server.url, SHA)
    assert not cached_path(server.url).exists()
    server.cuts, server.asked = [], []
    assert cached(server.url, SHA).read_bytes() == CONTENT
    assert server.asked == ["bytes=50000-"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_that_changed_in_between_is_fetched_whole(server, ranges):
    server.cuts = [50_000] + [0] * 10
    with pytest.raises(UserError):
        cached(server.url)
    server.cuts, server.etag, server.ranges = [], '"two"', ranges
    server.content = CONTENT[::-1]
    assert cached(server.url).read_bytes() == CONTENT[::-1]


def test_a_wrong_hash_is_refused_and_not_kept(server):
    with pytest.raises(UserError, match=rf"SHA-256 is {SHA}, not {'0' * 64}"):
        cached(server.url, "0" * 64)
    assert not cached_path(server.url).exists()
    cached(server.url)
    with pytest.raises(UserError, match=r"not the one asked for"):
        cached(server.url, "0" * 64)


def test_a_file_that_ends_early_is_never_taken_for_whole(server):
    server.cuts = [len(CONTENT) - 1] + [0] * 10
    with pytest.raises(UserError, match=rf"after {len(CONTENT) - 1} of {len(CONTENT)} bytes|connection broke"):
        cached(server.url)
    assert not cached_path(server.url).exists()


@pytest.mark.parametrize(("status", "said"), [(404, "404"), (403, "allowed"), (503, "503")])
def test_what_the_server_refuses(server, status, said):
    server.status = status
    with pytest.raises(UserError) as error:
        cached(server.url)
    assert said in str(error.value) and server.url in str(error.value)


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv(downloads.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(downloads, "_PAUSE", 0.0)
    with pytest.raises(UserError, match=r"cannot download .*nowhere.invalid") as error:
        cached("http://nowhere.invalid/a.jsonl")
    assert "Is there a network?" in error.value.fix


@pytest.mark.parametrize("answer", [b"", b"no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_a_server_that_hangs_up_before_it_answers_is_asked_again(tmp_path, monkeypatch, answer):
    monkeypatch.setenv("AFFINAGE_CACHE", str(tmp_path))
    monkeypatch.setattr(downloads, "_PAUSE", 0.001)
    asked = []

    def serve(listening):
        while len(asked) < downloads._ATTEMPTS:
            connection, _ = listening.accept()
            asked.append(connection.recv(10_000))
            connection.sendall(answer)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/lines.jsonl"
        with pytest.raises(UserError, match="cannot download") as error:
            cached(url)
    assert len(asked) == downloads._ATTEMPTS
    assert "disk" not in str(error.value) and not cached_path(url).exists()


def test_from_an_object_store(tmp_path, monkeypatch):
    monkeypatch.setenv(downloads.CACHE_VARIABLE, str(tmp_path))
    store = fsspec.filesystem("memory")
    store.pipe("/bucket/a.jsonl", CONTENT)
    path = cached_path("memory://bucket/a.jsonl")
    path.parent.mkdir(parents=True)
    path.with_name("a.jsonl.part").write_bytes(CONTENT[:1_000])
    path.with_name("a.jsonl.json").write_text(json.dumps({"mark": str(len(CONTENT))}))
    assert cached("memory://bucket/a.jsonl", SHA).read_bytes() == CONTENT
    with pytest.raises(UserError, match=r"there is no file"):
        cached("memory://bucket/b.jsonl")


def test_a_recipe_reads_a_web_address(server, tmp_path):
    source = {"path": server.url, "sha256": SHA, "name": "web"}
    summary = collect(DataSettings(sources=[source]), tmp_path / "one")
    assert summary["documents_out"] == 3_000
    server.close()
    again = collect(DataSettings(sources=[source]), tmp_path / "two")
    assert again["documents_out"] == 3_000, "from the cache, without a network"
    assert next(iter(read_documents(tmp_path / "one"))) == next(iter(read_documents(tmp_path / "two")))


def test_a_web_address_that_is_not_there(server, tmp_path):
    server.status = 404
    with pytest.raises(UserError, match=r"cannot reach .*lines.jsonl"):
        collect(DataSettings(sources=[server.url]), tmp_path / "one")
