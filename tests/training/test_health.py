"""Sick steps: left out or gone back from, told with their documents, diagnosed, and stopped in time."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from affinage.config.training import HealthSettings
from affinage.model import ApplyConfig, init_params, parse
from affinage.model.layer import LAYERS, Layer, LayerContext, register_layer
from affinage.training import TrainJob, train
from affinage.training.health import HealthMonitor, TrainingDiverged, data_offset_at, diagnose
from affinage.training.state import LossWindow
from affinage.training.step import detect_spike
from run_affinage import refused


def job(folder: Path, feed: tiny.SickFeed, hook=None, every: int = 5, steps: int = 15, **health: object) -> TrainJob:
    how = {"checkpoint": {"every_steps": every}, "health": {"spike_window": 16} | health}
    return tiny.job(folder, steps, hook, feed=feed, **how)


class Later(tiny.SickFeed):
    """Leaves the batches 6, 7 and 8 out."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        return super().batch(step if step < 5 else step + 3)


@pytest.mark.parametrize("fails", [False, True], ids=["undisturbed", "killed after it"])
def test_a_rollback_continues_as_if_the_batches_since_had_never_been(tmp_path: Path, fails: bool):
    feed, seen, without = tiny.SickFeed(not_finite=(8,)), [], tmp_path / "without"
    train(job(without, Later()))
    if fails:
        with pytest.raises(RuntimeError):
            train(job(tmp_path, feed, tiny.fails_at(12), on_nonfinite="rollback"))
    told: Any = SimpleNamespace(due=lambda step: False, rolled_back=lambda step, state: seen.append(step))
    last = job(tmp_path, feed, lambda step, _: seen.append(step), on_nonfinite="rollback")
    summary = train(replace(last, monitor=told))
    assert fails or seen[-11] == 5, "the monitor was not told"
    assert seen[-10:] == [*range(6, 16)] or (fails and summary["resumed_at"] == [10])
    assert summary["health"]["data_offset"] == 3 and summary["health"]["rollbacks"] == [[8, 5]]
    assert summary["seconds"]["lost"] > 0
    assert tiny.saved_bits(tmp_path, 15, "params", "opt_state") == tiny.saved_bits(without, 15, "params", "opt_state")
    (event,) = tiny.lines(tmp_path, "health.jsonl")
    assert (event["action"], event["back_to"]) == ("rolled back", 5)
    assert [line["step"] for line in tiny.lines(tmp_path)] == list(range(1, 16))
    assert [data_offset_at(tmp_path, step) for step in (5, 6, 15)] == [0, 3, 3]
    longer = replace(job(tmp_path / "longer", feed, steps=16, on_nonfinite="rollback"), extends=(tmp_path, 15))
    assert train(longer)["health"]["data_offset"] == 3 and data_offset_at(longer.folder, 16) == 3


def test_too_many_stop_the_run_with_a_diagnosis_also_across_starts(tmp_path: Path):
    feed = tiny.SickFeed(not_finite=(5, 6, 7))
    with pytest.raises(RuntimeError):
        train(job(tmp_path, feed, tiny.fails_at(6), every=1, max_skips=3))
    assert refused(lambda: train(job(tmp_path, feed, every=1, max_skips=3)), match="3 updates within 100 steps").fix
    found = json.loads((tmp_path / "diagnosis.json").read_text(), parse_constant=pytest.fail)
    assert found["step"] == 7 and found["first"] == "the value of loss"
    assert set(found["gradient_norms"]) >= {"embed", "blocks"}


@pytest.mark.full
@pytest.mark.parametrize("policy", ["rollback", "log"])
def test_a_spike_is_noted_or_gone_back_from(tmp_path: Path, policy: str):
    summary = train(job(tmp_path, tiny.SickFeed(spikes=(13,)), on_spike=policy, spike_window=8))
    (event,) = tiny.lines(tmp_path, "health.jsonl")
    assert event["step"] == 13 and event["cause"] == "spike" and event["spike_score"] > 6
    assert event["action"] == {"log": "logged", "rollback": "rolled back"}[policy]
    assert summary["health"]["data_offset"] == (3 if policy == "rollback" else 0)


