"""Downloads go on where they stopped, are checked, and say clearly what is wrong."""

import hashlib
import json
import socket
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest

from affinage.data import downloads
from affinage.data.downloads import CACHE_VARIABLE, cached_path
from affinage.errors import UserError
from source_forms import collected

CONTENT = b"".join(json.dumps({"text": f"line {i} of many {i * 7919}"}).encode() + b"\n" for i in range(3_000))
SHA = hashlib.sha256(CONTENT).hexdigest()
cached = partial(downloads.cached, pause=0.001)


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


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def server():
    served = Server()
    yield served
    served.close()


def refused(*arguments) -> UserError:
    with pytest.raises(UserError) as error:
        cached(*arguments)
    return error.value


def test_a_download_that_breaks_off_goes_on(server):
    server.cuts = [50_000, 20_000]
    assert cached(server.url, SHA).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=50000-", "bytes=70000-"]
    assert cached(server.url, SHA).read_bytes() == CONTENT and len(server.asked) == 3, "fetched once"
    assert sorted(path.suffix for path in cached_path(server.url).parent.iterdir()) == [".json", ".jsonl", ".lock"]


def test_the_next_run_goes_on(server):
    server.cuts = [50_000] + [0] * 10
    assert f"50000 of {len(CONTENT)} bytes" in refused(server.url, SHA).what
    assert not cached_path(server.url).exists(), "a file that ended early is never taken for whole"
    server.cuts, server.asked = [], []
    assert cached(server.url, SHA).read_bytes() == CONTENT
    assert server.asked == ["bytes=50000-"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_that_changed_in_between_is_fetched_whole(server, ranges):
    server.cuts = [50_000] + [0] * 10
    refused(server.url)
    server.cuts, server.etag, server.ranges = [], '"two"', ranges
    server.content = CONTENT[::-1]
    assert cached(server.url).read_bytes() == CONTENT[::-1]


def test_a_wrong_hash_is_refused_and_not_kept(server):
    error = refused(server.url, "0" * 64)
    assert SHA in error.what and "0" * 64 in error.what and error.fix
    assert not cached_path(server.url).exists()
    cached(server.url)
    assert "sha256" in refused(server.url, "0" * 64).fix


@pytest.mark.parametrize("status", [404, 403, 503])
def test_what_the_server_refuses(server, status, tmp_path):
    server.status = status
    error = refused(server.url)
    assert str(status) in error.what and server.url in error.what and error.fix
    with pytest.raises(UserError, match=r"cannot reach .*lines.jsonl"):
        collected(tmp_path / "one", server.url)


@pytest.mark.parametrize("answer", [b"", b"no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_a_server_that_hangs_up_before_it_answers_is_asked_again(answer):
    asked = []

    def serve(listening):
        while True:
            connection, _ = listening.accept()
            asked.append(connection.recv(10_000))
            connection.sendall(answer)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/lines.jsonl"
        error = refused(url)
    assert len(asked) > 1 and "disk" not in str(error) and not cached_path(url).exists()
    assert "network" in refused("http://nowhere.invalid/a.jsonl").fix


def test_from_an_object_store():
    fsspec.filesystem("memory").pipe("/bucket/a.jsonl", CONTENT)
    path = cached_path("memory://bucket/a.jsonl")
    path.parent.mkdir(parents=True)
    path.with_name("a.jsonl.part").write_bytes(CONTENT[:1_000])
    path.with_name("a.jsonl.json").write_text(json.dumps({"mark": str(len(CONTENT))}))
    assert cached("memory://bucket/a.jsonl", SHA).read_bytes() == CONTENT
    assert "memory://bucket/b.jsonl" in refused("memory://bucket/b.jsonl").what


def test_a_recipe_reads_a_web_address(server, tmp_path):
    source = {"path": server.url, "sha256": SHA, "name": "web"}
    _, rows = collected(tmp_path / "one", source)
    server.close()
    assert collected(tmp_path / "two", source)[1] == rows and len(rows) == 3_000, "the second time from the cache"
