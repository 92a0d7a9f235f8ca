"""The kernels of the data pipeline beside other libraries: deduplication, encoding, chats, batches.

    python benchmarks/data.py [dedup encode chat sft feed] [--quick]

Rates are by seconds of CPU in one thread, so that other work on the machine does not count, but those of `sft` by the
clock, with a process for each core; each is the median of several repetitions. Libraries that are not installed
(datatrove, grain) are left out.

- dedup: documents of 2 KB, half of them planted copies. Ours goes from text to what stays, by way of scratch files, and
  checks the exact Jaccard similarity of every candidate; datatrove stops at candidates. Recall is over pairs planted
  evenly from J = 0.8 to 1, precision over all removals, both against Python sets of 5-grams.
- encode: the pocket world's documents to token ids with a vocabulary trained on them, beside SentencePiece's own loop
  with the same model and equal ids.
- chat: conversations to ids and loss masks in chat templates, in qwen3's with reasoning and two questions in a row,
  beside transformers' `apply_chat_template`, which makes no mask where a template has no {% generation %} blocks.
- sft: a file of conversations of two messages to packed token shards, as the step `sft-data` writes them, in ChatML by
  our own kind of vocabulary and in a template by a byte-level one; beside the `datasets` library, which maps
  `apply_chat_template`, for the template with masks, over the same conversations and does not pack them.
- feed: batches of 2,048 tokens, shuffled and mixed from five sources, with segment ids, positions and loss mask, beside
  Grain's pipeline of the same.
"""

import importlib.util
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Result, finish, median_seconds, parts_of, result
from planted_copies import jaccard_of, lexicon, near_copy, random_text, written


def cpu_seconds(run: Callable[[], object], repeats: int = 3) -> float:
    """Return the median seconds of CPU of some repetitions."""
    return median_seconds(run, repeats, time.process_time)


# ---- dedup ----

BANDS = (16, 6)  # of hashes, as the defaults of `dedup:` have them


def planted(count: int) -> tuple[list[str], list[tuple[int, int]]]:
    """Return `count` texts of about 2 KB, and pairs of an original and its copy, J from 0.8 to 1, or 0.5 to 0.8."""
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
    """Return for every text the one that is kept: itself, or the one that it is a copy of."""
    from affinage.cluster.executor import Executor
    from affinage.config.data import DedupSettings
    from affinage.data.dedup import find_duplicates
    from affinage.data.documents import document_files, first_documents

    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as scratch:
        files = document_files(documents)
        removed = find_duplicates(files, DedupSettings(), Path(scratch), executor=Executor(1))
        kept = np.arange(first_documents(files)[-1])
        kept[removed["document"].to_numpy()] = removed["kept"].to_numpy()
        return kept


def by_datatrove(texts: list[str]) -> None:
    """Find candidates of duplicates with datatrove."""
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


def dedup(quick: bool) -> Iterator[Result]:
    """Near duplicates."""
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
    yield result("recall at J >= 0.8", sum(kept[a] == kept[b] for a, b in near) / len(near), "share", 1.0)
    right = sum(jaccard_of(texts[i], texts[kept[i]]) >= 0.8 for i in removed)
    yield result("precision", right / len(removed), "share", 1.0)
    peer = None
    if importlib.util.find_spec("datatrove") is not None:
        by_datatrove(texts[:10])  # loads its modules
        peer = 600 / cpu_seconds(lambda: by_datatrove(texts[:600]), 1)
    yield result("dedup, datatrove", ours, "documents/s", peer)


# ---- encode ----


