"""What training sees of packed rows."""

from pathlib import Path

import numpy as np

from affinage.data.dataloader import make_batch
from affinage.data.token_shards import TokenShards, find_shard_folders


def documents_in(folder: Path) -> list[tuple[list[int], list[bool]]]:
    """Tokens and loss mask of every document of the rows of a folder that has something to train, row after row."""
    found = []
    for path in find_shard_folders(folder).values():
        files = TokenShards(path)
        batch = make_batch(*files.read(np.arange(files.rows)), np.arange(files.rows), files.marks)
        for row, mask, ids in zip(batch["tokens"], batch["loss_mask"].astype(bool), batch["segment_ids"], strict=True):
            for number in np.unique(ids):
                here = (ids == number) & ((row != files.marks.pad) | (files.marks.pad == files.marks.end))
                if mask[here].any():
                    found.append((row[here].tolist(), mask[here].tolist()))
    return found
