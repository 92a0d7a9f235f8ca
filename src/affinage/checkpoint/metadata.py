"""What a checkpoint says of itself: its step, facts about its run, and the checksums of its arrays.

It stands in the metadata that Orbax writes with a step, with a hash of itself. Reading it needs no JAX.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affinage.errors import UserError

METADATA = "_CHECKPOINT_METADATA"  # Orbax's file of a step's metadata
COMMIT = "commit_success.txt"  # Orbax writes it last, when everything else of a step is on disk
_LARGEST = 2**26  # bytes; the metadata of ten thousand arrays take a few megabytes


class CorruptedError(ValueError):
    """A checkpoint is not what was saved; the message says in one line what is wrong."""


@dataclass(frozen=True)
class Metadata:
    """The metadata of one step.

    Attributes:
        step: its number.
        facts: about its run, JSON-able.
        checksums: see `affinage.checkpoint.checksums.checksums`; {} if it was saved without.
    """

    step: int
    facts: dict[str, Any]
    checksums: dict[str, list[Any]]

    @property
    def fingerprint(self) -> str:
        """A hash of all arrays: the same for every checkpoint of the same numbers, whoever saved it on which mesh."""
        return _digest(self.checksums)

    def to_json(self) -> dict[str, Any]:
        """As `custom_metadata` of Orbax, which writes it later: a copy."""
        content = json.loads(json.dumps(vars(self)))
        return {"affinage": content | {"hash": _digest(content)}}


def read_metadata(folder: Any) -> Metadata:
    """Read the metadata of the step in a folder.

    Args:
        folder: of the step, a path of pathlib or of etils.

    Raises:
        CorruptedError: they are not what was saved, or of another step than the folder is named after.
        OSError: they cannot be read.
    """
    with (folder / METADATA).open("rb") as file:
        content = file.read(_LARGEST + 1)
    try:
        custom = json.loads(content)["custom_metadata"]
        if custom.keys() == {"step", "facts"}:  # of the first edition, which hashed the files
            return Metadata(custom["step"], dict(custom["facts"]), {})
        found = custom["affinage"]
        digest = found.pop("hash")
        metadata = Metadata(**found)
        is_intact = digest == _digest(vars(metadata))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptedError(f"{METADATA} cannot be read") from None
    if not is_intact:
        raise CorruptedError(f"{METADATA} is not what was written")
    if str(metadata.step) != folder.name:
        raise CorruptedError(f"it was saved as step {metadata.step}")
    return metadata


def fingerprint(folder: Path) -> str:
    """The fingerprint of the step in a folder; see `Metadata.fingerprint`. Raises UserError if it cannot be read."""
    try:
        return read_metadata(folder).fingerprint
    except (CorruptedError, OSError) as error:
        raise UserError(str(error), where=str(folder), fix="Name another checkpoint, or remove this one.") from error


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
