"""The steps from sources to packed tokens, of documents, conversations and preference pairs, and their checks."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from affinage.cluster.executor import open_executor
from affinage.config.data import DataSettings, DecontaminateSettings, DedupSettings
from affinage.config.recipe import Recipe
from affinage.data import ingest
from affinage.data.chat import ChatTemplate, encode_prompt
from affinage.data.decontaminate import BenchmarkItem, decontaminate, kind_of_items, read_items, write_items
from affinage.data.dedup import dedup
from affinage.data.filters import filter_documents, known_languages
from affinage.data.places import released_folder
from affinage.data.split import split
from affinage.data.synthetic import write_world
from affinage.data.tokenize import tokenize
from affinage.data.tokenizer import Tokenizer
from affinage.data.tokenizer_training import measure, train_tokenizer
from affinage.data.tuning_data import prepare_tuning_data
from affinage.data_check import check_conversations, check_documents
from affinage.errors import UserError, UserWarned
from affinage.evaluation.tasks import GROUPS, check_names, find_tasks, is_task_file, items_of, of_pocket_world
from affinage.pipeline.models import TOKENIZER, chat_template_of, initial_folder
from affinage.pipeline.step import StepContext, Summary, at, check_exists, print_line

# Counts of tuning data that are printed: what was cut, left out, or written in another way.
_COUNTS: tuple[str, ...] = ("not_sampled", "truncated", "dropped", "identical", "in_benchmark", "held_out_elsewhere")
_COUNTS += ("rewritten", "reasoning_dropped", "prompt_differs")


def synthesize(context: StepContext, size: int) -> Summary:
    """Generate the pocket world, with `size` bytes of text: documents, conversations, preferences and benchmarks."""
    return write_world(context.folder, megabytes=size / 1e6, seed=context.recipe.seed)


def ingest_step(context: StepContext, data: DataSettings) -> Summary:
    """Read every source into one form."""
    return _pooled(context, ingest.ingest, data, context.folder, context.inputs.get("synthesize"))


def _of_documents(work: Callable[..., Summary], context: StepContext, **settings: Any) -> Summary:
    """Call a function that makes documents of documents, with settings of the recipe."""
    [documents] = context.inputs.values()
    return _pooled(context, work, documents, context.folder, **settings)


split_step = partial(_of_documents, split)


def filter_step(context: StepContext, data: DataSettings) -> Summary:
    """Remove what is no document in one of the recipe's languages."""
    return _of_documents(filter_documents, context, settings=data.filters, languages=data.languages)


def dedup_step(context: StepContext, settings: DedupSettings) -> Summary:
    """Keep one of each group of equal or nearly equal documents."""
    against = released_folder(settings.against, context.run_folder.parent) if settings.against else None
    return _of_documents(dedup, context, settings=settings, against=against)


def decontaminate_step(context: StepContext, settings: DecontaminateSettings) -> Summary:
    """Remove documents that hold an item of a benchmark."""
    return _of_documents(decontaminate, context, settings=settings, items=_benchmark_items(context.recipe, settings))


def tokenizer_step(context: StepContext, languages: Sequence[str]) -> Summary:
    """Train the tokenizer on the training documents."""
    recipe = context.recipe
    return train_tokenizer(context.inputs["split"], context.folder, recipe.tokenizer, languages)


def base_tokenizer(context: StepContext, folder: Path) -> Summary:
    """Take the tokenizer of the imported model that the recipe begins with."""
    tokenizer = Tokenizer(folder / TOKENIZER)
    tokenizer.write(context.folder)
    facts = {"kind": tokenizer.kind, "vocabulary": tokenizer.vocabulary}
    return facts | (measure(tokenizer, context.inputs["split"]) if "split" in context.inputs else {})


def tokenize_step(context: StepContext) -> Summary:
    """Write the documents as shards of packed tokens."""
    recipe, tokenizer = context.recipe, Tokenizer(context.inputs["train-tokenizer"])
    return _pooled(context, tokenize, context.inputs["split"], tokenizer, context.folder, recipe.packing)


def tuning_data(context: StepContext, section: str) -> Summary:
    """Write conversations (`sft`) or pairs of answers (`dpo`) as token shards, with masks of the trained tokens."""
    recipe, tuning = context.recipe, getattr(context.recipe, section)
    settings = recipe.data.decontaminate if recipe.data is not None else None
    items, path = _benchmark_items(recipe, settings) if settings else [], context.folder / "benchmark-items.json"
    searched = write_items(path, items, settings) if settings is not None and items else None
    how: dict[str, Any] = {"seq_len": tuning.seq_len or recipe.packing.seq_len}
    how["system_prompt"] = recipe.chat_system_prompt if section == "dpo" else tuning.system_prompt
    how |= {"world_folder": context.inputs.get("synthesize"), "searched": searched}
    summary = _pooled(context, prepare_tuning_data, tuning, chat_tokenizer(context), context.folder, **how)
    path.unlink(missing_ok=True)
    if counts := [f"{summary[key]:,} {key.replace('_', ' ')}" for key in _COUNTS if summary.get(key)]:
        things = "pairs" if section == "dpo" else "conversations"
        print_line(f"{things}: {', '.join(counts)}, of {summary.get('used', summary['conversations']):,}")
    return summary


