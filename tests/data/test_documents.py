"""Document files: what is written comes back in order, in bounded pieces; a full disk is one message."""

import resource

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from affinage.data import documents
from affinage.data.documents import SCHEMA, DocumentWriter, document_files, read_documents
from affinage.errors import of_the_machine
from source_forms import rows_of, write_documents


def test_documents_come_back_in_order_with_all_fields_from_the_same_bytes(tmp_path):
    second = {"id": "b", "source": "s", "language": "", "language_score": None, "url": "", "license": "", "text": "two"}
    first = second | {"id": "a", "language": "fr", "url": "u", "license": "CC0", "text": "één"}
    for name in ("one", "two"):
        with DocumentWriter(tmp_path / name) as writer:
            writer.add(**first)
            writer.write(pa.RecordBatch.from_pylist([second], schema=SCHEMA))
            writer.add(id="c", source="s", text="three")
    assert rows_of(tmp_path / "one") == [first, second, second | {"id": "c", "text": "three"}]
    assert [batch.schema.names for batch in read_documents(tmp_path / "one", ["id"])] == [["id"]] * 3
    one, two = (document_files(tmp_path / name)[0].read_bytes() for name in ("one", "two"))
    assert one == two


def test_files_and_row_groups_are_bounded_in_bytes_of_text(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROW_GROUP_BYTES", 1_000)
    monkeypatch.setattr(documents, "FILE_BYTES", 5_000)
    write_documents(tmp_path, [{"text": "x" * 100}] * 200)
    files = document_files(tmp_path)
    assert len(files) == 4 and files == sorted(files)
    assert {batch.num_rows for batch in read_documents(tmp_path)} == {10}
    assert sum(batch.num_rows for batch in read_documents(tmp_path)) == 200


def test_no_documents_make_one_file_without_rows_and_what_a_killed_writer_left_goes(tmp_path):
    write_documents(tmp_path, [])
    assert len(document_files(tmp_path)) == 1 and rows_of(tmp_path) == []
    (tmp_path / "part-0-00007.parquet").write_bytes(b"half")
    write_documents(tmp_path, [{"text": "text"}])
    assert len(rows_of(tmp_path)) == 1


SAVES = {
    "numpy": lambda path: np.save(path, np.zeros(100_000)),
    "safetensors": lambda path: save_file({"a": np.zeros(100_000)}, path),
    "pyarrow": lambda path: pq.write_table(pa.table({"a": [*range(10**5)]}), path),
}


@pytest.mark.parametrize("library", SAVES)
def test_a_file_that_cannot_grow_is_told_as_a_lack_of_room_by_every_library(tmp_path, library):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(Exception) as error:  # each library has one of its own
            SAVES[library](tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "Make room" in of_the_machine(error.value).fix
