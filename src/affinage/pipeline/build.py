"""From a recipe to the list of its steps, each with the settings, files and results that decide what it makes."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from affinage.config.data import POCKET_WORLD, DataSettings
from affinage.config.load import LoadedRecipe
from affinage.config.recipe import Recipe
from affinage.config.settings import Settings
from affinage.config.training import OF_THE_ROWS
from affinage.config.tuning import TuningSettings
from affinage.data.places import is_on_hub, is_url, location, released_folder
from affinage.evaluation.benchmarks import BENCHMARKS, GROUPS, files_of, of_pocket_world
from affinage.evaluation.tasks import of_the_hub
from affinage.paths import from_home
from affinage.pipeline import steps_data, steps_eval, steps_train
from affinage.pipeline.base_models import chat_template_of, extension_fingerprint, initial_fingerprint
from affinage.pipeline.names import EVALUATIONS
from affinage.pipeline.sources import forget_downloads, task_files
from affinage.pipeline.step import Step, StepContext, Summary
from affinage.plugins import load_plugins, plugin_sources


def build_steps(loaded: LoadedRecipe, report: Callable[[StepContext], Summary] | None = None) -> list[Step]:
    """Returns the steps of a recipe, each after those it reads. Sections that the recipe leaves out have no steps.

    Args:
        loaded: the recipe.
        report: the function of the last step; without it there is no such step.
    """
    recipe, steps = loaded.recipe, []
    load_plugins(loaded)
    begun = initial_fingerprint(loaded)  # of the imported model that the recipe begins with
    trains = bool(begun and _tunings(recipe)) or (recipe.data is not None and recipe.pretrain is not None)
    if recipe.data is not None or trains:
        steps = [*_data_steps(recipe, begun), *(_tuning_data_steps(loaded) if trains else ())]
        steps += [*_training_steps(loaded, begun), *_result_steps(recipe)] if trains else []
    steps = [replace(step, sources=step.sources | plugin_sources(loaded, step.config)) for step in steps]
    steps = [replace(step, setup=step.setup or partial(forget_downloads, step.files)) for step in steps]
    if steps and report is not None:
        config = _part(recipe, "name", "description", "report")
        steps.append(Step("report", report, config, tuple(step.name for step in steps), artifact="report.html"))
    return steps


def _data_steps(recipe: Recipe, begun: dict[str, str]) -> list[Step]:
    data, steps = recipe.data, []
    if uses_pocket_world(recipe):
        size = {"data": {"sources": {"max_bytes": steps_data.pocket_bytes(recipe)}}}
        steps.append(Step("synthesize", steps_data.synthesize, {**_part(recipe, "seed"), **size}))
    if data is None:  # an imported model is only fine-tuned
        return [*steps, Step("train-tokenizer", steps_data.base_tokenizer, {}, sources=begun, version=2)]
    files = tuple(location(each, data.root, data.mirror) for each in data.sources if not is_on_hub(each, data.mirror))
    world = _if(POCKET_WORLD in [source.path for source in data.sources], "synthesize")
    config = {"data": _ingested(data)}
    steps.append(Step("ingest", steps_data.ingest, config, world, version=2, files=files, resumable=True))
    config = {"data": _json(data, "filters", "languages")}
    steps.append(Step("filter", steps_data.filter_documents, config, ("ingest",), version=3, resumable=True))
    if data.dedup is not None:
        config, files = {"data": _json(data, "dedup")}, _released(data.dedup.against)
        steps.append(Step("dedup", steps_data.dedup, config, ("filter",), version=3, files=files, resumable=True))
    if targets := contamination_targets(recipe):
        steps.append(_decontamination(recipe, data, targets, steps[-1].name))
    config = {"data": _json(data, "split"), **_part(recipe, "seed")}
    steps.append(Step("split", steps_data.split, config, (steps[-1].name,), version=3))
    if begun:
        steps.append(Step("train-tokenizer", steps_data.base_tokenizer, {}, ("split",), sources=begun, version=2))
    else:
        settings = recipe.tokenizer.model_dump(mode="json", exclude={"compare"})
        config = {"data": _json(data, "languages"), "tokenizer": settings, **_part(recipe, "seed")}
        steps.append(Step("train-tokenizer", steps_data.train_tokenizer, config, ("split",), version=2))
    if recipe.tokenizer.compare:
        config, files = {"tokenizer": _json(recipe.tokenizer, "compare")}, recipe.tokenizer.compare
        inputs = ("split", "train-tokenizer")
        steps.append(Step("compare-tokenizers", steps_data.compare_tokenizers, config, inputs, files=files, version=2))
    config, inputs = _part(recipe, "packing", "seed"), ("split", "train-tokenizer")
    steps.append(Step("tokenize", steps_data.tokenize, config, inputs, version=2, resumable=True))
    return steps


def _released(place: str) -> tuple[str, ...]:
    """The documents of `dedup.against`, if it is a folder; a run is known by its name."""
    return (str(released_folder(place, Path("runs"))),) if place and from_home(place).is_dir() else ()


def _decontamination(recipe: Recipe, data: DataSettings, targets: list[str], last: str) -> Step:
    config, files = _searched(recipe, data, targets)
    fn = steps_data.decontaminate
    return Step("decontaminate", fn, config, (last,), version=3, files=files, resumable=True)


def _searched(recipe: Recipe, data: DataSettings, targets: list[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings and files that decide which items of benchmarks text must not hold."""
    assert data.decontaminate is not None
    config: dict[str, Any] = {"data": _json(data, "decontaminate")}
    files = [*task_files(filter(_is_task_file, targets)), *data.decontaminate.benchmark_files]
    if data.decontaminate.benchmarks:
        config["evaluate"] = {"tasks": [task for task in _tasks(recipe) if task != POCKET_WORLD]}
        files += _item_files(recipe.evaluate)
    return config, tuple(files)


