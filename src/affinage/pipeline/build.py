"""From a recipe to the list of its steps, each with the settings, files and results that decide what it makes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from affinage.config.data import POCKET_WORLD
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
    if recipe.data is None and not trains:
        return []
    steps = list(_data_steps(recipe, begun))
    if trains:
        steps += [*_tuning_data_steps(loaded), *_training_steps(loaded, begun), *_result_steps(recipe)]
    steps = [replace(step, sources=step.sources | plugin_sources(loaded, step.config)) for step in steps]
    if report is not None:
        config = _part(recipe, "name", "description", "report")
        steps.append(
            Step("report", report, config, tuple(step.name for step in steps), artifact="report.html", version=2)
        )
    return steps


def _data_steps(recipe: Recipe, begun: dict[str, str]) -> Iterator[Step]:
    data, own = recipe.data, steps_data
    if uses_pocket_world(recipe):
        size = {"data": {"sources": {"max_bytes": own.pocket_bytes(recipe)}}}
        yield Step("synthesize", own.synthesize, _part(recipe, "seed") | size)
    if data is None:  # an imported model is only fine-tuned
        yield Step("train-tokenizer", own.base_tokenizer, {}, sources=begun, version=2)
        return
    more: dict[str, Any] = {"version": 4, "resumable": True}
    files = tuple(location(each, data.root, data.mirror) for each in data.sources if not is_on_hub(each, data.mirror))
    config = _json(data, "sources", "root", "mirror", "sample", "on_error")
    world = _if(POCKET_WORLD in [source.path for source in data.sources], "synthesize")
    check: Callable[[LoadedRecipe], None] = own.check_ingest
    yield Step("ingest", own.ingest, {"data": config}, world, files=files, check=check, **more)
    config = {"data": _json(data, "filters", "languages")}
    yield Step("filter", own.filter_documents, config, ("ingest",), check=own.check_filter, **more)
    last = ("filter",)
    if data.dedup is not None:
        against = data.dedup.against  # a run is known by its name, a folder by its documents
        files = (str(released_folder(against, Path("runs"))),) if against and from_home(against).is_dir() else ()
        yield Step("dedup", own.dedup, {"data": _json(data, "dedup")}, last, files=files, **more)
        last = ("dedup",)
    if contamination_targets(recipe):
        config, files = _searched(recipe)
        check = own.check_decontaminate
        yield Step("decontaminate", own.decontaminate, config, last, files=files, check=check, **more)
        last = ("decontaminate",)
    config = {"data": _json(data, "split"), **_part(recipe, "seed")}
    yield Step("split", own.split, config, last, **more)
    if begun:
        yield Step("train-tokenizer", own.base_tokenizer, {}, ("split",), sources=begun, version=2)
    else:
        config = {"data": _json(data, "languages"), **_part(recipe, "tokenizer", "seed")}
        yield Step("train-tokenizer", own.train_tokenizer, config, ("split",), version=2)
    config, read = _part(recipe, "packing", "seed"), ("split", "train-tokenizer")
    yield Step("tokenize", own.tokenize, config, read, version=4, check=own.check_tokenize, resumable=True)


def _searched(recipe: Recipe) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings and files that decide which items of benchmarks text must not hold."""
    assert recipe.data is not None and recipe.data.decontaminate is not None
    settings = recipe.data.decontaminate
    config: dict[str, Any] = {"data": _json(recipe.data, "decontaminate")}
    files = [*task_files(filter(is_task_file, contamination_targets(recipe))), *settings.benchmark_files]
    if settings.benchmarks:
        config["evaluate"] = {"tasks": [task for task in _tasks(recipe) if task != POCKET_WORLD]}
        files += _item_files(recipe.evaluate)
    return config, tuple(files)


def _tuning_data_steps(loaded: LoadedRecipe) -> Iterator[Step]:
    """They come before the long pretraining, so that a mistake in the conversations is found in time."""
    recipe = loaded.recipe
    for section, tuning in _tunings(recipe).items():
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
        files = tuple(location(each, tuning.root, mirror) for each, mirror in sources if not is_on_hub(each, mirror))
        if contamination_targets(recipe):
            searched, item_files = _searched(recipe)
            config, files = config | searched, files + item_files
        yield Step(
            steps_train.ROWS[section],
            partial(steps_data.tuning_data, section=section),
            config,
            ("train-tokenizer", *_if(tuning.from_world, "synthesize")),
            version=4,
            files=files,
            check=partial(steps_data.check_tuning_data, section=section),
            resumable=True,
        )


def _training_steps(loaded: LoadedRecipe, begun: dict[str, str]) -> Iterator[Step]:
    recipe, before = loaded.recipe, tuple[str, ...]()  # the training before
    for name in _trained(recipe):
        settings = getattr(recipe, name)
        check = partial(steps_train.check_training, name=name)
        inputs: tuple[str, ...] = (*before, steps_train.ROWS[name], "train-tokenizer")
        config, files = {**_part(recipe, "model", "seed"), name: settings.deciding()}, tuple[str, ...]()
        if recipe.dpo is not None and name == "dpo":
            config["dpo"]["system_prompt"] = recipe.chat_system_prompt
            if recipe.dpo.precompute_ref_log_probs:
                of_reference = {**_part(recipe, "model"), "dpo": _json(recipe.dpo, "precision", "from_step")}
                how: dict[str, Any] = {"version": 2, "sources": begun, "check": check, "distributed": True}
                yield Step("ref-logprobs", steps_train.ref_logprobs, of_reference, inputs, **how)
                inputs += ("ref-logprobs",)
        if name != "pretrain" and settings.monitor is not None:  # the monitor of a pretraining decides nothing
            inputs += _if(any(map(of_pocket_world, settings.monitor.tasks)), "synthesize")
            files = (*task_files(filter(is_task_file, settings.monitor.tasks)), *_item_files(settings.monitor))
        yield Step(
            name,
            steps_train.train,
            config,
            inputs,
            version=5 if name == "dpo" else 4,
            files=files,
            sources=begun | extension_fingerprint(loaded, name),
            check=check,
            setup=steps_train.bring_from_remote,
            distributed=True,
            has_progress=True,
            resumable=True,
        )
        before, begun = (name,), {}


