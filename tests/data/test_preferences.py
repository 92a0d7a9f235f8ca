"""Pairs of answers in the shapes that published sets have, and what of them is trained."""

from pathlib import Path

import numpy as np
import pytest
from template_forms import PLAIN, THOUGHTFUL, ours
from unpacked import documents_in

from affinage.config.tuning import ConversationSettings, DpoSettings
from affinage.data.chat import encode_prompt
from affinage.data.conversation_files import read_lines
from affinage.data.preferences import Pair, documents_in_a_row, prepare_preferences, read_line
from affinage.data.sft import show_examples
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError
from source_forms import write_lines

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
    {"prompt": " q\n", "chosen": [USER, GOOD], "rejected": [USER, BAD]},  # with white space around it
    {"instruction": "q", "input": "", "output": "x", "chosen": "a", "rejected": "b"},
    {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    },
]


def write(path: Path, items: list[dict]) -> ConversationSettings:
    return ConversationSettings(path=str(write_lines(path, items)))


def read_pairs(source: ConversationSettings) -> list[Pair]:
    return [read_line(item, source, where=where, name=name) for where, name, item in read_lines(source)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shapes_of_published_sets_are_read(tmp_path: Path, shape: dict):
    (pair,) = read_pairs(write(tmp_path / "pairs.jsonl", [shape]))
    assert isinstance(pair, Pair)
    assert (pair.prompt, pair.chosen, pair.rejected) == ([USER], [GOOD], [BAD])
    (told,) = read_pairs(write(tmp_path / "pairs.jsonl", [shape | {"system": "Short."}]))
    assert told.prompt == [{"role": "system", "content": "Short."}, USER]


@pytest.mark.parametrize("line", [
    '{"prompt": "q", "chosen": "a"}',
    '{"prompt": "q", "chosen": "a", "rejected": null}',
    '{"chosen": "a", "rejected": "b"}',
    "[]",
])  # fmt: skip
def test_what_is_no_pair_is_refused_by_line(bpe: Tokenizer, tmp_path: Path, line: str):
    (tmp_path / "pairs.jsonl").write_text(line)
    settings = {"steps": 1, "batch_size": 1, "sources": [str(tmp_path / "pairs.jsonl")]}
    schedule = {"schedule": {"peak_lr": 1e-3, "min_lr": 0}}
    with pytest.raises(UserError) as error:
        prepare_preferences(
            DpoSettings.model_validate(settings | schedule), bpe, tmp_path, context=99, seed=0, system_prompt=""
        )
    assert error.value.where.endswith("pairs.jsonl:1")


def prepare(folder: Path, tokenizer: Tokenizer, items: list[dict], context: int = 400, **others: object) -> dict:
    source = write(folder / "pairs.jsonl", items)
    given = {
        "steps": 1,
        "batch_size": 1,
        "schedule": {"peak_lr": 1e-3, "min_lr": 0},
        "sources": [source.path],
        "validation_fraction": 0,
    }
    settings = DpoSettings.model_validate(given | others)
    return prepare_preferences(settings, tokenizer, folder / "rows", context=context, seed=0, system_prompt="")


@pytest.mark.parametrize("form", ["chatml", "qwen3", "deepseek_r1_distill"])
def test_both_sides_are_trained_after_the_prompt_alone_and_pairs_share_rows(bpe: Tokenizer, tmp_path: Path, form: str):
    """What the model would be asked with comes before each side, without the reasoning that a template leaves out."""
    tokenizer = bpe if form == "chatml" else ours(form)
    reasoned = form in ("qwen3", "deepseek_r1_distill")
    talk, begin = (THOUGHTFUL, "<think>\nOh.\n</think>\n\n") if reasoned else (PLAIN, "")
    prompts = [[*talk[:2], {"role": "user", "content": f"{number}?"}] for number in range(6)]
    items = [{"prompt": p, "chosen": f"{begin}yes {n}", "rejected": f"{begin}no"} for n, p in enumerate(prompts)]
    prepare(tmp_path, tokenizer, items)
    assert len(np.load(tmp_path / "rows/train/pairs/tokens-00000-of-00001.npy")) < 6
    assert documents_in_a_row(tmp_path / "rows") >= 4
    found = [(tokens[: mask.index(True)], [t for t, m in zip(tokens, mask, strict=True) if m])
             for tokens, mask in documents_in(tmp_path / "rows/train")]  # fmt: skip
    asked = [encode_prompt(prompt, tokenizer, "") for prompt in prompts]
    said = {}
    for (before, chosen), (again, rejected) in zip(found[0::2], found[1::2], strict=True):
        assert before == again
        said[asked.index(before)] = [tokenizer.decode(side).strip() for side in (chosen, rejected)]
    opened = begin.removeprefix("<think>\n") if form == "deepseek_r1_distill" else begin  # which the prompt begins
    assert said == {number: [f"{opened}yes {number}", f"{opened}no"] for number in range(6)}


@pytest.mark.parametrize("form", ["chatml", "qwen3"])
def test_pairs_that_are_too_long_are_cut_on_both_sides_or_left_out(bpe: Tokenizer, tmp_path: Path, form: str):
    tokenizer = bpe if form == "chatml" else ours(form)
    long = {"prompt": "q", "chosen": "capital " * 100, "rejected": "No. " + "capital " * 100}
    cut = prepare(tmp_path, tokenizer, [long, {"prompt": "q", "chosen": "a", "rejected": "b"}], context=150)
    assert cut["truncated"] == 1 and cut["train"]["conversations"] == 2
    assert [len(tokens) for tokens, _ in documents_in(tmp_path / "rows/train")].count(75) == 2
    shown = [text.plain.count("⟧ [cut here") for _, text in show_examples(tmp_path / "rows", tokenizer, 2, documents=2)]
    assert sorted(shown) == [0, 2]
    dropped = prepare(tmp_path, tokenizer, [long, SHAPES[0]], context=150, truncation="drop")
    assert dropped["dropped"] == 1 and dropped["train"]["conversations"] == 1


def test_a_side_of_several_answers_that_no_one_text_has_is_refused(tmp_path: Path):
    pair = {"prompt": PLAIN[0]["content"], "chosen": [THOUGHTFUL[1], *THOUGHTFUL[2:]], "rejected": "b"}
    with pytest.raises(UserError) as error:
        prepare(tmp_path, ours("qwen3"), [pair])
    assert error.value.where == "chat_template" and error.value.fix


def test_pairs_of_the_same_answer_twice_are_counted(bpe: Tokenizer, tmp_path: Path):
    same = {"prompt": "q", "chosen": "a", "rejected": "a"}
    summary = prepare(tmp_path, bpe, [same, SHAPES[0]])
    assert summary["identical"] == summary["dropped"] == summary["train"]["conversations"] == 1