def encode(quick: bool) -> Iterator[Result]:
    """Text to ids."""
    import sentencepiece

    from affinage.config.data import TokenizerSettings
    from affinage.data.documents import DocumentWriter
    from affinage.data.synthetic import write_world
    from affinage.data.tokenizer import Tokenizer
    from affinage.data.tokenizer_training import train_tokenizer

    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as name:
        folder = Path(name)
        write_world(folder / "world", megabytes=3 if quick else 60, seed=0)
        lines = [line for file in sorted((folder / "world" / "documents").glob("*.jsonl")) for line in file.open()]
        texts = [json.loads(line)["text"].replace("\u2581", " ") for line in lines]
        with DocumentWriter(folder / "train") as writer, DocumentWriter(folder / "validation"):
            for number, text in enumerate(texts):
                writer.add(id=str(number), source="text", text=text)
        train_tokenizer(folder, folder / "tokenizer", TokenizerSettings(vocab_size=3_000), ())
        ours = Tokenizer(folder / "tokenizer")
        model = sentencepiece.SentencePieceProcessor(model_file=str(ours.folder / "tokenizer.model"))
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        cold = megabytes / cpu_seconds(lambda: [Tokenizer(ours.folder).encode_batch(texts)])
        if [model.encode(text) for text in texts] != [ids.tolist() for ids in ours.encode_batch(texts)]:
            raise SystemExit("SentencePiece gives other ids")
        peer = megabytes / cpu_seconds(lambda: [model.encode(text) for text in texts], 1)
    yield result("encode, SentencePiece", cold, "MB/s", peer)


# ---- chat ----


def conversations(count: int, turns: int) -> list[list[dict[str, str]]]:
    """Return conversations of so many questions and answers, each of 10 to 120 words."""
    draw = random.Random(0)
    words = "the capital of France is Paris, and it has many old streets where people walk; où ? Douze".split()
    return [
        [
            {"role": role, "content": " ".join(draw.choices(words, k=draw.randint(10, 120)))}
            for role in ("user", "assistant") * turns
        ]
        for _ in range(count)
    ]


