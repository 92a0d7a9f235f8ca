"""The same model, batch and optimizer twice: as our train step, and in PyTorch by transformers. Used by step_*.py.

Each contender lives in a process of its own (`python twins.py --worker ...`), is told when to run, and answers with
what it measured: contenders take turns in one session, and no library's threads or allocator touch another's.
"""

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Size:
    """A decoder-only model and its batch."""

    width: int
    ffn: int
    heads: int
    layers: int
    vocabulary: int
    context: int
    batch: int
    documents: int = 1  # of equal lengths in each row, which do not see each other
    scan: bool | None = None  # ours: layers as one compiled loop; None: as the platform has it

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    def __str__(self) -> str:
        return "/".join(str(value) for value in asdict(self).values() if value is not None)


def tokens_of(size: Size) -> np.ndarray:
    """int32 [B, S], uniform: what is computed does not depend on it."""
    return np.random.default_rng(0).integers(0, size.vocabulary, (size.batch, size.context)).astype(np.int32)


def documents_of(size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions within them, int32 [B, S]."""
    each = -(-size.context // size.documents)
    index = np.tile(np.arange(size.context, dtype=np.int32), (size.batch, 1))
    return index // each, index % each


# --- ours -------------------------------------------------------------------------------------------------------------


def graph_of(family: str, size: Size, scan: bool | str = "auto") -> dict[str, Any]:
    """The recipe's `model:` of a family; `scan` as in a recipe."""
    llama = family == "llama"
    norm = {"kind": "rms", "eps": 1e-6} if llama else {"kind": "layer", "eps": 1e-5}
    attention: dict[str, Any] = {"heads": size.heads}
    attention |= {"rope": {"theta": 10000}} if llama else {"bias": True}
    ffn: dict[str, Any] = {"kind": "swiglu" if llama else "gelu", "width": size.ffn}
    ffn |= {} if llama else {"bias": True}
    block = {"kind": "transformer_block", "in": "embed", "repeat": size.layers, "scan": scan}
    nodes: dict[str, Any] = {
        "embed": {"kind": "embedding", "in": "tokens", "vocab": size.vocabulary, "width": size.width},
        "blocks": {**block, "attention": attention, "ffn": ffn, "norm": norm},
        "norm": {"kind": "rms_norm" if llama else "layer_norm", "in": "blocks", "eps": norm["eps"]},
        "logits": {"kind": "unembed", "in": "norm", "vocab": size.vocabulary, "tied": False if llama else "embed"},
        "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
    }
    if not llama:
        nodes["places"] = {"kind": "learned_positions", "in": "embed", "length": size.context}
        nodes["blocks"]["in"] = "places"
    return {"inputs": ["tokens"], "nodes": nodes}


def ours(family: str, size: Size, precision: str) -> tuple[Callable[[], None], Callable[[], float], dict[str, Any]]:
    """(one step, wait and return the loss, facts)."""
    from affinage.hardware.devices import acquire, prepare

    prepare()
    import jax

    from affinage.config.training import PretrainSettings
    from affinage.model import parse
    from affinage.parallel import make_mesh
    from affinage.training.job import TrainJob
    from affinage.training.trainer import Trainer

    settings = {
        "steps": 10**6,
        "batch_size": size.batch,
        "optimizer": {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "max_grad_norm": 1.0},
        "schedule": {"name": "constant", "peak_lr": 1e-4, "min_lr": 0.0},
        "precision": {"compute": precision},
    }
    segments, positions = documents_of(size)
    batch = {
        "tokens": tokens_of(size),
        "positions": positions,
        "loss_mask": np.ones((size.batch, size.context), np.float32),
        "rows": np.arange(size.batch, dtype=np.int32),
    }
    batch |= {"segment_ids": segments} if size.documents > 1 else {}
    job = TrainJob(
        graph=parse(graph_of(family, size, "auto" if size.scan is None else size.scan)),
        settings=PretrainSettings.model_validate(settings),
        mesh={"data": 1},
        seed=0,
        feed=_Same(batch),
        folder=Path("unused"),
    )
    program = Trainer(job, make_mesh({"data": 1}, acquire()[:1]), batch)
    began = time.perf_counter()
    compiled = program.compile_training()
    compiling = time.perf_counter() - began
    state, put = program.begin(), program.put(batch)
    held: list[Any] = [state, None]

    def step() -> None:
        held[0], held[1] = compiled(held[0], put)

    def wait() -> float:
        return float(jax.block_until_ready(held[1])["loss"])

    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    facts = {"parameters": count, "flops": program.flops_per_step, "compile": compiling}
    memory = compiled.memory_analysis()
    facts["temporaries"] = memory.temp_size_in_bytes if memory is not None else 0
    facts["device"] = jax.devices()[0].device_kind
    return step, wait, facts


@dataclass(frozen=True)
class _Same:
    batch: dict[str, np.ndarray]

    def iterate(self, start_step: int) -> Any:
        while True:
            yield self.batch


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def torchs(family: str, size: Size, precision: str, compiled: bool) -> tuple[Any, Any, dict[str, Any]]:
    """The same of transformers' model, AdamW (fused) and clipping; `compiled` by torch.compile.

    Attention is causal SDPA, which is FlashAttention's; for several documents a row FlexAttention, which skips the
    blocks between them.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    kernel = "sdpa" if size.documents == 1 or device == "cpu" else "flex_attention"  # the latter's gradient needs a GPU
    if family == "llama":
        config = LlamaConfig(
            hidden_size=size.width,
            intermediate_size=size.ffn,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            num_hidden_layers=size.layers,
            vocab_size=size.vocabulary,
            max_position_embeddings=size.context,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation=kernel,
        )
        model = LlamaForCausalLM(config)
    else:
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(
            n_embd=size.width,
            n_inner=size.ffn,
            n_head=size.heads,
            n_layer=size.layers,
            vocab_size=size.vocabulary,
            n_positions=size.context,
            use_cache=False,
            attn_implementation=kernel,
            **dropouts,
        )
        model = GPT2LMHeadModel(config)
    model = model.to(device).train()
    count = sum(parameter.numel() for parameter in model.parameters())
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    tokens = torch.from_numpy(tokens_of(size).astype(np.int64)).to(device)
    arguments = {"input_ids": tokens, "labels": tokens}
    if size.documents > 1:  # transformers takes positions that begin again for the borders of documents
        arguments["position_ids"] = torch.from_numpy(documents_of(size)[1].astype(np.int64)).to(device)
    forward = torch.compile(model) if compiled else model
    low = precision == "bfloat16"
    last: list[Any] = [None]

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=low):
            loss = forward(**arguments).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        last[0] = loss.detach()

    def wait() -> float:
        return float(last[0])  # waits for the device

    return step, wait, {"parameters": count, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}


# --- the floor: how fast matrices are multiplied ---------------------------------------------------------------------


def matmul_rate(precision: str, side: int, seconds: float) -> float:
    """Measured FLOP/s of JAX's product of two square matrices."""
    import jax
    import jax.numpy as jnp

    a = jax.random.normal(jax.random.key(0), (side, side), jnp.dtype(precision))
    product = jax.jit(lambda x: x @ x * (1.0 / side))
    product(a).block_until_ready()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        a = product(a)
        count += 1
        if count % 8 == 0:
            a.block_until_ready()
    a.block_until_ready()
    return 2 * side**3 * count / (time.perf_counter() - began)


def kernels(step: Callable[[], None], wait: Callable[[], float], steps: int = 3, most: int = 30) -> list[str]:
    """The kernels that take most of a step of ours on a GPU: milliseconds a step, launches, name."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                step()
            wait()
        (file,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    devices = {e["pid"] for e in events if e.get("name") == "process_name" and "GPU" in e["args"]["name"]}
    streams = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and e["pid"] in devices and "Stream" in e["args"]["name"]
    }
    found: dict[str, list[float]] = {}
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            found.setdefault(event["name"], []).append(event["dur"] / 1000 / steps)
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))
    busy = sum(sum(times) for times in found.values())
    lines = [f"{busy:8.2f} ms of kernels in a step"]
    return lines + [f"{sum(times):8.2f} ms {len(times) / steps:6.0f} x {name[:100]}" for name, times in ordered[:most]]


# --- processes that take turns ---------------------------------------------------------------------------------------


class Contender:
    """A worker process."""

    def __init__(
        self, who: str, family: str, size: Size, precision: str, first: int = 3, profile: bool = False
    ) -> None:
        """Begin with `first` steps, whose losses are `facts["losses"]`; with `profile`, ours has `facts["kernels"]`."""
        self.who = who
        words = ["--first", str(first), *(["--profile"] if profile else [])]
        words += ["--worker", who, "--family", family, "--precision", precision, "--size", json.dumps(asdict(size))]
        command = [sys.executable, str(Path(__file__).resolve()), *words]
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.facts = self._answer()

    def run(self, seconds: float) -> dict[str, float]:
        """Steps for about so long: tokens/s, seconds, seconds of CPU and page faults per step, last loss."""
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
        raise SystemExit(f"{self.who} ended with status {self._process.wait()}")


def work(who: str, family: str, size: Size, precision: str, first: int, profile: bool) -> None:
    """The worker's side: build, make the first steps, report, and step on request; `matmul` only measures products."""
    if who == "matmul":
        import jax

        device = jax.local_devices()[0]
        rate = matmul_rate(precision, *((512, 0.5) if device.platform == "cpu" else (8192, 2.0)))
        print("@" + json.dumps({"device": device.device_kind, "platform": device.platform, "rate": rate}), flush=True)
        return
    if who == "ours":
        step, wait, facts = ours(family, size, precision)
    else:
        step, wait, facts = torchs(family, size, precision, compiled=who == "torch-compile")
    began = time.perf_counter()
    losses = []
    for _ in range(first):
        step()
        losses.append(wait())
    told = {"first": time.perf_counter() - began, "loss": losses[-1], "losses": losses}
    told |= {"kernels": kernels(step, wait)} if profile and who == "ours" else {}
    print("@" + json.dumps({**facts, **told}), flush=True)
    for line in sys.stdin:
        until, steps = float(line), 0
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        while time.perf_counter() - began < until:
            step()
            steps += 1
            if steps % 4 == 0 or facts["device"] == "cpu":
                wait()
        loss, seconds = wait(), time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
        busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        answer = {"rate": steps * size.tokens / seconds, "loss": loss, "step": seconds / steps, "cpu": busy / steps}
        answer["faults"] = (after.ru_minflt - before.ru_minflt) / steps
        print("@" + json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--family", required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    size = Size(**json.loads(arguments.size))
    work(arguments.worker, arguments.family, size, arguments.precision, arguments.first, arguments.profile)


if __name__ == "__main__":
    main()
