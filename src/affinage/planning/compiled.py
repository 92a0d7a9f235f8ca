"""The real training step, compiled for hardware that need not be here, and the largest model that its compiler accepts.

The compilers of TPUs (libtpu) and of GPUs (JAX's CUDA plug-in) run on any Linux machine. Each compilation is a process
of its own (`python -m affinage.planning.compiled`): libtpu writes to standard error as it likes and cannot be unloaded.
"""

import collections
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from affinage.config.load import load_recipe
from affinage.config.recipe import Recipe
from affinage.errors import UserError
from affinage.hardware.chips import Slice, find_slice
from affinage.model import Graph
from affinage.model.forward import batch_shapes
from affinage.model.graph import parameters
from affinage.parallel.sharding import make_mesh
from affinage.planning.per_device import per_device
from affinage.planning.plan import Plan, make_plan, planned_graph, training_settings
from affinage.registry import load_plugins
from affinage.training.trainer import Trainer, TrainJob, rows_per_step

_COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_ATTENTION = re.compile(r'custom_call_target="__cudnn\$(fmha\w*)"|%(splash_\w+)\S* = [^\n]* custom-call\(')
# CompileTimeHbmOom has two forms: of the temporaries alone, or of everything.
_NEEDED = re.compile(r"(?:required[^()]*\(|Used |needs )([\d.]+)([KMGT])(?:\)| of)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Of the compiling process, which must not look for devices or for its cloud, and ignores the lock of libtpu, which
# protects the chips.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "GRPC_VERBOSITY": "NONE",
}
_NO_AUTOTUNING = "--xla_gpu_autotune_level=0"  # XLA tunes kernels on a GPU that is here, and there is none


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
    message: str = ""  # of the compiler, if it refused


def compile_on(recipe: str, overrides: Sequence[str], where: Slice) -> CompileReport:
    """Compile a recipe's training step for a slice, in a process of its own, which loads the recipe's plug-ins.

    UserError: there is no compiler for the slice here, or the step cannot be laid out.
    """
    what, fix = "", "Leave out --compile: the estimate needs nothing."
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin") if where.platform == "gpu" else ("libtpu",)
    if where.platform == "tpu" and not where.topology:
        what = f"compiling for {where.name} needs its compiler, which libtpu no longer brings"
    elif where.platform != "cpu" and not any(map(importlib.util.find_spec, plugins)):
        package, extra = "the package `libtpu`", "'affinage[tpu]' (Linux on x86; it needs no TPU)"
        if where.platform == "gpu":
            package, extra = "JAX's CUDA plug-in", "'affinage[gpu-plan]' (Linux; 1.7 GB; it needs no GPU)"
        what = f"compiling for a {where.platform.upper()} needs {package}"
        fix = f"Install it: pip install {extra}. {fix}"
    if what:
        raise UserError(what, where="--compile", fix=fix)
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": paths}
    if where.platform == "gpu":
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_NO_AUTOTUNING}".strip()
    command = [sys.executable, "-m", "affinage.planning.compiled", json.dumps([recipe, list(overrides), where.name])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the compiler's process ended with {done.returncode}:\n{done.stderr[-4000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise UserError(**answer["error"])
    return CompileReport(**answer)


def compile_step(recipe: str, overrides: Sequence[str], where: Slice) -> CompileReport:
    """The same in this process; raises UserError if the step cannot be laid out on the slice."""
    loaded = load_recipe(recipe, overrides, left_out=[])  # the caller has opened it: of a run of any version
    load_plugins(loaded)
    name, settings, seq_len = training_settings(loaded.recipe)
    graph = planned_graph(loaded)
    sizes = {str(axis): size for axis, size in loaded.recipe.mesh.items()}
    mesh = make_mesh(sizes, _devices_of(where))
    shapes = batch_shapes(graph, rows_per_step(settings, mesh.size), seq_len)
    batch = {key: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) for key, leaf in shapes.items()}
    job = TrainJob(
        graph=graph,
        settings=settings,
        mesh=sizes,
        seed=loaded.recipe.seed,
        feed=None,  # type: ignore[arg-type]
        folder=Path(),
        name=name,
        parallel=loaded.recipe.parallel,
    )
    trainer = Trainer(job, mesh, batch)
    try:
        compiled: Any = trainer.compile_training()
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "hbm" not in str(error).lower():
            raise
        return out_of_memory(str(error))
    memory, room = compiled.memory_analysis(), where.chip.memory_per_device
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    try:
        text = compiled.as_text()
        kernels: dict[str, Any] = {"collectives": collectives_in(text), "attention": attention_in(text)}
    except RuntimeError:  # this JAX cannot read the program that a newer libtpu made
        kernels = {}
    return CompileReport(
        fits=where.platform == "tpu" or room is None or peak <= room,  # only a TPU's compiler refuses by itself
        peak_bytes=peak,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        **kernels,
    )