def chat(quick: bool) -> Iterator[Result]:
    """Conversations to ids and loss masks."""
    from template_forms import PIECES, SOURCES, folder_of
    from transformers import PreTrainedTokenizerFast

    from affinage.data.chat import encode_conversation
    from affinage.data.tokenizer import Tokenizer

    for form, turns in itertools.product(("llama3", "qwen2_5_training", "zephyr", "qwen3"), (1, 3, 30, 100)):
        folder = folder_of("pieces" if form in PIECES else "bytes")
        ours, theirs = Tokenizer(folder, SOURCES[form]), PreTrainedTokenizerFast.from_pretrained(folder)
        talks = conversations((20 if quick else 200) // turns + 1, turns)
        if form == "qwen3":  # which writes earlier answers without their reasoning; questions may come in a row, too
            answers = [message for talk in talks for message in talk if message["role"] == "assistant"]
            for answer in answers:
                answer["reasoning_content"] = answer["content"][:100]
            talks = [[talk[0], *talk] for talk in talks]
        more = {"return_assistant_tokens_mask": True, "return_dict": True} if "training" in form else {}
        write = partial(theirs.apply_chat_template, chat_template=SOURCES[form], **more)
        encoders = (partial(encode_conversation, tokenizer=ours, system_prompt=""), write)
        rates = [len(talks) / cpu_seconds(lambda e=e, t=talks: [*map(e, t)]) for e in encoders]
        yield result(f"{form}, {turns} turns", rates[0], "conversations/s", rates[1])


def sft(quick: bool) -> Iterator[Result]:
    """Files of conversations to token shards."""
    from template_forms import SOURCES, folder_of

    from affinage.data.chat import chat_template
    from tiny_models import tokenizer

    chatml, template = chat_template(), SOURCES["qwen2_5_training"]
    yield conversations_to_shards("ChatML", tokenizer().folder, None, quick, chat_template=chatml)
    marked = {"chat_template": template, "return_assistant_tokens_mask": True}
    yield conversations_to_shards("qwen2_5_training", folder_of("bytes"), template, quick, **marked)


def conversations_to_shards(form: str, folder: Path, template: str | None, quick: bool, **how: Any) -> Result:
    """A file of them in one form, by the tokenizer in a folder."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    from affinage.cluster.executor import Executor
    from affinage.config.training import SftSettings
    from affinage.data.tokenizer import FILE, Tokenizer
    from affinage.data.tuning_data import prepare_tuning_data

    datasets.disable_progress_bars()
    talks, ours = conversations(2_000 if quick else 40_000, 1), Tokenizer(folder, template)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / FILE), **ours.special_tokens)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return dict(theirs.apply_chat_template(row["messages"], return_dict=True, **how))

    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as name:
        file, numbers = Path(name, "talks.jsonl"), itertools.count()
        file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        settings = SftSettings(sources=[{"path": str(file)}], steps=1)

        def by_us() -> None:
            to = Path(name, f"out-{next(numbers)}")
            prepare_tuning_data(settings, ours, to, seq_len=1024, system_prompt="", executor=Executor())

        def by_datasets() -> None:
            rows = datasets.Dataset.from_json(str(file), cache_dir=str(Path(name, f"cache-{next(numbers)}")))
            rows.map(encode, num_proc=Executor().workers)

        rates = [len(talks) / median_seconds(run, 3) for run in (by_us, by_datasets)]
    return result(f"conversations to shards in {form}, datasets", rates[0], "conversations/s", rates[1])


# ---- feed ----

SEQ_LEN, BATCH = 2048, 32
WEIGHTS = {"a": 0.4, "b": 0.3, "c": 0.1, "d": 0.1, "e": 0.1}


def write_sources(folder: Path, rows: int) -> None:
    """Write rows of random tokens with a document boundary every 700 or so, in four shards a source."""
    from affinage.data.special_tokens import BOS
    from token_rows import write_tokens

    rng = np.random.default_rng(0)
    for name, weight in WEIGHTS.items():
        (folder / name).mkdir(parents=True)
        tokens = rng.integers(10, 50_000, (int(rows * weight), SEQ_LEN)).astype(np.uint16)
        tokens[rng.random(tokens.shape) < 1 / 700] = BOS
        write_tokens(folder / name, tokens, shards=4)


class GrainSource:
    """A source of Grain: one row of tokens."""

    def __init__(self, shards: Any) -> None:
        self._shards = shards

    def __len__(self) -> int:
        return self._shards.rows

    def __getitem__(self, index: int) -> np.ndarray:
        return self._shards.read(np.array([index]))[0][0]


def by_grain(sources: list[Any]) -> Callable[[int], dict[str, np.ndarray]]:
    """Return the batch of a step, mixed by Grain."""
    import grain

    from affinage.data.dataloader import make_batch

    def batch_of(tokens: np.ndarray) -> dict[str, np.ndarray]:
        return make_batch(tokens, np.ones_like(tokens), np.arange(len(tokens)))

    datasets = [grain.MapDataset.source(GrainSource(each)).seed(1).shuffle().repeat() for each in sources]
    mixed = grain.MapDataset.mix(datasets, weights=list(WEIGHTS.values()))
    batches = mixed.batch(BATCH).map(batch_of)  # the fields of a batch at once, which is faster than row by row
    return lambda step: batches[step]


def feed(quick: bool) -> Iterator[Result]:
    """Batches of a mixture."""
    from affinage.data.dataloader import DataLoader
    from affinage.data.token_shards import TokenShards, find_shard_folders

    steps = 30 if quick else 200

    def rate(batch: Callable[[int], object]) -> float:
        return steps * BATCH * SEQ_LEN / cpu_seconds(lambda: [batch(step) for step in range(steps)], 5) / 1e6

    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as name:
        write_sources(Path(name), 4_000 if quick else 40_000)
        loader = DataLoader(Path(name), seed=1, batch=BATCH, mixture=[(0, WEIGHTS)])
        sources = [TokenShards(path) for path in find_shard_folders(Path(name)).values()]
        peer = rate(by_grain(sources)) if importlib.util.find_spec("grain") is not None else None
        yield result("mixture of five sources, grain", rate(loader.batch), "Mtok/s", peer)


PARTS: dict[str, Callable[[bool], Iterator[Result]]] = {
    "dedup": dedup,
    "encode": encode,
    "chat": chat,
    "sft": sft,
    "feed": feed,
}


def main() -> None:
    parts, quick = parts_of(__doc__, PARTS, list(PARTS))
    finish("data", [line for part in parts.values() for line in part(quick)])


if __name__ == "__main__":
    main()
