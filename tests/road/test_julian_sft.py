"""The recipe of Julian's assistant, on small stand-ins of its sources: each in the form in which it is published."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from affinage.config.load import load_recipe
from affinage.data.dataloader import DataLoader
from affinage.data.json_files import read_object
from affinage.data.special_tokens import IM_END, IM_START
from affinage.data.tuning_data import prepare_tuning_data
from tiny_models import tokenizer

COUNTS = {
    "alpaca": 30, "dolly": 12, "code-alpaca": 9, "gpt4all-j": 10,
    "french": 8, "openhermes": 25, "slimorca": 15, "others": 20,
}  # fmt: skip


def sharegpt(name: str, number: int) -> dict[str, object]:
    told = [("system", "Be exact."), ("human", f"{name} asks {number}?"), ("gpt", f"{name} answers {number}.")]
    return {"conversations": [{"from": role, "value": text, "weight": None} for role, text in told]}


def item(name: str, number: int) -> dict[str, object]:
    asks, answers = f"{name} asks {number}?", f"{name} answers {number}."
    match name:
        case "alpaca" | "code-alpaca" | "french":
            return {"instruction": asks, "input": "" if number % 2 else "some text", "output": answers, "text": "x"}
        case "dolly":
            return {"instruction": asks, "context": "", "response": answers, "category": "open_qa"}
        case "gpt4all-j":
            return {"prompt": asks, "response": answers, "source": "x"}
        case "others":
            turns = [("user", asks), ("assistant", answers), ("user", "And?"), ("assistant", "That is all.")]
            return {"id": f"o{number}", "messages": [{"role": role, "content": text} for role, text in turns]}
    return sharegpt(name, number)


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mirror")
    for name, count in COUNTS.items():
        (root / name).mkdir()
        items = [item(name, number) for number in range(count)]
        if name in ("dolly", "code-alpaca"):  # these two are published as JSON lines
            lines = "".join(json.dumps(each) + "\n" for each in items)
            (root / name / "data.jsonl").write_text(lines, encoding="utf-8")
        else:
            pq.write_table(pa.Table.from_pylist(items), root / name / "train-00000-of-00001.parquet")
    return root


def test_every_source_of_the_mixture_becomes_rows(mirror: Path, tmp_path: Path):
    overrides = [f"sft.mirror={mirror}", "sft.seq_len=256", "sft.validation_fraction=0"]
    settings = load_recipe("julian-sft", overrides).recipe.sft
    assert settings is not None
    rows = {"seq_len": 256, "seed": 0, "system_prompt": settings.system_prompt}
    summary = prepare_tuning_data(settings, tokenizer(), tmp_path, **rows)
    counts = {name: read_object(tmp_path / "train" / name / "shards.json")["conversations"] for name in COUNTS}
    assert counts == COUNTS and summary["train"]["conversations"] == sum(COUNTS.values())
    feed = DataLoader(tmp_path / "train", seed=0, batch=summary["train"]["rows"])
    batch = feed.batch(0)
    # Trained is what the assistant says, to the end of its message.
    for tokens, mask in zip(batch["tokens"], batch["loss_mask"].astype(bool)):
        text = tokenizer().decode(tokens[mask], keep_special=True)
        assert " answers " in text and " asks " not in text and "Be exact" not in text
        assert tokens[mask][-1] == IM_END and IM_START not in tokens[mask]
