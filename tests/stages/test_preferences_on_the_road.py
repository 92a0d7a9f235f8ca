"""Direct preference optimisation as stages: pairs, the reference, the training, and what comes after."""

import itertools
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from affinage.cli.program import main
from affinage.data.batch import make_batch
from affinage.data.chat import encode_prompt
from affinage.data.conversations import show_examples
from affinage.data.feed import RowFeed
from affinage.data.preference_feed import PreferenceFeed, read_reference
from affinage.data.preferences import documents_in_a_row
from affinage.data.row_files import open_rows
from affinage.data.validation_rows import ValidationRows
from affinage.generation.model import LoadedModel
from affinage.model import Call, apply
from affinage.model.kinds.preference import REFERENCE
from affinage.stages.models import is_chat, open_model

TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")
SCHEDULE = "schedule={peak: 1.0e-3, floor: 1.0e-4, warmup_steps: 1}"
SETTINGS = [
    "data.sources=[{path: pocket-world, megabytes: 0.05}]",
    "pretrain.steps=2",
    "sft.steps=2",
    "evaluate=null",
    "rows.context=96",
    "dpo={sources: [pocket-world], steps: 6, batch: 8, schedule: {peak: 1.0e-3, floor: 1.0e-4}, sample: 0.2}",
    "dpo.log_every=1",
    "dpo.validate_every=3",
    "dpo.validation_rows=5",
    "dpo.checkpoint={every_steps: 2}",
]


ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def run(runs: Path, *settings: str, until: str = "") -> None:
    words = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    with pytest.raises(SystemExit) as ended:
        main(["run", TINY, "--runs", str(runs), *words, *(["--until", until] if until else [])])
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run(folder)
    return folder


def lines(runs: Path, name: str = "tiny") -> list[dict]:
    return [json.loads(line) for line in (runs / name / "dpo" / "metrics.jsonl").read_text().splitlines()]


def test_it_begins_undecided_and_tells_what_it_learns(runs: Path):
    rows = [line for line in lines(runs) if "loss" in line]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # the model is its own reference
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["rewards/margins"] > 0
    for row in rows:
        assert row["rewards/margins"] == pytest.approx(row["rewards/chosen"] - row["rewards/rejected"], abs=1e-5)
    (validation, _) = [line["validation"] for line in lines(runs) if "validation" in line]
    assert set(validation["pocket-world"]) >= {"loss", "rewards/accuracies"}
    assert "bits_per_byte" not in validation["pocket-world"]


