"""Rows of conversations and pairs as text to look at, with what is trained in them."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.text import Text

from affinage.data.token_shards import TokenShards, find_shard_folders
from affinage.data.tokenizer import Tokenizer


def show_examples(folder: Path, tokenizer: Tokenizer, count: int) -> Iterator[tuple[str, Text]]:
    """Return the first conversation or pair of `count` rows of `folder`/train, from each source in turn.

    Trained tokens are green and between ⟦ and ⟧, and control tokens are spelled out.
    """
    sources = {name: TokenShards(path) for name, path in find_shard_folders(folder / "train").items()}
    places = ((name, row) for row in range(count) for name, shards in sources.items() if row < shards.rows)
    for name, row in itertools.islice(places, count):
        tokens, mask = (rows[0] for rows in sources[name].read(np.array([row])))
        here, text = np.arange(sources[name].spans_of_row(row)[0]["stop"]), Text()
        for run in np.split(here, np.flatnonzero(np.diff(mask[here])) + 1):
            spelled = tokenizer.decode(tokens[run], keep_special=True)
            text.append(f"⟦{spelled}⟧" if mask[run[0]] else spelled, style="bold green" if mask[run[0]] else "dim")
        yield name, text
