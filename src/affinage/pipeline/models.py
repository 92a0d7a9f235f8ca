"""What a name on the command line stands for, in one order for all verbs, and what is known of its run and model.

A name is a path, a run, or a packaged recipe. A run is named `NAME[/STEP][@N]`: `quickstart`, `quickstart/sft`,
`quickstart/pretrain@1000`, or by an average, `@ema` or `@mean:5`. Without a step of the pipeline, a run stands for its
last training. Nothing here trains or imports JAX; `affinage.pipeline.opening` loads the models.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from affinage.config.load import LoadedRecipe, find_recipe, load_recipe, packaged_recipes
from affinage.config.recipe import CheckpointSettings
from affinage.errors import UserError, did_you_mean
from affinage.fingerprints import fingerprints
from affinage.pipeline.store import Store, read_manifest, read_request
from affinage.results import RESULTS, read_json, runs_of_sweep

MODEL = "model.json"  # beside the checkpoints of a training or an import: what is known of the model, see `facts_of`
TOKENIZER = "tokenizer"  # the same, of an import; the tokenizer of a training is a result of its own
KEPT = "kept"  # a checkpoint in place of those of the training
SAVED = ("checkpoints", "frozen", KEPT)  # the folders of a training that Orbax writes
HUB_CONFIG = "config.json"  # of a Hugging Face folder
RECIPE, COMMAND = "recipe.json", "run.json"  # of a run: its settings, and the command that made it
ITEMS = "items"  # of the results of an evaluation
FEED = "feed.json"  # of a training: how to find the rows of a step again; the devices may have a part in the batch
ROWS = {"pretrain": "tokenize", "sft": "sft-data", "dpo": "preference-data"}  # the step that makes a training's rows
TRAININGS = ("dpo", "sft", "pretrain")  # the last one that a run has is the run's model
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
    run: Path | None = None  # the folder of the run that it is or belongs to
    warning: str = ""  # where the name fits something else, too


def resolve(name: str, runs: Path) -> Target:
    """What `name` stands for: a path if it is one, else a run in the folder `runs`, else a packaged recipe.

    A file counts if it has a recipe's suffix, a folder if it is a run, a model, or the result of a step. If there are
    two meanings, the target's `warning` names the other. Raises UserError if it stands for nothing.
    """
    word, checkpoint = name, ""
    if not os.path.exists(name) and (parts := _CHECKPOINT.fullmatch(name)):
        word, checkpoint = parts.groups()
    step = int(checkpoint) if checkpoint.isdecimal() else checkpoint or None
    places = [Path(word), *([] if word.startswith((".", "/")) else [runs / word])]
    targets = []
    for place in places:
        if (kind := _kind(place)) is not None:
            folders = () if kind == "recipe" else (place, place.parent)
            run = next((folder for folder in folders if (folder / RECIPE).is_file()), None)
            targets.append(Target(name, kind, place, step, run))
    if not targets and step is None:
        recipe = packaged_recipes().get(word) or Path(word)
        targets = [Target(name, "recipe", recipe)] if os.path.isfile(recipe) else []  # Path's raises for a long name
    if not targets:
        if Path(word).suffix in _RECIPE_SUFFIXES:
            find_recipe(word)  # raises, with the nearest file beside it
        raise _of_nothing(word, places, runs)
    if step is not None and targets[0].kind not in ("run", "model"):
        raise UserError("this has no checkpoints", where=name, fix=f"Write `{word}`.")
    if len(targets) == 2 and not os.path.samefile(targets[0].path, targets[1].path):
        warning = f"`{word}` is {targets[0].path} here; the run of this name is `{targets[1].path}`"
        return replace(targets[0], warning=warning)
    return targets[0]


def _of_nothing(word: str, places: Sequence[Path], runs: Path) -> UserError:
    """What is wrong with a name, for one of these places, that stands for nothing, and what is there."""
    run_name, _, part = word.rpartition("/")
    run = next((place.parent for place in places if run_name and (place.parent / RECIPE).is_file()), None)
    if run is not None:
        there = f"It has {', '.join(step for step in RESULTS if read_manifest(run / step)) or 'no results'}."
        sections = [part, *(each for each in TRAININGS if part in (ROWS[each], EVALUATIONS[each]))]
        sections += ["evaluate"] if part in EVALUATIONS.values() else []
        if any(read_json(run / RECIPE).get(section, "") is None for section in sections):
            listed = ", ".join(f"{run_name}/{training}" for training in trainings_of(run)) or "none"
            return UserError(f"the recipe of `{run_name}` has no step `{part}`", fix=f"Its models: {listed}. {there}")
        run_it = f"Run it: {command('run', run_name, '--until', part, runs=runs)}\n  " if part in RESULTS else ""
        return UserError(f"the run `{run_name}` has no `{part}`", fix=f"{run_it}{there}")
    for folder in (each for place in places for each in (place, place.parent)):
        if swept := runs_of_sweep(file := folder / "sweep.json"):
            fix = f"Name one of its runs: {swept[0]} ... {swept[-1]} ({file})."
            return UserError(f"`{folder.name}` is a sweep, and no run", fix=fix)
    made, packaged = sorted(file.parent.name for file in runs.glob(f"*/{RECIPE}")), [*packaged_recipes()]
    listed = f"Runs in {runs}: {', '.join(made) or 'none'}. Packaged recipes: {', '.join(packaged)}."
    fix = did_you_mean(word, [*made, *packaged]) or listed
    return UserError(f"`{word}` is no run, no model and no recipe", fix=fix)


def _kind(place: Path) -> Any:
    """The kind of target that a path is; None for a path that is none."""
    if os.path.isfile(place):
        return "recipe" if place.suffix in _RECIPE_SUFFIXES else None
    if not os.path.isdir(place):
        return None
    for file, kind in ((MODEL, "model"), (HUB_CONFIG, "hub"), (RECIPE, "run")):
        if (place / file).is_file():
            return kind
    return "result" if (place / ITEMS).is_dir() or read_request(place) is not None else None


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
        return load_recipe(target.path / "recipe.yaml", overrides)  # of an import; nothing else has one
    file = target.run / RECIPE
    dropped: list[str] = []
    loaded = load_recipe(file, overrides, left_out=None if warn is None else dropped)
    if warn is not None and dropped:
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
    """The folder of the run that a target is or belongs to; of a recipe, that of its name. UserError if it has none."""
    if target.run is not None:
        return target.run
    if target.kind != "recipe":
        raise UserError(f"`{target.name}` belongs to no run", fix="Name a run, or a recipe that has been run.")
    run = runs / load_recipe(target.path).recipe.name
    if not (run / RECIPE).is_file():
        fix = f"Run it: {command('run', target.name, runs=runs)}"
        raise UserError(f"`{target.name}` has not been run yet", fix=fix)
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


def untrained(run: Path) -> list[str]:
    """The trainings of a run's recipe that are not complete, in their order."""
    recipe = recorded(run)
    planned = [name for name in reversed(TRAININGS) if recipe.get(name) is not None]
    if recipe.get("data") is None and "pretrain" in planned:
        planned.remove("pretrain")
    return [name for name in planned if read_manifest(run / name) is None]


