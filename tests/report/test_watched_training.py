"""A fine-tuning whose loss falls while a benchmark does not: the report shows both, and why it ended."""

import json
import re
from pathlib import Path

from synthetic_run import build_run

from affinage.report import collect_facts, render

STEPS = (0, 100, 200, 300)
SHARES = (0.62, 0.60, 0.55, 0.44)


def test_scores_stand_under_the_loss_and_what_is_worse_is_marked(tmp_path: Path):
    run = build_run(tmp_path)
    looks = [
        {
            "step": step,
            "scores": {"winogrande": {"value": share, "stderr": 0.035}},
            "worse": [{"task": "winogrande", "than": 0, "p": 1e-4}] if step == 300 else [],
        }
        for step, share in zip(STEPS, SHARES)
    ]
    (run / "sft" / "watch.json").write_text(json.dumps({"threshold": 1e-3, "looks": looks}))
    summary = json.loads((run / "sft" / "summary.json").read_text())
    told = summary | {"ended": "winogrande is worse than at step 0 (p = 0.0001)", "steps": 300}
    (run / "sft" / "summary.json").write_text(json.dumps(told))

    page = render(collect_facts(run))
    section = page[page.index('id="sft"') :] if 'id="sft"' in page else page
    rows = re.findall(r'<th scope="row" class="n">([\d,]+)</th><td class="n">(<strong>)?([\d.]+)', section)
    shown = {int(step.replace(",", "")): (bool(bold), float(share)) for step, bold, share in rows}
    assert {step: shown[step] for step in STEPS} == {
        step: (step == 300, round(100 * share, 1)) for step, share in zip(STEPS, SHARES)
    }
    figure = section.index("Benchmarks on the way")
    assert section.index("Loss") < figure
    assert "The training ended at step 300: winogrande is worse than at step 0" in page
    (training,) = (each for each in collect_facts(run).trainings if each.name == "sft")
    assert training.first_loss > training.final_loss


def test_more_tasks_than_colours_tell_apart_have_charts_of_their_own(tmp_path: Path):
    run = build_run(tmp_path)
    scores = {f"task_{number}": {"value": 0.1 * number, "stderr": 0.01} for number in range(8)}
    looks = [{"step": step, "scores": scores, "worse": []} for step in STEPS]
    (run / "sft" / "watch.json").write_text(json.dumps({"threshold": 1e-3, "looks": looks}))
    page = render(collect_facts(run))
    first, second = (page.rindex("<figure", 0, page.index(f"Benchmarks on the way ({n})")) for n in (1, 2))
    assert "task_5" in page[first:second] and "task_6" not in page[first:second] and "task_7" in page[second:]
