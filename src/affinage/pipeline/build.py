"""From a recipe to the list of its steps, each with the settings, files and results that decide what it makes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from affinage.config.data import POCKET_WORLD, DataSettings
from affinage.config.load import LoadedRecipe
from affinage.config.recipe import Recipe
from affinage.config.settings import Settings
from affinage.config.training import OF_THE_ROWS, TuningSettings
from affinage.data.places import is_on_hub, is_url, location, released_folder
from affinage.evaluation.benchmarks import BENCHMARKS, GROUPS, files_of, is_task_file, of_pocket_world
from affinage.evaluation.tasks import of_the_hub
from affinage.paths import from_home
from affinage.pipeline import steps_data, steps_eval, steps_train
from affinage.pipeline.imports import chat_template_of, extension_fingerprint, initial_fingerprint
from affinage.pipeline.models import EVALUATIONS
from affinage.pipeline.sources import task_files
from affinage.pipeline.step import Step, StepContext, Summary
from affinage.plugins import load_plugins, plugin_sources


def build_steps(loaded: LoadedRecipe, report: Callable[[StepContext], Summary] | None = None) -> list[Step]:
    """Returns the steps of a recipe, each after those it reads. Sections that the recipe leaves out have no steps.

    Args:
        loaded: the recipe.
        report: the function of the last step; without it there is no such step.
    """
    recipe = loaded.recipe
    load_plugins(loaded)
    begun = initial_fingerprint(loaded)  # of the imported model that the recipe begins with
    trains = bool(begun and _tunings(recipe)) or (recipe.data is not None and recipe.pretrain is not None)
    steps: list[Step] = []
    if recipe.data is not None or trains:
        steps = _data_steps(recipe, begun)
        if trains:
            steps += [*_tuning_data_steps(loaded), *_training_steps(loaded, begun), *_result_steps(recipe)]
    steps = [replace(step, sources=step.sources | plugin_sources(loaded, step.config)) for step in steps]
    if steps and report is not None:
        config = _part(recipe, "name", "description", "report")
        steps.append(Step("report", report, config, tuple(step.name for step in steps), artifact="report.html"))
    return steps


def _data_steps(recipe: Recipe, begun: dict[str, str]) -> list[Step]:
    data, steps = recipe.data, []

    def add(name: str, fn: Callable[[StepContext], Summary], config: dict[str, Any], *inputs: str, **more: Any) -> None:
        check = getattr(steps_data, f"check_{name.replace('-', '_')}", None)
        steps.append(Step(name, fn, config, inputs, check=check, **more))

    if uses_pocket_world(recipe):
        size = {"data": {"sources": {"max_bytes": steps_data.pocket_bytes(recipe)}}}
        add("synthesize", steps_data.synthesize, {**_part(recipe, "seed"), **size})
    if data is None:  # an imported model is only fine-tuned
        add("train-tokenizer", steps_data.base_tokenizer, {}, sources=begun, version=2)
        return steps
    files = tuple(location(each, data.root, data.mirror) for each in data.sources if not is_on_hub(each, data.mirror))
    config = _json(data, "sources", "root", "mirror", "sample", "on_error")
    world = _if(POCKET_WORLD in [source.path for source in data.sources], "synthesize")
    add("ingest", steps_data.ingest, {"data": config}, *world, version=3, files=files, resumable=True)
    config = {"data": _json(data, "filters", "languages")}
    add("filter", steps_data.filter_documents, config, "ingest", version=3, resumable=True)
    if data.dedup is not None:
        against = data.dedup.against  # a run is known by its name, a folder by its documents
        files = (str(released_folder(against, Path("runs"))),) if against and from_home(against).is_dir() else ()
        config = {"data": _json(data, "dedup")}
        add("dedup", steps_data.dedup, config, "filter", version=3, files=files, resumable=True)
    if contamination_targets(recipe):
        config, files = _searched(recipe, data)
        add("decontaminate", steps_data.decontaminate, config, steps[-1].name, version=3, files=files, resumable=True)
    config = {"data": _json(data, "split"), **_part(recipe, "seed")}
    add("split", steps_data.split, config, steps[-1].name, version=4, resumable=True)
    if begun:
        add("train-tokenizer", steps_data.base_tokenizer, {}, "split", sources=begun, version=2)
    else:
        config = {"data": _json(data, "languages"), **_part(recipe, "tokenizer", "seed")}
        add("train-tokenizer", steps_data.train_tokenizer, config, "split", version=2)
    config = _part(recipe, "packing", "seed")
    add("tokenize", steps_data.tokenize, config, "split", "train-tokenizer", version=4, resumable=True)
    return steps


def _searched(recipe: Recipe, data: DataSettings) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings and files that decide which items of benchmarks text must not hold."""
    assert data.decontaminate is not None
    config: dict[str, Any] = {"data": _json(data, "decontaminate")}
    files = [*task_files(filter(is_task_file, contamination_targets(recipe))), *data.decontaminate.benchmark_files]
    if data.decontaminate.benchmarks:
        config["evaluate"] = {"tasks": [task for task in _tasks(recipe) if task != POCKET_WORLD]}
        files += _item_files(recipe.evaluate)
    return config, tuple(files)