def _benchmark_items(recipe: Recipe, settings: DecontaminateSettings) -> list[BenchmarkItem]:
    """The items that text must not hold."""
    items = [item for path in settings.benchmark_files for item in read_items(path)]
    tasks = [task for task in recipe.evaluate.tasks if not of_pocket_world(task)] if recipe.evaluate else []
    if settings.benchmarks and recipe.evaluate and tasks:
        from affinage.evaluation.harness import load_tasks, quiet  # seconds

        with quiet():
            items += items_of(load_tasks(find_tasks(tasks, recipe.evaluate.data_dir)[0]))
    return items


def chat_tokenizer(context: StepContext) -> Tokenizer:
    """The step's tokenizer, that writes conversations in the recipe's template."""
    folder = context.inputs["train-tokenizer"]
    return Tokenizer(folder, chat_template_of(context.loaded, folder))


def _pooled(context: StepContext, work: Callable[..., Summary], *arguments: Any, **settings: Any) -> Summary:
    """Call the function of a data step with the recipe's executor, and show the share of its work that is done."""
    with open_executor(context.recipe.data or DataSettings.model_construct(), progress=context.progress) as executor:
        return work(*arguments, executor=executor, **settings)


# ---- what can be known to fail before the first step runs ----


def check_ingest(context: StepContext, data: DataSettings) -> None:
    """The sources are there."""
    for index, source in enumerate(data.sources):
        with at(context.loaded, "data", "sources", index):
            check_documents(source, data)


def check_filter(context: StepContext, data: DataSettings) -> None:
    """Language identification knows the languages of the recipe; warns of sources in none of `data.languages`."""
    languages = enumerate(data.languages if data.filters.language_threshold else ())
    written: dict[tuple[str | int, ...], str] = {("data", "languages", at): language for at, language in languages}
    for index, source in enumerate(data.sources):
        if source.language and source.kind != "code" and source.language not in data.languages:
            written["data", "sources", index, "language"] = source.language
    for key, language in written.items():
        if language not in known_languages():
            fix = "Languages are ISO 639-1 codes, such as en and fr; data.filters.language_threshold=0 turns it off."
            raise UserError(f"language id does not know `{language}`", where=context.loaded.locate(key), fix=fix)
        if data.languages and key[1] == "sources":
            what = f"is of language {language}: data.languages=[{', '.join(data.languages)}] removes all its documents"
            where = f"{context.loaded.locate(key)}: `{data.sources[int(key[2])].title}`"
            warnings.warn(f"{where} {what}", UserWarned, stacklevel=2)


def check_decontaminate(context: StepContext, settings: DecontaminateSettings) -> None:
    """What `benchmark_files` names are files of items; and the benchmarks of the evaluation exist."""
    loaded = context.loaded
    for index, path in enumerate(settings.benchmark_files):
        key = ("data", "decontaminate", "benchmark_files", index)
        check_exists(loaded, path, *key)
        kind_of_items(path, loaded.locate(key))
    if settings.benchmarks and loaded.recipe.evaluate is not None:
        check_benchmarks(context, ("evaluate",))


def check_benchmarks(context: StepContext, section: tuple[str, ...]) -> None:
    """The benchmarks of an evaluation or a monitor, whose settings are in a section of the recipe, exist."""
    loaded = context.loaded
    settings: Any = reduce(getattr, section, loaded.recipe)
    if settings.data_dir is not None:
        check_exists(loaded, settings.data_dir, *section, "data_dir")
    for index, task in enumerate(settings.tasks):
        if is_task_file(task):
            check_exists(loaded, task, *section, "tasks", index)
        if not any(map(of_pocket_world, GROUPS.get(task, (task,)))):  # that is written by a step
            with at(loaded, *section, "tasks", index):
                check_names([task], settings.data_dir, where=task)


def check_tuning_data(context: StepContext, section: str) -> None:
    """The conversations are there, and their template, or in the vocabulary of an import the tokens of ChatML."""
    loaded, tuning = context.loaded, getattr(context.recipe, section)
    for index in range(len(tuning.sources)):
        with at(loaded, section, "sources", index):
            check_conversations(tuning, index)
    folder = initial_folder(loaded)
    if (template := chat_template_of(loaded, None if folder is None else folder / TOKENIZER)) is not None:
        of_any_tokenizer: Any = SimpleNamespace(special_tokens={}, control_spans=lambda text: [])
        ChatTemplate(template, of_any_tokenizer)
    elif folder is not None:
        with at(loaded, section):
            encode_prompt([{"role": "user", "content": ""}], Tokenizer(folder / TOKENIZER), "")
