"""Conversations, or pairs of answers, to token shards with a mask of what is trained: what all tuning reads.

The lines of a source are divided into tasks. All tasks read their lines once for the keys of their contents, from which
follows what is sampled, limited and held out; then each encodes its own lines and writes them as one shard of rows to
train on and one of held-out rows. So all workers encode, and a run that was killed resumes with the missing shards.
"""

import math
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from affinage.config.sources import SourceSettings
from affinage.config.tuning import ConversationSettings, DpoSettings, SftSettings
from affinage.data.atomic import write_array
from affinage.data.benchmark_items import strings_in
from affinage.data.chat import conversation_marks
from affinage.data.conversation_files import Part, lines_of, located, parts
from affinage.data.decontaminate import Searched, contaminated
from affinage.data.executor import LOCAL, Executor, clear_completions
from affinage.data.files import SourceFile
from affinage.data.hub_datasets import at_commit
from affinage.data.order import shuffle_keys
from affinage.data.packing import best_fit, in_bins
from affinage.data.places import is_on_hub
from affinage.data.token_shards import Documents, write_facts, write_shard
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError, UserWarned

TASK_BYTES = 64_000_000  # of files: what one task reads
_OF_A_PART = ("rows", "tokens", "trained_tokens", "row_bytes", "conversations")


@dataclass(frozen=True)
class Example:
    """Tokens that stay together in a row, and which of them are trained."""

    tokens: list[int]
    trained: list[bool]


class Line(Protocol):
    """What a line of a source holds."""

    @property
    def id(self) -> str:
        """The name by which the line can be found again."""

    @property
    def content(self) -> str:
        """Lines of equal content are sampled, limited and held out together."""


@dataclass(frozen=True)
class TuningTask:
    """Some lines of a source, which become a shard of `folder`/train/`name` and one of `folder`/validation/`name`."""

    section: str  # of the recipe: sft or dpo
    settings: SftSettings | DpoSettings
    system_prompt: str
    source: ConversationSettings
    at: SourceSettings  # the source as what opens files has it
    name: str
    place: str
    parts: tuple[tuple[Part, int, int], ...]  # of each part the lines k, k + n, k + 2 n, ...
    shard: int
    shards: int
    tokenizer: Path
    template: str | None
    seq_len: int
    seed: int
    folder: Path
    # What follows from the keys of all lines:
    limit: int | None = None  # the largest key that is used
    held_out: int | None = None  # the largest key that is held out
    held_out_keys: Path | None = None  # of all sources: a copy in another one is not trained on either
    searched: Searched | None = None  # the benchmarks whose items lines must not hold
    contaminated: tuple[int, ...] = ()  # the keys of the lines that do


