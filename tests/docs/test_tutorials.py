"""Every tutorial is carried out as it is written, and says what it promises to say."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"
# Blocks that need hardware or a network that the tests have not: this many, and no more by accident.
NOT_RUN = {"chat-model": 0, "french": 1, "plan": 1}


def test_all_tutorials_are_carried_out():
    assert {page.stem for page in PAGES.glob("*.md")} == set(NOT_RUN)
    for page in PAGES.glob("*.md"):
        assert any(block["language"] == "bash" and not block["skipped"] for block in _BLOCK.finditer(page.read_text()))


_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<skipped>.+?) -->\n+)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"\d(?:[\d.,:]*\d)?(?:e[-+]?\d+)?")


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(NOT_RUN))
def test_a_reader_gets_what_the_tutorial_promises(name: str, tmp_path: Path):
    """What the page says is done in a folder, and compared with what it promises.

    A block with a title is written into that file; other bash and python blocks are run; a text block is what the one
    before it prints: its lines must come in that order, `...` stands for what is left out, a number for any number.
    """
    command, python = tmp_path / ".bin" / "affinage", shlex.quote(sys.executable)
    quick = "--xla_backend_optimization_level=0"  # they compile much and compute little
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nXLA_FLAGS="$XLA_FLAGS {quick}" exec {python} -m affinage "$@"\n')
    command.chmod(0o755)
    (command.parent / "python").symlink_to(sys.executable)
    environment = {**os.environ, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "160"}
    environment |= {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    skipped, said = 0, ""
    for block in _BLOCK.finditer((PAGES / f"{name}.md").read_text(encoding="utf-8")):
        text = block["text"]
        if block["skipped"]:
            skipped, said = skipped + 1, ""
        elif block["title"]:
            (tmp_path / block["title"]).write_text(text, encoding="utf-8")
        elif block["language"] == "text":
            compare(text if said else "", said)
        else:
            program = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[block["language"]]
            how = {"cwd": tmp_path, "env": environment, "text": True, "timeout": 600}
            done = subprocess.run([*program, text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)
            assert done.returncode == 0, f"{text}\n{done.stdout}"
    assert skipped == NOT_RUN[name]


def compare(promised: str, said: str) -> None:
    """Every promised line is in what was said, in this order; numbers may be others."""
    at = 0
    for line in promised.splitlines():
        if line.strip() not in ("", "..."):
            words = (r"\s+".join(map(_pattern, part.split())) for part in line.split("..."))
            found = re.compile(r"[^\n]*".join(words)).search(said, at)
            assert found, f"promised: {line}\nsaid:\n{said}"
            at = found.end()


def _pattern(word: str) -> str:
    """A word, with any number in place of each number."""
    return r"\d[\d.,:]*(?:e[-+]?\d+)?".join(re.escape(part) for part in _NUMBER.split(word))


NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "gpt2_on_tpu.ipynb"


def test_the_sizes_for_an_accelerator_are_settings():
    (cell,) = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if "if SMALL:" in cell.source]
    names = {"SMALL": False, "devices": range(8), "MESH": {"data": 8}, "SOURCES": ["text/"], "VOCABULARY": 8192}
    exec(cell.source, names)
    assert names["gpt2"].recipe.pretrain.batch_size == 64


def executed(folder: Path, mesh: str | None) -> tuple[str, list[tuple[int, float]]]:
    """What its cells print, and the losses, after another line for the mesh."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (line,) = [cell for cell in notebook.cells if "mesh" in cell.metadata.get("tags", ())]
    assert line.source.startswith("MESH = ") and "\n" not in line.source
    if mesh is not None:
        line.source = f"MESH = {mesh}"
    folder.mkdir()
    waits = {"timeout": 500, "startup_timeout": 300, "iopub_timeout": 120}
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(folder)}}, **waits).execute()
    said = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", ()))
    (metrics,) = folder.glob("runs-*/gpt2/pretrain/metrics.jsonl")
    rows = map(json.loads, metrics.read_text().splitlines())
    return said, [(row["step"], row["loss"]) for row in rows if "loss" in row]


@pytest.mark.full
def test_it_trains_saves_restores_and_speaks_and_another_mesh_gives_the_same_losses(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))
    said, losses = executed(tmp_path / "as it is", None)
    assert "8 x cpu: a tiny GPT-2" in said and "the same by Orbax alone: True" in said and "\nThe currency of" in said
    assert losses[-1][1] < 0.9 * losses[0][1]

    _, others = executed(tmp_path / "another mesh", '{"data": 2, "fsdp": 2, "tensor": 2}')
    assert [step for step, _ in others] == [step for step, _ in losses]
    for number, (one, other) in enumerate(zip(losses, others)):  # rounding grows with the steps
        assert other[1] == pytest.approx(one[1], rel=1e-5 if number < 6 else 1e-4)
