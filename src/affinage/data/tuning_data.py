"""Conversations, or pairs of answers, to token shards with a mask of what is trained: what all tuning reads.

A task is some parts of a source. All read their lines once for the keys of their contents, from which follows what is
sampled, limited and held out; then each writes its lines as one shard of rows to train on and one of held-out rows.
"""

import itertools
import json
import shutil
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from affinage.cluster.executor import LOCAL, POOL_BYTES, Executor
from affinage.config.data import POCKET_WORLD, SourceSettings
from affinage.config.training import ConversationSettings, DpoSettings, SftSettings
from affinage.data import chat
from affinage.data.chat import Encoded
from affinage.data.conversations import Example, open_source, read_examples
from affinage.data.decontaminate import contaminated, strings_in
from affinage.data.files import LINES, Part
from affinage.data.ingest import divide
from affinage.data.order import shuffle_keys
from affinage.data.places import is_remote, unique
from affinage.data.token_shards import FACTS, Document, finish_folder, write_shard
from affinage.data.tokenizer import Tokenizer, cached_tokenizer
from affinage.errors import UserError, UserWarned

TASK_BYTES = 8_000_000  # of files: some seconds of work
_COUNTS = ("rows", "tokens", "trained_tokens", "conversations")  # of a shard


@dataclass(frozen=True)
class TuningTask:
    """Some lines of a source, which become a shard of `folder`/train/`name` and one of `folder`/validation/`name`."""

    settings: SftSettings | DpoSettings
    system_prompt: str
    source: ConversationSettings
    opened: SourceSettings  # the source as it is opened
    name: str
    parts: tuple[Part, ...]
    shard: int
    shards: int
    tokenizer: Path
    template: str | None
    seq_len: int
    folder: Path
    searched: Path | None  # the file with the items of benchmarks that lines must not hold


def prepare_tuning_data(
    settings: SftSettings | DpoSettings,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    seq_len: int,
    system_prompt: str,
    world_folder: Path | None = None,
    searched: Path | None = None,
    executor: Executor = LOCAL,
) -> dict[str, Any]:
    """Write `train/<source>/` and `validation/<source>/` folders of token shards into `folder`.

    The sides of a pair are two documents, one after the other. Which lines are sampled, limited and held out depends on
    their content. Lines that hold an item of a benchmark of `searched` are left out.
    Returns counts of all lines, of what was left out and cut of those that are `used`, and what the rows of `train` and
    `validation` hold. Raises UserError for a line that cannot be used, unless it is skipped, and if nothing is trained.
    """
    tasks: list[TuningTask] = []
    template = None if tokenizer.template is None else tokenizer.template.source
    world_file = "chat.jsonl" if isinstance(settings, SftSettings) else "preferences.jsonl"
    for source in settings.sources:
        name = unique(source.title, {task.name for task in tasks})
        if source.path == POCKET_WORLD and world_folder is not None:
            source = source.model_copy(update={"path": str((world_folder / world_file).absolute())})
        opened, parts = open_source(source, settings)
        groups = divide(parts, TASK_BYTES)
        tasks += [
            TuningTask(settings, system_prompt, source, opened, name, group, shard, len(groups), tokenizer.folder,
                       template, seq_len, folder, searched)
            for shard, group in enumerate(groups)
        ]  # fmt: skip
    sizes = (POOL_BYTES if is_remote(task.opened) else part.bytes for task in tasks for part in task.parts)
    size = 6 * sum(sizes)  # a byte of conversations takes longer than one of plain text
    read = executor.map(read_keys, tasks, folder / "keys", bytes=size, label="reading")
    write = partial(write_lines, selection=_select(tasks, read))
    written = executor.map(write, tasks, folder / "shards", bytes=size, label="tokenizing")
    summary = _finish(tasks, written, tokenizer)
    for stage in ("shards", "keys"):
        shutil.rmtree(folder / stage)
    return summary


# ---- selection ----


def _lines(task: TuningTask) -> Iterator[tuple[int, Example | UserError]]:
    """Yield the key of every line of a task and its content, an error where it cannot be used."""
    for part in task.parts:
        for line in read_examples(part, task.opened, pairs=isinstance(task.settings, DpoSettings)):
            if isinstance(line, Example):
                yield int(shuffle_keys([line.content], "conversations")[0]), line
            elif task.settings.on_error == "raise":
                raise line
            else:
                yield 0, line


