"""Models from the folders of trainings, imports and Hugging Face, with their weights split over the devices.

The folder of an import holds model.json (as a training's does), checkpoints/0 with the weights, tokenizer/, and
recipe.yaml. Every verb takes it as a model.
"""

import hashlib
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import yaml
from flax.traverse_util import flatten_dict

from affinage.checkpoint import CheckpointStore
from affinage.config.training import LoraSettings, PrecisionSettings
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError
from affinage.generation.engine import LoadedModel
from affinage.hardware.chips import chip
from affinage.hardware.devices import acquire
from affinage.json_files import whole_folder, write_json
from affinage.model import Adapters, Graph, abstract_params, logical_axes, parse
from affinage.parallel.sharding import Lines, replicated, serving_layout
from affinage.pipeline import models
from affinage.pipeline.models import KEPT, MODEL, TOKENIZER, Checkpoint, Target
from affinage.pipeline.store import read_manifest
from affinage.registry import VARIABLE, load_named_plugins
from affinage.results import read_json
from affinage.training.state import kept_frozen
from affinage.training.trainer import compute_dtype

if TYPE_CHECKING:
    from affinage.hub.folder import HubModel

_ANY_TEXT = "The quick brown fox, 0123456789; été; привет; 世界\n"
_HEADER = """\
# Begins with the weights and the tokenizer of {name}, which lie beside this file. To train on, or to fine-tune alone:
#
#   affinage run {file} --set data.sources='[my_text/]'
#   affinage run {file} --set data=null --set pretrain=null --set sft='{{sources: [chats.jsonl], steps: 100}}'
"""


def open_model(
    name: str | Target, runs: Path, *, mesh: Mapping[str, int | str] | None = None, sharding: Lines | None = None
) -> LoadedModel:
    """Load the model that a name stands for, split over devices along the axes of `mesh`; a copy on each without one.

    `sharding` replaces lines of the table by which weights are split. Raises UserError if there is no such model, or it
    cannot be split over the mesh.
    """
    target = models.locate(models.resolve(name, runs) if isinstance(name, str) else name, runs)
    folder = target.path
    load: Callable[[Any], Any]  # gives the parameters, of abstract ones with shardings
    if target.kind == "hub":
        from affinage.hub.folder import hub_facts, read_hub_folder  # half a second, of huggingface_hub's imports

        hub = read_hub_folder(folder)
        facts = hub_facts(folder) | {"context": hub.architecture.context, "precision": {}}
        graph, tokenizer = hub.graph, fitting_tokenizer(folder, hub.graph.vocabulary, facts.get("chat_template"))

        def load(abstract: Any) -> Any:  # from the memory of the host: a device gets no more than its part
            return jax.device_put(hub.params, jax.tree.map(lambda leaf: leaf.sharding, abstract))
    else:
        own = folder / TOKENIZER  # of an import
        tokenizer_folder = own if own.is_dir() else models.made_from(folder, "train-tokenizer")
        if tokenizer_folder is None:
            raise UserError("the tokenizer of this model is gone", where=str(folder), fix="Run its recipe again.")
        facts, graph = _facts_and_graph(folder)
        tokenizer = Tokenizer(tokenizer_folder, facts.get("chat_template"))
        load = partial(trained_params, folder, graph, target.step)
    known = PrecisionSettings.model_fields.keys() & facts["precision"].keys()
    precision = PrecisionSettings(**{name: facts["precision"][name] for name in known})
    devices, abstract = acquire(), abstract_params(graph, jnp.dtype(precision.params))
    layout, shardings = serving_layout(mesh or {"data": "auto"}, devices, logical_axes(graph), abstract, sharding or {})
    params = load(jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), abstract, shardings))
    split, dtype = layout if layout.mesh.size > 1 else None, compute_dtype(precision, chip(devices[0].device_kind)).name
    of_use = {"layout": split, "system_prompt": facts["system_prompt"], "chat": models.is_chat(folder)}
    return LoadedModel(graph, params, tokenizer, target.name, facts["context"], compute_dtype=dtype, **of_use)


def fitting_tokenizer(source: Path, vocabulary: int, template: str | None = None) -> Tokenizer:
    """The tokenizer of a folder of the hub; UserError if it does not fit a model of `vocabulary` ids."""
    tokenizer = Tokenizer(source, template)
    is_stub = tokenizer.kind == "hub" and len(set(tokenizer.encode(_ANY_TEXT))) < 2  # it only has unknown words
    if tokenizer.vocabulary > vocabulary or is_stub:
        what = f"the tokenizer has {tokenizer.vocabulary} ids, the model {vocabulary}"
        raise UserError(what, where=str(source), fix="Put the tokenizer.json there that the model was trained with.")
    return tokenizer


def _facts_and_graph(folder: Path) -> tuple[dict[str, Any], Graph]:
    """What the model.json of a training holds, and its graph."""
    load_named_plugins()
    facts = read_json(folder / MODEL)
    if not {"graph", "precision"} <= facts.keys():
        raise UserError("this file of the model is damaged", where=str(folder / MODEL), fix="Run its recipe again.")
    try:
        return facts, parse(facts["graph"])
    except UserError as error:
        fix = f"If a plugin brings it: {VARIABLE}=my_nodes.py affinage ... {error.fix}".rstrip()
        raise UserError(error.what, where=error.where or str(folder), fix=fix) from error


