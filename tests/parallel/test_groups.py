"""Stages of unequal shape on unequal groups of devices are the same step as one program on one device."""

from pathlib import Path

import jax
import meshes
import numpy as np
import pytest

from affinage.errors import UserError
from affinage.model import Graph, parse
from affinage.parallel import make_mesh
from affinage.recipe.training import PretrainSettings
from affinage.training import TrainJob
from affinage.training.groups import Group, GroupedTraining
from affinage.training.program import Program

STEPS = 20


def graph(*, tied: bool = False) -> Graph:
    """Three layers with a dense feed-forward, one with experts, and a value that skips a stage."""

    def block(source: str, repeat: int, ffn: dict) -> dict:
        attention = {"heads": 4, "rope": {"theta": 10000}, "dropout": 0.1}
        norm = {"kind": "rms", "eps": 1e-6}
        kind = "transformer_block"
        return {"kind": kind, "in": source, "repeat": repeat, "attention": attention, "ffn": ffn, "norm": norm}

    mixture = {"kind": "moe", "experts": 4, "top_k": 2, "width": 32}
    nodes = {
        "embed": {"kind": "embedding", "in": "tokens", "vocab": meshes.VOCABULARY, "width": 32, "init_std": 0.5},
        "early": block("embed", 3, {"kind": "swiglu", "width": 48}),
        "late": block("early", 1, mixture),
        "both": {"kind": "sum_of_two", "in": ["late", "embed"]},
        "norm": {"kind": "rms_norm", "in": "both"},
        "logits": {"kind": "unembed", "in": "norm", "vocab": meshes.VOCABULARY, "tied": "embed" if tied else False},
        "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
    }
    return parse({"inputs": ["tokens"], "nodes": nodes})


@pytest.fixture(scope="module", autouse=True)
def sum_of_two():
    from affinage.model.kind import KINDS, NodeKind, node_kind
    from affinage.model.shape import expect_sequence, sequence_of

    @node_kind("sum_of_two")
    class SumOfTwo(NodeKind):
        """A skip over a stage."""

        takes = ("first", "second")

        def shape(self, inputs):
            return sequence_of(expect_sequence(inputs[0]))

        def apply(self, params, inputs, context):
            return inputs[0] + inputs[1]

    yield
    del KINDS["sum_of_two"]


def groups(*ends: tuple[str, dict[str, int]]) -> list[Group]:
    """Groups of as many devices as their meshes have, one after the other."""
    devices, found = list(jax.devices()), []
    for until, sizes in ends:
        count = int(np.prod(list(sizes.values())))
        found.append(Group(until, make_mesh(sizes, devices[:count])))
        devices = devices[count:]
    return found


def settings_of(micro_batches: int = 1) -> PretrainSettings:
    schedule = {"peak": 2e-3, "floor": 1e-3, "warmup_steps": 4}
    training = {"steps": STEPS, "batch": meshes.ROWS, "micro_batches": micro_batches, "schedule": schedule}
    return PretrainSettings.model_validate(training)


UNEQUAL = (("early", {"data": 2}), ("late", {"data": 1}), ("loss", {"data": 2, "tensor": 2}))


@pytest.fixture(scope="module")
def grouped(sum_of_two) -> GroupedTraining:
    return GroupedTraining(graph(), settings_of(micro_batches=2), groups(*UNEQUAL), seed=3)


def test_twenty_steps_equal_those_of_one_program(grouped: GroupedTraining):
    feed = meshes.Feed()
    job = TrainJob(
        graph=grouped.graph,
        settings=grouped.settings,
        mesh={"data": 1},
        seed=grouped.seed,
        feed=feed,
        folder=Path("unused"),
    )
    program = Program(job, make_mesh({"data": 1}, jax.devices()), feed.batch(0))
    one, state = program.compile_training(), program.begin()
    states = grouped.begin()
    for a, b in zip(jax.tree.leaves(grouped.params(states)), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)
    for step in range(STEPS):
        state, expected = one(state, program.put(feed.batch(step)))
        states, got = grouped.step(states, feed.batch(step))
        assert set(got) == set(expected) - {"loss_z", "spike"}  # which only one program judges
        for name in ("loss", "grad_norm", "targets", "learning_rate"):
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, err_msg=f"{name} of step {step}")
    used = {device for each in states for device in each.step.sharding.device_set}
    assert len(used) == 7


def test_a_sick_update_is_left_out_by_every_stage(grouped: GroupedTraining):
    feed = meshes.Feed()
    states = grouped.begin()
    scale = states[2].params["norm"]["scale"]
    states[2] = states[2]._replace(params={**states[2].params, "norm": {"scale": scale.at[0].set(np.inf)}})
    before = [jax.device_get(state.params) for state in states]
    after, metrics = grouped.step(states, feed.batch(0))
    assert float(metrics["skipped"]) == 1
    for old, new in zip(before, after, strict=True):
        assert int(new.step) == 1
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(jax.device_get(new.params)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([("early", {"data": 2}), ("logits", {"data": 2})], "do not make up the graph"),
        ([("late", {"data": 2}), ("early", {"data": 1}), ("loss", {"data": 1})], "do not make up the graph"),
        ([("early", {"data": 3}), ("loss", {"data": 1})], "batch 8 does not divide"),
    ],
)
def test_what_is_no_cut_is_told(ends: list, message: str):
    with pytest.raises(UserError, match=message):
        GroupedTraining(graph(), settings_of(), groups(*ends))


def test_layers_are_not_updated_one_by_one_there():
    settings = settings_of().model_copy(update={"update": "layerwise"})
    with pytest.raises(UserError, match="layerwise"):
        GroupedTraining(graph(), settings, groups(*UNEQUAL))


def test_weights_shared_between_stages_are_refused():
    with pytest.raises(UserError, match="shares the weights"):
        GroupedTraining(graph(tied=True), settings_of(), groups(("early", {"data": 2}), ("loss", {"data": 2})))
