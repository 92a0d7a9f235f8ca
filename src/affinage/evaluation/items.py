"""The items of benchmarks as texts, for whoever must know whether a document holds one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from affinage.data.benchmark_items import BenchmarkItem, strings_in
from affinage.evaluation.harness import reachable_data, tamed_harness, task_manager
from affinage.evaluation.tasks import find_tasks


def benchmark_items(names: Sequence[str], data_dir: str | None = None) -> Iterator[BenchmarkItem]:
    """All items that the tasks `names` (see `find_tasks`) are scored on, each with the texts that would give it away.

    Those are every string in the item's data, and the question as it is put with its right answer. Items are numbered
    from 0 in the order of the task. Raises UserError for tasks that cannot be found or whose data cannot be fetched.
    """
    found = find_tasks(names, {}, data_dir)
    with tamed_harness(), reachable_data(found.fetched):
        manager = task_manager(found.named)
        yield from items_of(manager.load([*found.local, *found.named])["tasks"])


def items_of(tasks: Mapping[str, Any]) -> Iterator[BenchmarkItem]:
    """The same of tasks as the harness has loaded them, by name."""
    for name, task in tasks.items():
        for number, item in enumerate(task.eval_docs):
            yield BenchmarkItem(name, str(number), tuple(dict.fromkeys(_texts(task, item))))


def _texts(task: Any, item: Mapping[str, Any]) -> Iterator[str]:
    yield from strings_in(dict(item))
    question, answer = task.doc_to_text(item), task.doc_to_target(item)
    if task.OUTPUT_TYPE == "multiple_choice":
        choices = task.doc_to_choice(item)
        yield from strings_in(choices)
        if isinstance(answer, int) and 0 <= answer < len(choices):
            answer = choices[answer]
    if isinstance(question, str):
        yield f"{question}{task.config.target_delimiter}{answer}" if isinstance(answer, str) else question
