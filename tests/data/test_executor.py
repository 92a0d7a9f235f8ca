"""Whoever runs the tasks, the results are the same, in order, and a user's mistake stays one message."""

import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from planted_copies import lexicon, near_copy, random_text, written

from affinage import network
from affinage.cluster.executor import Executor, open_executor
from affinage.config.data import DataSettings, DecontaminateSettings, DedupSettings, FilterSettings, SplitSettings
from affinage.data.decontaminate import BenchmarkItem, decontaminate
from affinage.data.dedup import dedup
from affinage.data.filters import filter_documents
from affinage.data.ingest import ingest
from affinage.data.split import split
from affinage.errors import TransientError, UserError
from run_affinage import refused
from source_forms import bytes_of, write_lines


def squared(number: int) -> int:
    if number < 0:
        raise UserError("a negative number", where="here", fix="leave it")
    return number * number


@pytest.fixture(scope="module", params=["local", "ray"])
def executor(request):
    if request.param == "local":
        yield Executor(2)
        return
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file
    with open_executor(DataSettings(sources=["x"], executor="ray", workers=2)) as executor:
        yield executor


def test_results_come_in_order_and_mistakes_as_they_are(executor):
    assert executor.workers == 2
    shown = []
    assert Executor(1, shown.append).map(squared, range(4), label="squaring") == [0, 1, 4, 9]
    assert shown == ["squaring 25%", "squaring 50%", "squaring 75%", "squaring 100%"]
    for each in (executor, Executor(1)):
        assert each.map(squared, range(7)) == [0, 1, 4, 9, 16, 25, 36]
        shift = np.arange(3)  # a closure, as some tasks are
        moved = each.map(lambda k, by=shift: by + k, [1, 2], threads=True)
        assert [result.tolist() for result in moved] == [[1, 2, 3], [2, 3, 4]]
        mistake = refused(each.map, squared, [1, -1])
        assert (mistake.where, mistake.fix) == ("here", "leave it")


def test_complete_tasks_are_skipped_and_those_that_changed_are_not(tmp_path):
    refused(lambda: Executor(1).map(squared, [2, 3, -1, 4], tmp_path))
    assert len(list(tmp_path.glob("completions/*.json"))) == 2
    seen = []

    def cubed(number: int) -> int:
        seen.append(number)
        return number**3

    assert Executor(1).map(cubed, [2, 5, 6], tmp_path) == [4, 125, 216] and seen == [5, 6]


def test_a_passing_error_of_the_network_is_tried_again_and_then_transient(monkeypatch):
    monkeypatch.setattr(network, "PAUSES", (0.0, 0.0))
    failures = [ConnectionResetError("gone"), TimeoutError("slow")]

    def fetch(times: int) -> int:
        if failures and times:
            raise failures.pop()
        return 1

    assert Executor(1).map(fetch, [1]) == [1]
    failures[:] = [ConnectionResetError("gone")] * 3
    with pytest.raises(TransientError, match="failed 3 times"):
        Executor(1).map(fetch, [1])
    with pytest.raises(ZeroDivisionError):
        Executor(1).map(lambda k: 1 // k, [0])


def chain(lines: Path, folder: Path, items: list[BenchmarkItem], executor: Executor) -> tuple:
    """The summaries of all steps, and the bytes of all that they write. A step that is interrupted is called again."""
    source = {"path": str(lines), "language": "en", "trust_language": True, "name": "s"}
    collected, cleaned, unique, clear, out = (folder / f"step-{number}" for number in range(5))
    summaries = []
    for step in (
        partial(ingest, DataSettings(sources=[source]), collected, executor=executor),
        partial(filter_documents, collected, cleaned, FilterSettings(), ("en",), executor=executor),
        partial(dedup, cleaned, unique, DedupSettings(threshold=0.9), executor=executor),
        partial(decontaminate, unique, clear, DecontaminateSettings(), items, executor=executor),
        partial(split, clear, out, SplitSettings(validation_fraction=0.1), executor=executor),
    ):
        while len(summaries) < 5:
            try:
                summaries.append(step())
                break
            except KeyboardInterrupt:
                assert list(folder.rglob("completions/*.json"))
    return summaries, bytes_of(folder)


@pytest.fixture(scope="module")
def by_one(tmp_path_factory) -> Iterator[tuple]:
    """A corpus, items that some of its documents have, and what one process makes of them."""
    folder, rng = tmp_path_factory.mktemp("by-one"), random.Random(0)
    words = lexicon(800, rng)
    originals = [random_text(words, rng.randint(60, 200), rng) for _ in range(100)]
    copies = [near_copy(text, rng.uniform(0.7, 1), words, rng) for text in originals]
    texts = [written(text) for text in [*originals, *copies, *originals[:20]]] + ["short"]
    for file in range(3):
        numbers = range(file, len(texts), 3)
        write_lines(folder / "lines" / f"{file}.jsonl", [{"id": f"{i:03d}", "text": texts[i]} for i in numbers])
    items = [BenchmarkItem("quiz", str(k), (written(originals[k][20:40]),)) for k in range(10)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("affinage.data.ingest.TASK_BYTES", 10_000)
        yield folder / "lines", items, chain(folder / "lines", folder / "out", items, Executor(1))


@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=pytest.mark.full)], indirect=True)
def test_every_step_gives_what_one_process_gives(executor, by_one, tmp_path):
    lines, items, expected = by_one
    assert chain(lines, tmp_path / "out", items, executor) == expected
    _, cleaned, unique, clear, _ = expected[0]
    assert cleaned["removed"] == {"too short": 1} and unique["removed"]["near duplicate"] > 10
    assert clear["removed"]["in a benchmark"] >= 10


def test_interruptions_change_nothing_and_finished_work_is_kept(by_one, tmp_path):
    lines, items, expected = by_one
    shares, whole = [], []

    def dying(share: str) -> None:
        shares.append(share)
        if len(shares) % 9 == 0:
            raise KeyboardInterrupt

    assert chain(lines, tmp_path / "out", items, Executor(1, dying)) == expected
    chain(lines, tmp_path / "whole", items, Executor(1, whole.append))
    assert len(whole) <= len(shares) < 1.5 * len(whole), "what was complete is not done again"
