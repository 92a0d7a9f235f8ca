"""The road of a recipe: its stages in order, and which part of the recipe each of them depends on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from affinage.config.data import DIGITS, POCKET_WORLD, ArraySettings, DataSettings
from affinage.config.load import LoadedRecipe
from affinage.config.recipe import Recipe
from affinage.config.settings import Settings
from affinage.config.training import OF_THE_ROWS
from affinage.config.tuning import DpoSettings, SftSettings, TuningSettings
from affinage.data.places import is_on_hub, is_url, location
from affinage.evaluation.benchmarks import BENCHMARKS, GROUPS, files_of, of_pocket_world
from affinage.evaluation.tasks import of_the_hub
from affinage.paths import from_home
from affinage.pipeline import images, preferences, results, texts, trainings
from affinage.pipeline.extension import extension_fingerprint
from affinage.pipeline.initial import chat_template_of, initial_fingerprint
from affinage.pipeline.sources import fingerprints, task_files
from affinage.pipeline.stage import Stage, StageContext, Summary
from affinage.plugins import plugin_fingerprints


def road_of(loaded: LoadedRecipe, report: Callable[[StageContext], Summary] | None = None) -> list[Stage]:
    """The stages of a recipe, each after those it reads. Sections that the recipe leaves out have no stages.

    Args:
        loaded: the recipe.
        report: the work of the last stage; there is none without it.
    """
    recipe = loaded.recipe
    stages: list[Stage] = []
    initial, plugins = initial_fingerprint(loaded), plugin_fingerprints(loaded)
    if recipe.data is not None and recipe.data.arrays is not None:
        stages += _array_stages(recipe, recipe.data.arrays, plugins)
    elif recipe.data is not None or (initial and _tunings(recipe)):
        stages += _data_stages(recipe, initial)
        if _pretrains(recipe) or (initial and _tunings(recipe)):
            stages += _training_stages(loaded, initial, plugins)
            stages += _result_stages(recipe, plugins)
    stages = [
        replace(stage, sources=stage.sources | extension_fingerprint(loaded, stage.name))
        if stage.name in ("pretrain", "sft", "dpo")
        else stage
        for stage in stages
    ]
    if stages and report is not None:
        read = tuple(stage.name for stage in stages)
        settings = _part(recipe, "name", "description", "report")
        stages.append(Stage("report", report, settings, read, shows="report.html"))
    return stages


def uses_pocket_world(recipe: Recipe) -> bool:
    """Whether any text, conversation or benchmark of the recipe comes from the pocket world."""
    sources = [source.path for source in recipe.data.sources] if recipe.data else []
    tuned = any(tuning.from_world for tuning in _tunings(recipe))
    return tuned or POCKET_WORLD in (*sources, *_tasks(recipe), *_watched(recipe))


def is_local(recipe: Recipe) -> bool:
    """Whether all that the recipe reads is on this machine."""
    data = recipe.data
    sources = [(source, data.root, data.mirror) for source in data.sources] if data else []
    for tuning in _tunings(recipe):
        sources += [(source.as_source(), tuning.root, tuning.mirror) for source in tuning.sources]
    places = [location(*source) for source in sources]
    on_hub = any(is_on_hub(source, mirror) for source, _, mirror in sources)
    looked = data.decontaminate.benchmark_files if data and data.decontaminate else ()
    return (
        not on_hub
        and not any(of_the_hub(from_home(path)) for path in looked if path.endswith((".yaml", ".yml")))
        and not any(map(is_url, places))
        and all(_is_here(recipe, task) for task in (*_tasks(recipe), *_watched(recipe)))
    )


def local_tasks(recipe: Recipe) -> list[str]:
    """The benchmarks of the recipe that are files of the user's."""
    return [task for task in _tasks(recipe) if task != POCKET_WORLD and _is_local_task(task)]


def looked_for(recipe: Recipe) -> list[str]:
    """What documents must not hold: benchmarks and files by name.

    The pocket world is never among them. It is closed: its facts are its text and its benchmarks' answers by design,
    and what must not be seen in training is kept out of the text where the world is generated.
    """
    decontaminate = recipe.data.decontaminate if recipe.data else None
    if decontaminate is None:
        return []
    benchmarks = [task for task in _tasks(recipe) if task != POCKET_WORLD] if decontaminate.benchmarks else []
    return [*benchmarks, *decontaminate.benchmark_files]


