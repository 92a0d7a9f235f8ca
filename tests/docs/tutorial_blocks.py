"""The blocks of a tutorial, carried out in their order as a reader would."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<skipped>.+?) -->\n+)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"\d(?:[\d.,:]*\d)?(?:e[-+]?\d+)?")
_SECONDS = 600


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file it is the content of, why it is not run, and its text."""

    language: str
    title: str | None
    skipped: str | None
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    for found in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield Block(found["language"], found["title"], found["skipped"], found["text"])


def carry_out(page: Path, folder: Path) -> list[str]:
    """Do in `folder` what the page says, and compare what is said with what it promises.

    A block with a title is written into that file; other bash and python blocks are run; a text block is what the one
    before it prints: its lines must come in that order, `...` stands for what is left out, a number for any number.
    Returns why blocks were not run.
    """
    path = folder / ".bin"
    path.mkdir()
    command = path / "affinage"
    quick = "--xla_backend_optimization_level=0"  # they compile much and compute little
    command.write_text(
        f'#!/bin/sh\nXLA_FLAGS="$XLA_FLAGS {quick}" exec {shlex.quote(sys.executable)} -m affinage "$@"\n'
    )
    command.chmod(0o755)
    (path / "python").symlink_to(sys.executable)
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}", "XLA_FLAGS": "", "COLUMNS": "160"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    skipped, said = [], ""
    for block in blocks(page):
        if block.skipped:
            skipped.append(block.skipped)
            said = ""
        elif block.title:
            target = folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
        elif block.language == "text":
            if said:
                compare(block.text, said)
        else:
            program = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[block.language]
            how = {"cwd": folder, "env": environment, "text": True, "timeout": _SECONDS}
            done = subprocess.run([*program, block.text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)
            said = done.stdout
            assert done.returncode == 0, f"{block.text}\n{said}"
    return skipped


def compare(promised: str, said: str) -> None:
    """Every promised line is in what was said, in this order; numbers may be others."""
    at = 0
    for line in promised.splitlines():
        if line.strip() in ("", "..."):
            continue
        words = (r"\s+".join(map(_pattern, part.split())) for part in line.split("..."))
        found = re.compile(r"[^\n]*".join(words)).search(said, at)
        assert found, f"promised: {line}\nsaid:\n{said}"
        at = found.end()


def _pattern(word: str) -> str:
    """A word, with any number in place of each number."""
    return r"\d[\d.,:]*(?:e[-+]?\d+)?".join(re.escape(part) for part in _NUMBER.split(word))
