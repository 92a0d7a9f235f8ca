"""The kernels of the data pipeline beside other libraries: filtering, deduplication, encoding, chats, batches.

    python benchmarks/data.py [filter dedup encode chat feed] [--quick] [--text FILE.jsonl.gz ...]

Rates are by seconds of CPU in one thread, so that other work on the machine does not count; each is the median of
several repetitions. Libraries that are not installed (datasketch, rensa, datatrove, grain) are left out.

- filter: Unicode repair with the rules of length and of letters, beside a comprehension in Python that only counts, and
  one that only repairs; the scan for 30,000 benchmark items; language identification.
- dedup: documents of 2 KB, half of them planted copies. Ours goes from text to what stays, by way of scratch files, and
  checks the exact Jaccard similarity of every candidate; the peers stop at candidates. Recall is over pairs planted
  evenly from J = 0.8 to 1, precision over all removals, both against Python sets of 5-grams.
- encode: documents to token ids with a vocabulary trained on them, beside SentencePiece's own loop and the Hugging Face
  export of the same tokenizer, with equal ids. The text is `--text` (JSON Lines, key `text`) or the pocket world.
- chat: conversations to ids and loss masks in chat templates, beside transformers' `apply_chat_template`, which makes
  no mask where the template has no {% generation %} blocks.
- feed: batches of 2,048 tokens, shuffled and mixed from five sources, with segment ids, positions and loss mask, beside
  Grain's pipeline of the same, and beside a permutation of one source in memory, which does less.
"""

import argparse
import gzip
import importlib.util
import itertools
import json
import random
import re
import shutil
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "data"))
from planted_copies import jaccard_of, lexicon, near_copy, random_text, written

Result = dict[str, Any]


def cpu_seconds(run: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds of CPU of some repetitions."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return median(times)


def result(name: str, ours: float, unit: str, peer: float | None = None) -> Result:
    """A line of the results, printed as well."""
    beside = "" if peer is None else f", peer {peer:,.1f}: {ours / peer:.2f}x"
    print(f"{name}: {ours:,.3f} {unit}{beside}", flush=True)
    return {"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": None if peer is None else ours / peer}


# ---- filter ----

CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160), 0xAD, 0x200B, 0xFEFF])


def kept_by_python(texts: list[str]) -> list[bool]:
    kept = []
    for text in texts:
        letters = sum(map(str.isalnum, text))
        visible = len(text) - sum(map(str.isspace, text))
        kept.append(100 <= len(text) <= 500_000 and letters >= 0.7 * visible)
    return kept


def repaired_by_python(texts: list[str]) -> list[str]:
    return [
        unicodedata.normalize("NFC", text.translate(CONTROLS).replace("\r\n", "\n").replace("\u2581", "_"))
        for text in texts
    ]


def kept_by_kernel(column: pa.Array) -> list[bool]:
    from affinage.data.code_points import count_characters
    from affinage.data.repair import repair

    characters, counted, alphanumeric = count_characters(repair(column))
    return ((characters >= 100) & (characters <= 500_000) & (alphanumeric >= 0.7 * counted)).tolist()


def filtering(quick: bool, files: list[Path]) -> Iterator[Result]:
    from affinage.config.data import DecontaminateSettings
    from affinage.data.benchmark_items import BenchmarkItem
    from affinage.data.language import identify_language
    from affinage.data.overlap import ItemIndex
    from affinage.data.repair import repair

    rng = random.Random(1)
    words = lexicon(20_000, rng)
    texts = [written(random_text(words, rng.randint(10, 640), rng)) for _ in range(2_000 if quick else 30_000)]
    column, megabytes = pa.array(texts), sum(len(text.encode()) for text in texts) / 1e6
    if kept_by_kernel(column) != kept_by_python(texts) or repair(column).to_pylist() != repaired_by_python(texts):
        raise SystemExit("the kernels give another text, or keep another one, than their definitions in Python")
    ours = megabytes / cpu_seconds(lambda: kept_by_kernel(column), 5)
    for name, run in (("rules in Python", kept_by_python), ("repair in Python", repaired_by_python)):
        yield result(f"repair and rules, {name}", ours, "MB/s", megabytes / cpu_seconds(partial(run, texts)))
    items = [
        BenchmarkItem("quiz", str(k), (written(random_text(words, rng.randint(8, 60), rng)),)) for k in range(30_000)
    ]
    index = ItemIndex(items, DecontaminateSettings())
    index.scan(column)
    name = f"decontamination, {index.keys.size:,} runs searched"
    yield result(name, megabytes / cpu_seconds(lambda: index.scan(column)), "MB/s")
    seconds = cpu_seconds(lambda: [identify_language(text) for text in texts[:500]])
    yield result("language identification", 500 / seconds, "documents/s")


