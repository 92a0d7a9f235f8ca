import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from affinage.data.batch import segments
from affinage.data.feed import RowFeed
from affinage.data.mixture import SLOTS
from affinage.data.permutation import permuted
from affinage.data.row_files import write_facts, write_rows
from affinage.data.special_tokens import BOS, EOS
from affinage.data.validation_rows import validation_sets
from affinage.errors import UserError

CONTEXT = 8


def write_folder(folder: Path, rows: int, first: int, shards: int = 1, context: int = CONTEXT) -> Path:
    """Rows that can be told apart by their first token."""
    folder.mkdir(parents=True)
    tokens = np.full((rows, context), 10, np.uint16)
    tokens[:, 0] = first + np.arange(rows)
    files = write_rows(folder, [tokens], rows=rows, context=context, shards=shards, dtype=np.uint16)
    write_facts(folder, {"rows": rows, "context": context, "files": files})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "train" / "en", 70, 1000, shards=3)
    write_folder(tmp_path / "train" / "fr", 30, 2000)
    write_folder(tmp_path / "train" / "code", 5, 3000)
    return tmp_path / "train"


def first_tokens(feed: RowFeed, rows: int) -> list[int]:
    """The rows of the feed from its beginning, by their first token."""
    steps = -(-rows // feed.batch_size)
    return [int(token) for step in range(steps) for token in feed.batch(step)["tokens"][:, 0]][:rows]


def test_an_epoch_goes_once_through_all_rows_and_the_next_one_differs(folder: Path):
    feed = RowFeed(folder, seed=0, batch=8)
    assert feed.rows == 105 and feed.context == CONTEXT and feed.tokens_per_batch == 64
    seen = first_tokens(feed, 210)
    everything = [*range(1000, 1070), *range(2000, 2030), *range(3000, 3005)]
    assert sorted(seen[:105]) == sorted(seen[105:]) == everything
    assert seen[:105] != seen[105:] and seen[:105] != everything
    assert first_tokens(RowFeed(folder, seed=1, batch=8), 105) != seen[:105]


@pytest.mark.parametrize("size", [1, 2, 7, 1000, 2**16 - 1, 2**16, 70_001])
def test_permutations_are_complete_and_differ_with_their_purpose(size: int):
    places = [permuted(i, size, 0, "en", 0) for i in range(size)]
    assert sorted(places) == list(range(size))
    if size >= 1000:
        for purpose in ((1, "en", 0), (0, "fr", 0), (0, "en", 1)):
            # A random permutation leaves one index in its place, on average.
            same = sum(permuted(i, size, *purpose) == place for i, place in enumerate(places[:1000]))
            assert same < 10


def test_permutations_stay_as_they_are():
    """A run must go on with the same batches after affinage, numpy or Grain are updated."""
    assert [permuted(i, 10, 0, "en", 0) for i in range(10)] == [4, 9, 1, 5, 3, 2, 8, 7, 6, 0]
    assert [permuted(i, 100_000, 0, "en", 0) for i in range(5)] == [90414, 99725, 18654, 7326, 59649]


def test_a_batch_depends_on_seed_and_step_only(folder: Path):
    for weights in (None, {"en": 0.5, "fr": 0.5}):
        one, other = (RowFeed(folder, seed=5, batch=6, mixture=weights and [(0, weights)]) for _ in range(2))
        list(zip(range(3), one.iterate(0)))
        for step in (1000, 0, 17):
            for key, value in one.batch(step).items():
                assert (value == other.batch(step)[key]).all()


@pytest.mark.parametrize("hosts", [1, 2, 3, 6])
def test_hosts_divide_the_global_batch(folder: Path, hosts: int):
    feed = RowFeed(folder, seed=0, batch=6, mixture=[(0, {"en": 2, "fr": 1})])
    for step in (0, 3):
        parts = [feed.batch(step, host, hosts) for host in range(hosts)]
        for key, whole in feed.batch(step).items():
            assert (np.concatenate([part[key] for part in parts]) == whole).all()
    assert feed.batch(0)["rows"].tolist() == list(range(6))


def test_weights_hold_in_every_block_and_epochs_are_per_folder(folder: Path):
    feed = RowFeed(folder, seed=0, batch=64, mixture=[(0, {"en": 0.7, "fr": 0.25, "code": 0.05})])
    seen = np.array(first_tokens(feed, 2 * SLOTS))
    for block in np.split(seen // 1000, 2):
        assert Counter(block.tolist()) == {1: 717, 2: 256, 3: 51}
    for number, rows in ((1, 70), (2, 30), (3, 5)):
        of_folder = seen[seen // 1000 == number].tolist()
        for epoch in range(len(of_folder) // rows):
            assert sorted(of_folder[epoch * rows :][:rows]) == list(range(number * 1000, number * 1000 + rows))
    batches = [np.mean(seen[start : start + 64] // 1000 == 1) for start in range(0, len(seen), 64)]
    assert min(batches) > 0.65 and max(batches) < 0.75


def test_a_weight_may_be_zero_and_folders_left_out(folder: Path):
    feed = RowFeed(folder, seed=0, batch=32, mixture=[(0, {"en": 1, "fr": 0})])
    assert set(np.array(first_tokens(feed, 256)) // 1000) == {1}
    assert feed.rows == 70


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ({"de": 1}, "no rows of it"),
        ({"cod": 1}, "Did you mean `code`"),
        ({"en": -1}, "is -1"),
        ({"en": 0.0}, "all weights are zero"),
        ({}, "all weights"),
    ],
)
def test_weights_that_make_no_sense_are_refused(folder: Path, weights: dict[str, float], complaint: str):
    with pytest.raises(UserError) as raised:
        RowFeed(folder, seed=0, batch=4, mixture=[(0, weights)])
    assert complaint in str(raised.value)


def test_other_mistakes_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match="no rows here"):
        RowFeed(tmp_path / "nothing", seed=0, batch=4)
    write_folder(folder / "long", 3, 4000, context=16)
    with pytest.raises(UserError, match="different lengths"):
        RowFeed(folder, seed=0, batch=4)
    with pytest.raises(UserError, match="does not divide over 3 hosts"):
        RowFeed(folder / "en", seed=0, batch=4).batch(0, 0, 3)


def test_where_names_the_rows_of_a_batch(folder: Path):
    for weights in (None, {"en": 1, "code": 1}):
        feed = RowFeed(folder, seed=0, batch=16, mixture=weights and [(0, weights)])
        first = {"en": 1000, "fr": 2000, "code": 3000}
        places = feed.where(7)
        assert [first[name] + row for name, row in places] == feed.batch(7)["tokens"][:, 0].tolist()


def test_iterating_gives_the_batches_in_order_and_ends_its_threads(folder: Path):
    feed = RowFeed(folder, seed=0, batch=4)
    before = threading.active_count()
    batches = feed.iterate(5, prefetch=3, threads=2)
    for step in range(5, 25):
        assert (next(batches)["tokens"] == feed.batch(step)["tokens"]).all()
    batches.close()
    assert threading.active_count() == before


def test_an_error_in_a_thread_reaches_the_reader(folder: Path, monkeypatch: pytest.MonkeyPatch):
    feed = RowFeed(folder, seed=0, batch=4)

    def broken(original: Callable[..., object]) -> Callable[..., object]:
        return lambda step, *rest: original(step, *rest) if step < 2 else 1 / 0

    monkeypatch.setattr(feed, "batch", broken(feed.batch))
    batches = feed.iterate(0)
    next(batches), next(batches)
    with pytest.raises(ZeroDivisionError):
        next(batches)


def obvious_segments(row: list[int]) -> tuple[list[int], list[int]]:
    segment = position = 0
    segment_ids, positions = [], []
    for t, token in enumerate(row):
        if token == BOS or (t and row[t - 1] == EOS):
            segment += 1
            position = 0
        elif t:
            position += 1
        segment_ids.append(segment)
        positions.append(position)
    return segment_ids, positions


@given(arrays(np.int32, st.tuples(st.integers(1, 4), st.integers(1, 12)), elements=st.integers(0, 5)))
def test_segments_and_positions_are_counted_as_one_would_by_hand(tokens: np.ndarray):
    segment_ids, positions = segments(tokens)
    expected = [obvious_segments(row) for row in tokens.tolist()]
    assert segment_ids.dtype == positions.dtype == np.int32
    assert segment_ids.tolist() == [each for each, _ in expected]
    assert positions.tolist() == [each for _, each in expected]


def test_no_validation_text_is_no_validation_set(tmp_path: Path):
    assert validation_sets(tmp_path / "validation", batch=4) == {}
