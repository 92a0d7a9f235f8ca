"""The steps from sources to packed tokens: of documents, conversations and preference pairs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import rich

from affinage.config.data import POCKET_WORLD, DataSettings
from affinage.config.recipe import Recipe
from affinage.config.sources import POCKET_BYTES
from affinage.config.tuning import DpoSettings, SftSettings
from affinage.data.places import released_folder
from affinage.pipeline.base_models import TOKENIZER, chat_template_of, initial_folder
from affinage.pipeline.step import StepContext, Summary

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
    from affinage.data.executor import open_executor
    from affinage.data.ingest import ingest

    settings = _data(context)
    with open_executor(settings) as executor:
        return ingest(
            settings, context.folder, context.inputs.get("synthesize"), executor=executor, progress=_share(context)
        )


def filter_documents(context: StepContext) -> Summary:
    """Remove what is no document in one of the recipe's languages."""
    from affinage.data.executor import open_executor
    from affinage.data.filters import filter_documents

    settings = _data(context)
    with open_executor(settings) as executor:
        return filter_documents(
            context.inputs["ingest"],
            context.folder,
            settings.filters,
            settings.languages,
            executor=executor,
            progress=_share(context),
        )


def dedup(context: StepContext) -> Summary:
    """Keep one of each group of equal or nearly equal documents."""
    from affinage.data.dedup import dedup
    from affinage.data.executor import open_executor

    data, settings = _data(context), _data(context).dedup
    assert settings is not None
    with open_executor(data) as executor:
        return dedup(
            context.inputs["filter"],
            context.folder,
            settings,
            against=released_folder(settings.against, context.run_folder.parent) if settings.against else None,
            memory=data.memory_bytes,
            executor=executor,
            progress=_share(context),
        )


def decontaminate(context: StepContext) -> Summary:
    """Remove documents that hold an item of a benchmark."""
    from affinage.data.decontaminate import decontaminate
    from affinage.data.executor import open_executor

    data = _data(context)
    settings, items = data.decontaminate, _benchmark_items(context)
    assert settings is not None
    documents = context.inputs.get("dedup") or context.inputs["filter"]
    with open_executor(data) as executor:
        return decontaminate(documents, context.folder, settings, items, executor=executor, progress=_share(context))


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
def searched_benchmarks(context: StepContext) -> "Iterator[Searched | None]":
    """What tuning data is searched for; None where the recipe has no benchmarks to keep out."""
    from affinage.data.decontaminate import write_items

    data = context.recipe.data
    settings = data.decontaminate if data is not None else None
    items = _benchmark_items(context) if settings is not None else []
    path = context.folder / "benchmark-items.json"
    yield write_items(path, items, settings) if settings is not None and items else None
    path.unlink(missing_ok=True)


def split(context: StepContext) -> Summary:
    """Set aside the documents that are never trained on."""
    from affinage.data.executor import open_executor
    from affinage.data.split import split

    inputs = context.inputs
    documents = inputs.get("decontaminate") or inputs.get("dedup") or inputs["filter"]
    settings = _data(context)
    with open_executor(settings) as executor:
        return split(documents, context.folder, settings.split, context.recipe.seed, executor=executor)


def train_tokenizer(context: StepContext) -> Summary:
    """Train the tokenizer on the training documents."""
    from affinage.data.tokenizer_training import train_tokenizer

    recipe = context.recipe
    languages = _data(context).languages
    return train_tokenizer(context.inputs["split"], context.folder, recipe.tokenizer, languages, recipe.seed)


def base_tokenizer(context: StepContext) -> Summary:
    """Take the tokenizer of the model that the recipe begins with."""
    from affinage.data.tokenizer import Tokenizer
    from affinage.data.tokenizer_training import measure

    folder = initial_folder(context.loaded)
    assert folder is not None
    given = Tokenizer.load(folder / TOKENIZER)
    given.write(context.folder)
    facts = {"kind": given.kind, "vocabulary": given.vocabulary}
    return facts | (measure(given, context.inputs["split"]) if "split" in context.inputs else {})


def compare_tokenizers(context: StepContext) -> Summary:
    """Measure published tokenizers beside the recipe's own."""
    from affinage.data.tokenizer import Tokenizer
    from affinage.data.tokenizer_training import compare

    ours = Tokenizer.load(context.inputs["train-tokenizer"])
    return compare(ours, context.recipe.tokenizer.compare, context.inputs["split"], context.progress)


def tokenize(context: StepContext) -> Summary:
    """Write the documents as shards of packed tokens."""
    from affinage.data.executor import open_executor
    from affinage.data.tokenize import tokenize
    from affinage.data.tokenizer import Tokenizer

    recipe, progress = context.recipe, context.progress
    split, trained = context.inputs["split"], Tokenizer.load(context.inputs["train-tokenizer"])
    with open_executor(_data(context)) as executor:
        return tokenize(
            split, trained, context.folder, recipe.packing, recipe.seed, executor=executor, progress=progress
        )


def sft_data(context: StepContext) -> Summary:
    """Write conversations as token shards with masks of the tokens that are trained on."""
    assert context.recipe.sft is not None
    return _tuning_data(context, context.recipe.sft, context.recipe.sft.system_prompt, "conversations")


def preference_data(context: StepContext) -> Summary:
    """Write pairs of answers as token shards."""
    assert context.recipe.dpo is not None
    return _tuning_data(context, context.recipe.dpo, context.recipe.chat_system_prompt, "pairs")


def _tuning_data(context: StepContext, tuning: SftSettings | DpoSettings, system_prompt: str, things: str) -> Summary:
    from affinage.data.executor import open_executor
    from affinage.data.tuning_data import prepare_tuning_data

    recipe = context.recipe
    settings = recipe.data or DataSettings.model_construct()
    with searched_benchmarks(context) as searched, open_executor(settings) as executor:
        summary = prepare_tuning_data(
            tuning,
            chat_tokenizer(context),
            context.folder,
            seq_len=tuning.seq_len or recipe.packing.seq_len,
            seed=recipe.seed,
            system_prompt=system_prompt,
            world_folder=context.inputs.get("synthesize"),
            searched=searched,
            executor=executor,
            progress=context.progress,
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


def chat_tokenizer(context: StepContext) -> "Tokenizer":
    """The stage's tokenizer, that writes conversations in the recipe's template."""
    from affinage.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(context.inputs["train-tokenizer"])
    tokenizer.use_template(chat_template_of(context.loaded, context.inputs["train-tokenizer"]))
    return tokenizer


def pocket_bytes(recipe: Recipe) -> int:
    """How much text of the pocket world the recipe asks for, in 1e6 bytes."""
    worlds = [source for source in (recipe.data.sources if recipe.data else ()) if source.path == POCKET_WORLD]
    return max((source.max_bytes or POCKET_BYTES for source in worlds), default=POCKET_BYTES)


def _share(context: StepContext) -> Callable[[float], None]:
    return lambda share: context.progress(f"{share:.0%}")


def _data(context: StepContext) -> DataSettings:
    assert context.recipe.data is not None
    return context.recipe.data