def _ingested(data: DataSettings) -> dict[str, Any]:
    """The settings of what is read from the sources, without those of how their files get here."""
    config = _json(data, "sources", "root", "mirror", "sample", "on_error")
    config["sources"] = [{**source, "download": None} for source in config["sources"]]
    return config


def _tuning_data_steps(loaded: LoadedRecipe) -> list[Step]:
    """They come before the long pretraining, so that a mistake in the conversations is found in time."""
    recipe, steps = loaded.recipe, []
    if recipe.sft is not None:
        steps.append(_tuning_data_step(loaded, "sft-data", steps_data.sft_data, "sft", recipe.sft))
    if recipe.dpo is not None:
        step = _tuning_data_step(loaded, "preference-data", steps_data.preference_data, "dpo", recipe.dpo)
        step.config["dpo"]["system_prompt"] = recipe.chat_system_prompt
        steps.append(step)
    return steps


def _tuning_data_step(
    loaded: LoadedRecipe, name: str, fn: Callable[[StepContext], Summary], section: str, tuning: TuningSettings
) -> Step:
    recipe = loaded.recipe
    config = {section: _json(tuning, *OF_THE_ROWS), **_part(recipe, "seed")}
    if recipe.chat_template == "tokenizer":  # the tokenizer's key holds which one that is
        config["chat_template"] = recipe.chat_template
    elif (template := chat_template_of(loaded, None)) is not None:
        config["chat_template"] = template
    if tuning.seq_len is None:
        config["packing"] = _json(recipe.packing, "seq_len")
    sources = [(source.as_source(), tuning.mirror) for source in tuning.sources]
    files = [location(each, tuning.root, mirror) for each, mirror in sources if not is_on_hub(each, mirror)]
    if recipe.data is not None and (targets := contamination_targets(recipe)):
        searched, more = _searched(recipe, recipe.data, targets)
        config |= searched
        files += more
    inputs = ("train-tokenizer", *_if(tuning.from_world, "synthesize"))
    return Step(name, fn, config, inputs, version=2, files=tuple(files), resumable=True)


