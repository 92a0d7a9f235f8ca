"""Rows of conversations and pairs as text to look at, with what is trained in them."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from affinage.data.token_shards import TokenShards, find_shard_folders
from affinage.data.tokenizer import Tokenizer


def show_examples(folder: Path, tokenizer: Tokenizer, count: int) -> Iterator[tuple[str, Text]]:
    """Return `count` conversations or pairs of the rows of `folder`/train, from each source in turn.

    Trained tokens are green and between ⟦ and ⟧, and control tokens are spelled out.
    """
    sources = {name: TokenShards(path) for name, path in find_shard_folders(folder / "train").items()}
    in_turn = itertools.zip_longest(*itertools.starmap(_spans, sources.items()))
    for name, row, span in itertools.islice(filter(None, itertools.chain.from_iterable(in_turn)), count):
        tokens, mask = (rows[0] for rows in sources[name].read(np.array([row])))
        here, text = np.arange(span["start"], span["stop"]), Text()
        for run in np.split(here, np.flatnonzero(np.diff(mask[here])) + 1):
            spelled = tokenizer.decode(tokens[run], keep_special=True)
            text.append(f"⟦{spelled}⟧" if mask[run[0]] else spelled, style="bold green" if mask[run[0]] else "dim")
        yield name, text


def _spans(name: str, shards: TokenShards) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for row in range(shards.rows):
        for span in shards.spans_of_row(row):
            yield name, row, span
