"""Document files: what is written comes back in order, in bounded pieces, and nothing half-written gets a name."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from affinage.data import documents
from affinage.data.documents import SCHEMA, DocumentWriter, clear_documents, document_files, read_documents, row_groups


def write(folder, texts):
    with DocumentWriter(folder) as writer:
        for i, text in enumerate(texts):
            writer.add(id=str(i), source="s", text=text)


def test_documents_come_back_in_order_with_all_fields(tmp_path):
    with DocumentWriter(tmp_path) as writer:
        writer.add(id="a", source="s", text="één", language="fr", url="u", licence="CC0")
        batch = pa.RecordBatch.from_pylist(
            [{"id": "b", "source": "s", "language": "", "url": "", "licence": "", "text": "two"}], schema=SCHEMA
        )
        writer.write(batch)
        writer.add(id="c", source="s", text="three")
    rows = [row for batch in read_documents(tmp_path) for row in batch.to_pylist()]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert rows[0] == {"id": "a", "source": "s", "language": "fr", "url": "u", "licence": "CC0", "text": "één"}


def test_files_and_row_groups_are_bounded_in_bytes_of_text(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROW_GROUP_BYTES", 1_000)
    monkeypatch.setattr(documents, "FILE_BYTES", 5_000)
    write(tmp_path, ["x" * 100] * 200)
    files = document_files(tmp_path)
    assert len(files) == 4 and files == sorted(files)
    assert {group.rows for path in files for group in row_groups(path)} == {10}
    assert sum(batch.num_rows for batch in read_documents(tmp_path)) == 200


def test_a_failure_leaves_no_unfinished_file(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROW_GROUP_BYTES", 10)
    with pytest.raises(RuntimeError), DocumentWriter(tmp_path) as writer:
        writer.add(id="a", source="s", text="x" * 100)
        raise RuntimeError("killed")
    assert list(tmp_path.iterdir()) == []


def test_no_documents_make_one_file_without_rows(tmp_path):
    write(tmp_path, [])
    assert len(document_files(tmp_path)) == 1
    assert list(read_documents(tmp_path)) == []


def test_clearing_removes_what_an_interrupted_run_left(tmp_path):
    write(tmp_path, ["a"])
    (tmp_path / "documents-00007.parquet.part").write_bytes(b"half")
    clear_documents(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_same_documents_make_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / name, ["text"] * 50)
    assert (tmp_path / "one/documents-00000.parquet").read_bytes() == (
        tmp_path / "two/documents-00000.parquet"
    ).read_bytes()


def test_columns_can_be_chosen(tmp_path):
    write(tmp_path, ["a", "b"])
    (batch,) = read_documents(tmp_path, ["id"])
    assert batch.schema.names == ["id"] and pq.read_metadata(document_files(tmp_path)[0]).num_rows == 2