SICK = {"skipped": 1.0, "loss": float("nan"), "grad_norm": float("nan")}
SICK_SPIKE = {"skipped": 1.0, "loss": 9.0, "grad_norm": float("inf"), "spike": 1.0, "spike_score": 60.0}
NOTED = {"spike_window": 8, "on_spike": "log", "max_skips": 3}
BACK, TEN = {"on_nonfinite": "rollback", "max_skips": 99}, {"rollbacks": [[step, step - 1] for step in range(1, 11)]}


@pytest.mark.parametrize(("limits", "before", "metrics", "steps", "opens"), [
    pytest.param({}, {}, SICK, [1, 26, 51, 76, 100], True, id="5 in 100"),
    pytest.param({}, {}, SICK, [1, 26, 51, 76, 101], False, id="5 in 101"),
    pytest.param({"max_skips": 2, "window": 5}, {}, SICK, [3, 9, 12], True, id="2 in 5"),
    pytest.param(NOTED, {}, SICK_SPIKE, [10, 11, 12], True, id="spikes are only noted"),
    pytest.param(BACK, TEN, SICK, [30], True, id="after ten rollbacks"),
])  # fmt: skip
def test_too_many_updates_that_are_not_finite_stop_a_run(tmp_path: Path, limits, before, metrics, steps, opens: bool):
    health = HealthMonitor(HealthSettings(**limits), tmp_path, 0, before)
    with pytest.raises(TrainingDiverged) if opens else contextlib.nullcontext():
        for step in steps:
            health.update(step, metrics)
    found = [(event["cause"], event["action"]) for event in tiny.lines(tmp_path, "health.jsonl")]
    skipped = "nonfinite", "skipped"
    assert found == [*[skipped] * (len(steps) - 1), ("nonfinite", "stopped") if opens else skipped]


def test_the_diagnosis_names_the_node_in_which_something_is_no_longer_finite(monkeypatch: pytest.MonkeyPatch):
    graph, batch = tiny.graph(layers=2), tiny.RandomFeed().batch(0)
    params = init_params(graph, jax.random.key(0))
    block, blocks = type(next(node for node in graph.nodes if node.name == "blocks").layer), params["blocks"]
    apply = block.apply

    def first(**changed: Any) -> str:
        return diagnose(graph, ApplyConfig(), params | changed, None, batch)["first"]

    assert first() == "nothing"
    grown = jax.tree.map(lambda w: w.at[1].mul(1e30) if w.ndim > 2 else w, blocks)
    assert first(blocks=grown) == "the value of blocks"
    assert first(blocks=jax.tree.map(lambda w: w.at[1].set(jnp.nan), blocks)) == "the weights of blocks"

    def with_a_root(kind: Any, weights: Any, inputs: tuple[Any, ...], context: Any) -> Any:
        """Its value is finite where the weights are 0, its gradient is not."""
        result = apply(kind, weights, inputs, context)
        return replace(result, value=result.value + jnp.sqrt(jnp.abs(weights["ffn_norm"]["scale"]))[None, None])

    monkeypatch.setattr(block, "apply", with_a_root)
    scale = blocks["ffn_norm"]["scale"].at[jnp.array([0, 1])].set(0.0)
    assert first(blocks=blocks | {"ffn_norm": {"scale": scale}}) == "the gradient of blocks"


# ---- losses that stand out of those before


def series(steps: int, seed: int) -> np.ndarray:
    """Losses as of a training: a fall from 10 to 3, noise that has heavy tails and shrinks, and slow waves."""
    draw, at = np.random.default_rng(seed), np.arange(steps)
    level = 3 + 7 * (1 + at / 200) ** -0.5 + 0.02 * np.sin(at / 3000)
    return (level * (1 + 0.01 * draw.standard_t(8, steps))).astype(np.float32)


@jax.jit
def scores(losses: jax.Array) -> jax.Array:
    def step(window: LossWindow, loss: jax.Array) -> tuple[LossWindow, jax.Array]:
        return window.with_loss(loss), window.score(loss)

    return jax.lax.scan(step, LossWindow.empty(128), losses)[1]


def expected_score(before: list[float], loss: float) -> float:
    if len(before) < 16:
        return 0.0
    window = np.array(before[-128:], np.float64)
    median = np.median(window)
    return (loss - median) / max(1.4826 * np.median(np.abs(window - median)), 0.002 * median)


