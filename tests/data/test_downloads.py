"""Downloads go on where they stopped, are checked, and say clearly what is wrong."""

import json

import pytest

import hub_server
from affinage.data import executor
from affinage.data.files import CACHE_VARIABLE, cached, cached_path
from affinage.errors import UserError
from hub_server import Fault
from source_forms import collected

CONTENT = b"".join(json.dumps({"text": f"line {i} of many {i * 7919}"}).encode() + b"\n" for i in range(3_000))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(executor, "PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture
def server():
    with hub_server.serving() as hub:
        hub.commit("models/me/files", {"lines.jsonl": CONTENT})
        yield hub


def url_of(server) -> str:
    return f"{server.address}/me/files/resolve/main/lines.jsonl"


def refused(url: str) -> UserError:
    with pytest.raises(UserError) as error:
        cached(url)
    return error.value


def breaks_off(server) -> None:
    """The first answer, after some bytes, and then every one at once."""
    server.faults[:] = [Fault("lines", cut=50_000), Fault("lines", cut=0, times=99)]
    error = refused(url_of(server))
    assert url_of(server) in str(error) and "Run the same command again" in error.fix
    assert not cached_path(url_of(server)).exists(), "a file that ended early is never taken for whole"
    server.faults.clear()
    server.requests.clear()


def test_a_download_that_breaks_off_goes_on(server):
    breaks_off(server)
    assert cached(url_of(server)).read_bytes() == CONTENT
    (request,) = server.requests
    assert 0 < int(request.range.removeprefix("bytes=").removesuffix("-")) <= 50_000
    server.requests.clear()
    assert cached(url_of(server)).read_bytes() == CONTENT and not server.requests, "fetched once"
    cached_path(url_of(server)).unlink()
    server.faults[:] = [Fault("lines", cut=20_000, times=3)]
    assert cached(url_of(server)).read_bytes() == CONTENT, "what breaks off is tried again"


@pytest.mark.parametrize("content", [CONTENT[::-1], CONTENT[:100]])
def test_a_file_that_changed_in_between_is_fetched_whole(server, content):
    breaks_off(server)
    server.commit("models/me/files", {"lines.jsonl": content})
    assert cached(url_of(server)).read_bytes() == content


@pytest.mark.parametrize("status", [404, 403, 416, 503])
def test_what_the_server_refuses(server, status, tmp_path):
    server.faults[:] = [Fault("lines", status, times=99)]
    error = refused(url_of(server))
    assert url_of(server) in str(error) and error.fix
    with pytest.raises(UserError, match=r"cannot reach .*lines.jsonl"):
        collected(tmp_path / "one", url_of(server))


def test_a_recipe_reads_a_web_address_the_second_time_from_the_cache(server, tmp_path):
    _, rows = collected(tmp_path / "one", url_of(server))
    server.faults[:] = [Fault("lines", 503, times=99)]
    assert collected(tmp_path / "two", url_of(server))[1] == rows and len(rows) == 3_000
