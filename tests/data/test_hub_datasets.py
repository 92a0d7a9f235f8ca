"""Datasets of Hugging Face's library: folders of it, streaming that resumes, and a Hub that cannot be reached."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from affinage.data import collect as collecting
from affinage.data import documents
from affinage.data.hub_datasets import DatasetPart, Stream, at_commit
from affinage.errors import UserError
from affinage.recipe.data import SourceSettings
from source_forms import collected, write_lines


@pytest.fixture
def tables(tmp_path):
    """A dataset of three Parquet files in several row groups."""
    folder = tmp_path / "tables"
    (folder / "data").mkdir(parents=True)
    for file in range(3):
        rows = range(40)
        columns = {
            "text": [f"text {file}-{row} of the dataset" for row in rows],
            "url": [f"https://a.example/{file}/{row}" for row in rows],
            "lang": ["fr" if row % 4 == 0 else "en" for row in rows],
            "other": [[1.0, 2.0]] * len(rows),
        }
        pq.write_table(pa.table(columns), folder / "data" / f"train-{file:05d}-of-00003.parquet", row_group_size=7)
    return folder


EXPECTED = [f"text {file}-{row} of the dataset" for file in range(3) for row in range(40)]


def test_a_folder_of_parquet(tables, tmp_path):
    summary, rows = collected(tmp_path / "out", {"dataset": str(tables), "name": "tables", "licence": "odc-by"})
    assert [row["text"] for row in rows] == EXPECTED and summary["documents_out"] == 120
    facts = {"source": "tables", "language": "en?", "licence": "odc-by", "text": EXPECTED[41]}
    assert rows[41] == facts | {"id": "tables/1-of-3#2", "url": "https://a.example/1/1"}
    summary, rows = collected(tmp_path / "fr", {"dataset": str(tables), "where": {"lang": "fr"}})
    assert len(rows) == 30 and summary["removed"] == {"not asked for": 90}


def test_a_folder_of_json_lines_and_a_saved_dataset(tmp_path):
    write_lines(tmp_path / "lines" / "train.jsonl", [{"body": f"line {i}", "id": i} for i in range(9)])
    _, rows = collected(tmp_path / "one", {"dataset": str(tmp_path / "lines"), "text_key": "body"})
    assert [(row["id"], row["text"]) for row in rows] == [(str(i), f"line {i}") for i in range(9)]
    saved = datasets.Dataset.from_dict({"body": [f"line {i}" for i in range(9)]})
    datasets.DatasetDict({"train": saved, "test": saved.select(range(2))}).save_to_disk(tmp_path / "saved")
    source = {"dataset": str(tmp_path / "saved"), "text_key": "body"}
    assert [row["text"] for row in collected(tmp_path / "two", source)[1]] == [row["text"] for row in rows]
    assert len(collected(tmp_path / "three", {**source, "split": "test"})[1]) == 2


def test_a_stream_goes_on_from_every_position(tables):
    settings = SourceSettings(dataset=str(tables))
    whole = list(Stream(DatasetPart(str(tables), 0, 1), settings))
    assert [record.text for record in whole] == EXPECTED
    for taken in range(1, 120, 17):
        stream = Stream(DatasetPart(str(tables), 0, 1), settings)
        records = iter(stream)
        for _ in range(taken):
            next(records)
        state = json.loads(json.dumps(stream.state()))
        assert list(Stream(DatasetPart(str(tables), 0, 1), settings, state)) == whole[taken:]


def test_a_killed_stage_goes_on_within_the_stream(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROW_GROUP_BYTES", 200)
    monkeypatch.setattr(documents, "FILE_BYTES", 400)
    _, whole = collected(tmp_path / "whole", {"dataset": str(tables), "name": "x"})
    read = []

    class Killed(BaseException):
        pass

    class Dying(Stream):
        def __iter__(self):
            for record in super().__iter__():
                read.append(record.text)
                if len(read) == 70:
                    raise Killed
                yield record

    monkeypatch.setattr(collecting, "Stream", Dying)
    with pytest.raises(Killed):
        collected(tmp_path / "out", {"dataset": str(tables), "name": "x"})
    assert list((tmp_path / "out").glob("finished/*.json"))
    _, rows = collected(tmp_path / "out", {"dataset": str(tables), "name": "x"})
    assert rows == whole
    assert 120 < len(read) < 70 + 70, "what was read before is not read again"
    assert not (tmp_path / "out" / "finished").exists()


def test_what_is_not_in_a_dataset_is_refused(tables, tmp_path):
    saved = datasets.Dataset.from_dict({"text": ["a", "b"]})
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "saved")
    for source, named in (
        ({"dataset": str(tables), "text_key": "body"}, ("'body'", "text, url, lang, other")),
        ({"dataset": str(tmp_path / "saved"), "split": "dev"}, ("'dev'", "train, test")),
        ({"dataset": str(tmp_path / "nowhere")}, ("nowhere",)),
    ):
        with pytest.raises(UserError) as error:
            collected(tmp_path / "out", source)
        assert error.value.where == "data.sources[0]" and all(words in error.value.what for words in named)


def test_presets():
    stack = SourceSettings(preset="the-stack")
    assert (stack.dataset, stack.kind, stack.text_key) == ("bigcode/the-stack-dedup", "code", "content")
    wikipedia = SourceSettings(preset="wikipedia", language="fr")
    assert (wikipedia.config, wikipedia.licence, wikipedia.title) == ("20231101.fr", "cc-by-sa-4.0", "wikipedia-fr")
    mine = SourceSettings(preset="fineweb-edu", dataset="me/mine", split="dev")
    assert (mine.dataset, mine.config, mine.split, mine.licence) == ("me/mine", "", "dev", "odc-by")
    assert SourceSettings(**mine.model_dump()) == mine, "settings that are written down are read back"
    for wrong in ({"preset": "nonsense"}, {"preset": "wikipedia"}, {}, {"path": "a", "dataset": "b"}):
        with pytest.raises(ValueError):
            SourceSettings(**wrong)


@pytest.mark.parametrize("silent", [True, False])
def test_a_hub_that_cannot_be_reached_is_one_message(monkeypatch, silent):
    class Silent(BaseHTTPRequestHandler):
        """Knows the dataset, and does not say who may read it."""

        def do_GET(self) -> None:
            if "auth-check" in self.path:
                over.wait(300)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"id": "some/data", "sha": "abc"}')

    over = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port if silent else 9}"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        for module in ("constants", "hf_api.constants"):
            monkeypatch.setattr(f"huggingface_hub.{module}.ENDPOINT", endpoint)
        with pytest.raises(UserError, match="cannot be reached") as error:
            at_commit("some/data", SourceSettings(dataset="some/data"), "data.sources[0]", patience=0.5)
        assert "'some/data'" in error.value.what and ("timed out" in error.value.what) == silent
        assert error.value.where == "data.sources[0]" and "data.mirror" in error.value.fix
        over.set()
        server.shutdown()
