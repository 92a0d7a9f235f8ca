"""Pairs of answers in the shapes that published sets have, and what of them is trained."""

import json
from pathlib import Path

import numpy as np
import pytest

from affinage.data.batch import make_batch
from affinage.data.chat import encode_conversation
from affinage.data.conversations import show_examples
from affinage.data.preference_feed import REFERENCE
from affinage.data.preferences import Pair, documents_in_a_row, prepare_preferences, read_pairs
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError
from affinage.model.kinds import preference
from affinage.recipe.tuning import ConversationSettings, DpoSettings

USER, GOOD, BAD = (
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "assistant", "content": "b"},
)
SHAPES = [
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]},  # they begin with it
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"instruction": "q", "input": "", "output": "x", "chosen": "a", "rejected": "b"},
    {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    },
]


def write(path: Path, items: list[dict]) -> ConversationSettings:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return ConversationSettings(path=str(path))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shapes_of_published_sets_are_read(tmp_path: Path, shape: dict):
    (pair,) = read_pairs(write(tmp_path / "pairs.jsonl", [shape]))
    assert isinstance(pair, Pair)
    assert (pair.prompt, pair.chosen, pair.rejected) == ([USER], [GOOD], [BAD])


@pytest.mark.parametrize(
    ("item", "complaint"),
    [
        ({"prompt": "q", "chosen": "a"}, "no pair"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "content of message 2"),
        ({"chosen": "a", "rejected": "b"}, "without a prompt"),
    ],
)
def test_what_is_no_pair_is_refused_by_line(tmp_path: Path, item: dict, complaint: str):
    (found,) = read_pairs(write(tmp_path / "pairs.jsonl", [item]))
    assert isinstance(found, UserError) and complaint in found.what and found.where.endswith("pairs.jsonl:1")


def settings(source: ConversationSettings, **others: object) -> DpoSettings:
    schedule = {"peak": 1e-3, "floor": 0}
    given = {"steps": 1, "batch": 1, "schedule": schedule, "sources": [source.path], "held_out": 0}
    return DpoSettings.model_validate({**given, **others})


def test_only_the_answers_after_the_prompt_count_and_several_pairs_share_a_row(bpe: Tokenizer, tmp_path: Path):
    earlier = [USER, {"role": "assistant", "content": "an earlier answer"}]
    items = [
        {"prompt": [*earlier, {"role": "user", "content": f"{i}?"}], "chosen": f"yes {i}", "rejected": "no"}
        for i in range(6)
    ]
    source = write(tmp_path / "pairs.jsonl", items)
    prepare_preferences(settings(source), bpe, tmp_path / "out", context=256, seed=0, system_prompt="")
    rows = np.load(tmp_path / "out/train/pairs/rows-00000-of-00001.npy").astype(np.int32)
    mask = np.load(tmp_path / "out/train/pairs/mask-00000-of-00001.npy")
    assert len(rows) < 6 and documents_in_a_row(tmp_path / "out") >= 4
    found = set()
    batch = make_batch(rows, mask, np.arange(len(rows)))
    for row, trained, ids in zip(batch["tokens"], batch["loss_mask"].astype(bool), batch["segment_ids"]):
        said = [bpe.decode(row[(ids == number) & trained]) for number in range(1, ids.max() + 1)]
        found |= set(zip(said[0::2], said[1::2]))
    assert found == {(f"yes {i}", "no") for i in range(6)}


def test_pairs_that_are_too_long_are_cut_on_both_sides_or_left_out(bpe: Tokenizer, tmp_path: Path):
    source = write(tmp_path / "pairs.jsonl", [{"prompt": "q", "chosen": "river " * 100, "rejected": "no"}, SHAPES[0]])
    cut = prepare_preferences(settings(source), bpe, tmp_path / "cut", context=96, seed=0, system_prompt="")
    assert cut["truncated"] == 1 and cut["train"]["conversations"] == 2
    whole = encode_conversation([USER, {"role": "assistant", "content": "river " * 100}], bpe, "")[0][0]
    rows = np.load(tmp_path / "cut/train/pairs/rows-00000-of-00001.npy")
    assert any(row[:48].tolist() == whole[:48] and row[48] == whole[0] for row in rows)
    shown = [text.plain for _, text in show_examples(tmp_path / "cut", bpe, 2, documents=2)]
    assert sorted(text.count("[cut here") for text in shown) in ([1], [0, 1])
    assert sum("river⟧ [cut here" in text for text in shown) == 1
    dropping = settings(source, too_long="drop")
    dropped = prepare_preferences(dropping, bpe, tmp_path / "drop", context=96, seed=0, system_prompt="")
    assert dropped["dropped"] == 1 and dropped["train"]["conversations"] == 1


def test_the_batch_and_the_loss_call_the_reference_by_one_name():
    assert REFERENCE == preference.REFERENCE
