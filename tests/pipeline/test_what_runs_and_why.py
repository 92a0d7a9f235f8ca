"""What is complete is left alone, what runs again has a reason, and what cannot be is refused before the first step."""

import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import tiny_run
from affinage.checkpoint.remote import RemoteFolder
from affinage.config.data import DecontaminateSettings
from affinage.config.load import LoadedRecipe, load_recipe
from affinage.data.decontaminate import BenchmarkItem
from affinage.errors import TransientError, UserError, UserWarned
from affinage.pipeline.build import build_steps
from affinage.pipeline.runner import PipelineRunner, ProgressListener
from affinage.pipeline.step import Step, StepContext
from affinage.pipeline.steps_eval import contamination_search
from affinage.results import read_json
from choice_task import write_task
from run_affinage import refused, set_words
from source_forms import rows_of, write_lines

SETTINGS = ["name=small", "data.sources=[pocket-world, {path: texts, name: texts}]", "data.filters.min_characters=3"]
SETTINGS += ["sft.sources=[chat.jsonl]"]
ROAD = ["synthesize", "ingest", "filter", "dedup", "split", "train-tokenizer", "tokenize", "sft-data", "pretrain",
        "sft", "evaluate-base", "evaluate-sft", "export", "report"]  # fmt: skip


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a")
    (tmp_path / "chat.jsonl").write_text("{}")
    return lambda *overrides: load_recipe(tiny_run.RECIPE, [*SETTINGS, *overrides])


# ---- three stages that do almost nothing; the last reads the other two


def write_text(context: StepContext) -> dict:
    (context.folder / "text").write_text("+".join(sorted(context.inputs)) or "start")
    with open(context.run_folder.parent / "log", "a") as log:
        log.write(context.folder.name.split("-")[0] + " ")
    return {"files": 1}


ONE = Step("one", write_text, {"a": {"b": 1}})
TWO = Step("two", write_text, {"c": [1, 2]}, ("one",), sources={"my.txt": "print"})
THREE = Step("three", write_text, {}, ("one", "two"))


@pytest.fixture
def runner(load, tmp_path):
    def runner(*steps: Step, settings: tuple[str, ...] = (), **options) -> PipelineRunner:
        return PipelineRunner(load(*settings), tmp_path / "runs", steps or (ONE, TWO, THREE), **options)

    return runner


@pytest.fixture
def go(runner):
    """Runs steps: ({name: reason} before, those that ran)."""

    def go(*steps: Step, **options) -> tuple[dict[str, str], list[str]]:
        made = runner(*steps, **options)
        return {step.name: step.reason for step in made.plan()}, list(made.run(ProgressListener()))

    return go


def test_once_is_enough(go, tmp_path):
    names, run = ["one", "two", "three"], tmp_path / "runs/small"
    assert go() == (dict.fromkeys(names, "never ran"), names) and go() == (dict.fromkeys(names, "complete"), [])
    assert (tmp_path / "runs/log").read_text() == "one two three "
    assert (run / "three/text").read_text() == "one+two" and os.readlink(run / "one").startswith("../store/one-")
    assert '"min_characters": 3' in (run / "recipe.json").read_text()


def test_a_complete_run_whose_results_are_copied_needs_no_network(go, tmp_path, monkeypatch, capfd):
    go()

    def silent(*_: object) -> None:
        raise UserError("no network")

    def copy() -> str:
        assert go(settings=(f"runtime.remote=file://{tmp_path}/remote",))[1] == []
        return capfd.readouterr().out

    with monkeypatch.context() as without:
        without.setattr(RemoteFolder, "write", silent)
        assert isinstance(refused(copy, match="no network"), TransientError), "what starts runs starts it again"
    assert copy() == "" and len(list((tmp_path / "remote").glob("*/manifest.json"))) == 3
    for name in ("__init__", "read", "write"):
        monkeypatch.setattr(RemoteFolder, name, silent)
    assert copy() == ""


