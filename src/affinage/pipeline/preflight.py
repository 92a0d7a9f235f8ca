"""What can be known to fail before the first step runs, so that nobody learns of it after days of training."""

import contextlib
import importlib.util
from collections.abc import Collection, Iterator

from affinage.config.data import POCKET_WORLD
from affinage.config.layers import packaged_recipes, shown_path
from affinage.config.load import LoadedRecipe
from affinage.config.training import MonitorSettings, TrainSettings
from affinage.config.tuning import SftSettings, TuningSettings
from affinage.errors import UserError
from affinage.evaluation.benchmarks import BENCHMARKS, GROUPS, names_of, of_pocket_world
from affinage.paths import from_home
from affinage.pipeline.base_models import TOKENIZER, chat_template_of, initial_folder, initial_params
from affinage.pipeline.build import local_tasks
from affinage.pipeline.names import EVALUATIONS, TRAININGS
from affinage.pipeline.steps_train import with_vocabulary
from affinage.plugins import load_plugins
from affinage.tracking import check_trackers

Key = tuple[str | int, ...]  # of a setting in the recipe


def check(loaded: LoadedRecipe, steps: Collection[str]) -> None:
    """Look ahead at what the steps that must run will need.

    Raises:
        UserError: for files, keys and packages that are not there, a model, mesh and batch that do not fit together.
    """
    recipe, runs = loaded.recipe, set(steps)
    load_plugins(loaded)
    if recipe.data is not None and recipe.data.executor == "ray":
        _installed(loaded, ("data", "executor"), "ray", "or leave the work to this machine: data.executor=local")
    if "ingest" in runs:
        _check_sources(loaded)
    if "filter" in runs:
        _check_languages(loaded)
    if "decontaminate" in runs:
        _check_benchmark_files(loaded)
    if "compare-tokenizers" in runs:
        for index, path in enumerate(recipe.tokenizer.compare):
            _exists(loaded, path, ("tokenizer", "compare", index))
    if "tokenize" in runs:
        _check_packing(loaded)
    for section, data in (("sft", "sft-data"), ("dpo", "preference-data")):
        if data in runs and (tuning := getattr(recipe, section)) is not None:
            _check_tuning_data(loaded, tuning, section)
    decontaminates = "decontaminate" in runs and recipe.data and recipe.data.decontaminate
    if runs & set(EVALUATIONS.values()) or (decontaminates and decontaminates.benchmarks):
        _check_tasks(loaded)
    if "export" in runs and recipe.export is not None:
        _check_export(loaded, recipe.export.verify)
    if runs & set(TRAININGS):
        with _written(loaded, "trackers"):
            check_trackers(recipe.runtime.trackers)
    for name in reversed(TRAININGS):
        settings = getattr(recipe, name)
        if settings is not None and (name in runs or (name == "dpo" and "ref-logprobs" in runs)):
            _check_monitor(loaded, name, settings.monitor)
            _check_training(loaded, settings, name)
    if recipe.pretrain is not None and "pretrain" in runs:
        _check_first_of_tunings(loaded, recipe.pretrain)
    if recipe.sft is not None and "sft" in runs:
        _check_base_of_dpo(loaded, recipe.sft)


def warnings(loaded: LoadedRecipe) -> list[str]:
    """Valid settings that are probably unintended."""
    return [*_base_recipe_leftovers(loaded), *_unused_prompts(loaded), *_without_experts(loaded)]


