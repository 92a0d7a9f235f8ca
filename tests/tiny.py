"""A model of a few thousand weights, a feed of random rows, and trainings of both whose steps are compiled once."""

import dataclasses
import functools
import itertools
import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import tiny_graphs
from affinage.checkpoint import CheckpointStore
from affinage.config.recipe import RuntimeSettings
from affinage.config.training import PretrainSettings, TrainSettings
from affinage.model import ApplyConfig, Graph, init_params, parse
from affinage.parallel.sharding import MeshLayout, make_mesh
from affinage.parallel.strategy import Strategy
from affinage.results import read_json_lines
from affinage.training import TrainJob
from affinage.training.metrics import METRICS
from affinage.training.optimizer import Optimizer, optimizer
from affinage.training.state import Purpose, TrainState, random_key
from affinage.training.trainer import Hook, Trainer

VOCABULARY, CONTEXT = 64, 16


@optimizer("sgd")
class Sgd(Optimizer):
    """An optimizer that affinage does not bring."""

    momentum: float = 0.9

    def direction(self, settings: Any) -> optax.GradientTransformation:
        return optax.trace(self.momentum)


def graph(dropout: float = 0.0, layers: int = 2, width: int = 64) -> Graph:
    ffn = {"kind": "swiglu", "width": width}
    model = tiny_graphs.llama(layers=layers, vocabulary=VOCABULARY, ffn=ffn, **{"in": "drop"})
    model["nodes"]["drop"] = {"kind": "dropout", "in": "embed", "rate": dropout}
    return parse(model)


class RandomFeed:
    """Rows of some documents each, with masks of very different sums; a function of (seed, step) alone."""

    def __init__(self, rows: int = 8, seed: int = 0, context: int = CONTEXT, documents: int = 2) -> None:
        self.rows, self.seed, self.context, self.documents = rows, seed, context, documents

    def batch(self, step: int) -> dict[str, np.ndarray]:
        draw, shape = np.random.default_rng((self.seed, step)), (self.rows, self.context)
        # A skewed distribution, so that there is something to learn.
        tokens = (VOCABULARY * draw.random(shape) ** 3).astype(np.int32)
        borders = np.sort(draw.integers(2, self.context - 2, (self.rows, self.documents - 1)), axis=1)
        index = np.arange(self.context)[None, :]
        segments = (index[:, :, None] >= borders[:, None, :]).sum(-1)
        starts = np.concatenate([np.zeros((self.rows, 1), int), borders], axis=1)
        return {
            "tokens": tokens,
            "segment_ids": segments.astype(np.int32),
            "positions": (index - np.take_along_axis(starts, segments, axis=1)).astype(np.int32),
            "loss_mask": (draw.random(shape) < np.linspace(0.1, 1.0, self.rows)[:, None]).astype(np.float32),
            "rows": np.arange(self.rows, dtype=np.int32),
        }

    def iterate(self, number: int) -> Iterator[dict[str, np.ndarray]]:
        return map(self.batch, itertools.count(number))


class SickFeed(RandomFeed):
    """Batches of the given steps, counted from 1, lead to a loss that is not finite, or to a spike of it."""

    def __init__(self, not_finite: tuple[int, ...] = (), spikes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self._not_finite, self._spikes = not_finite, spikes

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step)
        if step + 1 in self._not_finite:
            batch["loss_mask"][-1] = np.nan  # in one row, and so in one process
        if step + 1 in self._spikes:
            batch["tokens"] = np.full_like(batch["tokens"], VOCABULARY - 1)
        return batch


class HeldOut:
    """Two batches of rows for validation."""

    bytes = 1000

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return map(RandomFeed(seed=99).batch, range(2))