def test_reasons_and_what_was_made_from_a_former_result_is_no_part_of_the_run(go, runner, tmp_path):
    go()
    other, run = Step("one", write_text, {"a": {"b": 2}, "d": "new"}), tmp_path / "runs/small"
    reasons = [step.reason for step in runner(other, TWO, THREE).plan()]
    assert reasons == ["settings changed: a.b, d", "input changed: one", "input changed: one, two"]
    go(other, TWO, THREE, until=["one"])
    assert {entry.name for entry in run.iterdir() if entry.is_symlink()} == {"one"}
    assert go()[1] == [] and (run / "three/text").read_text() == "one+two", "the former results are still there"
    assert go(ONE, replace(TWO, sources={"my.txt": "other"}))[0]["two"] == "files changed: my.txt"
    assert go(replace(ONE, fn=fail_once))[1] == [], "the function itself is no part of the key"
    assert go(replace(ONE, version=2))[0]["one"] == "version changed"
    os.renames(run / "one/manifest.json", run / "one/checkpoints/40/commit_success.txt")
    assert "stopped at step 40" in runner(replace(ONE, version=3)).plan()[0].reason, "a training is not left in silence"


def test_damage_force_and_until(go, tmp_path):
    assert go(until=["two"])[1] == ["one", "two"] and go()[1] == ["three"]
    (tmp_path / "runs/small/two/text").write_text("not what it was")
    reasons, ran = go()
    assert reasons["two"].startswith("damaged: text has") and ran == ["two"]
    reasons, ran = go(force=["two"])
    assert (reasons["two"], reasons["three"], ran) == ("forced", "forced by two", ["two", "three"])
    refused(go, force=["too"], match="no step `too`")
    refused(go, until=["for"], match="`for`")


@pytest.mark.parametrize("then", [dict, lambda: {}["an array"]])  # also if a library fails, whose files are gone
def test_a_result_whose_folder_is_deleted_is_none(go, tmp_path, then):
    def deleted(context):
        shutil.rmtree(context.folder)
        (context.folder / "checkpoints").mkdir(parents=True)  # as a save does
        return then()

    refused(go, Step("train", deleted, {}, has_progress=True, resumable=True), match="deleted or moved")
    assert not list(tmp_path.glob("*/store/*/manifest.json"))


def fail_once(context: StepContext) -> dict:
    if (context.folder / "half").exists():
        return {"went_on": True}
    (context.folder / "half").write_text("x")
    raise KeyboardInterrupt


@pytest.mark.parametrize("resumable", [False, True])
def test_an_interrupted_training_resumes_and_any_other_step_begins_again(go, runner, tmp_path, resumable: bool):
    train, half = Step("train", fail_once, {}, resumable=resumable), tmp_path / "runs/small/train/half"
    with pytest.raises(KeyboardInterrupt):
        go(train)
    if not resumable:
        assert runner(train).plan()[0].reason == "not finished; starts again"
        with pytest.raises(KeyboardInterrupt):
            go(train)
        return
    assert go(train) == ({"train": "not finished; resumes"}, ["train"])
    assert read_json(half.with_name("result.json")) == {"went_on": True}
    half.write_text("longer than it was")
    reasons, ran = go(train)
    assert reasons["train"].startswith("damaged: half") and ran == ["train"]
    assert half.read_text() == "longer than it was", "it resumed from what was there"


def test_a_training_that_is_refused_before_its_first_step_leaves_the_run_as_it_was(go, tmp_path):
    def refuse(context: StepContext) -> dict:
        (context.folder / "metrics.jsonl").touch()
        raise UserError("this cannot be trained")

    train = Step("train", refuse, {}, resumable=True, has_progress=True)
    refused(go, train, match="cannot be trained")
    go(Step("train", write_text, {"a": 1}))
    before = os.readlink(tmp_path / "runs/small/train")
    refused(go, train, match="cannot be trained")
    assert os.readlink(tmp_path / "runs/small/train") == before


# ---- the real road


def real(loaded: LoadedRecipe, **options) -> PipelineRunner:
    return PipelineRunner(loaded, Path("runs"), build_steps(loaded), **options)