def _base_recipe_leftovers(loaded: LoadedRecipe) -> Iterator[str]:
    """The text is one's own, and what comes after it is still about the pocket world."""
    recipe = loaded.recipe
    if recipe.data is None or not recipe.data.sources or any(s.path == POCKET_WORLD for s in recipe.data.sources):
        return
    tunings = (("sft", recipe.sft), ("dpo", recipe.dpo))
    for section, tuning in tunings:
        if tuning is not None and any(source.path == POCKET_WORLD for source in tuning.sources):
            yield (
                f"the text is yours, but {section} teaches what the pocket world says: set {section}.sources to files "
                f"of yours, or leave it out with --set {section}=null"
            )
    asked = [("evaluate", recipe.evaluate.tasks if recipe.evaluate else ())]
    asked += [(f"{name}.monitor", tuning.monitor.tasks) for name, tuning in tunings if tuning and tuning.monitor]
    for key, tasks in asked:
        if any(map(of_pocket_world, tasks)):
            yield f"the benchmarks are those of the pocket world, which your text does not speak of: {key}.tasks"


def _unused_prompts(loaded: LoadedRecipe) -> Iterator[str]:
    """Prompts that somebody wrote for the report, where no evaluation is there to answer them."""
    report = loaded.recipe.report
    if loaded.recipe.evaluate is not None or not (report.prompts or report.questions):
        return
    written = loaded.locate(("report", "prompts"))
    own = written.startswith("--set") or (
        written.rpartition(":")[0] == shown_path(loaded.path) and loaded.path not in packaged_recipes().values()
    )
    if own:
        yield "report.prompts and report.questions are answered with the benchmarks: evaluate is null, so nobody asks"


def _without_experts(loaded: LoadedRecipe) -> Iterator[str]:
    """A mesh has an axis for experts, and the model has none."""
    recipe = loaded.recipe
    if recipe.mesh.get("expert", 1) == 1:
        return
    from affinage.model import parse
    from affinage.parallel import table_with
    from affinage.parallel.used_axes import without_experts

    graph = parse(with_vocabulary(recipe.model, recipe.tokenizer.vocab_size), loaded.locate)
    said = without_experts(graph, table_with(recipe.parallel.sharding))
    if said:
        yield said


def _installed(loaded: LoadedRecipe, key: Key, package: str, instead: str = "", extra: str = "") -> None:
    if importlib.util.find_spec(package) is None:
        fix = ", ".join(filter(None, [f"Install it: pip install 'affinage[{extra or package}]'", instead]))
        raise UserError(f"the package `{package}` is not installed", where=loaded.locate(key), fix=fix)


def _check_export(loaded: LoadedRecipe, verify: bool) -> None:
    from affinage.hub.families import family_of
    from affinage.model import parse

    recipe = loaded.recipe
    for package in ("transformers", "torch") if verify else ():
        _installed(loaded, ("export", "verify"), package, extra="verify")
    graph = parse(with_vocabulary(recipe.model, recipe.tokenizer.vocab_size), loaded.locate)
    try:
        family_of(graph)
    except UserError as error:
        fix = "Set `export: null`: everything else works with it, as a MODEL too."
        raise UserError(error.what, where=loaded.locate(("export",)), fix=fix) from error


def _check_sources(loaded: LoadedRecipe) -> None:
    from affinage.data.ingest import check as check_source

    data = loaded.recipe.data
    if data is None:
        return
    for index, source in enumerate(data.sources):
        with _written(loaded, "data", "sources", index):
            check_source(source, data)


def _check_languages(loaded: LoadedRecipe) -> None:
    """Language id knows the languages of the recipe."""
    from affinage.data.language import known_languages

    data = loaded.recipe.data
    assert data is not None
    places: list[tuple[str, Key]] = []
    if data.filters.identifies_languages:
        places += [(language, ("data", "languages", index)) for index, language in enumerate(data.languages)]
    for index, source in enumerate(data.sources):
        if source.language and source.kind != "code" and source.language not in data.languages:
            places.append((source.language, ("data", "sources", index, "language")))
    for language, key in places:
        if language not in known_languages():
            what = f"there is no language `{language}` in language id"
            raise UserError(what, where=loaded.locate(key), fix=_language_hint(language))


