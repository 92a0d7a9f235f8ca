"""Downloads go on where they stopped and are checked; datasets of Hugging Face's library; what is wrong is said."""

import hashlib
import json
import os
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hub_server
from affinage import network
from affinage.config.data import SourceSettings
from affinage.data import readers
from affinage.data.readers import at_commit
from affinage.downloads import CACHE_VARIABLE, cached, cached_path
from affinage.network import limit_requests
from hub_server import Fault
from run_affinage import refused
from source_forms import collected, write_lines

CONTENT = b"".join(json.dumps({"text": f"line {i} of many {i * 7919}"}).encode() + b"\n" for i in range(3_000))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(network, "PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture
def server():
    with hub_server.serving() as hub:
        hub.commit("models/me/files", {"lines.jsonl": CONTENT})
        yield hub


def url_of(server) -> str:
    return f"{server.address}/me/files/resolve/main/lines.jsonl"


def breaks_off(server) -> None:
    """The first answer, after some bytes, and then every one at once."""
    server.faults[:] = [Fault("lines", cut=50_000), Fault("lines", cut=0, times=99)]
    error = refused(cached, url_of(server))
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


def test_a_copy_is_read_where_the_server_fails_and_a_file_with_another_hash_is_refused_and_not_kept(server, tmp_path):
    rows = collected(tmp_path / "first", url_of(server))[1]
    server.faults[:] = [Fault("lines", 503, times=1)]
    assert collected(tmp_path / "again", url_of(server))[1] == rows and len(rows) == 3_000
    source = {"path": url_of(server), "sha256": hashlib.sha256(CONTENT).hexdigest()}
    assert collected(tmp_path / "one", source)[1] == rows
    server.commit("models/me/files", {"lines.jsonl": CONTENT[::-1]})
    server.requests.clear()
    assert collected(tmp_path / "two", source)[1] == rows and not server.requests, "the copy is the expected file"
    for _ in range(2):
        error = refused(collected, tmp_path / "three", source | {"sha256": "0" * 64})
        assert hashlib.sha256(CONTENT[::-1]).hexdigest() in error.what and "0" * 64 in error.what
    with pytest.raises(ValueError, match="web address"):
        SourceSettings(path="lines.jsonl", sha256="0" * 64)


@pytest.mark.parametrize("status", [404, 403, 416, 503])
def test_what_the_server_refuses(server, status, tmp_path):
    server.faults[:] = [Fault("lines", status, times=99)]
    error = refused(cached, url_of(server))
    assert url_of(server) in str(error) and error.fix
    os.environ[CACHE_VARIABLE] = os.devnull  # until the end of the test
    assert CACHE_VARIABLE in refused(cached, url_of(server)).fix
    refused(collected, tmp_path / "one", url_of(server), match=r"cannot reach .*lines.jsonl")


# ---- datasets of Hugging Face's library


EXPECTED = [f"text {file}-{row} of the dataset" for file in range(3) for row in range(40)]


@pytest.fixture
def tables(tmp_path):
    """A dataset of three Parquet files in several row groups."""
    folder = tmp_path / "tables"
    (folder / "data").mkdir(parents=True)
    for file in range(3):
        urls = [f"https://a.example/{file}/{row}" for row in range(40)]
        columns = {"text": EXPECTED[40 * file :][:40], "url": urls, "lang": ["fr", *["en"] * 3] * 10}
        columns["other"] = [[1.0, 2.0]] * 40
        pq.write_table(pa.table(columns), folder / "data" / f"train-{file:05d}-of-00003.parquet", row_group_size=7)
    return folder


def test_a_folder_of_parquet_or_json_lines(tables, tmp_path):
    summary, rows = collected(tmp_path / "out", {"dataset": str(tables), "name": "tables", "license": "odc-by"})
    assert [row["text"] for row in rows] == EXPECTED and summary["documents_out"] == 120
    facts = {"source": "tables", "language": "en?", "license": "odc-by", "text": EXPECTED[41], "language_score": None}
    assert rows[41] == facts | {"id": "tables/1-of-3#2", "url": "https://a.example/1/1"}
    write_lines(tmp_path / "lines" / "train.jsonl", [{"body": f"line {i}", "id": i} for i in range(9)])
    _, rows = collected(tmp_path / "lines-out", {"dataset": str(tmp_path / "lines"), "text_key": "body"})
    assert [(row["id"], row["text"]) for row in rows] == [(str(i), f"line {i}") for i in range(9)]


def test_what_is_not_in_a_dataset_is_refused(tables, tmp_path):
    for source, named in (
        ({"dataset": str(tables), "text_key": "body"}, ("'body'", "text, url, lang, other")),
        ({"dataset": str(tables), "split": "dev"}, ("dev", "train")),
        ({"dataset": str(tmp_path / "nowhere")}, ("nowhere",)),
    ):
        error = refused(collected, tmp_path / "out", source)
        assert error.where == "data.sources[0]" and all(words in error.what for words in named)
        assert "text_key" not in source or "text_key: COLUMN" in error.fix


def test_presets():
    stack = SourceSettings(preset="the-stack")
    assert (stack.dataset, stack.kind, stack.text_key) == ("bigcode/the-stack-dedup", "code", "content")
    mine = SourceSettings(preset="fineweb-edu", dataset="me/mine", split="dev")
    assert (mine.dataset, mine.config, mine.split, mine.license) == ("me/mine", "", "dev", "odc-by")
    assert SourceSettings(**mine.model_dump()) == mine, "settings that are written down are read back"
    for wrong in ({"preset": "nonsense"}, {"preset": "wikipedia"}, {}):
        with pytest.raises(ValueError):
            SourceSettings(**wrong)


CODE = "X-Error-Code"
REFUSALS = {
    "silent": (Fault("auth-check", silence=60), "timed out", "data.mirror"),
    "cut": (Fault("api/datasets", cut=0, times=9), "cannot be reached", "data.mirror"),
    "busy": (Fault("api/datasets", 503, times=9), "503", "again"),
    "unknown": (Fault("api/datasets", 404, {CODE: "RepoNotFound"}), "does not give", "hf auth login"),
    "gated": (Fault("auth-check", 403, {CODE: "GatedRepo"}), "gated", "datasets/some/data, then log in"),
    "revision": (Fault("api/datasets", 404, {CODE: "RevisionNotFound"}), "at revision 'v2'", "datasets/some/data"),
    "no-token": (Fault("api/datasets", 401), "401", "HF_TOKEN"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_the_hub_refuses_is_one_message(server, refusal, monkeypatch):
    fault, words, fix = REFUSALS[refusal]
    server.commit("datasets/some/data", {"a.jsonl": b"{}"})
    server.faults[:] = [fault]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for module in ("constants", "hf_api.constants"):
        monkeypatch.setattr(f"huggingface_hub.{module}.ENDPOINT", server.address)
    monkeypatch.setattr(readers, "limit_requests", partial(limit_requests, 0.5))
    settings = SourceSettings(dataset="some/data", revision="v2" if "revision" in words else "")
    error = refused(at_commit, settings, "data.sources[0]")
    assert words in error.what and error.where == "data.sources[0]" and fix in error.fix
