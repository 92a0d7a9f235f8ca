"""The results of benchmarks for what a name stands for, and the search of a model's training text for their items."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from affinage.checkpoint import CheckpointStore
from affinage.config.data import DecontaminateSettings
from affinage.data.decontaminate import BenchmarkItem, Contamination, ItemIndex, contamination, texts_of_rows
from affinage.data.documents import read_documents
from affinage.data.tokenizer import Tokenizer
from affinage.evaluation.results import RESULTS, STATE, Search
from affinage.pipeline import models
from affinage.pipeline.models import EVALUATIONS, ITEMS, MODEL, TRAININGS, Target
from affinage.pipeline.sources import fingerprints
from affinage.results import read_json

_OF_A_MODEL = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")  # files of a Hugging Face folder


def eval_results(name: str, runs: Path) -> Path | None:
    """The folder with the answers of a run, a model or a step of evaluation; None if there are none of it as it is now.

    Of a model, the results of `affinage eval` come before those of its run's own evaluation.
    """
    target = models.resolve(name, runs)
    if target.kind == "result":
        return target.path if (target.path / ITEMS).is_dir() else None
    own = results_folder(name, runs)
    if (own / ITEMS).is_dir() and read_json(own / RESULTS).get(STATE) == model_fingerprint(target, runs):
        return own
    run, trainings = (target.path.parent, (target.path.name,)) if target.kind == "model" else (target.path, TRAININGS)
    folders = [run / EVALUATIONS[each] for each in trainings if each in EVALUATIONS and target.step is None]
    return next((folder for folder in folders if (folder / ITEMS).is_dir()), None)


def results_folder(name: str, runs: Path) -> Path:
    """Where `affinage eval` keeps the results of a model; another name than its path has a hash of the path."""
    target = models.resolve(name, runs)
    step = "" if target.step is None else f"@{target.step}".replace(":", "-")
    path = os.path.abspath(target.path).removeprefix(f"{os.path.abspath(runs)}/")
    called = re.sub(r"[^A-Za-z0-9._-]+", "-", path.rpartition("/")[2] if path.startswith("/") else path)
    if called != path:
        called = f"{called}-{hashlib.blake2b(path.encode(), digest_size=4).hexdigest()}"
    return runs / "evaluations" / f"{called}{step}"


def model_fingerprint(target: Target, runs: Path) -> str:
    """A hash that tells a model from what it was or will be, without reading its weights."""
    model = models.locate(target, runs)
    folder, step = model.path, model.step
    if model.kind == "hub":
        files = [file for file in sorted(folder.iterdir()) if file.suffix in _OF_A_MODEL and file.is_file()]
        parts = [[Path(file).name, digest] for file, digest in fingerprints(map(str, files)).items()]
    else:
        store = CheckpointStore(models.checkpoints_of(folder, step))
        steps = models.averaged_steps(step, store.steps())
        parts = [[str(each), store.metadata(each).fingerprint] for each in steps]
        parts += [["average", step]] if isinstance(step, str) else []
        parts.append([MODEL, hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()])
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


def contamination_search(training: Path, settings: DecontaminateSettings | None = None) -> Search | None:
    """What finds items in the documents and conversations of a training and of those before it; None if there are none.

    `settings` decide what is a match; by default they are those of decontamination.
    """
    split, tokenizer = models.made_from(training, "split"), models.made_from(training, "train-tokenizer")
    found = [models.made_from(training, step) for step in ("sft-data", "preference-data")]
    chats = [(chat / "train", tokenizer) for chat in found if chat is not None and tokenizer is not None]

    def texts() -> Iterator[pa.Array]:
        for batch in read_documents(split / "train", ["text"]) if split is not None else ():
            yield batch.column("text")
        for rows, folder in chats:
            yield from texts_of_rows(rows, Tokenizer(folder))

    def search(items: Iterable[BenchmarkItem]) -> Contamination:
        return contamination(ItemIndex(items, (settings or DecontaminateSettings()).n_grams), texts())

    return search if split is not None or chats else None
