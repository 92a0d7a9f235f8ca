"""Near-duplicate detection: 20,000 documents of 2 KB, half of them planted copies, on one core.

    python benchmarks/data_dedup.py [--quick]

Ours goes from a column of UTF-8 text to what stays, by way of its scratch files and with the exact Jaccard check of
every candidate. The peers (where they are installed) do less: datasketch and rensa go from Python strings to candidate
pairs, unchecked, with as many hashes in the same bands; datatrove's four steps run in its own executor on its own
files, to the list of what it would remove, unchecked.
Recall is over pairs planted evenly in J from 0.8 to 1, precision of all removals, both against Python sets of 5-grams.
"""

import argparse
import importlib.util
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from affinage.config.data import DedupSettings
from affinage.data.dedup import corpus_of, find_duplicates
from affinage.data.documents import DocumentWriter, document_files
from affinage.data.executor import Executor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "data"))
from planted_copies import jaccard_of, lexicon, near_copy, random_text, written

SETTINGS = DedupSettings()


def written_texts(texts: list[str], folder: Path) -> Path:
    """A document file with the texts, named by their numbers."""
    with DocumentWriter(folder) as writer:
        for number, text in enumerate(texts):
            writer.add(id=f"{number:06d}", source="s", text=text)
    return folder


def duplicates(documents: Path) -> tuple[np.ndarray, int, int]:
    """The kept text of every text, how many were candidates, and how many pairs were compared."""
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as scratch:
        corpus = corpus_of(document_files(documents), SETTINGS, Path(scratch))
        found = find_duplicates(corpus, executor=Executor(1))
        kept = np.arange(corpus.size)
        kept[found.removed["document"].to_numpy()] = found.removed["kept"].to_numpy()
        return kept, found.candidates, found.compared


def planted(count: int, seed: int = 1) -> tuple[list[str], list[tuple[int, int]]]:
    """`count` texts of about 2 KB; the pairs are an original and its copy, J from 0.8 to 1, and a fifth 0.5 to 0.8."""
    rng = random.Random(seed)
    words = lexicon(20_000, rng)
    texts, pairs = [], []
    for _ in range(count // 2):
        original = random_text(words, 330, rng)
        pairs.append((len(texts), len(texts) + 1))
        similarity = rng.uniform(0.8, 1.0) if rng.random() < 0.8 else rng.uniform(0.5, 0.8)
        texts += [written(original), written(near_copy(original, similarity, words, rng))]
    return texts, pairs


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of CPU: all of it runs in one thread, and the machine may have other work."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return median(times)


def quality(texts: list[str], pairs: list[tuple[int, int]], kept: np.ndarray) -> tuple[float, float]:
    near = [(a, b) for a, b in pairs if jaccard_of(texts[a], texts[b]) >= SETTINGS.threshold]
    recall = sum(kept[a] == kept[b] for a, b in near) / len(near)
    removed = [i for i, keeper in enumerate(kept) if keeper != i]
    right = sum(jaccard_of(texts[i], texts[kept[i]]) >= SETTINGS.threshold for i in removed)
    return recall, right / len(removed)


def shingled(text: str) -> list[str]:
    words = re.findall(r"\w+", text.lower())
    return [" ".join(words[i : i + 5]) for i in range(max(1, len(words) - 4))]


def datasketch(texts: list[str]) -> None:
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(num_perm=96, params=(SETTINGS.num_buckets, SETTINGS.hashes_per_bucket))
    for i, text in enumerate(texts):
        signature = MinHash(num_perm=96)
        signature.update_batch([shingle.encode() for shingle in shingled(text)])
        index.query(signature)
        index.insert(i, signature)


def rensa(texts: list[str]) -> None:
    from rensa import RMinHash, RMinHashLSH

    index = RMinHashLSH(threshold=SETTINGS.threshold, num_perm=96, num_bands=SETTINGS.num_buckets)
    for i, text in enumerate(texts):
        signature = RMinHash(num_perm=96, seed=1)
        signature.update(shingled(text))
        index.query(signature)
        index.insert(i, signature)


def datatrove(texts: list[str]) -> None:
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig

    def read(data: object, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        yield from (Document(text=text, id=str(i)) for i, text in enumerate(texts))

    config = MinhashConfig(
        n_grams=SETTINGS.n_grams, num_buckets=SETTINGS.num_buckets, hashes_per_bucket=SETTINGS.hashes_per_bucket
    )
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as folder:
        signatures, buckets, removed = f"{folder}/signatures", f"{folder}/buckets", f"{folder}/removed"
        for number, (step, tasks) in enumerate(
            (
                (MinhashDedupSignature(signatures, config=config), 1),
                (MinhashDedupBuckets(signatures, buckets, config=config), SETTINGS.num_buckets),
                (MinhashDedupCluster(buckets, removed, config=config), 1),
            )
        ):
            pipeline = [read, step] if number == 0 else [step]
            LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=f"{folder}/logs-{number}").run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="2,000 documents, in under a minute")
    count = 2_000 if parser.parse_args().quick else 20_000
    texts, pairs = planted(count)
    part = written_texts(texts, Path(tempfile.mkdtemp(prefix="affinage-bench-")))
    kept, candidates, compared = duplicates(part)
    recall, precision = quality(texts, pairs, kept)
    ours = count / seconds(lambda: duplicates(part), 5)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{count} documents, {megabytes:.1f} MB; candidates {candidates}, pairs compared {compared}")
    print(f"recall {recall:.4f} over pairs with J >= {SETTINGS.threshold}, precision {precision:.4f}")
    print(f"ours: {ours:,.0f} documents/s, {ours * megabytes / count:.0f} MB/s")
    results = [
        {"name": "recall at J >= 0.8", "ours": recall, "peer": None, "unit": "share", "ratio": None},
        {"name": "precision", "ours": precision, "peer": None, "unit": "share", "ratio": None},
    ]
    for name, peer in (("datasketch", datasketch), ("rensa", rensa), ("datatrove", datatrove)):
        if importlib.util.find_spec(name) is None:
            print(f"{name}: not installed")
            continue
        sample = texts[: min(count, 600 if name == "datatrove" else 2_000)]
        peer(sample[:10])  # what it loads once
        rate = len(sample) / seconds(partial(peer, sample), 1 if name == "datatrove" else 3)
        print(f"{name}: {rate:,.0f} documents/s, {ours / rate:.0f} times slower")
        results.append({"name": name, "ours": ours, "peer": rate, "unit": "documents/s", "ratio": ours / rate})
    print(json.dumps({"benchmark": "data_dedup", "results": results}))


if __name__ == "__main__":
    main()