def import_model(source: Path, folder: Path, name: str, *, origin: str = "") -> "HubModel":
    """Write `folder`, whole or not at all, from one with config.json, safetensors and a tokenizer.

    The recipe in it is called `name`. `origin`, where Hugging Face's libraries find the model, is written down.
    Raises UserError for what cannot be taken over exactly.
    """
    from affinage.hub.folder import hub_facts, read_hub_folder

    hub = read_hub_folder(source)
    tokenizer = fitting_tokenizer(source, hub.graph.vocabulary)
    with whole_folder(folder) as making:
        (making / TOKENIZER).mkdir()
        tokenizer.write(making / TOKENIZER)
        digests = {"weights": _digest(source, "*.safetensors"), "tokenizer": _digest(making / TOKENIZER, "*")}
        facts: dict[str, Any] = {"graph": hub.graph.to_dict(), "context": hub.architecture.context, "precision": {}}
        facts |= hub_facts(source)
        facts["imported"] |= {"sha256": digests} | ({"from": origin} if origin else {})
        write_json(making / MODEL, facts)
        settings = {"name": name, "init_from": ".", "packing": {"seq_len": facts["context"]}, "model": facts["graph"]}
        schedule = {"peak_lr": 5e-5, "min_lr": 5e-6, "warmup_ratio": 0.05}
        settings |= {"export": {"dtype": hub.architecture.dtype}, "data": {"sources": ["my_text/"], "languages": []}}
        settings["pretrain"] = {"steps": 1000, "batch_size": 8, "schedule": schedule}
        header = _HEADER.format(name=name, file=shlex.quote(str(folder / "recipe.yaml")))
        written = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
        (making / "recipe.yaml").write_text(header + written, encoding="utf-8")
        store = CheckpointStore(making / "checkpoints")
        store.save(0, {"params": jax.tree.map(jnp.asarray, hub.params)}, {"imported": digests["weights"]})
        store.wait()
    return hub


def _digest(folder: Path, pattern: str) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob(pattern)):
        with file.open("rb") as opened:
            digest.update(file.name.encode() + hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def initial_params(folder: Path, graph: Graph) -> Callable[[Any], Any]:
    """What loads an imported model's weights as parameters of `graph`, given with shardings; UserError for others."""
    graphs = (graph, parse(read_json(folder / MODEL)["graph"]))
    ours, theirs = (flatten_dict(jax.tree.map(lambda one: one.shape, of.parameters), sep=".") for of in graphs)
    if differing := sorted({name for name, _ in ours.items() ^ theirs.items()}):
        what = f"the recipe's model and the one it begins with differ in {', '.join(differing[:3])}"
        raise UserError(what, where="init_from", fix="Let `model:` be what the imported model's recipe.yaml says.")
    store = CheckpointStore(folder / "checkpoints")
    return lambda abstract: store.restore(0, {"params": abstract})["params"]


def trained_params(training: Path, graph: Graph, step: Checkpoint | None, abstract: Any) -> Any:
    """The weights of a training's model, with its adapters merged into them where it trained such.

    `step` is of the checkpoint, by default the one that stands for the training; `abstract` are the graph's parameters
    with shardings.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    whole = replicated(jax.tree.leaves(shardings)[0].mesh)
    if (pair := _trained_adapters(training, graph, step, whole)) is None:
        return _restored(training, step, abstract)
    adapters, trained = pair
    return jax.jit(adapters.merged, out_shardings=shardings, donate_argnums=0)(kept_frozen(training, abstract), trained)


def open_adapters(target: Target, runs: Path) -> tuple[Adapters, Any]:
    """The adapters that a training has trained, and their A and B; UserError if it trained all weights."""
    model, pair = models.locate(target, runs), None
    if model.kind != "hub":
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        pair = _trained_adapters(model.path, _facts_and_graph(model.path)[1], model.step, here)
    if pair is None:
        fix = "Adapters are trained with `sft.lora` or `dpo.lora`."
        raise UserError(f"`{target.name}` has no adapters: all its weights were trained", fix=fix)
    return pair


def _trained_adapters(
    training: Path, graph: Graph, step: Checkpoint | None, sharding: Any
) -> tuple[Adapters, Any] | None:
    """The adapters that a training trained, and their A and B; None if it trained the weights themselves."""
    facts = read_json(training / MODEL)
    if facts.get("lora") is None:
        return None
    adapters = Adapters(graph, LoraSettings(**facts["lora"]))
    abstract = abstract_params(adapters, jnp.dtype(facts["precision"]["params"]))
    return adapters, _restored(training, step, jax.tree.map(lambda leaf: leaf.update(sharding=sharding), abstract))


def _restored(training: Path, step: Checkpoint | None, abstract: Any) -> Any:
    """The parameters of a checkpoint, by default the last or newest one, or the average of several in float32."""
    folder, name = models.checkpoints_of(training, step), "ema_params" if step == "ema" else "params"
    if step is None and folder.name != KEPT and read_manifest(training) is not None:
        step = read_json(training / "summary.json").get("steps")
    store, steps = CheckpointStore(folder), models.steps_of(training, step)
    if step == "ema" and not any(path.startswith(name) for path in store.metadata(steps[0]).checksums):
        fix = "Give one to a training, `ema: {decay: 0.999}`, or average its checkpoints: MODEL@mean:3."
        raise UserError("this training has no moving average", where=str(folder), fix=fix)
    if len(steps) < 2:
        return store.restore(steps[0] if isinstance(step, int) else None, {name: abstract})[name]
    in_float32 = {"params": jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), abstract)}
    total = store.restore(steps[0], in_float32)["params"]
    for each in steps[1:]:
        total = jax.tree.map(jnp.add, total, store.restore(each, in_float32)["params"])
    return jax.tree.map(lambda leaf, want: (leaf / len(steps)).astype(want.dtype), total, abstract)
