"""Documents to rows of tokens: `<s> text </s>`, laid end to end in a shuffled order, cut at the context length.

Training rows are cut side by side. A validation row that continues a document begins with the last token of the row
before it, so that every token of the validation text is predicted exactly once and bits per byte are exact.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from affinage.data.atomic import write_array
from affinage.data.documents import read_documents
from affinage.data.lineage import spans_table, write_lineage
from affinage.data.order import document_keys
from affinage.data.row_files import blocks_of_rows, file_safe, write_facts, write_rows
from affinage.data.special_tokens import BOS, EOS, PAD
from affinage.data.spool import Spool, Stream
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError
from affinage.recipe.data import RowsSettings

UNDETERMINED = "und"  # ISO 639 for a language that is not known
_TEXT_PER_BATCH = 4_000_000  # characters encoded at once
_DOCUMENTS_PER_TABLE = 65_536


def pack_rows(
    split_folder: Path,
    tokenizer: Tokenizer,
    folder: Path,
    settings: RowsSettings,
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write `train/<language>/` and `validation/<source>.<language>/` folders of rows into `folder`.

    The order of documents depends on `seed` and their ids alone. Tokens pass through a scratch file beside the
    result, so memory grows with the number of documents (about 100 bytes each), not with their length.
    Raises UserError if there is no training text.
    """
    started = time.monotonic()
    for part in ("train", "validation", "scratch"):
        shutil.rmtree(folder / part, ignore_errors=True)  # left by a run that was killed
    train = _pack_part(split_folder, tokenizer, folder, settings, seed, "train", progress)
    if not train:
        raise UserError("there is no text to train on", where=str(split_folder / "train"))
    validation = _pack_part(split_folder, tokenizer, folder, settings, seed, "validation", progress)
    total = {key: sum(facts[key] for facts in train.values()) for key in ("rows", "tokens", "documents", "bytes")}
    return {
        "train": total,
        "by_language": train,
        "validation": validation,
        "dtype": np.dtype(tokenizer.dtype).name,
        "context": settings.context,
        "shards": settings.shards,
        "seconds": time.monotonic() - started,
    }


def _pack_part(
    split_folder: Path,
    tokenizer: Tokenizer,
    folder: Path,
    settings: RowsSettings,
    seed: int,
    part: str,
    progress: Callable[[str], None],
) -> dict[str, dict[str, int]]:
    """Encode one part of the split into a spool per group, then lay each group out as rows."""
    scratch = folder / "scratch"
    validation = part == "validation"
    counts = {}
    with ExitStack() as stack:
        spools: dict[str, Spool] = {}
        for group, document in _documents(split_folder / part, tokenizer, seed, part):
            if group not in spools:
                path = scratch / f"{part}.{group}"
                spools[group] = stack.enter_context(Spool(path, tokenizer.dtype, extra=validation))
            spools[group].append(**document)
        for group, spool in sorted(spools.items()):
            progress(f"writing {part}/{group}")
            shards = 1 if validation else settings.shards
            facts = _write_group(folder / part / group, spool, settings.context, shards, overlap=int(validation))
            counts[group] = {key: facts[key] for key in ("rows", "tokens", "documents", "bytes")}
    shutil.rmtree(scratch, ignore_errors=True)
    return counts


def _documents(folder: Path, tokenizer: Tokenizer, seed: int, part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every document as its group and the arguments of `Spool.append`."""
    for batch in read_documents(folder):
        keys = document_keys(batch, seed, "rows")
        columns = [batch.column(name).to_pylist() for name in ("id", "source", "language", "url", "text")]
        for chosen in _slices(columns[4]):
            ids, sources, languages, urls, texts = (column[chosen] for column in columns)
            flat, ends = tokenizer.encode_flat(texts)
            start = 0
            for i, end in enumerate(ends.tolist()):
                language = file_safe(languages[i] or UNDETERMINED)
                group = language if part == "train" else f"{file_safe(sources[i])}.{language}"
                lengths = None
                if part == "validation":
                    lengths = np.concatenate([[0], tokenizer.byte_lengths(texts[i], flat[start:end]), [0]])
                yield (
                    group,
                    {
                        "tokens": np.concatenate([[BOS], flat[start:end], [EOS]]),
                        "key": int(keys[chosen.start + i]),
                        "text_bytes": len(texts[i].encode()),
                        "names": (ids[i], sources[i] or "", urls[i] or ""),
                        "extra": lengths,
                    },
                )
                start = end


def _slices(texts: Sequence[str]) -> Iterator[slice]:
    """Slices of `texts` with a bounded number of characters in each."""
    start = size = 0
    for i, text in enumerate(texts):
        size += len(text)
        if size >= _TEXT_PER_BATCH or i + 1 == len(texts):
            yield slice(start, i + 1)
            start, size = i + 1, 0


def _write_group(folder: Path, spool: Spool, context: int, shards: int, overlap: int) -> dict[str, Any]:
    """Write the rows of one spool; every row begins with the last `overlap` tokens of the one before."""
    folder.mkdir(parents=True)
    stream = spool.shuffled()
    stride = context - overlap
    rows = max(1, -(-(len(stream) - overlap) // stride))
    blocks = _row_blocks(stream.read, len(stream), rows, context, stride)
    files = write_rows(folder, blocks, rows=rows, context=context, shards=shards, dtype=spool.dtype)
    if spool.extra:
        # Position 0 of a row is never predicted: it is <s>, or was predicted by the row before.
        lengths = _row_blocks(stream.read_extra, len(stream), rows, context, stride)
        predicted = np.concatenate([block[:, 1:].sum(axis=1, dtype=np.int64) for block in lengths])
        write_array(folder / "bytes.npy", predicted)
    write_lineage(folder / "documents.parquet", _lineage(stream, rows, context, stride))
    facts = {
        "rows": rows,
        "context": context,
        "overlap": overlap,
        "tokens": len(stream),
        "documents": len(spool),
        "bytes": spool.text_bytes,
        "files": files,
    }
    write_facts(folder, facts)
    return facts


def _row_blocks(
    read: Callable[[int, int], np.ndarray], length: int, rows: int, context: int, stride: int
) -> Iterator[np.ndarray]:
    """Rows of a stream of `length` tokens in blocks [b, context], the last row filled up with <pad>."""
    for first, last in blocks_of_rows(rows, context):
        start, stop = first * stride, (last - 1) * stride + context
        flat = read(start, min(stop, length))
        flat = np.pad(flat, (0, stop - start - len(flat)), constant_values=PAD)
        yield np.lib.stride_tricks.sliding_window_view(flat, context)[::stride]


def _lineage(stream: Stream, rows: int, context: int, stride: int) -> Iterator[pa.Table]:
    """Where every document lies: one span per document and row that holds some of it."""
    for first in range(0, len(stream.names), _DOCUMENTS_PER_TABLE):
        names = stream.names.slice(first, _DOCUMENTS_PER_TABLE)
        starts = stream.starts[first : first + len(names)]
        stops = stream.starts[first + 1 : first + len(names) + 1]
        from_row = np.maximum(0, -(-(starts - context + 1) // stride))
        to_row = np.minimum(rows - 1, (stops - 1) // stride)
        spans = to_row - from_row + 1
        document = np.repeat(np.arange(len(names)), spans)
        row = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans - from_row, spans)
        start = np.maximum(starts[document] - row * stride, 0)
        stop = np.minimum(stops[document] - row * stride, context)
        yield spans_table(names, document, row, start, stop)
