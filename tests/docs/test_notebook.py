"""The notebook runs from top to bottom on a CPU, and the mesh is one line in it."""

import json
import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "gpt2_on_tpu.ipynb"


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
    assert "8 x cpu: a tiny GPT-2" in said
    assert "the same by Orbax alone: True" in said and "\nThe capital of" in said
    assert losses[-1][1] < 0.9 * losses[0][1]

    _, others = executed(tmp_path / "another mesh", '{"data": 2, "fsdp": 2, "tensor": 2}')
    assert [step for step, _ in others] == [step for step, _ in losses]
    assert [loss for _, loss in others] == pytest.approx([loss for _, loss in losses], rel=1e-5)
