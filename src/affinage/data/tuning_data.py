"""Conversations, or pairs of answers, to token shards with a mask of what is trained: what all tuning reads.

The lines of a source are divided into tasks. All tasks read their lines once for the keys of their contents, from which
follows what is sampled, limited and held out; then each encodes its own lines and writes them as one shard of rows to
train on and one of held-out rows. So all workers encode, and a run that was killed resumes with the missing shards.
"""

import itertools
import json
import math
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from affinage.config.data import SourceSettings
from affinage.config.training import ConversationSettings, DpoSettings, SftSettings
from affinage.data import chat
from affinage.data.atomic import write_json
from affinage.data.benchmark_items import strings_in
from affinage.data.chat import Encoded
from affinage.data.conversations import (
    Conversation,
    Pair,
    Part,
    open_source,
    parse_conversation,
    parse_pair,
    read_lines,
)
from affinage.data.dataloader import read_rows, segments
from affinage.data.decontaminate import Searched, contaminated
from affinage.data.executor import LOCAL, Executor
from affinage.data.files import SourceFile
from affinage.data.order import shuffle_keys
from affinage.data.packing import best_fit
from affinage.data.places import is_on_hub, unique
from affinage.data.special_tokens import Marks
from affinage.data.token_shards import Document, TokenShards, find_shard_folders, open_shards, write_facts, write_shard
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError, UserWarned

TASK_BYTES = 64_000_000  # of files: what one task reads
_WORLD_FILES = {"sft": "chat.jsonl", "dpo": "preferences.jsonl"}
_OF_A_PART = ("rows", "tokens", "trained_tokens", "row_bytes", "conversations")


@dataclass(frozen=True)
class TuningTask:
    """Some lines of a source, which become a shard of `folder`/train/`name` and one of `folder`/validation/`name`."""

    settings: SftSettings | DpoSettings
    system_prompt: str
    source: ConversationSettings
    at: SourceSettings  # the source in the form in which files are opened
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
    searched: Searched | None  # the benchmarks whose items lines must not hold


