"""What a user may call a model, and recipes that begin with an imported model or extend the run of another."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_what_runs_and_why import keys

from affinage.checkpoint import CheckpointStore
from affinage.config.load import load_recipe
from affinage.hub.folder import CardFacts, export
from affinage.parallel.sharding import make_mesh
from affinage.pipeline.build import build_steps
from affinage.pipeline.models import MODEL, is_chat, locate, made_from, resolve, results_folder
from affinage.pipeline.opening import import_model, open_model, trained_params
from affinage.pipeline.store import MANIFEST
from affinage.results import read_json_lines
from run_affinage import refused, run, set_words
from tiny_models import CONTEXT, tiny_llama
from tiny_run import RECIPE


@pytest.fixture
def runs(own_runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The finished run, and a run `base` of its pretraining only, below the working directory."""
    monkeypatch.chdir(own_runs.parent)
    (own_runs / "base").mkdir()
    (own_runs / "base/pretrain").symlink_to((own_runs / "tiny/pretrain").resolve())
    (own_runs / "base/recipe.json").write_bytes((own_runs / "tiny/recipe.json").read_bytes())
    return own_runs


def test_names(runs: Path):
    for spec, stage, step in (
        ("tiny", "dpo", None), ("runs/tiny", "dpo", None), ("runs/tiny/pretrain", "pretrain", None),
        ("tiny/sft@4", "sft", 4), ("base", "pretrain", None), ("base@15", "pretrain", 15),
    ):  # fmt: skip
        model = locate(resolve(spec, runs), runs)
        folder = model.path
        assert (folder.name.split("-")[0], model.step) == (stage, step) and folder.parent == runs / "store", spec
        assert is_chat(folder) == (stage != "pretrain")
        for step_before in ("train-tokenizer", "synthesize"):
            assert made_from(folder, step_before) == (runs / "tiny" / step_before).resolve()
        assert made_from(folder, "export") is None


def test_without_such_a_model_those_that_are_there_are_named(runs: Path):
    for name in ("runs/begun/recipe.json", "folder/x.txt", "runs/grid/sweep.json"):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text("{}")
    (runs / "base/recipe.json").write_text('{"sft": null}')
    (runs / "grid/sweep.json").write_text('[{"run": "grid-001"}, {"run": "grid-002"}]')
    for spec, named in (
        ("three", "tiny"), ("tiny@last", "tiny"), ("tiny/sfft", "has no `sfft`"), ("runs", "runs"),
        ("begun/sft", "affinage run begun --until sft"), ("runs/begun/sft", "affinage run runs/begun --until sft"),
        ("runs/begun", "affinage run"), ("folder", "folder"), ("grid", "grid-001 ... grid-002 (runs/grid/sweep.json)"),
        *((f"base/{step}", "recipe of `base` has no step `") for step in ("sft", "sft-data", "evaluate-sft")),
        ("base/evaluate-sft", "base/pretrain"), ("runs/grid/pretrain", "`grid` is a sweep"),
    ):  # fmt: skip
        error = refused(lambda spec=spec: locate(resolve(spec, Path("runs")), Path("runs")))
        assert named in str(error) and error.fix


def test_a_run_and_a_folder_of_one_name(runs: Path):
    Path("tiny").mkdir()
    assert locate(resolve("tiny", runs), runs).path.name.startswith("dpo-"), "a folder without a model is not meant"
    Path("tiny/config.json").write_text("{}")
    for name in ("tiny", "./tiny"):
        assert locate(resolve(name, runs), runs).path == Path("tiny").resolve()
    refused(lambda: locate(resolve("tiny@3", runs), runs), match="no checkpoints")
    assert locate(resolve("runs/tiny", runs), runs).path.name.startswith("dpo-")


def test_a_finished_training_without_its_last_step_is_no_model(runs: Path):
    def scale(spec: str) -> np.ndarray:
        return np.asarray(open_model(spec, runs).params["norm"]["scale"])

    sft, earlier = (runs / "tiny/sft").resolve(), scale("tiny/sft@4")
    assert not np.array_equal(scale("tiny/sft"), earlier)
    (sft / "checkpoints/5/commit_success.txt").unlink()
    assert all("@4" in refused(scale, f"tiny/sft{at}", match=f"step {n}\n").fix for at, n in (("", 5), ("@60", 60)))
    np.testing.assert_array_equal(scale("tiny/sft@4"), earlier)
    (sft / MANIFEST).unlink()  # one that goes on is what it has saved last
    np.testing.assert_array_equal(scale("tiny/sft"), earlier)


# ---- the moving average of a training, and the mean of its last checkpoints


def test_a_name_stands_for_the_average_whose_results_are_kept_apart(tmp_path: Path):
    here = NamedSharding(make_mesh({"data": 1}, jax.devices()), PartitionSpec())
    abstract = {"w": jax.ShapeDtypeStruct((2,), "bfloat16", sharding=here)}
    store = CheckpointStore(tmp_path / "run/pretrain/checkpoints", keep_last=3)
    for step in (1, 2, 3, 4):
        params = {"w": jnp.full(2, step, jnp.bfloat16)}
        store.save(step, {"params": params, "ema_params": {"w": jnp.full(2, step / 8)}}, {})
    store.wait()
    (tmp_path / "run/pretrain" / MODEL).write_text("{}")

    def opened(name: str) -> Any:
        target = resolve(f"run/pretrain{name}", tmp_path)
        return trained_params(target.path, None, target.step, abstract)["w"]

    for name, expected in (("@ema", 0.5), ("@mean:1", 4.0), ("@mean:3", 3.0), ("@2", 2.0), ("", 4.0)):
        assert opened(name).dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(opened(name), np.float32), expected)
    names = [f"run/pretrain{name}" for name in ("@4", "@ema", "@mean:1", "@mean:2")]
    assert len({results_folder(resolve(name, tmp_path), tmp_path) for name in names}) == len(names)
    store.save(9, {"params": {"w": jnp.ones(2)}}, {})  # without an average
    store.wait()
    for name, named in (("@mean:4", "@3, @4, @9"), ("@5", "@4"), ("@mean:0", ""), ("@average", ""), ("@ema", "@mean:")):
        assert (fix := refused(opened, name).fix) and named in fix


# ---- a recipe that begins with an imported model


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
    train(imported, tmp_path, *SFT, "sft.from_step=3", status=2)
    assert "no training comes before sft" in capsys.readouterr().err
    assert refused(build_steps, load_recipe(imported / "recipe.yaml", ["init_from=nowhere"]), match="`nowhere`").fix


# ---- a recipe that extends the run of another


CONSTANT = "pretrain.schedule.name=constant"  # a longer run has the same rates
LONGER = ["name=longer", "pretrain.resume_from=runs/short/pretrain", "pretrain.steps=14", CONSTANT]


def test_an_extension_continues_a_run_which_stays_as_it_is(own_runs: Path, monkeypatch: pytest.MonkeyPatch, answer):
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
    told = answer("plan", str(RECIPE), *set_words(*LONGER))
    assert told["begun"] == 10 and told["seconds"] * told["tokens_per_second"] == pytest.approx(4 * 8 * 64)

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
