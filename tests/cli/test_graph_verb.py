"""`affinage graph`: what a model costs, and how its learning rate goes."""

import json
from pathlib import Path

import pytest


def test_it_prints_what_a_model_costs(affinage):
    shown = affinage("graph", "quickstart")[1]
    told = json.loads(affinage("graph", "quickstart", "--json")[1])
    total, memory, parameters = told["nodes"][-1], told["memory"], told["parameters"]
    assert total["parameters"] == parameters["total"] == parameters["active"] == 1_426_304 and told["batch"] == 8
    assert total["training_flops"] < total["training_flops_all_pairs"]
    for words in ("transformer_block", "1,426,304", f"embedding {parameters['embedding']:,}", "dots "):
        assert words in shown
    assert memory["decoding_cache_bytes"] > 0 and min(memory["activation_bytes"].values()) > 0


def test_of_a_model_of_images_nothing_is_said_of_tokens(affinage):
    recipe = str(Path(__file__).parents[2] / "examples" / "byol" / "byol-digits.yaml")
    shown = affinage("graph", recipe)[1]
    assert "batch: 256" in shown and "context" not in shown and "cache" not in shown
    told = json.loads(affinage("graph", recipe, "--json")[1])
    training = {row["name"]: row["training_flops"] / row["flops"] for row in told["nodes"] if row["flops"]}
    assert training["target"] == 1 and training["projector"] == 3 and told["context"] is None


def test_it_draws_the_learning_rates(affinage):
    words = ["graph", "gpt2-124m", "--schedule", "--set", "pretrain.steps=1000"]
    words += ["--set", "pretrain.schedule={name: cosine, peak_lr: 1.0e-3, min_lr: 1.0e-4, warmup_steps: 100}"]
    rates = json.loads(affinage(*words, "--json")[1])["pretrain"]
    by_step = {row["step"]: row["learning_rate"] for row in rates}
    # The last step of the warm-up and the last of all are among those that are shown.
    assert by_step[99] == pytest.approx(1e-3) and by_step[999] == pytest.approx(1e-4, rel=1e-2)
    drawn = affinage(*words)[1]
    bars = {int(line.split()[0].replace(",", "")): line.count("█") for line in drawn.splitlines()[3:]}
    assert bars.keys() == by_step.keys() and max(bars.values()) == bars[99] == 48
    assert all(bars[step] == round(48 * rate / 1e-3) for step, rate in by_step.items())
