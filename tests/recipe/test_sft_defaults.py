"""Fine-tuning of which only sources and steps are said is as for Julian."""

import pytest

from affinage.planning.plan import training_settings
from affinage.recipe.load import load_recipe
from affinage.recipe.recipe import Recipe
from affinage.recipe.tuning import DpoSettings, SftSettings, TuningSettings


def test_what_is_not_said_is_as_in_julian_s_recipe():
    given = SftSettings.model_validate({"sources": ["chats.jsonl"], "steps": 30_000})
    published = load_recipe("julian-sft").recipe.sft
    assert published is not None
    for name in ("batch", "schedule", "system_prompt", "max_epochs"):
        assert getattr(given, name) == getattr(published, name), name
    moments = {"moments": "bfloat16"}  # what a v4's memory asks for
    assert given.optimizer.model_copy(update=moments) == published.optimizer


def test_rows_are_of_2048_tokens_where_nobody_says_otherwise():
    model = load_recipe("julian-sft").recipe.model
    words = {"name": "chat", "model": model, "sft": {"sources": ["chats.jsonl"], "steps": 20}}
    recipe = Recipe.model_validate(words)
    assert training_settings(recipe)[::2] == ("sft", 2048)
    shorter = Recipe.model_validate(words | {"rows": {"context": 512}})
    assert training_settings(shorter)[2] == 512, "as in pretraining"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, (32, 2, 2e-5, 0.01)),
        ({"optimizer": {"b2": 0.98}, "schedule": {"peak": 1e-3, "floor": 0}}, (32, 0, 1e-3, 0.01)),
        ({"batch_per_device": 4, "optimizer": {"weight_decay": 0.2}}, (None, 2, 2e-5, 0.2)),
        ({"batch": 8, "steps": 20_000}, (8, 1000, 2e-5, 0.01)),
        ({"steps": 2e1}, (32, 2, 2e-5, 0.01)),
    ],
)
def test_what_is_said_counts_and_short_runs_warm_up_for_a_tenth(told: dict, expected: tuple):
    settings = SftSettings.model_validate({"sources": ["chats.jsonl"], "steps": 20} | told)
    schedule = settings.schedule
    found = (settings.batch, schedule.warmup(settings.steps), schedule.peak, settings.optimizer.weight_decay)
    assert found == expected
    assert SftSettings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize("kind", [SftSettings, DpoSettings])
def test_one_epoch_is_the_most_and_two_benchmarks_are_watched_if_asked(kind: type[TuningSettings]):
    words = {"sources": ["chats.jsonl"], "steps": 20, "batch": 8, "schedule": {"peak": 1e-6, "floor": 0}}
    settings, watched = kind.model_validate(words), kind.model_validate(words | {"watch": {}})
    assert settings.max_epochs == 1 and settings.watch is None and watched.watch is not None
    assert watched.watch.tasks == ("winogrande", "arc_challenge")
    assert (watched.watch.every_steps, watched.watch.items, watched.watch.when_worse) == (1000, 200, "stop")
    assert kind.model_validate(words | {"max_epochs": None}).max_epochs is None
