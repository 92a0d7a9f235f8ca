"""`checkpoint` and `eval`: what a script and a person learn, and what is not passed off as something else."""

import json
import re
from pathlib import Path

from affinage.checkpoint.store import METADATA
from affinage.pipeline.models import resolve, results_folder
from benchmark_fixtures import write_items
from choice_task import sums, write_task
from source_forms import write_lines


def flip(path: Path) -> None:
    """A bit near its end becomes another, or what it was."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])


def test_steps_their_arrays_and_facts_are_shown_and_what_is_corrupted_is_named(affinage, own_runs):
    def said(*words: str):
        status, out, error = affinage("checkpoint", *words, "--runs", str(own_runs), "--json")
        return status, json.loads(out) if out else None, error

    checkpoints = own_runs / "tiny" / "pretrain" / "checkpoints"
    (checkpoints / "99").mkdir()
    status, found, _ = said("ls", "tiny/pretrain")
    assert status == 0 and [(each["step"], bool(each["why_not"])) for each in found] == [(18, 0), (20, 0), (99, 1)]
    assert all(each["bytes"] > 0 and each["saved"] for each in found[:2])
    _, newest, _ = said("show", "tiny/pretrain")
    assert newest["step"] == 20 and newest["identity"]["schedule"]["peak_lr"] == 3e-3
    assert newest["arrays"]["params.embed.embedding"].startswith("float32 [")
    status, _, error = said("show", "tiny/pretrain@9")
    assert status == 2 and "@18, @20" in error and said("ls", str(own_runs / "tiny" / "export" / "model"))[0] == 2

    status, found, _ = said("verify", "tiny/pretrain")
    assert status == 0 and [(each["step"], each["corruption"]) for each in found] == [(18, None), (20, None)]
    flip(array := next((checkpoints / "18" / "params").glob("d/*")))
    status, found, error = said("verify", "tiny/pretrain")
    assert status == 2 and "1 of 2" in error and [each["step"] for each in found if each["corruption"]] == [18]
    assert [said("verify", f"tiny/pretrain@{step}")[0] for step in (18, 20)] == [2, 0]
    flip(array)
    flip(checkpoints / "18" / METADATA)
    status, _, error = said("show", "tiny/pretrain@18")
    assert status == 2 and METADATA in error


def test_tasks_that_are_left_out_items_that_are_cut_and_items_in_the_text_are_in_the_tables(
    own_runs: Path, monkeypatch, affinage, answer
):
    monkeypatch.chdir(own_runs.parent)
    items = sums(3)
    items[1]["question"] *= 40
    items[2]["question"] = answer("data", "head", "tiny", "--part", "train", "--limit", "1")[0]["text"][:300]
    plain, talk, task = (write_task(Path(name), name, sums(2)) for name in ("plain", "talk", "task"))
    talk.write_text(talk.read_text() + "tag: chat\n")
    write_lines(task.with_name("items.jsonl"), items)
    piqa = str(write_items(Path("items"), ["piqa"], copies=2))

    def told(model: str, *words: object) -> str:
        status, out, said = affinage("eval", model, "--tasks", ",".join(map(str, words[:2])), *map(str, words[2:]))
        assert status == 0 and "\nresults  runs/evaluations/" in out, said
        return " ".join(out.split())

    assert "for chat models only: talk" in (base := told("tiny/pretrain", plain, talk)) and "items chat" not in base
    assert "items chat" in (chat := told("tiny", plain, talk)) and "talk" in chat and "left out" not in chat
    cut = told("tiny/pretrain", task, "piqa", "--data-dir", piqa)
    assert "items cut" in cut and re.search("task acc [^ ]+ [^ ]+ [^ ]+ 3 2 ", cut), "2 of 3 are longer than 64 tokens"
    assert "task 3 1 acc" in cut and "without them" in cut and "--tasks julian" in told("tiny/pretrain", talk)
    assert ": centered_mean " in told("tiny", "core", plain, "--data-dir", write_items(Path("core"), ["winogrande"]))


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