def _training_steps(loaded: LoadedRecipe, begun: dict[str, str]) -> list[Step]:
    recipe, steps = loaded.recipe, []
    base: tuple[str, ...] = ()  # the training before
    model = _part(recipe, "model", "seed")
    if recipe.data is not None and recipe.pretrain is not None:
        config = {**model, "pretrain": recipe.pretrain.deciding()}
        sources, base = begun | extension_fingerprint(loaded, "pretrain"), ("pretrain",)
        steps.append(_training_step("pretrain", steps_train.pretrain, config, ("tokenize", "train-tokenizer"), sources))
    if recipe.sft is not None:
        config = {**model, "sft": recipe.sft.deciding()}
        world, files = _read_by_monitor(recipe.sft)
        inputs, sources = (*base, "sft-data", "train-tokenizer", *world), {} if base else begun
        sources = sources | extension_fingerprint(loaded, "sft")
        steps.append(_training_step("sft", steps_train.sft, config, inputs, sources, files))
        base = ("sft",)
    if recipe.dpo is not None:
        inputs, sources = (*base, "preference-data", "train-tokenizer"), {} if base else begun
        precomputed = _if(recipe.dpo.precompute_ref_log_probs, "ref-logprobs")
        if precomputed:
            config = {**_part(recipe, "model"), "dpo": _json(recipe.dpo, "precision", "from_step")}
            steps.append(
                Step(
                    "ref-logprobs",
                    steps_train.ref_logprobs,
                    config,
                    inputs,
                    version=2,
                    sources=sources,
                    distributed=True,
                )
            )
        config = {**model, "dpo": recipe.dpo.deciding() | {"system_prompt": recipe.chat_system_prompt}}
        world, files = _read_by_monitor(recipe.dpo)
        inputs, sources = (*precomputed, *inputs, *world), sources | extension_fingerprint(loaded, "dpo")
        steps.append(_training_step("dpo", steps_train.dpo, config, inputs, sources, files))
    return steps


def _training_step(
    name: str,
    fn: Callable[[StepContext], Summary],
    config: dict[str, Any],
    inputs: tuple[str, ...],
    sources: dict[str, str] | None = None,
    files: Iterable[str] = (),
) -> Step:
    return Step(
        name,
        fn,
        config,
        inputs,
        version=3,
        files=tuple(files),
        sources=sources or {},
        distributed=True,
        has_progress=True,
        resumable=True,
        setup=steps_train.bring_from_remote,
    )


def _read_by_monitor(tuning: TuningSettings) -> tuple[tuple[str, ...], list[str]]:
    """The steps and the user's files that the benchmarks of a tuning's monitor read."""
    monitor = tuning.monitor
    if monitor is None:
        return (), []
    own = [task for task in monitor.tasks if not of_pocket_world(task) and _is_task_file(task)]
    return _if(any(map(of_pocket_world, monitor.tasks)), "synthesize"), [*task_files(own), *_item_files(monitor)]


def _result_steps(recipe: Recipe) -> list[Step]:
    trained = [name for name in recipe.trainings if recipe.data is not None or name != "pretrain"]
    steps = _evaluation_steps(recipe, trained)
    if recipe.export is not None:
        inputs = (*_if(recipe.data is not None, "split"), "train-tokenizer", *trained)
        inputs += tuple(step.name for step in steps)  # the card has their scores
        steps.append(
            Step("export", steps_eval.export, _part(recipe, "name", "description", "export"), inputs, version=2)
        )
    return steps


def _evaluation_steps(recipe: Recipe, trained: list[str]) -> list[Step]:
    evaluate, decontaminate = recipe.evaluate, recipe.data.decontaminate if recipe.data else None
    if evaluate is None:
        return []
    settings = {"evaluate": evaluate.model_dump(mode="json", exclude={"batch_size", "attention", "data_dir"})}
    if evaluate.contamination and decontaminate is not None and not contamination_targets(recipe):
        # How items are found in the text; otherwise the same settings have decided over the text itself.
        settings["data"] = {"decontaminate": _json(decontaminate, "n_grams", "min_words", "boilerplate")}
    world = _if(POCKET_WORLD in _tasks(recipe), "synthesize")
    read = ("train-tokenizer", *world, *_if(evaluate.compressors and recipe.data is not None, "split"))
    files = (*task_files(local_tasks(recipe)), *_item_files(evaluate))
    return [
        Step(
            EVALUATIONS[training],
            partial(steps_eval.evaluate, training=training),
            {**settings, "report": _json(recipe.report, "prompts" if training == "pretrain" else "questions")},
            (training, *read),
            files=files,
            resumable=True,
            distributed=True,
        )
        for training in trained
    ]


# ---- what a recipe reads ----


