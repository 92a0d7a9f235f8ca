"""A grid of settings: every point is run once, what points have in common is made once."""

import json
from pathlib import Path

import pytest

from affinage.cli.program import main
from affinage.cli.sweep import _show_scores
from choice_task import write_task

TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")
GRID = {
    "sft.base_step": [4, 8],
    "sft.sources": [["pocket-world"], ["CHATS"]],
    "sft.steps": [1, 2],
}
SETTINGS = [
    "data.sources=[{path: pocket-world, megabytes: 0.05}]",
    "pretrain={steps: 8, batch: 4, schedule: {peak: 1.0e-3, floor: 0}, checkpoint: {every_steps: 4, keep_every: 4}}",
    "export=null",
    "sft.held_out=0",
    "model.nodes.blocks.repeat=1",
    "report={prompts: [], questions: []}",
]


def run(runs: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict]:
    chats = runs.parent / "chats.jsonl"
    lines = [{"prompt": f"What is {i}?", "completion": f"It is {i}."} for i in range(20)]
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    items = [{"question": f"The capital of {i} is", "choices": [f"{i}", "Paris"], "right": i % 2} for i in range(8)]
    task = write_task(runs.parent, "capitals", items)
    grid = json.dumps(GRID).replace("CHATS", str(chats))
    evaluate = json.dumps({"tasks": [str(task)], "batch": 8})
    settings = [word for each in (*SETTINGS, f"evaluate={evaluate}", f"sweep={grid}") for word in ("--set", each)]
    with pytest.raises(SystemExit) as ended:
        main(["sweep", TINY, "--runs", str(runs), "--json", *settings, *words])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_two_by_two_by_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = tmp_path / "runs"
    planned = run(runs, capsys, "--dry-run")
    assert len(planned) == 8 and "pretrain" in planned[0]["would_run"]
    assert all("pretrain" in point["shared"] for point in planned[1:])
    assert all("sft" in point["would_run"] for point in planned)

    told = run(runs, capsys)
    assert [point["settings"]["sft.steps"] for point in told] == [1, 2] * 4
    assert [point["settings"]["sft.base_step"] for point in told] == [4] * 4 + [8] * 4
    assert all(0 <= point["scores"]["capitals"]["value"] <= 1 for point in told)
    assert all(point["scores"]["capitals"]["stderr"] is not None for point in told)
    assert not any(point["scores"]["capitals"]["chat_template"] for point in told)
    store = [path.name.rpartition("-")[0] for path in (runs / "store").glob("*-*")]
    counts = {name: store.count(name) for name in set(store)}
    assert counts["pretrain"] == counts["tokenizer"] == counts["world"] == 1
    assert counts["conversations"] == 2 and counts["sft"] == counts["evaluate-sft"] == 8
    assert json.loads((runs / "tiny" / "sweep.json").read_text()) == told

    # Again: nothing is left to do, and the table is the same.
    assert all(point["would_run"] == [] for point in run(runs, capsys, "--dry-run"))
    assert run(runs, capsys) == told


def test_without_benchmarks_the_table_has_the_runs_and_their_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = tmp_path / "runs"
    others = [
        "evaluate=null",
        "sft=null",
        "data.split.validation=0.2",
        "sweep={pretrain.schedule.peak: [1.0e-3, 1.0e-2]}",
    ]
    settings = [*(each for each in SETTINGS if not each.startswith("sft.")), *others]
    words = [word for each in settings for word in ("--set", each)]
    with pytest.raises(SystemExit) as ended:
        main(["sweep", TINY, "--runs", str(runs), *words])
    table = [line.split() for line in capsys.readouterr().out.partition("--- 2 of 2")[2].splitlines()]
    assert ended.value.code == 0 and ["run", "tiny-001", "tiny-002"] in table
    told = json.loads((runs / "tiny" / "sweep.json").read_text())
    of_each = [json.loads((runs / name / "pretrain/summary.json").read_text()) for name in ("tiny-001", "tiny-002")]
    for name in of_each[0]["validation"]:
        losses = [summary["validation"][name]["loss"] for summary in of_each]
        assert [point["losses"][f"pretrain loss, {name}"] for point in told] == losses
        assert ["pretrain", "loss,", name, *(f"{loss:.4f}" for loss in losses)] in table
        assert losses[0] != losses[1]


def test_a_score_that_was_asked_in_the_chat_template_is_marked(capsys: pytest.CaptureFixture[str]):
    def point(templated: bool) -> dict:
        score = {"metric": "acc", "value": 0.5, "stderr": 0.05, "chance": 0.25, "chat_template": templated}
        return {"point": 1, "run": "r", "settings": {}, "losses": {}, "scores": {"capitals": score}}

    _show_scores([point(False), point(True)])
    shown = capsys.readouterr().out
    assert ["capitals", "acc", "50.0", "±", "5.0", "50.0", "±", "5.0", "†"] in [*map(str.split, shown.splitlines())]
    assert "† asked in the chat template" in shown
    _show_scores([point(False)])
    assert "†" not in capsys.readouterr().out


def test_a_command_after_it_in_the_same_process_prints_where_it_always_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run(tmp_path / "runs", capsys, "--dry-run")
    with pytest.raises(SystemExit):
        main(["recipes"])
    assert "quickstart" in capsys.readouterr().out


def test_a_recipe_without_a_grid_is_told_how_to_have_one(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["sweep", TINY])
    assert ended.value.code == 2 and "has no `sweep`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("step", "said"), [(6, "every 4 and keeps the last 2 and multiples of 4"), (12, "of its 8 steps")]
)
def test_a_step_that_no_point_will_have_is_refused_before_the_first(
    step: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runs = tmp_path / "runs"
    grid = json.dumps({"sft.base_step": [8, 4, step], "sft.steps": [1]})
    settings = [word for each in (*SETTINGS, f"sweep={grid}") for word in ("--set", each)]
    with pytest.raises(SystemExit) as ended:
        main(["sweep", TINY, "--runs", str(runs), *settings])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"pretrain will keep no checkpoint of step {step}" in told and said in " ".join(told.split())
    assert f"3 of 3, sft.base_step = {step}, sft.steps = 1: " in " ".join(told.split())
    assert f"numbers that divide {step}" in " ".join(told.split())
    assert not list(runs.rglob("manifest.json"))
