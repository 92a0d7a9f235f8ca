"""Conversations in published shapes to rows: all that is read is packed once, with the mask of its own encoding."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from template_forms import PLAIN, REASONED, THOUGHTFUL, ours
from unpacked import documents_in

from affinage.config.data import DecontaminateSettings
from affinage.config.tuning import ConversationSettings, SftSettings
from affinage.data import tuning_shards
from affinage.data.benchmark_items import BenchmarkItem
from affinage.data.chat import encode_conversation, encode_documents
from affinage.data.conversation_files import read_conversations
from affinage.data.conversation_shapes import Conversation
from affinage.data.dataloader import DataLoader, validation_sets
from affinage.data.decontaminate import Searched, write_items
from affinage.data.sft import prepare_conversations, show_examples
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError, UserWarned
from affinage.pipeline.steps_data import print_counts
from source_forms import write_lines

CONTEXT = 160


def prepare(
    folder: Path,
    tokenizer: Tokenizer,
    *sources: object,
    context: int = CONTEXT,
    searched: Searched | None = None,
    **others: object,
) -> dict:
    """`sources` are settings, files, or lists of lines or conversations that make a file."""
    told: list[object] = []
    for number, source in enumerate(sources):
        if isinstance(source, list):
            lines = [each if isinstance(each, dict) else {"messages": each} for each in source]
            source = write_lines(folder / f"source-{number}.jsonl", lines)
        told.append(source if isinstance(source, dict) else str(source))
    given = {
        "steps": 1,
        "batch_size": 1,
        "schedule": {"peak_lr": 1e-3, "min_lr": 0},
        "validation_fraction": 0,
        "system_prompt": "",
    }
    settings = SftSettings.model_validate(given | {"sources": told} | others)
    return prepare_conversations(settings, tokenizer, folder / "rows", context=context, seed=0, searched=searched)


def ask(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def read(path: Path | str, **settings: str) -> Iterator[Conversation]:
    for found in read_conversations(ConversationSettings.model_validate({"path": str(path), **settings})):
        if isinstance(found, UserError):
            raise found
        yield found


def test_conversations_that_hold_an_item_of_a_benchmark_are_left_out(bpe: Tokenizer, tmp_path: Path):
    question, answer = "Which of the five old harbours was rebuilt first?", "The one on the northern coast, in spring."
    items = [BenchmarkItem("quiz", "0", (question, answer))]
    searched = write_items(tmp_path / "items.json", items, DecontaminateSettings())
    talks = [ask(f"What is {number}?", "A number.") for number in range(9)]
    talks[4] = ask(question.upper(), answer)
    summary = prepare(tmp_path, bpe, talks, validation_fraction=0.3, searched=searched)
    assert summary["in_benchmark"] == 1 and summary["used"] == 8
    rows = [row for part in ("train", "validation/source-0") for row in documents_in(tmp_path / "rows" / part)]
    assert len(rows) == 8 and not any("northern" in bpe.decode(tokens) for tokens, *_ in rows)


@pytest.mark.parametrize("form", ["chatml", "mistral", "qwen3"])
def test_every_conversation_is_packed_once_with_its_mask(form: str, bpe: Tokenizer, tmp_path: Path):
    """Also where </s> ends a turn, and where the template writes a conversation as several documents."""
    tokenizer = bpe if form == "chatml" else ours(form)
    unrolled = form == "qwen3"
    talks = []
    for number in range(30):
        talk = (REASONED if number % 4 < 2 else THOUGHTFUL) if unrolled else PLAIN
        talks.append([{**talk[0], "content": f"{number}: où ?"}, *talk[1 : 2 + 2 * (number % 2)]])
    summary = prepare(tmp_path, tokenizer, talks, validation_fraction=0.2, context=400)
    train, held_out = (documents_in(tmp_path / "rows" / part) for part in ("train", "validation/source-0"))
    expected = [part for talk in talks for part in encode_documents(talk, tokenizer, "")]
    assert sorted(train + held_out) == sorted(expected) and len(expected) == 30 + 15 * unrolled
    assert summary["conversations"] == 30 and summary["dropped"] == summary["truncated"] == 0
    assert summary.get("unrolled", 0) == 15 * unrolled
    validation = summary["validation"]["source-0"]
    assert 0 < validation["conversations"] == 30 - summary["train"]["conversations"]

    batch = DataLoader(tmp_path / "rows/train", seed=0, batch=summary["train"]["rows"]).batch(0)
    for part, documents in ((summary["train"], train), (validation, held_out)):
        assert part["trained_tokens"] == sum(sum(trained) for _, trained in documents)
        assert part["bytes"] == sum(tokenizer.piece_bytes[t][m].sum() for t, m in documents)
        assert part["rows"] < len(documents)
    assert batch["loss_mask"].sum() == summary["train"]["trained_tokens"]
    assert validation_sets(tmp_path / "rows/validation", batch=2)["source-0"].bytes == validation["bytes"]

    rows = np.load(tmp_path / "rows/train/source-0/tokens-00000-of-00001.npy")
    for span in pq.read_table(tmp_path / "rows/train/source-0/documents-00000-of-00001.parquet").to_pylist():
        parts = encode_documents(talks[int(span["id"].rpartition(":")[2]) - 1], tokenizer, "")
        assert rows[span["row"], span["start"] : span["stop"]].tolist() in [tokens for tokens, _ in parts]


def test_equal_conversations_and_parts_of_one_are_held_out_together(bpe: Tokenizer, tmp_path: Path):
    talks = [ask(f"What is {i}?", f"{i}") for i in range(12)]
    prepare(tmp_path, bpe, talks * 3, talks, validation_fraction=0.2)
    train = documents_in(tmp_path / "rows/train")
    for name in ("source-0", "source-1"):
        held_out = documents_in(tmp_path / "rows/validation" / name)
        assert held_out and not any(each in train for each in held_out)
    talks = [[*THOUGHTFUL[:2], {"role": "user", "content": str(number)}, THOUGHTFUL[3]] for number in range(12)]
    summary = prepare(tmp_path, ours("qwen3"), talks, validation_fraction=0.3, context=300)
    assert len(documents_in(tmp_path / "rows/train")) == 2 * summary["train"]["conversations"] < 24


def test_a_sample_and_a_limit_are_drawn_by_content(bpe: Tokenizer, tmp_path: Path):
    talks = [ask(f"What is {i}?", f"{i}") for i in range(200)]

    def chosen(source: object, **others: object) -> list[tuple[list[int], list[bool]]]:
        prepare(tmp_path, bpe, source, **others)
        return sorted(documents_in(tmp_path / "rows/train"))

    sampled = chosen(talks, sample=0.3)
    assert 35 <= len(sampled) <= 85 and sampled == chosen(talks[::-1], sample=0.3)
    paths = [write_lines(tmp_path / name, [{"messages": talk} for talk in some]) for name, some in
             (("a.jsonl", talks), ("b.jsonl", talks[::-1]))]  # fmt: skip
    limited = [chosen({"path": str(path), "max_examples": 20}) for path in paths]
    assert len(limited[0]) == 20 and limited[0] == limited[1]


def test_the_example_marks_what_is_trained_and_what_was_cut(bpe: Tokenizer, tmp_path: Path):
    shown = {}
    for name, talk in {"cut": ask("Why?", "river " * 200), "whole": ask("Why?", "Because.")}.items():
        context = CONTEXT if name == "cut" else len(encode_conversation(talk, bpe, "")[0][0])  # it fills its row
        prepare(tmp_path / name, bpe, [talk], context=context)
        ((source, shown[name]),) = show_examples(tmp_path / name / "rows", bpe, 1)
        assert source == "source-0"
    assert shown["whole"].plain == "<s><|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n⟦Because.<|im_end|>⟧\n"
    assert shown["cut"].plain.endswith("river⟧ [cut here: too long]")


@pytest.mark.parametrize(("form", "kept"), [
    ("chatml", {"right": 2, "drop_turns": 2, "drop": 1}),
    ("qwen3", {"right": 4, "drop_turns": 3, "drop": 1}),  # of the documents of a conversation those that fit are kept
])  # fmt: skip
@pytest.mark.parametrize("rule", ["right", "drop_turns", "drop"])
def test_what_is_too_long_is_cut_loses_turns_or_is_left_out(
    bpe: Tokenizer, tmp_path: Path, rule: str, form: str, kept: dict[str, int]
):
    tokenizer = bpe if form == "chatml" else ours(form)
    long = {"role": "assistant", "content": "<think>\n" + "capital " * 200 + "\n</think>\n\nParis."}
    talks = [[*THOUGHTFUL[:2], PLAIN[0], long, *THOUGHTFUL[2:]], PLAIN[:2]]
    summary = prepare(tmp_path, tokenizer, talks, context=200, truncation=rule)
    found = documents_in(tmp_path / "rows/train")
    assert len(found) == kept[rule]
    assert summary["truncated"] == (rule != "drop") and summary["dropped"] == (rule == "drop")
    fitting = [talks[1], *(talks[0][: 2 * turns] for turns in (1, 2, 3) if rule != "drop")]
    parts = [part for talk in fitting for part in encode_documents(talk, tokenizer, "")]
    assert all((tokens, trained) in parts for tokens, trained in found if len(tokens) < 200)
    cut = [tokens for tokens, _ in found if len(tokens) == 200]
    assert len(cut) == (rule == "right")
    assert all(tokens[:199] in [whole[:199] for whole, _ in parts] for tokens in cut)


def test_what_has_nothing_to_train_is_left_out_and_must_not_be_all(bpe: Tokenizer, tmp_path: Path):
    nothing = [ask("river " * 200, "Because."), ask("Why?", "x")[:1]]
    summary = prepare(tmp_path, bpe, [ask("Why?", "x"), *nothing])
    assert summary["dropped"] == 2 and summary["train"]["conversations"] == 1 and summary["validation"] == {}
    for talks in (nothing, []):
        with pytest.raises(UserError) as error:
            prepare(tmp_path, bpe, talks)
        assert error.value.where == "sft.sources" and error.value.fix


CALL = {"role": "assistant", "content": "I look.", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
SHAPES = [
    {"messages": ask("q", "a")},
    {"messages": [{**message, "tool_calls": None, "thinking": None} for message in ask("q", "a")]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"prompt": "q", "completion": "a"},
    {"prompt": ask("q", "")[:1], "completion": ask("", "a")[1:]},
    {"instruction": "q", "output": "a"},
    {"instruction": "q", "input": "", "output": "a"},
    {"instruction": "q", "context": "", "response": "a"},
    {"prompt": "q", "response": "a", "system": ""},
]


QUESTION, ANSWER = ask("q", "a")
NORMALISED = {**ANSWER, "reasoning_content": "café\n"}
READ = [
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]}, ask("q", "a")),
    (
        {"messages": [{"role": "developer", "content": "x"}, QUESTION, ANSWER]},
        [{"role": "system", "content": "x"}, QUESTION, ANSWER],
    ),
    *(
        ({"messages": [QUESTION, {**ANSWER, **flag}]}, [QUESTION, {**ANSWER, "train": False}])
        for flag in ({"weight": 0}, {"train": False})
    ),
    *((shape, ask("q", "a")) for shape in SHAPES),
    ({"instruction": "Put.", "input": "cafe\u0301\r\nriver", "output": "a"}, ask("Put.\n\ncafé\nriver", "a")),
    ({"system_prompt": "x", "prompt": "q", "response": "a"}, [{"role": "system", "content": "x"}, QUESTION, ANSWER]),
    *(
        ({"messages": [QUESTION, {**ANSWER, key: "cafe\u0301\r\n"}]}, [QUESTION, NORMALISED])
        for key in ("reasoning_content", "thinking", "reasoning")
    ),
]


@pytest.mark.parametrize(("item", "messages"), READ)
def test_the_shapes_of_published_sets_are_read_and_their_text_is_normalised(
    tmp_path: Path, item: dict, messages: list[dict[str, str]]
):
    assert next(read(write_lines(tmp_path / "c.jsonl", [item]))).messages == messages


def test_a_named_shape_is_taken_before_what_the_keys_tell(tmp_path: Path):
    path = write_lines(tmp_path / "c.jsonl", [{"messages": ask("q", "a"), "instruction": "i", "output": "o"}])
    assert next(read(path)).messages == ask("q", "a")
    assert next(read(path, format="alpaca")).messages == ask("i", "o")
    with pytest.raises(UserError) as error:
        next(read(path, format="sharegpt"))
    assert "sharegpt" in error.value.fix


def test_files_may_be_compressed_or_tables_or_folders_of_data_sets(tmp_path: Path):
    talks = [ask(f"q{i}", f"a{i}") for i in range(3)]
    lines = "".join(json.dumps({"id": i, "messages": talk}) + "\n" for i, talk in enumerate(talks)).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(lines))
    pq.write_table(pa.table({"messages": talks}), tmp_path / "d.parquet")
    assert [found.messages for found in read(tmp_path)] == talks * 4
    assert len(list(read(tmp_path / "[ab].jsonl*"))) == 6
    (tmp_path / "set").mkdir()
    (tmp_path / "d.parquet").rename(tmp_path / "set/train-00000-of-00001.parquet")
    found = list(read_conversations(ConversationSettings(dataset=str(tmp_path / "set"))))
    assert [each.messages for each in found] == talks and len({each.id for each in found}) == 3


BAD = [
    {"text": "x"},
    {"messages": []},
    {"messages": [{"role": "tool", "content": "x"}]},
    {"prompt": "x", "completion": None},
    {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
    {"messages": [{"role": "user", "content": "x", "reasoning": ["y"]}]},
    {"messages": [*ask("x", "y"), CALL]},
    {"conversations": [{"from": "gpt", "value": "", "function_call": {"name": "f"}}]},
]


@pytest.mark.parametrize("line", ["{broken", "[1]", *map(json.dumps, BAD)])
def test_a_bad_line_is_refused_by_number(tmp_path: Path, line: str):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(SHAPES[0]) + "\n\n" + line + "\n")
    with pytest.raises(UserError) as error:
        list(read(path))
    assert error.value.where == f"{path}:3" and "line 1" not in str(error.value)


@pytest.mark.parametrize("name", ["none*.jsonl", "a.jsonl.gz", "b.jsonl", "c"])
def test_missing_and_damaged_files_are_refused(tmp_path: Path, name: str):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(SHAPES[0]).encode() * 100)[:-20])
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    (tmp_path / "c").mkdir()
    with pytest.raises(UserError) as error:
        list(read(tmp_path / name))
    assert name in error.value.where


def test_bad_lines_stop_or_are_counted_with_the_first_reason(bpe: Tokenizer, tmp_path: Path):
    with pytest.raises(UserError):
        prepare(tmp_path, bpe, [ask("Why?", "x"), *BAD])
    with pytest.warns(UserWarned, match=r"source-0.jsonl:2"):
        summary = prepare(tmp_path, bpe, [ask("Why?", "x"), *BAD], on_error="skip")
    assert summary["bad"] == len(BAD) and summary["train"]["conversations"] == 1
    with pytest.raises(UserError) as error:
        prepare(tmp_path, bpe, BAD, on_error="skip")
    assert "no conversation" in error.value.fix  # why the first one cannot be used
    with pytest.warns(UserWarned):  # one that the template cannot write
        summary = prepare(tmp_path, ours("deepseek_r1_distill"), [PLAIN[:2], THOUGHTFUL[:2]], on_error="skip")
    assert summary["bad"] == summary["train"]["conversations"] == 1


@pytest.mark.parametrize(("form", "dropped"), [("chatml", 1), ("qwen2_5", 1), ("qwen3", 0)])
def test_reasoning_that_is_not_written_is_counted(
    bpe: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, dropped: int
):
    """But not what the answer says, too."""
    tokenizer = bpe if form == "chatml" else ours(form)
    talks = [REASONED[:2], [PLAIN[0], {**PLAIN[1], "reasoning": PLAIN[1]["content"]}], PLAIN]
    summary = prepare(tmp_path, tokenizer, talks, context=300)
    assert summary.get("reasoning_dropped", 0) == dropped and summary["train"]["conversations"] == 3
    print_counts(summary, "conversations")
    assert ("reasoning" in capsys.readouterr().out) == bool(dropped)


def test_answers_that_no_stop_ends_are_told_of(tmp_path: Path):
    tokenizer = ours("glm4moe")  # it writes nothing after an answer
    with pytest.warns(UserWarned, match="3 answers do not end"):
        assert prepare(tmp_path, tokenizer, [PLAIN, PLAIN[:2]], context=300)["unstopped"] == 3


def test_many_tasks_make_what_one_makes(bpe: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    talks = [ask(f"What is {i}?", f"{i}") for i in range(100)]
    found = []
    for size in (tuning_shards.TASK_BYTES, 2_000):
        monkeypatch.setattr(tuning_shards, "TASK_BYTES", size)
        summary = prepare(
            tmp_path, bpe, talks, {"path": str(tmp_path / "source-0.jsonl"), "max_examples": 40}, sample=0.8
        )
        parts = [sorted(documents_in(path)) for path in sorted((tmp_path / "rows/train").iterdir())]
        found.append((parts, {key: summary[key] for key in ("conversations", "not_sampled", "used")}))
    assert len(list((tmp_path / "rows/train/source-0").glob("tokens-*.npy"))) > 3
    assert found[0] == found[1]
