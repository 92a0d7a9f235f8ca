"""Conversations to token shards with a mask of the tokens to train: what supervised fine-tuning reads."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer
from rich.text import Text

from affinage.config.tuning import ConversationSettings, SftSettings
from affinage.data.chat import (
    Message,
    conversation_marks,
    cut_document,
    drops_reasoning,
    encode_documents,
    encode_prompt,
    unstopped_answers,
)
from affinage.data.conversation_shapes import Conversation, conversation
from affinage.data.dataloader import segments
from affinage.data.decontaminate import Searched
from affinage.data.executor import LOCAL, Executor
from affinage.data.special_tokens import Marks
from affinage.data.token_shards import TokenShards, find_shard_folders, open_shards
from affinage.data.tokenizer import Tokenizer
from affinage.data.tuning_shards import Example, TuningTask, write_tuning_shards

WORLD_FILE = "chat.jsonl"


def prepare_conversations(
    settings: SftSettings,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    context: int,
    seed: int,
    world_folder: Path | None = None,
    searched: Searched | None = None,
    executor: Executor = LOCAL,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write the conversations as token shards; see `write_tuning_shards`.

    Several conversations share a row; each begins with <s>, so that none sees another. What is longer than `context`
    is shortened or left out as `truncation` says, and left out if nothing trained remains. One that the chat template
    writes several times is `unrolled`; one of whose reasoning it does not write some is `reasoning_dropped`.
    """
    return write_tuning_shards(
        "sft",
        settings,
        tokenizer,
        folder,
        seq_len=context,
        seed=seed,
        world_file=WORLD_FILE,
        world_folder=world_folder,
        system_prompt=settings.system_prompt,
        searched=searched,
        executor=executor,
        progress=progress,
    )


def read_line(item: Mapping[str, Any], source: ConversationSettings, *, where: str, name: str) -> Conversation:
    """Return the conversation of a line. Raises UserError for a line that holds none."""
    return conversation(item, source.format, where=where, name=name)


def examples_of(line: Conversation, task: TuningTask, tokenizer: Tokenizer, counts: Counter[str]) -> Sequence[Example]:
    """Return the conversation as one example; as several where the chat template must write it several times."""
    messages: Sequence[Message] = line.messages
    truncation = task.settings.truncation
    documents = encode_documents(messages, tokenizer, task.system_prompt)
    unrolled = len(documents) > 1
    shortened = any(len(tokens) > task.seq_len for tokens, _ in documents)
    if shortened and truncation == "drop":
        counts["too_long"] += 1
        counts["dropped"] += 1
        return ()
    if shortened and truncation == "drop_turns":
        for fewer in _shorter(messages):
            if any(len(tokens) <= task.seq_len for tokens, _ in documents):
                break
            documents = encode_documents(fewer, tokenizer, task.system_prompt)
        documents = [each for each in documents if len(each[0]) <= task.seq_len] or documents[:1]
    counts["unstopped"] += sum(unstopped_answers(*each, tokenizer.stops) for each in documents)
    marks = conversation_marks(tokenizer)
    documents = [cut_document(tokens, trained, task.seq_len, marks) for tokens, trained in documents]
    documents = [(tokens, trained) for tokens, trained in documents if any(trained)]
    if not documents:
        counts["dropped"] += 1
        return ()
    counts["truncated"] += shortened
    counts["unrolled"] += unrolled
    counts["reasoning_dropped"] += drops_reasoning(messages, tokenizer, task.system_prompt)
    counts["prompt_differs"] += _prompt_differs(messages, documents[0][0], tokenizer, task.system_prompt)
    return [Example(tokens, trained) for tokens, trained in documents]


def _prompt_differs(messages: Sequence[Message], tokens: list[int], tokenizer: Tokenizer, system_prompt: str) -> bool:
    """Whether the first answer is trained after other ids than those by which the model will be asked for it.

    So it is where the template's prompt ends in a space, which joins the first word of the answer.
    """
    template = tokenizer.template
    first = next((at for at, message in enumerate(messages) if message["role"] == "assistant"), 0)
    if template is None or not first or not template.asks_with_a_space():
        return False
    prompt = encode_prompt(messages[:first], tokenizer, system_prompt)
    return tokens[: len(prompt)] != prompt[: len(tokens)]


def _shorter(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The conversation up to ever earlier answers, down to the first."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return (messages[: last + 1] for last in reversed(answers[:-1] if answers[-1:] == [len(messages) - 1] else answers))


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
    tokens = np.empty((1, shards.seq_len), np.int64)
    mask = np.ones((1, shards.seq_len), np.int64)
    shards.read(np.array([row]), tokens, mask)
    pieces = _documents(tokens[0], shards.marks)[:documents]
    length = pieces[-1].stop
    shown, trained = tokens[0, :length], mask[0, :length].astype(bool)
    cut = {stop for piece in pieces if (stop := _cut_at(piece, shown, trained, shards, tokenizer)) is not None}
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
    shards: TokenShards,
    tokenizer: Tokenizer,
) -> int | None:
    """Where the last answer of a document ends if it was cut; else None.

    Then nothing closes it, and the document is as long as one may be: a row, or half of one for the sides of a pair.
    """
    last = piece[-1]
    if tokens[last] == shards.marks.end and not trained[last]:  # what keeps it apart from the next: see `cut_document`
        last -= 1
    is_full = len(piece) in (shards.seq_len, shards.seq_len // 2)
    closed = int(tokens[last]) in tokenizer.controls.values()
    return last + 1 if is_full and trained[last] and not closed else None
