"""An order of documents that depends on their ids and a seed, never on files, workers or machines."""

import hashlib
from collections.abc import Iterable

import numpy as np
import pyarrow as pa


def shuffle_keys(names: Iterable[str], seed: int, purpose: str) -> np.ndarray:
    """One pseudo-random key per name, uint64 [n]: sorting by it shuffles.

    The same name has the same key in every run with this `seed`; another `purpose` gives an independent order.
    """
    salt = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=32).digest()
    digests = b"".join([hashlib.blake2b(name.encode(), digest_size=8, key=salt).digest() for name in names])
    return np.frombuffer(digests, "<u8")


def document_keys(batch: pa.RecordBatch, seed: int, purpose: str) -> np.ndarray:
    """The shuffle keys of documents, uint64 [n]; an id is unique within its source only, so both count."""
    pairs = zip(batch.column("source").to_pylist(), batch.column("id").to_pylist())
    return shuffle_keys([document_name(source, name) for source, name in pairs], seed, purpose)


def document_name(source: str, id: str) -> str:
    """What no other document is called."""
    return f"{source}/{id}"
