"""What a recipe names and nobody knows is said before the first stage runs, and by a dry run."""

import pytest
import yaml

from affinage.cli import main
from affinage.errors import UserError
from affinage.recipe.load import load_recipe
from affinage.stages.foresight import check, doubts

RECIPE = """\
name: small
model:
  inputs: [tokens]
  nodes:
    embed: {kind: embedding, in: tokens, vocab: 64, width: 8}
    logits: {kind: unembed, in: embed, vocab: 64, tied: false}
    loss: {kind: next_token_loss, in: [logits, tokens]}
data: {sources: [{path: texts.txt, language: EN}]}
tokenizer: {kind: characters}
pretrain: {steps: 20, batch: 8, schedule: {peak: 1e-3, floor: 1e-4}}
evaluate: {tasks: []}
"""


@pytest.fixture
def ahead(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "texts.txt").write_text("some text")
    (tmp_path / "exam.yaml").write_text(yaml.safe_dump({"task": "bogus"}))
    (tmp_path / "exam.pdf").write_text("no items")

    def ahead(*overrides: str, stages=("collect", "clean", "decontaminate", "rows")) -> UserError:
        with pytest.raises(UserError) as caught:
            check(load_recipe("r.yaml", overrides), stages)
        return caught.value

    return ahead


@pytest.mark.parametrize(
    ("override", "what", "fix"),
    [
        ("data.languages=[en, french]", "no language `french`", "Did you mean `fr`?"),
        ("data.languages=[en, xx]", "no language `xx`", "ISO 639-1"),
        ("data.sources=[{path: texts.txt, language: en-US}]", "no language `en-us`", "Did you mean `en`?"),
        ("data.decontaminate.against=[none.yaml]", "there is no `none.yaml`", "working directory"),
        ("data.decontaminate.against=[exam.pdf]", "no file of benchmark items", ".jsonl"),
        ("data.decontaminate.against=[exam.yaml]", "`bogus` says nothing of its items", "dataset_path"),
        ("evaluate.tasks=[hellaswagg]", "knows no task 'hellaswagg'", "Did you mean `hellaswag`?"),
        ("evaluate.tasks=[none.yaml]", "there is no `none.yaml`", "working directory"),
        ("pretrain.mixture=[{weights: {text: 1}}]", "weight for 'text'", "texts"),
    ],
)
def test_an_unknown_name_is_refused_with_what_to_do(ahead, override, what, fix):
    error = ahead(override)
    assert what in error.what and fix in f"{error.what} {error.fix}"
    assert "--set" in error.where


@pytest.mark.parametrize(
    ("tuning", "watch", "what"),
    [
        ("sft", "tasks: [none.yaml]", "no such task file"),
        ("sft", "data_dir: .", "there are no items of `winogrande`"),
        ("dpo", "data_dir: nowhere", "there is no folder nowhere"),
    ],
)
def test_so_is_a_name_that_a_tuning_watches(ahead, tuning, watch, what):
    how = "schedule: {peak: 1e-6, floor: 0}"
    given = f"{tuning}={{sources: [texts.txt], steps: 10, batch: 8, {how}, watch: {{every_steps: 5, {watch}}}}}"
    error = ahead(given, stages=(tuning,))
    assert what in error.what and error.where.startswith(f"--set {tuning}")


def test_names_of_any_case_are_languages(ahead):
    data = load_recipe("r.yaml", ["data.languages=[EN, Fr]"]).recipe.data
    assert data.languages == ("en", "fr") and data.sources[0].language == "en"
    check(load_recipe("r.yaml", ["evaluate.tasks=[hellaswag]"]), ["collect", "clean", "decontaminate", "rows"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("pretrain.optimizer.name=adammm", "--set pretrain.optimizer.name: there is no optimizer `adammm`"),
        ("pretrain.schedule.settings={share: 1}", "--set pretrain.schedule.settings: `share` is not a setting"),
        ("mesh.data=7", "does not divide over data = 7"),
        ("pretrain.batch=7", "batch 7 does not divide"),
        ("evaluate.tasks=[hellaswagg]", "Did you mean `hellaswag`?"),
    ],
)
def test_a_dry_run_says_so_too(ahead, override, said, capsys):
    with pytest.raises(SystemExit) as status:
        main(["run", "r.yaml", "--dry-run", "--set", override])
    assert status.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (["mesh={pipeline: 2, context: 4}", "parallel.context_attention=ring"], "ring attention does not go through"),
        (["mesh={pipeline: 2, data: 4}", "pretrain.attention=splash"], "attention by splash does not go through"),
        (["pretrain.update=layerwise", "pretrain.micro_batches=2"], "micro_batches is 2"),
        (["pretrain.update=layerwise", "parallel.remat=full"], "whatever `full` would keep"),
    ],
    ids=["ring", "kernel", "layerwise", "remat"],
)
def test_a_step_that_cannot_be_is_refused_before_the_data_is_worked(settings, what):
    with pytest.raises(UserError, match=what):
        check(load_recipe("quickstart", settings), {"pretrain"})


def test_a_mesh_axis_that_splits_nothing_is_refused_before_the_data_is_worked():
    with pytest.raises(UserError, match="nothing of this model is split along context = 2") as refused:
        check(load_recipe("byol-digits", ["mesh={data: 1, context: 2}"]), {"pretrain"})
    assert refused.value.where.endswith("--set mesh") and refused.value.fix == "Set `mesh: {data: 2}`."


def test_an_axis_for_experts_that_the_model_does_not_have_is_told():
    assert [said for said in doubts(load_recipe("quickstart", ["mesh={expert: 2}"])) if "has experts" in said]
    for recipe, mesh in (("quickstart", "mesh={data: 2}"), ("moe-small", "mesh={expert: 2}")):
        assert not [said for said in doubts(load_recipe(recipe, [mesh])) if "has experts" in said]


def test_dpo_does_not_begin_with_a_step_that_fine_tuning_cannot_reach():
    of_each = "sft.sources=[{path: pocket-world, examples: 100}]"
    few = [of_each, "sft.steps=400", "sft.batch=8", "sft.max_epochs=2"]  # 25 steps, were each in a row of its own
    for settings, said in (
        (["sft.steps=400", "dpo.base_step=401"], "at step 400 at the latest, before 401: so many are sft.steps"),
        ([*few, "dpo.base_step=26"], "at step 25 at the latest, before 26: sft.max_epochs is 2, and 100 conversations"),
    ):
        with pytest.raises(UserError, match=said) as refused:
            check(load_recipe("quickstart", settings), {"sft"})
        assert refused.value.where == "--set dpo.base_step"
    for settings in ([*few, "dpo.base_step=25"], [*few, "sft.max_epochs=null", "dpo.base_step=26"], few):
        check(load_recipe("quickstart", settings), {"sft"})
