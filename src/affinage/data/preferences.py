"""Pairs of a better and a worse answer to rows: what direct preference optimisation reads."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affinage.config.tuning import ConversationSettings, DpoSettings
from affinage.data.chat import (
    Encoded,
    Message,
    check_messages,
    conversation_marks,
    cut_document,
    drops_reasoning,
    encode_documents,
)
from affinage.data.conversation_files import read_lines
from affinage.data.conversation_shapes import asked, text_message, turns
from affinage.data.foreign_json import encodable
from affinage.data.row_files import find_row_folders, open_rows
from affinage.data.tokenizer import Tokenizer
from affinage.data.tuning_rows import Example, Job, Lines, write_tuning_rows
from affinage.errors import UserError

WORLD_FILE = "preferences.jsonl"
_SHAPES = (
    '"chosen" and "rejected", with "prompt", "instruction" or "messages" before them, '
    "or as whole conversations that begin alike"
)


@dataclass(frozen=True)
class Pair:
    """What was said, and two ways to go on."""

    id: str
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def prepare_preferences(
    settings: DpoSettings,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    context: int,
    seed: int,
    system_prompt: str,
    world_folder: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write the pairs as rows; see `write_tuning_rows`.

    A pair is two documents that stand one after the other, prompt and chosen, prompt and rejected; several pairs share
    a row. Trained is what the assistant says after the prompt. Pairs of one prompt are held out together. A pair is
    `reasoning_dropped` where the chat template does not write all of its reasoning.
    """

    def lines(source: ConversationSettings, place: str) -> Lines:
        for found in read_pairs(source, place):
            yield found if isinstance(found, UserError) else (json.dumps(found.prompt), encoder(found))

    def encoder(pair: Pair) -> Callable[[Counter[str]], Sequence[Example]]:
        return lambda counts: _example(pair, settings, tokenizer, system_prompt, context, counts)

    job = Job(settings, "dpo", WORLD_FILE, lines, context, seed, world_folder, progress)
    return write_tuning_rows(job, tokenizer, folder)


def documents_in_a_row(folder: Path) -> int:
    """The most documents, two for each pair, that a row below `folder` holds."""
    rows = [path for part in ("train", "validation") for path in find_row_folders(folder / part).values()]
    return 2 * max(int(open_rows(path).facts["most_in_a_row"]) for path in rows)


def read_pairs(source: ConversationSettings, place: str | None = None) -> Iterator[Pair | UserError]:
    """The pairs of a source in order; a line that is none comes as the error that says so."""
    for where, name, item in read_lines(source, place):
        if isinstance(item, UserError):
            yield item
            continue
        try:
            yield _pair(item, where=where, name=name)
        except UserError as error:
            yield error


def _pair(item: Mapping[str, Any], *, where: str, name: str) -> Pair:
    if not {"chosen", "rejected"} <= item.keys():
        raise UserError(f"this line has {sorted(item)}, which is no pair", where=where, fix=f"it needs {_SHAPES}")
    chosen, rejected = (_messages(item[key], "assistant", where) for key in ("chosen", "rejected"))
    prompt = _prompt(item, where)
    if prompt is None:
        prompt = _in_common(chosen, rejected)
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


def _in_common(chosen: Sequence[Message], rejected: Sequence[Message]) -> list[Message]:
    """What two conversations begin with, without what the assistant says last."""
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    return list(chosen[:same])


def _example(
    pair: Pair, settings: DpoSettings, tokenizer: Tokenizer, system_prompt: str, context: int, counts: Counter[str]
) -> Sequence[Example]:
    sides = [_side(pair, answer, tokenizer, system_prompt) for answer in (pair.chosen, pair.rejected)]
    too_long = sum(len(tokens) for tokens, _ in sides) > context
    if too_long and settings.truncation == "drop":
        counts["too_long"] += 1
        counts["dropped"] += 1
        return ()
    if too_long:
        marks = conversation_marks(tokenizer)
        sides = [cut_document(tokens, trained, context // 2, marks) for tokens, trained in sides]
    if not all(any(trained) for _, trained in sides) or sides[0] == sides[1]:
        counts["dropped"] += 1
        return ()
    counts["truncated"] += too_long
    counts["reasoning_dropped"] += any(
        drops_reasoning([*pair.prompt, *answer], tokenizer, system_prompt, trained_from=len(pair.prompt))
        for answer in (pair.chosen, pair.rejected)
    )
    (chosen, of_chosen), (rejected, of_rejected) = sides
    return (Example(pair.id, json.dumps(pair.prompt), chosen + rejected, of_chosen + of_rejected),)


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