def _language_hint(language: str) -> str:
    from babel import Locale
    from babel.core import get_global

    from affinage.data.language import known_languages

    word = language.replace("_", "-").partition("-")[0].lower()
    names = {name.lower(): code for locale in ("en", "fr") for code, name in Locale(locale).languages.items()}
    code = names.get(word) or get_global("language_aliases").get(word, word)
    fix = "Languages are ISO 639-1 codes, such as en and fr; data.filters.language_threshold=0 turns it off."
    return f"Did you mean `{code}`? {fix}" if code in known_languages() else fix


def _check_benchmark_files(loaded: LoadedRecipe) -> None:
    """What `data.decontaminate.benchmark_files` names are task files, or files of items."""
    from affinage.data.benchmark_items import kind_of_items

    data = loaded.recipe.data
    for index, path in enumerate(data.decontaminate.benchmark_files if data and data.decontaminate else ()):
        key = ("data", "decontaminate", "benchmark_files", index)
        if "://" not in path and not from_home(path).exists():
            fix = "Paths start from the working directory."
            raise UserError(f"there is no `{path}`", where=loaded.locate(key), fix=fix)
        if path.endswith((".yaml", ".yml")):
            _check_task(loaded, path, None, key)
        else:
            kind_of_items(path, loaded.locate(key))


def _check_tasks(loaded: LoadedRecipe) -> None:
    evaluate = loaded.recipe.evaluate
    if evaluate is None:
        return
    for task in local_tasks(loaded.recipe):
        _exists(loaded, task, ("evaluate", "tasks", evaluate.tasks.index(task)))
    if evaluate.data_dir is not None:
        _exists(loaded, evaluate.data_dir, ("evaluate", "data_dir"))
        with _written(loaded, "evaluate", "tasks"):
            names_of(evaluate.tasks, from_home(evaluate.data_dir))
    for index, task in enumerate(evaluate.tasks):
        _check_task(loaded, task, evaluate.data_dir, ("evaluate", "tasks", index))


def _check_monitor(loaded: LoadedRecipe, training: str, monitor: MonitorSettings | None) -> None:
    """The benchmarks of a monitor exist; without them the training could not go on."""
    if monitor is None:
        return
    key, data = (training, "monitor"), loaded.recipe.data
    if monitor.data_dir is not None and not from_home(monitor.data_dir).is_dir():
        raise UserError(f"there is no folder {monitor.data_dir}", where=loaded.locate((*key, "data_dir")))
    has_world = any(source.path == POCKET_WORLD for source in (data.sources if data else ()))
    for index, task in enumerate(monitor.tasks):
        place = (*key, "tasks", index)
        if training == "pretrain" and of_pocket_world(task) and not has_world:
            what = "the pocket world's benchmarks are about facts that only its text tells"
            fix = "Add `pocket-world` to data.sources, or choose other benchmarks."
            raise UserError(what, where=loaded.locate(place), fix=fix)
        _check_task(loaded, task, monitor.data_dir, place)


def _check_task(loaded: LoadedRecipe, task: str, data_dir: str | None, key: Key) -> None:
    """A benchmark is known. The harness, whose import takes seconds, is asked only about benchmarks of others."""
    members = GROUPS.get(task, (task,))
    if all(of_pocket_world(name) or (data_dir is None and name in BENCHMARKS) for name in members):
        return
    from affinage.evaluation.tasks import check_names, find_tasks

    try:
        check_names([task], {}, data_dir, where="evaluate.tasks")
        find_tasks([task], {}, data_dir)
    except UserError as error:
        where = loaded.locate(key)
        also = f"{where}, {error.where}" if error.where and error.where not in (task, "evaluate.tasks") else where
        raise UserError(error.what, where=also, fix=error.fix) from error


