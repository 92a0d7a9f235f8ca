"""Rows that are written to and read from elsewhere; writers that were interrupted resume."""

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from affinage import network
from affinage.config.data import PackingSettings
from affinage.data.dataloader import DataLoader
from affinage.data.tokenize import tokenize
from affinage.data.tokenizer import Tokenizer
from affinage.errors import TransientError, UserError
from run_affinage import refused
from source_forms import bytes_of

URL = "memory://bucket/rows"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the object store in memory holds, what was read and written, and what fails."""
    store = SimpleNamespace(files=MemoryFileSystem.store, read=[], written=Counter(), failing="", failures=iter(()))
    read, write = MemoryFileSystem.cat_file, MemoryFileSystem.pipe_file
    store.files.clear()

    def cat_file(filesystem, path, start=None, end=None, **others):
        store.read.append((path, start, end))
        if next(store.failures, False):
            raise ConnectionResetError("the network is gone")
        return read(filesystem, path, start, end, **others)

    def pipe_file(filesystem, path, *arguments, **others):
        if store.failing and store.failing in path:
            raise ConnectionResetError("the network is gone")
        store.written[path] += 1
        return write(filesystem, path, *arguments, **others)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    monkeypatch.setattr(network, "PAUSES", (0.0, 0.0))
    return store


def packed(split_folder: Path, tokenizer: Tokenizer, folder: Path, url: str = "", **others) -> Path:
    settings = PackingSettings(seq_len=32, num_shards=8, output_path=url)
    tokenize(split_folder, tokenizer, folder, settings, **others)
    return folder / "train"


def test_rows_elsewhere_are_the_rows_here(store: SimpleNamespace, split_folder: Path, bpe: Tokenizer, tmp_path: Path):
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


def test_what_is_gone_is_refused_and_a_network_that_fails_is_waited_for(store, split_folder, bpe, tmp_path):
    folder = packed(split_folder, bpe, tmp_path / "rows", URL)
    feed, files = DataLoader(folder, seed=0, batch=4), dict(store.files)
    store.failures = iter([True, True, False])
    assert feed.batch(0)["tokens"].shape == (4, 32)
    store.failures = itertools.repeat(True)
    unreachable = refused(feed.batch, 0)
    store.failures = iter(())
    store.files.clear()
    for error, kind in ((unreachable, TransientError), (refused(feed.batch, 0), UserError)):
        assert type(error) is kind and "bucket/rows" in error.where and error.fix
    store.files.update(files)
    assert feed.batch(0)["tokens"].shape == (4, 32)  # it can be tried again


def test_after_a_failed_upload_only_the_rest_is_written_and_the_bytes_are_the_same(store, split_folder, bpe, tmp_path):
    packed(split_folder, bpe, tmp_path / "whole/rows", "memory://whole")
    for store.failing in ("broken/rows/train/tales.en/tokens-00001", ""):
        try:
            packed(split_folder, bpe, tmp_path / "broken/rows", "memory://broken")
        except TransientError as error:
            assert store.failing and error.fix
    written = {name: count for name, count in store.written.items() if name.startswith("/broken")}
    assert [count for name, count in written.items() if name.endswith(".npy")] == [1] * 8
    made = []
    for name in ("whole", "broken"):
        own = {place: file.getvalue() for place, file in store.files.items() if place.startswith(f"/{name}")}
        own |= bytes_of(tmp_path / name)
        made.append({place.replace(name, ""): content.replace(name.encode(), b"") for place, content in own.items()})
    assert made[0] == made[1]
