"""Examples of several sources to rows with a mask of what is trained: what all tuning of a model reads."""

import functools
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from affinage.config.tuning import ConversationSettings, TuningSettings
from affinage.data.atomic import write_array
from affinage.data.chat import conversation_marks
from affinage.data.conversation_files import located
from affinage.data.hub_datasets import at_commit
from affinage.data.lineage import spans, write_lineage
from affinage.data.order import shuffle_keys
from affinage.data.packing import Read, best_fit, in_bins
from affinage.data.places import is_on_hub
from affinage.data.row_files import told_marks, write_facts, write_rows
from affinage.data.special_tokens import Marks
from affinage.data.spool import EXTRA, Spool, Stream
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError, UserWarned


@dataclass(frozen=True)
class Example:
    """Tokens that stay together in a row, and which of them are trained. Equal `content` is held out together."""

    id: str
    content: str
    tokens: list[int]
    trained: list[bool]


# What a source has: (the source, where it is) -> its lines in order. A line is its content and what makes examples of
# it, called only for those that are sampled, which gives none, having counted why, for one that is left out.
Lines = Iterator[tuple[str, Callable[[Counter[str]], Sequence[Example]]] | UserError]
Read_ = Callable[[ConversationSettings, str], Lines]


@dataclass(frozen=True)
class Job:
    """What `write_tuning_rows` is to make."""

    settings: TuningSettings
    section: str  # of the recipe, for messages
    world_file: str  # what the pocket world has for it
    lines: Read_
    context: int
    seed: int
    world_folder: Path | None = None
    progress: Callable[[str], None] = lambda _: None


