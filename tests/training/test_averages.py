"""Moving averages of weights belong to the state: moved by its step, split, skipped, saved and resumed with it."""

import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import tiny_graphs
from affinage.checkpoint import CheckpointStore
from affinage.errors import Preempted
from affinage.model import parse
from affinage.parallel import make_mesh
from affinage.training import TrainJob, train
from affinage.training.program import Program
from affinage.training.state import TrainState

GRAPH = parse(tiny_graphs.byol())


class Images:
    """Blurred noise, a function of the step."""

    def __init__(self, poisoned_at: int | None = None) -> None:
        self.poisoned_at = poisoned_at

    def batch(self, step: int) -> dict[str, np.ndarray]:
        images = np.random.default_rng(step).random((8, 8, 8, 1)).astype(np.float32)
        if step == self.poisoned_at:
            images[0] = np.nan
        return {"images": images, "rows": np.arange(8, dtype=np.int32)}

    def iterate(self, start_step: int) -> Iterator[dict[str, np.ndarray]]:
        step = start_step
        while True:
            yield self.batch(step)
            step += 1


def job(folder: Path, mesh: dict[str, int] | None = None, steps: int = 10, **changes: object) -> TrainJob:
    settings = tiny.settings(steps, **changes)
    return TrainJob(graph=GRAPH, settings=settings, mesh=mesh or {"data": 1}, seed=1, feed=Images(), folder=folder)


def steps(mesh: dict[str, int], count: int, **changes: object) -> tuple[list[TrainState], list[dict[str, float]]]:
    program = Program(job(Path("unused"), mesh, **changes), make_mesh(mesh, jax.devices()), Images().batch(0))
    step, state, seen = program.compile_training(), program.begin(), []
    states = [jax.device_get(state)]
    for number in range(count):
        state, metrics = step(state, program.put(Images(poisoned_at=3).batch(number)))
        states.append(jax.device_get(state))
        seen.append({name: float(value) for name, value in metrics.items()})
    return states, seen


@pytest.fixture(scope="module")
def one_device() -> tuple[list[TrainState], list[dict[str, float]]]:
    return steps({"data": 1}, 4)


def test_every_step_moves_the_averages_by_the_formula(one_device):
    states, _ = one_device
    for before, after in pairwise(states[:4]):
        for name, tree in after.averages["target"].items():
            jax.tree.map(
                lambda new, old, p: np.testing.assert_allclose(new, 0.9 * old + 0.1 * p, rtol=1e-5, atol=1e-7),
                tree,
                before.averages["target"][name],
                after.params[name],
            )


def test_a_skipped_update_leaves_them_bit_for_bit(one_device):
    states, seen = one_device
    assert [metrics["skipped"] for metrics in seen] == [0, 0, 0, 1]
    for a, b in zip(jax.tree.leaves(states[3][1:]), jax.tree.leaves(states[4][1:]), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(("mesh", "parts"), [({"fsdp": 4}, 1), ({"data": 2}, 2)])
def test_mesh_and_accumulation_change_nothing(mesh: dict[str, int], parts: int, one_device):
    _, expected = one_device
    _, got = steps(mesh, 3, micro_batches=parts)
    for name in ("loss", "grad_norm", "targets"):
        np.testing.assert_allclose([m[name] for m in got], [m[name] for m in expected[:3]], rtol=2e-4)
    assert got[0]["targets"] == 8


def test_averages_are_split_like_the_weights_they_follow():
    mesh = {"fsdp": 4}
    abstract = Program(job(Path("unused"), mesh), make_mesh(mesh, jax.devices()), Images().batch(0)).abstract
    for name, tree in abstract.averages["target"].items():
        jax.tree.map(lambda a, p: a.sharding == p.sharding or pytest.fail(f"{a} {p}"), tree, abstract.params[name])
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract.averages)} == {jnp.dtype("float32")}


def test_stopped_and_started_again_it_ends_with_the_same_bits(tmp_path: Path):
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    summary = train(job(whole))
    assert summary["images"] == 10 * 8 and "tokens" not in summary
    assert summary["final_loss"] < summary["first_loss"]

    def stop(step: int, state: TrainState) -> None:
        if step == 7:
            signal.raise_signal(signal.SIGTERM)

    stopped = job(halved)
    with pytest.raises(Preempted):
        train(TrainJob(**{**vars(stopped), "on_step": (stop,)}))
    assert train(stopped)["resumed_at"] == [7]
    states = [CheckpointStore(folder / "checkpoints").restore(10, saved()) for folder in (whole, halved)]
    assert set(states[0]) == {"params", "averages"}
    for a, b in zip(jax.tree.leaves(states[0]), jax.tree.leaves(states[1]), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def saved() -> dict[str, None]:
    return {"params": None, "averages": None}


def test_a_graph_without_averages_has_none_in_state_and_checkpoint(tmp_path: Path):
    text = TrainJob(
        graph=tiny.graph(layers=1),
        settings=tiny.settings(5),
        mesh={"data": 1},
        seed=1,
        feed=tiny.RandomFeed(),
        folder=tmp_path,
        on_step=(lambda step, state: state.averages is None or pytest.fail("averages of nothing"),),
    )
    train(text)
    assert not list((tmp_path / "checkpoints" / "5").glob("averages*"))