def _check_tuning_data(loaded: LoadedRecipe, tuning: TuningSettings, section: str) -> None:
    from affinage.data.conversation_files import check as check_source
    from affinage.data.mixture import ALL, refuse_unknown

    for index in range(len(tuning.sources)):
        with _written(loaded, section, "sources", index):
            check_source(tuning, index)
    titles = {source.title for source in tuning.sources}
    with _written(loaded, section, "mixture"):
        for name in {name for stage in tuning.mixture or () for name in stage.weights}:
            if name not in {*titles, ALL}:
                refuse_unknown(name, titles)
    begun = initial_folder(loaded)
    chat_template_of(loaded, None if begun is None else begun / TOKENIZER)


def _check_training(loaded: LoadedRecipe, settings: TrainSettings, name: str) -> None:
    from affinage.hardware.devices import acquire
    from affinage.model import abstract_params, logical_axes, parse
    from affinage.parallel import MeshLayout, call_on, make_mesh, param_shardings, strategy_for, table_with
    from affinage.parallel.sharding import check_positions_divide, check_rows_divide
    from affinage.parallel.used_axes import check_axes_used
    from affinage.training import rows_per_step
    from affinage.training.frozen import split_params
    from affinage.training.layerwise import check_remat, check_update
    from affinage.training.optimizer import check_choices

    recipe = loaded.recipe
    wanted = recipe.tokenizer.vocab_size
    graph = parse(with_vocabulary(recipe.model, wanted), loaded.locate)
    folder = initial_folder(loaded)
    if folder is not None:
        from affinage.data.tokenizer import Tokenizer

        with _written(loaded, "init_from"):
            initial_params(folder, graph)
            given = Tokenizer.load(folder / TOKENIZER)
            if recipe.sft is not None or recipe.dpo is not None:
                given.use_template(chat_template_of(loaded, folder / TOKENIZER))
                _ = given.chat_ids if given.template is None else given.template.marks(given)
    elif recipe.tokenizer.kind == "bpe" and wanted > graph.vocabulary:
        raise UserError(
            f"the tokenizer will have {wanted} pieces, the model's vocabulary is {graph.vocabulary}",
            where=loaded.locate(("tokenizer", "vocab_size")),
            fix=f"Set `vocab: auto`, or at least {wanted}, where the model says {graph.vocabulary}.",
        )
    with _written(loaded, "mesh"):
        mesh = make_mesh(dict(recipe.mesh.items()), acquire())
    with _written(loaded, name, "lora"):
        split = split_params(graph, settings)
    with _written(loaded, name, "optimizer_in_backward"):
        check_update(split, settings, in_stages=mesh.shape["pipeline"] > 1)
    with _written(loaded, "parallel", "remat"):
        check_remat(settings, recipe.parallel.remat)
    check_choices(settings, lambda path: loaded.locate((name, *path)))
    with _written(loaded, "parallel", "sharding"):
        table = table_with(recipe.parallel.sharding)
    with _written(loaded, "mesh"):
        check_axes_used(graph, mesh.shape, table)
    with _written(loaded, name, "batch_size"):
        check_rows_divide(rows_per_step(settings, mesh.size), settings.gradient_accumulation_steps, mesh, table)
    with _written(loaded, "mesh"):
        rows = rows_per_step(settings, mesh.size) // settings.gradient_accumulation_steps
        call = call_on(MeshLayout(mesh, table), settings.attention, recipe.parallel)
        strategy_for(mesh, recipe.parallel).check(graph, rows, call)
        param_shardings(mesh, logical_axes(graph), abstract_params(graph), table)
    with _written(loaded, "packing", "seq_len"):
        check_positions_divide(recipe.packing.seq_len, mesh, table)


