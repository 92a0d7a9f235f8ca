"""A name is a path, a run, or a packaged recipe, in this order; and verbs that use a model train none."""

import json
import shutil
from pathlib import Path

import pytest

from affinage.pipeline.models import command, resolve
from affinage.pipeline.store import MANIFEST
from tiny_run import RECIPE, WORDS

RUN = Path("runs/quickstart")
RUNS = Path("runs")


@pytest.fixture(autouse=True)
def named_as_a_recipe(own_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_runs / "tiny").rename(own_runs / "quickstart")
    monkeypatch.chdir(own_runs.parent)


def made(runs: Path = RUNS) -> set[str]:
    return {entry.name for entry in (runs / "store").iterdir()}


def test_a_path_comes_before_a_run_and_a_run_before_a_packaged_recipe(tmp_path: Path, affinage):
    assert resolve("novels", RUNS).kind == "recipe" and resolve("quickstart", tmp_path).kind == "recipe"
    target = resolve("quickstart", RUNS)
    assert (target.kind, target.path, target.warning) == ("run", RUN, "")
    shutil.copytree(RUN / "export" / "model", "quickstart")
    assert resolve("quickstart", RUNS).kind == "hub" and str(RUN) in resolve("quickstart", RUNS).warning
    status, _, said = affinage("generate", "quickstart", "x", "--max-new-tokens", "1")
    assert status == 0 and "runs/quickstart" in said
    assert resolve("./quickstart", RUNS).warning == "" and resolve("runs/quickstart", RUNS).kind == "run"
    shutil.rmtree("quickstart")
    # One with the name and not the settings of a packaged recipe is told, too.
    status, out, said = affinage("config", "show", "quickstart", "tokenizer.vocab_size")
    assert status == 0 and out.split()[3:5] == ["tokenizer.vocab_size", "512"], said
    assert "quickstart.yaml" in said.replace("\n", "")
    assert affinage("config", "show", "novels", "seed")[::2] == (0, "")


@pytest.mark.parametrize("verb", ["report", "eval", "export", "chat", "generate", "serve", "compare"])
def test_verbs_that_use_a_model_print_the_command_that_trains_it(verb: str, affinage):
    (RUN / "sft" / MANIFEST).unlink()  # as while it is trained
    before = made()
    more = {"compare": ["quickstart"], "generate": ["x"], "chat": ["x"]}.get(verb, [])
    for name, folder in (("quickstart", "runs"), ("novels", "runs"), (str(RECIPE), "other runs")):
        status, out, said = affinage(verb, name, *more, "--runs", folder)
        assert (status, out) == (2, "") and command("run", name, runs=Path(folder)) in " ".join(said.split()), said
        assert ("to train: sft" in " ".join(said.split())) == (name == "quickstart")
    assert made() == before and not Path("other runs").exists()
    assert command("run", "a b.yaml", runs=Path("my runs")) == "affinage run 'a b.yaml' --runs 'my runs'"


def test_a_model_is_said_to_be_at_its_step(affinage, answer):
    (RUN / "dpo").unlink()
    assert affinage("report", "quickstart")[0] == 2, "a report of what there is needs a file"
    status, _, said = affinage("report", "quickstart", "--out", "now.html")
    assert status == 0 and Path("now.html").is_file() and "to train: dpo" in said
    status, _, said = affinage("compare", "quickstart/sft", "quickstart/sft@999")
    assert status == affinage("compare", "quickstart/sft", "quickstart@999")[0] == 2 and "sft@999" in said
    last, earlier = answer("compare", "quickstart/pretrain", "quickstart/pretrain@18")["runs"]
    assert last["parameters"] == earlier["parameters"] and last["tokens"] * 18 == earlier["tokens"] * 20
    assert last["final_loss"] and last["bits_per_byte"] and not ("final_loss" in earlier or earlier["bits_per_byte"])
    status, out, said = affinage("generate", "quickstart/pretrain@18", "x", "--max-new-tokens", "1", "--json")
    state = {"model": "quickstart/pretrain", "step": 18, "steps": 20}
    assert status == 0 and json.loads(out).items() >= state.items()
    assert "quickstart/pretrain, step 18 of 20" in said
    status, _, said = affinage("generate", "quickstart/pretrain@999", "x")
    assert status == 2 and "999 of 20" not in said, "what is not there is at no step"
    assert answer("eval", "quickstart/sft", "--limit", "1").items() >= {"step": 5, "steps": 5}.items()
    (RUN / "pretrain" / MANIFEST).unlink()  # as while it is trained
    assert "step 20 of 20" in affinage("generate", "quickstart/pretrain", "x", "--max-new-tokens", "1")[2]
    assert affinage("export", f"{Path.cwd()}/runs/quickstart/pretrain@18", "--to", "out")[0] == 0
    card = Path("out/README.md").read_text()
    assert "pretrain, step 18 of 20" in card and str(Path.cwd()) not in card
    (RUN / "sft" / MANIFEST).unlink()
    (RUN / "recipe.json").write_text((RUN / "recipe.json").read_text().replace('"language": "en"', '"language": "fr"'))
    assert affinage("export", "quickstart/sft@4", "--to", "tuned")[0] == 0
    card = Path("tuned/README.md").read_text()
    assert "répondre dans des conversations" in card and "| Point de reprise | quickstart/sft, pas 4 sur 5 |" in card


