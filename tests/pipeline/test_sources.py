"""Whatever changes outside is seen: files by their content, URLs by what their servers say of them."""

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from affinage.data.files import CACHE_VARIABLE
from affinage.errors import UserWarned
from affinage.pipeline.sources import fingerprints, remote_fingerprints
from run_affinage import run

LARGE = 17_000_000
RECIPE = """\
name: web
model: {{inputs: [tokens], nodes: {{embed: {{kind: embedding, in: tokens}}}}}}
data: {{sources: ["{url}"], languages: [en], filters: {{min_characters: 3, language_threshold: 0}}}}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def replace(file: Path, content: bytes) -> None:
    """With one of the same size and time."""
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    assert len(content) == file.stat().st_size
    file.with_suffix(".new").write_bytes(content)
    os.utime(file.with_suffix(".new"), ns=times)
    file.with_suffix(".new").replace(file)


@pytest.mark.parametrize("size", [3, LARGE])
def test_a_file_that_is_replaced_by_one_of_the_same_size_and_time_is_seen(tmp_path: Path, size: int):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(size))
    os.utime(file, (0, 0))
    before = fingerprints([str(file)])
    assert fingerprints([str(file)]) == before
    replace(file, b"1" * size)
    assert fingerprints([str(file)]) != before


def test_a_copy_of_a_small_file_is_the_same_and_a_large_one_is_known_by_its_time_too(tmp_path: Path):
    for size, same in ((3_000_000, True), (LARGE, False)):
        files = [tmp_path / "here.txt", tmp_path / "there.txt"]
        for file in files:
            file.write_bytes(bytes(size))
        os.utime(files[1], (0, 0))
        here, there = fingerprints(map(str, files)).values()
        assert (here == there) is same


class Server(http.server.ThreadingHTTPServer):
    """One file, under any name, with headers of the test's choice."""

    content = b"A text about a river and an old bridge.\n" * 20
    headers: dict[str, str]
    asked: list[str]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.command)
        self.send_response(200)
        for name, value in {**self.server.headers, "Content-Length": str(len(self.server.content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.server.content)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as serving:
        serving.headers, serving.asked = {}, []
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving
        serving.shutdown()


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/text.txt"


def test_a_url_is_known_by_its_etag_or_its_time_and_else_or_without_an_answer_as_before(server: Server):
    url = url_of(server)
    for etag in ({"ETag": '"1"'}, {}):
        server.headers = {**etag, "Last-Modified": "Mon"}
        before = remote_fingerprints([url], {})
        assert remote_fingerprints([url], {"else": "x"}) == before
        server.headers = {"ETag": '"2"', "Last-Modified": "Mon"} if etag else {"Last-Modified": "Tue"}
        assert remote_fingerprints([url], before) != before
    server.headers = {}
    with pytest.warns(UserWarned, match="no version"):
        assert remote_fingerprints([url], {url: "former"}) == {url: "former"}
    server.shutdown()
    server.server_close()
    with pytest.warns(UserWarned, match="cannot check whether"):
        assert remote_fingerprints([url], {url: "former"}) == {url: "former"}


def ingest(recipe: Path, *words: str) -> None:
    run("run", recipe, "--until", "ingest", "--runs", recipe.parent / "runs", *words)


def test_a_changed_url_is_fetched_again_and_so_is_any_by_force(server: Server, tmp_path: Path, capsys):
    recipe = tmp_path / "web.yaml"
    recipe.write_text(RECIPE.format(url=url_of(server)))
    server.headers = {"ETag": '"1"'}
    ingest(recipe)
    server.asked.clear()
    ingest(recipe)
    assert server.asked == ["HEAD"] and "Nothing to do" in capsys.readouterr().out
    server.headers, server.content = {"ETag": '"2"'}, b"Another text about the same river.\n" * 20
    ingest(recipe)
    assert "files changed" in capsys.readouterr().out
    [text] = (tmp_path / "runs/web/ingest").rglob("*.parquet")
    assert b"Another text" in text.read_bytes()
    server.headers, server.content = {}, b"A third one.\n" * 20
    with pytest.warns(UserWarned, match=f"cannot check whether {url_of(server)} has changed"):
        ingest(recipe)
    assert "Nothing to do" in capsys.readouterr().out
    ingest(recipe, "--force", "ingest")
    [text] = (tmp_path / "runs/web/ingest").rglob("*.parquet")
    assert b"A third one" in text.read_bytes()
