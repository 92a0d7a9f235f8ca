"""A recipe that begins with an imported model, or extends the run of another."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from test_what_runs_and_why import keys

from affinage.config.load import load_recipe
from affinage.hub.folder import CardFacts, export
from affinage.pipeline.build import build_steps
from affinage.pipeline.models import is_chat
from affinage.pipeline.opening import import_model, open_model
from affinage.results import read_json_lines
from run_affinage import refused, run
from tiny_models import CONTEXT, tiny_llama
from tiny_run import RECIPE

_STEPS = ["steps=1", "batch_size=4", "schedule={peak_lr: 1.0e-12, min_lr: 0}", "eval_sequences=4"]
PRETRAIN = [f"pretrain.{setting}" for setting in _STEPS]
POCKET = "data={sources: [{path: pocket-world, max_bytes: 0.02MB}], split: {validation_fraction: 0.2}}"
SFT = ["sft={sources: [talks.jsonl], steps: 1, batch_size: 4, schedule: {peak_lr: 1.0e-12, min_lr: 0}}"]
SFT += ["sft.validation_fraction=0", "sft.num_epochs=null", "data=null", "pretrain=null", "mesh={data: 1}"]


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("init")
    export(tiny_llama(), folder / "hub", facts=CardFacts(license="mit"))
    import_model(folder / "hub", folder / "model", "tiny", origin=str(folder / "hub"))
    return folder / "model"


@pytest.fixture(autouse=True)
def talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talks.jsonl").write_text('{"prompt": "Où ?", "completion": "Ici."}\n' * 9)


def train(folder: Path, runs: Path, *settings: str, status: int = 0) -> None:
    run("run", folder / "recipe.yaml", "--runs", runs, settings=settings, status=status)


def assert_begun_with(imported: Path, spec: str, runs: Path) -> None:
    """A learning rate of 1e-12 leaves the weights where they were."""
    before, after = open_model(str(imported), runs), open_model(spec, runs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), before.params, after.params)
    assert after.tokenizer.encode("Où ? The") == before.tokenizer.encode("Où ? The")


@pytest.mark.full
def test_pretraining_goes_on_from_it(imported, tmp_path):
    train(imported, tmp_path, *PRETRAIN, POCKET, "mesh={data: 1}", "export=null")
    assert_begun_with(imported, "tiny/pretrain", tmp_path)


def test_it_is_fine_tuned_without_any_text(imported, tmp_path):
    """With adapters, which name the model that was imported; the card is one, whichever verb writes it."""
    train(imported, tmp_path, *SFT, "sft.lora={r: 2}")
    assert_begun_with(imported, "tiny/sft", tmp_path)
    assert is_chat((tmp_path / "tiny/sft").resolve()) and open_model("tiny", tmp_path).context == CONTEXT
    assert (tmp_path / "tiny/report.html").is_file()
    for words in (["--to", str(tmp_path / "again")], ["--adapter", "--to", str(tmp_path / "adapter")]):
        run("export", "tiny", "--runs", tmp_path, *words)
    card = (tmp_path / "tiny/export/model/README.md").read_text()
    assert (tmp_path / "again/README.md").read_text() == card.replace('trained("model")', 'trained("again")')
    assert "license: mit" in card and "Weights under mit." in card and "- conversational" in card  # of the import
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(imported.parent / "hub")


def test_other_weights_make_other_results(imported, tmp_path):
    def keys_of(folder: Path) -> dict[str, str]:
        return keys(load_recipe(folder / "recipe.yaml", [*PRETRAIN, POCKET]))

    before, other = keys_of(imported), shutil.copytree(imported, tmp_path / "elsewhere")
    assert keys_of(other) == before, "the folder's name does not count"
    facts = json.loads((other / "model.json").read_text())
    facts["imported"]["sha256"]["weights"] = "0" * 64
    (other / "model.json").write_text(json.dumps(facts))
    assert keys_of(other)["pretrain"] != before["pretrain"] and keys_of(other)["split"] == before["split"]


def test_another_model_or_none_is_refused_before_anything_runs(imported, tmp_path, capsys):
    train(imported, tmp_path, *PRETRAIN, POCKET, "mesh={data: 1}", "model.nodes.blocks.repeat=3", status=2)
    assert "blocks.attention.key.kernel" in capsys.readouterr().err
    assert refused(build_steps, load_recipe(imported / "recipe.yaml", ["init_from=nowhere"]), match="`nowhere`").fix


# ---- a recipe that extends the run of another


CONSTANT = "pretrain.schedule.name=constant"  # a longer run has the same rates
LONGER = ["name=longer", "pretrain.resume_from=runs/short/pretrain", "pretrain.steps=14", CONSTANT]


def test_an_extension_continues_a_run_which_stays_as_it_is(own_runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(own_runs.parent)
    run("train", RECIPE, settings=["name=short", "pretrain.steps=10", CONSTANT])
    old = Path("runs/short/pretrain").resolve()
    manifest = (old / "manifest.json").read_bytes()
    run("train", RECIPE, settings=LONGER)
    assert Path("runs/short/pretrain").resolve() == old and (old / "manifest.json").read_bytes() == manifest
    summary = json.loads(Path("runs/longer/pretrain/summary.json").read_text())
    assert summary["steps"] == 14 and summary["resumed_at"] == [10]
    lines = read_json_lines(Path("runs/longer/pretrain/metrics.jsonl"))
    assert [line["step"] for line in lines if "loss" in line] == [1, 5, 10, 14]
    assert Path("runs/longer/tokenize").resolve() == Path("runs/short/tokenize").resolve()

    def sources(*words: str) -> dict[str, str]:
        steps = build_steps(load_recipe(RECIPE, [*LONGER, *words]))
        return next(step.sources for step in steps if step.name == "pretrain")

    # The key has the checkpoint, and not where it is.
    Path("copy").symlink_to("runs/short")
    assert sources() == sources("pretrain.resume_from=copy/pretrain@10")
    assert sources() != sources("pretrain.resume_from=runs/short/pretrain@5")
    for override, named in (
        ("name=short", "of another run"),
        ("pretrain.resume_from=runs/short/pretrain@7", "@5, @10"),
        ("pretrain.resume_from=runs/no", "runs/NAME/pretrain"),
    ):
        mistake = refused(sources, override, match=named)
        assert mistake.where == "--set pretrain.resume_from" and mistake.fix
