"""Fine-tuning of which only sources and steps are said is as for Julian."""

import pytest

from affinage.config.load import load_recipe
from affinage.config.recipe import Recipe
from affinage.config.tuning import SftSettings
from affinage.planning.plan import training_settings

LEAST = {"sources": ["chats.jsonl"], "steps": 20}


def test_what_is_not_said_is_as_in_julians_recipe():
    given, published = SftSettings.model_validate(LEAST | {"steps": 30_000}), load_recipe("julian-sft").recipe
    for name in ("batch_size", "schedule", "system_prompt", "num_epochs"):
        assert getattr(given, name) == getattr(published.sft, name), name
    moments = {"state_dtype": "bfloat16"}  # what a v4's memory asks for
    assert given.optimizer.model_copy(update=moments) == published.sft.optimizer
    shorter = {"name": "chat", "model": published.model, "sft": LEAST, "packing": {"seq_len": 512}}
    assert training_settings(Recipe.model_validate(shorter))[::2] == ("sft", 512), "as in pretraining"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, (32, 2, 2e-5, 0.01)),
        ({"optimizer": {"b2": 0.98}, "schedule": {"peak_lr": 1e-3, "min_lr": 0}}, (32, 0, 1e-3, 0.01)),
        ({"per_device_batch_size": 4}, (None, 2, 2e-5, 0.01)),
        ({"batch_size": 8, "steps": 20_000}, (8, 1000, 2e-5, 0.01)),
    ],
)
def test_what_is_said_counts_and_short_runs_warm_up_for_a_tenth(told: dict, expected: tuple):
    settings = SftSettings.model_validate(LEAST | told)
    schedule, decay = settings.schedule, settings.optimizer.weight_decay
    assert (settings.batch_size, schedule.warmup(settings.steps), schedule.peak_lr, decay) == expected
    assert SftSettings.model_validate_json(settings.model_dump_json()) == settings
