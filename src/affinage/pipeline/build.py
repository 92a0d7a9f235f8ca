"""From a recipe to the list of its steps, each with the settings, files and results that decide what it makes."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from affinage.config.data import POCKET_BYTES, POCKET_WORLD, DataSettings
from affinage.config.load import LoadedRecipe
from affinage.config.recipe import EvaluateSettings, Recipe
from affinage.config.settings import Settings
from affinage.config.training import OF_THE_ROWS, MonitorSettings, TuningSettings
from affinage.data.places import is_on_hub, located, released_folder
from affinage.evaluation.tasks import files_of, is_task_file, of_pocket_world
from affinage.fingerprints import task_files
from affinage.pipeline.models import EVALUATIONS, MODEL, ROWS, chat_template_of, extended, initial_folder
from affinage.pipeline.step import Step, StepContext, Summary, lazily
from affinage.registry import load_plugins, plugin_sources
from affinage.results import read_json

_of_data, _of_train, _of_eval = (partial(lazily, f"steps_{name}") for name in ("data", "train", "eval"))


def build_steps(loaded: LoadedRecipe) -> list[Step]:
    """Returns the steps of a recipe, each after those it reads. Sections that the recipe leaves out have no steps."""
    recipe = loaded.recipe
    load_plugins(loaded)
    folder = initial_folder(loaded)  # of the imported model that the recipe begins with
    hashes = {} if folder is None else read_json(folder / MODEL)["imported"]["sha256"]
    begun = {f"init {part}": digest for part, digest in hashes.items()}  # in keys, wherever the folder is
    trained = [name for name in recipe.trainings if recipe.data is not None or name != "pretrain"]
    trains = bool(trained) and (bool(begun) or trained[0] == "pretrain")
    if recipe.data is None and not trains:
        return []
    steps = list(_data_steps(recipe, folder, begun))
    if trains:
        # Tuning data comes before the long pretraining, so that a mistake in the conversations is found in time.
        steps += [_tuning_data_step(loaded, section) for section in recipe.trainings if section != "pretrain"]
        steps += [*_training_steps(loaded, trained, begun), *_result_steps(recipe, trained)]
    steps = [replace(step, sources=step.sources | plugin_sources(loaded, step.config)) for step in steps]
    config, inputs = _part(recipe, "name", "description", "report"), tuple(step.name for step in steps)
    return [*steps, Step("report", _report, config, inputs, artifact="report.html", version=4)]


def _report(context: StepContext) -> Summary:
    from affinage.report import write_report

    return write_report(context.run_folder, context.folder / "report.html")


def _data_steps(recipe: Recipe, initial: Path | None, begun: dict[str, str]) -> Iterator[Step]:
    data = recipe.data
    worlds = [source for source in data.sources if source.path == POCKET_WORLD] if data else []
    benchmarks = [recipe.evaluate, *(getattr(recipe, name).monitor for name in recipe.trainings)]
    scored = any(of_pocket_world(task) for each in benchmarks if each is not None for task in each.tasks)
    if worlds or scored or any(map(_is_of_world, (recipe.sft, recipe.dpo))):
        size = max((source.max_bytes or POCKET_BYTES for source in worlds), default=POCKET_BYTES)
        config: dict[str, Any] = {"data": {"sources": {"max_bytes": size}}, **_part(recipe, "seed")}
        yield Step("synthesize", _of_data("synthesize", size=size), config)
    given = Step("train-tokenizer", _of_data("base_tokenizer", folder=initial), {}, sources=begun, version=2)
    if data is None:  # an imported model is only fine-tuned
        yield given
        return
    step = partial(Step, version=4, resumable=True)
    inputs: tuple[str, ...] = ("synthesize",) if worlds else ()
    config = {"data": _part(data, "sources", "root", "mirror", "sample", "on_error")}
    work, check = _of_data("ingest_step", data=data), _of_data("check_ingest", data=data)
    yield step("ingest", work, config, inputs, version=7, files=_places(data), check=check)
    work, check = _of_data("filter_step", data=data), _of_data("check_filter", data=data)
    yield step("filter", work, {"data": _part(data, "filters", "languages")}, ("ingest",), version=5, check=check)
    last = ("filter",)
    if data.dedup is not None:
        against = data.dedup.against  # a run is known by its name, a folder by its documents
        is_folder, work = os.path.isdir(os.path.expanduser(against)), _of_data("dedup_step", settings=data.dedup)
        files: tuple[str, ...] = (str(released_folder(against, Path("runs"))),) if is_folder else ()
        found = (lambda context: released_folder(against, context.loaded.runs)) if against else None
        yield step("dedup", work, {"data": _part(data, "dedup")}, last, version=5, files=files, check=found)
        last = ("dedup",)
    config, files = _searched(recipe)
    if config:
        work, check = (_of_data(f, settings=data.decontaminate) for f in ("decontaminate_step", "check_decontaminate"))
        yield step("decontaminate", work, config, last, version=6, files=files, check=check)
        last = ("decontaminate",)
    work = _of_data("split_step", settings=data.split)
    yield step("split", work, {"data": _part(data, "split")}, last)
    if initial is not None:
        yield replace(given, inputs=("split",))
    else:
        config = {"data": _part(data, "languages"), **_part(recipe, "tokenizer")}
        work = _of_data("tokenizer_step", languages=data.languages)
        yield Step("train-tokenizer", work, config, ("split",), version=2)
    yield step("tokenize", _of_data("tokenize_step"), _part(recipe, "packing"), ("split", "train-tokenizer"))


def _searched(recipe: Recipe) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings and files that decide which items of benchmarks text must not hold; both empty without any."""
    settings, tasks, files = recipe.data.decontaminate if recipe.data else None, list[str](), tuple[str, ...]()
    if settings is not None and settings.benchmarks and recipe.evaluate is not None:
        # Never those of the pocket world: its facts are its text and its benchmarks' answers.
        tasks = list(dict.fromkeys(task for task in recipe.evaluate.tasks if not of_pocket_world(task)))
        files = _files_of(recipe.evaluate)
    if settings is None or not (tasks or settings.benchmark_files):
        return {}, ()
    config: dict[str, Any] = {"data": {"decontaminate": settings.model_dump(mode="json")}}
    config |= {"evaluate": {"tasks": tasks}} if settings.benchmarks else {}
    return config, files + settings.benchmark_files


