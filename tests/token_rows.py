"""Folders of token shards with rows that a test made up."""

from pathlib import Path
from typing import Any

import numpy as np

from affinage.data.token_shards import finish_folder, shard_file


def write_tokens(folder: Path, tokens: np.ndarray, shards: int = 1, **facts: Any) -> None:
    """Write rows of tokens as they are, spread over `shards` files, and shards.json with `facts`."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = []
    for shard, part in enumerate(np.array_split(tokens, shards)):
        name = shard_file("tokens", shard, shards)
        np.save(folder / name, part)
        files = {name: {"rows": len(part), "bytes": (folder / name).stat().st_size}}
        counts.append({"rows": len(part), "files": files})
    finish_folder(folder, counts, seq_len=tokens.shape[1], dtype=tokens.dtype.name, **facts)
