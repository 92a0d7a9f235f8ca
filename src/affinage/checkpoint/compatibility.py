"""Whether a run may resume from a checkpoint: what decides about its numbers, as it was saved and as it is now."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from affinage.differing import differing
from affinage.errors import UserError, plain

IDENTITY = "identity"  # key of the facts that decide about a run's numbers
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*")  # needs no quotes in YAML and in a shell


class Difference(NamedTuple):
    """One fact, by its dotted name, as it was saved and as it is now."""

    name: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        saved, now = (plain(str(value))[:80] for value in (self.saved, self.now))
        return f"{plain(self.name)}: {saved} -> {now}"


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """The facts that are not the same, in the order of their names."""
    found = differing([saved, now], absent="(not there)")
    return sorted((Difference(name, *pair) for name, pair in found), key=lambda each: each.name)


def check_compatible(
    meta: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str], *, where: str
) -> list[Difference]:
    """Compare the identity in a checkpoint's facts with that of the run that is to resume from it.

    Args:
        meta: the checkpoint's facts; without an identity, such as an import's, they fit any run.
        now: the identity of the run.
        allowed: names of facts that may differ; `schedule` includes `schedule.peak_lr` and all others below it.
        where: of the checkpoints, for the message.

    Returns:
        The differences that are allowed.

    Raises:
        UserError: with all differences that are not allowed.
    """
    found = differences(meta[IDENTITY], now) if IDENTITY in meta else []
    refused = [each for each in found if not any(f"{each.name}.".startswith(f"{name}.") for name in allowed)]
    if refused:
        listed = "".join(f"\n    {each}" for each in refused)
        names = ", ".join(dict.fromkeys(_name_to_allow(each.name) for each in refused))
        raise UserError(
            f"this run is not the one that was saved:{listed}",
            where=where,
            fix=f"Undo the change, or allow it by name: runtime.checkpoint.allow_changes=[{names}].",
        )
    return found


def _name_to_allow(name: str) -> str:
    """The narrowest name that covers a difference and needs no quotes: of a file's path, what stands before it."""
    parts = name.split(".")
    found = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((each for each in found if _PLAIN.fullmatch(each)), json.dumps(plain(name), ensure_ascii=False))
