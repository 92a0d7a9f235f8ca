"""The real training step, compiled for hardware that need not be here: it fits or not, and what the program does.

Also the largest model of a width that a slice's compiler accepts.

The compilers of TPUs (libtpu) and of GPUs (JAX's CUDA plug-in) run on any Linux machine. Each compilation is a process
of its own (`python -m affinage.planning.compiled`): libtpu writes to standard error as it likes and cannot be unloaded.
"""

import collections
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from affinage.config.load import load_recipe
from affinage.config.recipe import Recipe
from affinage.errors import UserError
from affinage.hardware.described import NO_AUTOTUNING, DescribedDevices, check_compiler
from affinage.hardware.slices import Slice, find_slice
from affinage.model import Graph
from affinage.model.analysis import parameters
from affinage.planning.per_device import per_device
from affinage.planning.plan import Plan, make_plan, planned_graph, training_settings
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

    loaded = load_recipe(recipe, overrides, left_out=[])  # the caller has opened it: of a run of any version
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


# ---- the largest model of a width ----

HEAD = 128  # of attention
_FFN, _FFN_MULTIPLE = 8 / 3, 512  # times the width, rounded up to it: a gated layer with the parameters of 4 x width
_MOST_TENSOR = 64
_STEP = 2  # layers between two models
_SHARE_OF_STATE = 0.92  # of a device's memory, where the first proposal is

# FAX's table 1: (slice, width) -> parameters of the largest model that it trained, and seconds of a step, at batch 1
# and length 2,048.
FAX = {("v4-16", 5120): (13.7e9, 0.87), ("v4-128", 10240): (86.6e9, 1.52), ("v4-512", 16384): (340.0e9, 6.21)}


@dataclass(frozen=True)
class Attempt:
    """A number of layers, the model's parameters, and what the compiler reported."""

    layers: int
    parameters: int
    report: CompileReport


def shape(width: int, where: Slice) -> list[str]:
    """The overrides for a model of `width`, heads of 128, and a mesh of `tensor` and, beside it, `fsdp`."""
    if width % HEAD:
        fix = f"Take a multiple of {HEAD}, such as {width // HEAD * HEAD + HEAD}."
        raise UserError(f"width {width} has no whole heads of {HEAD}", where="--width", fix=fix)
    heads = width // HEAD
    tensor = math.gcd(math.gcd(heads, where.devices), _MOST_TENSOR)
    ffn = math.ceil(_FFN * width / _FFN_MULTIPLE) * _FFN_MULTIPLE
    return [
        f"model.nodes.embed.width={width}",
        f"model.nodes.blocks.attention.heads={heads}",
        f"model.nodes.blocks.ffn.width={ffn}",
        f"mesh={{fsdp: {where.devices // tensor}, tensor: {tensor}}}",
    ]


def capacity(
    recipe: str,
    overrides: Sequence[str],
    where: Slice,
    *,
    tries: int = 6,
    on_attempt: Callable[[Attempt], None] = lambda _: None,
) -> tuple[list[Attempt], Attempt, list[str], Plan]:
    """Search the most layers, a multiple of 2, that the slice's compiler accepts; the state's bytes propose.

    The recipe has one repeated node called `blocks`; `overrides` are those of `shape`, and the user's. The search ends
    when the next larger model was refused, or after `tries` compilations.

    Returns:
        All attempts in their order, the one with the most layers that fits, its overrides beside the recipe's, and its
        estimate, for the time of a step.

    Raises:
        UserError: if no model was found that fits.
    """

    def with_layers(layers: int) -> tuple[list[str], Graph, Recipe, float]:
        """The overrides, the model, the recipe, and bytes of weights and moments on a device."""
        settings = [*overrides, f"model.nodes.blocks.repeat={layers}"]
        loaded = load_recipe(recipe, settings, left_out=[])
        _, training, context = training_settings(loaded.recipe)
        graph = planned_graph(loaded)
        device = per_device(graph, training, loaded.recipe.mesh, context, where, loaded.recipe.parallel)
        return settings, graph, loaded.recipe, device.bytes_of(device.state)

    two, four = with_layers(2)[-1], with_layers(4)[-1]
    per_layer, room = (four - two) / 2, where.chip.memory_per_device or 0
    layers: int | None = _whole((_SHARE_OF_STATE * room - (2 * two - four)) / per_layer)
    attempts: list[Attempt] = []
    while layers is not None and len(attempts) < tries:
        settings, graph, *_ = with_layers(layers)
        attempts.append(Attempt(layers, parameters(graph).total, compile_on(recipe, settings, where)))
        on_attempt(attempts[-1])
        layers = _next(attempts, per_layer, room)
    largest = max((each for each in attempts if each.report.fits), key=lambda each: each.layers, default=None)
    if largest is None:
        what = f"none of {', '.join(str(each.layers) for each in attempts)} layers fits {where.name}"
        raise UserError(what, where="--on", fix="Take a larger slice or a smaller width.")
    settings, graph, model, _ = with_layers(largest.layers)
    return attempts, largest, settings, make_plan(model, graph, where)


def _whole(layers: float) -> int:
    return max(_STEP, int(layers // _STEP) * _STEP)


def _next(attempts: list[Attempt], per_layer: float, room: float) -> int | None:
    """Layers to try next: by the peak that the compiler reported, else in halves; None if the largest is known."""
    low = max((attempt.layers for attempt in attempts if attempt.report.fits), default=0)
    high = min((attempt.layers for attempt in attempts if not attempt.report.fits), default=0)
    if high and high - low <= _STEP:
        return None
    newest, peak = attempts[-1].layers, attempts[-1].report.peak_bytes
    layers = max(_whole(newest + (room - peak) / per_layer if peak else (low + high) / 2), low + _STEP)
    return min(layers, high - _STEP) if high else layers


if __name__ == "__main__":  # with the file for the answer, and JSON of recipe, overrides and slice
    _recipe, _overrides, _name = json.loads(sys.argv[2])
    try:
        _answer = asdict(compile_step(_recipe, _overrides, find_slice(_name)))
    except UserError as _error:
        _answer = {"error": {"what": _error.what, "where": _error.where, "fix": _error.fix}}
    Path(sys.argv[1]).write_text(json.dumps(_answer))
