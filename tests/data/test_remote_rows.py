"""Rows that are written to and read from elsewhere, killed and interrupted writers, and full disks."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from affinage.data import row_files
from affinage.data.feed import RowFeed
from affinage.data.pool import PoolRows
from affinage.data.row_order import BLOCK, WINDOW
from affinage.data.rows import pack_rows
from affinage.data.shards import open_url
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError
from affinage.recipe.data import RowsSettings


class CountingFileSystem(MemoryFileSystem):
    """An object store in memory that notes what it is asked for."""

    protocol = "counting"
    store: dict = {}
    pseudo_dirs = [""]
    reads: Counter = Counter()
    writes: Counter = Counter()
    failing: set = set()

    def cat_file(self, path, start=None, end=None, **kwargs):
        self.reads[self._strip_protocol(path), start, end] += 1
        return super().cat_file(path, start, end, **kwargs)

    def put_file(self, lpath, rpath, *arguments, **kwargs):
        if any(name in rpath for name in self.failing):
            raise ConnectionResetError("the network is gone")
        self.writes[os.path.basename(rpath)] += 1
        return super().put_file(lpath, rpath, *arguments, **kwargs)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("counting://", "memory://"))


@pytest.fixture
def store():
    fsspec.register_implementation("counting", CountingFileSystem, clobber=True)
    for each in (CountingFileSystem.store, CountingFileSystem.reads, CountingFileSystem.writes):
        each.clear()
    CountingFileSystem.failing = set()
    return CountingFileSystem


SETTINGS = RowsSettings(context=32, shards=8, url="counting://bucket/rows")


def test_rows_elsewhere_are_the_rows_here(store, split_folder: Path, bpe: Tokenizer, tmp_path: Path):
    summary = pack_rows(split_folder, bpe, tmp_path / "there", SETTINGS, seed=0)
    pack_rows(split_folder, bpe, tmp_path / "here", SETTINGS.model_copy(update={"url": ""}), seed=0)
    assert summary["url"] == "counting://bucket/rows/there"
    assert not list((tmp_path / "there" / "train").rglob("rows-*.npy"))
    names = {name: content.getvalue() for name, content in store.store.items()}
    for shard in (tmp_path / "here" / "train").rglob("rows-*.npy"):
        assert names[f"/bucket/rows/there/train/{shard.relative_to(tmp_path / 'here' / 'train')}"] == shard.read_bytes()
    assert not [name for name in names if name.endswith(".npy.json")]
    assert len([name for name in names if name.endswith("rows.json")]) == 4

    near, far = (RowFeed(tmp_path / place / "train", seed=0, batch=16) for place in ("here", "there"))
    for step in (0, 3, 100):
        for key, value in near.batch(step).items():
            assert (value == far.batch(step)[key]).all()
    assert near.where(5) == far.where(5)


@pytest.mark.parametrize("where", ["bucket", "google_bucket"])
def test_rows_in_a_bucket_are_the_rows_here(where: str, request, split_folder: Path, bpe: Tokenizer, tmp_path: Path):
    url = request.getfixturevalue(where)("rows")
    for place in ("there", "here"):
        settings = SETTINGS.model_copy(update={"url": url if place == "there" else ""})
        pack_rows(split_folder, bpe, tmp_path / place, settings, seed=0)
    assert not list((tmp_path / "there" / "train").rglob("rows-*.npy"))  # the shards are not here
    near, far = (RowFeed(tmp_path / place / "train", seed=0, batch=16) for place in ("here", "there"))
    for step in (0, 3, 100):
        assert all((value == far.batch(step)[key]).all() for key, value in near.batch(step).items())


def test_a_cold_store_is_read_in_blocks_each_once_an_epoch(store, tmp_path: Path):
    rows, context, batch = 50_000, 8, 256
    folder = tmp_path / "train" / "web.en"
    folder.mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(10, 60_000, (rows, context)).astype(np.uint16)
    files = row_files.write_rows(folder, [tokens], rows=rows, context=context, shards=5, dtype=np.uint16)
    filesystem, path = open_url("counting://bucket/big")
    for name in files:
        filesystem.put_file(str(folder / name), f"{path}/{name}")
        (folder / name).unlink()
    told = {"rows": rows, "context": context, "files": files, "url": "counting://bucket/big", "dtype": "uint16"}
    row_files.write_facts(folder, told)

    feed = RowFeed(tmp_path / "train", seed=0, batch=batch)
    assert not store.reads  # opening looks at sizes only
    seen = [feed.batch(0)["tokens"][:, 0]]
    blocks = -(-rows // BLOCK)
    edges = len(files) - 1  # where a block lies in two shards
    assert sum(store.reads.values()) <= 2 * WINDOW + edges  # this window and the next, not a request for each row
    for step in range(1, rows // batch):
        seen.append(feed.batch(step)["tokens"][:, 0])
    assert sum(store.reads.values()) <= blocks + 2 * WINDOW + edges  # of the next epoch, its first windows
    assert max(store.reads.values()) == 1 or Counter(store.reads.values())[1] >= blocks - WINDOW
    counted = Counter(np.concatenate(seen).tolist())
    assert not counted - Counter(tokens[:, 0].tolist())  # no row twice in an epoch


def test_a_failed_read_is_told_and_can_be_tried_again(store, split_folder: Path, bpe: Tokenizer, tmp_path: Path):
    pack_rows(split_folder, bpe, tmp_path, SETTINGS, seed=0)
    feed = RowFeed(tmp_path / "train", seed=0, batch=4)
    lost = dict(store.store)
    store.store.clear()
    with pytest.raises(UserError, match="bucket/rows"):
        feed.batch(0)
    store.store.update(lost)
    assert feed.batch(0)["tokens"].shape == (4, 32)
    name = next(name for name in lost if name.endswith(".npy"))
    del store.store[name]
    with pytest.raises(UserError, match="is gone"):
        RowFeed(tmp_path / "train", seed=0, batch=4)


def test_after_a_failed_upload_only_the_rest_is_written(store, split_folder: Path, bpe: Tokenizer, tmp_path: Path):
    store.failing = {"tales.en/rows-00001"}
    with pytest.raises(UserError, match="the network is gone"):
        pack_rows(split_folder, bpe, tmp_path, SETTINGS, seed=0)
    before = dict(store.writes)
    store.failing, store.writes = set(), Counter()
    pack_rows(split_folder, bpe, tmp_path, SETTINGS, seed=0)
    assert sum(count for name, count in (store.writes + Counter(before)).items() if name.endswith(".npy")) == 8
    assert not [name for name in store.store if name.endswith(".npy.json")]


def test_a_place_that_cannot_be_opened_is_told(split_folder: Path, bpe: Tokenizer, tmp_path: Path):
    with pytest.raises(UserError, match="cannot be opened"):
        pack_rows(split_folder, bpe, tmp_path, RowsSettings(context=32, url="nowhere://bucket"), seed=0)


PROGRAM = """
import os, sys
from pathlib import Path
from affinage.data import rows, shards
from affinage.data.tokenizer import Tokenizer
from affinage.recipe.data import RowsSettings
written, write = 0, shards.atomic_file
def until_the_fifth(path):
    global written
    written += 1
    if written == 5:
        Path(f"{path}.partial").write_bytes(b"half a shard")
        os.kill(os.getpid(), 9)
    return write(path)
