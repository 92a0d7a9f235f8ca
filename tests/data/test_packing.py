"""Layouts of documents in rows, against the documents themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinage.data.dataloader import segments
from affinage.data.packing import Layout, best_fit, end_to_end, in_bins, whole_where_they_fit
from affinage.data.special_tokens import BOS, EOS, PAD

CONTEXT = 12
lengths_of_documents = st.lists(st.integers(2, 40), min_size=1, max_size=60).map(np.array)


def documents_of(lengths: np.ndarray) -> list[np.ndarray]:
    """<s> text </s>, in which every token of text is another one."""
    ends = np.cumsum(lengths) + 1000
    return [np.array([BOS, *range(end - length + 1, end - 1), EOS]) for length, end in zip(lengths, ends)]


def rows_of(layout: Layout, documents: list[np.ndarray], first: int = 0) -> np.ndarray:
    def read(document: int, start: int, stop: int) -> np.ndarray:
        return documents[document][start:stop]

    return np.concatenate(list(layout.blocks(read, first, layout.rows, CONTEXT, np.int64)))


@given(lengths_of_documents, st.sampled_from([1, 3, 20, 1000]))
def test_best_fit_keeps_documents_whole_and_loses_none(lengths: np.ndarray, window: int):
    documents = documents_of(lengths)
    layout = whole_where_they_fit(lengths, CONTEXT, window)
    rows = rows_of(layout, documents)
    assert sorted(rows[rows >= 1000]) == sorted(token for document in documents for token in document[1:-1])
    assert np.count_nonzero(rows != PAD) == lengths.sum()
    assert layout.cut.tolist() == (lengths > CONTEXT).tolist()
    assert (np.diff(layout.row) >= 0).all()
    spelled = [f" {' '.join(map(str, row))} " for row in rows]
    for document in documents:
        if len(document) <= CONTEXT:  # together, and in order
            assert any(f" {' '.join(map(str, document))} " in row for row in spelled)


@given(lengths_of_documents)
def test_no_token_sees_another_document(lengths: np.ndarray):
    """Also the rest of a long document, which has no <s>, is a segment of its own, and positions begin with it."""
    documents = documents_of(lengths)
    owner = {token: i for i, document in enumerate(documents) for token in document.tolist() if token >= 1000}
    for layout in (whole_where_they_fit(lengths, CONTEXT), end_to_end(lengths, CONTEXT)):
        tokens = rows_of(layout, documents)
        segment_ids, positions = segments(tokens)
        for row, ids, places in zip(tokens.tolist(), segment_ids.tolist(), positions.tolist(), strict=True):
            seen: dict[int, int] = {}
            for t, (token, segment) in enumerate(zip(row, ids, strict=True)):
                assert token < 1000 or seen.setdefault(segment, owner[token]) == owner[token]
                same = t and segment == ids[t - 1]
                assert places[t] == (places[t - 1] + 1 if same else 0)


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


def test_bins_become_rows_in_their_order_waste_little_and_refuse_what_does_not_fit():
    layout = in_bins([[2, 0], [1]], np.array([3, 4, 5]))
    assert layout.row.tolist() == [0, 0, 1] and layout.start.tolist() == [0, 5, 0]
    assert sorted(map(sorted, best_fit([5, 12, 8, 3, 20, 11], 20))) == [[0, 3, 5], [1, 2], [4]]
    with pytest.raises(ValueError):
        best_fit([5, 21], 20)
    lengths = np.clip(np.random.default_rng(0).lognormal(2.0, 1.0, 20_000), 2, None).astype(int)
    assert whole_where_they_fit(lengths, 64).rows * 64 / lengths.sum() < 1.01
