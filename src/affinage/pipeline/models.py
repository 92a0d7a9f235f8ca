"""What a name on the command line stands for, in one order for all verbs, and how its model is opened.

A name is a path, a run, or a packaged recipe. A run is named `NAME[/STEP][@N]`: `quickstart`, `quickstart/sft`,
`quickstart/pretrain@1000`, or by an average, `@ema` or `@mean:5`. Without a step of the pipeline, a run stands for its
last training. Nothing here trains, and nothing imports JAX before a model is opened.
"""

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from affinage.config.load import LoadedRecipe, find_recipe, load_recipe, load_saved, packaged_recipes
from affinage.config.parallel import LogicalAxis, MeshAxis
from affinage.errors import UserError, did_you_mean
from affinage.pipeline.store import Store, read_manifest, read_request
from affinage.plugins import VARIABLE, load_named_plugins
from affinage.results import read_json, read_json_lines

if TYPE_CHECKING:
    from affinage.data.tokenizer import Tokenizer
    from affinage.generation.model import LoadedModel
    from affinage.model import Adapters, Graph

    Sizes = Mapping[str, int | str]  # devices along each axis of a mesh
    Table = Mapping[LogicalAxis, tuple[MeshAxis, ...]]  # lines of the sharding table that a recipe has replaced

MODEL = "model.json"  # beside the checkpoints of a training or an import: what is needed to load them
TOKENIZER = "tokenizer"  # the same, of an import; the tokenizer of a training is a result of its own
KEPT = "kept"  # a checkpoint in place of those of the training
SAVED = ("checkpoints", "frozen", KEPT)  # the folders of a training that Orbax writes
BEGUN_WITH = "begun_with"  # in model.json: where Hugging Face's libraries find the import that a training began with
RELEASE = "release"  # in model.json: what the import says of its license and sampling, see `release_in`
HUB_CONFIG = "config.json"  # of a Hugging Face folder
RECIPE, COMMAND = "recipe.json", "run.json"  # of a run: its settings, and the command that made it
ITEMS = "items"  # of the results of an evaluation
TRAININGS = ("dpo", "sft", "pretrain")  # the last one that a run has is the run's model
CHAT = ("dpo", "sft")  # those that make a chat model
EVALUATIONS = {"pretrain": "evaluate-base", "sft": "evaluate-sft", "dpo": "evaluate-dpo"}
_RECIPE_SUFFIXES = (".yaml", ".yml", ".json")
_CHECKPOINT = re.compile(r"(.+)@(\d+|ema|mean:[1-9]\d*)")
Checkpoint = int | str  # a step, "ema" for the moving average at the newest, or "mean:K" for the mean of the last K


@dataclass(frozen=True)
class Target:
    """What a name stands for."""

    name: str  # as the user wrote it
    kind: Literal["recipe", "run", "model", "hub", "result"]  # "model": a training or an import
    path: Path  # the recipe's file, or the folder
    step: Checkpoint | None = None  # of the checkpoint that was named
    warning: str = ""  # where the name fits something else, too
    belongs_to: Path | None = None  # the run, where its path does not lie in it

    @property
    def run(self) -> Path | None:
        """The folder of the run that it is or belongs to; None if it belongs to none."""
        folders = () if self.kind == "recipe" else (self.path, self.path.parent)
        return self.belongs_to or next((folder for folder in folders if (folder / RECIPE).is_file()), None)


def resolve(name: str, runs: Path) -> Target:
    """What `name` stands for: a path if it is one, else a run in the folder `runs`, else a packaged recipe.

    A file counts if it has a recipe's suffix, a folder if it is a run, a model, or the result of a step. The target's
    `warning` names the other meaning where there are two.

    Raises:
        UserError: it stands for nothing; the message lists the runs and recipes.
    """
    word: str = name
    step: Checkpoint | None = None
    if not os.path.exists(name) and (parts := _CHECKPOINT.fullmatch(name)):
        word, step = parts[1], int(parts[2]) if parts[2].isdecimal() else parts[2]
    places = [Path(word), *([] if word.startswith((".", "/")) else [runs / word])]
    targets = [Target(name, kind, place, step) for place in places if (kind := _kind(place)) is not None]
    if not targets and step is None:
        recipe = packaged_recipes().get(word) or Path(word)
        targets = [Target(name, "recipe", recipe)] if os.path.isfile(recipe) else []  # Path's raises for a long name
    if not targets:
        raise _unknown(word, runs)
    if step is not None and targets[0].kind not in ("run", "model"):
        raise UserError("this has no checkpoints", where=name, fix=f"Write `{word}`.")
    if len(targets) == 2 and not os.path.samefile(targets[0].path, targets[1].path):
        warning = f"`{word}` is {targets[0].path} here; the run of this name is `{targets[1].path}`"
        return replace(targets[0], warning=warning)
    return targets[0]