def _tunings(recipe: Recipe) -> list[TuningSettings]:
    return [tuning for tuning in (recipe.sft, recipe.dpo) if tuning is not None]


def _watched(recipe: Recipe) -> list[str]:
    tasks = [task for tuning in _tunings(recipe) if tuning.monitor for task in tuning.monitor.tasks]
    tasks += recipe.pretrain.monitor.tasks if recipe.pretrain and recipe.pretrain.monitor else ()
    return [POCKET_WORLD if of_pocket_world(task) else task for task in tasks]


def _read_by_watch(tuning: TuningSettings) -> tuple[tuple[str, ...], dict[str, str]]:
    """The stages and the user's files that are read to watch a tuning."""
    tasks = tuning.monitor.tasks if tuning.monitor else ()
    folder = tuning.monitor.data_dir if tuning.monitor else None
    in_folder = fingerprints(str(file) for file in files_of(tasks, folder)) if folder is not None else {}
    files = fingerprints(task_files(task for task in tasks if not of_pocket_world(task) and _is_local_task(task)))
    return _if(any(map(of_pocket_world, tasks)), "world"), files | in_folder


def _pretrains(recipe: Recipe) -> bool:
    return recipe.data is not None and recipe.pretrain is not None


def _data_stages(recipe: Recipe, initial: dict[str, str]) -> list[Stage]:
    data = recipe.data
    stages = []
    if uses_pocket_world(recipe):
        size = {"data": {"sources": {"max_bytes": texts.pocket_bytes(recipe)}}}
        stages.append(Stage("world", texts.world, {**_part(recipe, "seed"), **size}))
    if data is None:  # an imported model is only fine-tuned
        return [*stages, Stage("tokenizer", texts.given_tokenizer, {}, (), initial)]
    places = [location(each, data.root, data.mirror) for each in data.sources if not is_on_hub(each, data.mirror)]
    from_world = _if(POCKET_WORLD in [source.path for source in data.sources], "world")
    collected = {"data": _collected(data)}
    stages.append(Stage("collect", texts.collect, collected, from_world, fingerprints(places), continues=True))
    cleaned = {"data": _json(data, "clean", "languages")}
    stages.append(Stage("clean", texts.clean, cleaned, ("collect",), continues=True))
    if data.dedup is not None:
        stages.append(Stage("deduplicate", texts.deduplicate, {"data": _json(data, "dedup")}, ("clean",)))
    if looked_for(recipe):
        stages.append(_decontamination(recipe, stages[-1].name))
    last = stages[-1].name
    stages.append(Stage("split", texts.split, {"data": _json(data, "split"), **_part(recipe, "seed")}, (last,)))
    if initial:
        stages.append(Stage("tokenizer", texts.given_tokenizer, {}, ("split",), initial))
    else:
        made_from = recipe.tokenizer.model_dump(mode="json", exclude={"compare"})
        of_tokenizer = {"data": _json(data, "languages"), "tokenizer": made_from, **_part(recipe, "seed")}
        stages.append(Stage("tokenizer", texts.tokenizer, of_tokenizer, ("split",)))
    if recipe.tokenizer.compare:
        compared = {"tokenizer": _json(recipe.tokenizer, "compare")}
        read = fingerprints(recipe.tokenizer.compare)
        stages.append(Stage("compare-tokenizers", texts.compare_tokenizers, compared, ("split", "tokenizer"), read))
    settings = _part(recipe, "packing", "seed")
    stages.append(Stage("rows", texts.rows, settings, ("split", "tokenizer"), continues=True))
    return stages


def _decontamination(recipe: Recipe, last: str) -> Stage:
    data = recipe.data
    assert data is not None and data.decontaminate is not None
    settings: dict[str, Any] = {"data": _json(data, "decontaminate")}
    if data.decontaminate.benchmarks:
        settings["evaluate"] = {"tasks": [task for task in _tasks(recipe) if task != POCKET_WORLD]}
    files = fingerprints(task_files(name for name in looked_for(recipe) if _is_local_task(name)))
    files |= fingerprints(data.decontaminate.benchmark_files) | (
        _item_files(recipe) if data.decontaminate.benchmarks else {}
    )
    return Stage("decontaminate", texts.decontaminate, settings, (last,), files, continues=True)


def _collected(data: DataSettings) -> dict[str, Any]:
    """What is collected: the settings of the sources but for how their files get here."""
    collected = _json(data, "sources", "root", "mirror", "sample", "on_error")
    collected["sources"] = [{**source, "download": None} for source in collected["sources"]]
    return collected


