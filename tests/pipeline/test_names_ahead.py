"""What cannot be is refused before the first step runs, and by a dry run."""

import pytest

from affinage.config.load import LoadedRecipe, load_recipe
from affinage.errors import UserError
from affinage.pipeline.build import build_steps
from run_affinage import refused

RECIPE = """\
name: small
model:
  inputs: [tokens]
  nodes:
    embed: {kind: embedding, in: tokens, vocab: 64, width: 8}
    logits: {kind: unembed, in: embed, vocab: 64, tied: false}
    loss: {kind: next_token_loss, in: [logits, tokens]}
data: {sources: [{path: texts.txt, language: EN}]}
tokenizer: {kind: char}
pretrain: {steps: 20, batch_size: 8, schedule: {peak_lr: 1e-3, min_lr: 1e-4}}
evaluate: {tasks: []}
"""


def check(loaded: LoadedRecipe, names: set[str]) -> None:
    """The checks of some steps of a recipe."""
    for step in build_steps(loaded):
        if step.name in names and step.check is not None:
            step.check(loaded)


@pytest.fixture
def ahead(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "texts.txt").write_text("some text")
    (tmp_path / "exam.pdf").write_text("no items")

    def ahead(*overrides: str, stages=frozenset({"ingest", "filter", "decontaminate", "tokenize"})) -> UserError:
        return refused(lambda: check(load_recipe("r.yaml", overrides), stages))

    return ahead


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.languages=[en, french]", "ISO 639-1"),
        ("data.languages=[en, xx]", "ISO 639-1"),
        ("data.sources=[{path: texts.txt, language: en-US}]", "ISO 639-1"),
        ("data.decontaminate.benchmark_files=[none.yaml]", "`none.yaml`"),
        ("data.decontaminate.benchmark_files=[exam.pdf]", ".jsonl"),
        ("evaluate.tasks=[none.yaml]", "`none.yaml`"),
    ],
)
def test_an_unknown_name_is_refused_with_what_to_do(ahead, override, named):
    error = ahead(override)
    assert named in f"{error.what} {error.fix}" and error.fix and "--set" in error.where


@pytest.mark.parametrize(
    ("tuning", "watch"),
    [("sft", "tasks: [none.yaml]"), ("sft", "data_dir: ."), ("dpo", "data_dir: nowhere")],
)
def test_so_is_a_name_that_a_tuning_watches(ahead, tuning, watch):
    how = "schedule: {peak_lr: 1e-6, min_lr: 0}"
    given = f"{tuning}={{sources: [texts.txt], steps: 10, batch_size: 8, {how}, monitor: {{every_steps: 5, {watch}}}}}"
    assert ahead(given, stages={tuning}).where.startswith(f"--set {tuning}")


def test_names_of_any_case_are_languages(ahead):
    data = load_recipe("r.yaml", ["data.languages=[EN, Fr]"]).recipe.data
    assert data.languages == ("en", "fr") and data.sources[0].language == "en"
    check(load_recipe("r.yaml", ["evaluate.tasks=[hellaswag]"]), {"ingest", "filter", "decontaminate", "tokenize"})


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("pretrain.optimizer.name=adammm", "--set pretrain.optimizer.name"),
        ("pretrain.schedule.settings={share: 1}", "--set pretrain.schedule.settings"),
        ("mesh.data=7", "data = 7"),
        ("pretrain.batch_size=7", "batch 7"),
        ("pretrain.optimizer_in_backward=true", "--set pretrain"),  # without layers that repeat
        ("mesh={pipeline: 2, data: 4}", "--set mesh"),
    ],
)
def test_a_dry_run_refuses_it_too(ahead, override, named, affinage):
    status, _, said = affinage("run", "r.yaml", "--dry-run", "--set", override)
    assert status == 2 and named in said
