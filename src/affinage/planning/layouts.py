"""Tensor against pipeline parallelism on one model: as planned for a slice, and as measured on forced CPU devices.

What a device without work computes in a pipeline is what nobody reads. So on CPU devices, which share the cores, the
idle share shows in the processor's seconds of a step; and so does what a layout adds of copies and repeated work.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from affinage.config.load import load_recipe
from affinage.hardware.slices import Slice
from affinage.planning.plan import Plan, make_plan, planned_graph

Mesh = Mapping[str, int]
DEVICES = 8  # forced on the CPU


@dataclass(frozen=True)
class Measured:
    """A layout on CPU devices.

    Attributes:
        mesh: sizes of its axes.
        micro_batches: M, those in the pipeline at once, times its rounds; 1 without one.
        bubble: (P - 1) / (M + P - 1) of P stages; 0 without a pipeline.
        cpu_seconds: of the processor, for each repeated step.
    """

    mesh: dict[str, int]
    micro_batches: int
    bubble: float
    cpu_seconds: tuple[float, ...]


def idle_share(stages: int, micro_batches: int) -> float:
    """Of the ticks of a pipeline, those in which a stage waits (GPipe; Huang et al., 2019)."""
    return (stages - 1) / (micro_batches + stages - 1)


def planned(recipe: str, overrides: Sequence[str], meshes: Sequence[Mesh], where: Slice) -> list[Plan]:
    """A plan for each mesh.

    Raises:
        UserError: for a mesh that the model or the slice does not divide over.
    """
    plans = []
    for mesh in meshes:
        loaded = load_recipe(recipe, [*overrides, f"mesh={json.dumps(mesh)}"])
        plans.append(make_plan(loaded.recipe, planned_graph(loaded), where))
    return plans


def measured(recipe: str, overrides: Sequence[str], meshes: Sequence[Mesh], steps: int) -> list[Measured]:
    """Processor's seconds of float32 training steps on 8 CPU devices, in a process of its own, which forces them.

    Raises:
        RuntimeError: where that process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        asked = json.dumps([recipe, list(overrides), [dict(mesh) for mesh in meshes], steps])
        command = [sys.executable, "-m", "affinage.planning.layouts", str(answer), asked]
        done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
        if not answer.is_file():
            raise RuntimeError(f"measuring layouts ended with {done.returncode}:\n{done.stderr[-4000:]}")
        told = json.loads(answer.read_text())
        return [Measured(**each | {"cpu_seconds": tuple(each["cpu_seconds"])}) for each in told]


def _environment() -> dict[str, str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}


def _measure(recipe: str, overrides: Sequence[str], mesh: Mesh, steps: int) -> Measured:
    import jax

    from affinage.parallel import Pipeline
    from affinage.training.job import rows_per_step
    from affinage.training.trainer import program_of, synthetic_batch

    # In bfloat16 XLA:CPU 0.10 aborts at a pipeline's sums ("Invalid binary instruction opcode copy").
    float32 = "pretrain.precision.compute=float32"
    loaded = load_recipe(recipe, [*overrides, f"mesh={json.dumps(mesh)}", float32])
    settings = loaded.recipe.pretrain
    assert settings is not None
    graph = planned_graph(loaded)
    rows = rows_per_step(settings, DEVICES)
    batch = synthetic_batch(graph, rows, loaded.recipe.packing.seq_len)
    program = program_of(graph, settings, loaded.recipe.parallel, mesh, batch)
    state, put, step = program.begin(), program.put(batch), program.compile_training()
    seconds = []
    for _ in range(steps + 1):
        began = time.process_time()
        state, _ = jax.block_until_ready(step(state, put))
        seconds.append(time.process_time() - began)
    parts, bubble = 1, 0.0
    if isinstance(program.strategy, Pipeline):
        at_once = program.strategy.parts(rows // settings.gradient_accumulation_steps, program.layout)
        parts = at_once * program.strategy.rounds
        bubble = idle_share(mesh["pipeline"], parts)
    return Measured(dict(mesh), parts, bubble, tuple(seconds[1:]))


def main(arguments: Sequence[str]) -> None:
    """File for the answer; JSON of recipe, overrides, meshes, steps."""
    from affinage.hardware.devices import prepare

    prepare()
    answer, asked = arguments
    recipe, overrides, meshes, steps = json.loads(asked)
    found = [asdict(_measure(recipe, overrides, mesh, steps)) for mesh in meshes]
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