def _tuning_data_steps(loaded: LoadedRecipe) -> Iterator[Step]:
    """They come before the long pretraining, so that a mistake in the conversations is found in time."""
    recipe = loaded.recipe
    for section, name, fn in (
        ("sft", "sft-data", steps_data.sft_data),
        ("dpo", "preference-data", steps_data.preference_data),
    ):
        tuning: TuningSettings | None = getattr(recipe, section)
        if tuning is None:
            continue
        config = {section: _json(tuning, *OF_THE_ROWS), **_part(recipe, "seed")}
        if section == "dpo":
            config["dpo"]["system_prompt"] = recipe.chat_system_prompt
        if recipe.chat_template == "tokenizer":  # the tokenizer's key holds which one that is
            config["chat_template"] = recipe.chat_template
        elif (template := chat_template_of(loaded, None)) is not None:
            config["chat_template"] = template
        if tuning.seq_len is None:
            config["packing"] = _json(recipe.packing, "seq_len")
        sources = [(source.as_source(), tuning.mirror) for source in tuning.sources]
        files = tuple(location(one, tuning.root, mirror) for one, mirror in sources if not is_on_hub(one, mirror))
        if recipe.data is not None and contamination_targets(recipe):
            searched, more = _searched(recipe, recipe.data)
            config, files = config | searched, files + more
        check = partial(steps_data.check_tuning_data, section=section)
        inputs = ("train-tokenizer", *_if(tuning.from_world, "synthesize"))
        yield Step(name, fn, config, inputs, version=4, files=files, check=check, resumable=True)


def _training_steps(loaded: LoadedRecipe, begun: dict[str, str]) -> Iterator[Step]:
    recipe = loaded.recipe
    base: tuple[str, ...] = ()  # the training before
    if recipe.data is not None and recipe.pretrain is not None:
        yield _training_step(loaded, "pretrain", steps_train.pretrain, ("tokenize", "train-tokenizer"), begun)
        base, begun = ("pretrain",), {}
    if recipe.sft is not None:
        yield _training_step(loaded, "sft", steps_train.sft, (*base, "sft-data", "train-tokenizer"), begun)
        base, begun = ("sft",), {}
    if recipe.dpo is not None:
        inputs: tuple[str, ...] = (*base, "preference-data", "train-tokenizer")
        if recipe.dpo.precompute_ref_log_probs:
            yield Step(
                "ref-logprobs",
                steps_train.ref_logprobs,
                {**_part(recipe, "model"), "dpo": _json(recipe.dpo, "precision", "from_step")},
                inputs,
                version=2,
                sources=begun,
                check=partial(steps_train.check_training, name="dpo"),
                distributed=True,
            )
            inputs = ("ref-logprobs", *inputs)
        yield _training_step(loaded, "dpo", steps_train.dpo, inputs, begun)


def _training_step(
    loaded: LoadedRecipe,
    name: str,
    fn: Callable[[StepContext], Summary],
    inputs: tuple[str, ...],
    begun: dict[str, str] | None = None,
) -> Step:
    recipe, settings = loaded.recipe, getattr(loaded.recipe, name)
    config = {**_part(recipe, "model", "seed"), name: settings.deciding()}
    files: list[str] = []
    if name == "dpo":
        config["dpo"]["system_prompt"] = recipe.chat_system_prompt
    if name != "pretrain" and settings.monitor is not None:  # the monitor of a pretraining decides nothing
        inputs += _if(any(map(of_pocket_world, settings.monitor.tasks)), "synthesize")
        files = [*task_files(filter(is_task_file, settings.monitor.tasks)), *_item_files(settings.monitor)]
    return Step(
        name,
        fn,
        config,
        inputs,
        version=4,
        files=tuple(files),
        sources=(begun or {}) | extension_fingerprint(loaded, name),
        check=partial(steps_train.check_training, name=name),
        setup=steps_train.bring_from_remote,
        distributed=True,
        has_progress=True,
        resumable=True,
    )


def _result_steps(recipe: Recipe) -> Iterator[Step]:
    trained = [name for name in recipe.trainings if recipe.data is not None or name != "pretrain"]
    evaluations = [*_evaluation_steps(recipe, trained)]
    yield from evaluations
    if recipe.export is not None:
        config = _part(recipe, "name", "description", "export")
        inputs = (*_if(recipe.data is not None, "split"), "train-tokenizer", *trained)
        inputs += tuple(step.name for step in evaluations)  # the card has their scores
        yield Step("export", steps_eval.export, config, inputs, version=2, check=steps_eval.check_export)