def uses_pocket_world(recipe: Recipe) -> bool:
    """Whether any text, conversation or benchmark of the recipe comes from the pocket world."""
    sources = [source.path for source in recipe.data.sources] if recipe.data else []
    tuned = any(tuning.from_world for tuning in _tunings(recipe))
    return tuned or POCKET_WORLD in (*sources, *_tasks(recipe), *_monitored(recipe))


def is_local(recipe: Recipe) -> bool:
    """Whether all that the recipe reads is on this machine."""
    data = recipe.data
    sources = [(source, data.root, data.mirror) for source in data.sources] if data else []
    for tuning in _tunings(recipe):
        sources += [(source.as_source(), tuning.root, tuning.mirror) for source in tuning.sources]
    targets = data.decontaminate.benchmark_files if data and data.decontaminate else ()
    return (
        not any(is_on_hub(source, mirror) for source, _, mirror in sources)
        and not any(of_the_hub(from_home(path)) for path in targets if path.endswith((".yaml", ".yml")))
        and not any(is_url(location(*source)) for source in sources)
        and all(_is_here(recipe, task) for task in (*_tasks(recipe), *_monitored(recipe)))
    )


def local_tasks(recipe: Recipe) -> list[str]:
    """The benchmarks of the recipe that are files of the user's."""
    return [task for task in _tasks(recipe) if task != POCKET_WORLD and _is_task_file(task)]


def contamination_targets(recipe: Recipe) -> list[str]:
    """The benchmarks and files whose items documents must not hold.

    The pocket world is never among them. Its facts are its text and its benchmarks' answers by design, and what must
    not be seen in training is kept out of the text where the world is generated.
    """
    decontaminate = recipe.data.decontaminate if recipe.data else None
    if decontaminate is None:
        return []
    benchmarks = [task for task in _tasks(recipe) if task != POCKET_WORLD] if decontaminate.benchmarks else []
    return [*benchmarks, *decontaminate.benchmark_files]


def _tunings(recipe: Recipe) -> list[TuningSettings]:
    return [tuning for tuning in (recipe.sft, recipe.dpo) if tuning is not None]


def _monitors(recipe: Recipe) -> list[Any]:
    """The monitors of the trainings."""
    found = [recipe.pretrain.monitor if recipe.pretrain else None, *(tuning.monitor for tuning in _tunings(recipe))]
    return [monitor for monitor in found if monitor is not None]


def _monitored(recipe: Recipe) -> list[str]:
    tasks = [task for monitor in _monitors(recipe) for task in monitor.tasks]
    return [POCKET_WORLD if of_pocket_world(task) else task for task in tasks]


def _tasks(recipe: Recipe) -> tuple[str, ...]:
    """The tasks of the recipe, those of the pocket world by one name."""
    tasks = recipe.evaluate.tasks if recipe.evaluate else ()
    return tuple(dict.fromkeys(POCKET_WORLD if of_pocket_world(task) else task for task in tasks))


def _item_files(benchmarks: Any) -> list[str]:
    """The files with the items of an evaluation's or a monitor's benchmarks, if a folder of them is given."""
    if benchmarks is None or benchmarks.data_dir is None:
        return []
    return [str(file) for file in files_of(benchmarks.tasks, benchmarks.data_dir)]


def _is_here(recipe: Recipe, task: str) -> bool:
    """Whether the items of a task are on this machine."""
    if task != POCKET_WORLD and _is_task_file(task):
        return not of_the_hub(from_home(task))
    named = [each for each in (recipe.evaluate, *_monitors(recipe)) if each is not None and task in each.tasks]
    in_folder = all(each.data_dir is not None for each in named)
    return task == POCKET_WORLD or (in_folder and (task in GROUPS or task in BENCHMARKS))


def _is_task_file(task: str) -> bool:
    return task == POCKET_WORLD or "/" in task or task.endswith((".yaml", ".yml"))


def _if(condition: bool, name: str) -> tuple[str, ...]:
    return (name,) if condition else ()


def _json(settings: Settings, *names: str) -> dict[str, Any]:
    return settings.model_dump(mode="json", include=set(names))


def _part(recipe: Recipe, *names: str) -> dict[str, Any]:
    return recipe.model_dump(mode="json", include=set(names))
