"""What a user may call a model, and what they are told if there is none."""

from pathlib import Path

import pytest

from affinage.errors import UserError
from affinage.stages.models import is_chat, locate_model, made_from
from affinage.stages.store import Request, Store, link


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A run `one` with both trainings, and a run `two` with a pretraining only."""
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "runs" / "store")

    def make(stage: str, seed: int, run: str, **inputs: str) -> str:
        request = Request(stage, {"seed": seed}, inputs, {}, {})
        folder = store.begin(request, anew=True)
        (folder / "model.json").write_text("{}")
        link(tmp_path / "runs" / run / stage, folder)
        return request.key

    world = make("world", 1, "one")
    tokenizer = make("tokenizer", 1, "one", world=world)
    pretrain = make("pretrain", 1, "one", tokenizer=tokenizer)
    make("sft", 1, "one", pretrain=pretrain, tokenizer=tokenizer)
    make("pretrain", 2, "two", tokenizer=tokenizer)
    make.again = lambda: make("pretrain", 3, "one", tokenizer=tokenizer)
    return make


@pytest.mark.parametrize(
    ("spec", "stage", "step"),
    [
        ("one", "sft", None), ("runs/one", "sft", None), ("runs/one/pretrain", "pretrain", None),
        ("one/pretrain@20", "pretrain", 20), ("two", "pretrain", None), ("two@7", "pretrain", 7),
    ],
)  # fmt: skip
def test_names(runs, tmp_path, spec, stage, step):
    folder, found = locate_model(spec, tmp_path / "runs")
    assert (folder.name.split("-")[0], found) == (stage, step)
    assert folder.parent == tmp_path / "runs" / "store"
    assert is_chat(folder) == (stage == "sft")


def test_what_a_model_was_made_from(runs, tmp_path):
    folder, _ = locate_model("one", tmp_path / "runs")
    assert made_from(folder, "tokenizer").name.startswith("tokenizer-")
    assert made_from(folder, "world").name.startswith("world-")
    assert made_from(folder, "rows") is None


def test_a_chat_model_of_a_former_base_is_not_the_model_of_the_run(runs, tmp_path):
    runs.again()
    assert locate_model("one", tmp_path / "runs")[0].name.startswith("pretrain-")


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("three", "one, two"),
        ("one@last", "`@last`"),
        ("runs", "runs/one, runs/two"),
        ("runs/store", "runs/store/pretrain-"),
        ("folder", "folder"),
        ("runs/begun", "runs/begun"),
        ("many", "many/0, many/1, many/2, many/3, many/4 and 2 more"),
    ],
)
def test_without_such_a_model_those_that_are_there_are_named(runs, tmp_path, spec, named):
    for name in ("runs/begun/recipe.json", "folder/x.txt", *(f"many/{number}/config.json" for number in range(7))):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text("{}")
    with pytest.raises(UserError) as caught:
        locate_model(spec, Path("runs"))
    assert named in str(caught.value)


def test_a_run_and_a_folder_of_one_name(runs, tmp_path):
    folder = tmp_path / "runs"
    (tmp_path / "one").mkdir()
    assert locate_model("one", folder)[0].name.startswith("sft-"), "a folder without a model is not meant"
    (tmp_path / "one" / "config.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        locate_model("one@3", folder.relative_to(tmp_path))
    assert "`runs/one`" in caught.value.fix and "`./one`" in caught.value.fix
    assert locate_model("./one", folder)[0] == tmp_path / "one"
    assert locate_model("runs/one", folder)[0].name.startswith("sft-")
