"""The TPU's compiler on a machine without a TPU: the step fits or not, and the estimate is near what it says."""

import json
from pathlib import Path

import pytest
import yaml

from affinage.cli import main
from affinage.errors import UserError
from affinage.hardware.slices import find_slice
from affinage.model.kinds.ffn import PLAIN
from affinage.planning.compiled import collectives_in, compile_on, compile_step, loops_of, out_of_memory
from affinage.planning.plan import make_plan, planned_graph
from affinage.recipe import plugins
from affinage.recipe.load import load_recipe

SMALL = str(Path(__file__).with_name("small.yaml"))


def estimate(name, *overrides):
    loaded = load_recipe(SMALL, overrides)
    return make_plan(loaded.recipe, planned_graph(loaded), find_slice(name)).memory.total


@pytest.mark.full
def test_the_estimate_is_within_a_tenth_of_the_compiled_step():
    pytest.importorskip("libtpu", reason="needs `pip install affinage[tpu]`")
    verdict = compile_on(SMALL, ["model.nodes.blocks.repeat=6"], find_slice("v4-8"))
    assert verdict.fits
    assert verdict.peak_bytes == verdict.argument_bytes + verdict.temporary_bytes
    assert estimate("v4-8", "model.nodes.blocks.repeat=6") == pytest.approx(verdict.peak_bytes, rel=0.1)
    # FSDP: weights are gathered, gradients are summed.
    assert {"all-gather", "all-reduce"} <= set(verdict.collectives)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("v4-8", ["mesh={pipeline: 2, data: 2}"]),
        ("2xv4-8", ["mesh={data: 2, fsdp: 4}"]),
    ],
    ids=["stages", "two slices"],
)
def test_so_it_is_with_stages_and_with_several_slices(name, overrides):
    pytest.importorskip("libtpu", reason="needs `pip install affinage[tpu]`")
    overrides = ["model.nodes.blocks.repeat=6", *overrides]
    verdict = compile_on(SMALL, overrides, find_slice(name))
    assert verdict.fits
    assert estimate(name, *overrides) == pytest.approx(verdict.peak_bytes, rel=0.1)


@pytest.mark.full
def test_gradients_of_micro_batches_are_summed_over_data_once():
    """But where a balance of experts, or what is told of them, is of all rows together."""
    pytest.importorskip("libtpu", reason="needs `pip install affinage[tpu]`")
    settings = "mesh={data: 4}", "model.nodes.blocks.repeat=4", "pretrain.micro_batches=4"
    experts = "{kind: moe, experts: 4, top_k: 2, width: 256, capacity_factor: 1.25}"
    asked = (), (f"model.nodes.blocks.ffn={experts}",)
    alone, together = (compile_on(SMALL, [*settings, *more], find_slice("v4-8")) for more in asked)
    assert alone.collectives["all-reduce"] and not alone.looped
    assert together.looped["all-reduce"]


def test_a_collective_in_a_loop_is_told_from_one_behind_it():
    program = "\n\n".join(
        [
            "HloModule step",
            "%added (a: f32[], b: f32[]) -> f32[] {\n  ROOT %c = f32[] add(%a, %b)\n}",
            "%inner (x: f32[4]) -> f32[4] {\n  %r = f32[4]{0} all-reduce(%x), to_apply=%added\n}",
            "%outer (x: f32[4]) -> f32[4] {\n  %w = f32[4]{0} while(%x), condition=%until, body=%inner\n}",
            "ENTRY %main (x: f32[4]) -> f32[4] {\n  %w = f32[4]{0} while(%x), condition=%until, body=%outer\n"
            "  %r = f32[4]{0} all-reduce(%w), to_apply=%added\n}",
        ]
    )
    assert collectives_in(program) == {"all-reduce": 2}
    assert collectives_in(loops_of(program)) == {"all-reduce": 1}


