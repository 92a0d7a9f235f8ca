"""From a training step to the documents it read, and from a text to the steps that read it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from affinage.errors import UserError
from affinage.pipeline.models import made_from
from affinage.pipeline.steps_train import FEED
from affinage.pipeline.store import read_manifest
from affinage.results import DOCUMENT_STEPS, DocumentsResult, SplitResult, TokenizeResult, TokenizerResult, read_result

if TYPE_CHECKING:
    from affinage.data.dataloader import DataLoader
    from affinage.data.tokenizer import Tokenizer

_ROWS = {
    "pretrain": "tokenize",
    "sft": "sft-data",
    "dpo": "preference-data",
}  # the stage that makes the rows of a training
_COUNTS = {"documents_in", "documents_out", "bytes_in", "bytes_out", "removed", "by_source", "by_language"}


@dataclass(frozen=True)
class TrainingRows:
    """The rows of one training of a run, and the order it reads them in."""

    run: Path
    stage: str  # pretrain or sft

    @cached_property
    def told(self) -> dict[str, Any]:
        """What the training wrote down of its feed, or would: rows (a folder's name), seed, batch, mixture, steps."""
        try:
            found: dict[str, Any] = json.loads((self.run / self.stage / FEED).read_text(encoding="utf-8"))
            return found
        except FileNotFoundError:
            return self._foretold()

    def _foretold(self) -> dict[str, Any]:
        recipe = json.loads((self.run / "recipe.json").read_text(encoding="utf-8"))
        settings, made = recipe.get(self.stage), self.run / _ROWS[self.stage]
        if settings is None:
            raise UserError(f"this run has no stage `{self.stage}`", where=str(self.run))
        if read_manifest(made) is None:
            fix = f"Pack them: affinage data {recipe['name']}"
            raise UserError(f"the rows of `{self.stage}` are not packed yet", where=str(self.run), fix=fix)
        if settings["batch_size"] is None:
            raise UserError(
                "how many rows a step has depends on the devices, and this training has not begun",
                where=str(self.run),
                fix=f"Begin it, or give --set {self.stage}.batch_size=ROWS.",
            )
        mixture = [(stage["from_step"], stage["weights"]) for stage in settings.get("mixture") or ()]
        facts = {"rows": made.resolve().name, "seed": recipe["seed"], "batch": settings["batch_size"]}
        return facts | {"mixture": mixture or None, "steps": settings["steps"]}

    @property
    def steps(self) -> int:
        """Steps that the training has when it is done."""
        return int(self.told["steps"])

    @cached_property
    def folder(self) -> Path:
        """The result that holds the rows."""
        store = (self.run / _ROWS[self.stage]).resolve().parent
        if not (store / self.told["rows"]).is_dir():
            raise UserError("the rows of this training are gone", where=str(store), fix="Run its recipe again.")
        return store / str(self.told["rows"])

    def made_from(self, stage: str) -> Path:
        """The result of `stage` that went into the rows."""
        found = made_from(self.folder, stage)
        if found is None:
            raise UserError(f"the result of `{stage}` is gone", where=str(self.folder), fix="Run the recipe again.")
        return found

    @cached_property
    def feed(self) -> "DataLoader":
        """The batches of the training."""
        from affinage.data.dataloader import DataLoader

        told = self.told
        return DataLoader(self.folder / "train", seed=told["seed"], batch=told["batch"], mixture=told["mixture"])

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of the rows."""
        from affinage.data.tokenizer import Tokenizer

        return Tokenizer.load(self.made_from("train-tokenizer"))

    def where(self, step: int, row: int | None = None) -> list[dict[str, Any]]:
        """What lies in the batch of a step, counted from 1 as metrics.jsonl does, or in one row of it.

        Gives {row, folder, number, documents: [{id, source, url, start, stop, offset}]} for each row; for one row its
        documents also have `text`. Raises UserError for steps and rows that there are not.
        """
        from affinage.data.lineage import spans_of_rows
        from affinage.training.health import data_offset_at

        if not 1 <= step <= self.steps:
            raise UserError(f"there is no step {step}", fix=f"This training has the steps 1 to {self.steps}.")
        if row is not None and not 0 <= row < self.feed.batch_size:
            raise UserError(f"there is no row {row}", fix=f"A batch has the rows 0 to {self.feed.batch_size - 1}.")
        batch = step - 1 + data_offset_at(self.run / self.stage, step)  # rollbacks left batches out
        places = list(enumerate(self.feed.where(batch)))
        chosen = places if row is None else [places[row]]
        spans = {
            folder: spans_of_rows(self.feed.shards[folder], [number for _, (name, number) in chosen if name == folder])
            for folder in {folder for _, (folder, _) in chosen}
        }
        found = []
        for index, (folder, number) in chosen:
            documents = [{k: v for k, v in span.items() if k != "row"} for span in spans[folder][number]]
            found.append({"row": index, "folder": folder, "number": number, "documents": documents})
        if row is not None:
            self._add_text(found[0])
        return found

    def _add_text(self, row: dict[str, Any]) -> None:
        from affinage.data.dataloader import read_rows

        tokens, _ = read_rows(self.feed.shards[row["folder"]], np.array([row["number"]]))
        for document in row["documents"]:
            document["text"] = self.tokenizer.decode(tokens[0, document["start"] : document["stop"]].tolist())

    def find(self, text: str) -> Iterator[dict[str, Any]]:
        """The documents that hold `text`, those of validation too, and the steps (from 1) that train on it.

        Gives {id, source, language, url, part, occurrences, rows: [{folder, number, steps}]} for each document.
        """
        from affinage.data.lineage import occurrences, rows_of_document, token_ranges
        from affinage.data.tokenize import UNDETERMINED, group_name

        split = self.made_from("split")
        for part in ("train", "validation"):
            for document in occurrences(split / part, text):
                facts = {name: getattr(document, name) for name in ("id", "source", "language", "url")}
                told = {**facts, "part": part, "occurrences": len(document.at), "rows": []}
                if part == "train":
                    folder = group_name(document.source, document.language or UNDETERMINED)
                    ranges = token_ranges(document, len(text), self.tokenizer)
                    numbers = rows_of_document(self.feed.shards[folder], document.id, document.source, ranges)
                    told["rows"] = [
                        {"folder": folder, "number": n, "steps": [step + 1 for step in self._steps_of(folder, n)]}
                        for n in numbers
                    ]
                yield told

    def _steps_of(self, folder: str, number: int) -> list[int]:
        return self.feed.steps_of(folder, number, self.steps)


def documents_of(run: Path, stage: str) -> dict[str, Path]:
    """The folders of documents that a stage of a run left, by part: "" or, of `split`, train and validation."""
    result = run / stage
    if stage not in DOCUMENT_STEPS:
        raise UserError(f"`{stage}` has no documents", fix=f"Stages with documents: {', '.join(DOCUMENT_STEPS)}.")
    if read_manifest(result) is None:
        there = [name for name in DOCUMENT_STEPS if read_manifest(run / name) is not None]
        raise UserError(f"this run has no result of `{stage}`", where=str(run), fix=f"It has {', '.join(there)}.")
    return {part: result / part for part in ("train", "validation")} if stage == "split" else {"": result}


def last_seen(run: Path, text: str) -> dict[str, int]:
    """In how many documents of each stage before the split a text occurs."""
    from affinage.data.lineage import occurrences

    done = [stage for stage in [*DOCUMENT_STEPS][:-1] if read_manifest(run / stage) is not None]
    return {stage: sum(1 for _ in occurrences(run / stage, text)) for stage in done}


def lost_at(seen: Mapping[str, int]) -> dict[str, int]:
    """How many of the documents that `last_seen` counts each stage removed, the split too, if it removed any."""
    stages = [*seen, "split"]
    found = {after: seen[before] - seen.get(after, 0) for before, after in pairwise(stages)}
    return {stage: count for stage, count in found.items() if count > 0}


def reasons_of(run: Path, stage: str) -> dict[str, int]:
    """What a stage of documents removed some for, and how many."""
    result = read_result(run / stage, DocumentsResult)
    return result.removed if result else {}


def data_facts(run: Path) -> dict[str, Any]:
    """Counts of a run's data steps as JSON: those of {stages, held_out, rows, groups, tokenizer, training} that exist.

    `stages` are the steps from documents to documents, `held_out` the validation sets, `training` the epochs of
    pretraining.
    """
    documents = {name: result for name, kind in DOCUMENT_STEPS.items() if (result := read_result(run / name, kind))}
    facts: dict[str, Any] = {
        "stages": {name: result.model_dump(include=_COUNTS) for name, result in documents.items()},
    }
    if isinstance(split := documents.get("split"), SplitResult):
        facts["held_out"] = {name: size.model_dump() for name, size in split.validation.items()}
    if tokenizer := read_result(run / "train-tokenizer", TokenizerResult):
        facts["tokenizer"] = tokenizer.model_dump(include={"vocabulary", "languages", "sources"})
    if rows := read_result(run / "tokenize", TokenizeResult):
        packed = rows.model_dump(exclude_none=True, exclude={"seconds"})
        facts |= {"groups": packed.pop("groups"), "rows": packed, "training": _epochs(run)}
    return facts


def _epochs(run: Path) -> dict[str, Any] | None:
    rows = TrainingRows(run, "pretrain")
    try:
        facts = {"steps": rows.steps, "batch": rows.feed.batch_size, "mixture": rows.told["mixture"]}
        return facts | {"epochs": rows.feed.epochs(rows.steps)}
    except UserError:  # no pretraining, or of a batch size that nobody knows yet
        return None


# ---- documents to page through ----


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
