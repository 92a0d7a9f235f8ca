"""A grid of settings: every point is run once, what points have in common is made once."""

import json
from pathlib import Path

import pytest

from run_affinage import set_words
from tiny_run import RECIPE, WORDS


def test_what_points_have_in_common_is_made_once(tmp_path: Path, answer):
    grid = "sweep={sft.from_step: [5, 10], sft.steps: [1, 2]}"
    words = set_words(grid, "runtime.checkpoint={every_steps: 5, keep_every: 5}")
    planned = answer("sweep", str(RECIPE), "--runs", str(tmp_path / "runs"), "--dry-run", *words)
    assert [{"pretrain", "sft"} & {*point["would_run"]} for point in planned] == [{"pretrain", "sft"}, *[{"sft"}] * 3]


@pytest.mark.parametrize(
    ("key", "values", "trained"),
    [("report.language", ["en", "fr"], 0), pytest.param("dpo.steps", [4, 2], 1, marks=pytest.mark.full)],
)
def test_every_point_is_run_and_the_table_has_its_losses_and_scores(own_runs, key, values, trained, affinage, answer):
    words = ("sweep", *WORDS, "--runs", str(own_runs), "--set", f"sweep={{{key}: [{values[0]}, {values[1]}]}}")
    before = {path.name for path in (own_runs / "store").iterdir()}
    told = answer(*words)
    assert [point["settings"] for point in told] == [{key: value} for value in values]
    assert all(0 <= score["value"] <= 1 for point in told for score in point["scores"].values())
    made = [path.name.rpartition("-")[0] for path in (own_runs / "store").iterdir() if path.name not in before]
    assert made.count("dpo") == made.count("evaluate-dpo") == trained and not {"pretrain", "sft"} & {*made}
    assert json.loads((own_runs / "tiny" / "sweep.json").read_text()) == told

    status, out, _ = affinage(*words)
    table = [line.split() for line in out.splitlines() if line.startswith("tiny-")]
    assert status == 0 and key in out.split() and f"--- 1 of 2, tiny-001: {key}={values[0]}\n" in out
    for point in told:
        assert any({point["run"], *(f"{loss:.4g}" for loss in point["losses"].values())} <= {*row} for row in table)
        for score in point["scores"].values():
            wide = f"{100 * score['value']:.1f}" + (f" ± {100 * score['stderr']:.1f}" if score["stderr"] else "")
            assert wide in out
    assert all(point["would_run"] == [] for point in answer(*words, "--dry-run"))


def test_a_run_that_fails_does_not_end_the_others(own_runs: Path, affinage, monkeypatch):
    monkeypatch.setattr("affinage.report.page.held_out_apart", lambda compared: [f"{len(compared)} runs"])
    grid = "sweep={pretrain.schedule.peak_lr: [1.0e+30, 3.0e-3]}"
    absent = (f"{section}=null" for section in ("sft", "dpo", "evaluate", "export"))
    words = set_words(*absent, "pretrain.health={max_skips: 1}", grid)
    status, out, said = affinage("sweep", str(RECIPE), "--runs", str(own_runs), *words, "--json")
    assert status == 2 and "tiny-001 failed" in said and "held-out text of 2 runs" in said, said
    diverged, trained = json.loads(out)
    assert "had to be skipped" in diverged["error"]
    assert "error" not in trained and trained["losses"] and not diverged["losses"]
    assert json.loads((own_runs / "tiny" / "sweep.json").read_text()) == [diverged, trained]
