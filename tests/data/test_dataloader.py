"""Documents in rows, and batches as a function of seed and step: against the documents, and counting row by row."""

import threading
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from affinage.data.dataloader import SLOTS, DataLoader, components_of, make_batch, prefetch, stages_of
from affinage.data.order import permuted
from affinage.data.special_tokens import BOS, EOS, PAD
from affinage.data.token_shards import best_fit, concatenate
from run_affinage import refused
from token_rows import write_tokens

CONTEXT, BATCH, STEPS = 8, 8, 550
ROWS = {"web.en": 40, "web.fr": 20, "wiki.en": 10, "wiki.fr": 7}
GROUPS = {name: tuple(name.split(".")) for name in ROWS}
FIRST = {name: 1000 * number for number, name in enumerate(ROWS, 1)}  # the first token of a group's first row
STAGES = [(0, {"web": 3, "wiki": 1}), (150, {"web": 1, "wiki": 1}), (350, {"en": 0.5, "fr": 0.5}), (450, {"wiki": 1})]
MIXTURES = {"all": None, "weights": [(0, {"web.en": 2, "wiki": 1})], "stages": STAGES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    for name, (source, language) in GROUPS.items():  # rows that can be told apart by their first token
        tokens = np.full((ROWS[name], CONTEXT), 10, np.uint16)
        tokens[:, 0] = FIRST[name] + np.arange(ROWS[name])
        write_tokens(folder / name, tokens, shards=2, source=source, language=language)
    return folder


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_batch_is_a_function_of_seed_and_step_for_any_number_of_hosts(folder: Path, mixture: str):
    one, used, other = (DataLoader(folder, seed=seed, batch=BATCH, mixture=MIXTURES[mixture]) for seed in (5, 5, 6))
    list(zip(range(3), used.iterate(0)))
    for step in (500, 0, 149, 150, 449, 450, 5000):
        whole = one.batch(step)
        assert [FIRST[name] + row for name, row in one.where(step)] == whole["tokens"][:, 0].tolist()
        assert whole["rows"].tolist() == list(range(BATCH))
        for hosts in (1, 2, 4, 8):  # whose batches may be made together with those before
            before = min(step, 3)
            parts = [used.batches(step - before, before + 1, host, hosts)[-1] for host in range(hosts)]
            assert all((np.concatenate([part[key] for part in parts]) == whole[key]).all() for key in whole)
    assert one.where(0) != other.where(0)


@pytest.mark.parametrize("mixture", ["all", "stages"])
def test_what_is_drawn_is_what_a_walk_over_all_steps_finds(folder: Path, mixture: str):
    feed = DataLoader(folder, seed=3, batch=BATCH, mixture=MIXTURES[mixture])
    walk = [feed.where(step) for step in range(STEPS)]
    steps: dict[tuple[str, int], list[int]] = defaultdict(list)
    for step, places in enumerate(walk):
        for place in places:
            steps[place].append(step)
    for place in [("web.en", 0), ("web.en", 39), ("wiki.fr", 6), ("wiki.en", 3), ("web.fr", 19)]:
        assert feed.steps_of(*place, STEPS) == steps[place]
    for name, epochs in feed.epochs(STEPS).items():
        drawn = sum(len(found) for (group, _), found in steps.items() if group == name)
        assert epochs == pytest.approx(drawn / ROWS[name], abs=2)
    if mixture == "all":
        epochs = [[place for places in walk for place in places][start : start + 77] for start in (0, 77)]
        assert len(set(epochs[0])) == len(set(epochs[1])) == 77 and epochs[0] != epochs[1]
        return
    for (first, weights), last in zip(STAGES, [150, 350, 450, STEPS], strict=True):
        names = (name.split(".") for places in walk[first:last] for name, _ in places)
        drawn = Counter(next(key for key in weights if key in parts) for parts in names)
        for name, weight in weights.items():
            share = drawn[name] / drawn.total()
            assert share == pytest.approx(weight / sum(weights.values()), abs=2 / SLOTS + 2 / drawn.total())
    # `wiki` is a pool of 17 rows in the stages 0, 1 and 3: their draws, one after the other, are whole epochs.
    wiki = [place for places in [*walk[:350], *walk[450:]] for place in places if place[0].startswith("wiki")]
    for epoch in range(len(wiki) // 17):
        assert len(set(wiki[epoch * 17 :][:17])) == 17


@pytest.mark.parametrize(("weights", "components"), [
    ({"en": 1, "fr": 0}, {("web.en", "wiki.en"): 1}),
    ({"web": 1, "wiki.fr": 2}, {("web.en", "web.fr"): 1, ("wiki.fr",): 2}),
    ({"wiki.en": 2, "en": 1}, {("web.en",): 1, ("wiki.en",): 2}),
    ({"wiki.en": 0, "en": 1}, {("web.en",): 1}),
])  # fmt: skip
def test_names_stand_for_sources_languages_and_both(weights: dict, components: dict):
    assert components_of(weights, GROUPS) == components


@pytest.mark.parametrize("weights", [{"de": 1}, {"wikki": 1}, {"web.en": -1}, {"web.en": 0}, {}, {"web": 1, "en": 1}])
def test_weights_that_make_no_sense_are_refused(folder: Path, weights: dict[str, float]):
    raised = refused(DataLoader, folder, seed=0, batch=4, mixture=[(0, weights)])
    assert raised.where == "mixture"
    assert "wikki" not in weights or "Did you mean `wiki`" in raised.fix
    refused(DataLoader, folder / "nothing", seed=0, batch=4)


def test_iterating_gives_the_batches_in_order_and_ends_its_threads_and_errors_come_in_their_turn(folder: Path):
    feed = DataLoader(folder, seed=0, batch=4)
    before, batches = threading.active_count(), feed.iterate(5)
    for step in range(5, 50):
        assert (next(batches)["tokens"] == feed.batch(step)["tokens"]).all()
    batches.close()
    assert threading.active_count() == before
    made = prefetch(lambda step: [6 // (2 - step)], 0, 1)
    assert [next(made), next(made)] == [3, 6]
    with pytest.raises(ZeroDivisionError):
        next(made)
    refused(feed.batch, 0, 0, 3)  # 4 rows for 3 hosts


def test_permutations_stay_as_they_are():
    """A run must go on with the same batches after affinage or numpy are updated."""
    assert permuted(np.arange(10), 10, 0, "en", 0).tolist() == [1, 4, 3, 9, 7, 5, 6, 8, 0, 2]
    assert permuted(np.arange(5), 100_000, 0, "en", 0).tolist() == [20852, 34694, 93323, 75853, 93313]


@given(size=st.one_of(st.integers(1, 70), st.integers(1, 5000)), seed=st.integers(0, 9))
def test_permutations_of_any_size_have_every_index_once(size: int, seed: int):
    assert sorted(permuted(np.arange(size), size, seed, "x").tolist()) == list(range(size))
    large = permuted(np.array([0, 1, 2**40 + 12345, 2**41 - 1]), 2**41, seed)
    assert len(set(large.tolist())) == 4 and 0 <= large.min() <= large.max() < 2**41


def test_more_weights_than_slots_all_have_their_share():
    weights = {f"s{n}.en": 1.0 + (n % 7) for n in range(1500)}
    [stage] = stages_of({name: (name, "en") for name in weights}, [(0, weights)], 8)
    drawn = {name: len(taken) / 60_000 for (name,), taken, _ in stage.positions(np.arange(60_000))}
    assert drawn == pytest.approx({name: weight / sum(weights.values()) for name, weight in weights.items()}, rel=0.6)


def batch_of(tokens: np.ndarray) -> dict[str, np.ndarray]:
    return make_batch(tokens, np.ones_like(tokens), np.zeros(len(tokens)))


def obvious_segments(row: list[int]) -> tuple[list[int], list[int]]:
    segment, positions, ids = 0, [], []
    for t, token in enumerate(row):
        begins = token == BOS or (t and row[t - 1] == EOS)
        segment += bool(begins)
        positions.append(0 if begins or not t else positions[-1] + 1)
        ids.append(segment)
    return ids, positions


@given(arrays(np.int32, st.tuples(st.integers(1, 4), st.integers(1, 12)), elements=st.integers(0, 5)))
def test_segments_and_positions_are_counted_as_one_would_by_hand_and_padding_is_no_target(tokens: np.ndarray):
    batch = batch_of(tokens)
    assert batch["segment_ids"].dtype == batch["positions"].dtype == np.int32
    for row, ids, positions in zip(tokens.tolist(), batch["segment_ids"].tolist(), batch["positions"].tolist()):
        assert (ids, positions) == obvious_segments(row)
    assert (batch["loss_mask"] == (tokens != PAD)).all()


# ---- layouts of documents in rows

SEQ_LEN = 12
lengths_of_documents = st.lists(st.integers(2, 40), min_size=1, max_size=60).map(np.array)


def documents_of(lengths: np.ndarray) -> list[np.ndarray]:
    """<s> text </s>, in which every token of text is another one."""
    ends = np.cumsum(lengths) + 1000
    return [np.array([BOS, *range(end - length + 1, end - 1), EOS]) for length, end in zip(lengths, ends)]


@given(lengths_of_documents)
def test_best_fit_keeps_documents_whole_and_loses_none(lengths: np.ndarray):
    documents, layout = documents_of(lengths), best_fit(lengths, SEQ_LEN)
    rows = layout.fill(documents, SEQ_LEN)
    assert sorted(rows[rows >= 1000]) == sorted(token for document in documents for token in document[1:-1])
    assert np.count_nonzero(rows != PAD) == lengths.sum() and (np.diff(layout.row) >= 0).all()
    spelled = [f" {' '.join(map(str, row))} " for row in rows]
    for document in documents:
        if len(document) <= SEQ_LEN:  # together, and in order
            assert any(f" {' '.join(map(str, document))} " in row for row in spelled)


@given(lengths_of_documents)
def test_no_token_sees_another_document(lengths: np.ndarray):
    """Also the rest of a long document, which has no <s>, is a segment of its own."""
    for layout in (best_fit(lengths, SEQ_LEN), concatenate(lengths, SEQ_LEN)):
        ids = batch_of(layout.fill(documents_of(lengths), SEQ_LEN))["segment_ids"]
        owners: dict[tuple[int, int], set[int]] = defaultdict(set)  # by row and segment
        for document, row, start, stop in zip(layout.document, layout.row, layout.start, layout.stop):
            for segment in ids[row, start:stop]:
                owners[row, segment].add(document)
        assert all(len(documents) == 1 for documents in owners.values())


@given(lengths_of_documents, st.integers(0, 1))
def test_concatenated_documents_are_the_stream_cut_at_the_length_of_a_row(lengths: np.ndarray, overlap: int):
    documents = documents_of(lengths)
    stream, stride = np.concatenate(documents), SEQ_LEN - overlap
    rows = concatenate(lengths, SEQ_LEN, overlap).fill(documents, SEQ_LEN)
    for number, row in enumerate(rows):
        expected = stream[number * stride : number * stride + SEQ_LEN]
        assert (row == np.pad(expected, (0, SEQ_LEN - len(expected)), constant_values=PAD)).all()
    assert len(rows) == max(1, -(-(len(stream) - overlap) // stride))


def test_best_fit_wastes_little():
    assert best_fit(np.array([5, 12, 8, 3, 20, 11]), 20).rows == 3
    lengths = np.clip(np.random.default_rng(0).lognormal(2.0, 1.0, 20_000), 2, None).astype(int)
    assert best_fit(lengths, 64).rows * 64 / lengths.sum() < 1.01