def _kind(place: Path) -> Any:
    """The kind of target that a path is; None for a path that is none."""
    if os.path.isfile(place):
        return "recipe" if place.suffix in _RECIPE_SUFFIXES else None
    if not os.path.isdir(place):
        return None
    if (place / MODEL).is_file():
        return "model"
    if (place / HUB_CONFIG).is_file():
        return "hub"
    if (place / RECIPE).is_file() or any((place / training / MODEL).is_file() for training in TRAININGS):
        return "run"
    return "result" if (place / ITEMS).is_dir() or read_request(place) is not None else None


def _unknown(word: str, runs: Path) -> UserError:
    if Path(word).suffix in _RECIPE_SUFFIXES:
        find_recipe(word)  # raises, with the nearest file beside it
    what = "the folder `{}` is neither a run nor a model" if os.path.isdir(word) else "nothing is named `{}`"
    made, packaged = run_names(runs), [*packaged_recipes()]
    listed = f"Runs in {runs}: {', '.join(made) or 'none'}. Packaged recipes: {', '.join(packaged)}."
    return UserError(what.format(word), fix=did_you_mean(word, [*made, *packaged]) or listed)


def run_names(runs: Path) -> list[str]:
    """The runs in a folder of runs."""
    return sorted(file.parent.name for file in runs.glob(f"*/{RECIPE}"))


def command(verb: str, *words: str, runs: Path = Path("runs")) -> str:
    """A command of affinage, quoted for a shell, with the folder of runs where that is not the default one."""
    default = os.environ.get("AFFINAGE_RUNS") or "runs"
    option = [] if os.path.abspath(runs) == os.path.abspath(default) else ["--runs", str(runs)]
    return shlex.join(["affinage", *verb.split(), *words, *option])


# ---- recipes and runs ----


def recipe_of(
    target: Target, runs: Path, overrides: Sequence[str] = (), *, warn: Callable[[str], None] | None = None
) -> LoadedRecipe:
    """The recipe that a target stands for, under `overrides`: of a run, the settings and the command that made it.

    Settings of a run that are gone are refused; with `warn` they are left out, and it receives a line that lists them.
    """
    if target.kind == "recipe":
        packaged = target.path == packaged_recipes().get(target.name)
        return load_recipe(target.name if packaged else target.path, overrides)
    if target.run is None:
        if not (target.path / "recipe.yaml").is_file():  # an import has one
            raise UserError(f"`{target.name}` has no recipe", fix="Name a recipe or a run.")
        return load_recipe(target.path / "recipe.yaml", overrides)
    file = target.run / RECIPE
    loaded, dropped = (load_recipe(file, overrides), []) if warn is None else load_saved(file, overrides)
    if warn is not None and dropped:
        if overrides and {*dropped} != {*load_saved(file)[1]}:
            load_recipe(file, overrides)  # raises: it is the overrides that are wrong
        warn(f"{file} has settings of another version of affinage, which are left out: {', '.join(dropped)}")
    if loaded.recipe.name != target.run.name and not any(override.startswith("name=") for override in overrides):
        loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"name": target.run.name}))  # it was moved
    note = read_json(target.run / COMMAND)
    words = shlex.split(str(note.get("command") or command("run", target.run.name, runs=runs)))
    for override in overrides:
        words += [] if override in words else ["--set", override]
    written = Path(str(note.get("recipe") or ""))  # settings that name files relative to their recipe still find them
    return replace(loaded, command=shlex.join(words), path=written if written.is_file() else loaded.path)


def run_of(target: Target, runs: Path) -> Path:
    """The folder of the run that a target is or belongs to; of a recipe, that of its name.

    Raises:
        UserError: the recipe was never run, with the command that runs it; or it is a model without a run.
    """
    if target.run is not None or target.kind == "run":
        return target.run or target.path
    if target.kind != "recipe":
        raise UserError(f"`{target.name}` belongs to no run", fix=f"Runs in {runs}: {', '.join(run_names(runs))}.")
    run = runs / load_recipe(target.path).recipe.name
    if not (run / RECIPE).is_file():
        raise UserError(
            f"`{target.name}` has not been run yet", fix=f"Run it: {command('run', target.name, runs=runs)}"
        )
    return run


