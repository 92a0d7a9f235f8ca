"""`eval` says what was left out or cut and what others published, and its answers are not passed off as another's."""

from pathlib import Path

import pytest

from affinage.pipeline.models import resolve, results_folder
from benchmark_fixtures import write_items
from choice_task import sums, write_task


@pytest.fixture
def here(own_runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a copy of the tiny run, where the program is called."""
    monkeypatch.chdir(own_runs.parent)
    return own_runs.parent


def flat(text: str) -> str:
    return " ".join(text.split())


def test_tasks_for_chat_models_and_those_asked_in_the_template_are_named(here: Path, affinage):
    plain, talk = (write_task(here / name, name, sums(2)) for name in ("plain", "talk"))
    talk.write_text(talk.read_text() + "tag: chat\n")

    def told(model: str) -> str:
        status, out, said = affinage("eval", model, "--tasks", f"{plain},{talk}")
        assert status == 0, said
        return flat(out)

    assert "so left out: talk" in (base := told("tiny/pretrain")) and "Asked in" not in base
    assert "in the chat template: talk" in (chat := told("tiny")) and "left out" not in chat


def test_cut_items_and_items_in_the_text_are_reported(here: Path, affinage, answer):
    items = sums(3)
    items[1]["question"] *= 40
    items[2]["question"] = answer("data", "head", "tiny", "--part", "train", "--limit", "1")[0]["text"][:300]
    task, piqa = write_task(here / "task", "plain", items), str(write_items(here / "items", ["piqa"], copies=2))
    status, out, said = affinage("eval", "tiny/pretrain", "--tasks", f"{task},piqa", "--data-dir", piqa)
    assert status == 0, said
    assert "longer than the context of 64 tokens" in flat(out) and "2 of plain" in flat(out)
    assert "plain 3 1 acc" in flat(out) and "without them" in out


def test_a_hugging_face_folder_is_another_when_weights_or_tokenizer_are_and_not_when_its_card_is(tmp_path: Path):
    model, runs, found = tmp_path / "model", tmp_path / "runs", []
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (model / name).write_text(name)
    for name in ("", "README.md", "model.safetensors", "tokenizer.json"):
        if name:
            (model / name).write_text("another")
        found.append(results_folder(resolve(str(model), runs), runs))
    assert found[0] == found[1] and len(set(found)) == 3