def test_set_and_force_work_the_second_time_as_the_first(affinage, answer):
    for words in (["--set", "evaluate.limit=1"], ["--force", "evaluate-sft"]):
        first, second = (answer("eval", "quickstart", *words)["evaluations"] for _ in range(2))
        assert first.keys() == second.keys()
        assert all(one["tasks"] == second[name]["tasks"] for name, one in first.items())
    before = made()
    status, _, said = affinage("eval", "quickstart", "--set", "pretrain.steps=21")
    wanted = "affinage run quickstart --set pretrain.steps=21 --until evaluate-base"
    assert status == 2 and wanted in " ".join(said.split()) and made() == before
    # It is run by its name with the settings it has.
    rows = answer("run", "quickstart", "--dry-run")
    assert {row["step"] for row in rows if row["runs"]} <= {"export", "report"}, "they have its name"
    assert affinage("run", "quickstart", "--until", "dpo", *WORDS[1:])[0] == 0 and made() == before
    assert "recipes/tiny.yaml" in json.loads((RUN / "run.json").read_text())["recipe"]


@pytest.mark.parametrize("verify", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_the_run_exported_itself_is_not_written_again_and_verified_where_it_is(verify: bool, affinage):
    before = made()
    status, out, said = affinage("export", "quickstart", *(["--verify"] if verify else []))
    assert status == 0 and "runs/quickstart/export/model" in out and made() == before, said
    assert verify == ("transformers computes the same: logits of" in out)
    for words in (["--dtype", "bfloat16"], ["--set", "export.dtype=bfloat16"]):
        assert affinage("export", "quickstart", *words)[0] == 0
    assert [name.partition("-")[0] for name in made() - before] == ["export"]
    assert json.loads((RUN / "export/model/config.json").read_text())["dtype"] == "bfloat16"
    assert affinage("export", "quickstart/pretrain")[0] == 2, "only a whole run has an export of its own"


def test_a_run_with_a_setting_that_is_gone_is_still_opened(affinage):
    recipe = json.loads((RUN / "recipe.json").read_text())
    recipe["pretrain"]["gone"] = 3
    recipe["evaluate"]["batch_size"] = "auto"
    (RUN / "recipe.json").write_text(json.dumps(recipe))
    for words in (["plan", "quickstart", "--on", "cpu"], ["config", "show", "quickstart"], ["graph", "quickstart"]):
        status, _, said = affinage(*words)
        assert status == 0 and said.count("pretrain.gone") == 1, said
    assert affinage("eval", "quickstart/sft", "--limit", "1")[0] == affinage("report", "quickstart")[0] == 0
    status, out, said = affinage("config", "show", "quickstart", "pretrain.steps", "--set", "pretrain.steps=7")
    assert status == 0 and "pretrain.steps      7" in out and "pretrain.gone" in said
    status, _, said = affinage("config", "show", "quickstart", "--set", "pretrain.stepz=7")
    assert status == 2 and "pretrain.stepz" in said and "Warning" not in said
    status, _, said = affinage("run", "quickstart")
    assert status == 2 and "gone" in said
