"""What a checkpoint says about the run that made it, and how that differs from what a run is now."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from affinage.differing import differing
from affinage.errors import UserError, plain

IDENTITY = "identity"  # key of the facts that decide over a run's numbers
_ABSENT = "(not there)"
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*")  # in YAML, and in a shell


@dataclass(frozen=True)
class Difference:
    """One fact, by its dotted name, as it was saved and as it is now."""

    name: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{plain(self.name)}: {_short(self.saved)} -> {_short(self.now)}"


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """The facts that are not the same, in the order of their names; of lists of mappings, what in them is not."""
    before, after = dict(_leaves(saved)), dict(_leaves(now))
    return [
        Difference(key, *pair)
        for name in sorted({*before, *after})
        for key, pair in differing([before.get(name, _ABSENT), after.get(name, _ABSENT)], absent=_ABSENT, key=name)
    ]


def refuse_changes(
    meta: Mapping[str, Any], now: Mapping[str, Any], accepted: Collection[str], *, where: str, setting: str
) -> list[Difference]:
    """Compare the identity in a checkpoint's facts with that of the run that wants to go on from it.

    Args:
        meta: as `CheckpointStore.meta` gives it; one without an identity, such as an import's, fits any run.
        now: the identity of the run.
        accepted: names of facts that may differ; `schedule` stands for `schedule.peak_lr` and all others below it.
        where: of the checkpoints, for the message.
        setting: under which the user accepts changes, for the message.

    Returns:
        The differences that were accepted.

    Raises:
        UserError: with all differences that were not accepted.
    """
    saved = meta.get(IDENTITY)
    found = [] if saved is None else differences(saved, now)
    refused = [each for each in found if not _covers(accepted, each.name)]
    if refused:
        listed = "".join(f"\n    {each}" for each in refused)
        names = ", ".join(dict.fromkeys(_to_accept(each.name) for each in refused))
        raise UserError(
            f"this run is not the one that was saved:{listed}",
            where=where,
            fix=f"Undo the change, or accept it by name: {setting}=[{names}].",
        )
    return found


def _covers(accepted: Collection[str], name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in accepted)


def _to_accept(name: str) -> str:
    """The narrowest name that accepts a difference and can be written as it is: of a file's path what stands before."""
    parts = name.split(".")
    found = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((each for each in found if _PLAIN.fullmatch(each)), json.dumps(plain(name), ensure_ascii=False))


def _leaves(facts: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names with values that are no mappings; an empty mapping is a value."""
    if isinstance(facts, Mapping) and facts:
        for name, value in facts.items():
            yield from _leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, list(facts) if isinstance(facts, tuple) else facts


def _short(value: Any, most: int = 80) -> str:
    text = plain(str(value))
    return text if len(text) <= most else f"{text[: most - 3]}..."
