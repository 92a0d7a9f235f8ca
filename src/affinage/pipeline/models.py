"""From what a user calls a model to the model: a run, a stage of a run, or one checkpoint of it."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affinage.config.parallel import LogicalAxis, MeshAxis
from affinage.errors import UserError
from affinage.pipeline.imports import fitting_tokenizer, own_template_of, system_prompt_of
from affinage.pipeline.initial import MODEL, TOKENIZER, checkpoints_of, trained_adapters, trained_params
from affinage.pipeline.store import Store, read_manifest, read_request
from affinage.plugins import VARIABLE, load_named_plugins

if TYPE_CHECKING:
    import jax

    from affinage.data.tokenizer import Tokenizer
    from affinage.generation.model import LoadedModel
    from affinage.model import Adapters, Graph
    from affinage.model.parameter import Tree
    from affinage.parallel import MeshLayout

    Sizes = Mapping[str, int | str]  # devices along each axis of a mesh

HUB_CONFIG = "config.json"  # of a Hugging Face folder
TRAININGS = ("dpo", "sft", "pretrain")  # the last one that a run has is the run's model
JUDGED = {"pretrain": "evaluate-base", "sft": "evaluate-sft", "dpo": "evaluate-dpo"}  # by which stage
CHAT = ("dpo", "sft")  # those that make a chat model
_LISTED = 5  # models that a message names


def open_model(spec: str, runs: Path, *, mesh: "Sizes | None" = None) -> "LoadedModel":
    """Load the model that `spec` names.

    Args:
        spec: a run (`quickstart`), its folder (`runs/quickstart`), one of its trainings (`runs/quickstart/pretrain`),
            or the folder of an imported model, each with an optional checkpoint (`...@1000`); of a run without a named
            training, the last one is taken. Or a folder as Hugging Face's libraries load it.
        runs: where runs are that are named without a folder.
        mesh: devices along each axis, over which the weights are split as they are read; all devices as copies of the
            model if None.

    Raises:
        UserError: there is no such run, training or checkpoint; the message says what there is. Or the model cannot be
            split over the mesh.
    """
    folder, step = locate_model(spec, runs)
    if is_hub_folder(folder):
        return _load_hub_folder(folder, name=spec, mesh=mesh)
    tokenizer = folder / TOKENIZER if (folder / TOKENIZER).is_dir() else made_from(folder, "tokenizer")
    if tokenizer is None:
        raise UserError("the tokenizer of this model is gone", where=str(folder), fix="Run its recipe again.")
    return load_trained(folder, tokenizer, step=step, name=spec, mesh=mesh)


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
    for name, stage in JUDGED.items():
        judged, trained = read_request(run / stage), found.get(name) and read_request(found[name])
        if judged is not None and trained and judged[0].inputs.get(name) == trained[1]:
            found[stage] = run / stage
    return found


def locate_model(spec: str, runs: Path) -> tuple[Path, int | None]:
    """The folder of the training that `spec` names, in the store, and the step it asks for."""
    name, _, step = spec.partition("@")
    if step and not step.isdigit():
        raise UserError(f"`@{step}` is no checkpoint", where=spec, fix="Write the number of a step, such as @1000.")
    folder = meant(name, runs)
    if folder is None:
        run, parts = name.rpartition("/")[0], []
        if run:
            with contextlib.suppress(UserError):
                parts = trainings_of(run, runs)
        if parts:
            raise UserError(f"there is no model `{name}`", fix=f"There are {', '.join(parts)}.")
        known = sorted(entry.parent.name for entry in runs.glob("*/pretrain")) if runs.is_dir() else []
        hint = f"Runs in {runs}: {', '.join(known)}." if known else f"There are no trained models in {runs}."
        raise UserError(f"there is no model `{name}`", fix=hint)
    if is_hub_folder(folder) and step:
        raise UserError("a Hugging Face folder has no checkpoints", where=spec, fix=f"Write `{name}`.")
    if not (folder / MODEL).is_file() and not is_hub_folder(folder):
        folder = _last_training(folder)
    return folder.resolve(), int(step) if step else None


def meant(name: str, runs: Path) -> Path | None:
    """The folder that is called so: here, or among the runs; the one with a model in it.

    Raises UserError if both have one.
    """
    here, run = Path(name), runs / name
    if name.startswith((".", "/")) or not run.is_dir() or not here.is_dir():
        return here if here.is_dir() else run if run.is_dir() else None
    if _has_model(here) and _has_model(run) and here.resolve() != run.resolve():
        fix = f"Write `{run}` for the run, `./{here}` for the folder."
        raise UserError(f"`{name}` is a run and also a folder here, and both hold a model", fix=fix)
    return here if _has_model(here) and not _has_model(run) else run


def _has_model(folder: Path) -> bool:
    return is_hub_folder(folder) or any((folder / name / MODEL).is_file() for name in ("", *TRAININGS))


def is_hub_folder(folder: Path) -> bool:
    """Whether it is a model as Hugging Face's libraries load it, such as an export, and none of affinage's."""
    return (folder / HUB_CONFIG).is_file() and not (folder / MODEL).is_file()


def trainings_of(name: str, runs: Path) -> list[str]:
    """How each training of the run `name` is called, the one that `name` alone means first; [] if it is no run."""
    run = meant(name, runs)
    if run is None or is_hub_folder(run) or (run / MODEL).is_file():
        return []
    return [f"{name}/{stage}" for stage in TRAININGS if (run / stage / MODEL).is_file() and stands(run, stage)]


def _last_training(run: Path) -> Path:
    """The run's last training; not one that began from another base than the run has now."""
    for name in TRAININGS:
        if (run / name / MODEL).is_file() and stands(run, name):
            return run / name
    raise _none_in(run)


