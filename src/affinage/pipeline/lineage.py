"""From a training step to the documents it read, from a text to the steps that read it, and the documents of a step."""

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from affinage.data.dataloader import DataLoader
from affinage.data.documents import read_documents
from affinage.data.tokenize import UNDETERMINED, group_name
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError
from affinage.pipeline.models import FEED, ROWS, made_from, recorded
from affinage.pipeline.store import read_manifest
from affinage.results import DOCUMENT_STEPS, read_json
from affinage.training.health import data_offset_at


class TrainingRows:
    """The rows of one training (pretrain, sft or dpo) of a run, and the order it reads them in."""

    def __init__(self, run: Path, training: str) -> None:
        """Raises UserError for a training without rows, or whose rows or what they were made from are gone."""
        self.run, self.training, rows = run, training, run / ROWS[training]
        # What the training wrote down of its feed, or will: rows (a folder's name), seed, batch, mixture, steps.
        self.facts = read_json(run / training / FEED)
        if not self.facts:
            recipe = recorded(run)
            settings = recipe.get(training)
            if settings is None or read_manifest(rows) is None or settings["batch_size"] is None:
                fix = f"Its recipe needs `{training}` with a batch_size; run it: affinage run {run.name}"
                raise UserError(f"this run has no rows for `{training}` yet", where=str(run), fix=fix)
            mixture = [(stage["from_step"], stage["weights"]) for stage in settings.get("mixture") or ()]
            self.facts = {"rows": rows.resolve().name, "seed": recipe["seed"], "batch": settings["batch_size"]}
            self.facts |= {"mixture": mixture or None, "steps": settings["steps"]}
        self.folder = rows.resolve().parent / str(self.facts["rows"])
        tokenizer = made_from(self.folder, "train-tokenizer")
        if tokenizer is None:
            raise UserError("the rows, or what they were made from, are gone", where=str(run), fix="Run it again.")
        self.tokenizer, facts = Tokenizer(tokenizer), self.facts
        self.feed = DataLoader(self.folder / "train", **{name: facts[name] for name in ("seed", "batch", "mixture")})

    def where(self, step: int, row: int | None = None) -> list[dict[str, Any]]:
        """What lies in the batch of a step, counted from 1 as metrics.jsonl does, or in one row of it.

        Returns {row, folder, number, documents: [{id, source, url, start, stop, offset}]} for each row; for one row its
        documents also have `text`. Raises UserError for steps and rows that do not exist.
        """
        if not 1 <= step <= self.facts["steps"]:
            raise UserError(f"there is no step {step}", fix=f"This training has the steps 1 to {self.facts['steps']}.")
        if row is not None and not 0 <= row < self.feed.batch_size:
            raise UserError(f"there is no row {row}", fix=f"A batch has the rows 0 to {self.feed.batch_size - 1}.")
        batch = step - 1 + data_offset_at(self.run / self.training, step)  # rollbacks left batches out
        rows: list[dict[str, Any]] = []
        for index, (folder, number) in enumerate(self.feed.where(batch)):
            if row in (None, index):
                shards = self.feed.shards[folder]
                documents = [{k: v for k, v in span.items() if k != "row"} for span in shards.spans_of_row(number)]
                if row is not None:
                    [tokens], _ = shards.read(np.array([number]))
                    for each in documents:
                        each["text"] = self.tokenizer.decode(tokens[each["start"] : each["stop"]].tolist())
                rows.append({"row": index, "folder": folder, "number": number, "documents": documents})
        return rows

    def find(self, text: str) -> Iterator[dict[str, Any]]:
        """The documents that hold `text`, those of validation too, and the steps (from 1) that train on it.

        Yields {id, source, language, url, part, occurrences, rows: [{folder, number, steps}]} for each document.
        """
        if (split := made_from(self.folder, "split")) is None:
            raise UserError("the documents of the rows are gone", where=str(self.run), fix="Run it again.")
        text = unicodedata.normalize("NFC", text)
        every = re.compile(f"(?={re.escape(text)})", re.IGNORECASE)  # those that overlap, too
        for part in ("train", "validation"):
            for batch in read_documents(split / part, ("id", "source", "language", "url", "text")):
                for document in batch.filter(pc.match_substring(batch["text"], text, ignore_case=True)).to_pylist():
                    places, whole = [match.start() for match in every.finditer(document["text"])], document.pop("text")
                    rows = []
                    if part == "train":
                        folder = group_name(document["source"], document["language"] or UNDETERMINED)
                        ranges = self._token_ranges(whole, document["language"], places, len(text))
                        shards = self.feed.shards[folder]
                        for number in shards.rows_of_document(document["id"], document["source"], ranges):
                            steps = [step + 1 for step in self.feed.steps_of(folder, number, self.facts["steps"])]
                            rows.append({"folder": folder, "number": number, "steps": steps})
                    yield {**document, "part": part, "occurrences": len(places), "rows": rows}

    def _token_ranges(self, text: str, language: str, places: list[int], length: int) -> list[tuple[int, int]]:
        """The tokens [start, stop) of a document, `<s>` included, that hold each occurrence of `length` characters."""
        before = len(self.tokenizer.frame(language)[0])
        ends = np.cumsum(self.tokenizer.byte_lengths(text, self.tokenizer.encode(text)))
        ranges = []
        for place in places:
            first = len(text[:place].encode())
            last = first + len(text[place : place + length].encode())
            start, stop = np.searchsorted(ends, first, side="right"), np.searchsorted(ends, last, side="left") + 1
            ranges.append((int(start) + before, int(stop) + before))
        return ranges


def documents(run: Path, step: str, part: str | None = None) -> Iterator[dict[str, Any]]:
    """The documents that a step passed on, in order; of `split` with their `part`. UserError if the run has none."""
    made = [name for name in DOCUMENT_STEPS if read_manifest(run / name) is not None]
    if step not in made:
        raise UserError(f"it has no documents of `{step}`", where=str(run), fix=f"It has {', '.join(made) or 'none'}.")
    for name in ("train", "validation") if step == "split" else ("",):
        for batch in read_documents(run / step / name) if part in (None, name) else ():
            for document in batch.to_pylist():
                yield ({"part": name} if name else {}) | document
