"""What evaluations leave in a folder: results.json and items/TASK.jsonl, all of one model."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from affinage.data.atomic import write_atomically, write_json
from affinage.evaluation.item_lines import line_of
from affinage.generation.model import LoadedModel
from affinage.model.parameter import PyTree

RESULTS = "results.json"
ITEMS = "items"
STATE = "state"  # key of what the model was that no recipe judged; see `affinage.pipeline.eval_results`


def fingerprint(model: LoadedModel) -> str:
    """What tells a model from others: its graph, how it is computed, and a sum over the bits of all weights."""
    sums = [int(one) for one in jax.device_get(_sums(model.params))]
    facts = json.dumps([model.graph.to_dict(), model.compute_dtype, model.context, sums], sort_keys=True, default=str)
    return hashlib.blake2b(facts.encode(), digest_size=12).hexdigest()


@jax.jit
def _sums(params: PyTree) -> list[UInt32[Array, ""]]:
    return [_sum(leaf) for leaf in jax.tree.leaves(params)]


def _sum(leaf: Array) -> UInt32[Array, ""]:
    """The bits of every element times a number that depends on its place, modulo 2**32; no copy of the weights."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
    for axis in range(leaf.ndim):
        place = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        bits = bits * (place * jnp.uint32(2654435762) + jnp.uint32(1))
    return jnp.sum(bits, dtype=jnp.uint32)


def identity(model: LoadedModel, weights: str) -> str:
    """What tells a model's results from those of others: the fingerprint of its weights, and how it reads and is told.

    A Hugging Face folder whose tokenizer or template was mended has the same weights, and is another model.
    """
    told = hashlib.blake2b(f"{weights} {model.system_prompt}".encode(), digest_size=12)
    told.update(b"" if model.tokenizer.template is None else model.tokenizer.template.source.encode())
    with TemporaryDirectory() as folder:
        model.tokenizer.write(Path(folder))
        for file in sorted(Path(folder).iterdir()):
            told.update(hashlib.sha256(file.read_bytes()).digest())
    return told.hexdigest()


def write_results(
    results: Mapping[str, Any],
    items: Mapping[str, Sequence[Mapping[str, Any]]],
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Write results and the harness's samples of each task, beside what the folder has of the same model.

    What it has of a model with another fingerprint, or of one that nobody can tell, is removed, and `say` told so.
    Killed at any moment, it leaves no two models that would be taken for one.
    """
    kept = read_results(folder)
    if kept.get("fingerprint") != results["fingerprint"]:
        _clear(folder, say)
        kept = {}
    (folder / ITEMS).mkdir(parents=True, exist_ok=True)
    for name, samples in items.items():
        lines = "".join(json.dumps(line_of(sample)) + "\n" for sample in samples)
        write_atomically(folder / ITEMS / f"{name}.jsonl", lines.encode())
    write_json(folder / RESULTS, _beside(kept, results))


def read_results(folder: Path) -> dict[str, Any]:
    """results.json; {} where there is none that can be read."""
    try:
        found = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _clear(folder: Path, say: Callable[[str], None]) -> None:
    (folder / RESULTS).unlink(missing_ok=True)  # first: items without it are nobody's
    old = sorted((folder / ITEMS).glob("*.jsonl"))
    for file in old:
        file.unlink()
    if old:
        say(f"Removed, as they are not of this model as it is now: answers in {folder} to {_named(old)}")


def _named(files: Sequence[Path]) -> str:
    return ", ".join(file.stem for file in files)


def _beside(kept: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """The results, and those of tasks that an earlier command evaluated; an entry says its versions if they differ."""
    if not kept:
        return dict(results)
    old = {"versions": kept["versions"]} if kept["versions"] != results["versions"] else {}
    tasks = {name: old | entry for name, entry in kept["tasks"].items()} | results["tasks"]
    merged = {**kept, **results, "tasks": tasks, "samples": kept["samples"] | results["samples"]}
    earlier, now = kept.get("contamination"), results.get("contamination")
    if earlier is not None:
        looked = {name: told for name, told in earlier["tasks"].items() if name not in results["tasks"]}
        merged["contamination"] = {**earlier, **(now or {}), "tasks": looked | (now["tasks"] if now else {})}
    return merged
