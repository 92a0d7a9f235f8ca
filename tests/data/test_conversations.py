import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from affinage.data.chat import encode_conversation
from affinage.data.conversation_files import read_conversations
from affinage.data.conversation_shapes import Conversation
from affinage.data.conversations import prepare_conversations, show_examples
from affinage.data.feed import RowFeed
from affinage.data.packing import best_fit
from affinage.data.special_tokens import BOS, IM_END, PAD
from affinage.data.tokenizer import Tokenizer
from affinage.data.validation_rows import validation_sets
from affinage.errors import UserError, UserWarned
from affinage.recipe.tuning import ConversationSettings, SftSettings
from affinage.stages.texts import tell_dropped_reasoning

CONTEXT = 160


def settings(*sources: str | Path | dict[str, str], **others: object) -> SftSettings:
    schedule = {"peak": 1e-3, "floor": 1e-4}
    paths = [source if isinstance(source, dict) else str(source) for source in sources]
    return SftSettings.model_validate({"steps": 1, "batch": 1, "schedule": schedule, "sources": paths, **others})


def ask(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_lines(path: Path, items: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")
    return path


def read(path: str, **settings: str) -> Iterator[Conversation]:
    for found in read_conversations(ConversationSettings.model_validate({"path": path, **settings})):
        if isinstance(found, UserError):
            raise found
        yield found


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    talks = [ask(f"Where is the cat number {i}?", "behind the door " * (i % 5 + 1)) for i in range(60)]
    folder = tmp_path_factory.mktemp("chats")
    return write_lines(folder / "talks.jsonl", [{"id": f"t{i}", "messages": talk} for i, talk in enumerate(talks)])


def unpacked(folder: Path) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Every conversation of the rows with its mask."""
    found = []
    for rows_file in sorted(folder.rglob("rows-*.npy")):
        mask_file = rows_file.with_name(rows_file.name.replace("rows", "mask"))
        for row, mask in zip(np.load(rows_file), np.load(mask_file)):
            length = int(np.count_nonzero(row != PAD))
            begins = [*np.flatnonzero(row == BOS).tolist(), length]
            assert begins[0] == 0 and not mask[length:].any()
            for start, stop in itertools.pairwise(begins):
                found.append((tuple(row[start:stop].tolist()), tuple(mask[start:stop].astype(bool).tolist())))
    return found


def test_every_conversation_is_packed_once_with_its_mask(chats: Path, bpe: Tokenizer, tmp_path: Path):
    summary = prepare_conversations(settings(chats, held_out=0.1), bpe, tmp_path, context=CONTEXT, seed=0)
    found = unpacked(tmp_path / "train") + unpacked(tmp_path / "validation" / "talks")
    talks = [json.loads(line)["messages"] for line in chats.read_text().splitlines()]
    expected = [encode_conversation(talk, bpe, "You are a helpful assistant.")[0] for talk in talks]
    assert sorted(found) == sorted((tuple(tokens), tuple(trained)) for tokens, trained in expected)
    assert summary["conversations"] == 60 and summary["dropped"] == summary["truncated"] == 0
    assert summary["validation"]["talks"]["conversations"] == 6
    assert summary["train"]["rows"] < 54
    for part in (summary["train"], summary["validation"]["talks"]):
        assert part["trained_tokens"] > part["conversations"]
    answers = sum(len(talk[1]["content"].encode()) for talk in talks)
    assert summary["train"]["bytes"] + summary["validation"]["talks"]["bytes"] == answers


def test_the_feed_counts_the_assistants_tokens_only(chats: Path, bpe: Tokenizer, tmp_path: Path):
    summary = prepare_conversations(settings(chats), bpe, tmp_path, context=CONTEXT, seed=0)
    feed = RowFeed(tmp_path / "train", seed=0, batch=summary["train"]["rows"])
    batch = feed.batch(0)
    assert batch["loss_mask"].sum() == summary["train"]["trained_tokens"]
    assert not batch["loss_mask"][batch["tokens"] == PAD].any()
    (validation,) = validation_sets(tmp_path / "validation", batch=2).values()
    assert validation.bytes == summary["validation"]["talks"]["bytes"] > 0


def test_lineage_names_the_conversations_of_a_row(chats: Path, bpe: Tokenizer, tmp_path: Path):
    prepare_conversations(settings(chats, system_prompt="", held_out=0), bpe, tmp_path, context=CONTEXT, seed=0)
    rows = np.load(tmp_path / "train" / "talks" / "rows-00000-of-00001.npy")
    talks = {item["id"]: item["messages"] for item in map(json.loads, chats.read_text().splitlines())}
    spans = pq.read_table(tmp_path / "train" / "talks" / "documents.parquet").to_pylist()
    assert len(spans) == 60
    for span in spans:
        [(tokens, _)] = encode_conversation(talks[span["id"]], bpe, "")
        assert rows[span["row"], span["start"] : span["stop"]].tolist() == tokens
        assert span["source"] == "talks"


def test_the_long_are_cut_and_left_out_if_nothing_trained_remains(bpe: Tokenizer, tmp_path: Path):
    long_answer, long_question = ask("Why?", "river " * 200), ask("river " * 200, "Because.")
    path = write_lines(tmp_path / "c.jsonl", [{"messages": each} for each in (long_answer, long_question)])
    unmasked = write_lines(tmp_path / "u.jsonl", [{"messages": long_answer[:1]}])
    summary = prepare_conversations(settings(path, unmasked), bpe, tmp_path / "out", context=CONTEXT, seed=0)
    assert summary["truncated"] == 1 and summary["dropped"] == 2
    ((tokens, mask),) = unpacked(tmp_path / "out" / "train")
    assert len(tokens) == CONTEXT and mask[-1] and tokens[-1] != IM_END
    assert summary["validation"] == {}


def test_an_empty_mask_is_refused(bpe: Tokenizer, tmp_path: Path):
    path = write_lines(tmp_path / "c.jsonl", [{"messages": ask("Why?", "x")[:1]}] * 3)
    with pytest.raises(UserError, match="not one token of 3 conversations would be trained"):
        prepare_conversations(settings(path), bpe, tmp_path / "out", context=CONTEXT, seed=0)
    empty = write_lines(tmp_path / "empty.jsonl", [])
    with pytest.raises(UserError, match="0 conversations"):
        prepare_conversations(settings(empty), bpe, tmp_path / "out", context=CONTEXT, seed=0)


def test_equal_conversations_are_held_out_together_also_across_sources(bpe: Tokenizer, tmp_path: Path):
    talks = [ask(f"What is {i}?", f"{i}") for i in range(12)]
    first = write_lines(tmp_path / "first.jsonl", [{"messages": talk} for talk in talks] * 3)
    second = write_lines(tmp_path / "second.jsonl", [{"messages": talk} for talk in talks])
    prepare_conversations(settings(first, second, held_out=0.2), bpe, tmp_path / "out", context=CONTEXT, seed=0)
    train = set(unpacked(tmp_path / "out" / "train"))
    for name in ("first", "second"):
        held_out = set(unpacked(tmp_path / "out" / "validation" / name))
        assert held_out and not held_out & train


def test_the_pocket_world_is_read_from_its_folder(bpe: Tokenizer, tmp_path: Path):
    write_lines(tmp_path / "world" / "chat.jsonl", [{"messages": ask(f"{i}?", "yes")} for i in range(5)])
    chosen = settings("pocket-world")
    summary = prepare_conversations(
        chosen, bpe, tmp_path / "out", context=CONTEXT, seed=0, world_folder=tmp_path / "world"
    )
    assert list(summary["validation"]) == ["pocket-world"]
    with pytest.raises(UserError, match="pocket world"):
        prepare_conversations(chosen, bpe, tmp_path / "out", context=CONTEXT, seed=0)


def test_the_example_marks_trained_tokens_with_and_without_colour(chats: Path, bpe: Tokenizer, tmp_path: Path):
    prepare_conversations(settings(chats), bpe, tmp_path, context=CONTEXT, seed=0)
    ((name, example),) = show_examples(tmp_path, bpe, 1)
    assert name == "talks"
    assert example.plain.startswith("<s><|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n")
    assert example.plain.endswith("<|im_end|>⟧\n") and example.plain.count("⟦") == 1
    assert "<|im_start|>assistant\n⟦behind the door" in example.plain
    console = Console(force_terminal=True, color_system="truecolor", width=200)
    with console.capture() as capture:
        console.print(example)
    assert "\x1b[1;32m⟦behind" in capture.get()
    assert "[cut here" not in example.plain


def test_an_answer_that_was_cut_is_shown_as_cut_and_one_that_fills_its_row_is_not(bpe: Tokenizer, tmp_path: Path):
    talks = {"cut": ask("Why?", "river " * 200), "whole": ask("Why?", "Because.")}
    for name, talk in talks.items():
        paths = [write_lines(tmp_path / f"{name}.jsonl", [{"messages": talk}])]
        [(tokens, _)] = encode_conversation(talk, bpe, "")
        context = CONTEXT if name == "cut" else len(tokens)
        prepare_conversations(settings(*paths, system_prompt=""), bpe, tmp_path / name, context=context, seed=0)
    (_, cut), (_, whole) = (next(show_examples(tmp_path / name, bpe, 1)) for name in talks)
    assert cut.plain.endswith("river⟧ [cut here: too long]")
    assert whole.plain.endswith("<|im_end|>⟧\n")


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


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shapes_of_published_sets_are_read(tmp_path: Path, shape: dict[str, object]):
    (conversation,) = read(str(write_lines(tmp_path / "c.jsonl", [shape])))
    assert conversation.messages == ask("q", "a")


def test_instruction_and_input_are_one_question(tmp_path: Path):
    item = {"instruction": "Translate.", "input": "cafe\u0301\r\nriver", "output": "a"}
    (conversation,) = read(str(write_lines(tmp_path / "c.jsonl", [item])))
    assert conversation.messages == ask("Translate.\n\ncafé\nriver", "a")


def test_files_may_be_compressed_and_folders_or_globs(tmp_path: Path):
    lines = "".join(json.dumps({"id": i, "messages": ask("q", "a")}) + "\n" for i in range(2)).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(lines))
    assert len(list(read(str(tmp_path)))) == 6
    assert len(list(read(str(tmp_path / "[ab].jsonl*")))) == 4


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{broken", "not JSON: .* at character 2"),
        ("[1]", "not a JSON object"),
        ('{"text": "x"}', "no conversation"),
        ('{"messages": []}', "without messages"),
        ('{"messages": [1]}', "no object but 1"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "role 'tool'"),
        ('{"prompt": "x", "completion": null}', "content of message 2"),
        (
            json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
            "content of message 1",
        ),
        (
            json.dumps({"messages": [{"role": "user", "content": "x", "reasoning": ["y"]}]}),
            "reasoning_content of message 1",
        ),
        (
            json.dumps({"messages": [*ask("x", "y"), CALL]}),
            "a message has tool_calls, and calls of tools are not trained",
        ),
        (
            json.dumps({"conversations": [{"from": "gpt", "value": "", "function_call": {"name": "f"}}]}),
            "function_call",
        ),
    ],
)
def test_a_bad_line_is_refused_by_number(tmp_path: Path, line: str, complaint: str):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(SHAPES[0]) + "\n\n" + line + "\n")
    with pytest.raises(UserError, match=complaint) as error:
        list(read(str(path)))
    assert error.value.where == f"{path}:3" and "line 1" not in str(error.value)


def test_missing_and_damaged_files_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="there is no"):
        list(read(str(tmp_path / "none*.jsonl")))
    whole = gzip.compress(json.dumps(SHAPES[0]).encode() * 100)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-20])
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    for name in ("a.jsonl.gz", "b.jsonl"):
        with pytest.raises(UserError, match="damaged"):
            list(read(str(tmp_path / name)))


def test_a_named_shape_is_taken_before_what_the_keys_tell(tmp_path: Path):
    both = {"messages": ask("q", "a"), "instruction": "i", "output": "o"}
    path = str(write_lines(tmp_path / "c.jsonl", [both]))
    assert next(read(path)).messages == ask("q", "a")
    assert next(read(path, shape="alpaca")).messages == ask("i", "o")
    with pytest.raises(UserError, match="no conversation") as error:
        next(read(path, shape="sharegpt"))
    assert "sharegpt" in error.value.fix


def test_a_column_may_hold_the_system_message(tmp_path: Path):
    path = write_lines(tmp_path / "c.jsonl", [{"system_prompt": "Be brief.", "prompt": "q", "response": "a"}])
    assert next(read(str(path))).messages == [{"role": "system", "content": "Be brief."}, *ask("q", "a")]


def test_parquet_and_folders_of_datasets_are_read_as_lines_are(tmp_path: Path):
    talks = [ask(f"q{i}", f"a{i}") for i in range(3)]
    table = pa.table({"messages": talks})
    pq.write_table(table, tmp_path / "talks.parquet")
    assert [found.messages for found in read(str(tmp_path / "talks.parquet"))] == talks
    (tmp_path / "set").mkdir()
    pq.write_table(table, tmp_path / "set" / "train-00000-of-00001.parquet")
    source = ConversationSettings(dataset=str(tmp_path / "set"))
    found = [each for each in read_conversations(source) if isinstance(each, Conversation)]
    assert [each.messages for each in found] == talks
    assert len({each.id for each in found}) == 3


def test_bad_lines_are_counted_if_they_are_to_be_skipped(bpe: Tokenizer, tmp_path: Path):
    talk, told = ask("Why?", "x"), {"role": "tool", "content": "{}"}
    picture = [{"role": "user", "content": [{"type": "image"}]}, talk[1]]
    bad = [{"text": "x"}, *({"messages": each} for each in ([], [*talk, CALL], [*talk, told], picture))]
    path = write_lines(tmp_path / "c.jsonl", [{"messages": talk}, *bad])
    with pytest.raises(UserError, match="no conversation"):
        prepare_conversations(settings(path), bpe, tmp_path / "out", context=CONTEXT, seed=0)
    skipping = settings(path, bad_conversations="skip")
    summary = prepare_conversations(skipping, bpe, tmp_path / "out", context=CONTEXT, seed=0)
    assert summary["bad"] == len(bad) == 5 and summary["train"]["conversations"] == 1


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_beside_an_answer_is_read_under_its_names(tmp_path: Path, key: str):
    question, answer = ask("q", "a")
    path = write_lines(tmp_path / "c.jsonl", [{"messages": [question, {**answer, key: "cafe\u0301\r\nriver"}]}])
    assert next(read(str(path))).messages == [question, {**answer, "reasoning_content": "café\nriver"}]


def test_chatml_counts_reasoning_as_dropped(bpe: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    question, answer = ask("Why?", "The river rose.")
    talks = [[question, {**answer, "reasoning": "Rain."}], [question, {**answer, "reasoning": "The river rose."}]]
    path = write_lines(tmp_path / "c.jsonl", [{"messages": talk} for talk in talks])
    chosen = settings(path, held_out=0)
    summary = prepare_conversations(chosen, bpe, tmp_path / "out", context=CONTEXT, seed=0)
    assert summary["reasoning_dropped"] == 1 and summary["train"]["conversations"] == 2
    [expected] = encode_conversation([question, answer], bpe, chosen.system_prompt)
    assert unpacked(tmp_path / "out" / "train") == [tuple(map(tuple, expected))] * 2
    tell_dropped_reasoning(summary, "conversations")
    assert "conversations: 1 have reasoning that the chat template does not write" in capsys.readouterr().out


def test_a_sample_and_a_limit_are_drawn_by_content(bpe: Tokenizer, tmp_path: Path):
    talks = [{"messages": ask(f"What is {i}?", f"{i}")} for i in range(200)]
    path = write_lines(tmp_path / "c.jsonl", talks)
    again = write_lines(tmp_path / "d.jsonl", talks[::-1])

    def chosen(name: str, *sources: object, **others: object) -> set[object]:
        prepare_conversations(settings(*sources, held_out=0, **others), bpe, tmp_path / name, context=CONTEXT, seed=0)  # type: ignore[arg-type]
        return set(unpacked(tmp_path / name / "train"))

    sampled = chosen("a", path, sample=0.3)
    assert 35 <= len(sampled) <= 85 and sampled == chosen("b", again, sample=0.3)
    limited = chosen("c", {"path": str(path), "examples": 20})
    assert len(limited) == 20 and limited == chosen("d", {"path": str(again), "examples": 20})


def test_a_mixture_draws_its_shares_of_rows(bpe: Tokenizer, tmp_path: Path):
    for name, count in (("few", 20), ("many", 200)):
        write_lines(
            tmp_path / f"{name}.jsonl", [{"messages": ask(f"{name} {i}?", f"{name} {i}")} for i in range(count)]
        )
    chosen = settings(tmp_path / "few.jsonl", tmp_path / "many.jsonl", mixture={"few": 0.75, "many": 0.25})
    prepare_conversations(chosen, bpe, tmp_path / "out", context=CONTEXT, seed=0)
    assert chosen.mixture is not None
    stages = [(stage.from_step, stage.weights) for stage in chosen.mixture]
    feed = RowFeed(tmp_path / "out" / "train", seed=0, batch=8, mixture=stages)
    drawn = [folder for step in range(128) for folder, _ in feed.where(step)]
    assert drawn.count("few") == 768 and drawn.count("many") == 256


def test_what_is_too_long_loses_turns_or_is_left_out(bpe: Tokenizer, tmp_path: Path):
    talk = [message for i in range(12) for message in ask(f"What is {i}?", f"It is {i}, and nothing else.")]
    path = write_lines(tmp_path / "c.jsonl", [{"messages": talk}, {"messages": ask("Why?", "Because.")}])

    def made(rule: str) -> tuple[dict[str, object], list[tuple[tuple[int, ...], tuple[bool, ...]]]]:
        chosen = settings(path, too_long=rule, system_prompt="", held_out=0)
        summary = prepare_conversations(chosen, bpe, tmp_path / rule, context=CONTEXT, seed=0)
        return summary, unpacked(tmp_path / rule / "train")

    summary, found = made("turns")
    assert summary["truncated"] == 1 and summary["dropped"] == 0
    lengths = [len(encode_conversation(talk[: 2 * turns], bpe, "")[0][0]) for turns in range(1, 13)]
    turns = max(number for number, length in enumerate(lengths, 1) if length <= CONTEXT)
    assert tuple(encode_conversation(talk[: 2 * turns], bpe, "")[0][0]) in {tokens for tokens, _ in found}
    summary, found = made("drop")
    assert summary["truncated"] == 0 and summary["dropped"] == summary["too_long"] == 1 and len(found) == 1


def obvious_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Room left per set of bins, as the textbook has it."""
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rooms = [capacity - sum(lengths[i] for i in members) for members in bins]
        fitting = [room for room in rooms if room >= lengths[item]]
        if fitting:
            bins[rooms.index(min(fitting))].append(item)
        else:
            bins.append([item])
    return bins


@given(st.lists(st.integers(1, 20), max_size=40))
def test_packing_equals_the_textbooks(lengths: list[int]):
    bins, expected = best_fit(lengths, 20), obvious_best_fit(lengths, 20)
    # Which of several equally full bins takes an item is free; how full they become is not.
    assert sorted(sorted(lengths[i] for i in members) for members in bins) == sorted(
        sorted(lengths[i] for i in members) for members in expected
    ) or len(bins) == len(expected)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= 20 for members in bins)


def test_packing_refuses_what_cannot_fit():
    with pytest.raises(ValueError, match="does not fit"):
        best_fit([5, 21], 20)


def test_what_cannot_be_used_is_told_with_its_first_reason(bpe: Tokenizer, tmp_path: Path):
    bad = [{"text": "x"}, {"messages": []}]
    some = write_lines(tmp_path / "some.jsonl", [{"messages": ask("Why?", "x")}, *bad])
    with pytest.warns(UserWarned, match=r"2 conversations cannot be used, first: .*some.jsonl.*no conversation"):
        prepare_conversations(settings(some, bad_conversations="skip"), bpe, tmp_path / "out", context=CONTEXT, seed=0)
    none = settings(write_lines(tmp_path / "none.jsonl", bad), bad_conversations="skip")
    with pytest.raises(UserError, match="not one token of 2") as wrong:
        prepare_conversations(none, bpe, tmp_path / "out", context=CONTEXT, seed=0)
    assert "2 of them cannot be used, the first as " in wrong.value.fix and "no conversation" in wrong.value.fix
