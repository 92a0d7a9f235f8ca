"""Layouts of documents in rows, against the documents themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.data.batch import segments
from affinage.data.packing import Layout, best_fit, end_to_end, in_bins, whole_where_they_fit
from affinage.data.special_tokens import BOS, EOS, PAD

CONTEXT = 12
lengths_of_documents = st.lists(st.integers(2, 40), min_size=1, max_size=60).map(np.array)


def documents_of(lengths: np.ndarray) -> list[np.ndarray]:
    """<s> text </s>, in which every token of text is another one."""
    ends = np.cumsum(lengths) + 1000
    return [np.array([BOS, *range(end - length + 1, end - 1), EOS]) for length, end in zip(lengths, ends)]


def rows_of(layout: Layout, documents: list[np.ndarray], first: int = 0, last: int | None = None) -> np.ndarray:
    def read(document: int, start: int, stop: int) -> np.ndarray:
        return documents[document][start:stop]

    return np.concatenate(list(layout.blocks(read, first, last or layout.rows, CONTEXT, np.int64)))


@given(lengths_of_documents)
def test_best_fit_keeps_documents_whole_and_loses_none(lengths: np.ndarray):
    documents = documents_of(lengths)
    layout = whole_where_they_fit(lengths, CONTEXT)
    rows = rows_of(layout, documents)
    text = sorted(token for document in documents for token in document.tolist() if token >= 1000)
    assert sorted(rows[rows >= 1000].tolist()) == text
    assert np.count_nonzero(rows != PAD) == lengths.sum()
    assert layout.cut.tolist() == (lengths > CONTEXT).tolist()
    for document in documents:
        if len(document) <= CONTEXT:
            holding = [row for row in rows.tolist() if set(document.tolist()) <= set(row)]
            assert any(
                row[i : i + len(document)] == document.tolist() for row in holding for i in range(CONTEXT)
            )  # together, and in order


@given(lengths_of_documents)
def test_no_token_sees_another_document(lengths: np.ndarray):
    """Also the rest of a long document, which has no <s>, is a segment of its own, and positions begin with it."""
    documents = documents_of(lengths)
    owner = {token: i for i, document in enumerate(documents) for token in document.tolist() if token >= 1000}
    for layout in (whole_where_they_fit(lengths, CONTEXT), end_to_end(lengths, CONTEXT)):
        tokens = rows_of(layout, documents)
        segment_ids, positions = segments(tokens)
        for row, ids, places in zip(tokens.tolist(), segment_ids.tolist(), positions.tolist()):
            seen: dict[int, int] = {}
            for token, segment in zip(row, ids):
                if token >= 1000:
                    assert seen.setdefault(segment, owner[token]) == owner[token]
            for t in range(1, CONTEXT):
                same = ids[t] == ids[t - 1]
                assert places[t] == (places[t - 1] + 1 if same else 0)


@given(lengths_of_documents, st.integers(1, 20))
def test_small_windows_pack_as_faithfully(lengths: np.ndarray, window: int):
    documents = documents_of(lengths)
    rows = rows_of(whole_where_they_fit(lengths, CONTEXT, window), documents)
    assert sorted(rows[rows >= 1000]) == sorted(t for d in documents for t in d.tolist() if t >= 1000)
    assert (np.diff(whole_where_they_fit(lengths, CONTEXT, window).row) >= 0).all()


@given(lengths_of_documents, st.integers(0, 1))
def test_end_to_end_is_the_stream_cut_at_the_context(lengths: np.ndarray, overlap: int):
    documents = documents_of(lengths)
    stream = np.concatenate(documents)
    layout = end_to_end(lengths, CONTEXT, overlap)
    rows = rows_of(layout, documents)
    stride = CONTEXT - overlap
    for number, row in enumerate(rows):
        expected = stream[number * stride : number * stride + CONTEXT]
        assert (row == np.pad(expected, (0, CONTEXT - len(expected)), constant_values=PAD)).all()
    assert len(rows) == max(1, -(-(len(stream) - overlap) // stride))
    assert (rows_of(layout, documents, len(rows) // 2) == rows[len(rows) // 2 :]).all()  # a shard begins anywhere


def test_best_fit_wastes_little():
    lengths = np.clip(np.random.default_rng(0).lognormal(2.0, 1.0, 20_000), 2, None).astype(int)
    rows = whole_where_they_fit(lengths, 64).rows
    assert rows * 64 / lengths.sum() < 1.01


def test_bins_in_the_order_they_are_given():
    lengths = np.array([3, 4, 5])
    layout = in_bins([[2, 0], [1]], lengths)
    assert layout.row.tolist() == [0, 0, 1] and layout.start.tolist() == [0, 5, 0]
    assert best_fit([], 4) == []


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        best_fit([5], 4)
