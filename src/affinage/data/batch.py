"""From rows of tokens to the batch that training reads."""

import numpy as np
from jaxtyping import Float, Integer

from affinage.data.row_files import RowFiles
from affinage.data.special_tokens import MARKS, Marks

Batch = dict[str, np.ndarray]


def segments(
    tokens: Integer[np.ndarray, "B S"], marks: Marks = MARKS
) -> tuple[Integer[np.ndarray, "B S"], Integer[np.ndarray, "B S"]]:
    """Segment ids and positions (index within the segment), int32 [B, S].

    A segment begins with <s>, and after </s>: what follows there without <s> is the rest of a long document.
    """
    begins = np.zeros(tokens.shape, bool) if marks.begin is None else tokens == marks.begin
    begins[:, 1:] |= tokens[:, :-1] == marks.end
    segment_ids = np.cumsum(begins, axis=1, dtype=np.int32)
    index = np.arange(tokens.shape[1], dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(begins, index, np.int32(0)), axis=1)
    return segment_ids, positions


def make_batch(
    tokens: Integer[np.ndarray, "B S"],
    mask: Integer[np.ndarray, "B S"],
    rows: Integer[np.ndarray, " B"],
    marks: Marks = MARKS,
) -> Batch:
    """The batch that training reads.

    `tokens`, `segment_ids`, `positions` int32 [B, S]; `loss_mask` float32 [B, S], 1 where the token counts as a target
    (`mask`, but never <pad>); `rows` int32 [B], the row's place in the global batch.
    """
    segment_ids, positions = segments(tokens, marks)
    counted = mask.astype(bool)
    if marks.pad != marks.end:  # else the fill counts for nothing because no token of its segment comes before it
        counted &= tokens != marks.pad
    loss_mask: Float[np.ndarray, "B S"] = counted.astype(np.float32)
    return {
        "tokens": tokens,
        "segment_ids": segment_ids,
        "positions": positions,
        "loss_mask": loss_mask,
        "rows": rows.astype(np.int32),
    }


def read_rows(files: RowFiles, rows: Integer[np.ndarray, " B"]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [B, S] of rows by their numbers, and uint8 [B, S], 1 where they are trained on."""
    tokens = np.empty((len(rows), files.context), np.int32)
    mask = np.ones((len(rows), files.context), np.uint8)
    files.read(rows, tokens, mask)
    return tokens, mask