def settings(steps: int = 20, **changes: object) -> PretrainSettings:
    schedule = {"peak_lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 4}
    values = {"steps": steps, "batch_size": 8, "schedule": schedule, "eval_every": 10, "log_every": 1}
    return PretrainSettings.model_validate(values | changes)


# What says how a training goes on, and nothing of what its steps compute.
_NOT_IN_STEPS = {"log_every", "eval_every", "eval_sequences"}
_weights: dict[str, Any] = {}
_OF_JOB = {field.name for field in dataclasses.fields(TrainJob)}


class Kept:
    """A strategy that compiles a step once in this process, whichever training asks for it."""

    programs: dict[str, Any] = {}

    def __init__(self, job: TrainJob) -> None:
        of_settings = job.settings.model_dump(mode="json", exclude=_NOT_IN_STEPS)
        health = job.settings.health
        of_settings["health"] = [health.spike_window, health.on_spike == "log"]
        self.key = [job.graph.to_dict(), of_settings, dict(job.mesh), job.seed, job.parallel.model_dump(mode="json")]

    def check(self, graph: Graph, rows: int, layout: MeshLayout) -> None: ...

    def adapt(self, call: ApplyConfig) -> ApplyConfig:
        return call

    def compile(self, step: Any, state: Any, batch: Any, *, donate: bool) -> Any:
        key = f"{donate} {json.dumps(self.key)} {jax.tree.leaves(state)[0].sharding.mesh.devices} {batch}"
        if key not in self.programs:
            self.programs[key] = Strategy().compile(step, state, batch, donate=donate)
        return self.programs[key]


def job(folder: Path, steps: int = 10, hook: Hook | None = None, **changes: Any) -> TrainJob:
    """A training of one layer on one device. `changes` are fields of the job, of its runtime or of its settings."""
    of_job = {name: changes.pop(name) for name in _OF_JOB & changes.keys()}
    how = {name: changes.pop(name) for name in RuntimeSettings.model_fields.keys() & changes.keys()}
    of_job.setdefault("runtime", RuntimeSettings.model_validate({"checkpoint": {"every_steps": 5}, **how}))
    values = {"graph": graph(layers=1), "mesh": {"data": 1}, "seed": 1, "feed": RandomFeed(), "folder": folder}
    values |= {"on_step": (hook,) if hook else ()} | of_job
    made = TrainJob(**{"settings": settings(steps, **changes), **values})
    kept: dict[str, Any] = {}
    if "initial_params" not in of_job:
        kept["initial_params"] = functools.partial(_first_weights, made)
    if made.strategy is None and "pipeline" not in made.mesh:
        kept["strategy"] = Kept(made)
    return dataclasses.replace(made, **kept)


def _first_weights(job: TrainJob, abstract: Any) -> Any:
    """The weights that such a job begins with by itself, drawn once in this process."""
    key = json.dumps([job.graph.to_dict(), job.seed])
    if key not in _weights:
        draw = jax.jit(functools.partial(init_params, job.graph))
        _weights[key] = jax.device_get(draw(random_key(job.seed, Purpose.INITIAL_WEIGHTS)))
    return placed(_weights[key], abstract)


def tuning(kind: type[TrainSettings], steps: int = 10, *, own: Mapping[str, object], **changes: object) -> Any:
    """The same settings for a kind of fine-tuning, with what is its own."""
    common = settings(steps, **changes).model_dump(include=set(TrainSettings.model_fields))
    return kind.model_validate({**common, "sources": ["none"], **own})


def fails_at(step: int) -> Hook:
    """A hook in which the machine fails after a step."""

    def fail(at: int, state: TrainState) -> None:
        if at == step:
            raise RuntimeError("the machine fails")

    return fail


def stops_at(step: int) -> Hook:
    """A hook that has the training told to stop after a step."""
    return lambda at, state: signal.raise_signal(signal.SIGTERM) if at == step else None


def saved_bits(folder: Path, step: int, *names: str) -> list[bytes]:
    """The bits of all arrays of a checkpoint, of some of its trees or of all."""
    store = CheckpointStore(folder / "checkpoints")
    trees = store.abstract(step)
    return bits(store.restore(step, {name: trees[name] for name in sorted(names or trees)}))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """What a training has written line by line."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def uncompiled(job: TrainJob) -> Trainer:
    return Trainer(job, make_mesh(job.mesh, jax.devices()), next(job.feed.iterate(0)))


def compiled(job: TrainJob) -> tuple[Trainer, Any]:
    """The program of a job, and its compiled step."""
    program = uncompiled(job)
    return program, program.compile_training()


def steps_of(job: TrainJob, count: int, begin: Any = None) -> tuple[TrainState, list[dict[str, float]]]:
    """The state after some steps from `begin`, or from the job's own beginning, and the metrics of each."""
    program, step = compiled(job)
    state = program.begin() if begin is None else placed(begin, program.abstract)
    seen, batches = [], job.feed.iterate(0)
    for _ in range(count):
        state, metrics = step(state, program.put(next(batches)))
        seen.append({name: float(value) for name, value in metrics.items()})
    return state, seen


def placed(state: Any, like: Any) -> Any:
    """A state on the devices, with the dtypes and shardings that another has."""
    return jax.tree.map(lambda x, like: jax.device_put(x.astype(like.dtype), like.sharding), state, like)


def assert_close(got: list[dict[str, float]], expected: list[dict[str, float]], rtol: float = 1e-5) -> None:
    """The same losses and norms of gradients."""
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in got], [m[name] for m in expected], rtol=rtol, err_msg=name)


_MEASURED = frozenset("tokens_per_second mfu data_time step_time goodput".split())


def curve(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are equal if two runs computed the same."""
    rows = read_json_lines(folder / METRICS)
    return [{key: value for key, value in row.items() if key not in _MEASURED} for row in rows]
