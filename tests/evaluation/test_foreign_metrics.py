"""Tasks that the harness cannot score without programs of others are refused before anything is computed."""

import pytest
from lm_eval.tasks import TaskManager

from affinage.errors import UserError
from affinage.evaluation.foreign_metrics import refuse_foreign_metrics
from affinage.evaluation.harness import tamed_harness
from affinage.evaluation.item_files import DEFINITIONS
from affinage.evaluation.run import evaluate
from tiny_models import tiny_llama

FOLDERS = ("french_bench", "squadv2", "humaneval", "polemo2", "kobest", "gsm8k")


@pytest.fixture(scope="module")
def manager() -> TaskManager:
    with tamed_harness():
        return TaskManager(include_path=[str(DEFINITIONS / name) for name in FOLDERS], include_defaults=False)


def refused(tasks: list[str], manager: TaskManager) -> str:
    with tamed_harness(), pytest.raises(UserError, match="programs that the library `evaluate` fetches") as caught:
        refuse_foreign_metrics(tasks, manager)
    return caught.value.what.partition(":")[0]


@pytest.mark.parametrize(
    "task",
    [
        "french_bench_trivia",  # its aggregation
        "french_bench_orangesum_abstract",
        "polemo2_in",  # `hf_evaluate: true`
        "humaneval",  # on import
        "squadv2",  # in a function of a program
    ],
)
def test_a_task_that_fetches_a_metric_is_named(task, manager):
    assert refused([task], manager) == task


@pytest.mark.parametrize("task", ["french_bench_fquadv2", "french_bench_vocab", "kobest_boolq", "gsm8k"])
def test_one_that_does_not_is_let_through_whatever_else_its_module_has(task, manager):
    with tamed_harness():
        refuse_foreign_metrics([task], manager)


def test_of_a_tag_those_that_do_are_named(manager):
    named = refused(["french_bench_extra"], manager).split(", ")
    assert "french_bench_orangesum_title" in named and "french_bench_boolqa" not in named


def test_a_metric_that_nobody_has_is_told_of_a_task_file(manager):
    task = {"task": "mine", "output_type": "generate_until", "metric_list": [{"metric": "no_such"}]}
    assert refused([task], manager) == "mine"


def test_a_model_is_not_asked_and_no_item_is_fetched():
    with pytest.raises(UserError, match="french_bench_trivia: scored by programs"):
        evaluate(tiny_llama(), ["french_bench_trivia"])