def collectives_in(text: str) -> dict[str, int]:
    """Names of the collectives that stand in a compiled program, or in a part of one, and how many."""
    return dict(collections.Counter(_COLLECTIVE.findall(text)))


def attention_in(text: str) -> dict[str, int]:
    """Names of the attention kernels that stand in a compiled program, and how many."""
    return dict(collections.Counter(cudnn or splash for cudnn, splash in _ATTENTION.findall(text)))


def out_of_memory(message: str) -> CompileReport:
    """The report in the compiler's refusal."""
    needed = _NEEDED.search(message)
    amount = int(float(needed[1]) * _UNITS[needed[2]]) if needed else 0
    return CompileReport(False, amount, message=message.splitlines()[0])


# ---- devices that are not here ----


# What XLA's compiler needs to know of a GPU, from NVIDIA's datasheets: its name, compute capability, multiprocessors,
# bytes of memory, bytes/s, bytes of L2, GHz, and of a multiprocessor the bytes of shared memory and the float32 units.
# fmt: off
_A100 = (41_943_040, 1.41, 167_936, 64)
_GPUS = {
    "A100 80GB": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 85_100_068_864, 2_039_040_000_000, *_A100),
    "A100 40GB": ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 42_505_273_344, 1_555_200_000_000, *_A100),
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 84_929_347_584, 3_352_320_000_000, 52_428_800, 1.98, 233_472, 128),
    "H200": ("NVIDIA H200", (9, 0), 132, 151_397_597_184, 4_800_000_000_000, 52_428_800, 1.98, 233_472, 128),
    "B200": ("NVIDIA B200", (10, 0), 148, 191_514_411_008, 7_672_320_000_000, 132_644_864, 1.965, 233_472, 128),
    "L4": ("NVIDIA L4", (8, 9), 58, 23_623_434_240, 300_000_000_000, 50_331_648, 2.04, 102_400, 128),
}
# fmt: on


def _devices_of(where: Slice) -> list[jax.Device]:
    """As many devices as the slice has, described to its compiler; of a processor this machine's."""
    if where.platform == "cpu":
        return jax.devices("cpu")[:1]
    options: dict[str, Any] = {"chip_config_name": where.variant} if where.variant else {}
    if where.platform == "tpu":
        return list(topologies.get_topology_desc(where.topology, "tpu", **options).devices)
    import jax._src.cudnn.fused_attention_stablehlo as fused

    name, (major, minor), processors, memory, bandwidth, l2, clock, shared, units = _GPUS[where.chip.name]
    # JAX's wrapper of cuDNN must see this GPU in place of the local one, of which there may be none.
    fused.check_compute_capability = lambda needed: major * 10 + minor >= int(str(needed).replace(".", ""))
    fused.check_cudnn_version = lambda: 91000
    # The text of `stream_executor.GpuTargetConfigProto`.
    target = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared - 1024}
  shared_memory_per_core: {shared}
  core_count: {processors} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock}
  device_memory_size: {memory} cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""
    options = {"target_config": target, "topology": "1x{}x{}".format(*where.shape)}
    return list(topologies.get_topology_desc(platform="cuda", **options).devices)


