"""Mixtures in stages and the order of rows: against counting row by row."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.data.feed import RowFeed
from affinage.data.mixture import SLOTS, Group, Mixture, pools_of
from affinage.data.row_files import write_facts, write_rows
from affinage.data.row_order import Shuffle
from affinage.errors import UserError

GROUPS = {
    "web.en": Group("web", "en", 40),
    "web.fr": Group("web", "fr", 20),
    "wiki.en": Group("wiki", "en", 10),
    "wiki.fr": Group("wiki", "fr", 7),
}
STAGES = [
    (0, {"web": 3, "wiki": 1}),
    (300, {"web": 1, "wiki": 1}),
    (700, {"en": 0.5, "fr": 0.5}),
    (900, {"wiki": 1}),
]
BATCH, STEPS = 8, 1100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, (name, group) in enumerate(GROUPS.items()):
        (tmp_path / name).mkdir()
        tokens = np.full((group.rows, 8), 10, np.uint16)
        tokens[:, 0] = 1000 * (number + 1) + np.arange(group.rows)
        files = write_rows(tmp_path / name, [tokens], rows=group.rows, context=8, shards=2, dtype=np.uint16)
        told = {"source": group.source, "language": group.language, "rows": group.rows, "context": 8, "files": files}
        write_facts(tmp_path / name, told)
    return tmp_path


@given(
    rows=st.integers(1, 400), block=st.integers(1, 9), window=st.integers(1, 6), epoch=st.integers(0, 3),
)  # fmt: skip
def test_every_epoch_has_every_row_once_and_can_be_inverted(rows: int, block: int, window: int, epoch: int):
    order = Shuffle(rows, (0, "x"), block=block, window=window)
    places = order.rows_at(np.arange(epoch * rows, (epoch + 1) * rows)).tolist()
    assert sorted(places) == list(range(rows))
    assert [order.position(row, epoch) for row in places] == list(range(epoch * rows, (epoch + 1) * rows))


def test_a_window_needs_its_blocks_only_and_epochs_differ():
    order = Shuffle(1003, (0, "x"), block=10, window=4)
    upcoming = order.blocks_from(0)
    for window in range(60):  # into the third epoch
        blocks = next(upcoming)
        assert len(blocks) <= 5
        first = window % 26 * 40 + window // 26 * 1003
        height = min(40, 1003 - window % 26 * 40)
        assert set((order.rows_at(np.arange(first, first + height)) // 10).tolist()) == set(blocks)
        assert order.window_of(first) == order.window_of(first + height - 1) == window
    start = np.arange(50)
    assert (order.rows_at(start) != order.rows_at(1003 + start)).any()
    assert (Shuffle(1003, (1, "x"), block=10, window=4).rows_at(start) != order.rows_at(start)).any()


@given(
    rows=st.integers(1, 60), positions=st.lists(st.integers(0, 200), min_size=1, max_size=20), block=st.integers(1, 9),
)  # fmt: skip
def test_rows_of_positions_are_the_same_asked_one_by_one(rows: int, positions: list[int], block: int):
    order = Shuffle(rows, (0, "x"), block=block, window=2)
    one_by_one = [order.rows_at(np.array([position])).item() for position in positions]
    assert order.rows_at(np.array(positions)).tolist() == one_by_one


def test_large_sets_of_blocks_are_inverted_too():
    order = Shuffle(200_000, (0, "x"), block=2, window=3)  # 100,000 blocks: beyond the size that has a table
    for position in (0, 5, 99_999, 199_999):
        assert order.position(order.rows_at(np.array([position])).item(), 0) == position


def test_stages_change_at_their_step_and_pools_go_on_where_they_were(folder: Path):
    feed = RowFeed(folder, seed=0, batch=BATCH, mixture=STAGES)
    places = [place for step in range(STEPS) for place in feed.where(step)]
    for (first, weights), last in zip(STAGES, [300, 700, 900, STEPS]):
        drawn = Counter(
            next(key for key in weights if key in name.split(".")) for name, _ in places[first * BATCH : last * BATCH]
        )
        for name, weight in weights.items():
            share = drawn[name] / (last - first) / BATCH
            assert share == pytest.approx(weight / sum(weights.values()), abs=2 / SLOTS + 2 / BATCH / (last - first))
    # `wiki` is a pool of 17 rows in the stages 0, 1 and 3: their draws, one after the other, are whole epochs.
    wiki = [place for place in [*places[: 700 * BATCH], *places[900 * BATCH :]] if place[0].startswith("wiki")]
    for epoch in range(len(wiki) // 17):
        assert len(set(wiki[epoch * 17 :][:17])) == 17


def test_steps_of_a_row_are_those_that_a_walk_over_all_steps_finds(folder: Path):
    for mixture in (None, STAGES):
        feed = RowFeed(folder, seed=3, batch=BATCH, mixture=mixture)
        expected: dict[tuple[str, int], list[int]] = {}
        for step in range(STEPS):
            for place in feed.where(step):
                expected.setdefault(place, []).append(step)
        for place in [("web.en", 0), ("web.en", 39), ("wiki.fr", 6), ("wiki.en", 3), ("web.fr", 19)]:
            assert feed.steps_of(*place, STEPS) == expected[place]


def test_epochs_count_what_was_drawn(folder: Path):
    feed = RowFeed(folder, seed=0, batch=BATCH, mixture=STAGES)
    drawn = Counter(name for step in range(STEPS) for name, _ in feed.where(step))
    for name, epochs in feed.epochs(STEPS).items():
        assert epochs == pytest.approx(drawn[name] / GROUPS[name].rows, abs=2)
    pools = {"wiki": ("wiki.en", "wiki.fr"), "en": ("web.en", "wiki.en")}
    one = RowFeed(folder, seed=0, batch=BATCH, mixture=[(0, {"wiki": 1})]).epochs(17)
    assert one == {"web.en": 0, "web.fr": 0, **dict.fromkeys(pools["wiki"], 8.0)}


@pytest.mark.parametrize("hosts", [2, 4])
def test_any_number_of_hosts_reads_the_same_batches(folder: Path, hosts: int):
    one, many = (RowFeed(folder, seed=0, batch=BATCH, mixture=STAGES) for _ in range(2))
    for step in (0, 299, 300, 899, 900, 5000):
        parts = [many.batch(step, host, hosts) for host in range(hosts)]
        for key, whole in one.batch(step).items():
            assert (np.concatenate([part[key] for part in parts]) == whole).all()


def test_names_stand_for_sources_languages_and_both():
    assert pools_of({"en": 1, "fr": 0}, GROUPS) == {("web.en", "wiki.en"): 1}
    assert pools_of({"web": 1, "wiki.fr": 2}, GROUPS) == {("web.en", "web.fr"): 1, ("wiki.fr",): 2}
    assert pools_of({"wiki.en": 2, "en": 1}, GROUPS) == {("web.en",): 1, ("wiki.en",): 2}
    assert pools_of({"wiki.en": 0, "en": 1}, GROUPS) == {("web.en",): 1}
    with pytest.raises(UserError, match=r"both 'web' and 'en' stand for the rows of 'web\.en'"):
        pools_of({"web": 1, "en": 1}, GROUPS)
    with pytest.raises(UserError) as raised:
        pools_of({"wikki": 1}, GROUPS)
    assert "Did you mean `wiki`" in str(raised.value) and raised.value.where == "pretrain.mixture"


def test_a_mixture_draws_by_arithmetic_what_a_walk_would():
    mixture = Mixture(GROUPS, STAGES, BATCH)
    taken: Counter[tuple[str, ...]] = Counter()
    for step in range(STEPS):
        draws = mixture.draws(step * BATCH, BATCH)
        lines = [(line, draw.pool, at) for draw in draws for line, at in zip(draw.lines, draw.positions, strict=True)]
        for row, (line, pool, position) in enumerate(sorted(lines)):
            assert line == row and position == taken[pool]
            taken[pool] += 1