@pytest.mark.full
def test_what_waits_in_the_hosts_memory_is_known_to_the_byte():
    pytest.importorskip("libtpu", reason="needs `pip install affinage[tpu]`")
    overrides = ["model.nodes.blocks.repeat=6", "parallel.remat={offload: [block_input]}"]
    loaded = load_recipe(SMALL, overrides)
    made = make_plan(loaded.recipe, planned_graph(loaded), find_slice("v4-8"))
    verdict = compile_on(SMALL, overrides, find_slice("v4-8"))
    assert verdict.host_bytes == made.memory.host > 0
    # So small a layer is computed again bit by bit: the estimate, which counts it whole, is on the safe side.
    assert verdict.peak_bytes < made.memory.total


@pytest.mark.full
def test_what_does_not_fit_is_said_with_what_it_would_need():
    pytest.importorskip("libtpu", reason="needs `pip install affinage[tpu]`")
    overrides = ["pretrain.batch=1024", "mesh.fsdp=1"]
    verdict = compile_on(SMALL, overrides, find_slice("v5e-1"))
    assert not verdict.fits
    assert "15.75G" in verdict.message
    assert estimate("v5e-1", *overrides) == pytest.approx(verdict.peak_bytes, rel=0.1)


@pytest.mark.full
def test_the_local_compiler_answers_for_the_cpu():
    verdict = compile_on("quickstart", ["pretrain.batch=4"], find_slice("cpu"))
    assert verdict.fits
    assert verdict.argument_bytes > 3 * 4 * 1_426_304  # float32 weights and two moments
    assert verdict.collectives == {}


def test_what_cannot_be_compiled_here_is_said():
    for name, what in (("v3-8", "its compiler"), ("h100x8", "8 H100 on this machine; its GPUs: none")):
        with pytest.raises(UserError, match=f"compiling for {name} needs {what}"):
            compile_on(SMALL, [], find_slice(name))


def test_the_mistakes_of_a_layout_come_out_of_the_compilers_process():
    with pytest.raises(UserError, match="batch 6 does not divide"):
        compile_on("quickstart", ["pretrain.batch=6", "pretrain.micro_batches=6", "mesh.data=4"], find_slice("v4-8"))


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        ("... the total memory required for HLO temporaries (19.50G) exceeds available HBM (15.75G).", 19.5),
        ("... Ran out of memory in memory space hbm. Used 33.25G of 30.75G hbm. Exceeded hbm capacity by 2.5G.", 33.25),
        ("... something else about HBM", 0),
    ],
)
def test_the_refusals_of_the_compiler_are_read(message, needed):
    verdict = out_of_memory(f"RESOURCE_EXHAUSTED: {message}")
    assert not verdict.fits
    assert verdict.peak_bytes == int(needed * 2**30)


def test_what_is_compiled_is_the_model_that_was_estimated(tmp_path, capsys, monkeypatch):
    """With the recipe's plug-ins, and with the vocabulary that its tokenizer came to."""

    def as_in_a_new_process(*asked):
        PLAIN.pop("cubes")
        plugins._run.cache_clear()
        return compile_step(*asked)

    monkeypatch.setattr("affinage.planning.compiled.compile_on", as_in_a_new_process)
    (tmp_path / "cubes.py").write_text(
        "from affinage.model.kinds.ffn import activation\n\n\n@activation('cubes')\ndef cubes(x):\n    return x**3\n"
    )
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "base": SMALL,
                "name": "own",
                "plugins": ["cubes.py"],
                "tokenizer": {"kind": "characters", "vocabulary": 50_000},
                "rows": {"context": 16},
                "pretrain": {"batch": 2},
                "model": {
                    "nodes": {
                        "embed": {"vocab": "auto", "width": 32},
                        "blocks": {"repeat": 1, "ffn": {"kind": "cubes", "width": 32}},
                    }
                },
            }
        )
    )
    tokenizer = tmp_path / "runs" / "own" / "tokenizer"
    tokenizer.mkdir(parents=True)
    (tokenizer / "manifest.json").write_text('{"summary": {"vocabulary": 65}}')
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(recipe), "--on", "cpu", "--compile", "--json", "--runs", str(tmp_path / "runs")])
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    told = json.loads(printed.out)
    state = sum(told["memory"][part] for part in ("weights", "optimizer", "batch"))
    assert told["compiled"]["argument_bytes"] == pytest.approx(state, rel=0.01)
    PLAIN.pop("cubes", None)
