"""`eval` says in the terminal what was left out or cut, and what was asked in the chat template."""

from collections.abc import Callable
from pathlib import Path

from affinage.hub.card import CardFacts
from affinage.hub.export import export
from benchmark_fixtures import write_items
from choice_task import sums, write_task
from tiny_models import CONTEXT, tiny_llama


def test_tasks_for_chat_models_and_those_asked_in_the_template_are_named(
    affinage: Callable[..., tuple[int, str, str]], tmp_path: Path
):
    for name in ("base", "chat"):
        export(tiny_llama(), tmp_path / name, facts=CardFacts("mit"), dtype="float32", chat=name == "chat")
    plain, talk = (write_task(tmp_path / name, name, sums(4)) for name in ("plain", "talk"))
    talk.write_text(talk.read_text() + "tag: chat\n")

    def said(model: str, *more: str) -> tuple[int, str]:
        runs = str(tmp_path / "runs")
        status, *shown = affinage("eval", str(tmp_path / model), "--tasks", f"{plain},{talk}", "--runs", runs, *more)
        return status, " ".join(" ".join(shown).split())

    status, told = said("base")
    assert status == 0 and "For chat models alone, so left out: talk" in told and "Asked in" not in told
    status, told = said("base", "--chat-template", "always")
    assert status == 2 and "has no chat template" in told
    status, told = said("chat")
    assert status == 0 and "Asked in the chat template: talk" in told and "left out" not in told
    status, told = said("chat", "--chat-template", "always")
    assert status == 0 and "Asked in the chat template: plain, talk" in told
    status, told = said("base", "--chat-template", "never")
    assert status == 0 and "left out" not in told and "Asked in" not in told


def test_published_results_stand_beside_those_of_the_model(
    affinage: Callable[..., tuple[int, str, str]], tmp_path: Path
):
    export(tiny_llama(), tmp_path / "model", facts=CardFacts("mit"), dtype="float32")
    items = write_items(tmp_path / "items", ["piqa"], copies=2)
    status, shown, _ = affinage(
        "eval", str(tmp_path / "model"), "--tasks", "piqa", "--data-dir", str(items), "--runs", str(tmp_path / "runs")
    )
    rows = [line.split() for line in shown.splitlines()]
    assert status == 0 and "published, not measured here" in shown
    assert ["Pythia-410M", "(published)", "300B", "66.8"] in rows
    assert ["GPT-2", "Small", "(published)", "100B+", "–"] in rows, "nothing was stated of it"
    (ours,) = (row for row in rows if row[:2] == ["this", "model"])
    assert ours[2] in ("0.0", "100.0"), "two copies of one item"
    assert "Published: Julian-600M's report" in " ".join(shown.split())
    assert "Not on the same items as the published scores: piqa 2 items (published 1,838)" in shown


def test_items_that_were_cut_are_told_of(affinage: Callable[..., tuple[int, str, str]], tmp_path: Path):
    export(tiny_llama(), tmp_path / "model", facts=CardFacts("mit"), dtype="float32")
    items = sums(4)
    items[1]["question"] *= 40
    task = str(write_task(tmp_path / "task", "plain", items))
    status, shown, _ = affinage("eval", str(tmp_path / "model"), "--tasks", task, "--runs", str(tmp_path / "runs"))
    assert (
        status == 0
        and f"Longer than the context of {CONTEXT} tokens, and cut or scored in pieces: 1 of plain's 4 items" in shown
    )
    status, shown, _ = affinage(
        "eval", str(tmp_path / "model"), "--tasks", task, "--limit", "1", "--runs", str(tmp_path / "one")
    )
    assert status == 0 and "Longer than" not in shown