def _result_steps(recipe: Recipe) -> Iterator[Step]:
    trained, evaluate = _trained(recipe), recipe.evaluate
    evaluations: tuple[str, ...] = ()
    if evaluate is not None:
        config = {"evaluate": evaluate.model_dump(mode="json", exclude={"batch_size", "data_dir"})}
        decontaminate = recipe.data.decontaminate if recipe.data else None
        if evaluate.contamination and decontaminate is not None and not contamination_targets(recipe):
            # How items are found in the text; otherwise the same settings have decided over the text itself.
            config["data"] = {"decontaminate": _json(decontaminate, "n_grams", "min_words", "boilerplate")}
        read = ("train-tokenizer", *_if(POCKET_WORLD in _tasks(recipe), "synthesize"))
        read += _if(evaluate.compressors and recipe.data is not None, "split")
        for training in trained:
            yield Step(
                EVALUATIONS[training],
                partial(steps_eval.evaluate, training=training),
                {**config, "report": _json(recipe.report, "prompts" if training == "pretrain" else "questions")},
                (training, *read),
                version=3,
                files=(*task_files(filter(is_task_file, _tasks(recipe))), *_item_files(evaluate)),
                check=steps_eval.check_evaluate,
                resumable=True,
                distributed=True,
            )
            evaluations += (EVALUATIONS[training],)
    if recipe.export is not None:
        config = _part(recipe, "name", "description", "export")
        inputs = (*_if(recipe.data is not None, "split"), "train-tokenizer", *trained)
        inputs += evaluations  # the card has their scores
        yield Step("export", steps_eval.export, config, inputs, version=3, check=steps_eval.check_export)


# ---- what a recipe reads ----


def uses_pocket_world(recipe: Recipe) -> bool:
    """Whether any text, conversation or benchmark of the recipe comes from the pocket world."""
    sources = [source.path for source in recipe.data.sources] if recipe.data else []
    tuned = any(tuning.from_world for tuning in _tunings(recipe).values())
    return tuned or POCKET_WORLD in (*sources, *_tasks(recipe, monitored=True))


def is_local(recipe: Recipe) -> bool:
    """Whether all that the recipe reads is on this machine."""
    sources = [(each, recipe.data.root, recipe.data.mirror) for each in recipe.data.sources] if recipe.data else []
    for tuning in _tunings(recipe).values():
        sources += [(source.as_source(), tuning.root, tuning.mirror) for source in tuning.sources]
    here = all(each.data_dir is not None for each in _benchmark_settings(recipe))
    files = [task for task in _tasks(recipe, monitored=True) if is_task_file(task)]
    named = [task for task in _tasks(recipe, monitored=True) if task != POCKET_WORLD and task not in files]
    if recipe.data and recipe.data.decontaminate:
        files += [path for path in recipe.data.decontaminate.benchmark_files if path.endswith((".yaml", ".yml"))]
    return (
        not any(is_on_hub(source, mirror) or is_url(location(source, root, mirror)) for source, root, mirror in sources)
        and not any(of_the_hub(from_home(path)) for path in files)
        and all(here and (task in GROUPS or task in BENCHMARKS) for task in named)
    )


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


def warnings(loaded: LoadedRecipe) -> Iterator[str]:
    """A sentence for each setting about the pocket world, whose facts are not in a text of the user's."""
    recipe = loaded.recipe
    if recipe.data is None or any(source.path == POCKET_WORLD for source in recipe.data.sources):
        return
    for section, tuning in _tunings(recipe).items():
        if tuning.from_world:
            yield f"the text is yours, but {section} teaches facts of the pocket world: set {section}.sources"
    if POCKET_WORLD in _tasks(recipe, monitored=True):
        yield "the text is yours, but the benchmarks ask for facts of the pocket world: set evaluate.tasks"


def _tunings(recipe: Recipe) -> dict[str, TuningSettings]:
    sections = {"sft": recipe.sft, "dpo": recipe.dpo}
    return {name: tuning for name, tuning in sections.items() if tuning is not None}


def _trained(recipe: Recipe) -> list[str]:
    """The trainings of the recipe that run: without text there is no pretraining."""
    return [name for name in recipe.trainings if recipe.data is not None or name != "pretrain"]


def _benchmark_settings(recipe: Recipe) -> list[Any]:
    """The settings of the evaluation and of the monitors."""
    settings = [recipe.evaluate, *(getattr(recipe, name).monitor for name in recipe.trainings)]
    return [each for each in settings if each is not None]


def _tasks(recipe: Recipe, *, monitored: bool = False) -> tuple[str, ...]:
    """The tasks of the recipe's evaluation, and with `monitored` of its monitors; the pocket world's by one name."""
    settings = _benchmark_settings(recipe) if monitored else filter(None, [recipe.evaluate])
    tasks = [task for each in settings for task in each.tasks]
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
