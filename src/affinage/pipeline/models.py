"""What a name on the command line stands for, in one order for all verbs, and how its model is opened.

A name is a path, a run, or a packaged recipe. A run is named `NAME[/STEP][@N]`: `quickstart`, `quickstart/sft`,
`quickstart/pretrain@1000`, or by an average, `@ema` or `@mean:5`. Without a step of the pipeline, a run stands for its
last training. Nothing here trains, and nothing imports JAX before a model is opened.
"""

import contextlib
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
from affinage.results import read_json

if TYPE_CHECKING:
    from affinage.checkpoint import CheckpointStore
    from affinage.config.training import PrecisionSettings
    from affinage.generation.model import LoadedModel
    from affinage.model import Adapters, Graph

    Sizes = Mapping[str, int | str]  # devices along each axis of a mesh
    Table = Mapping[LogicalAxis, tuple[MeshAxis, ...]]  # lines of the sharding table that a recipe has replaced

MODEL = "model.json"  # beside the checkpoints of a training or an import: what is needed to load them
TOKENIZER = "tokenizer"  # the same, of an import; the tokenizer of a training is a result of its own
KEPT = "kept"  # a checkpoint in place of those of the training
BEGUN_WITH = "begun_with"  # in model.json: where Hugging Face's libraries find the import that a training began with
HUB_CONFIG = "config.json"  # of a Hugging Face folder
RECIPE, COMMAND = "recipe.json", "run.json"  # of a run: its settings, and the command that made it
ITEMS = "items"  # of the results of an evaluation
TRAININGS = ("dpo", "sft", "pretrain")  # the last one that a run has is the run's model
CHAT = ("dpo", "sft")  # those that make a chat model
EVALUATIONS = {"pretrain": "evaluate-base", "sft": "evaluate-sft", "dpo": "evaluate-dpo"}
_RECIPE_SUFFIXES = (".yaml", ".yml", ".json")
_LISTED = 5  # names in a message
Checkpoint = int | str  # a step, "ema" for the moving average at the newest, or "mean:K" for the mean of the last K


@dataclass(frozen=True)
class Target:
    """What a name stands for."""

    name: str  # as it was given
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

    @property
    def is_training(self) -> bool:
        """Whether it is a training of a run."""
        return self.kind == "model" and self.run is not None and self.path.name in TRAININGS


def resolve(name: str, runs: Path) -> Target:
    """What `name` stands for: a path if it is one, else a run in the folder `runs`, else a packaged recipe.

    A file counts if it is called like a recipe, a folder if it is a run, a model, or the result of a step. Another
    meaning of the name is put into words in `warning`.

    Raises:
        UserError: it stands for nothing; the message lists what there is.
    """
    word: str = name
    step: Checkpoint | None = None
    if not os.path.exists(name):
        head, at, number = name.rpartition("@")
        if at and (number.isdecimal() or number == "ema" or re.fullmatch(r"mean:[1-9]\d*", number)):
            word, step = head, int(number) if number.isdecimal() else number
        elif at and "://" not in name:
            fix = "Write the number of a step, as in @1000, or @ema, or @mean:5 for the mean of the last 5 checkpoints."
            raise UserError(f"`@{number}` is no checkpoint", where=name, fix=fix)
    places = [Path(word), *([] if word.startswith((".", "/")) else [runs / word])]
    found = [Target(name, kind, place, step) for place in places if (kind := _kind(place)) is not None]
    if len(found) == 2 and os.path.samefile(found[0].path, found[1].path):
        found.pop()
    if not found and step is None:
        recipe = packaged_recipes().get(word) or Path(word)
        found = [Target(name, "recipe", recipe)] if os.path.isfile(recipe) else []  # Path's raises for a long name
    if not found:
        raise _unknown(word, runs)
    if step is not None and found[0].kind not in ("run", "model"):
        raise UserError("this has no checkpoints", where=name, fix=f"Write `{word}`.")
    if len(found) == 2:
        other = f"`{word}` is {found[0].path} here; the run of this name is `{found[1].path}`"
        return replace(found[0], warning=other)
    return found[0]


def _kind(place: Path) -> Any:
    """The kind of a target that a path is; None for a path that is none."""
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
    for folder in filter(os.path.isdir, (Path(word), runs / word)):
        inside: list[str] = []
        with contextlib.suppress(PermissionError):
            inside = sorted(str(entry) for entry in folder.iterdir() if _kind(entry) in ("run", "model", "hub"))
        fix = f"Name one of those in it: {_listed(inside)}." if inside else "Name a run, a model, or a recipe."
        return UserError("this folder is neither a run nor a model", where=str(folder), fix=fix)
    made, packaged = run_names(runs), [*packaged_recipes()]
    parts = [f"{run}/{training}" for run in made for training in trainings_of(runs / run)]
    listed = f"Runs in {runs}: {', '.join(made) or 'none'}. Packaged recipes: {', '.join(packaged)}."
    known = parts if "/" in word else [*made, *packaged]
    return UserError(f"there is no path, run or recipe named `{word}`", fix=did_you_mean(word, known) or listed)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


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
    if target.run is None and (target.path / "recipe.yaml").is_file():  # of an import
        return load_recipe(target.path / "recipe.yaml", overrides)
    if target.run is None:
        raise UserError(f"`{target.name}` has no recipe", fix="Name a recipe or a run.")
    file = target.run / RECIPE
    loaded, dropped = (load_recipe(file, overrides), []) if warn is None else load_saved(file, overrides)
    if dropped and warn is not None:
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