def _none_in(folder: Path) -> UserError:
    """What is said of a folder that is named as a model and is none."""
    if (folder / "recipe.json").is_file():
        fix = "Train one with `affinage run RECIPE`."
        return UserError("no model has been trained here yet", where=str(folder), fix=fix)
    with contextlib.suppress(OSError):  # of others, which this user may not read
        if found := sorted(str(entry) for entry in folder.iterdir() if entry.is_dir() and _has_model(entry)):
            more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
            fix = f"Name one of those in it: {', '.join(found[:_LISTED])}{more}."
            return UserError("this is no model, but a folder with models in it", where=str(folder), fix=fix)
    fix = "Name a run, a training of one, a checkpoint (...@STEP), an import, or a Hugging Face folder."
    return UserError("there is no model in this folder, and it is no run", where=str(folder), fix=fix)


def stands(run: Path, training: str) -> bool:
    """Whether a run has this training, and it began from the base that the run has now, and that from its own."""
    request = read_request(run / training)
    if request is None:
        return False
    bases = {name: key for name, key in request[0].inputs.items() if name in TRAININGS}
    now = {name: found for name in bases if (found := read_request(run / name)) is not None}
    return all(found[1] == bases[name] and stands(run, name) for name, found in now.items())


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
    from affinage.training.program import compute_dtype

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
) -> "tuple[MeshLayout | None, Tree]":
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


def open_adapters(spec: str, runs: Path) -> "tuple[Adapters, Tree]":
    """The adapters that the training which `spec` names has trained, and their A and B.

    Raises:
        UserError: as `open_model`, and if it trained all weights.
    """
    import jax

    from affinage.model import parse

    folder, step = locate_model(spec, runs)
    load_named_plugins()
    found = None
    if not is_hub_folder(folder):
        with _told_where_kinds_are(folder):
            graph = parse(_facts(folder)["graph"])
        found = trained_adapters(folder, graph, step, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    if found is None:
        fix = "Adapters are trained with `sft.lora` or `dpo.lora`."
        raise UserError(f"`{spec}` has no adapters: all its weights were trained", fix=fix)
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
    from affinage.training.program import compute_dtype

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