def _evaluation_steps(recipe: Recipe, trained: list[str]) -> Iterator[Step]:
    evaluate, decontaminate = recipe.evaluate, recipe.data.decontaminate if recipe.data else None
    if evaluate is None:
        return
    settings = {"evaluate": evaluate.model_dump(mode="json", exclude={"batch_size", "data_dir"})}
    if evaluate.contamination and decontaminate is not None and not contamination_targets(recipe):
        # How items are found in the text; otherwise the same settings have decided over the text itself.
        settings["data"] = {"decontaminate": _json(decontaminate, "n_grams", "min_words", "boilerplate")}
    world = _if(POCKET_WORLD in _tasks(recipe), "synthesize")
    read = ("train-tokenizer", *world, *_if(evaluate.compressors and recipe.data is not None, "split"))
    for training in trained:
        yield Step(
            EVALUATIONS[training],
            partial(steps_eval.evaluate, training=training),
            {**settings, "report": _json(recipe.report, "prompts" if training == "pretrain" else "questions")},
            (training, *read),
            version=3,
            files=(*task_files(filter(is_task_file, _tasks(recipe))), *_item_files(evaluate)),
            check=steps_data.check_tasks,
            resumable=True,
            distributed=True,
        )


# ---- what a recipe reads ----


def uses_pocket_world(recipe: Recipe) -> bool:
    """Whether any text, conversation or benchmark of the recipe comes from the pocket world."""
    sources = [source.path for source in recipe.data.sources] if recipe.data else []
    tuned = any(tuning.from_world for tuning in _tunings(recipe))
    return tuned or POCKET_WORLD in (*sources, *_tasks(recipe, monitored=True))


def is_local(recipe: Recipe) -> bool:
    """Whether all that the recipe reads is on this machine."""
    data = recipe.data
    sources = [(source, data.root, data.mirror) for source in data.sources] if data else []
    for tuning in _tunings(recipe):
        sources += [(source.as_source(), tuning.root, tuning.mirror) for source in tuning.sources]
    targets = data.decontaminate.benchmark_files if data and data.decontaminate else ()
    return (
        not any(is_on_hub(source, mirror) or is_url(location(source, root, mirror)) for source, root, mirror in sources)
        and not any(of_the_hub(from_home(path)) for path in targets if path.endswith((".yaml", ".yml")))
        and all(_is_here(recipe, task) for task in _tasks(recipe, monitored=True))
    )


def _is_here(recipe: Recipe, task: str) -> bool:
    """Whether the items of a task are on this machine."""
    if task == POCKET_WORLD:
        return True
    if is_task_file(task):
        return not of_the_hub(from_home(task))
    named = [each for each in (recipe.evaluate, *_monitors(recipe)) if each is not None and task in each.tasks]
    return all(each.data_dir is not None for each in named) and (task in GROUPS or task in BENCHMARKS)


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
    trainings = [getattr(recipe, name) for name in recipe.trainings]
    return [training.monitor for training in trainings if training.monitor is not None]


def _tasks(recipe: Recipe, *, monitored: bool = False) -> tuple[str, ...]:
    """The tasks of the recipe's evaluation, and of its monitors; those of the pocket world by one name."""
    tasks = list(recipe.evaluate.tasks) if recipe.evaluate else []
    tasks += [task for monitor in _monitors(recipe) for task in monitor.tasks] if monitored else []
    return tuple(dict.fromkeys(POCKET_WORLD if of_pocket_world(task) else task for task in tasks))


def _item_files(benchmarks: Any) -> list[str]:
    """The files with the items of an evaluation's or a monitor's benchmarks, if a folder of them is given."""
    if benchmarks is None or benchmarks.data_dir is None:
        return []
    return [str(file) for file in files_of(benchmarks.tasks, benchmarks.data_dir)]


def _if(condition: bool, name: str) -> tuple[str, ...]:
    return (name,) if condition else ()


def _json(settings: Settings, *names: str) -> dict[str, Any]:
    return settings.model_dump(mode="json", include=set(names))


def _part(recipe: Recipe, *names: str) -> dict[str, Any]:
    return recipe.model_dump(mode="json", include=set(names))


# ---- valid settings that are probably unintended ----


def warnings(loaded: LoadedRecipe) -> Iterator[str]:
    """A sentence for each setting that is valid and probably unintended."""
    recipe, data = loaded.recipe, loaded.recipe.data
    if data is not None and data.sources and all(source.path != POCKET_WORLD for source in data.sources):
        for section in recipe.trainings:
            tuning = getattr(recipe, section)
            if isinstance(tuning, TuningSettings) and tuning.from_world:
                yield (
                    f"the text is yours, but {section} teaches the facts of the pocket world: set {section}.sources to "
                    f"files of yours, or leave it out with --set {section}=null"
                )
        asked = [("evaluate", recipe.evaluate)] + [
            (f"{name}.monitor", getattr(recipe, name).monitor) for name in recipe.trainings
        ]
        for key, benchmarks in asked:
            if benchmarks is not None and any(map(of_pocket_world, benchmarks.tasks)):
                yield f"{key}.tasks are benchmarks of the pocket world, whose facts are not in your text"