def _tuning_data_step(loaded: LoadedRecipe, section: str) -> Step:
    recipe, tuning = loaded.recipe, getattr(loaded.recipe, section)
    config: dict[str, Any] = {section: _part(tuning, *OF_THE_ROWS)}
    if section == "dpo":
        config["dpo"]["system_prompt"] = recipe.chat_system_prompt
    # Of the tokenizer's own template, the tokenizer's key holds which one that is.
    of_tokenizer = recipe.chat_template == "tokenizer"
    if (template := "tokenizer" if of_tokenizer else chat_template_of(loaded, None)) is not None:
        config["chat_template"] = template
    if tuning.seq_len is None:
        config["packing"] = _part(recipe.packing, "seq_len")
    searched, item_files = _searched(recipe)
    work, check = (_of_data(name, section=section) for name in ("tuning_data", "check_tuning_data"))
    inputs = ("train-tokenizer", *(["synthesize"] if _is_of_world(tuning) else []))
    how: dict[str, Any] = {"version": 11, "files": _places(tuning) + item_files, "check": check, "resumable": True}
    return Step(ROWS[section], work, config | searched, inputs, **how)


def _training_steps(loaded: LoadedRecipe, trained: list[str], begun: dict[str, str]) -> Iterator[Step]:
    recipe, before = loaded.recipe, tuple[str, ...]()  # the training before
    for name in trained:
        settings = getattr(recipe, name)
        check = _of_train("check_training", name=name)
        inputs: tuple[str, ...] = (*before, ROWS[name], "train-tokenizer")
        config, files = {**_part(recipe, "model", "seed"), name: settings.deciding()}, tuple[str, ...]()
        if recipe.dpo is not None and name == "dpo":
            config["dpo"]["system_prompt"] = recipe.chat_system_prompt
            of_reference = {**_part(recipe, "model"), "dpo": _part(recipe.dpo, "precision", "from_step")}
            how: dict[str, Any] = {"version": 2, "sources": begun, "check": check, "distributed": True}
            yield Step("ref-logprobs", _of_train("ref_logprobs", settings=recipe.dpo), of_reference, inputs, **how)
            inputs += ("ref-logprobs",)
        if name != "pretrain" and settings.monitor is not None:  # the monitor of a pretraining decides nothing
            inputs += ("synthesize",) if any(map(of_pocket_world, settings.monitor.tasks)) else ()
            files = _files_of(settings.monitor)
        sources = dict(begun)
        if (extension := extended(loaded, name)) is not None:  # what the checkpoint holds counts, not where it is
            from affinage.checkpoint.store import CheckpointStore

            folder, step = extension
            sources["resume_from"] = CheckpointStore(folder / "checkpoints").metadata(step).fingerprint
        how = {"version": 5, "files": files, "sources": sources, "check": check, "distributed": True}
        yield Step(name, _of_train("train_step"), config, inputs, has_progress=True, resumable=True, **how)
        before, begun = (name,), {}