def is_evaluated(run: Path) -> bool:
    """Whether all trainings of a run are complete and evaluated."""
    if recorded(run).get("evaluate") is None or untrained(run):
        return False
    return all(read_manifest(run / EVALUATIONS[name]) for name in trainings_of(run))


def check_complete(target: Target, runs: Path, *, instead: str = "") -> None:
    """Raise UserError for a run, named as a whole, whose trainings are not all complete, with the command for them.

    `instead` is what else can be done; by default, to name one of the models that are there.
    """
    run = run_of(target, runs) if target.kind in ("run", "recipe") else None
    if run is None or target.step is not None or not (missing := untrained(run)):
        return
    if not instead and (trained := trainings_of(run)):
        instead = f"Or name a model that is there: {', '.join(f'{run.name}/{training}' for training in trained)}."
    fix = "\n  ".join(filter(None, [f"Run it: {command('run', target.name, runs=runs)}", instead]))
    raise UserError(f"`{target.name}` is not complete; to train: {', '.join(missing)}", fix=fix)


# ---- models ----


def locate(target: Target, runs: Path) -> Target:
    """The model that a target stands for, its path that of the weights; of a run, its last training that has begun."""
    if target.kind in ("model", "hub"):
        return replace(target, path=target.path.resolve())
    if target.kind == "result":
        fix = "Name a run, a training of one, an import, or a Hugging Face folder."
        raise UserError("this is the result of a step, and no model", where=str(target.path), fix=fix)
    run = run_of(target, runs)
    if not (trained := trainings_of(run)):
        fix = f"Run it: {command('run', target.name, runs=runs)}"
        raise UserError("no model has been trained here yet", where=str(run), fix=fix)
    return replace(target, kind="model", path=(run / trained[0]).resolve(), run=run)


