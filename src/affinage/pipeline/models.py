"""Open a model: a training, one checkpoint of it, an import, or a Hugging Face folder."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affinage.config.parallel import LogicalAxis, MeshAxis
from affinage.errors import UserError
from affinage.pipeline.base_models import TOKENIZER, begun_with, trained_adapters, trained_params
from affinage.pipeline.imports import fitting_tokenizer, own_template_of, system_prompt_of
from affinage.pipeline.names import EVALUATIONS, HUB_CONFIG, MODEL, TRAININGS, Target, checkpoints_of, locate, resolve
from affinage.pipeline.store import Store, read_manifest, read_request
from affinage.plugins import VARIABLE, load_named_plugins

if TYPE_CHECKING:
    import jax

    from affinage.data.tokenizer import Tokenizer
    from affinage.generation.model import LoadedModel
    from affinage.model import Adapters, Graph
    from affinage.model.parameter import PyTree
    from affinage.parallel import MeshLayout

    Sizes = Mapping[str, int | str]  # devices along each axis of a mesh

CHAT = ("dpo", "sft")  # those that make a chat model


def open_model(name: str, runs: Path, *, mesh: "Sizes | None" = None) -> "LoadedModel":
    """Load the model that `name` stands for; see `affinage.pipeline.names`.

    Args:
        name: a run (its last training), a training (`quickstart/pretrain`), a checkpoint of it (`...@1000`), the folder
            of an imported model, or a folder as Hugging Face's libraries load it.
        runs: the folder of all runs.
        mesh: devices along each axis, over which the weights are split as they are read; all devices as copies of the
            model if None.

    Raises:
        UserError: there is no such run, training or checkpoint; the message lists what there is. Or the model cannot be
            split over the mesh.
    """
    return open_target(resolve(name, runs), runs, mesh=mesh)


def open_target(target: Target, runs: Path, *, mesh: "Sizes | None" = None) -> "LoadedModel":
    """Load the model of a target; see `open_model`."""
    folder, step = locate(target, runs)
    if is_hub_folder(folder):
        return _load_hub_folder(folder, name=target.name, mesh=mesh)
    tokenizer = folder / TOKENIZER if (folder / TOKENIZER).is_dir() else made_from(folder, "train-tokenizer")
    if tokenizer is None and target.run is not None:  # another version made it
        places = (target.run / name for name in ("train-tokenizer", TOKENIZER))  # the latter of the first edition
        tokenizer = next((place for place in places if place.is_dir()), None)
    if tokenizer is None:
        raise UserError("the tokenizer of this model is gone", where=str(folder), fix="Run its recipe again.")
    return load_trained(folder, tokenizer, step=step, name=target.name, mesh=mesh)


def made_from(result: Path, stage: str) -> Path | None:
    """The result of `stage` that went into `result`, directly or through others; None if there was none."""
    request = read_request(result)
    for name, key in request[0].inputs.items() if request else ():
        read = Store(result.parent).find(name, key)
        found = read if name == stage else made_from(read, stage)
        if found is not None and found.is_dir():
            return found
    return None


def is_chat(training: Path) -> bool:
    """Whether a training made a chat model, or an imported model is one."""
    if is_hub_folder(training):
        return system_prompt_of(training) is not None or own_template_of(training) is not None
    request = read_request(training)
    if request is None:
        facts = _facts(training)
        return bool(facts.get("imported", {}).get("chat"))
    return request[0].step in CHAT


def is_from_elsewhere(training: Path) -> bool:
    """Whether no recipe trained it here: a Hugging Face folder, or one imported."""
    return is_hub_folder(training) or "imported" in _facts(training)


def export_of(training: Path, run: Path) -> Path | None:
    """The Hugging Face folder that the export stage of `run` wrote of this training; None if it wrote none of it."""
    export, trained = read_request(run / "export"), read_request(training)
    if export is None or trained is None or read_manifest(run / "export") is None:
        return None
    last = next((name for name in TRAININGS if name in export[0].inputs), None)  # the one that is exported
    same = last == trained[0].step and export[0].inputs.get(last) == trained[1]
    return run / "export" / "model" if same else None


def results_of(training: Path, run: Path) -> dict[str, Path]:
    """What went into a training, the training itself, and how `run` has judged it and what came before: by stage."""
    from affinage.report.facts import ORDER

    request = read_request(training)
    if request is None:
        return {}
    found = {name: place for name in ORDER if (place := made_from(training, name)) is not None}
    found[request[0].step] = training
    for name, stage in EVALUATIONS.items():
        judged, trained = read_request(run / stage), found.get(name) and read_request(found[name])
        if judged is not None and trained and judged[0].inputs.get(name) == trained[1]:
            found[stage] = run / stage
    return found


def adapter_base(target: Target, runs: Path) -> tuple[str, str]:
    """The model that a training's adapters belong on: the training before it, or the one that its recipe begins with.

    Returns:
        its name as verbs take it ("" for an imported one), and its place: a repository of the hub, or a folder that
        transformers loads ("" where none is known).
    """
    training, _ = locate(target, runs)
    request = read_request(training)
    before = next((name for name in TRAININGS if request is not None and name in request[0].inputs), None)
    found = None if before is None else made_from(training, before)
    if request is None or before is None or found is None:
        return "", begun_with(training)
    step = request[0].settings.get(request[0].step, {}).get("from_step")
    exports = [] if step else [export_of(found, export.parent) for export in sorted(runs.glob("*/export"))]
    exported = next(filter(None, exports), None)
    beside = None if target.run is None else target.run / before
    model = str(beside if beside is not None and beside.exists() and beside.samefile(found) else found)
    return model + (f"@{step}" if step else ""), "" if exported is None else os.path.abspath(exported)


def is_hub_folder(folder: Path) -> bool:
    """Whether it is a model as Hugging Face's libraries load it, such as an export, and none of affinage's."""
    return (folder / HUB_CONFIG).is_file() and not (folder / MODEL).is_file()


def load_trained(
    folder: Path,
    tokenizer: Path,
    *,
    name: str,
    step: int | None = None,
    mesh: "Sizes | None" = None,
    sharding: Mapping[LogicalAxis, tuple[MeshAxis, ...]] | None = None,
) -> "LoadedModel":
    """Load a checkpoint of a training, the newest if `step` is None.

    Args:
        folder: of a training stage.
        tokenizer: folder of the tokenizer stage it used.
        name: how messages and reports call the model.
        step: of the checkpoint.
        mesh: devices along each axis; all devices as copies of the model if None.
        sharding: lines of the sharding table that the recipe has replaced.
    """
    from affinage.checkpoint import CheckpointStore
    from affinage.config.training import PrecisionSettings
    from affinage.data.tokenizer import Tokenizer
    from affinage.generation.model import LoadedModel
    from affinage.hardware.chips import chip
    from affinage.hardware.devices import acquire
    from affinage.model import parse
    from affinage.training.trainer import compute_dtype

    load_named_plugins()
    facts = _facts(folder)
    with _told_where_kinds_are(folder):
        graph = parse(facts["graph"])
    precision = PrecisionSettings(**facts["precision"])
    devices = acquire()
    layout, abstract = _spread(graph, precision.params, devices, mesh, sharding)
    checkpoints = CheckpointStore(checkpoints_of(folder, step))
    if step is not None and step not in checkpoints.steps():
        listed = ", ".join(f"@{known}" for known in checkpoints.steps())
        raise UserError(f"there is no checkpoint of step {step}", where=str(folder), fix=f"There are {listed}.")
    return LoadedModel(
        graph=graph,
        params=trained_params(folder, graph, step, abstract),
        tokenizer=_talking(Tokenizer.load(tokenizer), facts.get("chat_template")),
        name=name,
        context=facts["context"],
        layout=layout,
        system_prompt=facts["system_prompt"],
        compute_dtype=compute_dtype(precision, chip(devices[0].device_kind)).name,
    )


def _spread(
    graph: "Graph",
    dtype: str,
    devices: "Sequence[jax.Device]",
    mesh: "Sizes | None",
    sharding: Mapping[LogicalAxis, tuple[MeshAxis, ...]] | None = None,
) -> "tuple[MeshLayout | None, PyTree]":
    """How a model lies on the devices, None if on one alone, and its parameters in the abstract, with shardings."""
    import jax
    import jax.numpy as jnp

    from affinage.model import abstract_params, logical_axes
    from affinage.parallel import serving_layout

    abstract = abstract_params(graph, jnp.dtype(dtype))
    layout, shardings = serving_layout(mesh or {"data": "auto"}, devices, logical_axes(graph), abstract, sharding)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )
    return layout if layout.mesh.size > 1 else None, abstract


def _facts(folder: Path) -> dict[str, Any]:
    """What a training says of its model."""
    file = folder / MODEL
    try:
        facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError("this file of the model is damaged", where=str(file), fix="Run its recipe again.") from error
    return facts


def _talking(tokenizer: "Tokenizer", template: str | None) -> "Tokenizer":
    """The tokenizer, that writes conversations in the template."""
    tokenizer.use_template(template)
    return tokenizer


def open_adapters(target: Target, runs: Path) -> "tuple[Adapters, PyTree]":
    """The adapters that a training has trained, and their A and B.

    Raises:
        UserError: as `open_model`, and if it trained all weights.
    """
    import jax

    from affinage.model import parse

    folder, step = locate(target, runs)
    load_named_plugins()
    found = None
    if not is_hub_folder(folder):
        with _told_where_kinds_are(folder):
            graph = parse(_facts(folder)["graph"])
        found = trained_adapters(folder, graph, step, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    if found is None:
        fix = "Adapters are trained with `sft.lora` or `dpo.lora`."
        raise UserError(f"`{target.name}` has no adapters: all its weights were trained", fix=fix)
    return found


@contextlib.contextmanager
def _told_where_kinds_are(folder: Path) -> Iterator[None]:
    """Say of a graph that cannot be read how to name the file with its kinds."""
    try:
        yield
    except UserError as error:
        fix = f"If a plugin brings it: {VARIABLE}=my_nodes.py affinage ... {error.fix}".rstrip()
        raise UserError(error.what, where=error.where or str(folder), fix=fix) from error


def _load_hub_folder(folder: Path, *, name: str, mesh: "Sizes | None" = None) -> "LoadedModel":
    """Read a Hugging Face folder as `affinage import` does, into the memory of the devices; nothing is written."""
    import jax

    from affinage.config.training import PrecisionSettings
    from affinage.generation.model import LoadedModel
    from affinage.hardware.chips import chip
    from affinage.hardware.devices import acquire
    from affinage.hub.read import read_hub_folder
    from affinage.training.trainer import compute_dtype

    devices = acquire()
    model = read_hub_folder(folder)
    layout, abstract = _spread(model.graph, "float32", devices, mesh)
    return LoadedModel(
        graph=model.graph,
        # They come from the memory of the host: a device gets no more than its part.
        params=jax.device_put(model.params, jax.tree.map(lambda leaf: leaf.sharding, abstract)),
        tokenizer=_talking(fitting_tokenizer(folder, model.graph.vocabulary), own_template_of(folder)),
        name=name,
        context=model.architecture.context,
        layout=layout,
        system_prompt=system_prompt_of(folder) or "",
        compute_dtype=compute_dtype(PrecisionSettings(), chip(devices[0].device_kind)).name,
    )
