"""Whether the languages and benchmarks that a recipe names exist, asked before any stage runs and without a network."""

from collections.abc import Sequence
from typing import Literal

from affinage.config.data import POCKET_WORLD
from affinage.config.load import LoadedRecipe
from affinage.errors import UserError
from affinage.evaluation.benchmarks import BENCHMARKS, GROUPS, of_pocket_world
from affinage.paths import from_home


def check_languages(loaded: LoadedRecipe) -> None:
    """See that language id knows the languages of a recipe. Raises UserError for one it does not know."""
    from affinage.data.language import known_languages

    data = loaded.recipe.data
    if data is None:
        return
    places: list[tuple[str, tuple[str | int, ...]]] = []
    if data.filters.identifies_languages:
        places += [(language, ("data", "languages", index)) for index, language in enumerate(data.languages)]
    for index, source in enumerate(data.sources):
        if source.language and source.kind != "code" and source.language not in data.languages:
            places.append((source.language, ("data", "sources", index, "language")))
    for language, key in places:
        if language not in known_languages():
            raise UserError(
                f"there is no language `{language}` in language id", where=loaded.locate(key), fix=_hint(language)
            )


def _hint(language: str) -> str:
    from babel import Locale
    from babel.core import get_global

    from affinage.data.language import known_languages

    word = language.replace("_", "-").partition("-")[0].lower()
    names = {name.lower(): code for locale in ("en", "fr") for code, name in Locale(locale).languages.items()}
    code = names.get(word) or get_global("language_aliases").get(word, word)
    fix = "Languages are ISO 639-1 codes, such as en and fr; data.filters.language_threshold=0 turns it off."
    return f"Did you mean `{code}`? {fix}" if code in known_languages() else fix


def check_tasks(loaded: LoadedRecipe) -> None:
    """See that the benchmarks of `evaluate.tasks` are files here or known to the harness. Raises UserError."""
    asked = loaded.recipe.evaluate
    if asked is not None:
        _check_each(loaded, asked.tasks, asked.data_dir, ("evaluate", "tasks"))


def check_tasks_in_loop(loaded: LoadedRecipe, training: Literal["pretrain", "sft", "dpo"]) -> None:
    """The same of the benchmarks that a training asks for on the way, without which it could not go on."""
    recipe = loaded.recipe
    key: tuple[str, ...] = (training, "monitor")
    asked = getattr(getattr(recipe, training), key[1])
    if asked is None:
        return
    if asked.data_dir is not None and not from_home(asked.data_dir).is_dir():
        raise UserError(f"there is no folder {asked.data_dir}", where=loaded.locate((*key, "data_dir")))
    sources = [source.path for source in recipe.data.sources] if recipe.data else []
    for index, task in enumerate(asked.tasks):
        if training == "pretrain" and of_pocket_world(task) and POCKET_WORLD not in sources:
            where = loaded.locate((*key, "tasks", index))
            what = "the pocket world's benchmarks are about facts that only its text tells"
            raise UserError(what, where=where, fix="Add `pocket-world` to data.sources, or watch other benchmarks.")
    _check_each(loaded, asked.tasks, asked.data_dir, (*key, "tasks"))


def _check_each(loaded: LoadedRecipe, tasks: Sequence[str], data_dir: str | None, key: tuple[str | int, ...]) -> None:
    for index, task in enumerate(tasks):
        _check_task(loaded, task, data_dir, (*key, index))


def check_against(loaded: LoadedRecipe) -> None:
    """See that what `data.decontaminate.benchmark_files` names is a task file, or a file of items. Raises UserError."""
    from affinage.data.benchmark_items import kind_of_items

    data = loaded.recipe.data
    if data is None or data.decontaminate is None:
        return
    for index, path in enumerate(data.decontaminate.benchmark_files):
        key = ("data", "decontaminate", "benchmark_files", index)
        if "://" not in path and not from_home(path).exists():
            fix = "Paths start from the working directory."
            raise UserError(f"there is no `{path}`", where=loaded.locate(key), fix=fix)
        if path.endswith((".yaml", ".yml")):
            _check_task(loaded, path, None, key)
        else:
            kind_of_items(path, loaded.locate(key))


def _check_task(loaded: LoadedRecipe, task: str, data_dir: str | None, key: tuple[str | int, ...]) -> None:
    """Ask the harness only about what is none of ours: importing it and reading its index takes seconds."""
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
