"""The steps from sources to packed tokens, of documents, conversations and preference pairs, and what they need."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich

from affinage.config.data import POCKET_BYTES, POCKET_WORLD, DataSettings
from affinage.config.load import LoadedRecipe
from affinage.config.recipe import Recipe
from affinage.config.training import DpoSettings, SftSettings, TuningSettings
from affinage.data.places import released_folder
from affinage.errors import UserError
from affinage.paths import from_home
from affinage.pipeline.imports import chat_template_of, initial_folder
from affinage.pipeline.models import TOKENIZER
from affinage.pipeline.step import StepContext, Summary, at, check_exists

if TYPE_CHECKING:
    from affinage.data.benchmark_items import BenchmarkItem
    from affinage.data.decontaminate import Searched
    from affinage.data.tokenizer import Tokenizer


def synthesize(context: StepContext) -> Summary:
    """Generate the pocket world: documents, conversations, preferences and benchmarks."""
    from affinage.data.synthetic import write_world

    return write_world(context.folder, megabytes=pocket_bytes(context.recipe) / 1e6, seed=context.recipe.seed)


def ingest(context: StepContext) -> Summary:
    """Read every source into one form."""
    from affinage.data.ingest import ingest

    with _workers(context) as how:
        return ingest(_data(context), context.folder, context.inputs.get("synthesize"), **how)


def filter_documents(context: StepContext) -> Summary:
    """Remove what is no document in one of the recipe's languages."""
    from affinage.data.filters import filter_documents

    data = _data(context)
    with _workers(context) as how:
        return filter_documents(context.inputs["ingest"], context.folder, data.filters, data.languages, **how)


def dedup(context: StepContext) -> Summary:
    """Keep one of each group of equal or nearly equal documents."""
    from affinage.data.dedup import dedup

    settings = _data(context).dedup
    assert settings is not None
    against = released_folder(settings.against, context.run_folder.parent) if settings.against else None
    with _workers(context) as how:
        return dedup(context.inputs["filter"], context.folder, settings, against=against, **how)


def decontaminate(context: StepContext) -> Summary:
    """Remove documents that hold an item of a benchmark."""
    from affinage.data.decontaminate import decontaminate

    settings, items = _data(context).decontaminate, _benchmark_items(context)
    assert settings is not None
    documents = context.inputs.get("dedup") or context.inputs["filter"]
    with _workers(context) as how:
        return decontaminate(documents, context.folder, settings, items, **how)


def split(context: StepContext) -> Summary:
    """Set aside the documents that are never trained on."""
    from affinage.data.split import split

    inputs = context.inputs
    documents = inputs.get("decontaminate") or inputs.get("dedup") or inputs["filter"]
    with _workers(context) as how:
        return split(documents, context.folder, _data(context).split, context.recipe.seed, **how)


def train_tokenizer(context: StepContext) -> Summary:
    """Train the tokenizer on the training documents."""
    from affinage.data.tokenizer_training import train_tokenizer

    recipe, languages = context.recipe, _data(context).languages
    return train_tokenizer(context.inputs["split"], context.folder, recipe.tokenizer, languages, recipe.seed)


def base_tokenizer(context: StepContext) -> Summary:
    """Take the tokenizer of the model that the recipe begins with."""
    from affinage.data.tokenizer import Tokenizer
    from affinage.data.tokenizer_training import measure

    folder = initial_folder(context.loaded)
    assert folder is not None
    given = Tokenizer(folder / TOKENIZER)
    given.write(context.folder)
    facts = {"kind": given.kind, "vocabulary": given.vocabulary}
    return facts | (measure(given, context.inputs["split"]) if "split" in context.inputs else {})


def tokenize(context: StepContext) -> Summary:
    """Write the documents as shards of packed tokens."""
    from affinage.data.tokenize import tokenize
    from affinage.data.tokenizer import Tokenizer

    recipe, split, trained = context.recipe, context.inputs["split"], Tokenizer(context.inputs["train-tokenizer"])
    with _workers(context) as how:
        how["progress"] = context.progress
        return tokenize(split, trained, context.folder, recipe.packing, recipe.seed, **how)


def sft_data(context: StepContext) -> Summary:
    """Write conversations as token shards with masks of the tokens that are trained on."""
    assert context.recipe.sft is not None
    return _tuning_data(context, context.recipe.sft, context.recipe.sft.system_prompt, "conversations")


def preference_data(context: StepContext) -> Summary:
    """Write pairs of answers as token shards."""
    assert context.recipe.dpo is not None
    return _tuning_data(context, context.recipe.dpo, context.recipe.chat_system_prompt, "pairs")


