"""What a recipe that comes along says of itself: the comment at the top of its file, and the facts in it."""

import re
from pathlib import Path

FACTS = ("Run", "Hardware", "Time", "Cost", "Expect")
_FACT = re.compile(rf"({'|'.join(FACTS)}): +(.*)")


def head(path: Path) -> str:
    """The comment at the top of a recipe file: what it does, its commands, what to expect."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def facts(path: Path) -> dict[str, list[str]]:
    """What the head says by name, each of `FACTS` in lines of its own.

    A fact is a line `Name: text`; lines after it that are indented belong to it: of `Run` one command each.
    """
    found: dict[str, list[str]] = {}
    now: list[str] | None = None
    for line in head(path).splitlines():
        if match := _FACT.fullmatch(line):
            now = found.setdefault(match[1], [])
            now.append(match[2])
        elif now is not None and line.startswith("  "):
            now.append(line.strip())
        else:
            now = None
    return found
