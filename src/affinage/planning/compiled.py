"""The real training step, compiled for hardware that need not be here: it fits or not, and what the program does.

The compilers of TPUs (libtpu) and of GPUs (JAX's CUDA plug-in) run on any Linux machine. Each compilation is a process
of its own (`python -m affinage.planning.compiled`): libtpu writes to standard error as it likes and cannot be unloaded.
"""

import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from affinage.config.load import load_recipe
from affinage.errors import UserError
from affinage.hardware.described import NO_AUTOTUNING, DescribedDevices, check_compiler
from affinage.hardware.slices import Slice, find_slice
from affinage.planning.plan import NOTHING_COUNTED, Counted, make_plan, planned_graph, training_settings
from affinage.plugins import load_plugins

_COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_ATTENTION = re.compile(r'custom_call_target="__cudnn\$(fmha\w*)"|%(splash_\w+)\S* = [^\n]* custom-call\(')
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(")
_BODY = re.compile(r" body=%?([\w.\-]+)")
_CALLED = re.compile(r"(?:body|calls|to_apply)=%?([\w.\-]+)")
# CompileTimeHbmOom has two forms: of the temporaries alone, or of everything.
_NEEDED = re.compile(r"(?:required[^()]*\(|Used |needs )([\d.]+)([KMGT])(?:\)| of)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class CompileReport:
    """What the compiler said.

    Attributes:
        fits: whether the program exists.
        peak_bytes: of one device, arguments included; of a program that does not fit what it said would be needed.
        argument_bytes: of the state and the batch.
        temporary_bytes: beside them.
        host_bytes: offloaded to the host's memory.
        collectives: names and how often they stand in the program, those of a loop once; None where it is not known.
        looped: of these, the ones that stand in a loop, over layers or micro-batches.
        attention: kernels of attention in the program and how often they stand in it; empty where it has none.
        seconds: the compilation took.
        message: of the compiler, where it refused.
    """

    fits: bool
    peak_bytes: int
    argument_bytes: int = 0
    temporary_bytes: int = 0
    host_bytes: int = 0
    collectives: dict[str, int] | None = None
    looped: dict[str, int] | None = None
    attention: dict[str, int] | None = None
    seconds: float = 0.0
    message: str = ""


def compile_on(
    recipe: str, overrides: Sequence[str], where: Slice, counted: Counted = NOTHING_COUNTED
) -> CompileReport:
    """Compile a recipe's training step for a slice, in a process of its own, which loads the recipe's plug-ins.

    Raises:
        UserError: where there is no compiler for the slice here, or the step cannot be laid out.
    """
    check_compiler(where)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        asked = json.dumps([recipe, list(overrides), where.name, asdict(counted)])
        command = [sys.executable, "-m", "affinage.planning.compiled", str(answer), asked]
        done = subprocess.run(command, env=_environment(where), capture_output=True, text=True, check=False)
        if not answer.is_file():
            raise RuntimeError(f"the compiler's process ended with {done.returncode}:\n{done.stderr[-4000:]}")
        told = json.loads(answer.read_text())
    if "error" in told:
        raise UserError(**told["error"])
    return CompileReport(**told)


def _environment(where: Slice) -> dict[str, str]:
    """Of a process that must not look for devices or for the cloud it might run in."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    # Another process here may have libtpu open, to train or to plan: its lock is for those that use the chips.
    quiet = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "GRPC_VERBOSITY": "NONE",
    }
    if where.platform == "gpu":
        quiet["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_AUTOTUNING}".strip()
    return os.environ | quiet | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def compile_step(recipe: str, overrides: Sequence[str], where: Slice, counted: Counted) -> CompileReport:
    """The same in this process.

    Raises:
        UserError: where the step cannot be laid out on the slice.
    """
    program = _program(recipe, overrides, where, counted)
    start = time.monotonic()
    try:
        compiled: Any = program.compile_training()
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "hbm" not in str(error).lower():
            raise
        return out_of_memory(str(error), time.monotonic() - start)
    memory = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    room = where.chip.memory_per_device
    try:
        text = compiled.as_text()
    except RuntimeError:  # this JAX cannot read the program that a newer libtpu made
        text = None
    # Only a TPU's compiler refuses by itself.
    return CompileReport(
        fits=where.platform == "tpu" or room is None or peak <= room,
        peak_bytes=peak,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        host_bytes=memory.host_temp_size_in_bytes,
        collectives=None if text is None else collectives_in(text),
        looped=None if text is None else collectives_in(loops_of(text)),
        attention=None if text is None else attention_in(text),
        seconds=time.monotonic() - start,
    )


def collectives_in(text: str) -> dict[str, int]:
    """Names of the collectives that stand in a compiled program, or in a part of one, and how many."""
    return dict(collections.Counter(_COLLECTIVE.findall(text)))


def attention_in(text: str) -> dict[str, int]:
    """Names of the attention kernels that stand in a compiled program, and how many."""
    return dict(collections.Counter(cudnn or splash for cudnn, splash in _ATTENTION.findall(text)))


def loops_of(text: str) -> str:
    """Of a compiled program what its loops do, with what that calls."""
    computations = {found[1]: block for block in text.split("\n\n") if (found := _COMPUTATION.match(block))}
    inside: set[str] = set()
    reached = set(_BODY.findall(text))
    while reached:
        inside |= reached
        called = (_CALLED.findall(computations.get(name, "")) for name in reached)
        reached = {name for names in called for name in names} - inside
    return "\n".join(computations.get(name, "") for name in sorted(inside))


def out_of_memory(message: str, seconds: float = 0.0) -> CompileReport:
    """The report in the compiler's refusal."""
    needed = _NEEDED.search(message)
    amount = int(float(needed[1]) * _UNITS[needed[2]]) if needed else 0
    return CompileReport(False, amount, seconds=seconds, message=message.splitlines()[0])


def _program(recipe: str, overrides: Sequence[str], where: Slice, counted: Counted) -> Any:
    import numpy as np

    from affinage.model.forward import batch_shapes
    from affinage.parallel import make_mesh
    from affinage.training.job import TrainJob, rows_per_step
    from affinage.training.trainer import Trainer

    loaded = load_recipe(recipe, overrides)
    load_plugins(loaded)
    name, settings, context = training_settings(loaded.recipe)
    graph = planned_graph(loaded, counted)
    sizes = {str(axis): size for axis, size in loaded.recipe.mesh.items()}
    hardware = DescribedDevices(where)
    mesh = make_mesh(sizes, hardware.acquire())
    shapes = batch_shapes(graph, rows_per_step(settings, mesh.size), context)
    batch = {key: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) for key, leaf in shapes.items()}
    parallel = loaded.recipe.parallel
    if parallel.remat == "auto":
        parallel = make_plan(loaded.recipe, graph, where).device.parallel
    nothing: Any = None
    job = TrainJob(
        graph=graph,
        settings=settings,
        mesh=sizes,
        seed=loaded.recipe.seed,
        feed=nothing,
        hardware=hardware,
        folder=Path(),
        name=name,
        parallel=parallel,
    )
    return Trainer(job, mesh, batch)


def main(arguments: Sequence[str]) -> None:
    """File for the answer; JSON of recipe, overrides, slice, what was counted."""
    answer, asked = arguments
    recipe, overrides, name, counted = json.loads(asked)
    try:
        told: dict[str, Any] = asdict(compile_step(recipe, overrides, find_slice(name), Counted(**counted)))
    except UserError as error:
        told = {"error": {"what": error.what, "where": error.where, "fix": error.fix}}
    Path(answer).write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
