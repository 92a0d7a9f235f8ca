"""Layouts of documents in rows, against the documents themselves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from affinage.data.dataloader import segments
from affinage.data.special_tokens import BOS, EOS, PAD
from affinage.data.token_shards import best_fit, concatenate

SEQ_LEN = 12
lengths_of_documents = st.lists(st.integers(2, 40), min_size=1, max_size=60).map(np.array)


def documents_of(lengths: np.ndarray) -> list[np.ndarray]:
    """<s> text </s>, in which every token of text is another one."""
    ends = np.cumsum(lengths) + 1000
    return [np.array([BOS, *range(end - length + 1, end - 1), EOS]) for length, end in zip(lengths, ends)]


@given(lengths_of_documents)
def test_best_fit_keeps_documents_whole_and_loses_none(lengths: np.ndarray):
    documents = documents_of(lengths)
    layout = best_fit(lengths, SEQ_LEN)
    rows = layout.fill(documents, SEQ_LEN)
    assert sorted(rows[rows >= 1000]) == sorted(token for document in documents for token in document[1:-1])
    assert np.count_nonzero(rows != PAD) == lengths.sum()
    assert (np.diff(layout.row) >= 0).all()
    spelled = [f" {' '.join(map(str, row))} " for row in rows]
    for document in documents:
        if len(document) <= SEQ_LEN:  # together, and in order
            assert any(f" {' '.join(map(str, document))} " in row for row in spelled)


@given(lengths_of_documents)
def test_no_token_sees_another_document(lengths: np.ndarray):
    """Also the rest of a long document, which has no <s>, is a segment of its own, and positions begin with it."""
    documents = documents_of(lengths)
    owner = {token: i for i, document in enumerate(documents) for token in document.tolist() if token >= 1000}
    for layout in (best_fit(lengths, SEQ_LEN), concatenate(lengths, SEQ_LEN)):
        tokens = layout.fill(documents, SEQ_LEN)
        segment_ids, positions = segments(tokens)
        for row, ids, places in zip(tokens.tolist(), segment_ids.tolist(), positions.tolist(), strict=True):
            seen: dict[int, int] = {}
            for t, (token, segment) in enumerate(zip(row, ids, strict=True)):
                assert token < 1000 or seen.setdefault(segment, owner[token]) == owner[token]
                same = t and segment == ids[t - 1]
                assert places[t] == (places[t - 1] + 1 if same else 0)


@given(lengths_of_documents, st.integers(0, 1))
def test_concatenated_documents_are_the_stream_cut_at_the_length_of_a_row(lengths: np.ndarray, overlap: int):
    documents = documents_of(lengths)
    stream = np.concatenate(documents)
    rows = concatenate(lengths, SEQ_LEN, overlap).fill(documents, SEQ_LEN)
    stride = SEQ_LEN - overlap
    for number, row in enumerate(rows):
        expected = stream[number * stride : number * stride + SEQ_LEN]
        assert (row == np.pad(expected, (0, SEQ_LEN - len(expected)), constant_values=PAD)).all()
    assert len(rows) == max(1, -(-(len(stream) - overlap) // stride))


def test_best_fit_wastes_little():
    assert best_fit(np.array([5, 12, 8, 3, 20, 11]), 20).rows == 3
    lengths = np.clip(np.random.default_rng(0).lognormal(2.0, 1.0, 20_000), 2, None).astype(int)
    assert best_fit(lengths, 64).rows * 64 / lengths.sum() < 1.01