def recorded(run: Path) -> dict[str, Any]:
    """The settings that a run was last made with, as they were written; {} if it has none."""
    settings = read_json(run / RECIPE)
    if not settings and (run / RECIPE).is_file():
        raise UserError("this file of the run is damaged", where=str(run / RECIPE), fix="Run its recipe again.")
    return settings


def trainings_of(run: Path) -> list[str]:
    """The trainings of a run that have begun, the last one first; [] if it is no run."""
    return [name for name in TRAININGS if (run / name / MODEL).is_file()]


def incomplete(run: Path) -> list[str]:
    """The trainings of a run's recipe that are not complete, in their order."""
    recipe = recorded(run)
    planned = [name for name in reversed(TRAININGS) if recipe.get(name) is not None]
    if recipe.get("data") is None:
        planned = [name for name in planned if name != "pretrain"]
    return [name for name in planned if read_manifest(run / name) is None]


def unfinished(run: Path) -> str:
    """The trainings of a run that are not complete, with how far those are that have begun; "" if there are none."""
    listed = []
    for name in incomplete(run):
        steps = read_json(run / name / "feed.json").get("steps")
        step = max((line.get("step", 0) for line in read_json_lines(run / name / "metrics.jsonl")), default=0)
        listed.append(f"{name} (step {step:,} of {steps:,})" if steps and step else name)
    return ", ".join(listed)


def check_complete(target: Target, runs: Path, *, instead: str = "") -> None:
    """Raise UserError for a run, named as a whole, whose trainings are not all complete.

    It has the command that completes it and what can be done `instead`, by default the names of the models there are.
    """
    run = run_of(target, runs) if target.kind in ("run", "recipe") else None
    if run is None or target.step is not None or not (missing := unfinished(run)):
        return
    name = target.name if target.kind == "run" else run.name
    if not instead and (trained := trainings_of(run)):
        instead = f"Or name a model that is there: {', '.join(f'{name}/{training}' for training in trained)}."
    fix = "\n  ".join(filter(None, [f"Run it: {command('run', target.name, runs=runs)}", instead]))
    raise UserError(f"`{target.name}` is not complete; to train: {missing}", fix=fix)


# ---- models ----


@dataclass(frozen=True)
class ModelState:
    """How far the training of a model is."""

    model: str  # the name of the training, as every verb takes it
    step: int
    steps: int | None  # that the training has in all; None if that is not known
    missing: tuple[str, ...]  # later trainings of its recipe that are not complete

    def __str__(self) -> str:
        whole = "" if self.steps is None else f" of {self.steps:,}"
        rest = f"; not trained yet: {', '.join(self.missing)}" if self.missing else ""
        return f"{self.model}, step {self.step:,}{whole}{rest}"


def locate(target: Target, runs: Path) -> tuple[Path, Checkpoint | None]:
    """The folder of the model that a target stands for, in the store if it is a training, and the named checkpoint.

    Of a run, the model is its last training that has begun.
    """
    if target.kind in ("model", "hub"):
        return target.path.resolve(), target.step
    if target.kind == "result":
        fix = "Name a run, a training of one, an import, or a Hugging Face folder."
        raise UserError("this is the result of a step, and no model", where=str(target.path), fix=fix)
    run = run_of(target, runs)
    if not (trained := trainings_of(run)):
        fix = f"Run it: {command('run', target.name, runs=runs)}"
        raise UserError("no model has been trained here yet", where=str(run), fix=fix)
    return (run / trained[0]).resolve(), target.step


def state_of(target: Target, runs: Path) -> ModelState | None:
    """How far the training of a model is; None for a model that no recipe trained here."""
    folder, step = locate(target, runs)
    request = read_request(folder)
    if request is None or target.kind == "hub":
        return None
    training, run = request[0].step, target.run
    name = target.name if target.step is None else target.name.rpartition("@")[0]
    if target.kind in ("run", "recipe"):
        run = run_of(target, runs)
        name = f"{name if target.kind == 'run' else run.name}/{training}"
    saved = [int(mark.parent.name) for mark in checkpoints_of(folder, step).glob("*/commit_success.txt")]
    later = TRAININGS[: TRAININGS.index(training)] if training in TRAININGS else ()
    return ModelState(
        model=f"{name}@{step}" if isinstance(step, str) else name,
        step=step if isinstance(step, int) else max(saved, default=0),
        steps=(read_json(folder / "summary.json") or read_json(folder / "feed.json")).get("steps"),
        missing=tuple(each for each in incomplete(run) if each in later) if run is not None else (),
    )


