"""Files of weights that hold anything at all: read within their size, or refused in one message."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from affinage.errors import UserError
from affinage.hub.read import HubWeights

WHOLE = save({"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float16)}, {"format": "pt"})


def laid_out(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@st.composite
def fitting(draw: st.DrawFn) -> bytes:
    """Headers of every kind of number and many shapes that promise what is there: they get past a first look."""
    kind, width = draw(st.sampled_from([("F64", 8), ("F16", 2), ("BF16", 2), ("F8_E4M3", 1), ("I32", 4), ("", 1)]))
    shape = draw(st.lists(st.integers(0, 3), max_size=4) | st.sampled_from([[1] * 65, [0, 2**62], [0, 2**40, 2**40]]))
    size = width * int(np.prod(shape, dtype=object))
    return laid_out({"w": {"dtype": kind, "shape": shape, "data_offsets": [0, size]}}, bytes(size))


def read(folder: Path, contents: bytes) -> dict[str, np.ndarray]:
    (folder / "model.safetensors").write_bytes(contents)
    weights = HubWeights(folder)
    return {name: weights[name] for name in weights}


@settings(max_examples=40)
@example(b"")
@example(laid_out({}, length=2**63))
@example(laid_out({"w": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}, b"\0"))
@given(st.binary(max_size=64) | fitting())
def test_any_bytes_are_read_within_their_size_or_refused(tmp_path_factory: pytest.TempPathFactory, contents: bytes):
    folder = tmp_path_factory.getbasetemp() / "weights"
    folder.mkdir(exist_ok=True)
    try:
        found = read(folder, contents)
    except UserError as error:
        assert error.where == str(folder / "model.safetensors")
    else:
        assert sum(tensor.nbytes for tensor in found.values()) <= len(contents)


def test_what_is_whole_is_read_and_numbers_of_eight_bits_are_refused_by_what_they_are(tmp_path: Path):
    found = read(tmp_path, WHOLE)
    assert found["a.weight"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["b"].dtype == np.float16
    with pytest.raises(UserError, match="'w' has the dtype F8_E4M3"):
        read(tmp_path, laid_out({"w": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}, b"\0\0"))
