"""Whatever changes outside is seen: files by their content, URLs by what their servers say of them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import hub_server
from affinage.data.files import CACHE_VARIABLE
from affinage.errors import UserWarned
from affinage.pipeline.step import fingerprints, remote_fingerprints
from hub_server import Fault, Hub
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


def test_two_names_that_are_not_utf8_are_two_files(tmp_path: Path):
    for name in (b"caf\xe9.txt", b"caf\xe8.txt"):
        (tmp_path / os.fsdecode(name)).write_bytes(name)
    assert len(set(fingerprints([str(tmp_path)]).values())) == 2


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A server with one file, whose headers are those of a fault where a test wants others."""
    with hub_server.serving() as hub:
        hub.commit("models/me/files", {"text.txt": b"A text about a river and an old bridge.\n" * 20})
        yield hub


def with_headers(hub: Hub, **headers: str) -> str:
    """The URL of its file."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    hub.faults[:] = [Fault("text.txt", 200, named, times=99)]
    return f"{hub.address}/me/files/resolve/main/text.txt"


def test_a_url_is_known_by_its_etag_or_its_time_and_else_or_without_an_answer_as_before(hub: Hub):
    for etag in ({"ETag": '"1"'}, {}):
        url = with_headers(hub, **etag, Last_Modified="Mon")
        before = remote_fingerprints([url], {})
        assert remote_fingerprints([url], {"else": "x"}) == before
        with_headers(hub, **({"ETag": '"2"', "Last_Modified": "Mon"} if etag else {"Last_Modified": "Tue"}))
        assert remote_fingerprints([url], before) != before
    with_headers(hub)
    with pytest.warns(UserWarned, match="no version"):
        assert remote_fingerprints([url], {url: "former"}) == {url: "former"}
    nobody = "http://127.0.0.1:9/text.txt"
    with pytest.warns(UserWarned, match="cannot check whether"):
        assert remote_fingerprints([nobody], {nobody: "former"}) == {nobody: "former"}


def ingest(recipe: Path, *words: str) -> None:
    run("run", recipe, "--until", "ingest", "--runs", recipe.parent / "runs", *words)


def test_a_changed_url_is_fetched_again_and_so_is_any_by_force(hub: Hub, tmp_path: Path, capsys):
    recipe = tmp_path / "web.yaml"
    url = f"{hub.address}/me/files/resolve/main/text.txt"
    recipe.write_text(RECIPE.format(url=url))

    def text() -> bytes:
        [file] = (tmp_path / "runs/web/ingest").rglob("*.parquet")
        return file.read_bytes()

    ingest(recipe)
    hub.requests.clear()
    ingest(recipe)
    assert len(hub.requests) == 1 and "Nothing to do" in capsys.readouterr().out
    hub.commit("models/me/files", {"text.txt": b"Another text about the same river.\n" * 20})
    ingest(recipe)
    assert "files changed" in capsys.readouterr().out and b"Another text" in text()
    with_headers(hub)  # and another text
    with pytest.warns(UserWarned, match=f"cannot check whether {url} has changed"):
        ingest(recipe)
    assert "Nothing to do" in capsys.readouterr().out
    ingest(recipe, "--force", "ingest")
    assert b"it does not work" in text()