def run_folder(target: Target, recipe: LoadedRecipe, runs: Path) -> Path:
    """The folder of the run that a target is, or that its recipe has or will have."""
    return target.run or runs / recipe.recipe.name


def run_of(target: Target, runs: Path) -> Path:
    """The folder of the run that a target is or belongs to; of a recipe, that of its name.

    Raises:
        UserError: the recipe was never run, with the command that runs it; or it is a model without a run.
    """
    if target.run is not None or target.kind == "run":
        return target.run or target.path
    if target.kind != "recipe":
        raise UserError(f"`{target.name}` belongs to no run", fix=f"Runs in {runs}: {_listed(run_names(runs))}.")
    run = runs / load_recipe(target.path).recipe.name
    if (run / RECIPE).is_file():
        return run
    raise UserError(f"`{target.name}` has not been run yet", fix=f"Run it: {command('run', target.name, runs=runs)}")


def recorded(run: Path) -> dict[str, Any]:
    """The settings that a run was last made with, as they were written; {} if it has none."""
    settings = read_json(run / RECIPE)
    if not settings and (run / RECIPE).is_file():
        fix = "Run its recipe again: what is complete is kept, and this file is written again."
        raise UserError("this file of the run is damaged", where=str(run / RECIPE), fix=fix)
    return settings


def trainings_of(run: Path) -> list[str]:
    """The trainings of a run that have begun and are current, the last one first; [] if it is no run."""
    return [name for name in TRAININGS if (run / name / MODEL).is_file() and is_current(run, name)]


def is_current(run: Path, training: str) -> bool:
    """Whether a run has this training, and it began from the base that the run has now, and that from its own.

    A training that another version of affinage completed is taken for current.
    """
    request = read_request(run / training)
    if request is None:
        return read_manifest(run / training) is not None
    bases = {name: key for name, key in request[0].inputs.items() if name in TRAININGS}
    now = {name: found for name in bases if (found := read_request(run / name)) is not None}
    return all(found[1] == bases[name] and is_current(run, name) for name, found in now.items())


def planned_trainings(run: Path) -> list[str]:
    """The trainings of a run's recipe, in their order."""
    recipe = recorded(run)
    sections = [name for name in reversed(TRAININGS) if recipe.get(name) is not None]
    return [name for name in sections if name != "pretrain" or recipe.get("data") is not None]


def incomplete(run: Path) -> list[str]:
    """The trainings of a run's recipe that are not complete, in their order."""
    wanted = planned_trainings(run)
    return [name for name in wanted if read_manifest(run / name) is None or not is_current(run, name)]


def check_complete(target: Target, runs: Path, *, instead: str = "") -> None:
    """Raise UserError for a run, named as a whole, whose trainings are not all complete.

    It has the command that completes it and what can be done `instead`, by default the names of the models there are.
    """
    run = run_of(target, runs) if target.kind in ("run", "recipe") else None
    if run is None or target.step is not None or not (missing := incomplete(run)):
        return
    if not instead:
        name = target.name if target.kind == "run" else run.name
        trained = [Target(f"{name}/{part}", "model", run / part) for part in reversed(trainings_of(run))]
        there = [str(state) for one in trained if (state := state_of(one, runs)) is not None and state.step]
        instead = f"Or name what is there: {'; '.join(there)}." if there else ""
    fix = "\n  ".join(filter(None, [f"Run it: {command('run', target.name, runs=runs)}", instead]))
    raise UserError(f"`{target.name}` is not complete; to train: {', '.join(missing)}", fix=fix)


# ---- models ----


@dataclass(frozen=True)
class ModelState:
    """How far the training of a model is."""

    name: str  # of the training, as every verb takes it
    step: int
    steps: int | None  # that the training has in all, as far as that is known
    missing: tuple[str, ...]  # later trainings of its recipe that are not complete

    def __str__(self) -> str:
        whole = "" if self.steps is None else f" of {self.steps:,}"
        rest = f"; not trained yet: {', '.join(self.missing)}" if self.missing else ""
        return f"{self.name}, step {self.step:,}{whole}{rest}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"model": self.name, "step": self.step, "steps": self.steps, "missing": list(self.missing)}


