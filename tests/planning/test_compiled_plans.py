"""The step as a compiler takes it, on a machine without the accelerator: it fits or not, and the estimate is near."""

import json

import pytest
import yaml
from small_plans import SMALL, plan_of

from affinage.config.load import load_recipe
from affinage.hardware.chips import find_slice
from affinage.planning.compiled import compile_on, compile_step, out_of_memory
from run_affinage import refused

SIX = "model.nodes.blocks.repeat=6"
ROWS = "pretrain.batch_size=256"  # of fewer the compiler keeps a good part in a v4's 128 MB beside its HBM


@pytest.mark.full
@pytest.mark.parametrize(("compiler", "name", "overrides"), [
    ("libtpu", "v4-8", [SIX, ROWS]),
    ("libtpu", "v4-8", [SIX, ROWS, "mesh={pipeline: 2, data: 2}"]),
    ("libtpu", "v5e-1", ["pretrain.batch_size=1024", "mesh.fsdp=1"]),
    ("jax_cuda12_plugin", "h100x4", [SIX]),
], ids=["fsdp", "stages", "too large", "GPUs"])  # fmt: skip
def test_the_estimate_is_near_what_a_compiler_takes_of_chips_that_are_not_here(compiler, name, overrides):
    pytest.importorskip(compiler, reason="needs `pip install affinage[tpu,gpu-plan]`")
    report, on_gpus = compile_on(SMALL, overrides, find_slice(name)), name == "h100x4"
    memory = plan_of(SMALL, name, *overrides).memory
    assert memory.total == pytest.approx(report.peak_bytes, rel=0.15 if on_gpus else 0.1)
    assert report.fits == (name != "v5e-1")
    if report.fits:
        assert on_gpus or report.peak_bytes == report.argument_bytes + report.temporary_bytes
        assert report.collectives and (on_gpus or "all-reduce" in report.collectives)
    else:
        assert "15.75G" in report.message


def test_the_estimate_is_near_what_the_processors_compiler_takes(tmp_path):
    """In this process, of a run of another version; XLA's compiler for processors fuses less than the others."""
    recipe = tmp_path / "recipe.json"
    settings = load_recipe(SMALL).recipe.model_dump(mode="json")
    recipe.write_text(json.dumps(settings | {"pretrain": settings["pretrain"] | {"of_another_version": 1}}))
    overrides = ["model.nodes.blocks.repeat=2", "packing.seq_len=64", "pretrain.batch_size=4"]
    overrides.append("pretrain.precision.compute=float32")
    report = compile_step(str(recipe), overrides, find_slice("cpu"))
    planned = plan_of(SMALL, "cpu", *overrides).memory
    assert report.fits and report.collectives == {}
    assert report.argument_bytes == pytest.approx(planned.weights + planned.optimizer + planned.batch, rel=0.01)
    # It also copies moments before it overwrites them.
    assert planned.total == pytest.approx(report.peak_bytes, rel=0.3)


def test_a_compiler_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, fix in (("v3-8", "Leave out --compile"), ("v4-8", "affinage[tpu]"), ("h100x8", "affinage[gpu-plan]")):
        assert fix in refused(compile_on, SMALL, [], find_slice(name)).fix


@pytest.mark.full
def test_the_mistakes_of_a_layout_come_out_of_the_compilers_process():
    layout = ["pretrain.batch_size=6", "pretrain.gradient_accumulation_steps=6", "mesh.data=4"]
    refused(compile_on, "quickstart", layout, find_slice("v4-8"), match="batch 6 of all devices does not")


@pytest.mark.parametrize(("message", "needed"), [
    ("... the total memory required for HLO temporaries (19.50G) exceeds available HBM (15.75G).", 19.5),
    ("... Ran out of memory in memory space hbm. Used 33.25G of 30.75G hbm. Exceeded hbm capacity by 2.5G.", 33.25),
    ("... something else about HBM", 0),
])  # fmt: skip
def test_the_refusals_of_the_compiler_are_read(message, needed):
    report = out_of_memory(f"RESOURCE_EXHAUSTED: {message}")
    assert not report.fits and report.peak_bytes == int(needed * 2**30)


@pytest.fixture
def recipe(tmp_path):
    """A recipe of the settings, whose tokenizer a run has made, of 65 ids."""
    tokenizer = tmp_path / "runs" / "own" / "train-tokenizer"
    tokenizer.mkdir(parents=True)
    (tokenizer / "manifest.json").write_text("{}")
    (tokenizer / "result.json").write_text('{"vocabulary": 65}')

    def write(**settings):
        (tmp_path / "own.yaml").write_text(yaml.safe_dump({"name": "own"} | settings))
        return str(tmp_path / "own.yaml"), "--runs", str(tmp_path / "runs")

    return write


def test_what_is_compiled_is_the_model_that_was_estimated(recipe, tmp_path, answer):
    """With the recipe's plug-ins, and with the vocabulary that its tokenizer came to."""
    (tmp_path / "cubes.py").write_text(
        "from affinage.model.layers.dense import PLAIN\n\n\n@PLAIN.register('cubes')\ndef cubes(x):\n    return x**3\n"
    )
    blocks = {"repeat": 1, "ffn": {"kind": "cubes", "width": 32}}
    model = {"nodes": {"embed": {"vocab": "auto", "width": 32}, "blocks": blocks}}
    given = {"tokenizer": {"kind": "char", "vocab_size": 50_000}, "packing": {"seq_len": 16}, "model": model}
    words = recipe(base=SMALL, plugins=["cubes.py"], pretrain={"batch_size": 2}, **given)
    told = answer("plan", *words, "--on", "cpu", "--compile")
    state = sum(told["memory"][part] for part in ("weights", "optimizer", "batch"))
    assert told["compiled"]["argument_bytes"] == pytest.approx(state, rel=0.01)
    assert told["facts"]["parameters"] < 20_000  # of 50,000 ids it would have 1.6 million


@pytest.mark.parametrize("wrong", [{"kind": "gpt"}, {"nodes": [1]}, {"nodes": {"embed": 3}}])
def test_a_wrong_model_is_refused_also_where_its_tokenizer_is_there(wrong, recipe, affinage):
    status, _, err = affinage("plan", *recipe(base=SMALL, tokenizer={"kind": "char"}, model=wrong))
    assert status == 2 and "own.yaml:" in err and "Traceback" not in err, err
