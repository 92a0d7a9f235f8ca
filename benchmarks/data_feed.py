"""Batches from packed rows: shuffled, mixed from five sources, with segment ids, positions and loss mask.

    python benchmarks/data_feed.py [--quick]

Rows of 2,048 random tokens with a document boundary every 700 or so, five sources in 20 files. `grain` is Grain's own
pipeline of the same: a source per folder, shuffle, repeat, mix with the same weights (checked), batch, and the same
fields. `loader` does less: what a PyTorch DataLoader does in one process, a permutation of one source held in memory,
rows taken one at a time and stacked, then the same fields. Rates are per second of CPU, in one thread: the machine may
have other work.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import grain
import numpy as np

from affinage.data.dataloader import DataLoader, make_batch
from affinage.data.special_tokens import BOS
from affinage.data.token_shards import TokenShards, find_shard_folders, open_shards, write_tokens

CONTEXT, BATCH = 2048, 32
FIRST = 10  # the second token of a row is this and the number of its source
WEIGHTS = {"a": 0.4, "b": 0.3, "c": 0.1, "d": 0.1, "e": 0.1}


def write_sources(folder: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    for number, (name, weight) in enumerate(WEIGHTS.items()):
        (folder / name).mkdir(parents=True)
        height = int(rows * weight)
        tokens = rng.integers(10, 50_000, (height, CONTEXT)).astype(np.uint16)
        tokens[rng.random(tokens.shape) < 1 / 700] = BOS
        tokens[:, 1] = FIRST + number
        write_tokens(folder / name, tokens, shards=4)


class Source:
    """A Grain source: one row of tokens."""

    def __init__(self, files: TokenShards) -> None:
        self._files = files

    def __len__(self) -> int:
        return self._files.rows

    def __getitem__(self, index: int) -> np.ndarray:
        tokens = np.empty((1, CONTEXT), np.int32)
        self._files.read(np.array([index]), tokens, tokens)
        return tokens[0]


def by_grain(folders: dict[str, Path]) -> Callable[[int], dict[str, np.ndarray]]:
    sources = [
        grain.MapDataset.source(Source(open_shards(path))).seed(1).shuffle().repeat() for path in folders.values()
    ]
    mixed = grain.MapDataset.mix(sources, weights=list(WEIGHTS.values()))
    # The fields of a whole batch at once, which is faster than row by row.
    batches = mixed.batch(BATCH).map(lambda tokens: make_batch(tokens, np.ones_like(tokens), np.arange(BATCH)))
    return lambda step: batches[step]


def by_loader(folders: dict[str, Path]) -> Callable[[int], dict[str, np.ndarray]]:
    files = open_shards(folders["a"])
    order = np.random.default_rng(1).permutation(files.rows)

    def batch(step: int) -> dict[str, np.ndarray]:
        chosen = order[(step * BATCH + np.arange(BATCH)) % files.rows]
        rows = []
        for row in chosen:
            shard = int(np.searchsorted(files.starts, row, side="right")) - 1
            rows.append(files.shards[shard][row - files.starts[shard]].astype(np.int32))
        tokens = np.stack(rows)
        return make_batch(tokens, np.ones_like(tokens), np.arange(BATCH))

    return batch


def check_shares(batch: Callable[[int], dict[str, np.ndarray]], steps: int) -> None:
    """That rows come from the sources by their weights, to a hundredth."""
    seen = np.concatenate([batch(step)["tokens"][:, 1] - FIRST for step in range(steps)])
    shares = np.bincount(seen, minlength=len(WEIGHTS)) / len(seen)
    assert np.abs(shares - list(WEIGHTS.values())).max() < 0.01, shares


def rate(batch: Callable[[int], object], steps: int, rounds: int) -> float:
    """Millions of tokens per second of CPU, the best of some rounds."""
    best = 0.0
    for number in range(rounds):
        started = time.process_time()
        for step in range(number * steps, (number + 1) * steps):
            batch(step)
        best = max(best, steps * BATCH * CONTEXT / (time.process_time() - started) / 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and steps")
    quick = parser.parse_args().quick
    steps, rounds = (30, 3) if quick else (200, 5)
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as name:
        folder = Path(name)
        write_sources(folder, 4_000 if quick else 40_000)
        feed = DataLoader(folder, seed=1, batch=BATCH, mixture=[(0, WEIGHTS)])
        ours = rate(feed.batch, steps, rounds)
        peers = {"grain": by_grain(find_shard_folders(folder)), "loader": by_loader(find_shard_folders(folder))}
        for mixed in (feed.batch, peers["grain"]):
            check_shares(mixed, 64)
        results = []
        for peer, batch in peers.items():
            theirs = rate(batch, steps, rounds)
            results.append({"name": peer, "ours": ours, "peer": theirs, "unit": "Mtok/s", "ratio": ours / theirs})
    for each in results:
        print(f"{each['name']:12s} ours {each['ours']:6.1f}  peer {each['peer']:6.1f} Mtok/s  {each['ratio']:.2f}x")
    print(json.dumps({"benchmark": "data_feed", "results": results}))


if __name__ == "__main__":
    main()
