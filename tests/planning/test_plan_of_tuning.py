"""What is planned of fine-tuning and of preferences is what they hold and compute."""

from pathlib import Path

import jax
import numpy as np
import pytest

from affinage.cli.program import main
from affinage.errors import UserError
from affinage.hardware.slices import find_slice
from affinage.model.activations import batch_shapes
from affinage.parallel import make_mesh
from affinage.planning.plan import Plan, make_plan, only, planned_graph
from affinage.recipe.load import load_recipe
from affinage.training.frozen import frozen_of
from affinage.training.job import TrainJob
from affinage.training.program import Program

SMALL = str(Path(__file__).with_name("small.yaml"))
TUNED = "{steps: 50, batch: 8, sources: [chats.jsonl], schedule: {peak: 1.0e-4, floor: 0}, context: 256}"
SETTINGS = [f"sft={TUNED}", f"dpo={TUNED}", "model.nodes.blocks.repeat=2", "model.nodes.blocks.scan=true"]
CASES = [
    ("sft", []),
    ("sft", ["sft.lora={rank: 4}"]),
    ("dpo", []),
    ("dpo", ["dpo.reference=held"]),
    ("dpo", ["dpo.reference=held", "dpo.lora={rank: 4}"]),
    ("dpo", ["dpo.lora={rank: 4, targets: [query, up]}", "dpo.optimizer.moments=bfloat16"]),
]


def planned(stage: str, changes: list[str]) -> Plan:
    overrides = [*SETTINGS, *changes]
    overrides += only(stage, load_recipe(SMALL, overrides).recipe)  # type: ignore[arg-type]
    loaded = load_recipe(SMALL, overrides)
    return make_plan(loaded.recipe, planned_graph(loaded), find_slice("v4-8"))


@pytest.mark.parametrize(("stage", "changes"), CASES, ids=str)
def test_weights_and_moments_are_the_bytes_of_the_real_state(stage: str, changes: list[str], tmp_path: Path):
    made = planned(stage, changes)
    assert made.section == stage and made.split.context == 256
    graph, settings, mesh = made.split.graph, made.settings, {"fsdp": 4}
    batch = {k: np.zeros(leaf.shape, leaf.dtype) for k, leaf in batch_shapes(graph, 8, 256).items()}
    job = TrainJob(graph=graph, settings=settings, mesh=mesh, seed=0, feed=None, folder=tmp_path)  # type: ignore[arg-type]
    program = Program(job, make_mesh(mesh, jax.devices()[:4]), batch)
    state = program.begin()

    def held(tree: object) -> int:
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    found = (made.memory.weights, made.memory.frozen, made.memory.optimizer)
    assert found == (held(state.params), held(state.frozen), held(state.opt_state))


@pytest.mark.parametrize(("stage", "changes"), CASES, ids=str)
def test_the_products_of_a_step_are_those_that_training_counts(stage: str, changes: list[str]):
    made = planned(stage, changes)
    chip, split = made.where.chip, made.split
    counted = sum(node.compute for node in made.time.nodes) * chip.flops_per_device * chip.achievable * split.devices
    assert counted == pytest.approx(frozen_of(split.graph, made.settings).step_flops(8, 256), rel=1e-6)


def test_adapters_need_less_of_everything_and_a_held_reference_more():
    wide = "model.nodes.embed.vocab=4096"  # memory is fullest at the logits, where there are gradients already
    settings = [], ["dpo.lora={rank: 4}"], ["dpo.reference=held"]
    whole, low, held = (planned("dpo", [wide, *changes]) for changes in settings)
    assert low.memory.gradients < whole.memory.gradients / 10 and low.memory.optimizer < whole.memory.optimizer / 10
    assert whole.time.seconds < held.time.seconds
    assert low.time.update < whole.time.update / 5
    assert held.memory.frozen == whole.memory.weights and held.time.update == pytest.approx(whole.time.update, rel=0.02)
    assert low.memory.weight_copies == pytest.approx(whole.memory.weight_copies, rel=0.1), (
        "read in bfloat16 all the same"
    )


def test_of_wide_layers_adapters_save_the_time_of_one_product_in_three():
    wide = ["model.nodes.embed.width=1024", "model.nodes.blocks.ffn.width=4096"]
    whole, low = (planned("sft", [*wide, *more]) for more in ([], ["sft.lora={rank: 4}"]))
    blocks = [next(node for node in made.time.nodes if node.name == "blocks") for made in (whole, low)]
    assert blocks[1].compute == pytest.approx(2 / 3 * blocks[0].compute, rel=0.05)
    assert low.time.seconds < 0.9 * whole.time.seconds


def test_a_stage_that_the_recipe_has_not_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["plan", SMALL, "--stage", "dpo"])
    assert ended.value.code == 2
    assert "small has no `dpo`" in (said := capsys.readouterr().err) and "It has: pretrain." in said
    with pytest.raises(UserError, match="no `sft`"):
        only("sft", load_recipe(SMALL, ["pretrain=null"]).recipe)


def test_a_plan_says_where_the_guard_of_epochs_ends_it():
    def said(changes: list[str], rows: int | None = None) -> list[str]:
        loaded = load_recipe(SMALL, [*SETTINGS, *changes, "pretrain=null", "dpo=null"])
        made = make_plan(loaded.recipe, planned_graph(loaded), find_slice("v4-8"), data_rows=rows)
        return [warning for warning in made.warnings if "max_epochs" in warning]

    guard, limited = "sft.max_epochs=2", "sft.sources=[{path: chats.jsonl, examples: %d}]"
    assert not said(["sft.max_epochs=null"], rows=10)
    assert "max_epochs: 1 ends the training" in (told := said([], rows=100)[0]) and "ends after step 12" in told
    assert "50 steps, which need 200 rows; how many there are" in said([guard])[0]
    assert "there are 100, so it ends after step 25" in said([guard], rows=100)[0]
    assert not said([guard], rows=200)
    (told,) = said([guard, limited % 500, "sft.held_out=0.2"])
    assert "at most 400 conversations" in told and "fewer than 128 tokens" in told and "more than 2.00 share" in told
    assert "it ends after step 20 or before" in said([guard, limited % 100, "sft.held_out=0.2"])[0]
    assert "depends on the mixture" in said([guard, "sft.mixture={chats: 1}"])[0]