# ---- dedup ----

BANDS = (16, 6)  # of hashes, as the defaults of `dedup:` have them


def planted(count: int) -> tuple[list[str], list[tuple[int, int]]]:
    """`count` texts of about 2 KB; the pairs are an original and its copy, J from 0.8 to 1, and a fifth 0.5 to 0.8."""
    rng = random.Random(1)
    words = lexicon(20_000, rng)
    texts, pairs = [], []
    for _ in range(count // 2):
        original = random_text(words, 330, rng)
        pairs.append((len(texts), len(texts) + 1))
        similarity = rng.uniform(0.8, 1.0) if rng.random() < 0.8 else rng.uniform(0.5, 0.8)
        texts += [written(original), written(near_copy(original, similarity, words, rng))]
    return texts, pairs


def keepers(documents: Path) -> np.ndarray:
    """The text that is kept for every text: itself, or the one that it is a copy of."""
    from affinage.config.data import DedupSettings
    from affinage.data.dedup import find_duplicates
    from affinage.data.documents import document_files, row_groups
    from affinage.data.executor import Executor

    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as scratch:
        files = document_files(documents)
        removed, _ = find_duplicates(files, DedupSettings(), Path(scratch), executor=Executor(1))
        kept = np.arange(sum(group.rows for path in files for group in row_groups(path)))
        kept[removed["document"].to_numpy()] = removed["kept"].to_numpy()
        return kept


def shingled(text: str) -> list[str]:
    words = re.findall(r"\w+", text.lower())
    return [" ".join(words[i : i + 5]) for i in range(max(1, len(words) - 4))]


def by_datasketch(texts: list[str]) -> None:
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(num_perm=96, params=BANDS)
    for i, text in enumerate(texts):
        signature = MinHash(num_perm=96)
        signature.update_batch([shingle.encode() for shingle in shingled(text)])
        index.query(signature)
        index.insert(i, signature)


def by_rensa(texts: list[str]) -> None:
    from rensa import RMinHash, RMinHashLSH

    index = RMinHashLSH(threshold=0.8, num_perm=96, num_bands=BANDS[0])
    for i, text in enumerate(texts):
        signature = RMinHash(num_perm=96, seed=1)
        signature.update(shingled(text))
        index.query(signature)
        index.insert(i, signature)


def by_datatrove(texts: list[str]) -> None:
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.hashing import HashConfig
    from loguru import logger

    logger.remove()  # its report of every task

    def read(data: object, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        yield from (Document(text=text, id=str(i)) for i, text in enumerate(texts))

    hashed = HashConfig(hash_fc="sha1")  # its default gives strings to xxhash, which takes bytes
    config = MinhashConfig(n_grams=5, num_buckets=BANDS[0], hashes_per_bucket=BANDS[1], hash_config=hashed)
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as folder:
        signatures, buckets = f"{folder}/signatures", f"{folder}/buckets"
        steps = [
            ([read, MinhashDedupSignature(signatures, config=config)], 1),
            ([MinhashDedupBuckets(signatures, buckets, config=config)], BANDS[0]),
            ([MinhashDedupCluster(buckets, f"{folder}/removed", config=config)], 1),
        ]
        for number, (pipeline, tasks) in enumerate(steps):
            LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=f"{folder}/logs-{number}").run()


def dedup(quick: bool, files: list[Path]) -> Iterator[Result]:
    from affinage.data.documents import DocumentWriter

    texts, pairs = planted(2_000 if quick else 20_000)
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as name:
        with DocumentWriter(Path(name)) as writer:
            for number, text in enumerate(texts):
                writer.add(id=f"{number:06d}", source="s", text=text)
        kept = keepers(Path(name))
        ours = len(texts) / cpu_seconds(lambda: keepers(Path(name)), 5)
    near = [(a, b) for a, b in pairs if jaccard_of(texts[a], texts[b]) >= 0.8]
    removed = [i for i, keeper in enumerate(kept) if keeper != i]
    yield result("recall at J >= 0.8", sum(kept[a] == kept[b] for a, b in near) / len(near), "share")
    right = sum(jaccard_of(texts[i], texts[kept[i]]) >= 0.8 for i in removed)
    yield result("precision", right / len(removed), "share")
    yield result("dedup", ours, "documents/s")
    for name, peer, count in (
        ("datasketch", by_datasketch, 2_000),
        ("rensa", by_rensa, 2_000),
        ("datatrove", by_datatrove, 600),
    ):
        if importlib.util.find_spec(name) is not None:
            sample = texts[:count]
            peer(sample[:10])  # what it loads once
            yield result(
                name, ours, "documents/s", len(sample) / cpu_seconds(partial(peer, sample), 1 if count == 600 else 3)
            )


# ---- encode ----


def texts_of(files: list[Path], folder: Path, megabytes: float) -> list[str]:
    """Texts of the given JSON Lines files, or of the pocket world, in random order."""
    from affinage.data.synthetic import write_world

    if not files:
        write_world(folder / "world", megabytes=megabytes, seed=0)
        files = sorted((folder / "world" / "documents").glob("*.jsonl"))
    texts = []
    for file in files:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            texts += [json.loads(line)["text"].replace("\u2581", " ") for line in lines]
    random.Random(0).shuffle(texts)
    sizes = np.cumsum([len(text.encode()) for text in texts])
    return texts[: int(np.searchsorted(sizes, megabytes * 1e6)) + 1]


def encode(quick: bool, files: list[Path]) -> Iterator[Result]:
    import sentencepiece
    import tokenizers

    from affinage.config.data import TokenizerSettings
    from affinage.data.documents import DocumentWriter
    from affinage.data.tokenizer import Tokenizer
    from affinage.data.tokenizer_training import train_tokenizer
    from affinage.hub.vocabulary import write_hf_tokenizer

    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as name:
        folder = Path(name)
        texts = texts_of(files, folder, 3 if quick else 60)
        with DocumentWriter(folder / "train") as writer, DocumentWriter(folder / "validation"):
            for number, text in enumerate(texts):
                writer.add(id=str(number), source="text", text=text)
        settings = TokenizerSettings(vocab_size=50_000 if files else 3_000)
        train_tokenizer(folder, folder / "tokenizer", settings, (), seed=0)
        ours = Tokenizer(folder / "tokenizer")
        write_hf_tokenizer(ours, folder / "hf", context=2048)
        model = sentencepiece.SentencePieceProcessor(model_file=str(ours.folder / "tokenizer.model"))
        fast = tokenizers.Tokenizer.from_file(str(folder / "hf" / "tokenizer.json"))
        fast.encode_special_tokens = True
        batches = [texts[start : start + 200] for start in range(0, len(texts), 200)]
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        cold = megabytes / cpu_seconds(lambda: [Tokenizer(ours.folder).encode_flat(texts)])
        found = [ids for batch in batches for ids in ours.encode_batch(batch)]

    def by_tokenizers() -> list[list[int]]:
        return [each.ids for batch in batches for each in fast.encode_batch(batch, add_special_tokens=False)]

    peers = {"sentencepiece": lambda: [model.encode(text) for text in texts], "tokenizers": by_tokenizers}
    for name, run in peers.items():
        if run() != found:
            raise SystemExit(f"{name} gives other ids")
        yield result(f"{name}, equal ids", cold, "MB/s", megabytes / cpu_seconds(run, 1))


# ---- chat ----


def chat(quick: bool, _: list[Path]) -> Iterator[Result]:
    from template_forms import SOURCES, folder_of
    from transformers import PreTrainedTokenizerFast

    from affinage.data.chat import encode_conversation
    from affinage.data.tokenizer import Tokenizer

    draw = random.Random(0)
    words = "the capital of France is Paris, and it has many old streets where people walk; où ? Douze".split()
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as name:
        for added in (0, 1_000):
            folder = shutil.copytree(folder_of("bytes"), Path(name) / str(added))
            theirs = PreTrainedTokenizerFast.from_pretrained(folder)
            theirs.add_tokens([f"<|unused{number}|>" for number in range(added)], special_tokens=True)
            theirs.save_pretrained(folder)
            ours = Tokenizer(folder)
            for form, turns in itertools.product(("llama3", "qwen2_5_training"), (1, 3, 30)):
                ours.use_template(SOURCES[form])
                talks = [
                    [
                        {"role": role, "content": " ".join(draw.choices(words, k=draw.randint(10, 120)))}
                        for _ in range(turns)
                        for role in ("user", "assistant")
                    ]
                    for _ in range((20 if quick else 200) // turns + 1)
                ]
                more = {"return_assistant_tokens_mask": True, "return_dict": True} if "training" in form else {}
                write = partial(theirs.apply_chat_template, chat_template=SOURCES[form], **more)
                encoders = (partial(encode_conversation, tokenizer=ours, system_prompt=""), write)
                rates = [len(talks) / cpu_seconds(lambda e=e, t=talks: [*map(e, t)]) for e in encoders]
                yield result(f"{form}, {turns} turns, {added} more tokens", rates[0], "conversations/s", rates[1])


# ---- feed ----

SEQ_LEN, BATCH = 2048, 32
FIRST = 10  # the second token of a row is this and the number of its source
WEIGHTS = {"a": 0.4, "b": 0.3, "c": 0.1, "d": 0.1, "e": 0.1}


def write_sources(folder: Path, rows: int) -> None:
    """Rows of random tokens with a document boundary every 700 or so, in four shards a source."""
    from affinage.data.special_tokens import BOS
    from affinage.data.token_shards import write_tokens

    rng = np.random.default_rng(0)
    for number, (name, weight) in enumerate(WEIGHTS.items()):
        (folder / name).mkdir(parents=True)
        tokens = rng.integers(10, 50_000, (int(rows * weight), SEQ_LEN)).astype(np.uint16)
        tokens[rng.random(tokens.shape) < 1 / 700] = BOS
        tokens[:, 1] = FIRST + number
        write_tokens(folder / name, tokens, shards=4)


class GrainSource:
    """A source of Grain: one row of tokens."""

    def __init__(self, shards: Any) -> None:
        self._shards = shards

    def __len__(self) -> int:
        return self._shards.rows

    def __getitem__(self, index: int) -> np.ndarray:
        tokens = np.empty((1, SEQ_LEN), np.int32)
        self._shards.read(np.array([index]), tokens, tokens)
        return tokens[0]


def batch_of(tokens: np.ndarray) -> dict[str, np.ndarray]:
    from affinage.data.dataloader import make_batch

    return make_batch(tokens, np.ones_like(tokens), np.arange(len(tokens)))


def by_grain(sources: list[Any]) -> Callable[[int], dict[str, np.ndarray]]:
    import grain

    datasets = [grain.MapDataset.source(GrainSource(each)).seed(1).shuffle().repeat() for each in sources]
    mixed = grain.MapDataset.mix(datasets, weights=list(WEIGHTS.values()))
    batches = mixed.batch(BATCH).map(batch_of)  # the fields of a batch at once, which is faster than row by row
    return lambda step: batches[step]


def in_memory(source: Any) -> Callable[[int], dict[str, np.ndarray]]:
    order = np.random.default_rng(1).permutation(source.rows)

    def batch(step: int) -> dict[str, np.ndarray]:
        rows = []
        for row in order[(step * BATCH + np.arange(BATCH)) % source.rows]:
            shard = int(np.searchsorted(source.starts, row, side="right")) - 1
            rows.append(source.shards[shard][row - source.starts[shard]].astype(np.int32))
        return batch_of(np.stack(rows))

    return batch


def feed(quick: bool, files: list[Path]) -> Iterator[Result]:
    from affinage.data.dataloader import DataLoader
    from affinage.data.token_shards import find_shard_folders, open_shards

    steps = 30 if quick else 200

    def rate(batch: Callable[[int], object]) -> float:
        """Millions of tokens per second of CPU."""
        return steps * BATCH * SEQ_LEN / cpu_seconds(lambda: [batch(step) for step in range(steps)], 5) / 1e6

    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as name:
        write_sources(Path(name), 4_000 if quick else 40_000)
        loader = DataLoader(Path(name), seed=1, batch=BATCH, mixture=[(0, WEIGHTS)])
        sources = [open_shards(path) for path in find_shard_folders(Path(name)).values()]
        seen = np.concatenate([loader.batch(step)["tokens"][:, 1] - FIRST for step in range(64)])
        shares = np.bincount(seen, minlength=len(WEIGHTS)) / len(seen)
        if np.abs(shares - list(WEIGHTS.values())).max() > 0.01:
            raise SystemExit(f"the sources have other shares than their weights: {shares}")
        ours = rate(loader.batch)
        if importlib.util.find_spec("grain") is not None:
            yield result("mixture of five sources, grain", ours, "Mtok/s", rate(by_grain(sources)))
        yield result("mixture, against one source in memory", ours, "Mtok/s", rate(in_memory(sources[0])))


PARTS: dict[str, Callable[[bool, list[Path]], Iterator[Result]]] = {
    "filter": filtering,
    "dedup": dedup,
    "encode": encode,
    "chat": chat,
    "feed": feed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a tenth of the data, in under a minute")
    parser.add_argument("--text", nargs="*", type=Path, default=[], help="JSON Lines files for encode")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    parts = options.parts or list(PARTS)
    results = [one for part in parts for one in PARTS[part](options.quick, options.text)]
    print(json.dumps({"benchmark": "data", "results": results}))


if __name__ == "__main__":
    main()