def locate(target: Target, runs: Path) -> tuple[Path, Checkpoint | None]:
    """The folder of the model that a target stands for, in the store if it is a training, and the step it asks for.

    Of a run, that is its last training that has begun and is current.
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
    asked = request[0].settings.get(training) or {}
    known = (read_json(folder / "summary.json"), read_json(folder / "feed.json"), asked)
    steps = next((facts["steps"] for facts in known if isinstance(facts.get("steps"), int)), None)
    later = TRAININGS[: TRAININGS.index(training)] if training in TRAININGS else ()
    missing = [name for name in incomplete(run) if name in later] if run is not None else []
    at = step if isinstance(step, int) else max(saved, default=0)
    return ModelState(f"{name}@{step}" if isinstance(step, str) else name, at, steps, tuple(missing))


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
        found = read if name == step else made_from(read, step)
        if found is not None and found.is_dir():
            return found
    return None


def is_hub_folder(folder: Path) -> bool:
    """Whether it is a model as Hugging Face's libraries load it, such as an export, and none of affinage's."""
    return (folder / HUB_CONFIG).is_file() and not (folder / MODEL).is_file()


def is_chat(training: Path) -> bool:
    """Whether a training made a chat model, or an imported model is one."""
    if is_hub_folder(training):
        return any(text is not None for text in chat_of_hub(training))
    request = read_request(training)
    return request[0].step in CHAT if request else bool(read_json(training / MODEL).get("imported", {}).get("chat"))


def is_from_elsewhere(training: Path) -> bool:
    """Whether no recipe trained it here: a Hugging Face folder, or one imported."""
    return is_hub_folder(training) or "imported" in read_json(training / MODEL)


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
    found = {name: place for name in ORDER if (place := made_from(training, name)) is not None}
    found[request[0].step] = training
    for name, step in EVALUATIONS.items():
        evaluated, trained = read_request(run / step), found.get(name) and read_request(found[name])
        if evaluated is not None and trained and evaluated[0].inputs.get(name) == trained[1]:
            found[step] = run / step
    return found


def adapter_base(target: Target, runs: Path) -> tuple[str, str]:
    """The model that a training's adapters belong on: the training before it, or the one that its recipe begins with.

    Returns:
        its name as verbs take it ("" for an imported one), and its place: a repository of the hub, or a folder that
        transformers loads ("" where none is known).
    """
    training, _ = locate(target, runs)
    request = read_request(training)
    before = next((name for name in TRAININGS if request is not None and name in request[0].inputs), "")
    found = made_from(training, before)
    if request is None or found is None:
        origin = str(read_json(training / MODEL).get(BEGUN_WITH, ""))
        return "", "" if Path(origin).is_absolute() and not Path(origin).is_dir() else origin
    step = request[0].settings.get(request[0].step, {}).get("from_step")
    exports = [] if step else [export_of(found, export.parent) for export in sorted(runs.glob("*/export"))]
    exported = next(filter(None, exports), None)
    beside = None if target.run is None else target.run / before
    model = str(beside if beside is not None and beside.exists() and beside.samefile(found) else found)
    return model + (f"@{step}" if step else ""), "" if exported is None else os.path.abspath(exported)


# ---- opening ----


def open_model(name: str, runs: Path, *, mesh: "Sizes | None" = None) -> "LoadedModel":
    """Load the model that `name` stands for, split over devices along the axes of `mesh`; a copy on each without one.

    Raises:
        UserError: there is no such run, training or checkpoint; the message lists what there is. Or the model cannot be
            split over the mesh.
    """
    return open_target(resolve(name, runs), runs, mesh=mesh)


def open_target(target: Target, runs: Path, *, mesh: "Sizes | None" = None) -> "LoadedModel":
    """Load the model of a target; see `open_model`."""
    folder, step = locate(target, runs)
    if is_hub_folder(folder):
        return _open_hub_folder(folder, target.name, mesh)
    beside = [folder / TOKENIZER, made_from(folder, "train-tokenizer")]
    if target.run is not None:  # another version made it; the first edition had it as `tokenizer`
        beside += [target.run / "train-tokenizer", target.run / TOKENIZER]
    tokenizer = next((place for place in beside if place is not None and place.is_dir()), None)
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
    from affinage.config.training import PrecisionSettings
    from affinage.data.tokenizer import Tokenizer

    facts, graph = _facts_and_graph(folder)
    opened = Tokenizer(tokenizer)
    opened.use_template(facts.get("chat_template"))
    params = partial(trained_params, folder, graph, step)
    facts = {key: facts[key] for key in ("context", "system_prompt", "precision")}
    precision = PrecisionSettings(**facts.pop("precision"))
    return _open(graph, params, precision, mesh, sharding, name=name, tokenizer=opened, **facts)


def _open_hub_folder(folder: Path, name: str, mesh: "Sizes | None") -> "LoadedModel":
    """Read a Hugging Face folder as `affinage import` does, into the memory of the devices; nothing is written."""
    import jax

    from affinage.config.training import PrecisionSettings
    from affinage.hub.read import read_hub_folder
    from affinage.pipeline.imports import fitting_tokenizer

    model = read_hub_folder(folder)
    system_prompt, template = chat_of_hub(folder)
    tokenizer = fitting_tokenizer(folder, model.graph.vocabulary)
    tokenizer.use_template(template)

    def params(abstract: Any) -> Any:  # from the memory of the host: a device gets no more than its part
        return jax.device_put(model.params, jax.tree.map(lambda leaf: leaf.sharding, abstract))

    facts: dict[str, Any] = {"name": name, "context": model.architecture.context, "system_prompt": system_prompt or ""}
    return _open(model.graph, params, PrecisionSettings(), mesh, tokenizer=tokenizer, **facts)


def _open(
    graph: "Graph",
    params: Callable[[Any], Any],
    precision: "PrecisionSettings",
    mesh: "Sizes | None",
    sharding: "Table | None" = None,
    **fields: Any,
) -> "LoadedModel":
    """A model with its `fields`; `params` returns the parameters, given abstract ones with shardings."""
    import jax.numpy as jnp

    from affinage.generation.model import LoadedModel
    from affinage.hardware.chips import chip
    from affinage.hardware.devices import acquire
    from affinage.model import abstract_params, logical_axes
    from affinage.parallel import serving_layout
    from affinage.training.trainer import compute_dtype

    devices, abstract = acquire(), abstract_params(graph, jnp.dtype(precision.params))
    layout, shardings = serving_layout(mesh or {"data": "auto"}, devices, logical_axes(graph), abstract, sharding)
    return LoadedModel(
        graph=graph,
        params=params(_sharded(abstract, shardings)),
        layout=layout if layout.mesh.size > 1 else None,
        compute_dtype=compute_dtype(precision, chip(devices[0].device_kind)).name,
        **fields,
    )


def _sharded(abstract: Any, shardings: Any) -> Any:
    import jax

    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )


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

    found = _trained_adapters(training, graph, step, replicated(jax.tree.leaves(abstract)[0].sharding.mesh))
    if found is None:
        return _restored(training, step, abstract)
    adapters, trained = found
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
    found = None if is_hub_folder(folder) else _trained_adapters(folder, _facts_and_graph(folder)[1], step, here)
    if found is None:
        fix = "Adapters are trained with `sft.lora` or `dpo.lora`."
        raise UserError(f"`{target.name}` has no adapters: all its weights were trained", fix=fix)
    return found


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


def _averaged(store: "CheckpointStore", name: str, abstract: Any) -> Any:
    """The parameters that `ema` or `mean:K` stands for, averaged in float32."""
    import jax
    import jax.numpy as jnp

    steps, where = averaged_steps(name, store.steps()), str(store.folder)
    if name == "ema":
        if not steps or not any(path.startswith("ema_params.") for path in store.metadata(steps[-1]).checksums):
            fix = "Train with `ema: {decay: 0.999}`, or take the mean of the last checkpoints: @mean:5."
            raise UserError("the training keeps no moving average of its parameters", where=where, fix=fix)
        return store.restore_params(steps[-1], abstract, "ema_params")
    if len(steps) < (wanted := int(name.partition(":")[2])):
        fix = "Average fewer, or have a training keep more: runtime.checkpoint.keep_last."
        raise UserError(f"there are {len(steps)} checkpoints, not {wanted}", where=where, fix=fix)
    in_float32 = jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), abstract)
    total = store.restore_params(steps[0], in_float32)
    for step in steps[1:]:
        total = jax.tree.map(jnp.add, total, store.restore_params(step, in_float32))
    return jax.tree.map(lambda leaf, want: (leaf / len(steps)).astype(want.dtype), total, abstract)


def _restored(training: Path, step: Checkpoint | None, abstract: Any) -> Any:
    """The parameters of a checkpoint; of a training that is complete, and of no `step`, those of its last step."""
    from affinage.checkpoint import CheckpointStore

    folder = checkpoints_of(training, step)
    store = CheckpointStore(folder)
    if isinstance(step, str):
        return _averaged(store, step, abstract)
    if step is not None and step not in store.steps():
        fix = f"There are {', '.join(f'@{known}' for known in store.steps())}."
        raise UserError(f"there is no checkpoint of step {step}", where=str(training), fix=fix)
    if step is None and folder.name != KEPT and read_manifest(training) is not None:
        steps = read_json(training / "summary.json").get("steps")
        step = steps if isinstance(steps, int) else None
    return store.restore_params(step, abstract)