def keys(loaded: LoadedRecipe) -> dict[str, str]:
    return {step.name: step.request.key for step in real(loaded).plan()}


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [name for name in after if after[name] != before.get(name)]


@pytest.mark.parametrize(("override", "first", "untouched"), [
    ("sft.steps=6", "sft", ["evaluate-base", "pretrain", "sft-data"]),
    ("sft.system_prompt=x", "sft-data", ["pretrain", "evaluate-base"]),
    ("pretrain.steps=21", "pretrain", ["tokenize", "sft-data"]),
    ("packing.seq_len=32", "tokenize", ["train-tokenizer"]),
    ("tokenizer.vocab_size=400", "train-tokenizer", ["split"]),
    ("data.filters.min_characters=4", "filter", ["ingest", "synthesize"]),
    ("data.sources=[{path: pocket-world, max_bytes: 1MB}, texts]", "synthesize", []),
    ("evaluate.limit=3", "evaluate-base", ["sft", "sft-data"]),
    ("export.dtype=bfloat16", "export", ["sft", "evaluate-sft"]),
    ("report.language=fr", "report", ROAD[:-1]),
    ("seed=1", "synthesize", []),
])  # fmt: skip
def test_a_setting_changes_the_stages_that_read_it_and_those_after(load, override, first, untouched):
    before = keys(load())
    assert list(before) == ROAD
    after = changed(before, keys(load(override)))
    assert (after[0], after[-1]) == (first, "report")
    assert not set(after) & set(untouched)


def test_how_a_step_is_carried_out_is_in_no_key(load):
    watched = "sft.monitor={tasks: [piqa], every_steps: 2}"
    before = keys(load(watched))
    for override in (
        "mesh={data: 2}", "runtime.checkpoint.every_steps=3", "pretrain.log_every=1", "pretrain.eval_every=7",
        "pretrain.gradient_accumulation_steps=2", "runtime.checkpoint.keep_last=5", "data.executor=ray",
        "data.ray_address=h:1", "data.workers=3", "sft.monitor.data_dir=/nowhere",
    ):  # fmt: skip
        assert changed(before, keys(load(watched, override))) == [], override
    assert changed(before, keys(load(watched, "sft.monitor.limit=50")))[0] == "sft", "which may end it"


def test_changed_user_files_are_noticed(load, tmp_path):
    before = keys(load())
    (tmp_path / "texts/b.txt").write_text("b")
    after = keys(load())
    assert changed(before, after)[0] == "ingest"
    (tmp_path / "chat.jsonl").write_text("{} ")
    assert changed(after, keys(load()))[0] == "sft-data"


def test_sections_left_out_have_no_stages(load):
    names = list(keys(load("sft=null", "evaluate=null", "export=null", "data.sources=[texts]")))
    assert names == ["ingest", "filter", "dedup", "split", "train-tokenizer", "tokenize", "pretrain", "report"]
    assert "dedup" not in keys(load("data.dedup=null"))
    assert build_steps(load("data=null")) == []


# ---- what cannot be is refused before the first step runs

NEITHER = ["sft=null", "export=null", "evaluate.tasks=[]"]
HOW = "steps: 9, batch_size: 8, schedule: {peak_lr: 1e-6, min_lr: 0}"
WATCHED = f"{{sources: [chat.jsonl], {HOW}, monitor: {{every_steps: 5, %s}}}}"