def test_the_score_is_that_of_numpy():
    draw, at = np.random.default_rng(0), np.arange(300)
    losses = ((1 + 9 * np.exp(-at / 12)) * (1 + 0.01 * draw.standard_normal(300))).astype(np.float32)
    losses[[30, 41, 45]] = np.nan, np.inf, 20.0
    got, seen = np.asarray(scores(losses)), []
    for step, loss in enumerate(losses):
        if np.isfinite(loss):
            np.testing.assert_allclose(got[step], expected_score(seen, loss), rtol=2e-3, atol=1e-3)
            seen.append(loss)


def test_many_clean_steps_do_not_stop_a_run_and_every_spike_is_seen():
    clean = series(10_000, 1)
    spikes = np.asarray(scores(clean)) > 6
    assert spikes.mean() < 1e-3
    limits = HealthSettings()
    assert np.convolve(spikes, np.ones(limits.window), "valid").max() < limits.max_skips
    at, spiky = np.arange(5_000, 10_000, 497), clean.copy()
    spiky[at] *= 1.15  # thirteen deviations
    assert (np.asarray(scores(spiky))[at] > 6).all()


def test_what_is_not_finite_is_no_spike_and_updates_nothing():
    window = LossWindow.empty(8)
    for loss in np.linspace(3.0, 2.9, 8, dtype=np.float32):
        window = window.with_loss(loss)
    for loss, finite, spike in ((jnp.inf, False, False), (jnp.float32(9.0), True, True)):
        _, is_finite, metrics = detect_spike(window, loss, HealthSettings(spike_window=8, on_spike="log"))
        assert (bool(is_finite), bool(metrics["spike"])) == (finite, spike)


# ---- layers that fall ill


SITES = {"below": ("drop", "blocks"), "above": ("blocks", "norm")}  # the layers, and the nodes between which it is
INJECTIONS = [*itertools.product(SITES, ("value", "gradient"), (np.nan, np.inf, -np.inf))]


@jax.custom_vjp
def poisoned(x: jax.Array, value: jax.Array, gradient: jax.Array) -> jax.Array:
    return x + value


poisoned.defvjp(lambda x, value, gradient: (x + value, gradient), lambda gradient, g: (g + gradient, None, None))


@pytest.fixture(scope="module", autouse=True)
def sick_kind() -> Iterator[None]:
    """A node that adds what the batch says to a value and to its gradient."""

    @register_layer("sick")
    class Sick(Layer):
        site: str

        def shape(self, inputs: tuple[Any, ...]) -> Any:
            return inputs[0]

        def apply(self, params: Any, inputs: tuple[Any, ...], context: LayerContext) -> jax.Array:
            of = [context.batch[f"{self.site} {way}"][:, None, None] for way in ("value", "gradient")]
            return poisoned(inputs[0], *(each.astype(inputs[0].dtype) for each in of))

    yield
    del LAYERS["sick"]


class Feed(tiny.RandomFeed):
    """Every second step is sick in one row, as of `INJECTIONS`."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step)
        batch |= {f"{site} {way}": np.zeros(self.rows, np.float32) for site in SITES for way in ("value", "gradient")}
        if step % 2:
            site, way, value = INJECTIONS[step // 2]
            batch[f"{site} {way}"][step % self.rows] = value
        return batch


def test_a_sick_batch_leaves_nothing_behind_wherever_it_is_sick():
    nodes = tiny.graph(layers=1).to_dict()["nodes"]
    for site, (before, after) in SITES.items():
        nodes[site] = {"kind": "sick", "in": before, "site": site}
        nodes[after] |= {"in": site}
    changes = {"precision": {"params": "bfloat16"}, "health": {"spike_window": 16, "on_spike": "skip"}}
    feed, graph = Feed(), parse({"inputs": ["tokens"], "nodes": nodes})
    program, step = tiny.compiled(tiny.job(Path("unused"), graph=graph, feed=feed, **changes))
    state, well = program.begin(), program.begin()
    for number in range(2 * len(INJECTIONS)):
        before, sick = tiny.bits(state[1:3]), bool(number % 2)  # weights and optimizer
        state, metrics = step(state, program.put(feed.batch(number)))
        assert bool(metrics["skipped"]) == (tiny.bits(state[1:3]) == before) == sick, INJECTIONS[number // 2]
        if sick:
            well = well._replace(step=jax.device_put(well.step + 1, well.step.sharding))
        else:
            well, _ = step(well, program.put(feed.batch(number)))
    assert tiny.bits(well[1:3]) == tiny.bits(state[1:3])