def checkpoints_of(training: Path, step: Checkpoint | None = None) -> Path:
    """The folder of the checkpoints of a training: those of `step`, or what stands for the training as a whole.

    That is the one kept from before a benchmark became worse, where there is one.
    """
    kept = training / KEPT
    return kept if step is None and kept.is_dir() else training / "checkpoints"


def made_from(result: Path, step: str) -> Path | None:
    """The result of `step` that went into `result`, directly or through others; None if there was none."""
    request = read_request(result)
    for name, key in request[0].inputs.items() if request else ():
        read = Store(result.parent).find(name, key)
        source = read if name == step else made_from(read, step)
        if source is not None and source.is_dir():
            return source
    return None


def is_hub_folder(folder: Path) -> bool:
    """Whether it is a model as Hugging Face's libraries load it, such as an export."""
    return (folder / HUB_CONFIG).is_file() and not (folder / MODEL).is_file()


def is_chat(training: Path) -> bool:
    """Whether a training made a chat model, or an imported model is one."""
    if is_hub_folder(training):
        return any(text is not None for text in chat_of_hub(training))
    request = read_request(training)
    return request[0].step in CHAT if request else bool(read_json(training / MODEL).get("imported", {}).get("chat"))


def is_tuned(training: Path) -> bool:
    """Whether it is a fine-tuning to conversations, and not only a model with a chat template."""
    request = read_request(training)
    return request is not None and request[0].step in CHAT


def release_of(model: Path, license: str | None) -> tuple[str | None, dict[str, Any]]:
    """The license and the sampling settings of an export of this model.

    An imported model, and one that was trained from it, has those of the import, under `license` if that is not None.
    The license is None if it is not known.
    """
    from affinage.config.recipe import SCRATCH_LICENSE
    from affinage.hub.read import release_in

    facts, release = read_json(model / MODEL), None
    if is_hub_folder(model):
        release = release_in(model)
    elif "imported" in facts:
        release = facts["imported"].get(RELEASE, {})
    else:
        release = facts.get(RELEASE)
    if release is None:
        return license or SCRATCH_LICENSE, {}
    return license or release.get("license"), release.get("sampling", {})


def chat_of_hub(folder: Path) -> tuple[str | None, str | None]:
    """The default system prompt of a chat model that affinage exported, and the chat template of any other model."""
    from affinage.data.chat import system_prompt_in
    from affinage.data.tokenizer import template_in

    template = template_in(folder)
    prompt = None if template is None else system_prompt_in(template)
    return prompt, template if prompt is None else None


def export_of(training: Path, run: Path) -> Path | None:
    """The Hugging Face folder that the export step of `run` wrote of this training; None if it wrote none of it."""
    export, trained = read_request(run / "export"), read_request(training)
    if export is None or trained is None or read_manifest(run / "export") is None:
        return None
    last = next((name for name in TRAININGS if name in export[0].inputs), None)  # the one that is exported
    same = last == trained[0].step and export[0].inputs.get(last) == trained[1]
    return run / "export" / "model" if same else None


def results_of(training: Path, run: Path) -> dict[str, Path]:
    """By step: what went into a training, the training itself, and how `run` has evaluated these trainings."""
    from affinage.report.facts import ORDER

    request = read_request(training)
    if request is None:
        return {}
    results = {name: place for name in ORDER if (place := made_from(training, name)) is not None}
    results[request[0].step] = training
    evaluated = {step for name, step in EVALUATIONS.items() if name in results and read_manifest(run / step)}
    return results | {step: run / step for step in evaluated}


def adapter_base(target: Target, runs: Path) -> tuple[str, str]:
    """The model that a training's adapters belong on: the training before it, or the one that its recipe begins with.

    Returns:
        its name as verbs take it ("" for an imported one), and its place: a repository of the hub, or a folder that
        transformers loads ("" where none is known).
    """
    training, _ = locate(target, runs)
    request = read_request(training)
    before = next((name for name in TRAININGS if request is not None and name in request[0].inputs), "")
    base = made_from(training, before)
    if request is None or base is None:
        origin = str(read_json(training / MODEL).get(BEGUN_WITH, ""))
        return "", "" if Path(origin).is_absolute() and not Path(origin).is_dir() else origin
    step = request[0].settings.get(request[0].step, {}).get("from_step")
    return str(base if target.run is None else target.run / before) + (f"@{step}" if step else ""), ""


