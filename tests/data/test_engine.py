"""Whoever runs the tasks, the results are the same, in order, and a user's mistake stays one message."""

import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from planted_copies import lexicon, near_copy, random_text, written

from affinage.data.benchmark_items import BenchmarkItem
from affinage.data.clean import clean
from affinage.data.decontaminate import decontaminate
from affinage.data.deduplicate import deduplicate
from affinage.data.documents import DocumentWriter, read_documents
from affinage.data.engine import LocalEngine, open_engine
from affinage.data.ray_engine import RayEngine
from affinage.data.split import split
from affinage.errors import UserError
from affinage.recipe.cleaning import DecontaminateSettings
from affinage.recipe.data import CleanSettings, DataSettings, DeduplicateSettings, SplitSettings


def squared(number: int) -> int:
    if number < 0:
        raise UserError("a negative number", where="here", fix="leave it")
    return number * number


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("releases_gil", [False, True])
def test_results_come_in_order_and_progress_is_told(workers, releases_gil):
    told = []
    results = LocalEngine(workers).map(squared, range(7), releases_gil=releases_gil, progress=told.append)
    assert results == [0, 1, 4, 9, 16, 25, 36]
    assert told == [pytest.approx(k / 7) for k in range(1, 8)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_of_the_user_comes_out_of_a_worker(workers):
    with pytest.raises(UserError) as refused:
        LocalEngine(workers).map(squared, [1, -1])
    assert (refused.value.where, refused.value.fix) == ("here", "leave it")


def test_the_recipe_says_how_many_workers():
    for workers in (1, 5):
        with open_engine(DataSettings(sources=("x",), workers=workers)) as engine:
            assert engine.workers == workers


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'affinage[ray]'")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file
    with (
        tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as temporary,  # sockets need a short path
        RayEngine(2, temporary=Path(temporary)) as engine,
    ):
        yield engine


def test_ray_gives_the_same_results_and_messages(ray):
    assert ray.workers == 2
    assert ray.map(squared, range(40)) == [k * k for k in range(40)]
    shift = np.arange(3)  # a closure, as some tasks are
    assert [r.tolist() for r in ray.map(lambda k: shift + k, [1, 2], releases_gil=True)] == [[1, 2, 3], [2, 3, 4]]
    with pytest.raises(UserError) as refused:
        ray.map(squared, [1, -1])
    assert (refused.value.where, refused.value.fix) == ("here", "leave it")


def test_ray_decontaminates_and_splits_as_this_machine_does(ray, tmp_path):
    rng = random.Random(0)
    words = lexicon(800, rng)
    texts = [random_text(words, rng.randint(60, 200), rng) for _ in range(100)]
    texts += [near_copy(text, rng.uniform(0.7, 1), words, rng) for text in texts]
    for file in range(3):
        with DocumentWriter(tmp_path / "in", f"file-{file}") as writer:
            for i in range(file, len(texts), 3):
                writer.add(id=f"{i:03d}", source="s", language="en", text=written(texts[i]))
    items = [BenchmarkItem("quiz", str(k), (written(texts[k][20:40]),)) for k in range(10)]
    results = []
    for name, engine in (("here", LocalEngine(1)), ("ray", ray)):
        clear, out = tmp_path / f"clear-{name}", tmp_path / f"split-{name}"
        found = decontaminate(tmp_path / "in", clear, DecontaminateSettings(), items, engine=engine)
        summary = split(clear, out, SplitSettings(validation=0.1), 0, engine=engine)
        rows = [
            row for part in ("train", "validation") for batch in read_documents(out / part) for row in batch.to_pylist()
        ]
        results.append((rows, found | {"seconds": 0}, summary | {"seconds": 0}))
    assert results[0] == results[1]
    assert results[0][1]["removed"]["in a benchmark"] >= 10
    assert results[0][2]["removed"]["near copy of a validation document"] > 3


def test_ray_cleans_and_deduplicates_as_this_machine_does(ray, tmp_path):
    rng = random.Random(0)
    words = lexicon(800, rng)
    originals = [random_text(words, rng.randint(60, 200), rng) for _ in range(60)]
    copies = [near_copy(text, rng.uniform(0.7, 1), words, rng) for text in originals]
    texts = [written(text) for text in [*originals, *copies, *originals[:20]]] + ["short"]
    for file in range(4):
        with DocumentWriter(tmp_path / "raw", f"file-{file}") as writer:
            for i in range(file, len(texts), 4):
                writer.add(id=f"{i:03d}", source="s", language="en", text=texts[i])
    results = []
    for name, engine in (("here", LocalEngine(1)), ("ray", ray)):
        cleaned, unique = tmp_path / f"clean-{name}", tmp_path / f"unique-{name}"
        counts = clean(tmp_path / "raw", cleaned, CleanSettings(), ("en",), engine=engine)
        summary = deduplicate(cleaned, unique, DeduplicateSettings(), memory=50_000, engine=engine)
        documents = [row for batch in read_documents(unique) for row in batch.to_pylist()]
        clusters = pq.read_table(unique / "clusters" / "clusters.parquet")
        results.append((documents, clusters, counts | {"seconds": 0}, summary | {"seconds": 0}))
    assert results[0] == results[1]
    assert results[0][3]["removed"]["near duplicate"] > 10 and results[0][2]["removed"] == {"too short": 1}