def test_the_share_of_pairs_right_is_told_with_how_many_there_are(runs: Path, monkeypatch: pytest.MonkeyPatch):
    """Counted from the rows that the validation reads, which are not all that are held out."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from run_scores import pairs

    (share,) = pairs(runs / "tiny").values()
    (folder,) = (runs / "tiny/preferences/validation").iterdir()
    rows = open_rows(folder)
    assert share.of < rows.facts["conversations"] and rows.rows > 5
    read = ValidationRows(folder, batch=5, limit=5).batch(0)
    assert share.of == sum(
        len(np.unique(row[counted > 0])) / 2
        for row, counted in zip(read["segment_ids"], read["loss_mask"], strict=True)
    )
    assert share.value * share.of == pytest.approx(round(share.value * share.of))


def test_the_last_model_is_the_one_that_is_used_and_released(runs: Path):
    assert is_chat((runs / "tiny/dpo").resolve())
    last, before = open_model("tiny", runs), open_model("tiny/sft", runs)
    assert not np.allclose(last.params["embed"]["embedding"], before.params["embed"]["embedding"], atol=1e-7)
    assert last.graph == before.graph and last.system_prompt == ""
    assert (runs / "tiny/export/model/chat_template.jinja").is_file() or "chat_template" in json.loads(
        (runs / "tiny/export/model/tokenizer_config.json").read_text()
    )
    exported = open_model(str(runs / "tiny/export/model"), runs)
    np.testing.assert_allclose(exported.params["embed"]["embedding"], last.params["embed"]["embedding"], atol=1e-6)
    assert "Preferences" in (runs / "tiny/report.html").read_text()


@pytest.mark.parametrize(
    ("words", "shown"),
    [(["sft", "--show", "1"], "⟦"), (["dpo", "--show", "1"], "⟦"), (["report", "--out", "page.html"], "stages")],
    ids=["sft", "dpo", "report"],
)
def test_as_json_there_is_one_document_whatever_is_shown(
    runs: Path,
    tmp_path: Path,
    words: list[str],
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    with pytest.raises(SystemExit) as ended:
        main([words[0], TINY, *words[1:], "--runs", str(runs), "--json", *settings])
    told = capsys.readouterr()
    assert ended.value.code == 0 and json.loads(told.out) and shown in told.err


def alone(model: LoadedModel, tokens: np.ndarray, trained: np.ndarray) -> float:
    """Log-probability of the trained tokens of one document, in a row of its own."""
    outputs = apply(model.graph, model.params, {"tokens": tokens[None]}, Call(until=model.graph.logits))
    logits = np.asarray(outputs.values[model.graph.logits].array(), np.float64)[0, :-1]
    normal = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(sum(normal[i, token] for i, token in enumerate(tokens[1:]) if trained[i + 1]))


def test_the_reference_is_what_the_model_says_of_each_answer_alone(runs: Path):
    model, rows = open_model("tiny/sft", runs), runs / "tiny/preferences/train/pocket-world"
    told = np.load(runs / "tiny/reference/train/pocket-world.npy")
    tokens, mask = np.load(rows / "rows-00000-of-00001.npy"), np.load(rows / "mask-00000-of-00001.npy")
    assert told.shape == (len(tokens), documents_in_a_row(runs / "tiny/preferences"))
    for row in (0, len(tokens) - 1):
        batch = make_batch(tokens[row : row + 1].astype(np.int32), mask[row : row + 1], np.zeros(1))
        ids = batch["segment_ids"][0]
        for number in range(2):
            inside = (ids == 1 + number) & (tokens[row] != 0)
            expected = alone(model, jnp.asarray(tokens[row][inside].astype(np.int32)), mask[row][inside])
            assert told[row, number] == pytest.approx(expected, rel=1e-4)


def test_a_batch_depends_on_its_step_alone(runs: Path):
    rows = RowFeed(runs / "tiny/preferences/train", seed=0, batch=8)
    feed = PreferenceFeed(rows, read_reference(runs / "tiny/reference/train"))
    third = next(itertools.islice(feed.iterate(0), 3, None))
    again = next(feed.iterate(3))
    assert third.keys() == again.keys() >= {REFERENCE}
    for name in third:
        np.testing.assert_array_equal(third[name], again[name])


def test_it_is_the_same_on_another_mesh(runs: Path, tmp_path: Path):
    run(tmp_path, until="reference")
    run(tmp_path, "mesh={fsdp: 2, tensor: 2}", until="dpo")
    ours, theirs = ([line for line in lines(folder) if "loss" in line] for folder in (tmp_path, runs))
    for one, other in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "rewards/chosen", "logps/rejected", "logits/chosen"):
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=2e-4), name


def test_a_held_reference_says_what_was_written_down(runs: Path):
    run(runs, "name=held", "dpo.reference=held", until="dpo")
    assert not (runs / "held" / "reference").exists()
    for one, other in zip(lines(runs, "held"), lines(runs), strict=True):
        told, expected = one.get("validation", {}).get("pocket-world", one), other
        expected = other.get("validation", {}).get("pocket-world", other)
        for name in ("loss", "rewards/margins", "logps/chosen"):
            assert told[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name


def test_adapters_on_the_road(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Fine-tuned, and then taught preferences on top of that, with adapters; what is used has them in its weights.

    In a chat template that is not ChatML, which goes the same way.
    """
    template = tmp_path / "zephyr.jinja"
    template.write_text(ZEPHYR)
    lora = ("sft.lora={rank: 4}", "dpo.lora={rank: 2, targets: [query]}", "dpo.reference=held")
    run(runs, "name=adapted", f"chat_template={template}", *lora)
    base, tuned, last = (open_model(f"adapted{stage}", runs).params for stage in ("/pretrain", "/sft", ""))
    weights = [each["blocks"]["attention"] for each in (base, tuned, last)]
    np.testing.assert_array_equal(base["embed"]["embedding"], last["embed"]["embedding"])
    assert not np.allclose(weights[0]["key"]["kernel"], weights[1]["key"]["kernel"], atol=1e-7)
    np.testing.assert_array_equal(weights[1]["key"]["kernel"], weights[2]["key"]["kernel"])
    assert not np.allclose(weights[1]["query"]["kernel"], weights[2]["query"]["kernel"], atol=1e-7)
    assert open_model("adapted/sft@2", runs).graph == open_model("adapted", runs).graph
    first = next(line for line in lines(runs, "adapted") if "loss" in line)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)

    exported = open_model(str(runs / "adapted/export/model"), runs).params
    np.testing.assert_allclose(exported["blocks"]["attention"]["query"]["kernel"], weights[2]["query"]["kernel"])
    for name in ("adapted", "adapted/sft", str(runs / "adapted/export/model")):
        said = encode_prompt([{"role": "user", "content": "où ?"}], open_model(name, runs).tokenizer, "")
        assert (
            open_model(name, runs).tokenizer.decode(said, keep_special=True)
            == "<|user|>\noù ?<|im_end|>\n<|assistant|>"
        )
    assert open_model("adapted/pretrain", runs).tokenizer.template is None
    rows, tokenizer = runs / "adapted/conversations", open_model("adapted", runs).tokenizer
    _, shown = next(show_examples(rows, tokenizer, 1))
    assert shown.plain.startswith("<|user|>\n") and shown.plain.count("<|im_end|>⟧") == shown.plain.count("⟦") > 0

    def adapter(model: str, *words: str) -> tuple[dict, str]:
        to = tmp_path / f"adapter-{len(list(tmp_path.iterdir()))}"
        with pytest.raises(SystemExit) as ended:
            main(["export", model, "--runs", str(runs), "--adapter", "--to", str(to), *words])
        assert ended.value.code == 0
        return json.loads((to / "adapter_config.json").read_text()), capsys.readouterr().out

    said, told = adapter("adapted")
    assert (said["r"], said["target_modules"]) == (2, ["q_proj"])
    assert said["base_model_name_or_path"] is None
    assert f"affinage export {runs / 'adapted/sft'} --to" in told and "PeftModel" in told
    assert adapter("adapted", "--base", "me/base")[0]["base_model_name_or_path"] == "me/base"
    assert adapter("adapted/sft")[0]["base_model_name_or_path"] is None
    run(runs, "name=plain", "sft=null", "dpo=null")  # of the same pretraining, which it exports
    said, told = adapter("adapted/sft")
    assert said["base_model_name_or_path"] == str(runs / "plain/export/model") and "AutoPeftModel" in told