def state_of(target: Target, runs: Path) -> dict[str, Any]:
    """How far the training of a model is: {model, step, steps in all}; {} for a model that no recipe trained here."""
    model = locate(target, runs)
    folder, step, request = model.path, model.step, read_request(model.path)
    if request is None or model.kind == "hub":
        return {}
    name = folder.name if model.run is None else f"{model.run.name}/{request.step}"
    reached = max(steps_of(folder, step, model.name), default=0)
    steps = (read_json(folder / "summary.json") or read_json(folder / FEED)).get("steps") or reached
    return {"model": f"{name}@{step}" if isinstance(step, str) else name, "step": reached, "steps": steps}


def results_folder(target: Target, runs: Path) -> Path:
    """Where `affinage eval` keeps the results of a model as it is now, which is known without reading its weights."""
    model = locate(target, runs)
    folder, step = model.path, model.step
    if model.kind == "hub":
        files = fingerprints([str(folder)])
        parts = [[Path(file).name, digest] for file, digest in files.items() if not file.endswith(".md")]  # its card
    else:
        from affinage.checkpoint import CheckpointStore

        store = CheckpointStore(checkpoints_of(folder, step))
        parts = [[str(each), store.metadata(each).fingerprint] for each in steps_of(folder, step, model.name)]
        parts += [[str(step), hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()]]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return runs / "evaluations" / f"{folder.name}-{digest[:12]}"


def eval_results(target: Target, runs: Path) -> Path | None:
    """The folder with the answers of a run, a model or a step of evaluation; None if there are none of it as it is now.

    Of a model, the results of `affinage eval` come before those of its run's own evaluation.
    """
    if target.kind == "result":
        return target.path if (target.path / ITEMS).is_dir() else None
    run, trainings = (target.path.parent, [target.path.name]) if target.kind == "model" else (target.path, TRAININGS)
    folders = [run / EVALUATIONS[each] for each in trainings if each in EVALUATIONS and target.step is None]
    if target.kind != "run" or trainings_of(run):
        folders.insert(0, results_folder(target, runs))
    return next((folder for folder in folders if (folder / ITEMS).is_dir()), None)


def checkpoints_of(training: Path, step: Checkpoint | None = None) -> Path:
    """The folder with the checkpoints of a training; without a `step`, that of the one which a monitor kept, if any."""
    kept = training / KEPT
    return kept if step is None and kept.is_dir() else training / "checkpoints"


def steps_of(training: Path, step: Checkpoint | None, name: str = "") -> list[int]:
    """The complete checkpoints of a name: a step or the last K of `mean:K` (UserError: not there), else the newest."""
    folder, counted = checkpoints_of(training, step), str(step).partition("mean:")[2]
    there = sorted(int(mark.parent.name) for mark in folder.glob("*/commit_success.txt"))
    count = int(counted or 1)
    steps = [each for each in there if each == step] if isinstance(step, int) else there[-count:]
    if step is not None and len(steps) < count:
        what = "there is no complete checkpoint" if count == 1 else f"there are fewer than {count} complete checkpoints"
        what += f" of step {step}" if isinstance(step, int) else ""
        fix = f"There are {', '.join(f'@{each}' for each in there)}; a training keeps those of `runtime.checkpoint`."
        raise UserError(what, where=name or str(folder), fix=fix if there else "Train the model first.")
    return steps


def made_from(result: Path, step: str) -> Path | None:
    """The result of `step` that went into `result`, directly or through others; None if there was none."""
    for name, key in request.inputs.items() if (request := read_request(result)) else ():
        read = Store(result.parent).find(name, key)
        source = read if name == step else made_from(read, step)
        if source is not None and source.is_dir():
            return source
    return None


def facts_of(model: Path) -> dict[str, Any]:
    """What is known of a model beside its weights: its model.json; of a Hugging Face folder the same, from its files.

    That is `graph`, `context`, `system_prompt`, `precision` and, where there are such, `chat_template`, `lora`,
    `release` and `begun_with` (license and place of the import that it began with), `imported`.
    """
    if (model / HUB_CONFIG).is_file() and not (model / MODEL).is_file():
        from affinage.hub.folder import hub_facts

        return hub_facts(model)
    return read_json(model / MODEL)


def is_tuned(training: Path) -> bool:
    """Whether it is a fine-tuning to conversations, and not only a model with a chat template."""
    return (request := read_request(training)) is not None and request.step in ("sft", "dpo")


