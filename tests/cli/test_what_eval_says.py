"""`eval` says in the terminal what was left out, and what was asked in the chat template."""

from collections.abc import Callable
from pathlib import Path

from affinage.hub.card import CardFacts
from affinage.hub.export import export
from choice_task import sums, write_task
from tiny_models import tiny_llama


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