def _result_steps(recipe: Recipe, trained: list[str]) -> Iterator[Step]:
    evaluate = recipe.evaluate
    inputs = (*(["split"] if recipe.data is not None else []), "train-tokenizer", *trained)  # of the export
    if evaluate is not None:
        config = {"evaluate": evaluate.model_dump(mode="json", exclude={"data_dir"})}
        decontaminate = recipe.data.decontaminate if recipe.data else None
        if evaluate.contamination and decontaminate is not None and not _searched(recipe)[0]:
            # How items are found in the text; otherwise the same settings have decided over the text itself.
            config["data"] = {"decontaminate": _part(decontaminate, "n_grams")}
        read = ["train-tokenizer", *(["synthesize"] if any(map(of_pocket_world, evaluate.tasks)) else [])]
        check = _of_data("check_benchmarks", section=("evaluate",))
        how: dict[str, Any] = {"version": 5, "check": check, "resumable": True, "distributed": True}
        for training in trained:
            work = _of_eval("evaluate", training=training, settings=evaluate)
            texts = {"report": _part(recipe.report, "prompts" if training == "pretrain" else "questions")}
            yield Step(EVALUATIONS[training], work, config | texts, (training, *read), files=_files_of(evaluate), **how)
            inputs += (EVALUATIONS[training],)  # the card has their scores
    if recipe.export is not None:
        config = _part(recipe, "name", "description", "export")
        work = _of_eval("export", settings=recipe.export)
        yield Step("export", work, config, inputs, version=6, check=_of_eval("check_export"))


def _files_of(benchmarks: EvaluateSettings | MonitorSettings) -> tuple[str, ...]:
    """The files that the benchmarks of an evaluation or a monitor are made of, as far as settings name them."""
    items = () if benchmarks.data_dir is None else files_of(benchmarks.tasks, benchmarks.data_dir)
    return (*task_files(filter(is_task_file, benchmarks.tasks)), *map(str, items))


def _places(settings: DataSettings | TuningSettings) -> tuple[str, ...]:
    """Where the sources are whose files are read here; a dataset of the Hub is known by its revision."""
    places = [located(source, settings) for source in settings.sources]
    return tuple(source.place for source in places if not is_on_hub(source) and source.path != POCKET_WORLD)


def _is_of_world(tuning: TuningSettings | None) -> bool:
    return tuning is not None and any(source.path == POCKET_WORLD for source in tuning.sources)


def _part(settings: Settings, *names: str) -> dict[str, Any]:
    return settings.model_dump(mode="json", include=set(names))