def _check_first_of_tunings(loaded: LoadedRecipe, pretrain: TrainSettings) -> None:
    """What follows a pretraining that is still to be made begins with a step that this will save and keep."""
    from affinage.checkpoint.store import kept_steps

    tunings = [name for name in loaded.recipe.trainings if name != "pretrain"]
    step = getattr(loaded.recipe, tunings[0]).from_step if tunings else None
    if step is None or step == pretrain.steps:
        return
    keep = loaded.recipe.runtime.checkpoint
    saved = range(keep.every_steps, pretrain.steps, keep.every_steps)
    if step not in saved or step not in kept_steps([*saved, pretrain.steps], keep.keep_last, keep.keep_every):
        raise UserError(
            f"pretrain will keep no checkpoint of step {step}: of its {pretrain.steps} steps it saves every "
            f"{keep.every_steps} and keeps the last {keep.keep_last}"
            + (f" and multiples of {keep.keep_every}" if keep.keep_every else ""),
            where=loaded.locate((tunings[0], "from_step")),
            fix=f"Set runtime.checkpoint.every_steps and keep_every to numbers that divide {step}.",
        )


def _check_base_of_dpo(loaded: LoadedRecipe, sft: SftSettings) -> None:
    """What follows a fine-tuning that is still to be made begins with no step that this cannot reach.

    Where it ends by `num_epochs` is known once its conversations are packed; before, at most one is in a row.
    """
    from affinage.hardware.devices import acquire
    from affinage.parallel import make_mesh
    from affinage.training import rows_per_step

    step = loaded.recipe.dpo.from_step if loaded.recipe.dpo is not None else None
    if step is None:
        return
    last, why = sft.steps, "that is sft.steps"
    given = [source.max_examples for source in sft.sources if source.max_examples is not None]
    if sft.num_epochs is not None and sft.mixture is None and len(given) == len(sft.sources):
        rows = rows_per_step(sft, make_mesh(dict(loaded.recipe.mesh.items()), acquire()).size)
        seen = max(1, int(sum(given) * sft.num_epochs / rows))
        if seen < last:
            last = seen
            why = f"sft.num_epochs is {sft.num_epochs:g}, and {sum(given):,} conversations are at most as many rows"
    if step > last:
        where = loaded.locate(("dpo", "from_step"))
        fix = "Set a step that sft saves and keeps, or leave it out for its last one."
        raise UserError(f"sft ends at step {last:,} at the latest, before {step:,}: {why}", where=where, fix=fix)


def _check_packing(loaded: LoadedRecipe) -> None:
    """The place of the sequences can be written, and the names in the mixture exist."""
    from affinage.data.mixture import ALL, refuse_unknown
    from affinage.data.special_tokens import CODE_LANGUAGE
    from affinage.data.tokenize import UNDETERMINED, group_name

    data, pretrain, url = loaded.recipe.data, loaded.recipe.pretrain, loaded.recipe.packing.output_path
    if url:
        from affinage.data.token_shards import check_url

        with _written(loaded, "packing", "output_path"):
            check_url(url)
    if data is None or pretrain is None or pretrain.mixture is None:
        return
    sources = [source.title for source in data.sources]
    if len(set(sources)) < len(sources):
        return  # they get numbers
    stated = {source.language for source in data.sources if source.language}
    languages = {*data.languages, *stated, CODE_LANGUAGE, UNDETERMINED}
    likely = {*sources, *data.languages, *stated}
    known = {ALL, *sources, *languages, *(group_name(source, language) for source in sources for language in languages)}
    for stage in pretrain.mixture:
        for name in stage.weights:
            if name not in known:
                with _written(loaded, "pretrain", "mixture"):
                    refuse_unknown(name, likely)


@contextlib.contextmanager
def _written(loaded: LoadedRecipe, *key: str | int) -> Iterator[None]:
    """Say of an error which line of the recipe asked for it."""
    try:
        yield
    except UserError as error:
        raise UserError(error.what, where=loaded.locate(key), fix=error.fix) from error


def _exists(loaded: LoadedRecipe, path: str, key: Key) -> None:
    if path != POCKET_WORLD and "://" not in path and not from_home(path).exists():
        raise UserError(
            f"there is no `{path}`", where=loaded.locate(key), fix="Paths start from the working directory."
        )
