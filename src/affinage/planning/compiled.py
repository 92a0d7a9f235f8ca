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
from affinage.planning.plan import make_plan, planned_graph, training_settings
from affinage.registry import load_plugins

_COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_ATTENTION = re.compile(r'custom_call_target="__cudnn\$(fmha\w*)"|%(splash_\w+)\S* = [^\n]* custom-call\(')
# CompileTimeHbmOom has two forms: of the temporaries alone, or of everything.
_NEEDED = re.compile(r"(?:required[^()]*\(|Used |needs )([\d.]+)([KMGT])(?:\)| of)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class CompileReport:
    """What the compiler reported."""

    fits: bool  # whether the program exists
    # of one device, arguments included; of a program that does not fit, what the compiler said it needs
    peak_bytes: int
    argument_bytes: int = 0  # of the state and the batch
    temporary_bytes: int = 0  # beside them
    host_bytes: int = 0  # offloaded to the host's memory
    # names and their number in the program, those of a loop once; None if unknown
    collectives: dict[str, int] | None = None
    attention: dict[str, int] | None = None  # kernels of attention and their number, in the same way
    seconds: float = 0.0  # the compilation took
    message: str = ""  # of the compiler, if it refused


def compile_on(recipe: str, overrides: Sequence[str], where: Slice) -> CompileReport:
    """Compile a recipe's training step for a slice, in a process of its own, which loads the recipe's plug-ins.

    Raises:
        UserError: if there is no compiler for the slice here, or the step cannot be laid out.
    """
    check_compiler(where)
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    # The process must not look for devices or for its cloud, and ignores libtpu's lock, which protects the chips.
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": paths,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "GRPC_VERBOSITY": "NONE",
    }
    if where.platform == "gpu":
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_AUTOTUNING}".strip()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        request = json.dumps([recipe, list(overrides), where.name])
        command = [sys.executable, "-m", "affinage.planning.compiled", str(answer), request]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not answer.is_file():
            raise RuntimeError(f"the compiler's process ended with {done.returncode}:\n{done.stderr[-4000:]}")
        result = json.loads(answer.read_text())
    if "error" in result:
        raise UserError(**result["error"])
    return CompileReport(**result)


def compile_step(recipe: str, overrides: Sequence[str], where: Slice) -> CompileReport:
    """The same in this process; raises UserError if the step cannot be laid out on the slice."""
    import numpy as np

    from affinage.model.forward import batch_shapes
    from affinage.parallel import make_mesh
    from affinage.training.job import TrainJob, rows_per_step
    from affinage.training.trainer import Trainer

    loaded = load_recipe(recipe, overrides)
    load_plugins(loaded)
    name, settings, context = training_settings(loaded.recipe)
    graph = planned_graph(loaded)
    sizes = {str(axis): size for axis, size in loaded.recipe.mesh.items()}
    hardware = DescribedDevices(where)
    mesh = make_mesh(sizes, hardware.acquire())
    shapes = batch_shapes(graph, rows_per_step(settings, mesh.size), context)
    batch = {key: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) for key, leaf in shapes.items()}
    parallel = loaded.recipe.parallel
    if parallel.remat == "auto":
        parallel = make_plan(loaded.recipe, graph, where).device.parallel
    job = TrainJob(
        graph=graph,
        settings=settings,
        mesh=sizes,
        seed=loaded.recipe.seed,
        feed=None,  # type: ignore[arg-type]
        hardware=hardware,
        folder=Path(),
        name=name,
        parallel=parallel,
    )
    trainer = Trainer(job, mesh, batch)
    start = time.monotonic()
    try:
        compiled: Any = trainer.compile_training()
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "hbm" not in str(error).lower():
            raise
        return out_of_memory(str(error), time.monotonic() - start)
    memory, room = compiled.memory_analysis(), where.chip.memory_per_device
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    try:
        text = compiled.as_text()
    except RuntimeError:  # this JAX cannot read the program that a newer libtpu made
        text = None
    return CompileReport(
        fits=where.platform == "tpu" or room is None or peak <= room,  # only a TPU's compiler refuses by itself
        peak_bytes=peak,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        host_bytes=memory.host_temp_size_in_bytes,
        collectives=None if text is None else collectives_in(text),
        attention=None if text is None else attention_in(text),
        seconds=time.monotonic() - start,
    )


def collectives_in(text: str) -> dict[str, int]:
    """Names of the collectives that stand in a compiled program, or in a part of one, and how many."""
    return dict(collections.Counter(_COLLECTIVE.findall(text)))


def attention_in(text: str) -> dict[str, int]:
    """Names of the attention kernels that stand in a compiled program, and how many."""
    return dict(collections.Counter(cudnn or splash for cudnn, splash in _ATTENTION.findall(text)))


def out_of_memory(message: str, seconds: float = 0.0) -> CompileReport:
    """The report in the compiler's refusal."""
    needed = _NEEDED.search(message)
    amount = int(float(needed[1]) * _UNITS[needed[2]]) if needed else 0
    return CompileReport(False, amount, seconds=seconds, message=message.splitlines()[0])


if __name__ == "__main__":  # with the file for the answer, and JSON of recipe, overrides and slice
    _recipe, _overrides, _name = json.loads(sys.argv[2])
    try:
        _answer = asdict(compile_step(_recipe, _overrides, find_slice(_name)))
    except UserError as _error:
        _answer = {"error": {"what": _error.what, "where": _error.where, "fix": _error.fix}}
    Path(sys.argv[1]).write_text(json.dumps(_answer))
