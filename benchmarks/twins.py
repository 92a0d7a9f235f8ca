"""The same model, batch and optimizer twice: as our train step, and in PyTorch by transformers. Used by step_*.py.

Every contender lives in a process of its own (`python twins.py JSON`), runs on request, and answers with what it
measured. So contenders take turns, and no library's threads or allocator touch another's.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

Twin = tuple[Callable[[], None], Callable[[], float], dict[str, Any]]  # a step; wait and return the loss; facts


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

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return self.batch * self.context

    def __str__(self) -> str:
        return "/".join(map(str, asdict(self).values()))

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return uniform tokens, segments and positions within them, all int32 [batch, context]."""
        tokens = np.random.default_rng(0).integers(0, self.vocabulary, (self.batch, self.context)).astype(np.int32)
        index = np.tile(np.arange(self.context, dtype=np.int32), (self.batch, 1))
        each = -(-self.context // self.documents)
        return tokens, index // each, index % each


def graph_of(family: str, size: Size) -> dict[str, Any]:
    """Return a recipe's `model:` of a family, llama or gpt2."""
    llama = family == "llama"
    norm = {"kind": "rms", "eps": 1e-6} if llama else {"kind": "layer", "eps": 1e-5}
    nodes: dict[str, Any] = {
        "embed": {"kind": "embedding", "in": "tokens", "vocab": size.vocabulary, "width": size.width},
        "blocks": {
            "kind": "transformer_block",
            "in": "embed" if llama else "places",
            "repeat": size.layers,
            "attention": {"heads": size.heads} | ({"rope": {"theta": 10000}} if llama else {"bias": True}),
            "ffn": {"kind": "swiglu", "width": size.ffn}
            if llama
            else {"kind": "gelu", "width": size.ffn, "bias": True},
            "norm": norm,
        },
        "norm": {"kind": "rms_norm" if llama else "layer_norm", "in": "blocks", "eps": norm["eps"]},
        "logits": {"kind": "unembed", "in": "norm", "vocab": size.vocabulary, "tied": False if llama else "embed"},
        "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
    }
    if not llama:
        nodes["places"] = {"kind": "learned_positions", "in": "embed", "length": size.context}
    return {"inputs": ["tokens"], "nodes": nodes}


def ours(family: str, size: Size, precision: str) -> Twin:
    """Return the twin as a run compiles it."""
    from affinage.hardware.devices import prepare

    prepare()
    import jax
    from measuring import batch_of, trainer_of

    from affinage.config.training import PretrainSettings
    from affinage.model import parse

    settings = {
        "steps": 10**6,
        "batch_size": size.batch,
        "optimizer": {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "max_grad_norm": 1.0},
        "schedule": {"name": "constant", "peak_lr": 1e-4, "min_lr": 0.0},
        "precision": {"compute": precision},
    }
    tokens, segments, positions = size.arrays()
    batch = batch_of(tokens, segments if size.documents > 1 else None, positions)
    graph = parse(graph_of(family, size))
    trainer = trainer_of(graph, PretrainSettings.model_validate(settings), {"data": 1}, batch)
    start = time.perf_counter()
    compiled = trainer.compile_training()
    compiling = time.perf_counter() - start
    state, put, metrics = trainer.begin(), trainer.put(batch), {}

    def step() -> None:
        nonlocal state, metrics
        state, metrics = compiled(state, put)

    memory = compiled.memory_analysis()
    facts = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "flops": trainer.flops_per_step,
        "compile": compiling,
        "temporaries": memory.temp_size_in_bytes if memory is not None else 0,
        "device": jax.devices()[0].device_kind,
    }
    return step, lambda: float(jax.block_until_ready(metrics)["loss"]), facts


def pytorch(family: str, size: Size, precision: str, compiled: bool) -> Twin:
    """Return the twin of transformers' model with fused AdamW and clipping, under torch.compile if `compiled`.

    Attention is causal SDPA. Several documents a row take FlexAttention on a GPU, which skips the blocks between them.
    """
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    shared = {"vocab_size": size.vocabulary, "use_cache": False}
    if family == "llama":
        config = LlamaConfig(
            hidden_size=size.width,
            intermediate_size=size.ffn,
            num_attention_heads=size.heads,
            num_hidden_layers=size.layers,
            max_position_embeddings=size.context,
            tie_word_embeddings=False,
            **shared,
        )
    else:
        config = GPT2Config(
            n_embd=size.width,
            n_inner=size.ffn,
            n_head=size.heads,
            n_layer=size.layers,
            n_positions=size.context,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **shared,
        )
    kernel = "sdpa" if size.documents == 1 or device == "cpu" else "flex_attention"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel).to(device).train()
    groups = [
        {"params": [each for each in model.parameters() if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    tokens, _, positions = (torch.from_numpy(array.astype(np.int64)).to(device) for array in size.arrays())
    arguments = {"input_ids": tokens, "labels": tokens}
    if size.documents > 1:  # transformers takes positions that begin again for the borders of documents
        arguments["position_ids"] = positions
    forward, last = torch.compile(model) if compiled else model, tokens

    def step() -> None:
        nonlocal last
        with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            loss = forward(**arguments).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        last = loss.detach()

    count = sum(parameter.numel() for parameter in model.parameters())
    return step, lambda: float(last), {"parameters": count, "device": device}


def matmul_rate(precision: str, side: int, seconds: float) -> float:
    """Return the measured FLOP/s of JAX's product of two square matrices: the physical limit of a step."""
    import jax
    import jax.numpy as jnp

    a = jax.random.normal(jax.random.key(0), (side, side), jnp.dtype(precision))
    product = jax.jit(lambda x: x @ x * (1.0 / side))
    product(a).block_until_ready()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        a = product(a)
        count += 1
        if count % 8 == 0:
            a.block_until_ready()
    a.block_until_ready()
    return 2 * side**3 * count / (time.perf_counter() - start)


class Contender:
    """A worker process that has made its first steps; `facts` says what it found."""

    def __init__(self, who: str, family: str, size: Size, precision: str) -> None:
        """Start it: `who` is ours, torch-eager or torch-compile, or matmul, which only measures products."""
        self.who = who
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps([who, family, asdict(size), precision])]
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.facts = self._answer()

    def run(self, seconds: float) -> dict[str, float]:
        """Make steps for some seconds: rate (tokens/s), cpu (seconds of CPU a step), loss (the last)."""
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
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


def work(who: str, family: str, size: Size, precision: str) -> None:
    """Be a worker: build the twin, make three steps, report, and make steps on request."""
    if who == "matmul":
        import jax

        device = jax.local_devices()[0]
        rate = matmul_rate(precision, *((512, 0.5) if device.platform == "cpu" else (8192, 2.0)))
        print("@" + json.dumps({"device": device.device_kind, "platform": device.platform, "rate": rate}), flush=True)
        return
    twin = ours(family, size, precision) if who == "ours" else pytorch(family, size, precision, who == "torch-compile")
    step, wait, facts = twin
    for _ in range(3):
        step()
        wait()
    print("@" + json.dumps(facts), flush=True)
    for line in sys.stdin:
        steps, before, start = 0, resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        while time.perf_counter() - start < float(line):
            step()
            steps += 1
            if steps % 4 == 0 or facts["device"] == "cpu":
                wait()
        loss, seconds = wait(), time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / steps
        print("@" + json.dumps({"rate": steps * size.tokens / seconds, "loss": loss, "cpu": cpu}), flush=True)


if __name__ == "__main__":
    who, family, size, precision = json.loads(sys.argv[1])
    work(who, family, Size(**size), precision)
