"""Pairs of a better and a worse answer to token shards: what direct preference optimization reads."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from affinage.config.tuning import ConversationSettings, DpoSettings
from affinage.data.chat import (
    Encoded,
    Message,
    check_messages,
    conversation_marks,
    cut_document,
    drops_reasoning,
    encode_documents,
    unstopped_answers,
)
from affinage.data.conversation_shapes import asked, text_message, turns
from affinage.data.dataloader import Batch, DataLoader, ValidationRows
from affinage.data.decontaminate import Searched
from affinage.data.executor import LOCAL, Executor
from affinage.data.foreign_json import encodable
from affinage.data.token_shards import find_shard_folders, open_shards
from affinage.data.tokenizer import Tokenizer
from affinage.data.tuning_shards import Example, TuningTask, write_tuning_shards
from affinage.errors import UserError

WORLD_FILE = "preferences.jsonl"
_SHAPES = (
    '"chosen" and "rejected", with "prompt", "instruction" or "messages" before them, '
    "or as whole conversations that begin alike"
)


REFERENCE = "reference_log_probabilities"  # of the batch: float32 [B, documents]


@dataclass(frozen=True)
class Pair:
    """What was said, and two ways to go on."""

    id: str
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]

    @property
    def content(self) -> str:
        """The prompt: pairs of one prompt are held out together."""
        return json.dumps(self.prompt)


def prepare_preferences(
    settings: DpoSettings,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    context: int,
    seed: int,
    system_prompt: str,
    world_folder: Path | None = None,
    searched: Searched | None = None,
    executor: Executor = LOCAL,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write the pairs as token shards; see `write_tuning_shards`.

    A pair is two documents that stand one after the other, prompt and chosen, prompt and rejected; several pairs share
    a row. Trained is what the assistant says after the prompt. A pair is `reasoning_dropped` where the chat template
    does not write all of its reasoning, `identical` where both sides are the same.
    """
    return write_tuning_shards(
        "dpo",
        settings,
        tokenizer,
        folder,
        seq_len=context,
        seed=seed,
        world_file=WORLD_FILE,
        world_folder=world_folder,
        system_prompt=system_prompt,
        searched=searched,
        executor=executor,
        progress=progress,
    )


def documents_in_a_row(folder: Path) -> int:
    """Return the most documents, two for each pair, that a row below `folder` holds."""
    rows = [path for part in ("train", "validation") for path in find_shard_folders(folder / part).values()]
    return 2 * max(int(open_shards(path).facts["most_in_a_row"]) for path in rows)


def read_line(item: Mapping[str, Any], _: ConversationSettings, *, where: str, name: str) -> Pair:
    """Return the pair of a line. Raises UserError for a line that holds none."""
    if not {"chosen", "rejected"} <= item.keys():
        raise UserError(f"this line has {sorted(item)}, which is no pair", where=where, fix=f"it needs {_SHAPES}")
    chosen, rejected = (_messages(item[key], "assistant", where) for key in ("chosen", "rejected"))
    prompt = _prompt(item, where)
    in_common = _in_common(chosen, rejected)
    if prompt is None or (in_common and prompt and _same(prompt[-1], in_common[-1])):
        prompt = in_common  # whole conversations, with the prompt beside them
    if chosen[: len(prompt)] == prompt and rejected[: len(prompt)] == prompt:  # they may begin with it
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if isinstance(told := item.get("system"), str) and told and not (prompt and prompt[0]["role"] == "system"):
        prompt = [{"role": "system", "content": told}, *prompt]
    if not prompt:
        raise UserError("a pair without a prompt", where=where, fix=f"it needs {_SHAPES}")
    for answer in (chosen, rejected):
        check_messages([*prompt, *answer], where=where)
    return Pair(encodable(str(item.get("id") or name)), prompt, chosen, rejected)


def _prompt(item: Mapping[str, Any], where: str) -> list[Message] | None:
    for key in ("prompt", "question", "messages", "conversations"):
        if key in item:
            return _messages(item[key], "user", where)
    return _messages(asked(item), "user", where) if "instruction" in item else None


def _messages(value: Any, role: str, where: str) -> list[Message]:
    value = [value] if isinstance(value, Mapping) else value
    return [text_message(message, where) for message in turns(value, role)]