def write_tuning_rows(job: Job, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Write `train/<source>/` and `validation/<source>/` folders of rows and masks into `folder`.

    Several examples of a source share a row (best fit, longest first). Which ones are sampled and held out depends on
    their content and the seed, so that equal ones stay together. Raises UserError if a line cannot be used and the
    settings do not skip it, or not one token would be trained.

    Returns:
        Counts of all and `by_source`: conversations (lines read), and of them `not_sampled`, `bad`, and what reading
        counted; and of `train` and `validation` those that `rows.json` has. `commits` at which datasets of the Hub
        were read.
    """
    started = time.monotonic()
    for part in ("train", "validation", "scratch"):
        shutil.rmtree(folder / part, ignore_errors=True)  # left by a run that was killed
    counts: dict[str, Counter[str]] = {}
    commits: dict[str, str] = {}
    bad: list[UserError] = []
    with Spool(folder / "scratch" / "examples", tokenizer.dtype, extra=True) as spool:
        for place, name, index in located(job.settings, job.world_folder, job.world_file):
            job.progress(f"reading {name}")
            source = job.settings.sources[index]
            if is_on_hub(source.as_source(), job.settings.mirror):
                commits[name] = at_commit(place, source.as_source(), f"{job.section}.sources[{index}]").revision
                source = source.model_copy(update={"revision": commits[name]})
            counts[name] = _spool_source(job, source, place, name, spool, tokenizer, bad)
        if not len(spool):
            raise _nothing_to_train(sum(counts.values(), Counter()), job.section, bad)
        if bad:
            found = sum(count["bad"] for count in counts.values())
            said = f"{found:,} conversations cannot be used, first: {bad[0].where}: {bad[0].what}"
            warnings.warn(said, UserWarned, stacklevel=2)
        stream = spool.shuffled()
        limits = {name: job.settings.sources[index].max_examples for _, name, index in _places(job)}
        chosen = _limited(stream, limits, job.settings.sample, counts)
        held_out = _held_out(chosen, stream.keys, job.settings.validation_fraction)
        job.progress("packing")
        # A copy of a held-out example in another source is not trained on either.
        unseen = np.concatenate([stream.keys[:0], *(stream.keys[some] for some in held_out.values())])
        write = functools.partial(_write_part, stream=stream, context=job.context, marks=conversation_marks(tokenizer))
        train = {
            name: write(folder / "train" / name, name, chosen=left)
            for name, some in chosen.items()
            if len(left := some[~np.isin(stream.keys[some], unseen)])
        }
        validation = {name: write(folder / "validation" / name, name, chosen=some) for name, some in held_out.items()}
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    total = sum(counts.values(), Counter())
    return {
        "train": {key: sum(each[key] for each in train.values()) for key in next(iter(train.values()))},
        "validation": validation,
        **{key: total[key] for key in ("conversations", "truncated", "dropped")},
        **{key: count for key, count in total.items() if count},
        "by_source": {name: {**count, "train": train.get(name)} for name, count in counts.items()},
        **({"commits": commits} if commits else {}),
        "context": job.context,
        "seconds": time.monotonic() - started,
    }


def _places(job: Job) -> Iterator[tuple[str, str, int]]:
    return located(job.settings, job.world_folder, job.world_file)


def _spool_source(
    job: Job,
    source: ConversationSettings,
    place: str,
    name: str,
    spool: Spool,
    tokenizer: Tokenizer,
    bad: list[UserError],
) -> Counter[str]:
    """Append a source's examples; beside each token goes 0, or 1 + its UTF-8 bytes if it is trained.

    What is wrong with the first line that cannot be used, of all sources, is in `bad` afterwards.
    """
    piece_bytes, counts = tokenizer.piece_bytes, Counter[str]()
    share = job.settings.sample * 2**64

    def leave_out(error: UserError) -> None:
        if job.settings.on_error == "raise":
            raise error
        counts["bad"] += 1
        if not bad:
            bad.append(error)

    for line in job.lines(source, place):
        counts["conversations"] += 1
        if isinstance(line, UserError):
            leave_out(line)
            continue
        content, encode = line
        if job.settings.sample < 1 and int(shuffle_keys([content], job.seed, "sampled examples")[0]) >= share:
            counts["not_sampled"] += 1
            continue
        try:
            examples = encode(counts)
        except UserError as error:  # of a chat template
            leave_out(error)
            continue
        for number, example in enumerate(examples):
            tokens, trained = np.array(example.tokens, spool.dtype), np.array(example.trained)
            lengths = piece_bytes[tokens]
            spool.append(
                tokens,
                key=int(shuffle_keys([content], job.seed, "conversations")[0]),
                text_bytes=int(lengths[trained].sum()),
                names=(example.id, name, place),
                extra=np.where(trained, 1 + lengths, 0),
                begins=number == 0,
            )
    return counts


def _limited(
    stream: Stream, limits: dict[str, int | None], sample: float, counts: dict[str, Counter[str]]
) -> dict[str, np.ndarray]:
    """Of every source the examples, by their place in the order of their keys, that it may have."""
    sources = stream.names.column("source").to_numpy()
    found = {}
    for name in sorted(set(sources)):
        members, limit = np.flatnonzero(sources == name), limits[name]
        conversation = np.cumsum(stream.begins[members])  # which one of the source each is of, from 1 on
        kept = conversation[-1] if limit is None else max(1, round(limit * sample))
        counts[name]["not_sampled"] += max(0, int(conversation[-1]) - kept)
        found[name] = members[conversation <= kept]
    return found


def _held_out(chosen: dict[str, np.ndarray], keys: np.ndarray, share: float) -> dict[str, np.ndarray]:
    """Which examples, by their place in the order of their keys, each source holds out.

    It is the first `share` of a source, at least one, and with them all those of the same content, but never so many
    that a source has nothing left to train on.
    """
    held_out = {}
    for source, members in chosen.items():
        if share and keys[members[0]] != keys[members[-1]]:
            last = max(1, round(share * len(members))) - 1
            first = members[keys[members] <= keys[members[last]]]
            if len(first) < len(members):
                held_out[source] = first
    return held_out


def _write_part(
    folder: Path, name: str, *, stream: Stream, chosen: np.ndarray, context: int, marks: Marks
) -> dict[str, int]:
    """Pack the chosen examples into rows; gives what rows.json counts of them."""
    folder.mkdir(parents=True)
    lengths = stream.lengths
    bins = [[int(chosen[i]) for i in members] for members in best_fit(lengths[chosen], context)]
    layout = in_bins(bins, lengths)

    def blocks(read: Read, dtype: type[np.generic], fill: int = 0) -> Iterator[np.ndarray]:
        return layout.blocks(read, 0, layout.rows, context, dtype, fill=fill)

    write = functools.partial(write_rows, folder, rows=layout.rows, context=context, shards=1)
    files = write(blocks(stream.read, stream.dtype, marks.pad), dtype=stream.dtype)
    masks = (np.minimum(extra, 1) for extra in blocks(stream.read_extra, EXTRA))
    files |= write(masks, dtype=np.uint8, kind="mask")
    trained, text_bytes = 0, []
    for extra in blocks(stream.read_extra, EXTRA):
        trained += int(np.count_nonzero(extra))
        text_bytes.append((extra - np.minimum(extra, 1)).sum(axis=1, dtype=np.int64))
    write_array(folder / "bytes.npy", np.concatenate(text_bytes))
    write_lineage(folder / "documents.parquet", spans(layout, stream.names))
    counted = {
        "rows": layout.rows,
        "tokens": int(layout.length.sum()),
        "trained_tokens": trained,
        "conversations": int(np.count_nonzero(stream.begins[chosen])),
        "bytes": sum(int(block.sum()) for block in text_bytes),
    }
    most = {"most_in_a_row": max(map(len, bins))}
    write_facts(folder, {"source": name, "context": context, **counted, **most, **told_marks(marks), "files": files})
    return counted


def _nothing_to_train(counts: Counter[str], section: str, bad: Sequence[UserError]) -> UserError:
    why = f", the first as {bad[0].what}" if bad else ""
    return UserError(
        f"not one token of {counts['conversations']} conversations would be trained",
        where=f"{section}.sources",
        fix=f"{counts['bad']} of them cannot be used{why}; {counts['dropped']} have no answer within the context; "
        f"only what the assistant says is trained: look at the roles, or raise {section}.seq_len",
    )
