"""What `evaluate` reports and writes, and what two models' results say of their difference."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from scipy import stats

from affinage.data.decontaminate import Contamination
from affinage.evaluation.harness import cached
from affinage.evaluation.results import RESULTS, compare, contamination_of, fingerprint, read_answers, write_results
from affinage.evaluation.run import JaxLM, evaluate
from affinage.results import read_json, read_json_lines
from benchmark_fixtures import write_items
from choice_task import sums, write_task
from run_affinage import refused
from source_forms import write_lines
from tiny_models import tiny_llama

ITEMS = [{"question": f"{n} plus {n} is", "choices": ["one", "two", "three"], "right": n % 3} for n in range(7)]
FIRST = {"function": "take_first"}
CHAT = {"output_type": "generate_until", "doc_to_choice": None, "doc_to_target": "{{choices[right]}}"} | {
    "generation_kwargs": {"until": ["<|im_end|>"], "do_sample": False, "max_gen_toks": 4},
    "metric_list": [{"metric": "exact_match"}],
    "filter_list": [
        {"name": "whole", "filter": [FIRST]}, {"name": "lower", "filter": [{"function": "lowercase"}, FIRST]},
    ],
}  # fmt: skip


@pytest.fixture
def world(tmp_path):
    folder = tmp_path / "tasks"
    write_task(folder, "sums", ITEMS, metadata={"version": 3.0})
    write_task(folder, "answers", ITEMS, **CHAT)
    return tmp_path


def lines_of(folder: Path, task: str) -> list[dict]:
    return list(read_json_lines(folder / "items" / f"{task}.jsonl"))


def test_a_base_model_is_not_asked_to_chat_and_items_longer_than_the_context_are_counted(world, tmp_path, capfd):
    write_lines(world / "tasks/items.jsonl", [*ITEMS[:6], ITEMS[6] | {"question": "seven plus " * 60}])
    results = evaluate(tiny_llama(), ["pocket-world"], world=world, folder=tmp_path / "out")
    assert results["skipped"] == ["answers"] and read_json(tmp_path / "out" / RESULTS) == results
    sums = results["tasks"]["sums"]
    facts = {"items": 7, "truncated": 1, "version": 3.0, "num_fewshot": 0, "chance": pytest.approx(1 / 3)}
    assert {name: sums[name] for name in facts} == facts
    p = sums["metrics"]["acc"]["value"]
    assert sums["metrics"]["acc"]["stderr"] == pytest.approx((p * (1 - p) / 6) ** 0.5)
    lines = lines_of(tmp_path / "out", "sums")
    assert [line["id"] for line in lines] == list(range(7))
    assert sum(line["acc"] for line in lines) / 7 == pytest.approx(p)
    assert results["samples"]["sums"][0]["choices"] == [" one", " two", " three"]
    write_lines(world / "tasks/items.jsonl", [*ITEMS[:2], ITEMS[2] | {"choices": ["one", "two " * 60, "three"]}])
    mistake = refused(evaluate, tiny_llama(), ["pocket-world"], world=world)
    assert (mistake.where, "item 3" in mistake.what, "out sums" in mistake.fix) == ("sums", True, True)
    assert capfd.readouterr() == ("", ""), "the harness is to be silent"


def test_a_chat_model_also_answers_and_how_its_answers_end_is_counted(world, tmp_path):
    told, kept, model = [], tmp_path / "answers.db", replace(tiny_llama(), chat=True)
    asked = {"world": world, "limit": 4, "keep": kept, "folder": tmp_path}
    results = evaluate(model, ["pocket-world"], **asked, progress=told.append)
    assert set(results["tasks"]) == {"sums", "answers"} and results["tasks"]["answers"]["items"] == 4
    sample = results["samples"]["answers"][0]
    assert sample["prompt"].startswith("<s><|im_start|>user\n0 plus 0 is<|im_end|>") and sample["target"] == "one"
    assert isinstance(sample["answer"], str) and results["items_per_second"] > 0
    assert "scored 12 of 12 continuations" in told
    assert [line for line in told if "texts" in line] == [f"generated {n} of 4 texts" for n in (1, 2, 3, 4)]
    lines = lines_of(tmp_path, "answers")
    assert [(line["id"], line["filter"]) for line in lines] == [(n, f) for f in ("whole", "lower") for n in range(4)]
    assert set(results["tasks"]["answers"]["metrics"]) == {"exact_match,whole", "exact_match,lower"}
    again = evaluate(model, ["pocket-world"], **asked)
    assert again["requests"] == 0 and again["items_per_second"] is None and again["tasks"] == results["tasks"]
    assert len({line["prompt_hash"] for line in lines}) == 4 and len({line["target_hash"] for line in lines}) == 3


def test_core_is_the_mean_over_its_tasks_of_scores_centered_on_chance(tmp_path):
    metrics = {"winogrande": "acc", "piqa": "acc_norm", "arc_challenge": "acc_norm"}
    for name, text in (("winogrande", "sentence"), ("piqa", "goal"), ("arc_challenge", "question")):
        row = json.loads((write_items(tmp_path, [name]) / f"{name}.jsonl").read_text())
        rows = [json.dumps(row | {text: f"{number}. {row[text]}"}) for number in range(12)]  # ten of them are examples
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    tasks = (results := evaluate(tiny_llama(), ["core"], data_dir=tmp_path, limit=6))["tasks"]
    scores = [(tasks[name]["metrics"][metric]["value"], tasks[name]["chance"]) for name, metric in metrics.items()]
    centered = [(score - chance) / (1 - chance) for score, chance in scores]
    assert results["core"] == {"centered_mean": pytest.approx(sum(centered) / 3), "tasks": 3}
    assert {name: tasks[name]["num_fewshot"] for name in metrics} == {"winogrande": 0, "piqa": 10, "arc_challenge": 10}


def test_items_are_drawn_by_a_seed(world, tmp_path):
    def drawn(name, **settings):
        evaluate(tiny_llama(), ["pocket-world"], world=world, folder=tmp_path / name, **settings)
        return lines_of(tmp_path / name, "sums")

    every = {line["hash"]: line["id"] for line in drawn("every")}
    some = {seed: drawn(f"by {seed}", limit=4, sample_seed=seed) for seed in (0, 1)}
    assert all([every[line["hash"]] for line in lines] == [line["id"] for line in lines] for lines in some.values())
    assert all(len({line["id"] for line in lines}) == 4 for lines in some.values())
    assert [line["id"] for line in some[0]] != [line["id"] for line in some[1]]
    assert drawn("again", limit=4, sample_seed=0) == some[0]


def test_a_benchmark_can_be_asked_in_the_chat_template_and_is_then_another_question(tmp_path):
    write_items(tmp_path / "items", ["piqa"], copies=2)

    def asked(model, name, **how):
        results = evaluate(model, ["piqa"], data_dir=tmp_path / "items", folder=tmp_path / name, **how)
        return results["samples"]["piqa"][0]["prompt"], results["tasks"]["piqa"]["chat_template"]

    model = replace(tiny_llama(), chat=True)
    plain, told = asked(model, "auto")
    assert "<|im_start|>" not in plain and not told
    templated = f"<s><|im_start|>user\n{plain}<|im_end|>\n<|im_start|>assistant\n"
    assert asked(model, "always", apply_chat_template=True) == (templated, True)
    without, within = (read_answers(tmp_path / name) for name in ("auto", "always"))
    assert {each.task for each in compare(without, within) if each.asked_otherwise} == {"piqa"}
    mistake = refused(asked, tiny_llama(), "base", apply_chat_template=True)
    assert mistake.where == "evaluate.apply_chat_template" and mistake.fix


@pytest.mark.parametrize(("said", "asked", "shots"), [(None, 2, 2), (2, 0, 0)])
def test_as_many_examples_come_before_a_question_as_the_task_says_or_as_are_asked_for(tmp_path, said, asked, shots):
    task = write_task(tmp_path / "task", "sums", ITEMS, fewshot_split="test", num_fewshot=said)
    results = evaluate(tiny_llama(), [str(task)], num_fewshot=asked, limit=2)
    assert results["tasks"]["sums"]["num_fewshot"] == shots
    assert results["samples"]["sums"][0]["prompt"].count(" plus ") == shots + 1


# ---- a kill in the middle


def texts(lm):
    asked, told = ("two", "three", "twenty", "four hundred", "five"), {"do_sample": False, "max_gen_toks": 90}
    return lm.generate_until([Instance("generate_until", {}, (f"{word} plus seven is", told), 0) for word in asked])


def test_a_stop_in_the_middle_keeps_what_was_answered(tmp_path):
    def stops(line):
        if line.startswith("generated 4 "):
            raise KeyboardInterrupt

    first, lm = JaxLM(tiny_llama(), batch=2, progress=stops), JaxLM(tiny_llama(), batch=2)
    with pytest.raises(KeyboardInterrupt), cached(first, tmp_path / "a", "tiny") as caching:
        texts(caching)
    with cached(lm, tmp_path / "a", "tiny") as again:
        assert texts(again) == texts(JaxLM(tiny_llama())) and lm.requests <= 2  # four were answered, in batches of two


# ---- a folder of results is of one model


ENDS = {"output_type": "loglikelihood", "doc_to_choice": None, "doc_to_target": "two"}
ENDS |= {"metric_list": [{"metric": "perplexity"}, {"metric": "acc"}]}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    return [str(write_task(folder, name, sums(5), **told)) for name, told in (("sums", {}), ("ends", ENDS))]


def items(folder):
    return sorted(file.stem for file in (folder / "items").iterdir())


def test_the_same_model_adds_and_another_begins_anew(tasks, tmp_path):
    folder = tmp_path / "judged"
    first, second = (evaluate(tiny_llama(), [task], folder=folder) for task in tasks)
    assert set(second["tasks"]) == {"ends"} and items(folder) == ["ends", "sums"]
    kept = read_json(folder / RESULTS)
    assert kept["tasks"] == first["tasks"] | second["tasks"] and kept["samples"] == first["samples"] | second["samples"]
    # Of what the harness calls perplexity an item has the log-likelihood.
    lines = lines_of(folder, "ends")
    assert all(line["log_likelihood"] < 0 and line["filter"] == "none" and "perplexity" not in line for line in lines)
    mean = sum(line["log_likelihood"] for line in lines) / len(lines)
    assert second["tasks"]["ends"]["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(-mean))
    other = evaluate(tiny_llama(seed=1), tasks[:1], folder=folder)
    assert other["fingerprint"] != first["fingerprint"] == second["fingerprint"]
    assert items(folder) == ["sums"] and read_json(folder / RESULTS) == other


def test_searches_are_kept_together_and_items_that_a_kill_left_without_their_results_go(tmp_path):
    def write(task):
        found = {"fingerprint": "of a", "tasks": {task: {"items": 0}}, "samples": {task: []}}
        write_results(found | {"contamination": {"texts": 7, "tasks": {task: {"found": []}}}}, {task: []}, tmp_path)
        return read_json(tmp_path / RESULTS)

    assert set([write(task) for task in "aba"][-1]["contamination"]["tasks"]) == {"a", "b"}
    (tmp_path / RESULTS).unlink()
    assert set(write("c")["tasks"]) == {"c"} and items(tmp_path) == ["c"]


def test_a_model_that_reads_or_is_told_otherwise_is_another():
    model = tiny_llama()
    told, trained = replace(model, system_prompt="Be brief."), tiny_llama(seed=1)
    assert fingerprint(model) == fingerprint(replace(model, name="b"))
    assert len({fingerprint(model), fingerprint(trained), fingerprint(told)}) == 3


# ---- scores with and without the items that a model has seen


def test_scores_without_the_items_found_are_those_of_the_others(tmp_path: Path):
    task, asked = write_task(tmp_path, "quiz", sums(9)), []

    def seen(items) -> Contamination:  # type: ignore[no-untyped-def]
        asked.extend(item.id for item in items)
        found = frozenset({("quiz", "1"), ("quiz", "2"), ("quiz", "8")})
        return Contamination(frozenset({"quiz"}), 5, found, frozenset({("quiz", "5")}))

    results = evaluate(tiny_llama(), [str(task)], folder=tmp_path / "out", seen=seen, limit=8)
    assert asked == [str(n) for n in range(9)]
    told = results["contamination"]["tasks"]["quiz"]
    assert told["found"] == [1, 2] and told["items"] == 8, "the item 8 was not asked"
    assert told["common"] == [5]
    rest = [line["acc"] for line in lines_of(tmp_path / "out", "quiz") if line["id"] not in (1, 2, 5)]
    assert told["without"]["acc"]["value"] == pytest.approx(sum(rest) / 5)


JUDGED = [
    {"doc_id": n, "filter": f, "acc": 1.0 * (n != 1), "perplexity": log, "bleu": n, "exact_match": n * (f == "lower")}
    for f in ("none", "lower")
    for n, log in enumerate([-1.5, -4.0, -2.5, -3.5])
]


@pytest.mark.parametrize(("found", "metric", "value", "rest"), [
    ("1", "acc", 0.75, (1.0, 0.0)), ("0123", "acc", 0.75, (None, None)),
    ("1", "bleu", 1.6, None), ("1", "perplexity", 17.7, None),  # are not told by single items
    ("0", "exact_match,none", 0.0, (0.0, 0.0)), ("0", "exact_match,lower", 1.5, (2.0, 1 / 3**0.5)),
])  # fmt: skip
def test_a_score_without_the_items_found_is_of_the_others(found: str, metric: str, value: float, rest: tuple | None):
    seen = Contamination(frozenset({"quiz"}), 1, frozenset(("quiz", one) for one in found))
    metrics, items = {metric: {"value": value, "stderr": 0.5}}, JUDGED if "," in metric else JUDGED[:4]
    told = contamination_of(seen, {"quiz": {"metrics": metrics}}, {"quiz": items})["tasks"]["quiz"]
    assert told["items"] == 4
    left = told["without"].get(metric)
    assert left == rest if rest is None else (left["value"], left["stderr"]) == pytest.approx(rest)


# ---- paired differences: items are found again by their hash, intervals are scipy's


def written(folder, task, *rows):
    """A folder of results with one task, whose items have these lines."""
    write_lines(folder / "items" / f"{task}.jsonl", rows)
    return read_answers(folder)


def write_scored(folder, task, rows):
    return written(folder, task, *({"hash": key, "acc": value} for key, value in rows))


def test_differences_are_paired_over_the_items_that_both_have(tmp_path):
    random = np.random.default_rng(0)
    a, b = random.integers(0, 2, 200), random.integers(0, 2, 200)
    keys = [f"h{n}" for n in range(200)]
    one = write_scored(tmp_path / "a", "piqa", [*zip(keys, a.tolist()), ("only a", 1)])
    order = random.permutation(200)
    (found,) = compare(one, write_scored(tmp_path / "b", "piqa", [(keys[n], int(b[n])) for n in order]))
    assert (found.items, found.unmatched) == (200, 1)
    test = stats.ttest_rel(b, a)
    assert found.difference == pytest.approx((b - a).mean()) and found.b - found.a == pytest.approx(found.difference)
    assert found.difference / found.stderr == pytest.approx(test.statistic)
    assert (found.low, found.high) == pytest.approx(tuple(test.confidence_interval(0.95)), abs=1e-6)
    better, worse = int(((b - a) > 0).sum()), int(((b - a) < 0).sum())
    assert found.p == pytest.approx(stats.binomtest(better, better + worse).pvalue)  # McNemar's exact test


def test_a_few_items_prove_little_and_identical_answers_differ_in_nothing(tmp_path):
    wrong, right = (write_scored(tmp_path / str(acc), "t", [("0", acc), ("1", acc)]) for acc in (0, 1))
    (found,) = compare(wrong, right)
    assert found.difference == 1 and found.p == pytest.approx(0.5) and not found.is_real
    (same,) = compare(right, right)
    assert same.difference == same.stderr == 0 and not same.is_real


def test_answers_read_by_two_filters_are_two_scores_of_the_same_items(tmp_path):
    def of(name, **right):
        scored = ((n, kind, value) for kind, values in right.items() for n, value in enumerate(values))
        rows = ({"hash": f"{n}", "filter": kind, "exact_match": value} for n, kind, value in scored)
        return written(tmp_path / name, "gsm8k", *rows)

    found = compare(of("a", strict=(0, 0, 1), flexible=(1, 1, 1)), of("b", strict=(1, 0, 1), flexible=(1, 1, 1)))
    differences = {each.metric: (each.items, each.difference) for each in found}
    assert differences == {"exact_match,strict": (3, pytest.approx(1 / 3)), "exact_match,flexible": (3, 0)}


def test_tasks_that_were_not_asked_alike_are_named(tmp_path):
    def of(folder, task, prompts, answer="t"):
        rows = [{"hash": str(n), "prompt_hash": p, "target_hash": answer, "acc": 1} for n, p in enumerate(prompts)]
        return written(tmp_path / folder, task, *rows)

    def asked_otherwise(other):
        return [(each.task, each.asked_otherwise) for each in compare(zero, other)]

    zero = of("zero", "boolq", ["a", "b", "c"])
    assert asked_otherwise(zero) == [("boolq", 0)]
    assert asked_otherwise(of("few", "boolq", ["a", "more b", "more c"])) == [("boolq", 2)]
    assert asked_otherwise(of("mended", "boolq", ["a", "b", "c"], answer="u")) == [("boolq", 3)]


def test_what_cannot_be_compared_is_refused(tmp_path):
    one, two = write_scored(tmp_path / "a", "t", [("x", 0)]), write_scored(tmp_path / "b", "u", [("x", 0)])
    unscored = written(tmp_path / "c", "t", *({"hash": str(n), "filter": "none", "bleu": None} for n in range(3)))
    for wrong in (lambda: compare(one, two), lambda: compare(unscored, unscored), lambda: read_answers(tmp_path / "d")):
        assert refused(wrong).fix