def prepare_tuning_data(
    settings: SftSettings | DpoSettings,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    seq_len: int,
    seed: int,
    system_prompt: str,
    world_folder: Path | None = None,
    searched: Searched | None = None,
    executor: Executor = LOCAL,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write `train/<source>/` and `validation/<source>/` folders of token shards into `folder`.

    Several conversations share a row; each begins with <s>, so that none sees another. The sides of a pair are two
    documents, one after the other. Which lines are sampled, limited and held out depends on their content and the seed,
    so that equal ones stay together. Lines that hold an item of a benchmark of `searched` are left out.

    Returns counts of all lines that were read, of what was left out and cut of those that are `used`, and what the rows
    of `train` and `validation` hold; `by_source` has all this by source. Raises UserError for a line that cannot be
    used, unless the settings skip it, and where not one token would be trained.
    """
    started = time.monotonic()
    if not (folder / "keys").is_dir():  # otherwise a run that was killed left what is here
        for part in ("train", "validation"):
            shutil.rmtree(folder / part, ignore_errors=True)
    tasks: list[TuningTask] = []
    commits: dict[str, str] = {}
    template = None if tokenizer.template is None else tokenizer.template.source
    for index, source in enumerate(settings.sources):
        name = unique(source.title, {task.name for task in tasks})
        world_file = None if world_folder is None else world_folder / _WORLD_FILES[_section(settings)]
        place, at, found = open_source(settings, index, world_file)
        if is_on_hub(at, settings.mirror):
            commits[name] = at.revision
        divided = _divided(found)
        tasks += [
            TuningTask(settings, system_prompt, source, at, name, place, parts, shard, len(divided), tokenizer.folder,
                       template, seq_len, seed, folder, searched)
            for shard, parts in enumerate(divided)
        ]  # fmt: skip
    size = sum(part.bytes // count for task in tasks for part, _, count in task.parts if isinstance(part, SourceFile))
    shown = lambda share: progress(f"reading {share:.0%}")  # noqa: E731
    read = executor.map(read_keys, tasks, folder / "keys", bytes=size, progress=shown)
    selection = folder / "selection.json"
    write_json(selection, _select(tasks, read))
    shown = lambda share: progress(f"tokenizing {share:.0%}")  # noqa: E731
    write = partial(write_lines, selection=selection)
    written = executor.map(write, tasks, folder / "shards", bytes=size, progress=shown)
    summary = _finish(tasks, read, written, tokenizer)
    for stage in ("shards", "keys"):
        shutil.rmtree(folder / stage)
    selection.unlink()
    more = {"commits": commits} if commits else {}
    return summary | more | {"context": seq_len, "seconds": time.monotonic() - started}


def _section(settings: SftSettings | DpoSettings) -> str:
    return "sft" if isinstance(settings, SftSettings) else "dpo"


def _divided(found: Sequence[Part]) -> list[tuple[tuple[Part, int, int], ...]]:
    """Divide the lines of a source into tasks: large files are shared among several, small ones put together."""
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


# ---- selection ----


def _lines(task: TuningTask) -> Iterator[tuple[int, Conversation | Pair | UserError]]:
    """Return the key of every line of a task and what it holds, an error where it cannot be used."""
    for part, number, count in task.parts:
        for where, name, item in read_lines(part, task.at, number, count):
            try:
                if isinstance(item, UserError):
                    raise item
                if isinstance(task.settings, SftSettings):
                    line: Conversation | Pair = parse_conversation(item, task.source.format, where=where, name=name)
                else:
                    line = parse_pair(item, where=where, name=name)
            except UserError as error:
                if task.settings.on_error == "raise":
                    raise
                yield 0, error
            else:
                yield int(shuffle_keys([line.content], task.seed, "conversations")[0]), line


def _is_sampled(task: TuningTask, line: Conversation | Pair) -> bool:
    share = task.settings.sample
    return share >= 1 or int(shuffle_keys([line.content], task.seed, "sampled examples")[0]) < share * 2**64


def read_keys(task: TuningTask) -> dict[str, Any]:
    """Return the keys of the sampled lines of a task, of the contaminated ones, its counts, and its first bad line."""
    counts, keys, texts, first_bad = Counter[str](), [], [], ""
    for key, line in _lines(task):
        counts["conversations"] += 1
        if isinstance(line, UserError):
            counts["bad"] += 1
            first_bad = first_bad or f"{line.where}: {line.what}"
        elif _is_sampled(task, line):
            keys.append(key)
            if task.searched is not None:
                texts.append("\n\n".join(text for text in strings_in(vars(line)) if " " in text))
        else:
            counts["not_sampled"] += 1
    holders = contaminated(texts, task.searched) if task.searched is not None and texts else {}
    found = sorted({keys[place] for place in holders})
    return {"counts": counts, "keys": keys, "first_bad": first_bad, "contaminated": found}


def _select(tasks: Sequence[TuningTask], read: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return, of every source, the largest keys that are used and held out; and the keys of all held-out lines."""
    contaminated = sorted({key for found in read for key in found["contaminated"]})
    limits: dict[str, tuple[int | None, int | None]] = {}
    held_out: set[int] = set()
    for name, members in itertools.groupby(zip(tasks, read, strict=True), lambda member: member[0].name):
        of_source = list(members)
        task = of_source[0][0]
        keys = np.sort(np.array([key for _, found in of_source for key in found["keys"]], np.uint64))
        keys = keys[~np.isin(keys, np.array(contaminated, np.uint64))]
        limit = last = None
        most = task.source.max_examples
        if most is not None and len(keys) > (count := max(1, round(most * task.settings.sample))):
            limit, keys = int(keys[count - 1]), keys[:count]
        # At least one line is held out, with all lines of the same content, unless none would be left to train on.
        share = task.settings.validation_fraction
        if share and len(keys):
            first = keys[keys <= keys[max(1, round(share * len(keys))) - 1]]
            if len(first) < len(keys):
                last = int(first[-1])
                held_out.update(first.tolist())
        limits[name] = limit, last
    return {"limits": limits, "held_out": sorted(held_out), "contaminated": contaminated}


@lru_cache(maxsize=1)
def _loaded(folder: Path, template: str | None) -> Tokenizer:
    tokenizer = Tokenizer(folder)
    tokenizer.use_template(template)
    return tokenizer


# ---- a shard ----


def write_lines(task: TuningTask, selection: Path) -> dict[str, Any]:
    """Encode the lines of a task and write its shards; return what was counted of them and of each part."""
    tokenizer = _loaded(task.tokenizer, task.template)
    selected = json.loads(selection.read_text(encoding="utf-8"))
    limit, last_held_out = selected["limits"][task.name]
    held_out, in_benchmark = frozenset(selected["held_out"]), frozenset(selected["contaminated"])
    documents: dict[str, list[Document]] = {"train": [], "validation": []}
    counts, used, first_bad = Counter[str](), Counter[str](), ""
    for key, line in _lines(task):
        if isinstance(line, UserError) or not _is_sampled(task, line):
            continue
        part = "validation" if last_held_out is not None and key <= last_held_out else "train"
        if key in in_benchmark:
            counts["in_benchmark"] += 1
        elif limit is not None and key > limit:
            counts["not_sampled"] += 1
        elif part == "train" and key in held_out:  # of another source
            counts["held_out_elsewhere"] += 1
        else:
            counts["used"] += 1
            messages = line.messages if isinstance(line, Conversation) else [*line.prompt, *line.chosen, *line.rejected]
            counts["unspelled"] += sum(tokenizer.unspelled(message["content"]) for message in messages)
            try:
                encoded = encode_line(line, task, tokenizer, counts)
            except UserError as error:  # of a chat template
                if task.settings.on_error == "raise":
                    raise
                counts["bad"] += 1
                first_bad = first_bad or f"{error.where}: {error.what}"
                continue
            used[part] += bool(encoded)
            for ids, trained in encoded:
                tokens, mask = np.array(ids, tokenizer.dtype), np.array(trained, np.uint8)
                lengths = np.where(mask, tokenizer.piece_bytes[tokens], 0).astype(np.uint32)
                documents[part].append(Document(line.id, task.name, task.place, key, tokens, lengths, mask))
    found: dict[str, Any] = {"counts": counts, "first_bad": first_bad}
    for part, some in documents.items():
        if some:
            some.sort(key=lambda document: document.key)
            layout = best_fit(np.array([len(document.tokens) for document in some]), task.seq_len)
            folder, pad = task.folder / part / task.name, tokenizer.conversation_marks.pad
            found[part] = write_shard(folder, task.shard, task.shards, some, layout, task.seq_len, pad=pad)
            found[part] |= {"conversations": used[part], "most_in_a_row": int(np.bincount(layout.row).max())}
    return found


def encode_line(
    line: Conversation | Pair, task: TuningTask, tokenizer: Tokenizer, counts: Counter[str]
) -> list[Encoded]:
    """Return a conversation as documents, several where the template must write it several times; a pair as one.

    A pair is its sides, one after the other; of them is trained what follows the prompt. What is longer than a row is
    shortened or left out as `truncation` says, and left out if nothing trained remains.
    """
    pair, seq_len, rule = isinstance(line, Pair), task.seq_len, task.settings.truncation
    if isinstance(line, Pair):
        talks, first = [[*line.prompt, *line.chosen], [*line.prompt, *line.rejected]], len(line.prompt)
    else:
        talks, first = [line.messages], 0
    encode = partial(chat.encode_documents, tokenizer=tokenizer, system_prompt=task.system_prompt, trained_from=first)
    documents = [document for talk in talks for document in encode(talk)]
    unrolled, identical = len(documents) > len(talks), pair and documents[0] == documents[1]
    if pair and unrolled:
        raise UserError(
            f"the chat template writes earlier turns otherwise when others follow, and a side of {line.id} has several "
            "answers: no one text has them all as the model would have said them",
            where="chat_template",
            fix="Give pairs whose sides are one answer, with the turns before it in the prompt.",
        )
    lengths = [len(ids) for ids, _ in documents]
    too_long = (sum(lengths) if pair else max(lengths)) > seq_len
    if too_long and rule == "drop":
        counts["dropped"] += 1
        return []
    if too_long and rule == "drop_turns":
        answers = [number for number, message in enumerate(talks[0]) if message["role"] == "assistant"]
        shorter = [talks[0][: last + 1] for last in reversed(answers) if last + 1 < len(talks[0])]
        while shorter and all(len(ids) > seq_len for ids, _ in documents):
            documents = encode(shorter.pop(0))
        documents = [each for each in documents if len(each[0]) <= seq_len] or documents[:1]
    counts["unstopped"] += sum(chat.unstopped_answers(*each, tokenizer.stops) for each in documents)
    if too_long:
        room = seq_len // 2 if pair else seq_len
        documents = [cut_document(*each, room, tokenizer.conversation_marks) for each in documents]
    documents = [each for each in documents if any(each[1])]
    if not documents or (pair and (len(documents) < 2 or documents[0] == documents[1])):
        counts["identical"] += identical
        counts["dropped"] += 1
        return []
    counts["truncated"] += too_long
    counts["unrolled"] += unrolled
    counts["reasoning_dropped"] += any(chat.drops_reasoning(talk, tokenizer) for talk in talks)
    if pair:
        (chosen, of_chosen), (rejected, of_rejected) = documents
        return [(chosen + rejected, of_chosen + of_rejected)]
    if tokenizer.template is not None and tokenizer.template.prompt_ends_in_space:
        before = next((number for number, message in enumerate(talks[0]) if message["role"] == "assistant"), 0)
        prompt = chat.encode_prompt(talks[0][:before], tokenizer, task.system_prompt) if before else []
        counts["prompt_differs"] += documents[0][0][: len(prompt)] != prompt[: len(documents[0][0])]
    return documents


def cut_document(tokens: list[int], trained: list[bool], length: int, marks: Marks) -> Encoded:
    """Cut a document at its end to `length` tokens, but for the one that keeps it apart from the next document."""
    if len(tokens) <= length or marks.begin is not None:
        return tokens[:length], trained[:length]
    return [*tokens[: length - 1], marks.end], [*trained[: length - 1], False]


def _finish(
    tasks: Sequence[TuningTask], read: Sequence[dict[str, Any]], written: Sequence[dict[str, Any]], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Write shards.json of every folder; return the counts of all, with warnings."""
    counts: dict[str, Counter[str]] = {}
    shards: dict[str, dict[str, list[dict[str, Any]]]] = {"train": {}, "validation": {}}
    for task, *found in zip(tasks, read, written, strict=True):
        for each in found:
            counts.setdefault(task.name, Counter()).update(each["counts"])
        for part in shards.keys() & found[1].keys():
            shards[part].setdefault(task.name, []).append(found[1][part])
    first_bad = next((found["first_bad"] for found in (*read, *written) if found["first_bad"]), "")
    total = sum(counts.values(), Counter[str]())
    if not shards["train"]:
        section, why = _section(tasks[0].settings), f", the first: {first_bad}" if first_bad else ""
        raise UserError(
            f"not one token of {total['conversations']} conversations would be trained",
            where=f"{section}.sources",
            fix=f"{total['bad']} of them cannot be used{why}; {total['dropped']} have no answer within the context. "
            f"Only what the assistant says is trained: look at the roles, or raise {section}.seq_len.",
        )
    for key, text in {
        "bad": f"conversations cannot be used, the first: {first_bad}",
        "unstopped": "answers do not end in a token that stops the model: it learns to go on after them",
        "unspelled": "characters cannot be spelled by the tokenizer: the model will not learn them",
    }.items():
        if total[key]:
            warnings.warn(f"{total[key]:,} {text}", UserWarned, stacklevel=2)
    sums: dict[str, dict[str, dict[str, int]]] = {"train": {}, "validation": {}}
    for part, of in shards.items():
        for name, some in of.items():
            sums[part][name] = {key: sum(shard[key] for shard in some) for key in _OF_A_PART}
            sums[part][name]["bytes"] = sums[part][name].pop("row_bytes")
            facts = {"source": name, "seq_len": tasks[0].seq_len, "dtype": np.dtype(tokenizer.dtype).name}
            facts |= sums[part][name] | {"most_in_a_row": max(shard["most_in_a_row"] for shard in some)}
            facts["files"] = {file: about for shard in some for file, about in shard["files"].items()}
            write_facts(tasks[0].folder / part / name, facts, tokenizer.conversation_marks)
    train = sums["train"]
    return {
        "train": {key: sum(each[key] for each in train.values()) for key in next(iter(train.values()))},
        "validation": sums["validation"],
        **{key: total[key] for key in ("conversations", "truncated", "dropped")},
        **{key: count for key, count in total.items() if count},
        "by_source": {name: {**count, "train": train.get(name)} for name, count in counts.items()},
    }


# ---- what became of them ----


def documents_in_a_row(folder: Path) -> int:
    """Return the most documents, two for each pair, that a row of pairs below `folder` holds."""
    folders = [path for part in ("train", "validation") for path in find_shard_folders(folder / part).values()]
    return 2 * max(int(open_shards(path).facts["most_in_a_row"]) for path in folders)


def show_examples(folder: Path, tokenizer: Tokenizer, count: int, *, documents: int = 1) -> Iterator[tuple[str, Text]]:
    """Return the first `documents` conversations of `count` rows of `folder`/train, from each source in turn.

    Trained tokens are green and between ⟦ and ⟧, control tokens are spelled out, and an answer that was cut is marked.
    Print them with a `rich` console; the brackets remain where there is no color.
    """
    sources = {name: open_shards(path) for name, path in find_shard_folders(folder / "train").items()}
    places = ((name, row) for row in range(count) for name, shards in sources.items() if row < shards.rows)
    for name, row in itertools.islice(places, count):
        yield name, _shown(sources[name], row, tokenizer, documents)


def _shown(shards: TokenShards, row: int, tokenizer: Tokenizer, documents: int) -> Text:
    marks = shards.marks
    tokens, mask = (each[0] for each in read_rows(shards, np.array([row])))
    numbers = segments(tokens[None], marks)[0][0]
    if marks.pad != marks.end:
        numbers[tokens == marks.pad] = -1
    firsts = {int(number): token for number, token in zip(numbers[::-1], tokens[::-1].tolist(), strict=True)}
    text = Text()
    # Where one token ends and fills, what fills is segments that begin with it.
    shown = [number for number, token in sorted(firsts.items()) if number >= 0 and token != marks.end]
    for document in shown[:documents]:
        here = np.flatnonzero(numbers == document)
        # An answer that fills its document to the length at which documents are cut, and that nothing closes, was cut.
        last = here[-1] - (tokens[here[-1]] == marks.end and not mask[here[-1]])  # an end may keep documents apart
        closed = int(tokens[last]) in tokenizer.controls.values()
        was_cut = len(here) in (shards.seq_len, shards.seq_len // 2) and mask[last] and not closed
        for part in np.split(here, np.flatnonzero(np.diff(mask[here])) + 1):
            said = tokenizer.decode(tokens[part], keep_special=True)
            text.append(f"⟦{said}⟧" if mask[part[0]] else said, style="bold green" if mask[part[0]] else "dim")
            if was_cut and part[-1] == last:
                text.append(" [cut here: too long]", style="bold red")
    return text
