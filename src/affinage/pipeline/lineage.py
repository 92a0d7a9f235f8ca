"""From a training step to the documents it read, and from a text to the steps that read it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from affinage.errors import UserError
from affinage.pipeline.models import made_from, recorded
from affinage.pipeline.steps_train import FEED
from affinage.pipeline.store import read_manifest
from affinage.results import (
    DOCUMENT_STEPS,
    DocumentsResult,
    SplitResult,
    TokenizeResult,
    TokenizerResult,
    read_json,
    read_result,
)

if TYPE_CHECKING:
    from affinage.data.dataloader import DataLoader
    from affinage.data.tokenizer import Tokenizer

_ROWS = {"pretrain": "tokenize", "sft": "sft-data", "dpo": "preference-data"}  # the step that makes a training's rows
_COUNTS = {"documents_in", "documents_out", "bytes_in", "bytes_out", "removed", "by_source", "by_language"}


@dataclass(frozen=True)
class TrainingRows:
    """The rows of one training of a run, and the order it reads them in."""

    run: Path
    training: str  # pretrain, sft or dpo

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the training wrote down of its feed, or will: rows (a folder's name), seed, batch, mixture, steps."""
        if written := read_json(self.run / self.training / FEED):
            return written
        recipe, rows = recorded(self.run), self.run / _ROWS[self.training]
        settings = recipe.get(self.training)
        if settings is None:
            raise UserError(f"this run has no step `{self.training}`", where=str(self.run))
        if read_manifest(rows) is None:
            fix = f"Pack them: affinage data {recipe['name']}"
            raise UserError(f"the rows of `{self.training}` are not packed yet", where=str(self.run), fix=fix)
        if settings["batch_size"] is None:
            what = "the number of rows of a step depends on the devices, and this training has not begun"
            fix = f"Begin it, or give --set {self.training}.batch_size=ROWS."
            raise UserError(what, where=str(self.run), fix=fix)
        mixture = [(stage["from_step"], stage["weights"]) for stage in settings.get("mixture") or ()]
        facts = {"rows": rows.resolve().name, "seed": recipe["seed"], "batch": settings["batch_size"]}
        return facts | {"mixture": mixture or None, "steps": settings["steps"]}

    @property
    def steps(self) -> int:
        """Steps that the training has when it is done."""
        return int(self.facts["steps"])

    @cached_property
    def folder(self) -> Path:
        """The result that holds the rows."""
        folder = (self.run / _ROWS[self.training]).resolve().parent / str(self.facts["rows"])
        return self._there(folder if folder.is_dir() else None)

    def _there(self, result: Path | None) -> Path:
        if result is None:
            raise UserError("the rows, or what they were made from, are gone", where=str(self.run), fix="Run it again.")
        return result

    @cached_property
    def feed(self) -> "DataLoader":
        """The batches of the training."""
        from affinage.data.dataloader import DataLoader

        facts = self.facts
        return DataLoader(self.folder / "train", seed=facts["seed"], batch=facts["batch"], mixture=facts["mixture"])

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of the rows."""
        from affinage.data.tokenizer import Tokenizer

        return Tokenizer(self._there(made_from(self.folder, "train-tokenizer")))

    def where(self, step: int, row: int | None = None) -> list[dict[str, Any]]:
        """What lies in the batch of a step, counted from 1 as metrics.jsonl does, or in one row of it.

        Gives {row, folder, number, documents: [{id, source, url, start, stop, offset}]} for each row; for one row its
        documents also have `text`. Raises UserError for steps and rows that there are not.
        """
        from affinage.data.dataloader import read_rows
        from affinage.data.lineage import spans_of_rows
        from affinage.training.health import data_offset_at

        if not 1 <= step <= self.steps:
            raise UserError(f"there is no step {step}", fix=f"This training has the steps 1 to {self.steps}.")
        if row is not None and not 0 <= row < self.feed.batch_size:
            raise UserError(f"there is no row {row}", fix=f"A batch has the rows 0 to {self.feed.batch_size - 1}.")
        batch = step - 1 + data_offset_at(self.run / self.training, step)  # rollbacks left batches out
        found: list[dict[str, Any]] = []
        for index, (folder, number) in enumerate(self.feed.where(batch)):
            if row in (None, index):
                spans = spans_of_rows(self.feed.shards[folder], [number])[number]
                documents = [{k: v for k, v in span.items() if k != "row"} for span in spans]
                found.append({"row": index, "folder": folder, "number": number, "documents": documents})
        if row is not None:
            tokens, _ = read_rows(self.feed.shards[found[0]["folder"]], np.array([found[0]["number"]]))
            for document in found[0]["documents"]:
                document["text"] = self.tokenizer.decode(tokens[0, document["start"] : document["stop"]].tolist())
        return found

    def find(self, text: str) -> Iterator[dict[str, Any]]:
        """The documents that hold `text`, those of validation too, and the steps (from 1) that train on it.

        Gives {id, source, language, url, part, occurrences, rows: [{folder, number, steps}]} for each document.
        """
        from affinage.data.lineage import occurrences, rows_of_document, token_ranges
        from affinage.data.tokenize import UNDETERMINED, group_name

        split = self._there(made_from(self.folder, "split"))
        for part in ("train", "validation"):
            for document in occurrences(split / part, text):
                facts = {name: getattr(document, name) for name in ("id", "source", "language", "url")}
                rows = []
                if part == "train":
                    folder = group_name(document.source, document.language or UNDETERMINED)
                    ranges = token_ranges(document, len(text), self.tokenizer)
                    for number in rows_of_document(self.feed.shards[folder], document.id, document.source, ranges):
                        steps = [step + 1 for step in self.feed.steps_of(folder, number, self.steps)]
                        rows.append({"folder": folder, "number": number, "steps": steps})
                yield {**facts, "part": part, "occurrences": len(document.at), "rows": rows}


def last_seen(run: Path, text: str) -> dict[str, int]:
    """In how many documents of each step before the split a text occurs."""
    from affinage.data.lineage import occurrences

    done = [step for step in [*DOCUMENT_STEPS][:-1] if read_manifest(run / step) is not None]
    return {step: sum(1 for _ in occurrences(run / step, text)) for step in done}


def data_facts(run: Path) -> dict[str, Any]:
    """Counts of a run's data steps as JSON: those of {stages, held_out, rows, groups, tokenizer, training} that exist.

    `stages` are the steps from documents to documents, `held_out` the validation sets, `training` the epochs of
    pretraining.
    """
    documents = {name: result for name, kind in DOCUMENT_STEPS.items() if (result := read_result(run / name, kind))}
    facts: dict[str, Any] = {name: result.model_dump(include=_COUNTS) for name, result in documents.items()}
    facts = {"stages": facts}
    if isinstance(split := documents.get("split"), SplitResult):
        facts["held_out"] = {name: size.model_dump() for name, size in split.validation.items()}
    if tokenizer := read_result(run / "train-tokenizer", TokenizerResult):
        facts["tokenizer"] = tokenizer.model_dump(include={"vocabulary", "languages", "sources"})
    if packed_rows := read_result(run / "tokenize", TokenizeResult):
        packed = packed_rows.model_dump(exclude_none=True, exclude={"seconds"})
        facts |= {"groups": packed.pop("groups"), "rows": packed, "training": None}
        rows = TrainingRows(run, "pretrain")
        try:
            of_training = {"steps": rows.steps, "batch": rows.feed.batch_size, "mixture": rows.facts["mixture"]}
            facts["training"] = of_training | {"epochs": rows.feed.epochs(rows.steps)}
        except UserError:  # no pretraining, or of a batch size that nobody knows yet
            pass
    return facts


# ---- documents to page through ----


def _documents_of(run: Path, step: str) -> dict[str, Path]:
    """The folders of documents that a step of a run left, by part: "" or, of `split`, train and validation."""
    if step not in DOCUMENT_STEPS:
        raise UserError(f"`{step}` has no documents", fix=f"Steps with documents: {', '.join(DOCUMENT_STEPS)}.")
    if read_manifest(run / step) is None:
        there = [name for name in DOCUMENT_STEPS if read_manifest(run / name) is not None]
        raise UserError(f"this run has no result of `{step}`", where=str(run), fix=f"It has {', '.join(there)}.")
    return {part: run / step / part for part in (("train", "validation") if step == "split" else ("",))}


def documents(
    run: Path, step: str, *, part: str | None = None, source: str | None = None, language: str | None = None
) -> Iterator[dict[str, Any]]:
    """The documents that a step passed on, in their order; of `split` also `part`."""
    from affinage.data.documents import read_documents

    folders = _documents_of(run, step)
    if part is not None and part not in folders:
        raise UserError(f"`{step}` has no part `{part}`", fix="Only split has parts: train and validation.")
    for name, folder in folders.items():
        for batch in read_documents(folder) if part in (None, name) else ():
            for document in batch.to_pylist():
                if source in (None, document["source"]) and language in (None, document["language"]):
                    yield ({"part": name} if name else {}) | document


def removed(run: Path, step: str, reason: str) -> list[dict[str, Any]]:
    """The samples that a step kept of what it removed for a reason."""
    _documents_of(run, step)  # raises where there are none
    result = read_result(run / step, DocumentsResult) or DocumentsResult()
    if reason not in result.removed:
        listed = ", ".join(f"{name!r} ({count})" for name, count in result.removed.items()) or "none"
        raise UserError(f"`{step}` removed nothing for {reason!r}", fix=f"Its reasons: {listed}.")
    return [sample.model_dump() for sample in result.samples.get(reason, ())]


def table_beside(run: Path, step: str, table: str) -> Iterator[dict[str, Any]]:
    """The lines of a table that a step wrote beside its documents: `removed` copies, `matches` with benchmarks."""
    import pyarrow.parquet as pq

    _documents_of(run, step)  # raises where there are none
    path = run / step / f"{table}.parquet"
    if not path.is_file():
        there = sorted(found.stem for found in (run / step).glob("*.parquet"))
        raise UserError(f"`{step}` has no table `{table}`", fix=f"It has: {', '.join(there) or 'none'}.")
    for batch in pq.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()
