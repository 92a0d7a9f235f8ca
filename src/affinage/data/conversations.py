"""Conversations to rows with a mask of the tokens to train: what supervised fine-tuning reads."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer
from rich.text import Text

from affinage.config.tuning import ConversationSettings, SftSettings
from affinage.data.batch import segments
from affinage.data.chat import Message, conversation_marks, cut_document, drops_reasoning, encode_documents
from affinage.data.conversation_files import read_conversations
from affinage.data.conversation_shapes import Conversation
from affinage.data.row_files import RowFiles, find_row_folders, open_rows
from affinage.data.special_tokens import Marks
from affinage.data.tokenizer import Tokenizer
from affinage.data.tuning_rows import Example, Job, Lines, write_tuning_rows
from affinage.errors import UserError

WORLD_FILE = "chat.jsonl"


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
    """Write the conversations as rows; see `write_tuning_rows`.

    Several conversations share a row; each begins with <s>, so that none sees another. What is longer than `context`
    is shortened or left out as `truncation` says, and left out if nothing trained remains. One that the chat template
    writes several times is `unrolled`; one of whose reasoning it does not write some is `reasoning_dropped`.
    `world_folder` is where `pocket-world` was written.
    """

    def lines(source: ConversationSettings, place: str) -> Lines:
        for found in read_conversations(source, place):
            yield found if isinstance(found, UserError) else (_content(found), _encoder(found))

    def _encoder(conversation: Conversation) -> Callable[[Counter[str]], Sequence[Example]]:
        return lambda counts: _examples(conversation, settings, tokenizer, context, counts)

    job = Job(settings, "sft", WORLD_FILE, lines, context, seed, world_folder, progress)
    return write_tuning_rows(job, tokenizer, folder)


def _content(conversation: Conversation) -> str:
    return json.dumps(conversation.messages)


def _examples(
    conversation: Conversation, settings: SftSettings, tokenizer: Tokenizer, context: int, counts: Counter[str]
) -> Sequence[Example]:
    """The conversation as one example; as several where the chat template must write it several times."""
    messages: Sequence[Message] = conversation.messages
    documents = encode_documents(messages, tokenizer, settings.system_prompt)
    unrolled = len(documents) > 1
    shortened = any(len(tokens) > context for tokens, _ in documents)
    if shortened and settings.truncation == "drop":
        counts["too_long"] += 1
        counts["dropped"] += 1
        return ()
    if shortened and settings.truncation == "drop_turns":
        for fewer in _shorter(messages):
            if any(len(tokens) <= context for tokens, _ in documents):
                break
            documents = encode_documents(fewer, tokenizer, settings.system_prompt)
        documents = [each for each in documents if len(each[0]) <= context] or documents[:1]
    marks = conversation_marks(tokenizer)
    documents = [cut_document(tokens, trained, context, marks) for tokens, trained in documents]
    documents = [(tokens, trained) for tokens, trained in documents if any(trained)]
    if not documents:
        counts["dropped"] += 1
        return ()
    counts["truncated"] += shortened
    counts["unrolled"] += unrolled
    counts["reasoning_dropped"] += drops_reasoning(messages, tokenizer, settings.system_prompt)
    return [Example(conversation.id, _content(conversation), tokens, trained) for tokens, trained in documents]


def _shorter(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The conversation up to ever earlier answers, down to the first."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return (messages[: last + 1] for last in reversed(answers[:-1] if answers[-1:] == [len(messages) - 1] else answers))


def show_examples(folder: Path, tokenizer: Tokenizer, count: int, *, documents: int = 1) -> Iterator[tuple[str, Text]]:
    """The first `documents` conversations of `count` rows of `folder`/train, from each source in turn, with its name.

    Trained tokens are green and between ⟦ and ⟧, control tokens are spelled out, and an answer that was cut is marked.
    Print them with a `rich` console; the brackets remain where there is no colour.
    """
    sources = {name: open_rows(path) for name, path in find_row_folders(folder / "train").items()}
    places = ((name, row) for row in range(count) for name, files in sources.items() if row < files.rows)
    for name, row in itertools.islice(places, count):
        yield name, _shown(sources[name], row, tokenizer, documents)


def _shown(files: RowFiles, row: int, tokenizer: Tokenizer, documents: int) -> Text:
    tokens = np.empty((1, files.context), np.int64)
    mask = np.ones((1, files.context), np.int64)
    files.read(np.array([row]), tokens, mask)
    pieces = _documents(tokens[0], files.marks)[:documents]
    length = pieces[-1].stop
    shown, trained = tokens[0, :length], mask[0, :length].astype(bool)
    cut = {stop for piece in pieces if (stop := _cut_at(piece, shown, trained, files, tokenizer)) is not None}
    text = Text()
    changes = np.flatnonzero(trained[1:] != trained[:-1]) + 1
    for start, stop in zip([0, *changes], [*changes, length]):
        said = tokenizer.decode(shown[start:stop], keep_special=True)
        if trained[start]:
            text.append(f"⟦{said}⟧", style="bold green")
        else:
            text.append(said, style="dim")
        if stop in cut:
            text.append(" [cut here: too long]", style="bold red")
    return text


def _documents(tokens: Integer[np.ndarray, " S"], marks: Marks) -> list[range]:
    """Where the documents of a row are, without what fills it."""
    ids, _ = segments(tokens[None], marks)
    found = []
    for first, stop in itertools.pairwise([0, *(np.flatnonzero(np.diff(ids[0])) + 1).tolist(), len(tokens)]):
        piece = tokens[first:stop]
        filled = 0 if marks.pad == marks.end else int(np.count_nonzero(piece == marks.pad))
        if filled < len(piece) and not (marks.pad == marks.end == piece[0]):
            found.append(range(first, stop - filled))
    return found


def _cut_at(
    piece: range,
    tokens: Integer[np.ndarray, " S"],
    trained: Bool[np.ndarray, " S"],
    files: RowFiles,
    tokenizer: Tokenizer,
) -> int | None:
    """Where the last answer of a document ends if it was cut; else None.

    Then nothing closes it, and the document is as long as one may be: a row, or half of one for the sides of a pair.
    """
    last = piece[-1]
    if tokens[last] == files.marks.end and not trained[last]:  # what keeps it apart from the next: see `cut_document`
        last -= 1
    is_full = len(piece) in (files.context, files.context // 2)
    closed = int(tokens[last]) in tokenizer.controls.values()
    return last + 1 if is_full and trained[last] and not closed else None
