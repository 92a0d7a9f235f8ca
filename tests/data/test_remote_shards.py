"""Rows that are written to and read from elsewhere; writers that were interrupted resume."""

import itertools
from types import SimpleNamespace

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from affinage.config.data import PackingSettings
from affinage.data import executor
from affinage.data.dataloader import DataLoader
from affinage.data.executor import Executor
from affinage.data.tokenize import tokenize
from affinage.errors import TransientError, UserError

URL = "memory://bucket/rows"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the object store in memory holds, what was read, and what fails."""
    store = SimpleNamespace(files=MemoryFileSystem.store, read=[], failures=iter(()))
    read = MemoryFileSystem.cat_file
    store.files.clear()

    def cat_file(filesystem, path, start=None, end=None, **others):
        store.read.append((path, start, end))
        if next(store.failures, False):
            raise ConnectionResetError("the network is gone")
        return read(filesystem, path, start, end, **others)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(executor, "PAUSES", (0.0, 0.0))
    return store


def packed(split_folder, tokenizer, folder, url: str = "", **others):
    settings = PackingSettings(seq_len=32, num_shards=8, output_path=url)
    tokenize(split_folder, tokenizer, folder, settings, seed=0, **others)
    return folder / "train"


def test_rows_elsewhere_are_the_rows_here(store: SimpleNamespace, split_folder, bpe, tmp_path):
    here, there = (packed(split_folder, bpe, tmp_path / name, URL * (name == "there")) for name in ("here", "there"))
    assert not list(there.rglob("tokens-*.npy"))
    near, far = (DataLoader(folder, seed=0, batch=16) for folder in (here, there))
    assert not store.read
    for step in (0, 3, 100):
        whole = far.batch(step)
        assert all((value == whole[key]).all() for key, value in near.batch(step).items())
    assert len(store.read) == 3 * 16 and {stop - start for _, start, stop in store.read} == {2 * 32}  # a row each
    stored = {name.removeprefix("/bucket/rows/there/train/"): file.getvalue() for name, file in store.files.items()}
    for shard in here.rglob("tokens-*.npy"):
        assert stored[str(shard.relative_to(here))] == shard.read_bytes()
    assert sum(name.endswith("/shards.json") for name in stored) == 4


def test_what_is_gone_is_refused_and_a_network_that_fails_is_waited_for_and_never_the_users_mistake(
    store: SimpleNamespace, split_folder, bpe, tmp_path
):
    folder = packed(split_folder, bpe, tmp_path / "rows", URL)
    feed, files = DataLoader(folder, seed=0, batch=4), dict(store.files)

    def refused(kind: type[Exception], act) -> None:
        with pytest.raises(kind) as error:
            act()
        assert "bucket/rows" in error.value.where and error.value.fix

    store.failures = iter([True, True, False])
    assert feed.batch(0)["tokens"].shape == (4, 32)
    store.failures = itertools.repeat(True)
    refused(TransientError, lambda: feed.batch(0))
    store.failures = iter(())
    store.files.clear()
    refused(UserError, lambda: feed.batch(0))
    store.files.update(files)
    assert feed.batch(0)["tokens"].shape == (4, 32)  # it can be tried again


def test_killed_in_the_middle_it_resumes_and_ends_with_the_same_bytes(split_folder, bpe, tmp_path):
    def settings(name: str) -> PackingSettings:
        path = f"file://{tmp_path}/{name}/store"
        return PackingSettings(seq_len=32, num_shards=8, output_path=path, strategy="best_fit")

    tokenize(split_folder, bpe, tmp_path / "whole/rows", settings("whole"), seed=0)
    rows, written = tmp_path / "killed/rows", []

    def ends_at_the_fourth(doing: str) -> None:
        written.extend([doing] * doing.startswith("tokenizing train"))
        if len(written) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(split_folder, bpe, rows, settings("killed"), seed=0, executor=Executor(1, ends_at_the_fourth))
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed/store").rglob("*.npy")}
    assert len(times) == 4
    tokenize(split_folder, bpe, rows, settings("killed"), seed=0)
    assert {path: path.stat().st_mtime_ns for path in times} == times  # those were not made again

    def files(name: str):
        paths = (path for path in (tmp_path / name).rglob("*") if path.is_file())
        place = f"/{name}/store".encode()
        return {path.relative_to(tmp_path / name): path.read_bytes().replace(place, b"") for path in paths}

    assert files("killed") == files("whole")
    assert DataLoader(rows / "train", seed=0, batch=4).batch(0)["tokens"].shape == (4, 32)