def _array_stages(recipe: Recipe, arrays: ArraySettings, plugins: dict[str, str]) -> list[Stage]:
    settings = {"data": {"arrays": arrays.model_dump(mode="json")}, **_part(recipe, "seed")}
    local = fingerprints(() if arrays.path == DIGITS else (arrays.path,))
    stages = [Stage("arrays", images.arrays, settings, (), local)]
    if recipe.pretrain is not None:
        settings = {**_part(recipe, "model", "seed"), "pretrain": recipe.pretrain.deciding()}
        stages.append(_training_stage("pretrain", trainings.pretrain_on_arrays, settings, ("arrays",), plugins))
        if recipe.probe is not None:
            stages.append(Stage("probe", images.probe, _part(recipe, "probe", "seed"), ("arrays", "pretrain"), plugins))
    return stages


def _training_stages(loaded: LoadedRecipe, initial: dict[str, str], plugins: dict[str, str]) -> list[Stage]:
    recipe, stages = loaded.recipe, []
    # Before the long pretraining, so that a mistake in the conversations is found in time.
    if recipe.sft is not None:
        stages.append(_conversations(loaded, recipe.sft))
    if recipe.dpo is not None:
        stages.append(_preferences(loaded, recipe.dpo))
    if recipe.pretrain is not None and _pretrains(recipe):
        settings = {**_part(recipe, "model", "seed"), "pretrain": recipe.pretrain.deciding()}
        begun = initial | plugins
        stages.append(_training_stage("pretrain", trainings.pretrain, settings, ("rows", "tokenizer"), begun))
    if recipe.sft is not None:
        settings = {**_part(recipe, "model", "seed"), "sft": recipe.sft.deciding()}
        base = _if(_pretrains(recipe), "pretrain")
        inputs, begun = (*base, "conversations", "tokenizer"), plugins if base else initial | plugins
        watched, files = _read_by_watch(recipe.sft)
        inputs, begun = (*inputs, *watched), begun | files
        stages.append(_training_stage("sft", trainings.sft, settings, inputs, begun))
    if recipe.dpo is not None:
        stages += _dpo_stages(recipe, recipe.dpo, initial, plugins)
    return stages


def _dpo_stages(recipe: Recipe, dpo: DpoSettings, initial: dict[str, str], plugins: dict[str, str]) -> list[Stage]:
    base = _if(recipe.sft is not None, "sft") or _if(_pretrains(recipe), "pretrain")
    inputs, begun = (*base, "preferences", "tokenizer"), plugins if base else initial | plugins
    computed = {**_part(recipe, "model"), "dpo": _json(dpo, "precision", "from_step")}
    told, (watched, files) = {"system_prompt": recipe.chat_system_prompt}, _read_by_watch(dpo)
    settings = {**_part(recipe, "model", "seed"), "dpo": dpo.deciding() | told}
    told_before = dpo.precompute_ref_log_probs
    stages = [Stage("reference", preferences.reference, computed, inputs, begun, together=True)] if told_before else []
    read = (*_if(told_before, "reference"), *inputs, *watched)
    return [*stages, _training_stage("dpo", preferences.dpo, settings, read, begun | files)]


def _preferences(loaded: LoadedRecipe, dpo: DpoSettings) -> Stage:
    settings, read, local = _tuning_rows(loaded, dpo, "dpo")
    settings["dpo"]["system_prompt"] = loaded.recipe.chat_system_prompt
    return Stage("preferences", preferences.preferences, settings, read, local)


def _conversations(loaded: LoadedRecipe, sft: SftSettings) -> Stage:
    settings, read, local = _tuning_rows(loaded, sft, "sft")
    return Stage("conversations", texts.conversations, settings, read, local)


def _tuning_rows(
    loaded: LoadedRecipe, tuning: TuningSettings, section: str
) -> tuple[dict[str, Any], tuple[str, ...], dict[str, str]]:
    """Settings, inputs and files that rows of examples depend on."""
    recipe = loaded.recipe
    settings = {section: _json(tuning, *OF_THE_ROWS), **_part(recipe, "seed")}
    if recipe.chat_template == "tokenizer":  # which one, the tokenizer's own key says
        settings["chat_template"] = recipe.chat_template
    elif (template := chat_template_of(loaded, None)) is not None:
        settings["chat_template"] = template
    if tuning.seq_len is None:
        settings["packing"] = _json(recipe.packing, "seq_len")
    sources = [(source.as_source(), tuning.mirror) for source in tuning.sources]
    local = fingerprints(location(each, tuning.root, mirror) for each, mirror in sources if not is_on_hub(each, mirror))
    return settings, ("tokenizer", *_if(tuning.from_world, "world")), local