@pytest.mark.parametrize(("override", "held"), [
    ("data.languages=[en, french]", "ISO 639-1"),
    ("data.languages=[en, xx]", "ISO 639-1"),
    ("data.sources=[{path: texts, language: en-US}]", "ISO 639-1"),
    ("data.dedup.against=nowhere", "'nowhere'"),
    ("data.decontaminate.benchmark_files=[none.yaml]", "`none.yaml`"),
    ("data.decontaminate.benchmark_files=[exam.pdf]", ".jsonl"),
    ("evaluate.tasks=[none.yaml]", "`none.yaml`"),
    ("sft=" + WATCHED % "tasks: [none.yaml]", "`none.yaml`"),
    ("sft=" + WATCHED % "data_dir: .", ""),
    ("sft=" + WATCHED.replace("{", "{mixture: {chats: 1}, ", 1) % "", "Did you mean `chat`"),
    ("pretrain.mixture={en: 1, pocket-world.e: 1}", "Did you mean `pocket-world.en`"),
    ("dpo=" + WATCHED % "data_dir: nowhere", "nowhere"),
    ("pretrain.optimizer.name=adammm", "`adammm`"),
    ("pretrain.schedule.settings={share: 1}", "share"),
    ("pretrain={optimizer_in_backward: true, gradient_accumulation_steps: 2}", "one by one"),
    ("mesh={pipeline: 4, data: 2}", ""),
    (f"sft={{sources: [chat.jsonl], {HOW}, seq_len: 25}} && mesh={{context: 2}}", "context of 25"),
    ("model.nodes={positions: {kind: learned_positions, in: embed, length: 63}, blocks: {in: positions}}", "63 posit"),
])  # fmt: skip
def test_a_mistake_in_any_step_is_refused_before_the_first(load, tmp_path, override, held):
    (tmp_path / "exam.pdf").write_text("no items")
    runner = real(load(*NEITHER, *override.split(" && ")))
    mistake = refused(runner.check, runner.plan())
    assert mistake.where.startswith(f"--set {override.partition('=')[0]}") and mistake.fix
    assert held in mistake.what + mistake.fix


def test_so_does_a_dry_run_and_names_of_any_case_are_languages(load, affinage):
    status, _, said = affinage("run", str(tiny_run.RECIPE), "--dry-run", *set_words("mesh.data=7"))
    assert status == 2 and "data = 7" in said
    settings = ["evaluate.tasks=[hellaswag]", "data.languages=[EN, Fr]", "data.sources=[{path: texts, language: EN}]"]
    runner = real(load(*settings), until=["tokenize"])
    assert (data := runner.loaded.recipe.data).languages == ("en", "fr") and data.sources[0].language == "en"
    runner.check(runner.plan())
    stages = "[{weights: {texts: 1, und: 0}}, {from_step: 20, weights: {en: 1}}]"
    never = f"pretrain.mixture={stages}", "runtime.profile=[40, 30]"
    odd = load("data.sources=[{path: texts, language: fr}, texts]", "data.languages=[en]", *never)
    with pytest.warns(UserWarned) as warned:  # a source without a name may name others
        (runner := real(odd, until=["pretrain"])).check(runner.plan())
    told = " ".join(str(each.message) for each in warned)
    assert all(each in told for each in ("`texts` is of language fr", "mixture[1] never begins", "for step 30 of 20"))


def test_what_a_finished_run_does_not_have_or_would_make_again_is_said_before(tiny_runs, affinage, tmp_path):
    def said(*settings: str, status: int = 2) -> str:
        words = ("run", *tiny_run.WORDS, *set_words(*settings), "--dry-run", "--runs", str(tiny_runs))
        with warnings.catch_warnings(record=True) as warned:
            code, _, said = affinage(*words)
        assert code == status, said
        return " ".join((said + "".join(str(each.message) for each in warned)).split())

    assert "step 3 There are @18, @20" in said("sft.from_step=3")
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor")
    assert "--set chat_template: the chat template refuses" in said(f"chat_template={tmp_path}/chat.jinja")
    more = ("name=more", f"pretrain.resume_from={tiny_runs}/tiny/pretrain", "dpo=null", "sft=null")
    assert "it has made 20 of the 15 steps" in said(*more, "pretrain.steps=15")
    assert "jumps from 0.0003 to 0.000932; from before the decay: none" in said(*more, "pretrain.steps=30", status=0)
    again = said("evaluate.tasks=[hellaswag]", status=0)
    assert "pretrain, sft, dpo: complete, but trained again: decontaminate never ran" in again
    assert "To score it as it is: affinage eval tiny --tasks TASK --runs" in again