def _same(one: Message, other: Message) -> bool:
    return bool(one["role"] == other["role"] and str(one["content"]).strip() == str(other["content"]).strip())


def _in_common(chosen: Sequence[Message], rejected: Sequence[Message]) -> list[Message]:
    """What two conversations begin with, without what the assistant says last."""
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    return list(chosen[:same])


def examples_of(line: Pair, task: TuningTask, tokenizer: Tokenizer, counts: Counter[str]) -> Sequence[Example]:
    """Return the pair as one example: its sides, one after the other."""
    sides = [_side(line, answer, tokenizer, task.system_prompt) for answer in (line.chosen, line.rejected)]
    too_long = sum(len(tokens) for tokens, _ in sides) > task.seq_len
    if too_long and task.settings.truncation == "drop":
        counts["too_long"] += 1
        counts["dropped"] += 1
        return ()
    identical = sides[0] == sides[1]
    counts["unstopped"] += sum(unstopped_answers(*side, tokenizer.stops) for side in sides)
    if too_long:
        marks = conversation_marks(tokenizer)
        sides = [cut_document(tokens, trained, task.seq_len // 2, marks) for tokens, trained in sides]
    if not all(any(trained) for _, trained in sides) or sides[0] == sides[1]:
        counts["identical"] += identical
        counts["dropped"] += 1
        return ()
    counts["truncated"] += too_long
    counts["reasoning_dropped"] += any(
        drops_reasoning([*line.prompt, *answer], tokenizer, task.system_prompt, trained_from=len(line.prompt))
        for answer in (line.chosen, line.rejected)
    )
    (chosen, of_chosen), (rejected, of_rejected) = sides
    return (Example(chosen + rejected, of_chosen + of_rejected),)


def _side(pair: Pair, answer: Sequence[Message], tokenizer: Tokenizer, system_prompt: str) -> Encoded:
    found = encode_documents([*pair.prompt, *answer], tokenizer, system_prompt, trained_from=len(pair.prompt))
    if len(found) > 1:
        raise UserError(
            f"the chat template writes earlier turns otherwise when others follow, and a side of {pair.id} has several "
            "answers: no one text has them all as the model would have said them",
            where="chat_template",
            fix="Give pairs whose sides are one answer, with the turns before it in the prompt.",
        )
    return found[0]


class PreferenceFeed:
    """The batches of a loader, each with the reference's log-probabilities of its documents."""

    def __init__(self, rows: DataLoader, reference: Mapping[str, Float[np.ndarray, "rows documents"]]) -> None:
        """`reference` has an array for each folder of rows."""
        self._rows, self._reference = rows, reference

    def iterate(self, start_step: int) -> Iterator[Batch]:
        """Batches of steps start_step, start_step + 1, ..., without end."""
        return self.iterate_part(start_step, 0, 1)

    def iterate_part(self, start_step: int, part: int, parts: int) -> Iterator[Batch]:
        """See `affinage.training.job.DivisibleFeed`."""
        for step, batch in zip(itertools.count(start_step), self._rows.iterate(start_step, part, parts)):
            own = slice(part * len(batch["rows"]), (part + 1) * len(batch["rows"]))
            found = [self._reference[folder][row] for folder, row in self._rows.where(step)[own]]
            yield {**batch, REFERENCE: np.stack(found).astype(np.float32)}


class PreferenceRows:
    """Held-out pairs in a fixed order, with the reference's log-probabilities where they are known beforehand."""

    bytes = 0  # the loss is of pairs, not of text

    def __init__(self, rows: ValidationRows, reference: Float[np.ndarray, "rows documents"] | None) -> None:
        self._rows, self._reference = rows, reference

    def __iter__(self) -> Iterator[Batch]:
        if self._reference is None:
            yield from self._rows
            return
        for index, batch in enumerate(self._rows):
            found = np.zeros((len(batch["tokens"]), self._reference.shape[1]), np.float32)
            chosen = self._rows.rows_of(index)
            found[: len(chosen)] = self._reference[chosen]
            yield {**batch, REFERENCE: found}


def read_reference(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of `folder` by the folders of rows they belong to."""
    return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(folder.glob("*.npy"))}
