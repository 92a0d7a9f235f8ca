"""How far the reading of one part of the sources is, kept so that a stage that was killed goes on from there."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from affinage.data.finished import Finished
from affinage.data.funnel import Funnel


@dataclass
class Progressed:
    """The document files that a task finished, and what is in them."""

    of: str  # fingerprint of what was to be read, and how
    funnel: Funnel = field(default_factory=Funnel)
    not_sampled: int = 0
    taken: int = 0  # bytes of text
    files: list[str] = field(default_factory=list)
    complete: bool = False
    state: dict[str, Any] | None = None  # where a stream goes on

    @staticmethod
    def read(folder: Path, stem: str, of: str) -> "Progressed":
        """What an earlier attempt at the same work noted, if its files are still there; else the beginning."""
        noted = Finished(folder).get(stem)
        if noted is None or noted["of"] != of or not all((folder / name).is_file() for name in noted["files"]):
            return Progressed(of)
        return Progressed(**noted | {"funnel": Funnel.from_json(noted["funnel"])})

    def write(self, folder: Path, stem: str) -> None:
        """Note how far it is; the files must be finished."""
        Finished(folder).put(stem, vars(self) | {"funnel": self.funnel.to_json()})


def fingerprint(*what: Any) -> str:
    """Equal for equal work."""
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()