def is_chat(model: Path) -> bool:
    """Whether a training made a chat model, or an imported model is one."""
    return is_tuned(model) or bool(facts_of(model).get("imported", {}).get("chat"))


def license_of(model: Path) -> str | None:
    """The license of an import, and of what was trained from it; None if none is stated, as of a model from scratch."""
    facts = facts_of(model)
    return (facts.get("imported", facts).get("release") or {}).get("license")


def results_of(training: Path, run: Path) -> dict[str, Path]:
    """By step: what went into a training, the training itself, and how `run` has evaluated these trainings."""
    if (request := read_request(training)) is None:
        return {}
    results = {name: place for name in RESULTS if (place := made_from(training, name)) is not None}
    results[request.step] = training
    evaluated = {step for name, step in EVALUATIONS.items() if name in results and read_manifest(run / step)}
    return results | {step: run / step for step in evaluated}


# ---- what a recipe begins with ----


def initial_folder(loaded: LoadedRecipe) -> Path | None:
    """The folder that `init_from` names; None for random weights. Raises UserError if it is no imported model."""
    if loaded.recipe.init_from is None:
        return None
    folder = loaded.beside(loaded.recipe.init_from, ("init_from",))
    if "imported" not in read_json(folder / MODEL):
        what = f"there is no imported model in `{loaded.recipe.init_from}`"
        fix = "Make one: affinage import FOLDER_OR_HUB_ID --to FOLDER"
        raise UserError(what, where=loaded.locate(("init_from",)), fix=fix)
    return folder


def chat_template_of(loaded: LoadedRecipe, tokenizer: Path | None) -> str | None:
    """The Jinja template of the recipe's conversations, with the tokenizer in a folder; None for ChatML."""
    chosen, fix = loaded.recipe.chat_template, "Name a Jinja file, or `chatml` for a vocabulary with its tokens."
    if chosen == "chatml":
        return None
    where = loaded.locate(("chat_template",))
    if chosen == "tokenizer":
        from affinage.data.tokenizer import template_in

        if tokenizer is not None and (template := template_in(tokenizer)):
            return template
        raise UserError("the tokenizer has no chat template of its own", where=where, fix=fix)
    try:
        return loaded.beside(chosen, ("chat_template",)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"there is no chat template in `{chosen}`", where=where, fix=fix) from error


def extended(loaded: LoadedRecipe, section: str) -> tuple[Path, int] | None:
    """Folder and step of the checkpoint that `resume_from` of a training names; None if it names none."""
    named: str | None = getattr(loaded.recipe, section).resume_from
    if named is None:
        return None
    from affinage.checkpoint import CheckpointStore

    path, _, step = named.partition("@")
    folder = loaded.beside(path, (section, "resume_from"))
    steps = CheckpointStore(folder / "checkpoints").steps()
    where, last = loaded.locate((section, "resume_from")), getattr(loaded.recipe, section).steps
    if folder.parent.name == loaded.recipe.name or not steps or (step and step not in map(str, steps)):
        what, listed = f"there is no checkpoint `{named}` of another run", ", @".join(map(str, steps)) or "STEP"
        fix = f"Name a training of another run, runs/NAME/{section}, or one of its steps: @{listed}."
        raise UserError(what, where=where, fix=fix)
    if (begun := int(step or steps[-1])) >= last:
        raise UserError(f"it has made {begun} of the {last} steps", where=where, fix=f"Set {section}.steps to more.")
    return folder.resolve(), begun


def checkpoint_count(rules: CheckpointSettings, begun: int, steps: int) -> int:
    """How many checkpoints a training from step `begun` to `steps` has at once, at most, without saves by the clock."""
    from affinage.checkpoint.store import kept_steps

    saved = range((begun // rules.every_steps + 1) * rules.every_steps, steps, rules.every_steps)
    return 1 + max(rules.keep_last, len(kept_steps(saved, rules.keep_last, rules.keep_every)))


def feeds_of(loaded: LoadedRecipe, section: str, run: Path) -> Callable[[int], Any] | None:
    """What opens a `DataLoader` of a run's rows for a batch size; None where there are none for this training."""
    from affinage.data.dataloader import DataLoader, mixture_of

    rows, mixture = run / ROWS[section], mixture_of(getattr(loaded.recipe, section))
    feed = cache(lambda batch: DataLoader(rows / "train", seed=loaded.recipe.seed, batch=batch, mixture=mixture))
    with contextlib.suppress(UserError):  # the mixture is of other sources than these
        return feed if read_manifest(rows) is not None and feed(1) else None
    return None