def write_tuning_shards(
    section: str,
    settings: SftSettings | DpoSettings,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    seq_len: int,
    seed: int,
    world_file: str,
    world_folder: Path | None = None,
    system_prompt: str = "",
    searched: Searched | None = None,
    executor: Executor = LOCAL,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write `train/<source>/` and `validation/<source>/` folders of token shards into `folder`.

    Several examples of a source share a row (best fit, longest first). Which ones are sampled, limited and held out
    depends on their content and the seed, so that equal ones stay together. Lines that hold an item of a benchmark of
    `searched` are left out and counted as `in_benchmark`. `world_file` of the `world_folder` is what
    the pocket world has for it.

    Returns:
        Counts: `conversations` are all lines that were read, `not_sampled`, `bad` of them; of those that are used
        `truncated`, `dropped` and what else was counted; `train` and `validation` have what their rows hold;
        `by_source` all this by source; `commits` of datasets of the Hub.

    Raises:
        UserError: a line cannot be used and the settings do not skip it, or not one token would be trained.
    """
    started = time.monotonic()
    if not (folder / "keys").is_dir():  # nothing here is of a run that was killed
        for part in ("train", "validation"):
            shutil.rmtree(folder / part, ignore_errors=True)
    tasks: list[TuningTask] = []
    commits: dict[str, str] = {}
    template = None if tokenizer.template is None else tokenizer.template.source
    for place, name, index in located(settings, world_folder, world_file):
        source = settings.sources[index]
        at = source.as_source()
        if is_on_hub(at, settings.mirror):
            at = at_commit(place, at, "")
            commits[name] = at.revision
        divided = _divided(parts(at, place))
        tasks += [
            TuningTask(section, settings, system_prompt, source, at, name, place, some, shard, len(divided),
                       tokenizer.folder, template, seq_len, seed, folder, searched=searched)
            for shard, some in enumerate(divided)
        ]  # fmt: skip
    size = sum(part.bytes // of for task in tasks for part, _, of in task.parts if isinstance(part, SourceFile))
    share = lambda share: progress(f"reading {share:.0%}")  # noqa: E731
    read = executor.map(read_keys, tasks, folder / "keys", bytes=size, progress=share)
    chosen = _chosen(tasks, read, folder)
    share = lambda share: progress(f"tokenizing {share:.0%}")  # noqa: E731
    written = executor.map(write_lines, chosen, folder / "shards", bytes=size, progress=share)
    summary = _summary(chosen, read, written, tokenizer)
    for stage in ("keys", "shards"):
        clear_completions(folder / stage)
        shutil.rmtree(folder / stage, ignore_errors=True)
    (folder / _HELD_OUT).unlink(missing_ok=True)
    commits_of = {"commits": commits} if commits else {}
    return summary | commits_of | {"context": seq_len, "seconds": time.monotonic() - started}


_HELD_OUT = "held_out.npy"


def _divided(found: Sequence[Part]) -> list[tuple[tuple[Part, int, int], ...]]:
    """The lines of the parts of a source in tasks: large files are shared among several, small ones put together."""
    tasks: list[list[tuple[Part, int, int]]] = [[]]
    held = 0
    for part in found:
        size = part.bytes if isinstance(part, SourceFile) else TASK_BYTES
        count = max(1, math.ceil(size / TASK_BYTES))
        if tasks[-1] and (count > 1 or held + size > TASK_BYTES):
            tasks.append([])
            held = 0
        tasks[-1].append((part, 0, count))
        tasks += [[(part, number, count)] for number in range(1, count)]
        held += size
    return [tuple(task) for task in tasks]


def _lines(task: TuningTask) -> Iterator[tuple[int, Line | UserError]]:
    """The key of every line of a task, and what it holds; of one that cannot be read why."""
    module = _module(task.section)
    for part, number, count in task.parts:
        for where, name, item in lines_of(part, task.at, number, count):
            try:
                if isinstance(item, UserError):
                    raise item
                line: Line = module.read_line(item, task.source, where=where, name=name)
            except UserError as error:
                yield 0, error
                continue
            yield int(shuffle_keys([line.content], task.seed, "conversations")[0]), line


def _module(section: str) -> Any:
    from affinage.data import preferences, sft  # which import this one

    return {"sft": sft, "dpo": preferences}[section]


def _is_sampled(task: TuningTask, line: Line) -> bool:
    share = task.settings.sample
    return share >= 1 or int(shuffle_keys([line.content], task.seed, "sampled examples")[0]) < share * 2**64


def read_keys(task: TuningTask) -> dict[str, Any]:
    """Return the keys of the sampled lines of a task, how many lines it has, and of those that are bad the first."""
    counts, keys, texts, first = Counter[str](), [], [], ""
    for key, line in _lines(task):
        counts["conversations"] += 1
        if isinstance(line, UserError):
            if task.settings.on_error == "raise":
                raise line
            counts["bad"] += 1
            first = first or f"{line.where}: {line.what}"
        elif _is_sampled(task, line):
            keys.append(key)
            if task.searched is not None:
                texts.append("\n\n".join(text for text in strings_in(vars(line)) if " " in text))
        else:
            counts["not_sampled"] += 1
    holders = contaminated(texts, task.searched) if task.searched is not None and texts else {}
    found = sorted({keys[place] for place in holders})
    return {"counts": counts, "keys": keys, "first_bad": first, "contaminated": found}


def _chosen(tasks: Sequence[TuningTask], read: Sequence[dict[str, Any]], folder: Path) -> list[TuningTask]:
    """The tasks with the keys up to which their lines are used and held out."""
    limits: dict[str, tuple[int | None, int | None]] = {}
    contaminated = tuple(sorted({key for found in read for key in found["contaminated"]}))
    held_out = [np.zeros(0, np.uint64)]
    for task in tasks:
        if task.name in limits:
            continue
        members = [found["keys"] for each, found in zip(tasks, read, strict=True) if each.name == task.name]
        keys = np.sort(np.concatenate([np.array(some, np.uint64) for some in members]))
        keys = keys[~np.isin(keys, np.array(contaminated, np.uint64))]
        limit, last = None, None
        most = task.source.max_examples
        if most is not None and len(keys) > (count := max(1, round(most * task.settings.sample))):
            limit = int(keys[count - 1])
            keys = keys[:count]
        # At least one line is held out, with all lines of the same content, unless none would be left to train on.
        share = task.settings.validation_fraction
        if share and len(keys):
            first = keys[keys <= keys[max(1, round(share * len(keys))) - 1]]
            if len(first) < len(keys):
                last = int(first[-1])
                held_out.append(first)
        limits[task.name] = (limit, last)
    path = folder / _HELD_OUT
    write_array(path, np.unique(np.concatenate(held_out)))
    return [
        replace(
            task,
            limit=limits[task.name][0],
            held_out=limits[task.name][1],
            held_out_keys=path,
            contaminated=contaminated,
        )
        for task in tasks
    ]


@lru_cache(maxsize=1)
def _loaded(folder: Path, template: str | None) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    tokenizer.use_template(template)
    return tokenizer


def write_lines(task: TuningTask) -> dict[str, Any]:
    """Encode the lines of a task and write its shards; return what was counted of them and of each part."""
    tokenizer, module = _loaded(task.tokenizer, task.template), _module(task.section)
    piece_bytes = tokenizer.piece_bytes
    assert task.held_out_keys is not None
    held_out_keys = frozenset(np.load(task.held_out_keys, allow_pickle=False).tolist())
    documents = {part: Documents(tokenizer.dtype) for part in ("train", "validation")}
    counts, used, first_bad = Counter[str](), Counter[str](), ""
    for key, line in _lines(task):
        if isinstance(line, UserError) or not _is_sampled(task, line):
            continue
        if key in task.contaminated:
            counts["in_benchmark"] += 1
            continue
        if task.limit is not None and key > task.limit:
            counts["not_sampled"] += 1
            continue
        part = "validation" if task.held_out is not None and key <= task.held_out else "train"
        if part == "train" and key in held_out_keys:
            counts["held_out_elsewhere"] += 1
            continue
        counts["used"] += 1
        try:
            examples: Sequence[Example] = module.examples_of(line, task, tokenizer, counts)
        except UserError as error:  # of a chat template
            if task.settings.on_error == "raise":
                raise
            counts["bad"] += 1
            first_bad = first_bad or f"{error.where}: {error.what}"
            continue
        used[part] += bool(examples)
        for example in examples:
            tokens, trained = np.array(example.tokens), np.array(example.trained)
            lengths = np.where(trained, piece_bytes[tokens], 0)
            names = [(line.id, task.name, task.place)]
            documents[part].add(tokens, [len(tokens)], names, [key], byte_lengths=lengths, trained=trained)
    found: dict[str, Any] = {"counts": counts, "first_bad": first_bad}
    for part, some in documents.items():
        if len(some):
            bins = best_fit(some.shuffled_lengths, task.seq_len)
            layout = in_bins(bins, some.shuffled_lengths)
            folder, pad = task.folder / part / task.name, conversation_marks(tokenizer).pad
            written = write_shard(folder, task.shard, task.shards, some, layout, task.seq_len, pad=pad)
            found[part] = written | {"conversations": used[part], "most_in_a_row": max(map(len, bins))}
    return found


def _summary(
    tasks: Sequence[TuningTask], read: Sequence[dict[str, Any]], written: Sequence[dict[str, Any]], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Write shards.json of every folder; return the counts of all."""
    counts: dict[str, Counter[str]] = {}
    parts: dict[str, dict[str, list[dict[str, Any]]]] = {"train": {}, "validation": {}}
    for task, one, other in zip(tasks, read, written, strict=True):
        counts.setdefault(task.name, Counter()).update(one["counts"])
        counts[task.name].update(other["counts"])
        for part, of in parts.items():
            if part in other:
                of.setdefault(task.name, []).append(other[part])
    first_bad = next((found["first_bad"] for found in (*read, *written) if found["first_bad"]), "")
    total = sum(counts.values(), Counter[str]())
    if not parts["train"]:
        raise _nothing_to_train(total, tasks[0].section, first_bad)
    if total["bad"]:
        text = f"{total['bad']:,} conversations cannot be used, the first: {first_bad}"
        warnings.warn(text, UserWarned, stacklevel=2)
    if total["unstopped"]:
        text = (
            f"{total['unstopped']:,} answers do not end in a token that stops the model: it learns to go on after them"
        )
        warnings.warn(text, UserWarned, stacklevel=2)
    facts: dict[str, dict[str, dict[str, int]]] = {}
    for part, of in parts.items():
        facts[part] = {}
        for name, shards in of.items():
            sums = {key: sum(shard[key] for shard in shards) for key in _OF_A_PART}
            sums["bytes"] = sums.pop("row_bytes")
            files = {file: about for shard in shards for file, about in shard["files"].items()}
            more = {"source": name, "seq_len": tasks[0].seq_len, "dtype": np.dtype(tokenizer.dtype).name}
            most = max(shard["most_in_a_row"] for shard in shards)
            folder = tasks[0].folder / part / name
            write_facts(folder, more | sums | {"most_in_a_row": most, "files": files}, conversation_marks(tokenizer))
            facts[part][name] = sums
    train = facts["train"]
    return {
        "train": {key: sum(each[key] for each in train.values()) for key in next(iter(train.values()))},
        "validation": facts["validation"],
        **{key: total[key] for key in ("conversations", "truncated", "dropped")},
        **{key: count for key, count in total.items() if count},
        "by_source": {name: {**count, "train": train.get(name)} for name, count in counts.items()},
    }


def _nothing_to_train(counts: Counter[str], section: str, first_bad: str) -> UserError:
    why = f", the first: {first_bad}" if first_bad else ""
    return UserError(
        f"not one token of {counts['conversations']} conversations would be trained",
        where=f"{section}.sources",
        fix=f"{counts['bad']} of them cannot be used{why}; {counts['dropped']} have no answer within the context; "
        f"only what the assistant says is trained: look at the roles, or raise {section}.seq_len",
    )
