"""Documents to rows of tokens: `<s> text </s>` in a shuffled order, packed into rows of the context length.

Source code is `<s><|code|> text <|endcode|></s>`. Training rows are packed as the recipe says. A validation row that
continues a document begins with the last token of the row before it, so that every token of the validation text is
predicted exactly once and bits per byte are exact.

A run that was killed goes on: files of documents that are encoded and shards that are written are not made again.
"""

import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from affinage.config.data import PackingSettings
from affinage.data.atomic import write_array, write_json
from affinage.data.documents import document_files
from affinage.data.encoded import EncodeTask, encode_file, encoded_groups, group_tokens, read_group
from affinage.data.executor import LOCAL, Executor
from affinage.data.lineage import DOCUMENTS, spans, write_lineage
from affinage.data.packing import Layout, end_to_end, whole_where_they_fit
from affinage.data.row_files import FACTS, shard_name, told_marks, write_facts
from affinage.data.shards import ShardFolder
from affinage.data.spool import EXTRA, Stream
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError

_COUNTS = ("rows", "tokens", "documents", "bytes")
_SUMMARY = "packed.json"  # what was counted, once all is written


def pack_rows(
    split_folder: Path,
    tokenizer: Tokenizer,
    folder: Path,
    settings: PackingSettings,
    seed: int,
    *,
    executor: Executor = LOCAL,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write `train/<source>.<language>/` and `validation/<source>.<language>/` folders of rows into `folder`.

    With `settings.output_path`, the shards of training rows go to `<path>/<name of folder>/train/...` instead, with a
    copy of what else numpy needs. The order of documents depends on `seed` and their ids alone. Tokens pass through
    scratch files beside the result, so memory grows with the number of documents (about 150 bytes each), not with
    their length.
    `folder` may hold what a killed call with the same arguments left, and nothing else: that is gone on with.
    Raises UserError if there is no training text.
    """
    started = time.monotonic()
    scratch = folder / "scratch"
    if (folder / _SUMMARY).is_file():  # killed after the last row was written
        shutil.rmtree(scratch, ignore_errors=True)
        summary: dict[str, Any] = json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))
        return summary
    writer = _Writer(folder, settings, tokenizer, progress)
    encode = functools.partial(_encode, split_folder, tokenizer, scratch, seed, executor=executor, progress=progress)
    train = writer.write("train", encode("train"))
    if not train:
        raise UserError("there is no text to train on", where=str(split_folder / "train"))
    validation = writer.write("validation", encode("validation"))
    total = _total(train.values())
    slots = total["rows"] * settings.seq_len
    summary = {
        "train": total,
        "by_language": _by(train, "language"),
        "by_source": _by(train, "source"),
        "groups": {
            name: {key: facts[key] for key in ("source", "language", *_COUNTS)} for name, facts in train.items()
        },
        "validation": {name: {key: facts[key] for key in _COUNTS} for name, facts in validation.items()},
        "packing": settings.strategy,
        "padding": (slots - total["tokens"]) / slots,
        "cut": sum(facts["cut"] for facts in train.values()),
        "dtype": np.dtype(tokenizer.dtype).name,
        "context": settings.seq_len,
        "shards": sum(len(facts["files"]) for facts in train.values()),
        "url": writer.url,
        "seconds": time.monotonic() - started,
    }
    write_json(folder / _SUMMARY, summary)
    shutil.rmtree(scratch, ignore_errors=True)
    return summary


def _total(groups: Any) -> dict[str, int]:
    counted = list(groups)
    return {key: sum(facts[key] for facts in counted) for key in _COUNTS}


def _by(groups: dict[str, dict[str, Any]], key: str) -> dict[str, dict[str, int]]:
    names = sorted({facts[key] for facts in groups.values()})
    return {name: _total(facts for facts in groups.values() if facts[key] == name) for name in names}


def _encode(
    split_folder: Path,
    tokenizer: Tokenizer,
    scratch: Path,
    seed: int,
    part: str,
    *,
    executor: Executor,
    progress: Callable[[str], None],
) -> list[Path]:
    """Encode one part of the split; gives the folders that hold it."""
    model, folder = scratch / "tokenizer", scratch / part
    if not model.is_dir():
        unfinished = scratch / "tokenizer.partial"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        tokenizer.write(unfinished)
        unfinished.rename(model)
    paths = document_files(split_folder / part)
    tasks = [EncodeTask(path, model, folder, seed, byte_lengths=part == "validation") for path in paths]
    stored = sum(path.stat().st_size for path in paths)
    executor.map(encode_file, tasks, bytes=2 * stored, progress=lambda share: progress(f"encoding {share:.0%}"))
    return [folder / path.stem for path in paths]


class _Writer:
    """Writes groups of encoded documents as folders of rows."""

    def __init__(
        self, folder: Path, settings: PackingSettings, tokenizer: Tokenizer, progress: Callable[[str], None]
    ) -> None:
        self._folder, self._settings, self._progress = folder, settings, progress
        self._dtype, self._marks = tokenizer.dtype, tokenizer.marks
        self.url = f"{settings.output_path.rstrip('/')}/{folder.name}" if settings.output_path else ""

    def write(self, part: str, encoded: Sequence[Path]) -> dict[str, dict[str, Any]]:
        """Write all groups of one part; gives what rows.json says of each."""
        groups = encoded_groups(encoded)
        for stale in (self._folder / part).glob("*"):
            if stale.name not in groups:
                shutil.rmtree(stale)
        sizes = {name: group_tokens(encoded, name) for name in groups}
        shards = _shares(sizes, self._settings.num_shards) if part == "train" else dict.fromkeys(groups, 1)
        found = {}
        for name, names in groups.items():
            folder = self._folder / part / name
            if (folder / FACTS).is_file():
                found[name] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
                continue
            stream, text_bytes = read_group(encoded, name, self._dtype)
            told = {**names, "documents": len(stream.files), "bytes": text_bytes, "tokens": len(stream)}
            found[name] = self._write_group(part, name, stream, shards[name], told)
        return found

    def _write_group(self, part: str, name: str, stream: Stream, shards: int, told: dict[str, Any]) -> dict[str, Any]:
        context, dtype, folder = self._settings.seq_len, self._dtype, self._folder / part / name
        overlap = int(part == "validation")
        if part == "train" and self._settings.strategy == "best_fit":
            layout = whole_where_they_fit(stream.lengths, context)
        else:
            layout = end_to_end(stream.lengths, context, overlap)
        folder.mkdir(parents=True, exist_ok=True)
        url = f"{self.url}/{part}/{name}" if self.url and part == "train" else ""
        place = ShardFolder(url or str(folder), scratch=self._folder / "scratch" / "upload")
        files = self._write_shards(place, layout, stream, max(1, min(shards, layout.rows)), f"{part}/{name}")
        if stream.extra:
            # Position 0 of a row is never predicted: it is <s>, or was predicted by the row before.
            lengths = layout.blocks(stream.read_extra, 0, layout.rows, context, EXTRA)
            predicted = np.concatenate([block[:, 1:].sum(axis=1, dtype=np.int64) for block in lengths])
            write_array(folder / "bytes.npy", predicted)
        write_lineage(folder / DOCUMENTS, spans(layout, stream.names))
        whole = stream.lengths <= context
        facts = {
            "rows": layout.rows,
            "context": context,
            "overlap": overlap,
            **told,
            "cut": int(np.count_nonzero(layout.cut[whole])),
            "dtype": np.dtype(dtype).name,
            "url": url,
            **told_marks(self._marks),
            "files": files,
        }
        if url:
            place.copy(folder / DOCUMENTS)
            place.put(FACTS, facts)
        place.forget_records(files)
        write_facts(folder, facts)
        return facts

    def _write_shards(
        self, place: ShardFolder, layout: Layout, stream: Stream, shards: int, name: str
    ) -> dict[str, dict[str, Any]]:
        context, dtype = self._settings.seq_len, self._dtype
        files = {}
        for shard in range(shards):
            file = shard_name("rows", shard, shards)
            first, last = (layout.rows * edge // shards for edge in (shard, shard + 1))
            self._progress(f"writing {name}, file {shard + 1} of {shards}")
            blocks = layout.blocks(stream.read, first, last, context, dtype, fill=self._marks.pad)
            files[file] = place.record(file) or place.write(
                file, _forgetting(blocks, stream), (last - first, context), dtype
            )
        return files


def _forgetting(blocks: Iterator[np.ndarray], stream: Stream) -> Iterator[np.ndarray]:
    for block in blocks:
        yield block
        stream.forget()


def _shares(sizes: dict[str, int], shards: int) -> dict[str, int]:
    """`shards` divided over groups in proportion to their sizes, by largest remainder, at least one for each."""
    if not sizes:
        return {}
    exact = np.array(list(sizes.values())) * shards / sum(sizes.values())
    counts = np.maximum(1, np.floor(exact).astype(int))
    for number in np.argsort(counts - exact, kind="stable")[: max(0, shards - counts.sum())]:
        counts[number] += 1
    return dict(zip(sizes, counts.tolist()))