def read_keys(task: TuningTask) -> dict[str, list[int]]:
    """Return the `keys` of the sampled lines of a task, and of those that hold an item of a benchmark."""
    keys, texts = [], []
    for key, line in _lines(task):
        if isinstance(line, Example) and key < task.settings.sample * 2**64:
            keys.append(key)
            if task.searched is not None:
                texts.append("\n\n".join(text for text in strings_in(line.messages) if " " in text))
    holders = contaminated(texts, task.searched) if task.searched is not None and texts else set()
    return {"keys": keys, "in_benchmark": sorted({keys[place] for place in holders})}


def _select(tasks: Sequence[TuningTask], read: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """Return, of every source, the largest keys that are used and held out; and the keys of all held-out lines."""
    in_benchmark = {key for result in read for key in result["in_benchmark"]}
    last: dict[str, tuple[int, int]] = {}
    held_out: set[int] = set()
    for name, members in itertools.groupby(zip(tasks, read, strict=True), lambda member: member[0].name):
        (task, *_), results = zip(*members, strict=True)
        keys = sorted(key for result in results for key in result["keys"] if key not in in_benchmark)
        if task.source.max_examples is not None:
            keys = keys[: max(1, round(task.source.max_examples * task.settings.sample))]
        first, share = 0, task.settings.validation_fraction
        if keys and share:
            # At least one line is held out, with all lines of the same content, unless none would be left to train on.
            first = bisect_right(keys, keys[max(1, round(share * len(keys))) - 1]) % len(keys)
        held_out.update(keys[:first])
        last[name] = keys[-1] if keys else -1, keys[first - 1] if first else -1
    return {"last": last, "held_out": held_out, "in_benchmark": in_benchmark}


# ---- a shard ----


def write_lines(task: TuningTask, selection: dict[str, Any]) -> dict[str, Any]:
    """Encode the lines of a task and write its shards; return what was counted of them and of each part."""
    tokenizer = cached_tokenizer(task.tokenizer, task.template)
    last_used, last_held_out = selection["last"][task.name]
    documents: dict[str, list[Document]] = {"train": [], "validation": []}
    counts, first_bad = Counter[str](), ""
    for key, line in _lines(task):
        counts["conversations"] += 1
        part, use = "validation" if key <= last_held_out else "train", "used"
        if key in selection["in_benchmark"]:
            use = "in_benchmark"
        elif key > last_used:
            use = "not_sampled"
        elif part == "train" and key in selection["held_out"]:
            use = "held_out_elsewhere"
        try:
            if isinstance(line, UserError):
                raise line
            counts[use] += 1
            if use == "used" and (encoded := encode_line(line, task, tokenizer, counts)):
                tokens, mask = np.array(encoded[0], tokenizer.dtype), np.array(encoded[1], np.uint8)
                lengths = np.where(mask, tokenizer.piece_bytes[tokens], 0).astype(np.uint32)
                documents[part].append(Document(line.id, task.name, task.opened.place, key, tokens, lengths, mask))
        except UserError as error:
            if task.settings.on_error == "raise":
                raise
            counts["bad"] += 1
            first_bad = first_bad or f"{error.where}: {error.what}"
    results: dict[str, Any] = {"counts": counts, "first_bad": first_bad}
    for part, members in documents.items():
        if members:
            folder, pad = task.folder / part / task.name, tokenizer.conversation_marks.pad
            results[part] = write_shard(folder, task.shard, task.shards, members, task.seq_len, pad=pad)
    return results


def encode_line(line: Example, task: TuningTask, tokenizer: Tokenizer, counts: Counter[str]) -> Encoded | None:
    """Return the tokens of a conversation, or of the sides of a pair, and which are trained; None if nothing is.

    What is longer than a row is shortened or left out, as `truncation` says.
    """
    talks, pair, seq_len, rule = line.talks, len(line.talks) > 1, task.seq_len, task.settings.truncation
    encode = partial(chat.encode_document, tokenizer=tokenizer, system_prompt=task.system_prompt)
    sides = [encode(talk) for talk in talks]
    too_long, identical = sum(len(ids) for ids, _ in sides) > seq_len, pair and sides[0] == sides[1]
    if rule == "drop_turns":
        ends = [number for number, message in enumerate(talks[0][:-1], 1) if message["role"] == "assistant"]
        while ends and len(sides[0][0]) > seq_len:
            talks = [talks[0][: ends.pop()]]
            sides = [encode(talks[0])]
    said = [tokens[begin:end] for tokens, trained in sides for begin, end in chat.trained_runs(trained)]
    thoughts = [text for message in talks[0] if (text := message.get(chat.REASONING, "").strip())]
    written = tokenizer.decode(sides[0][0]) if thoughts else ""
    length, marks = seq_len // 2 if pair and too_long else seq_len, tokenizer.conversation_marks
    for tokens, trained in sides:
        if len(tokens) > length:
            del tokens[length:], trained[length:]
            if marks.begin is None:  # what follows in the row is kept apart by the last token alone
                tokens[-1], trained[-1] = marks.end, False
    nothing = (pair and sides[0] == sides[1]) or not all(any(trained) for _, trained in sides)
    if nothing or (too_long and rule == "drop"):
        counts.update(dropped=1, identical=identical)
        return None
    counts.update(
        truncated=too_long,
        rewritten=max(0, sum(chat.is_trained(message) for talk in talks for message in talk) - len(said)),
        unstopped=sum(map(set(tokenizer.stops).isdisjoint, said)),
        unspelled=sum(tokenizer.unspelled(message["content"]) for message in line.messages),
        reasoning_dropped=bool(thoughts) and not any(text in written for text in thoughts),
    )
    if not pair and tokenizer.template is not None and tokenizer.template.prompt_ends_in_space:
        before = next(number for number, message in enumerate(talks[0]) if message["role"] == "assistant")
        prompt = chat.encode_prompt(talks[0][:before], tokenizer, task.system_prompt) if before else []
        counts["prompt_differs"] += sides[0][0][: len(prompt)] != prompt[: len(sides[0][0])]
    return [token for ids, _ in sides for token in ids], [is_trained for _, mask in sides for is_trained in mask]


def _finish(tasks: Sequence[TuningTask], written: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> dict[str, Any]:
    """Write shards.json of every folder; return the counts of all, with warnings."""
    total = sum((Counter(results["counts"]) for results in written), Counter[str]())
    first_bad = next((results["first_bad"] for results in written if results["first_bad"]), "none")
    task = tasks[0]
    if not any("train" in results for results in written):
        section = "sft" if isinstance(task.settings, SftSettings) else "dpo"
        fix = f"{total['bad']} cannot be used ({first_bad}); {total['identical']} are pairs of equal answers; "
        fix += f"{total['dropped'] - total['identical']} have no answer within the context. "
        fix += f"Only what the assistant says is trained: look at the roles, or raise {section}.seq_len."
        what = f"not one token of {total['conversations']} conversations would be trained"
        what, fix = (what, fix) if total["conversations"] else ("the files have no lines", f"Write {LINES}.")
        raise UserError(what, where=f"{section}.sources", fix=fix)
    for key, text in {
        "bad": f"conversations cannot be used, the first: {first_bad}",
        "rewritten": "answers are not trained: nothing asks for them, or they are written differently in later turns",
        "unstopped": "answers do not end in a token that stops the model: it learns to go on after them",
        "unspelled": "characters cannot be spelled by the tokenizer: the model will not learn them",
    }.items():
        if total[key]:
            warnings.warn(f"{total[key]:,} {text}", UserWarned, stacklevel=2)
    sums: dict[str, dict[str, dict[str, int]]] = {"train": {}, "validation": {}}
    facts: dict[str, Any] = {"seq_len": task.seq_len, "dtype": np.dtype(tokenizer.dtype).name}
    for part, name in itertools.product(sums, dict.fromkeys(task.name for task in tasks)):
        shards = [results[part] for task, results in zip(tasks, written) if task.name == name and part in results]
        if shards:
            facts |= {"source": name, "most_in_a_row": max(shard["most_in_a_row"] for shard in shards)}
            whole = finish_folder(task.folder / part / name, shards, tokenizer.conversation_marks, **facts)
            sums[part][name] = {key: whole[key] for key in _COUNTS} | {"bytes": whole["row_bytes"]}
    return {
        "context": task.seq_len,
        "train": sum(map(Counter, sums["train"].values()), Counter()),
        "validation": sums["validation"],
        **dict.fromkeys(("truncated", "dropped"), 0),
        **total,
    }


def documents_in_a_row(folder: Path) -> int:
    """Return the most documents, two for each pair, that a row of pairs below `folder` holds."""
    return 2 * max(json.loads(path.read_text("utf-8"))["most_in_a_row"] for path in folder.glob(f"*/*/{FACTS}"))