# ---- opening ----


def open_model(name: str, runs: Path, *, mesh: "Sizes | None" = None) -> "LoadedModel":
    """Load the model that `name` stands for, split over devices along the axes of `mesh`; a copy on each without one.

    Raises:
        UserError: there is no such run, training or checkpoint, or the model cannot be split over the mesh.
    """
    return open_target(resolve(name, runs), runs, mesh=mesh)


def open_target(target: Target, runs: Path, *, mesh: "Sizes | None" = None) -> "LoadedModel":
    """Load the model of a target; see `open_model`."""
    folder, step = locate(target, runs)
    if is_hub_folder(folder):
        return _open_hub_folder(folder, target.name, mesh)
    places = [folder / TOKENIZER, made_from(folder, "train-tokenizer")]
    if target.run is not None:  # another version made it; the first edition had it as `tokenizer`
        places += [target.run / "train-tokenizer", target.run / TOKENIZER]
    tokenizer = next((place for place in places if place is not None and place.is_dir()), None)
    if tokenizer is None:
        raise UserError("the tokenizer of this model is gone", where=str(folder), fix="Run its recipe again.")
    return load_trained(folder, tokenizer, step=step, name=target.name, mesh=mesh)


def load_trained(
    folder: Path,
    tokenizer: Path,
    *,
    name: str,
    step: Checkpoint | None = None,
    mesh: "Sizes | None" = None,
    sharding: "Table | None" = None,
) -> "LoadedModel":
    """Load a checkpoint of a training from its folder, the newest if `step` is None, with a tokenizer's folder.

    `name` is what messages and reports call the model, `mesh` and `sharding` are how the weights are split.
    """
    from affinage.data.tokenizer import Tokenizer

    facts, graph = _facts_and_graph(folder)
    opened = Tokenizer(tokenizer)
    opened.use_template(facts.get("chat_template"))
    return _open(graph, partial(trained_params, folder, graph, step), facts, opened, name, mesh, sharding)


def _open_hub_folder(folder: Path, name: str, mesh: "Sizes | None") -> "LoadedModel":
    """Read a Hugging Face folder as `affinage import` does, into the memory of the devices; nothing is written."""
    import jax

    from affinage.hub.read import read_hub_folder
    from affinage.pipeline.imports import fitting_tokenizer

    model = read_hub_folder(folder)
    system_prompt, template = chat_of_hub(folder)
    tokenizer = fitting_tokenizer(folder, model.graph.vocabulary)
    tokenizer.use_template(template)

    def params(abstract: Any) -> Any:  # from the memory of the host: a device gets no more than its part
        return jax.device_put(model.params, jax.tree.map(lambda leaf: leaf.sharding, abstract))

    facts = {"context": model.architecture.context, "system_prompt": system_prompt or "", "precision": {}}
    return _open(model.graph, params, facts, tokenizer, name, mesh)


def _open(
    graph: "Graph",
    params: Callable[[Any], Any],
    facts: Mapping[str, Any],
    tokenizer: "Tokenizer",
    name: str,
    mesh: "Sizes | None",
    sharding: "Table | None" = None,
) -> "LoadedModel":
    """A model with the `facts` of its model.json; `params` loads parameters, given abstract ones with shardings."""
    import jax.numpy as jnp

    from affinage.config.training import PrecisionSettings
    from affinage.generation.model import LoadedModel
    from affinage.hardware.chips import chip
    from affinage.hardware.devices import acquire
    from affinage.model import abstract_params, logical_axes
    from affinage.parallel import serving_layout
    from affinage.training.trainer import compute_dtype

    precision = PrecisionSettings(**facts["precision"])
    devices, abstract = acquire(), abstract_params(graph, jnp.dtype(precision.params))
    layout, shardings = serving_layout(mesh or {"data": "auto"}, devices, logical_axes(graph), abstract, sharding)
    return LoadedModel(
        graph=graph,
        params=params(_sharded(abstract, shardings)),
        layout=layout if layout.mesh.size > 1 else None,
        compute_dtype=compute_dtype(precision, chip(devices[0].device_kind)).name,
        tokenizer=tokenizer,
        name=name,
        context=facts["context"],
        system_prompt=facts["system_prompt"],
    )


def _sharded(abstract: Any, shardings: Any) -> Any:
    import jax

    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), abstract, shardings)