shards.atomic_file = until_the_fifth
split, tokenizer, folder, settings = sys.argv[1:]
settings = RowsSettings.model_validate_json(settings)
rows.pack_rows(Path(split), Tokenizer.load(tokenizer), Path(folder), settings, seed=0)
"""


def test_killed_in_the_middle_it_goes_on_and_ends_with_the_same_bytes(
    split_folder: Path, bpe: Tokenizer, tmp_path: Path
):
    model = tmp_path / "tokenizer"
    model.mkdir()
    bpe.write(model)
    settings = {
        name: RowsSettings(context=32, shards=8, url=f"file://{tmp_path}/{name}-store", packing="best-fit")
        for name in ("killed", "whole")
    }
    arguments = [split_folder, model, tmp_path / "killed" / "rows", settings["killed"].model_dump_json()]
    killed = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, arguments)], timeout=300)
    assert killed.returncode == -9
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed-store").rglob("*.npy")}
    assert len(times) == 3  # one more file is the lineage of the first two
    for name, each in settings.items():
        pack_rows(split_folder, bpe, tmp_path / name / "rows", each, seed=0)
    for path, time in times.items():
        assert path.stat().st_mtime_ns == time  # those were not made again

    def content(name: str) -> dict[str, bytes]:
        found = {}
        for place in (tmp_path / name, tmp_path / f"{name}-store"):
            for path in place.rglob("*"):
                if path.is_file() and path.name != "packed.json":
                    read = path.read_bytes().replace(f"/{name}-store/".encode(), b"/store/")
                    found[str(path.relative_to(place))] = read
        return found

    assert content("killed") == content("whole")
    assert RowFeed(tmp_path / "killed" / "rows" / "train", seed=0, batch=4).batch(0)["tokens"].shape == (4, 32)


def test_pools_of_several_folders_read_as_one(split_folder: Path, bpe: Tokenizer, tmp_path: Path):
    pack_rows(split_folder, bpe, tmp_path, RowsSettings(context=32, shards=8), seed=0)
    folders = [row_files.open_rows(path) for path in sorted((tmp_path / "train").iterdir())]
    pool = PoolRows(folders, (0, "x"))
    whole = np.concatenate([shard for files in folders for shard in files.shards])
    assert (pool.read_block(0) == whole[:BLOCK]).all()
    assert [pool.locate(row) for row in (0, folders[0].rows)] == [(0, 0), (1, 0)]
    assert (folders[0].read_range(1, folders[0].rows) == whole[1 : folders[0].rows]).all()
