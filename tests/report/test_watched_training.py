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
    head, told = section.index("Benchmarks on the way"), section.index("The training ended at step 300")
    assert section.index("Loss") < head < told < section.index("Learning rate"), "benchmarks stand under the loss"
    assert section.count('class="ring') == 2 and "Ringed: worse" in section  # the same point, wide and narrow
    rows = re.findall(r'<th scope="row" class="n">([\d,]+)</th><td class="n">(<strong>)?([\d.]+)', section)
    shown = {int(step.replace(",", "")): (bool(bold), float(share)) for step, bold, share in rows}
    assert {step: shown[step] for step in STEPS} == {
        step: (step == 300, round(100 * share, 1)) for step, share in zip(STEPS, SHARES)
    }
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


def test_what_is_worse_is_said_of_a_training_that_went_on_to_its_end(tmp_path: Path):
    run = build_run(tmp_path)
    worse = [[], [("a", 0, 1e-3)], [("a", 0, 1e-4), ("a", 100, 2e-3), ("b", 0, 5e-3)], []]
    looks = [
        {
            "step": step,
            "scores": {task: {"value": share - 0.1 * (task == "b"), "stderr": 0.03} for task in "abcde"},
            "worse": [{"task": task, "than": than, "p": p} for task, than, p in found],
        }
        for step, share, found in zip(STEPS, SHARES, worse)
    ]
    (run / "sft" / "watch.json").write_text(json.dumps({"threshold": 1e-2, "looks": looks}))
    facts = collect_facts(run)
    page = render(facts).replace("\u00a0", " ")
    said = "a from 62.0% at step 0 to 55.0% at step 200 (p = 10⁻⁴) · b from 52.0% at step 0 to 45.0% at step 200"
    (training,) = (each for each in facts.trainings if each.name == "sft")
    assert "While the loss fell from" in page and training.first_loss > training.final_loss
    assert said in page
    assert re.search(r'<th scope="row">c</th><td class="n">62.0% ± 3.0%</td><td class="n">60.0%', page), "few looks"
    assert "La perte" not in page and "empirent au-delà du hasard" in render(facts, "fr")


def test_a_curve_too_short_to_be_smoothed_is_drawn_once(tmp_path: Path):
    run = build_run(tmp_path)
    lines = (run / "sft" / "metrics.jsonl").read_text().splitlines()
    few = [line for line in lines if '"loss"' in line and '"validation"' not in line][:8]
    (run / "sft" / "metrics.jsonl").write_text("\n".join(few) + "\n")
    page = render(collect_facts(run))
    section = page[page.index('id="sft"') : page.index("</figure>", page.index('id="sft"'))]
    assert "training, each logged step" in section and 'class="faint' not in section