def _facts_and_graph(folder: Path) -> "tuple[dict[str, Any], Graph]":
    """What the model.json of a training holds, and its graph."""
    from affinage.model import parse

    load_named_plugins()
    facts = read_json(folder / MODEL)
    if not {"graph", "precision"} <= facts.keys():
        raise UserError("this file of the model is damaged", where=str(folder / MODEL), fix="Run its recipe again.")
    try:
        return facts, parse(facts["graph"])
    except UserError as error:
        fix = f"If a plugin brings it: {VARIABLE}=my_nodes.py affinage ... {error.fix}".rstrip()
        raise UserError(error.what, where=error.where or str(folder), fix=fix) from error


def trained_params(training: Path, graph: "Graph", step: Checkpoint | None, abstract: Any) -> Any:
    """The weights of a training's model, with its adapters merged into them where it trained such.

    `step` is of the checkpoint, by default the one that stands for the training; `abstract` are the graph's parameters
    with shardings.
    """
    import jax

    from affinage.parallel.sharding import replicated
    from affinage.training.frozen import kept_frozen

    whole = replicated(jax.tree.leaves(abstract)[0].sharding.mesh)
    if (pair := _trained_adapters(training, graph, step, whole)) is None:
        return _restored(training, step, abstract)
    adapters, trained = pair
    frozen = kept_frozen(training, abstract)
    merge = jax.jit(adapters.merged, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract), donate_argnums=0)
    return merge(frozen, trained)


def open_adapters(target: Target, runs: Path) -> "tuple[Adapters, Any]":
    """The adapters that a training has trained, and their A and B.

    Raises:
        UserError: as `open_model`, and if it trained all weights.
    """
    import jax

    folder, step = locate(target, runs)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    pair = None if is_hub_folder(folder) else _trained_adapters(folder, _facts_and_graph(folder)[1], step, here)
    if pair is None:
        fix = "Adapters are trained with `sft.lora` or `dpo.lora`."
        raise UserError(f"`{target.name}` has no adapters: all its weights were trained", fix=fix)
    return pair


def _trained_adapters(
    training: Path, graph: "Graph", step: Checkpoint | None, sharding: Any
) -> "tuple[Adapters, Any] | None":
    """The adapters that a training trained, and their A and B; None if it trained the weights themselves."""
    import jax
    import jax.numpy as jnp

    from affinage.config.training import LoraSettings
    from affinage.model import Adapters, abstract_params

    facts = read_json(training / MODEL)
    if facts.get("lora") is None:
        return None
    adapters = Adapters(graph, LoraSettings(**facts["lora"]))
    abstract = abstract_params(adapters, jnp.dtype(facts["precision"]["params"]))
    return adapters, _restored(training, step, _sharded(abstract, jax.tree.map(lambda _: sharding, abstract)))


def averaged_steps(step: Checkpoint | None, complete: Sequence[int]) -> list[int]:
    """Those of the complete steps that a checkpoint's name stands for: one, or the last K of `mean:K`."""
    if isinstance(step, int):
        return [each for each in complete if each == step]
    count = int(step.partition(":")[2]) if step is not None and step != "ema" else 1
    return list(complete[-count:])


def _restored(training: Path, step: Checkpoint | None, abstract: Any) -> Any:
    """The parameters of a checkpoint, or the average of several in float32.

    Without a `step` they are those of the newest checkpoint; of a complete training, those of its last step.
    """
    import jax
    import jax.numpy as jnp

    from affinage.checkpoint import CheckpointStore

    folder = checkpoints_of(training, step)
    store = CheckpointStore(folder)
    if step == "ema":
        return store.restore_params(None, abstract, "ema_params")
    if not isinstance(step, str):
        if step is None and folder.name != KEPT and read_manifest(training) is not None:
            step = read_json(training / "summary.json").get("steps")
        return store.restore_params(step, abstract)
    steps, wanted = averaged_steps(step, store.steps()), int(step.partition(":")[2])
    if len(steps) < wanted:
        fix = "Average fewer, or have a training keep more: runtime.checkpoint.keep_last."
        raise UserError(f"there are {len(steps)} checkpoints, not {wanted}", where=str(folder), fix=fix)
    in_float32 = jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), abstract)
    total = store.restore_params(steps[0], in_float32)
    for each in steps[1:]:
        total = jax.tree.map(jnp.add, total, store.restore_params(each, in_float32))
    return jax.tree.map(lambda leaf, want: (leaf / len(steps)).astype(want.dtype), total, abstract)
