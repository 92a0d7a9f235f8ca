"""Near-duplicate detection: 20,000 documents of 2 KB, half of them planted copies, on one core, in memory.

    python benchmarks/data_dedup.py [--quick]

Ours goes from a column of UTF-8 text to what stays, the exact Jaccard check of every candidate included; the peers
(where they are installed) from Python strings to candidate pairs, unchecked, with as many hashes in the same bands.
Recall is over pairs planted evenly in J from 0.8 to 1, precision of all removals, both against Python sets of 5-grams.
"""

import argparse
import importlib.util
import json
import random
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import pyarrow as pa

from affinage.data.duplicates import Duplicates, find_duplicates
from affinage.recipe.data import DeduplicateSettings

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "data"))
from planted_copies import jaccard_of, lexicon, near_copy, random_text, written

SETTINGS = DeduplicateSettings()


class InMemory:
    """All texts as one part."""

    def __init__(self, texts: list[str]) -> None:
        self.column = pa.array(texts)
        self.rows = len(texts)

    def text(self) -> pa.Array:
        return self.column


def planted(count: int, seed: int = 1) -> tuple[list[str], list[tuple[int, int]]]:
    """`count` texts of about 2 KB; the pairs are an original and its copy, J spread from 0.5 to 1."""
    rng = random.Random(seed)
    words = lexicon(20_000, rng)
    texts, pairs = [], []
    for _ in range(count // 2):
        original = random_text(words, 330, rng)
        pairs.append((len(texts), len(texts) + 1))
        texts += [written(original), written(near_copy(original, rng.uniform(0.5, 1.0), words, rng))]
    return texts, pairs


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of CPU: all of it runs in one thread, and the machine may have other work."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return median(times)


def quality(texts: list[str], pairs: list[tuple[int, int]], found: Duplicates) -> tuple[float, float]:
    near = [(a, b) for a, b in pairs if jaccard_of(texts[a], texts[b]) >= SETTINGS.jaccard]
    recall = sum(found.kept[a] == found.kept[b] for a, b in near) / len(near)
    removed = [i for i, kept in enumerate(found.kept) if kept != i]
    right = sum(jaccard_of(texts[i], texts[found.kept[i]]) >= SETTINGS.jaccard for i in removed)
    return recall, right / len(removed)


def shingled(text: str) -> list[str]:
    words = re.findall(r"\w+", text.lower())
    return [" ".join(words[i : i + 5]) for i in range(max(1, len(words) - 4))]


def datasketch(texts: list[str]) -> None:
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(num_perm=96, params=(SETTINGS.bands, SETTINGS.rows))
    for i, text in enumerate(texts):
        signature = MinHash(num_perm=96)
        signature.update_batch([shingle.encode() for shingle in shingled(text)])
        index.query(signature)
        index.insert(i, signature)


def rensa(texts: list[str]) -> None:
    from rensa import RMinHash, RMinHashLSH

    index = RMinHashLSH(threshold=SETTINGS.jaccard, num_perm=96, num_bands=SETTINGS.bands)
    for i, text in enumerate(texts):
        signature = RMinHash(num_perm=96, seed=1)
        signature.update(shingled(text))
        index.query(signature)
        index.insert(i, signature)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="2,000 documents, in under a minute")
    count = 2_000 if parser.parse_args().quick else 20_000
    texts, pairs = planted(count)
    part = InMemory(texts)
    names = pa.table({"id": [f"{i:06d}" for i in range(count)]})
    found = find_duplicates([part], names, SETTINGS, workers=1)
    recall, precision = quality(texts, pairs, found)
    ours = count / seconds(lambda: find_duplicates([part], names, SETTINGS, workers=1), 5)
    megabytes = part.column.nbytes / 1e6
    print(f"{count} documents, {megabytes:.1f} MB; candidates {found.candidates}, pairs compared {found.compared}")
    print(f"ours: {ours:,.0f} documents/s, {ours * megabytes / count:.0f} MB/s")
    results = [
        {"name": "recall at J >= 0.8", "ours": recall, "peer": None, "unit": "share", "ratio": None},
        {"name": "precision", "ours": precision, "peer": None, "unit": "share", "ratio": None},
    ]
    for name, peer in (("datasketch", datasketch), ("rensa", rensa)):
        if importlib.util.find_spec(name) is None:
            print(f"{name}: not installed")
            continue
        sample = texts[: min(count, 2_000)]
        rate = len(sample) / seconds(partial(peer, sample), 3)
        print(f"{name}: {rate:,.0f} documents/s, {ours / rate:.0f} times slower")
        results.append({"name": name, "ours": ours, "peer": rate, "unit": "documents/s", "ratio": ours / rate})
    print(json.dumps({"benchmark": "data_dedup", "results": results}))


if __name__ == "__main__":
    main()