# ---- the largest model of a width ----

HEAD = 128  # of attention
_FFN, _FFN_MULTIPLE = 8 / 3, 512  # times the width, rounded up to it: a gated layer with the parameters of 4 x width
_MOST_TENSOR = 64
_STEP = 2  # layers between two models
_SHARE_OF_STATE = 0.92  # of a device's memory, where the first proposal is

# FAX's table 1: (slice, width) -> parameters of the largest model that it trained, and seconds of a step, at batch 1
# and length 2,048.
FAX = {("v4-16", 5120): (13.7e9, 0.87), ("v4-128", 10240): (86.6e9, 1.52), ("v4-512", 16384): (340.0e9, 6.21)}


def shape(width: int, where: Slice) -> list[str]:
    """The overrides for a model of `width`, with heads of 128, and a mesh of `tensor` and, beside it, `fsdp`."""
    if width < HEAD or width % HEAD:
        fix = f"Take a multiple of {HEAD}, such as {max(width, 0) // HEAD * HEAD + HEAD}."
        raise UserError(f"width {width} has no whole heads of {HEAD}", where="--width", fix=fix)
    heads = width // HEAD
    tensor = math.gcd(heads, where.devices, _MOST_TENSOR)
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
    on_attempt: Callable[[int, int, CompileReport], None] = lambda *_: None,
) -> tuple[dict[int, CompileReport], int, list[str], Plan]:
    """Search the most layers, a multiple of 2, that the slice's compiler accepts; the state's bytes propose.

    The recipe has one repeated node called `blocks`; `overrides` are those of `shape`, and the user's. `on_attempt` is
    called with layers, parameters and the report. UserError: none fits of as many as `tries` models.

    Returns the reports by numbers of layers, the most layers that fit, their overrides, and their estimate.
    """

    def model(layers: int) -> tuple[list[str], Recipe, Graph]:
        settings = [*overrides, f"model.nodes.blocks.repeat={layers}"]
        loaded = load_recipe(recipe, settings, left_out=[])
        return settings, loaded.recipe, planned_graph(loaded)

    def state_bytes(layers: int) -> int:
        """Of weights and moments on a device."""
        _, made, graph = model(layers)
        _, training, seq_len = training_settings(made)
        device = per_device(graph, training, made.mesh, seq_len, where, made.parallel)
        return device.bytes_of(device.state)

    def whole(layers: float) -> int:
        return max(_STEP, int(layers // _STEP) * _STEP)

    two, four = state_bytes(2), state_bytes(4)
    per_layer, room = (four - two) / 2, where.chip.memory_per_device or 0
    layers = whole((_SHARE_OF_STATE * room - (2 * two - four)) / per_layer)
    reports: dict[int, CompileReport] = {}
    low, high = 0, math.inf  # layers that fit, and that do not
    while high - low > _STEP and len(reports) < tries:
        settings, _, graph = model(layers)
        report = reports[layers] = compile_on(recipe, settings, where)
        on_attempt(layers, parameters(graph).total, report)
        low, high = (layers, high) if report.fits else (low, layers)
        # By the peak that the compiler reported, else in halves.
        proposed = layers + (room - report.peak_bytes) / per_layer if report.peak_bytes else (low + high) / 2
        layers = int(min(max(whole(proposed), low + _STEP), high - _STEP))
    if not low:
        what = f"none of {', '.join(map(str, reports))} layers fits {where.name}"
        raise UserError(what, where="--on", fix="Take a larger slice or a smaller width.")
    settings, made, graph = model(low)
    return reports, low, settings, make_plan(made, graph, where)


if __name__ == "__main__":  # with JSON of recipe, overrides and slice; the last line that it prints is the answer
    _recipe, _overrides, _name = json.loads(sys.argv[1])
    try:
        _answer = asdict(compile_step(_recipe, _overrides, find_slice(_name)))
    except UserError as _error:
        _answer = {"error": {"what": _error.what, "where": _error.where, "fix": _error.fix}}
    print("\n" + json.dumps(_answer))
