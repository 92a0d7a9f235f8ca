"""What the benchmarks of a run print for programs has the errors, and the looks, that they print to be read."""

import json
import sys
from pathlib import Path

import pytest

from affinage.stages.watching import scores

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_score_that_is_printed_has_its_standard_error(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import quickstart_scores
    from run_scores import Share

    entry = {"metrics": {"acc": {"value": 0.9, "stderr": 0.01}}, "items": 300, "chance": 0.25}
    stopped = {"texts": 50, "stopped": {"value": 1.0, "stderr": 0.0}}
    for model, right in (("base", 8), ("sft", 8), ("dpo", 4)):
        (tmp_path / f"evaluate-{model}" / "items").mkdir(parents=True)
        items = [json.dumps({"id": n, "hash": f"{n}", "acc": float(n < right)}) + "\n" for n in range(10)]
        (tmp_path / f"evaluate-{model}" / "items" / "pocket_facts_en.jsonl").write_text("".join(items))
        found = {"tasks": {"pocket_facts_en": entry}, "generation": stopped}
        (tmp_path / f"evaluate-{model}" / "results.json").write_text(json.dumps(found))
    (tmp_path / "sft").mkdir()
    task = "pocket_agreement_en"
    right = {0: [1, 1, 1, 1, 0, 0], 500: [1, 1, 1, 1, 0, 0], 1000: [0, 0, 0, 0, 1, 0]}  # four lost, one won
    looks = [
        {"step": step, "scores": scores({task: items}), "worse": [], "right": {task: items}}
        for step, items in right.items()
    ]
    (tmp_path / "sft" / "watch.json").write_text(json.dumps({"threshold": 0.01 / 3, "looks": looks}))
    monkeypatch.setattr(quickstart_scores, "run", lambda *_: tmp_path)
    monkeypatch.setattr(quickstart_scores, "pairs", lambda _: {"pocket-world": Share(0.9, 37)})
    monkeypatch.setattr(sys, "argv", ["quickstart_scores.py"])
    quickstart_scores.main()
    shown, _, told = capsys.readouterr().out.rpartition("\n{")
    lines = {line["name"]: line for line in json.loads("{" + told)["results"]}
    facts = lines["facts, form seen, English, sft"]
    assert (facts["ours"], facts["stderr"], facts["unit"]) == (0.9, 0.01, "share of 300 items")
    assert facts["ratio"] == pytest.approx(3.6) and "90.0 ± 1.0" in shown
    assert lines["answers that end with <|im_end|>, both, dpo"]["stderr"] == 0
    assert "stderr" not in lines["all stages"]
    first, second, last = (lines[f"{task} watched in sft, step {step}"] for step in right)
    assert (first["ours"], last["ours"], last["task"], last["step"]) == (4 / 6, 1 / 6, task, 1000)
    assert last["stderr"] == pytest.approx((5 / 36 / 5) ** 0.5) and last["unit"] == "share of 6 items"
    assert "p" not in first and second["p"] == 1  # nothing changed
    assert last["p"] == lines["least p of a degradation in sft"]["ours"] == 6 / 32  # 4 or 5 of 5 by a coin
    assert "16.7 ± 16.7 at step 1000 (p = 0.19)" in shown
    pairs = lines["held-out pairs, dpo"]
    assert (pairs["ours"], pairs["stderr"], pairs["unit"]) == (0.9, pytest.approx(0.05), "share of 37 pairs")
    assert "90.0 ± 5.0 % of 37 held-out pairs are right" in shown
    same, lost = (lines[f"pocket_facts_en acc, {models}"] for models in ("base to sft", "sft to dpo"))
    assert (same["ours"], same["stderr"], same["real"]) == (0, 0, False)
    error = (0.24 / 9) ** 0.5  # of four ones and six zeros
    assert (lost["ours"], lost["stderr"], lost["real"]) == (-0.4, pytest.approx(error), True)
    assert lost["low"] == pytest.approx(-0.4 - 1.96 * error, abs=1e-4) and "| -40.0 (-72.0 to -8.0) | 10 |" in shown


def test_the_last_word_of_lambada_has_its_perplexity_beside_its_accuracy(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import novels_chat
    from run_scores import cells

    metrics = {"acc": {"value": 0.25, "stderr": 0.03}, "perplexity": {"value": 1234.5, "stderr": 67.8}}
    for model in ("base", "sft", "dpo"):
        (tmp_path / f"evaluate-{model}").mkdir()
        found = {"tasks": {"lambada_openai": {"metrics": metrics, "items": 200}}}
        (tmp_path / f"evaluate-{model}" / "results.json").write_text(json.dumps(found))
    rows = [row for row in novels_chat.scores(tmp_path) if row["model"] == "sft"]
    assert [(row["metric"], row["value"]) for row in rows] == [("acc", 0.25), ("perplexity", 1234.5)]
    assert cells({"sft": rows[1]}, percent=False) == "– | 1,234 ± 68 | – | –"


def test_items_in_the_training_text_and_those_that_were_cut_are_told_with_the_scores_without(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import novels_chat

    without = {"piqa": {"acc": {"value": 0.4, "stderr": 0.1}}, "boolq": {"acc": {"value": 0.5, "stderr": 0.1}}}
    found = {
        "piqa": {"found": [3, 5], "common": [7], "too_short": 2},
        "boolq": {"found": [], "common": [], "too_short": 0},
    }
    looked = {task: {"items": 10, "without": without[task], **entry} for task, entry in found.items()}
    results = {
        "context": 256,
        "tasks": {
            "piqa": {"metrics": {"acc": {"value": 0.6, "stderr": 0.1}}, "items": 10, "longer": 0},
            "boolq": {"metrics": {"acc": {"value": 0.5, "stderr": 0.1}}, "items": 10, "longer": 4},
        },
        "contamination": {"texts": 1234, "tasks": looked},
    }
    for model in ("base", "sft", "dpo"):
        (tmp_path / f"evaluate-{model}").mkdir()
        (tmp_path / f"evaluate-{model}" / "results.json").write_text(json.dumps(results))
    whole = {"piqa": {"items": 18, "found": 3}, "boolq": {"items": 30, "found": 1}}
    novels = {"summary": {"documents_in": 77, "benchmarks": whole}}
    (tmp_path / "decontaminate").mkdir()
    (tmp_path / "decontaminate" / "manifest.json").write_text(json.dumps(novels))
    before, base, piqa, boolq, *_ = novels_chat.contamination(tmp_path)
    assert (before["ours"], before["unit"]) == (4, "of 48 items, all of each task, in 77 documents of novels")
    assert (base["ours"], base["unit"]) == (3, "of 20 items that were asked, in 1234 texts")
    assert (piqa["ours"], piqa["too_short"], piqa["scores_without"]) == (3, 2, without["piqa"])
    assert (piqa["unit"], piqa["too_short_of"]) == ("of 10 items", 18), "asked, and all there are"
    assert (boolq["ours"], boolq["longer_than_context"]) == (0, 4) and "scores_without" not in boolq
    shown = capsys.readouterr().out
    assert (
        "base: 3 of 20 items stand in the 1,234 texts" in shown and "piqa acc 0.6000; without 3 items 0.4000" in shown
    )
    assert "too short to be looked for, asked or not: 2 of piqa's 18\n" in shown
    assert "longer than 256 tokens: 4 of boolq's 10\n" in shown


def test_one_answer_to_every_question_is_told_and_so_are_items_that_are_watched_and_evaluated(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import novels_chat

    no, yes = {"target_hash": "no"}, {"target_hash": "yes"}
    always = [no | {"acc": 1.0}, yes | {"acc": 0.0}, no | {"acc": 1.0}]
    often, never = [no | {"acc": 1.0}, yes | {"acc": 0.0}, no | {"acc": 0.0}], [no | {"acc": 0.0}]
    answers = {"base": (always, often), "sft": (often, never), "dpo": ([no | {"acc": 1.0}, yes | {"acc": 1.0}], often)}
    for model, of in answers.items():
        folder = tmp_path / f"evaluate-{model}" / "items"
        folder.mkdir(parents=True)
        for task, lines in zip(("boolq", "piqa"), of):
            (folder / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder.parent / "results.json").write_text(json.dumps({"tasks": {"boolq": {}, "piqa": {}}}))
    (found,) = novels_chat.same_answers(tmp_path)
    assert (found["name"], found["ours"], found["unit"]) == ("same answer, boolq, base", 3, "of 3 items")
    recipe = {"seed": 0, "evaluate": {"limit": 30}, "sft": {"watch": {"tasks": ["piqa"], "items": 40}}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    (tmp_path / "decontaminate").mkdir()
    counted = {"summary": {"benchmarks": {"piqa": {"items": 50}}}}
    (tmp_path / "decontaminate" / "manifest.json").write_text(json.dumps(counted))
    (both,) = novels_chat.among_both(tmp_path)
    assert 20 <= both["ours"] < 30 and both["unit"] == "of 40 items watched", "40 of 50 leave out 10 at most"


def test_scores_in_pretraining_are_a_table_of_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import novels_chat

    def look(step: int, bits: float, right: float) -> dict:
        tasks = {"hellaswag": {"acc": {"value": 0.1, "stderr": 0.1}, "acc_norm": {"value": right, "stderr": 0.03}}}
        return {"step": step, "evaluation": {"tasks": tasks, "bits_per_byte": {"en": bits}}}

    (tmp_path / "pretrain").mkdir()
    lines = [look(0, 3.5, 0.25), {"step": 1, "loss": 9.0}, look(100, 2.5, 0.3)]
    (tmp_path / "pretrain/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = {line["name"]: line["ours"] for line in novels_chat.in_the_loop(tmp_path)}
    assert told["bits per byte, en, step 100"] == 2.5 and told["hellaswag acc_norm in pretraining, step 0"] == 0.25
    shown = capsys.readouterr().out.splitlines()
    assert (
        shown[0] == "| step | bits per byte, en | hellaswag acc_norm |" and shown[-1] == "| 100 | 2.50 | 30.0 ± 3.0 |"
    )


def test_a_sweep_s_line_names_its_point(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import sweep_quickstart

    names = [f"{column}_{language}" for column in sweep_quickstart.COLUMNS for language in ("en", "fr")]
    score = {"metric": "acc", "value": 0.5, "stderr": 0.1, "chance": 0.25}
    sources = [[{"path": "pocket-world", "examples": 300}], ["pocket-world"]]
    told = [
        {"settings": {"sft.base_step": 9, "sft.sources": each, "sft.steps": 3}, "scores": dict.fromkeys(names, score)}
        for each in sources
    ]
    monkeypatch.setattr(sweep_quickstart, "sweep", lambda *_: told)
    monkeypatch.setattr(sys, "argv", ["sweep_quickstart.py"])
    sweep_quickstart.main()
    shown, _, told_too = capsys.readouterr().out.rpartition("\n{")
    results = json.loads("{" + told_too)["results"]
    assert results[0]["name"] == "base at step 9, 300 conversations, 3 steps: pocket_facts_en acc"
    assert results[6]["name"].startswith("base at step 9, all conversations") and results[0]["ratio"] == 2
    assert shown.count("50.0 ± 10.0") == 12