# ---- documents are cleared of benchmarks


QUESTION = "Which of the five harbours on the northern coast was rebuilt after the storm, and by whom was it done?"
ITEM = {"question": QUESTION, "choices": ["a", "b"], "right": 0}


@pytest.fixture
def harbours(load, tmp_path):
    texts = [f"I was asked: {QUESTION.lower()} I did not know.", "Something else entirely."]
    texts.append("The answer is in the book over there.")
    write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    write_task(tmp_path, "harbours", [ITEM])

    def harbours(tasks: str, *overrides: str) -> LoadedRecipe:
        """A recipe of the texts that is judged on these tasks."""
        filters = "{min_characters: 3, language_threshold: 0}"
        return load(f"data={{sources: [texts.jsonl], filters: {filters}}}", f"evaluate.tasks=[{tasks}]", *overrides)

    return harbours


def stage_of(loaded: LoadedRecipe) -> Step | None:
    return next((stage for stage in build_steps(loaded) if stage.name == "decontaminate"), None)


def test_the_stage_is_there_if_there_is_something_to_look_for(harbours):
    assert stage_of(harbours("pocket-world")) is None  # its facts are its text
    assert stage_of(harbours("")) is None
    assert stage_of(harbours("pocket-world, harbours.yaml", "data.decontaminate=null")) is None
    assert stage_of(harbours("harbours.yaml", "data.decontaminate.benchmarks=false")) is None
    named = stage_of(harbours("pocket-world, hellaswag, harbours.yaml"))
    assert named.config["evaluate"] == {"tasks": ["hellaswag", "harbours.yaml"]}
    mine = "data.decontaminate={benchmarks: false, benchmark_files: [mine.txt]}"
    assert "evaluate" not in stage_of(harbours("hellaswag", mine)).config
    split = next(stage for stage in build_steps(harbours("harbours.yaml")) if stage.name == "split")
    assert split.inputs == ("decontaminate",)


def test_documents_are_cleared_of_tasks_and_files(harbours, tmp_path):
    answer = "The answer is in the book over there"
    (tmp_path / "mine.txt").write_text(f"{answer}, and the book is on the table.\n{answer}.")
    asked = harbours("pocket-world, harbours.yaml", "data.decontaminate.benchmark_files=[mine.txt]")
    stage = stage_of(asked)
    assert stage.files[0] == "harbours.yaml" and len(stage.files) == 3
    real(asked, until=["decontaminate"]).run(ProgressListener())
    folder = tmp_path / "runs" / "small" / "decontaminate"
    assert [row["text"] for row in rows_of(folder)] == ["Something else entirely."]
    matches = pq.read_table(folder / "matches.parquet").to_pylist()
    found = [(match["benchmark"], match["item"], match["text"]) for match in matches]
    assert found == [("harbours", "0", QUESTION.lower()[:-1]), ("mine.txt", "2", answer)]
    assert all(step.complete for step in real(asked, until=["decontaminate"]).plan())
    write_lines(tmp_path / "items.jsonl", [ITEM | {"question": "Another question"}])
    reasons = {step.name: step.reason for step in real(asked, until=["decontaminate"]).plan()}
    assert reasons["dedup"] == "complete" and "items.jsonl" in reasons["decontaminate"]


def test_the_text_that_a_model_was_trained_on_is_searched_for_items(tiny_runs: Path):
    run = tiny_runs / "tiny"
    items = [BenchmarkItem("quiz", "0", (" ".join(rows_of(run / "split/train")[0]["text"].split()[:7]),))]
    items.append(BenchmarkItem("quiz", "1", ("Who counted forty two grey gulls today?",)))
    for training in ("pretrain", "sft"):
        for n_grams, found in ((6, {("quiz", "0")}), (8, set())):
            seen = contamination_search((run / training).resolve(), DecontaminateSettings(n_grams=n_grams))
            assert seen is not None and seen(items).found == found
