"""Answers on disk as they come, so that a kill costs seconds and not the evaluation."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from affinage.cluster.processes import Processes
from affinage.generation.decode import Generation, Request
from affinage.generation.model import LoadedModel
from affinage.model.parameter import Tree

_SECONDS = 2.0  # between writes
_TOLD_AT_ONCE = 1000  # answers in a message to the other hosts


def fingerprint(model: LoadedModel) -> str:
    """What tells a model from others: its graph, how it is computed, and a sum over the bits of all weights."""
    sums = [int(one) for one in jax.device_get(_sums(model.params))]
    facts = json.dumps([model.graph.to_dict(), model.compute_dtype, model.context, sums], sort_keys=True, default=str)
    return hashlib.blake2b(facts.encode(), digest_size=12).hexdigest()


@jax.jit
def _sums(params: Tree) -> list[UInt32[Array, ""]]:
    return [_sum(leaf) for leaf in jax.tree.leaves(params)]


def _sum(leaf: Array) -> UInt32[Array, ""]:
    """The bits of every element times a number that depends on its place, modulo 2**32; no copy of the weights."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
    for axis in range(leaf.ndim):
        place = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        bits = bits * (place * jnp.uint32(2654435762) + jnp.uint32(1))
    return jnp.sum(bits, dtype=jnp.uint32)


class Ledger:
    """The answers of one model by what it was asked, in a file that only grows: log-probabilities and greedy texts.

    Its first line names the model; a file of another is begun anew. A line that a kill cut off is not read, nor is
    what follows it. Of hosts that evaluate together the first one has the file, and tells the others what is in it:
    all of them must put the same questions to the devices.
    """

    def __init__(self, path: Path, model: str) -> None:
        processes = Processes.at_work()
        self._path = path if processes.first else None
        self._known: dict[str, tuple[float, bool]] = {}
        self._texts: dict[str, Generation] = {}
        self._waiting: list[str] = []
        self._written = time.monotonic()
        if self._path is not None:
            self._read(self._path, model)
        known: list[list[Any]] = [[key, *answer] for key, answer in self._known.items()]
        known += [[key, asdict(text)] for key, text in self._texts.items()]
        for start in range(
            0, processes.broadcast("how many answers are known", len(known), seconds=None), _TOLD_AT_ONCE
        ):
            for line in processes.broadcast(
                "answers that are known", known[start : start + _TOLD_AT_ONCE], seconds=None
            ):
                self._take(line)

    def _read(self, path: Path, model: str) -> None:
        header = json.dumps({"model": model}) + "\n"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        whole = len(header)
        for line in lines[1:] if lines[:1] == [header] else ():
            if not line.endswith("\n"):
                break
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError):
                break
            whole += len(line.encode())
        path.parent.mkdir(parents=True, exist_ok=True)
        if lines[:1] != [header]:
            path.write_text(header, encoding="utf-8")
        else:
            with path.open("r+b") as file:
                file.truncate(whole)

    def _take(self, line: list[Any]) -> None:
        key, *answer = line
        if len(answer) == 1:
            self._texts[key] = Generation(**answer[0])
        else:
            value, greedy = answer
            self._known[key] = float(value), bool(greedy)

    def __len__(self) -> int:
        return len(self._known) + len(self._texts)

    def get(self, before: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool] | None:
        """What was answered for these tokens; None if nothing was."""
        return self._known.get(_key(before, continuation))

    def put(self, before: Sequence[int], continuation: Sequence[int], answer: tuple[float, bool]) -> None:
        """Keep an answer. It is on disk after some seconds, or after `flush`."""
        key = _key(before, continuation)
        self._known[key] = answer
        self._keep([key, answer[0], answer[1]])

    def get_text(self, prompt: Sequence[int], request: Request) -> Generation | None:
        """What was generated after a prompt; None if nothing was."""
        return self._texts.get(_key_of_text(prompt, request))

    def put_text(self, prompt: Sequence[int], request: Request, generation: Generation) -> None:
        """Keep a text that any other run would generate, too. It is on disk after some seconds, or after `flush`."""
        key = _key_of_text(prompt, request)
        self._texts[key] = generation
        self._keep([key, asdict(generation)])

    def _keep(self, line: list[Any]) -> None:
        self._waiting.append(json.dumps(line) + "\n")
        if time.monotonic() - self._written > _SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._path is None:
            self._waiting.clear()
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(self._waiting))
        self._waiting.clear()
        self._written = time.monotonic()


def _key_of_text(prompt: Sequence[int], request: Request) -> str:
    asked = json.dumps(["text", list(map(int, prompt)), asdict(request)])
    return hashlib.blake2b(asked.encode(), digest_size=12).hexdigest()


def _key(before: Sequence[int], continuation: Sequence[int]) -> str:
    tokens = np.asarray([len(continuation), *before, *continuation], np.int32)
    return hashlib.blake2b(tokens.tobytes(), digest_size=12).hexdigest()
