"""Rows that are written to and read from elsewhere; writers that were interrupted go on."""

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from affinage.config.data import PackingSettings
from affinage.data import executor
from affinage.data.dataloader import DataLoader
from affinage.data.row_order import BLOCK, WINDOW
from affinage.data.token_shards import open_url, write_facts, write_tokens
from affinage.data.tokenize import tokenize
from affinage.data.tokenizer import Tokenizer
from affinage.errors import TransientError, UserError

URL = "memory://bucket/rows"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the object store in memory holds, and what it is asked for."""
    store = SimpleNamespace(files=MemoryFileSystem.store, reads=Counter(), writes=Counter(), failing="")
    read, write = MemoryFileSystem.cat_file, MemoryFileSystem.put_file
    store.files.clear()

    def cat_file(filesystem, path, start=None, end=None, **others):
        store.reads[path, start, end] += 1
        return read(filesystem, path, start, end, **others)

    def put_file(filesystem, here, there, *arguments, **others):
        if store.failing and store.failing in there:
            raise ConnectionResetError("the network is gone")
        store.writes[there] += 1
        return write(filesystem, here, there, *arguments, **others)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    return store


def packed(split_folder: Path, tokenizer: Tokenizer, folder: Path, url: str = "", **others) -> Path:
    settings = PackingSettings(seq_len=32, num_shards=8, output_path=url)
    summary = tokenize(split_folder, tokenizer, folder, settings, seed=0, **others)
    assert summary["url"] == (f"{url}/{folder.name}" if url else "")
    return folder / "train"


def test_rows_elsewhere_are_the_rows_here(store: SimpleNamespace, split_folder: Path, bpe: Tokenizer, tmp_path: Path):
    here, there = (packed(split_folder, bpe, tmp_path / name, URL * (name == "there")) for name in ("here", "there"))
    assert not list(there.rglob("tokens-*.npy"))
    near, far = (DataLoader(folder, seed=0, batch=16) for folder in (here, there))
    for step in (0, 3, 100):
        assert all((value == far.batch(step)[key]).all() for key, value in near.batch(step).items())
    assert near.where(5) == far.where(5)
    stored = {name.removeprefix("/bucket/rows/there/train/"): file.getvalue() for name, file in store.files.items()}
    for shard in here.rglob("tokens-*.npy"):
        assert stored[str(shard.relative_to(here))] == shard.read_bytes()
    assert sum(name.endswith("/shards.json") for name in stored) == 4


def test_a_cold_store_is_read_in_blocks_each_once_an_epoch(store: SimpleNamespace, tmp_path: Path):
    rows, context, batch = 50_000, 8, 256
    folder, url = tmp_path / "train/web.en", "memory://bucket/big"
    tokens = np.random.default_rng(0).integers(10, 60_000, (rows, context)).astype(np.uint16)
    write_tokens(folder, tokens, shards=5)
    files = json.loads((folder / "shards.json").read_text())["files"]
    filesystem, path = open_url(url)
    for name in files:
        filesystem.put_file(str(folder / name), f"{path}/{name}")
        (folder / name).unlink()
    facts = {"rows": rows, "seq_len": context, "files": files, "url": url, "dtype": "uint16"}
    write_facts(folder, facts)
    store.reads.clear()

    feed = DataLoader(tmp_path / "train", seed=0, batch=batch)
    assert not store.reads  # opening looks at sizes only
    seen = [feed.batch(0)["tokens"][:, 0]]
    blocks = -(-rows // BLOCK)
    edges = len(files) - 1  # where a block lies in two shards
    assert sum(store.reads.values()) <= 2 * WINDOW + edges  # this window and the next, not a request for each row
    for step in range(1, rows // batch):
        seen.append(feed.batch(step)["tokens"][:, 0])
    assert sum(store.reads.values()) <= blocks + 2 * WINDOW + edges  # of the next epoch, its first windows
    counted = Counter(np.concatenate(seen).tolist())
    assert not counted - Counter(tokens[:, 0].tolist())  # no row twice in an epoch


def test_a_failed_read_is_told_and_can_be_tried_again(
    store: SimpleNamespace, split_folder: Path, bpe: Tokenizer, tmp_path: Path
):
    folder = packed(split_folder, bpe, tmp_path / "rows", URL)
    feed = DataLoader(folder, seed=0, batch=4)
    lost = dict(store.files)
    store.files.clear()
    with pytest.raises(UserError) as error:
        feed.batch(0)
    assert "bucket/rows" in error.value.where and error.value.fix
    store.files.update(lost)
    assert feed.batch(0)["tokens"].shape == (4, 32)
    del store.files[next(name for name in lost if name.endswith(".npy"))]
    with pytest.raises(UserError) as error:
        DataLoader(folder, seed=0, batch=4)
    assert "bucket/rows" in error.value.where and error.value.fix


def test_a_network_that_fails_for_a_while_is_waited_for_and_then_not_the_users_mistake(
    store: SimpleNamespace, split_folder: Path, bpe: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = packed(split_folder, bpe, tmp_path / "rows", URL)
    monkeypatch.setattr(executor, "PAUSES", (0.0, 0.0))
    feed = DataLoader(folder, seed=0, batch=4)
    read, failing = MemoryFileSystem.cat_file, iter([True, True, False])

    def cat_file(*arguments, **others):
        if next(failing, False):
            raise ConnectionResetError("the network is gone")
        return read(*arguments, **others)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    assert feed.batch(0)["tokens"].shape == (4, 32)
    failing = itertools.repeat(True)
    with pytest.raises(TransientError) as error:
        DataLoader(folder, seed=0, batch=4).batch(0)
    assert "bucket/rows" in error.value.where and error.value.fix


def test_after_a_failed_upload_only_the_rest_is_written(
    store: SimpleNamespace, split_folder: Path, bpe: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(executor, "PAUSES", (0.0,))
    store.failing = "tales.en/tokens-00001"
    with pytest.raises(TransientError) as error:
        packed(split_folder, bpe, tmp_path / "rows", URL)
    assert error.value.fix
    store.failing = ""
    packed(split_folder, bpe, tmp_path / "rows", URL)
    written = [count for name, count in store.writes.items() if name.endswith(".npy")]
    assert written == [1] * 8


def test_ended_in_the_middle_it_resumes_and_ends_with_the_same_bytes(
    split_folder: Path, bpe: Tokenizer, tmp_path: Path
):
    def settings(name: str) -> PackingSettings:
        return PackingSettings(
            seq_len=32, num_shards=8, output_path=f"file://{tmp_path}/{name}/store", strategy="best_fit"
        )

    tokenize(split_folder, bpe, tmp_path / "whole/rows", settings("whole"), seed=0)
    rows, written = tmp_path / "killed/rows", []

    def ends_at_the_fourth(doing: str) -> None:
        written.extend([doing] * doing.startswith("tokenizing train"))
        if len(written) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(split_folder, bpe, rows, settings("killed"), seed=0, progress=ends_at_the_fourth)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed/store").rglob("*.npy")}
    assert len(times) == 4
    tokenize(split_folder, bpe, rows, settings("killed"), seed=0)
    assert {path: path.stat().st_mtime_ns for path in times} == times  # those were not made again

    killed_files, whole_files = (
        {
            path.relative_to(tmp_path / name): path.read_bytes().replace(f"/{name}/store".encode(), b"")
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in ("killed", "whole")
    )
    assert killed_files == whole_files
    assert DataLoader(rows / "train", seed=0, batch=4).batch(0)["tokens"].shape == (4, 32)
