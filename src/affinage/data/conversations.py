"""Conversations to rows with a mask of the tokens to train: what supervised fine-tuning reads."""

import functools
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from affinage.data.atomic import write_array
from affinage.data.batch import segments
from affinage.data.chat import encode_conversation
from affinage.data.conversation_files import read_conversations
from affinage.data.lineage import spans, write_lineage
from affinage.data.order import shuffle_keys
from affinage.data.packing import Read, best_fit, in_bins
from affinage.data.row_files import file_safe, find_row_folders, open_rows, told_marks, write_facts, write_rows
from affinage.data.special_tokens import Marks
from affinage.data.spool import Spool, Stream
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError
from affinage.recipe.data import POCKET_WORLD
from affinage.recipe.training import ConversationSettings, SftSettings


def prepare_conversations(
    settings: SftSettings,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    context: int,
    seed: int,
    world_folder: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write `train/` and `validation/<source>/` folders of rows and masks into `folder`.

    Several conversations share a row (best fit, longest first); each begins with <s>, so that none sees another. What
    is longer than `context` is cut at its end, and left out if nothing trained remains. Which conversations are held
    out depends on their content and `seed`, so that equal ones stay together. `world_folder` is where `pocket-world`
    was written. Raises UserError if a line is no conversation, or not one token would be trained.
    """
    started = time.monotonic()
    for part in ("train", "validation", "scratch"):
        shutil.rmtree(folder / part, ignore_errors=True)  # left by a run that was killed
    counts: Counter[str] = Counter()
    with Spool(folder / "scratch" / "conversations", tokenizer.dtype, extra=True) as spool:
        for source in settings.sources:
            path, name = _locate(source, world_folder)
            progress(f"reading {name}")
            _spool_source(path, name, spool, counts, tokenizer, settings.system_prompt, context, seed)
        if not len(spool):
            raise _nothing_to_train(counts)
        stream = spool.shuffled()
        keys = stream.keys
        held_out = _held_out(stream.names.column("source").to_numpy(), keys, settings.held_out)
        progress("packing")
        # A copy of a held-out conversation in another source is not trained on either.
        seen_in_validation = np.isin(keys, np.concatenate([keys[:0], *(keys[chosen] for chosen in held_out.values())]))
        train = _write_part(folder / "train", stream, np.flatnonzero(~seen_in_validation), context, tokenizer.marks)
        validation = {
            name: _write_part(folder / "validation" / name, stream, chosen, context, tokenizer.marks)
            for name, chosen in held_out.items()
        }
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    return {
        "train": train,
        "validation": validation,
        **{key: counts[key] for key in ("conversations", "truncated", "dropped")},
        "context": context,
        "seconds": time.monotonic() - started,
    }


def _locate(source: ConversationSettings, world_folder: Path | None) -> tuple[str, str]:
    """Path of a source, and its name as a folder may be called."""
    if source.path == POCKET_WORLD:
        if world_folder is None:
            raise UserError("the pocket world's conversations are not there", where="sft.sources")
        return str(world_folder / "chat.jsonl"), file_safe(source.name or POCKET_WORLD)
    stem = Path(source.path.rstrip("/")).name.partition(".jsonl")[0]
    return source.path, file_safe(source.name or stem)


def _spool_source(
    path: str,
    name: str,
    spool: Spool,
    counts: Counter[str],
    tokenizer: Tokenizer,
    system_prompt: str,
    context: int,
    seed: int,
) -> None:
    """Append a source's conversations; beside each token goes 0, or 1 + its UTF-8 bytes if it is trained."""
    piece_bytes = tokenizer.piece_bytes
    for conversation in read_conversations(path):
        counts["conversations"] += 1
        ids, flags = encode_conversation(conversation.messages, tokenizer, system_prompt)
        if not tokenizer.fixed_ids:  # not every tokenizer has an id that a conversation begins with
            ids, flags = [*ids, tokenizer.marks.end], [*flags, False]
        tokens, trained = np.array(ids[:context], spool.dtype), np.array(flags[:context])
        if not trained.any():
            counts["dropped"] += 1
            continue
        counts["truncated"] += len(ids) > context
        lengths = piece_bytes[tokens]
        spool.append(
            tokens,
            key=int(shuffle_keys([json.dumps(conversation.messages)], seed, "conversations")[0]),
            text_bytes=int(lengths[trained].sum()),
            names=(conversation.id, name, path),
            extra=np.where(trained, 1 + lengths, 0),
        )


def _held_out(sources: np.ndarray, keys: np.ndarray, share: float) -> dict[str, np.ndarray]:
    """Which conversations, by their place in the order of their keys, each source holds out.

    It is the first `share` of a source, at least one, and with them all those of the same content, but never so many
    that a source has nothing left to train on.
    """
    held_out = {}
    for source in sorted(set(sources)):
        members = np.flatnonzero(sources == source)
        if share and keys[members[0]] != keys[members[-1]]:
            last = max(1, round(share * len(members))) - 1
            chosen = members[keys[members] <= keys[members[last]]]
            if len(chosen) < len(members):
                held_out[source] = chosen
    return held_out


def _write_part(folder: Path, stream: Stream, chosen: np.ndarray, context: int, marks: Marks) -> dict[str, int]:
    """Pack the chosen conversations into rows; gives what rows.json counts of them."""
    folder.mkdir(parents=True)
    lengths = stream.lengths
    bins = [[int(chosen[i]) for i in members] for members in best_fit(lengths[chosen], context)]
    layout = in_bins(bins, lengths)

    def blocks(read: Read, dtype: type[np.generic], fill: int = 0) -> Iterator[np.ndarray]:
        return layout.blocks(read, 0, layout.rows, context, dtype, fill=fill)

    write = functools.partial(write_rows, folder, rows=layout.rows, context=context, shards=1)
    files = write(blocks(stream.read, stream.dtype, marks.pad), dtype=stream.dtype)
    masks = (np.minimum(extra, 1) for extra in blocks(stream.read_extra, np.uint8))
    files |= write(masks, dtype=np.uint8, kind="mask")
    trained, text_bytes = 0, []
    for extra in blocks(stream.read_extra, np.uint8):
        trained += int(np.count_nonzero(extra))
        text_bytes.append((extra - np.minimum(extra, 1)).sum(axis=1, dtype=np.int64))
    write_array(folder / "bytes.npy", np.concatenate(text_bytes))
    write_lineage(folder / "documents.parquet", spans(layout, stream.names))
    counted = {
        "rows": layout.rows,
        "tokens": int(layout.length.sum()),
        "trained_tokens": trained,
        "conversations": len(chosen),
        "bytes": sum(int(block.sum()) for block in text_bytes),
    }
    write_facts(folder, {"context": context, **counted, **told_marks(marks), "files": files})
    return counted


def _nothing_to_train(counts: Counter[str]) -> UserError:
    return UserError(
        f"not one token of {counts['conversations']} conversations would be trained",
        where="sft.sources",
        fix=f"{counts['dropped']} of them have no assistant message within the context; "
        "only what the assistant says is trained: look at the roles, or raise sft.context",
    )


def show_example(folder: Path, tokenizer: Tokenizer, row: int = 0) -> Text:
    """The first conversation of a row of `folder`/train, with trained tokens green and between ⟦ and ⟧.

    Control tokens are spelled out. Print it with a `rich` console; the brackets remain where there is no colour.
    """
    files = open_rows(next(iter(find_row_folders(folder / "train").values())))
    tokens = np.empty((1, files.context), np.int64)
    mask = np.ones((1, files.context), np.int64)
    files.read(np.array([row]), tokens, mask)
    ids, _ = segments(tokens, files.marks)
    length = int(np.count_nonzero((ids[0] == ids[0, 0]) & (tokens[0] != files.marks.pad)))
    shown, trained = tokens[0, :length], mask[0, :length].astype(bool)
    text = Text()
    changes = np.flatnonzero(trained[1:] != trained[:-1]) + 1
    for start, stop in zip([0, *changes], [*changes, length]):
        said = tokenizer.decode(shown[start:stop], keep_special=True)
        if trained[start]:
            text.append(f"⟦{said}⟧", style="bold green")
        else:
            text.append(said, style="dim")
    return text
