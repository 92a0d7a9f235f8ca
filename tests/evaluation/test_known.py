"""Names of tasks are refused before anything large is imported, and none that the harness has is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from affinage.errors import UserError
from affinage.evaluation.known import harness_names
from affinage.evaluation.tasks import check_names

PROGRAM = """
import sys
from affinage.cli import main
try:
    main(sys.argv[1:])
finally:
    print(sorted({"jax", "lm_eval"} & set(sys.modules)))
"""


def test_every_name_of_the_harness_is_known():
    assert set(TaskManager().all_tasks) <= harness_names()


@pytest.mark.parametrize("name", ["mmlu", "gsm8k", "glue", "julian", "hellaswag"])
def test_groups_tags_and_tasks_are_let_through(name):
    check_names([name], {}, where="--tasks")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("hellaswagg", "Did you mean `hellaswag`? Or `"),
        ("JULIAN", "`julian`"),
        ("pocket_fact_en", "`pocket_facts_en`"),
        ("no such task", "Groups are julian, french, quickstart"),
    ],
)
def test_others_are_refused_with_the_nearest(name, fix):
    with pytest.raises(UserError, match="knows no task") as refused:
        check_names([name], {}, where="--tasks")
    assert fix in refused.value.fix and refused.value.where == "--tasks"


def test_a_model_is_not_looked_at_for_a_task_that_nobody_knows(tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{")
    words = [sys.executable, "-c", PROGRAM, "eval", "theirs", "--tasks", "nosuchtask"]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=os.environ, timeout=300)
    assert ended.returncode == 2 and "--tasks: lm-evaluation-harness knows no task 'nosuchtask'" in ended.stderr
    assert ended.stdout.strip() == "[]"


def test_what_an_evaluation_imports_is_not_torch(warm_python: list[str]):
    code = """
import sys
import affinage.evaluation.run
from affinage.evaluation.harness import tamed_harness
from lm_eval.api.registry import get_metric
with tamed_harness():
    assert get_metric("a/program", hf_evaluate_metric=True) is None
print(sorted({"torch", "transformers", "evaluate"} & set(sys.modules)))
"""
    ended = subprocess.run([*warm_python, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.stdout.splitlines()[-1:] == ["[]"], ended.stderr
