"""Documents of a run to page through: those that a stage passed on, those it removed, and what it says about them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from affinage.errors import UserError
from affinage.pipeline.lineage import documents_of
from affinage.results import DocumentsResult, read_result


def documents(
    run: Path, stage: str, *, part: str | None = None, source: str | None = None, language: str | None = None
) -> Iterator[dict[str, Any]]:
    """The documents that a stage passed on, in their order; of `split` also `part`."""
    from affinage.data.documents import read_documents

    folders = documents_of(run, stage)
    if part is not None and part not in folders:
        raise UserError(f"`{stage}` has no part `{part}`", fix="Only split has parts: train and validation.")
    for name, folder in folders.items():
        for batch in read_documents(folder) if part in (None, name) else ():
            for document in batch.to_pylist():
                if source in (None, document["source"]) and language in (None, document["language"]):
                    yield ({"part": name} if name else {}) | document


def removed(run: Path, stage: str, reason: str) -> list[dict[str, Any]]:
    """The samples that a stage kept of what it removed for a reason."""
    documents_of(run, stage)  # says what there is if the stage has no documents
    result = read_result(run / stage, DocumentsResult) or DocumentsResult()
    if reason not in result.removed:
        listed = ", ".join(f"{name!r} ({count})" for name, count in result.removed.items()) or "none"
        raise UserError(f"`{stage}` removed nothing for {reason!r}", fix=f"Its reasons: {listed}.")
    return [sample.model_dump() for sample in result.samples.get(reason, ())]


def table_beside(run: Path, stage: str, table: str) -> Iterator[dict[str, Any]]:
    """The lines of a table that a stage wrote beside its documents: `removed` copies, `matches` with benchmarks."""
    import pyarrow.parquet as pq

    documents_of(run, stage)
    path = run / stage / f"{table}.parquet"
    if not path.is_file():
        there = sorted(found.stem for found in (run / stage).glob("*.parquet"))
        raise UserError(f"`{stage}` has no table `{table}`", fix=f"It has: {', '.join(there) or 'none'}.")
    for batch in pq.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()