def _tuning_data(context: StepContext, tuning: SftSettings | DpoSettings, system_prompt: str, things: str) -> Summary:
    from affinage.data.tuning_data import prepare_tuning_data

    recipe = context.recipe
    with _searched_benchmarks(context) as searched, _workers(context) as how:
        how["progress"] = context.progress
        summary = prepare_tuning_data(
            tuning,
            chat_tokenizer(context),
            context.folder,
            seq_len=tuning.seq_len or recipe.packing.seq_len,
            seed=recipe.seed,
            system_prompt=system_prompt,
            world_folder=context.inputs.get("synthesize"),
            searched=searched,
            **how,
        )
    print_counts(summary, things)
    return summary


_COUNTS = {  # of tuning data -> what to print of it
    "not_sampled": "are not used: `sample` or `max_examples` leaves them out",
    "truncated": "are longer than `seq_len` and were cut",
    "dropped": "were left out: longer than `seq_len`, or without an answer within it",
    "identical": "have the same answer twice and were left out",
    "in_benchmark": "hold an item of a benchmark and were left out",
    "held_out_elsewhere": "are copies of held-out ones and are not trained on",
    "unrolled": "were unrolled: one example for each answer that the chat template writes otherwise once more follows",
    "reasoning_dropped": "have reasoning that the chat template does not write; it is not trained on",
    "prompt_differs": "are trained after other tokens than the prompt will have, which ends in a space",
}


def print_counts(summary: Summary, what: str) -> None:
    """Print what was cut, left out and kept of conversations or pairs, where it is not all of them."""
    used = summary.get("used", summary["conversations"])
    for key, text in _COUNTS.items():
        if count := summary.get(key):
            of = f" of {used:,}" if key in ("truncated", "dropped") else ""
            rich.print(f"{what}: {count:,}{of} {text}")


def _benchmark_items(context: StepContext) -> "list[BenchmarkItem]":
    """The items that text must not hold."""
    from affinage.data.benchmark_items import read_items
    from affinage.evaluation.benchmarks import of_pocket_world
    from affinage.evaluation.tasks import benchmark_items

    settings, evaluated = _data(context).decontaminate, context.recipe.evaluate
    assert settings is not None
    tasks = [name for name in settings.benchmark_files if name.endswith((".yaml", ".yml"))]
    if settings.benchmarks and evaluated is not None:
        tasks += [task for task in evaluated.tasks if not of_pocket_world(task)]
    items = list(benchmark_items(tasks, evaluated.data_dir if evaluated else None)) if tasks else []
    for path in settings.benchmark_files:
        items += read_items(path) if path not in tasks else ()
    return items


@contextlib.contextmanager
def _searched_benchmarks(context: StepContext) -> "Iterator[Searched | None]":
    """What tuning data is searched for; None where the recipe has no benchmarks to keep out."""
    from affinage.data.decontaminate import write_items

    data = context.recipe.data
    settings = data.decontaminate if data is not None else None
    items = _benchmark_items(context) if settings is not None else []
    path = context.folder / "benchmark-items.json"
    yield write_items(path, items, settings) if settings is not None and items else None
    path.unlink(missing_ok=True)


def chat_tokenizer(context: StepContext) -> "Tokenizer":
    """The step's tokenizer, that writes conversations in the recipe's template."""
    from affinage.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(context.inputs["train-tokenizer"])
    tokenizer.use_template(chat_template_of(context.loaded, context.inputs["train-tokenizer"]))
    return tokenizer


def pocket_bytes(recipe: Recipe) -> int:
    """How much text of the pocket world the recipe asks for, in 1e6 bytes."""
    worlds = [source for source in (recipe.data.sources if recipe.data else ()) if source.path == POCKET_WORLD]
    return max((source.max_bytes or POCKET_BYTES for source in worlds), default=POCKET_BYTES)


@contextlib.contextmanager
def _workers(context: StepContext) -> Iterator[dict[str, Any]]:
    """The executor of a data step, and what receives its share of work that is done."""
    from affinage.data.executor import open_executor

    with open_executor(context.recipe.data or DataSettings.model_construct()) as executor:
        yield {"executor": executor, "progress": lambda share: context.progress(f"{share:.0%}")}


def _data(context: StepContext) -> DataSettings:
    assert context.recipe.data is not None
    return context.recipe.data


# ---- what can be known to fail before the first step runs ----


def check_ingest(loaded: LoadedRecipe) -> None:
    """The sources are there."""
    from affinage.data.ingest import check

    assert loaded.recipe.data is not None
    for index, source in enumerate(loaded.recipe.data.sources):
        with at(loaded, "data", "sources", index):
            check(source, loaded.recipe.data)


