"""The steps from sources to packed tokens, of documents, conversations and preference pairs, and what they need."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import rich

from affinage.config.data import POCKET_BYTES, POCKET_WORLD, DataSettings
from affinage.config.load import LoadedRecipe
from affinage.config.recipe import EvaluateSettings, Recipe
from affinage.config.training import MonitorSettings, TuningSettings
from affinage.data.places import released_folder
from affinage.errors import UserError
from affinage.pipeline.imports import chat_template_of, initial_folder
from affinage.pipeline.models import TOKENIZER
from affinage.pipeline.step import StepContext, Summary, at, check_exists

if TYPE_CHECKING:
    from affinage.data.benchmark_items import BenchmarkItem
    from affinage.data.tokenizer import Tokenizer

# Counts of tuning data that are printed: what was cut, left out, or written in another way.
_COUNTS = (
    *("not_sampled", "truncated", "dropped", "identical", "in_benchmark", "held_out_elsewhere"),
    *("unrolled", "reasoning_dropped", "prompt_differs"),
)


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
    tokenizer = Tokenizer(folder / TOKENIZER)
    tokenizer.write(context.folder)
    facts = {"kind": tokenizer.kind, "vocabulary": tokenizer.vocabulary}
    return facts | (measure(tokenizer, context.inputs["split"]) if "split" in context.inputs else {})


def tokenize(context: StepContext) -> Summary:
    """Write the documents as shards of packed tokens."""
    from affinage.data.tokenize import tokenize
    from affinage.data.tokenizer import Tokenizer

    recipe, split, tokenizer = context.recipe, context.inputs["split"], Tokenizer(context.inputs["train-tokenizer"])
    with _workers(context) as how:
        how["progress"] = context.progress
        return tokenize(split, tokenizer, context.folder, recipe.packing, recipe.seed, **how)


def tuning_data(context: StepContext, section: str) -> Summary:
    """Write conversations (`sft`) or pairs of answers (`dpo`) as token shards, with masks of the trained tokens."""
    from affinage.data.decontaminate import write_items
    from affinage.data.tuning_data import prepare_tuning_data

    recipe, tuning = context.recipe, getattr(context.recipe, section)
    settings = recipe.data.decontaminate if recipe.data is not None else None
    items, path = _benchmark_items(context) if settings else [], context.folder / "benchmark-items.json"
    with _workers(context) as how:
        how["progress"] = context.progress
        summary = prepare_tuning_data(
            tuning,
            chat_tokenizer(context),
            context.folder,
            seq_len=tuning.seq_len or recipe.packing.seq_len,
            seed=recipe.seed,
            system_prompt=recipe.chat_system_prompt if section == "dpo" else tuning.system_prompt,
            world_folder=context.inputs.get("synthesize"),
            searched=write_items(path, items, settings) if settings is not None and items else None,
            **how,
        )
    path.unlink(missing_ok=True)
    print_counts(summary, "pairs" if section == "dpo" else "conversations")
    return summary


def print_counts(summary: Summary, things: str) -> None:
    """Print how many conversations or pairs were cut, left out, or written in another way."""
    counts = [f"{summary[key]:,} {key.replace('_', ' ')}" for key in _COUNTS if summary.get(key)]
    if counts:
        rich.print(f"{things}: {', '.join(counts)}, of {summary.get('used', summary['conversations']):,}")


def _benchmark_items(context: StepContext) -> "list[BenchmarkItem]":
    """The items that text must not hold."""
    from affinage.data.benchmark_items import read_items
    from affinage.evaluation.tasks import benchmark_items, of_pocket_world

    settings, evaluated = _data(context).decontaminate, context.recipe.evaluate
    assert settings is not None
    tasks = [name for name in settings.benchmark_files if name.endswith((".yaml", ".yml"))]
    if settings.benchmarks and evaluated is not None:
        tasks += [task for task in evaluated.tasks if not of_pocket_world(task)]
    items = list(benchmark_items(tasks, evaluated.data_dir if evaluated else None)) if tasks else []
    for path in settings.benchmark_files:
        items += read_items(path) if path not in tasks else ()
    return items


def chat_tokenizer(context: StepContext) -> "Tokenizer":
    """The step's tokenizer, that writes conversations in the recipe's template."""
    from affinage.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(context.inputs["train-tokenizer"])
    tokenizer.use_template(chat_template_of(context.loaded, context.inputs["train-tokenizer"]))
    return tokenizer


def pocket_bytes(recipe: Recipe) -> int:
    """How much text of the pocket world the recipe asks for, in bytes."""
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
            fix = "Languages are ISO 639-1 codes, such as en and fr; data.filters.language_threshold=0 turns it off."
            raise UserError(f"language id does not know `{language}`", where=loaded.locate(key), fix=fix)


def check_decontaminate(loaded: LoadedRecipe) -> None:
    """What `benchmark_files` names are task files, or files of items; so are the benchmarks of the evaluation."""
    from affinage.data.benchmark_items import kind_of_items

    recipe = loaded.recipe
    assert recipe.data is not None and recipe.data.decontaminate is not None
    for index, path in enumerate(recipe.data.decontaminate.benchmark_files):
        key = ("data", "decontaminate", "benchmark_files", index)
        check_exists(loaded, path, *key)
        if path.endswith((".yaml", ".yml")):
            _check_task(loaded, path, None, *key)
        else:
            kind_of_items(path, loaded.locate(key))
    if recipe.data.decontaminate.benchmarks and recipe.evaluate is not None:
        check_benchmarks(loaded, recipe.evaluate, "evaluate")


def check_benchmarks(loaded: LoadedRecipe, settings: EvaluateSettings | MonitorSettings, *section: str) -> None:
    """The benchmarks of an evaluation or a monitor, whose settings are in a section of the recipe, exist."""
    from affinage.evaluation.tasks import is_task_file

    if settings.data_dir is not None:
        check_exists(loaded, settings.data_dir, *section, "data_dir")
    for index, task in enumerate(settings.tasks):
        if is_task_file(task):
            check_exists(loaded, task, *section, "tasks", index)
        _check_task(loaded, task, settings.data_dir, *section, "tasks", index)


def _check_task(loaded: LoadedRecipe, task: str, data_dir: str | None, *key: str | int) -> None:
    """A benchmark is known. The harness, whose import takes seconds, is needed for benchmarks of others only."""
    from affinage.evaluation.tasks import BENCHMARKS, GROUPS, check_names, of_pocket_world

    members = GROUPS.get(task, (task,))
    if not all(of_pocket_world(name) or (data_dir is None and name in BENCHMARKS) for name in members):
        with at(loaded, *key):
            check_names([task], {}, data_dir, where=task)


def check_tokenize(loaded: LoadedRecipe) -> None:
    """The place of the sequences can be written."""
    from affinage.data.token_shards import check_url

    if url := loaded.recipe.packing.output_path:
        with at(loaded, "packing", "output_path"):
            check_url(url)


def check_tuning_data(loaded: LoadedRecipe, section: str) -> None:
    """The conversations are there, and so is their template."""
    from affinage.data.conversations import check_source

    tuning: TuningSettings = getattr(loaded.recipe, section)
    for index in range(len(tuning.sources)):
        with at(loaded, section, "sources", index):
            check_source(tuning, index)
    folder = initial_folder(loaded)
    chat_template_of(loaded, None if folder is None else folder / TOKENIZER)
