"""Tasks that cannot be scored here are refused by name before anything is computed; ROUGE is computed."""

import json

import numpy as np
import pytest
from lm_eval.tasks import TaskManager
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.scoring import BootstrapAggregator

from affinage.errors import UserError
from affinage.evaluation import metric_library
from affinage.evaluation.harness import tamed_harness
from affinage.evaluation.item_files import DEFINITIONS
from affinage.evaluation.run import evaluate
from affinage.evaluation.scorable import cannot_be_read, refuse_unscorable
from tiny_models import tiny_llama

FOLDERS = (
    "french_bench",
    "squadv2",
    "humaneval",
    "polemo2",
    "kobest",
    "gsm8k",
    "meqsum",
    "tinyBenchmarks",
    "darija_bench",
)
TEXTS = ["le chat dort sur le pont", "un pont", "Paris est la capitale de la France.", "rien"]
REFERENCES = ["le chat dort", "Un pont, vieux", "La capitale ? Paris.", "tout"]


@pytest.fixture(scope="module")
def manager() -> TaskManager:
    with tamed_harness():
        return TaskManager(include_path=[str(DEFINITIONS / name) for name in FOLDERS], include_defaults=False)


def refused(tasks: list[str], manager: TaskManager) -> str:
    with tamed_harness(), pytest.raises(UserError, match="programs that the library `evaluate` fetches") as caught:
        refuse_unscorable(tasks, manager)
    return caught.value.what.partition(":")[0]


@pytest.mark.parametrize(
    "task",
    [
        "humaneval",  # on import
        "meqsum",  # on import, which its module tells in an error of its own
        "squadv2",  # in a function of a program
        "transliteration_ar_dr",  # in a function that takes `["f1"]` of what comes
    ],
)
def test_a_task_that_fetches_a_metric_is_named(task, manager):
    assert refused([task], manager) == task


@pytest.mark.parametrize(
    "task", ["french_bench_trivia", "french_bench_extra", "polemo2_in", "french_bench_fquadv2", "kobest_boolq", "gsm8k"]
)
def test_one_whose_metrics_are_here_is_let_through(task, manager):
    with tamed_harness():
        refuse_unscorable([task], manager)


def test_of_several_those_that_cannot_be_scored_are_named(manager):
    assert refused(["french_bench_extra", "squadv2", "gsm8k", "humaneval"], manager) == "squadv2, humaneval"


def test_a_metric_that_nobody_has_is_told_of_a_task_file(manager):
    task = {"task": "mine", "output_type": "generate_until", "metric_list": [{"metric": "no_such"}]}
    assert refused([task], manager) == "mine"


def test_a_model_is_not_asked_where_its_answers_cannot_be_scored(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"text": "Où ?", "summary": "Là."}\n')
    (tmp_path / "mine.yaml").write_text(
        "{task: mine, dataset_path: json, dataset_kwargs: {data_files: {test: mine.jsonl}}, test_split: test, "
        "output_type: generate_until, doc_to_text: '{{text}}', doc_to_target: '{{summary}}', "
        "metric_list: [{metric: bertscore, aggregation: mean, higher_is_better: true}]}"
    )
    with pytest.raises(UserError, match="mine: scored by programs"):
        evaluate(tiny_llama(), [str(tmp_path / "mine.yaml")])


def test_a_package_that_is_missing_is_named_with_what_to_do(manager):
    with tamed_harness(), pytest.raises(UserError, match=r"tinyArc.* cannot be read: .*tinyBenchmarks.*pip install"):
        refuse_unscorable(["tinyArc"], manager)
    told = str(cannot_be_read(["scrolls_quality"], ModuleNotFoundError("No module", name="datasets.of.old")))
    assert "the installed `datasets` has no `datasets.of.old`" in told
    told = str(cannot_be_read(["mine"], ModuleNotFoundError("No module named 'no_such'", name="no_such.part")))
    assert "mine cannot be read: the package `no_such` is not installed" in told and "pip install no_such" in told


def test_rouge_is_that_of_the_package():
    metric = metric_library.load("rouge")
    one = metric.compute(predictions=TEXTS[:1], references=REFERENCES[:1])
    assert one["rouge1"] == pytest.approx(2 * 3 / (3 + 6)) and set(one) == {"rouge1", "rouge2", "rougeL", "rougeLsum"}
    scorer = RougeScorer([*one])
    scores = [scorer.score(*pair) for pair in zip(REFERENCES, TEXTS, strict=True)]
    parts = metric.compute(predictions=TEXTS, references=REFERENCES, use_aggregator=False)
    assert parts == {kind: [score[kind].fmeasure for score in scores] for kind in one}
    best = metric.compute(predictions=TEXTS[:1], references=[REFERENCES[:2]])
    assert best == one
    # Together as `evaluate` does: with numpy's seed, here that of the harness, which is as it was afterwards.
    np.random.seed(1234)
    together = metric_library.load("rouge").compute(predictions=tuple(TEXTS), references=tuple(REFERENCES))
    drawn = np.random.random()
    np.random.seed(1234)
    assert drawn == np.random.random()
    np.random.seed(1234)
    expected = BootstrapAggregator()
    for score in scores:
        expected.add_scores(score)
    assert together == {kind: found.mid.fmeasure for kind, found in expected.aggregate().items()}


def test_classes_are_scored_as_scikit_learn_scores_them():
    told = {"predictions": ["0", 1, 2, 2], "references": [0, 1, 1, 2]}
    assert metric_library.load("accuracy").compute(**told) == {"accuracy": 0.75}
    assert metric_library.load("f1").compute(**told, average="micro") == {"f1": 0.75}
    assert metric_library.load("f1").compute(**told, average=None)["f1"].tolist() == pytest.approx([1, 2 / 3, 2 / 3])


def test_french_bench_is_scored_by_rouge_end_to_end(tmp_path):
    model, tasks = tiny_llama(), ["french_bench_orangesum_title", "french_bench_orangesum_abstract"]
    texts = ["Paris est la capitale.", "La monnaie du Japon est le yen."]

    def scored(summaries: list[str]) -> dict:
        for task in tasks:
            items = [{"text": text, "summary": summary} for text, summary in zip(texts, summaries, strict=True)]
            (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        return evaluate(model, tasks, data_dir=tmp_path, max_new_tokens=8)

    first = scored(["Paris", "Le yen"])
    said = [item["answer"] for item in first["samples"][tasks[0]]]
    assert len(said) == 2 and not any(first["tasks"][task]["chat_template"] for task in tasks)
    again = scored([said[0], "zzz"])  # of one article the title is now what the model says
    assert RougeScorer(["rouge1"]).score(said[0], said[0])["rouge1"].fmeasure == 1
    assert again["tasks"][tasks[0]]["metrics"]["rouge1"]["value"] == pytest.approx(0.5)