def _result_stages(recipe: Recipe, plugins: dict[str, str]) -> list[Stage]:
    stages = []
    tuned = (*_if(recipe.sft is not None, "sft"), *_if(recipe.dpo is not None, "dpo"))
    trained = [*_if(_pretrains(recipe), "pretrain"), *tuned]
    if recipe.evaluate is not None:
        prompts, questions = _json(recipe.report, "prompts"), _json(recipe.report, "questions")
        asked = {"pretrain": prompts, "sft": questions, "dpo": questions}
        judged = recipe.evaluate.model_dump(mode="json", exclude={"batch_size", "attention", "data_dir"})
        local = fingerprints(task_files(local_tasks(recipe))) | _item_files(recipe) | plugins
        decontaminate = recipe.data.decontaminate if recipe.data else None
        looked: dict[str, Any] = {}
        if recipe.evaluate.contamination and decontaminate is not None and not looked_for(recipe):
            # How items are looked for in the text; otherwise the text was made by the same settings.
            looked["data"] = {"decontaminate": _json(decontaminate, "n_grams", "min_words", "boilerplate")}
        read = (
            "tokenizer",
            *_if(POCKET_WORLD in _tasks(recipe), "world"),
            *_if(recipe.evaluate.compressors and recipe.data is not None, "split"),
        )
        works = {"pretrain": results.evaluate_base, "sft": results.evaluate_sft, "dpo": results.evaluate_dpo}
        names = {"pretrain": "evaluate-base", "sft": "evaluate-sft", "dpo": "evaluate-dpo"}
        stages += [
            Stage(
                names[model],
                works[model],
                {"evaluate": judged, "report": asked[model], **looked},
                (model, *read),
                local,
                continues=True,
                together=True,
            )
            for model in trained
        ]
    if recipe.export is not None:
        settings = _part(recipe, "name", "description", "export")
        inputs = (
            *_if(recipe.data is not None, "split"),
            "tokenizer",
            *trained,
            *(stage.name for stage in stages),
        )  # the card has the scores
        stages.append(Stage("export", results.export, settings, inputs, plugins))
    return stages


def _tasks(recipe: Recipe) -> tuple[str, ...]:
    """The tasks of the recipe, the pocket world's by one name."""
    tasks = recipe.evaluate.tasks if recipe.evaluate else ()
    return tuple(dict.fromkeys(POCKET_WORLD if of_pocket_world(task) else task for task in tasks))


def _item_files(recipe: Recipe) -> dict[str, str]:
    """Fingerprints of the files that hold the items of benchmarks, where a folder of them is given."""
    if recipe.evaluate is None or recipe.evaluate.data_dir is None:
        return {}
    return fingerprints(str(file) for file in files_of(recipe.evaluate.tasks, recipe.evaluate.data_dir))


def _is_here(recipe: Recipe, task: str) -> bool:
    """Whether the items of a task are on this machine."""
    in_loop = recipe.pretrain.monitor if recipe.pretrain else None
    asked = [recipe.evaluate, in_loop, *(tuning.monitor for tuning in _tunings(recipe))]
    in_folder = all(each.data_dir is not None for each in asked if each is not None and task in each.tasks)
    if task != POCKET_WORLD and _is_local_task(task):
        return not of_the_hub(from_home(task))
    return task == POCKET_WORLD or (in_folder and (task in GROUPS or task in BENCHMARKS))


def _is_local_task(task: str) -> bool:
    return task == POCKET_WORLD or "/" in task or task.endswith((".yaml", ".yml"))


def _if(condition: bool, name: str) -> tuple[str, ...]:
    return (name,) if condition else ()


def _json(settings: Settings, *names: str) -> dict[str, Any]:
    return settings.model_dump(mode="json", include=set(names))


def _part(recipe: Recipe, *names: str) -> dict[str, Any]:
    return recipe.model_dump(mode="json", include=set(names))


def _training_stage(
    name: str,
    work: Callable[[StageContext], Summary],
    settings: dict[str, Any],
    inputs: tuple[str, ...],
    sources: dict[str, str],
) -> Stage:
    bring = trainings.bring_from_remote
    return Stage(name, work, settings, inputs, sources, continues=True, live=True, before=bring, together=True)