def check_filter(loaded: LoadedRecipe) -> None:
    """Language identification knows the languages of the recipe."""
    from babel import Locale
    from babel.core import get_global

    from affinage.data.language import known_languages

    data = loaded.recipe.data
    assert data is not None
    places: list[tuple[str, tuple[str | int, ...]]] = []
    if data.filters.language_threshold:
        places += [(language, ("data", "languages", index)) for index, language in enumerate(data.languages)]
    for index, source in enumerate(data.sources):
        if source.language and source.kind != "code" and source.language not in data.languages:
            places.append((source.language, ("data", "sources", index, "language")))
    for language, key in places:
        if language not in known_languages():
            word = language.replace("_", "-").partition("-")[0].lower()
            names = {name.lower(): code for locale in ("en", "fr") for code, name in Locale(locale).languages.items()}
            code = names.get(word) or get_global("language_aliases").get(word, word)
            fix = f"Did you mean `{code}`? " if code in known_languages() else ""
            fix += "Languages are ISO 639-1 codes, such as en and fr; data.filters.language_threshold=0 turns it off."
            raise UserError(f"language id does not know `{language}`", where=loaded.locate(key), fix=fix)


def check_decontaminate(loaded: LoadedRecipe) -> None:
    """What `benchmark_files` names are task files, or files of items; so are the benchmarks of the evaluation."""
    from affinage.data.benchmark_items import kind_of_items

    settings = loaded.recipe.data.decontaminate if loaded.recipe.data else None
    assert settings is not None
    for index, path in enumerate(settings.benchmark_files):
        key = ("data", "decontaminate", "benchmark_files", index)
        check_exists(loaded, path, *key)
        if path.endswith((".yaml", ".yml")):
            check_task(loaded, path, None, key)
        else:
            kind_of_items(path, loaded.locate(key))
    if settings.benchmarks:
        check_tasks(loaded)


def check_tasks(loaded: LoadedRecipe) -> None:
    """The benchmarks of the evaluation exist."""
    from affinage.evaluation.benchmarks import is_task_file, names_of

    evaluate = loaded.recipe.evaluate
    if evaluate is None:
        return
    if evaluate.data_dir is not None:
        check_exists(loaded, evaluate.data_dir, "evaluate", "data_dir")
        with at(loaded, "evaluate", "tasks"):
            names_of(evaluate.tasks, from_home(evaluate.data_dir))
    for index, task in enumerate(evaluate.tasks):
        key = ("evaluate", "tasks", index)
        if is_task_file(task):
            check_exists(loaded, task, *key)
        check_task(loaded, task, evaluate.data_dir, key)


def check_task(loaded: LoadedRecipe, task: str, data_dir: str | None, key: tuple[str | int, ...]) -> None:
    """A benchmark is known. The harness, whose import takes seconds, is needed for benchmarks of others only."""
    from affinage.evaluation.benchmarks import BENCHMARKS, GROUPS, of_pocket_world

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


def check_tokenize(loaded: LoadedRecipe) -> None:
    """The place of the sequences can be written, and the names in the mixture exist."""
    from affinage.data.mixture import ALL, refuse_unknown
    from affinage.data.special_tokens import CODE_LANGUAGE
    from affinage.data.token_shards import check_url
    from affinage.data.tokenize import UNDETERMINED, group_name

    data, pretrain, url = loaded.recipe.data, loaded.recipe.pretrain, loaded.recipe.packing.output_path
    if url:
        with at(loaded, "packing", "output_path"):
            check_url(url)
    sources = [source.title for source in data.sources] if data else []
    if data is None or len(set(sources)) < len(sources):
        return  # they get numbers
    stated = {source.language for source in data.sources if source.language}
    languages = {*data.languages, *stated, CODE_LANGUAGE, UNDETERMINED}
    known = {ALL, *sources, *languages, *(group_name(source, language) for source in sources for language in languages)}
    for stage in (pretrain.mixture if pretrain else None) or ():
        for name in stage.weights.keys() - known:
            with at(loaded, "pretrain", "mixture"):
                refuse_unknown(name, {*sources, *data.languages, *stated})


def check_tuning_data(loaded: LoadedRecipe, section: str) -> None:
    """The conversations are there, with the names that are in the mixture, and so is their template."""
    from affinage.data.conversations import check_source
    from affinage.data.mixture import ALL, refuse_unknown

    tuning: TuningSettings = getattr(loaded.recipe, section)
    for index in range(len(tuning.sources)):
        with at(loaded, section, "sources", index):
            check_source(tuning, index)
    titles = {source.title for source in tuning.sources}
    for stage in tuning.mixture or ():
        for name in stage.weights.keys() - {*titles, ALL}:
            with at(loaded, section, "mixture"):
                refuse_unknown(name, titles)
    begun: Path | None = initial_folder(loaded)
    chat_template_of(loaded, None if begun is None else begun / TOKENIZER)
