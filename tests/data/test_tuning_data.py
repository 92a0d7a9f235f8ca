"""Conversations and pairs of answers to rows: all that is read is packed once, with the mask of its own encoding."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from template_forms import PLAIN, REASONED, THOUGHTFUL, ours, with_template
from test_conversations import BAD

from affinage.config.data import DecontaminateSettings
from affinage.config.training import DpoSettings, SftSettings
from affinage.data import tuning_data
from affinage.data.chat import encode_document, encode_prompt
from affinage.data.dataloader import DataLoader, ValidationRows, make_batch
from affinage.data.decontaminate import BenchmarkItem, write_items
from affinage.data.token_shards import TokenShards, find_shard_folders
from affinage.data.tokenizer import Tokenizer
from affinage.data.tuning_data import documents_in_a_row, prepare_tuning_data
from affinage.errors import UserWarned
from affinage.report.examples import show_examples
from run_affinage import refused
from source_forms import write_lines

SETTINGS = {"steps": 1, "batch_size": 1, "schedule": {"peak_lr": 1e-3, "min_lr": 0}, "validation_fraction": 0}


def prepare(folder: Path, tokenizer: Tokenizer, *sources, seq_len: int = 160, searched=None, pairs=False, **others):
    """`sources` are settings, files, or lists of lines or conversations that make a file."""
    found: list[object] = []
    for number, source in enumerate(sources):
        if isinstance(source, list):
            lines = [each if isinstance(each, dict) else {"messages": each} for each in source]
            source = write_lines(folder / f"source-{number}.jsonl", lines)
        found.append(source if isinstance(source, dict) else str(source))
    settings = (DpoSettings if pairs else SftSettings).model_validate(SETTINGS | {"sources": found} | others)
    more = {"seq_len": seq_len, "system_prompt": "", "searched": searched}
    return prepare_tuning_data(settings, tokenizer, folder / "rows", **more)


def documents_in(folder: Path) -> list[tuple[list[int], list[bool]]]:
    """Tokens and loss mask of every document of the rows of a folder that has something to train, row after row."""
    found = []
    for path in find_shard_folders(folder).values():
        files = TokenShards(path)
        batch = make_batch(*files.read(np.arange(files.rows)), np.arange(files.rows), files.marks)
        for row, mask, ids in zip(batch["tokens"], batch["loss_mask"].astype(bool), batch["segment_ids"], strict=True):
            for number in np.unique(ids):
                here = (ids == number) & ((row != files.marks.pad) | (files.marks.pad == files.marks.end))
                if mask[here].any():
                    found.append((row[here].tolist(), mask[here].tolist()))
    return found


def ask(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


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
    """Also where </s> ends a turn, and where the template leaves out the reasoning of earlier answers."""
    tokenizer = bpe if form == "chatml" else ours(form)
    reasoned = form == "qwen3"
    talks = []
    for number in range(30):
        talk = (REASONED if number % 4 < 2 else THOUGHTFUL) if reasoned else PLAIN
        talks.append([{**talk[0], "content": f"{number}: où ?"}, *talk[1 : 2 + 2 * (number % 2)]])
    with pytest.warns(UserWarned, match="15 answers are not trained") if reasoned else nullcontext():
        summary = prepare(tmp_path, tokenizer, talks, validation_fraction=0.2, seq_len=400)
    train, held_out = (documents_in(tmp_path / "rows" / part) for part in ("train", "validation/source-0"))
    assert sorted(train + held_out) == sorted(encode_document(talk, tokenizer, "") for talk in talks)
    assert summary["conversations"] == 30 and summary["dropped"] == summary["truncated"] == 0
    validation = summary["validation"]["source-0"]
    assert 0 < validation["conversations"] == 30 - summary["train"]["conversations"]

    batch = DataLoader(tmp_path / "rows/train", seed=0, batch=summary["train"]["rows"]).batch(0)
    for part, documents in ((summary["train"], train), (validation, held_out)):
        assert part["trained_tokens"] == sum(sum(trained) for _, trained in documents)
        assert part["bytes"] == sum(tokenizer.piece_bytes[t][m].sum() for t, m in documents)
        assert part["rows"] < len(documents)
    assert batch["loss_mask"].sum() == summary["train"]["trained_tokens"]
    assert ValidationRows(tmp_path / "rows/validation/source-0", batch=2).bytes == validation["bytes"]

    rows = np.load(tmp_path / "rows/train/source-0/tokens-00000-of-00001.npy")
    for span in pq.read_table(tmp_path / "rows/train/source-0/documents-00000-of-00001.parquet").to_pylist():
        tokens, _ = encode_document(talks[int(span["id"].rpartition("#")[2]) - 1], tokenizer, "")
        assert rows[span["row"], span["start"] : span["stop"]].tolist() == tokens


def test_equal_conversations_are_held_out_together(bpe: Tokenizer, tmp_path: Path):
    talks = [ask(f"What is {i}?", f"{i}") for i in range(12)]
    prepare(tmp_path, bpe, talks * 3, talks, validation_fraction=0.2)
    train = documents_in(tmp_path / "rows/train")
    for name in ("source-0", "source-1"):
        held_out = documents_in(tmp_path / "rows/validation" / name)
        assert held_out and not any(each in train for each in held_out)


def test_samples_and_limits_are_drawn_by_content_whatever_the_order_and_the_tasks(bpe, tmp_path: Path, monkeypatch):
    lines = [{"messages": ask(f"What is {i}?", f"{i}")} for i in range(100)]
    paths = write_lines(tmp_path / "a.jsonl", lines), write_lines(tmp_path / "b.jsonl", lines[::-1])
    found = []
    for path, size in ((paths[0], tuning_data.TASK_BYTES), (paths[1], tuning_data.TASK_BYTES), (paths[0], 2_000)):
        monkeypatch.setattr(tuning_data, "TASK_BYTES", size)
        sources = {"path": str(path), "name": "all"}, {"path": str(path), "max_examples": 40, "name": "some"}
        summary = prepare(tmp_path, bpe, *sources, sample=0.8)
        parts = [sorted(documents_in(path)) for path in sorted((tmp_path / "rows/train").iterdir())]
        found.append((parts, {key: summary[key] for key in ("conversations", "not_sampled", "used")}))
    assert 65 <= len(found[0][0][0]) <= 95 and len(found[0][0][1]) == 32
    assert found[0] == found[1] == found[2]
    assert len(list((tmp_path / "rows/train/all").glob("tokens-*.npy"))) > 3


@pytest.mark.parametrize("form", ["chatml", "mistral"])
@pytest.mark.parametrize("rule", ["right", "drop_turns", "drop"])
def test_conversations_that_are_too_long_are_cut_lose_turns_or_are_left_out(bpe, tmp_path: Path, rule: str, form: str):
    tokenizer = bpe if form == "chatml" else ours(form)
    long = {"role": "assistant", "content": "<think>\n" + "capital " * 200 + "\n</think>\n\nParis."}
    talks = [[*THOUGHTFUL[:2], PLAIN[0], long, *THOUGHTFUL[2:]], PLAIN[:2]]
    summary = prepare(tmp_path, tokenizer, talks, seq_len=200, truncation=rule)
    found = documents_in(tmp_path / "rows/train")
    assert len(found) == 2 - (rule == "drop")
    assert summary["truncated"] == (rule != "drop") and summary["dropped"] == (rule == "drop")
    fitting = [talks[1], *(talks[0][: 2 * turns] for turns in (1, 2, 3) if rule != "drop")]
    parts = [encode_document(talk, tokenizer, "") for talk in fitting]
    assert all((tokens, trained) in parts for tokens, trained in found if len(tokens) < 200)
    cut = [tokens for tokens, _ in found if len(tokens) == 200]
    assert len(cut) == (rule == "right")
    assert all(tokens[:199] in [whole[:199] for whole, _ in parts] for tokens in cut)


def test_conversations_with_nothing_to_train_are_left_out_and_must_not_be_all(bpe: Tokenizer, tmp_path: Path):
    nothing = [ask("river " * 200, "Because."), ask("Why?", "x")[:1]]
    summary = prepare(tmp_path, bpe, [ask("Why?", "x"), *nothing])
    assert summary["dropped"] == 2 and summary["train"]["conversations"] == 1 and summary["validation"] == {}
    (tmp_path / "blank.jsonl").write_text("\n")
    for source, held in ((nothing, "2 have no answer"), (tmp_path / "blank.jsonl", "JSON object a line")):
        mistake = refused(prepare, tmp_path, bpe, source)
        assert mistake.where == "sft.sources" and held in mistake.fix


def test_bad_lines_stop_or_are_counted_with_the_first_reason(bpe: Tokenizer, tmp_path: Path):
    refused(prepare, tmp_path, bpe, [ask("Why?", "x"), *BAD])
    with pytest.warns(UserWarned, match=r"source-0.jsonl#2"):
        summary = prepare(tmp_path, bpe, [ask("Why?", "x"), *BAD], on_error="skip")
    assert summary["bad"] == len(BAD) and summary["train"]["conversations"] == 1
    mistake = refused(prepare, tmp_path, bpe, BAD, on_error="skip")
    assert "no conversation" in mistake.fix  # why the first one cannot be used
    with pytest.warns(UserWarned):  # one that the template cannot write
        summary = prepare(tmp_path, ours("mistral"), [[PLAIN[0], *PLAIN[:2]], PLAIN[:2]], on_error="skip")
    assert summary["bad"] == summary["train"]["conversations"] == 1


@pytest.mark.parametrize(("form", "dropped"), [("qwen2_5", 2), ("qwen3", 1)])
def test_reasoning_that_is_not_written_is_counted(tmp_path: Path, form: str, dropped: int):
    early = [*REASONED[:2], *PLAIN[2:]]  # which Qwen 3 writes of the last answer alone
    summary = prepare(tmp_path, ours(form), [REASONED[:2], PLAIN, early], seq_len=300)
    assert summary.get("reasoning_dropped", 0) == dropped and summary["train"]["conversations"] == 3


@pytest.mark.parametrize(("written", "differ"), [("Assistant: ", 2), ("Assistant:", 0)])
def test_answers_whose_first_token_takes_the_end_of_the_prompt_are_counted(tmp_path: Path, written: str, differ: int):
    template = "{% for m in messages %}{{ 'User: ' if m.role == 'user' else 'WRITTEN' }}{{ m.content + '<|im_end|>' }}"
    template += "{% endfor %}{% if add_generation_prompt %}{{ 'WRITTEN' }}{% endif %}"
    tokenizer = with_template(template.replace("WRITTEN", written))
    summary = prepare(tmp_path, tokenizer, [ask("Who?", "the cat"), ask("Where?", "the capital")], seq_len=300)
    assert summary.get("prompt_differs", 0) == differ


def test_answers_that_no_stop_ends_and_characters_without_a_token_are_warned_of(tmp_path: Path, characters: Tokenizer):
    tokenizer = ours("glm4moe")  # it writes nothing after an answer
    with pytest.warns(UserWarned, match="3 answers do not end"):
        assert prepare(tmp_path, tokenizer, [PLAIN, PLAIN[:2]], seq_len=300)["unstopped"] == 3
    with pytest.warns(UserWarned, match="4 characters cannot be spelled"):
        assert prepare(tmp_path, characters, [ask("漢 the 漢", "字"), ask("the", "字")])["unspelled"] == 4


@pytest.mark.parametrize("form", ["chatml", "qwen3"])
def test_both_sides_are_trained_after_the_prompt_alone_and_pairs_share_rows(bpe: Tokenizer, tmp_path: Path, form: str):
    """Each side follows what the model would be asked with, without the reasoning that a template leaves out."""
    tokenizer = bpe if form == "chatml" else ours(form)
    talk, begin = (THOUGHTFUL, "<think>\nOh.\n</think>\n\n") if form == "qwen3" else (PLAIN, "")
    prompts = [[*talk[:2], {"role": "user", "content": f"{number}?"}] for number in range(6)]
    items = [{"prompt": p, "chosen": f"{begin}yes {n}", "rejected": f"{begin}no"} for n, p in enumerate(prompts)]
    prepare(tmp_path, tokenizer, items, pairs=True, seq_len=400)
    assert len(np.load(tmp_path / "rows/train/source-0/tokens-00000-of-00001.npy")) < 6
    assert documents_in_a_row(tmp_path / "rows") >= 4
    found = [(tokens[: mask.index(True)], [t for t, m in zip(tokens, mask, strict=True) if m])
             for tokens, mask in documents_in(tmp_path / "rows/train")]  # fmt: skip
    asked = [encode_prompt(prompt, tokenizer, "") for prompt in prompts]
    said = {}
    for (before, chosen), (again, rejected) in zip(found[0::2], found[1::2], strict=True):
        assert before == again
        said[asked.index(before)] = [tokenizer.decode(side).strip() for side in (chosen, rejected)]
    assert said == {number: [f"{begin}yes {number}", f"{begin}no"] for number in range(6)}


@pytest.mark.parametrize("form", ["chatml", "qwen3"])
def test_long_pairs_are_cut_on_both_sides_or_left_out_as_identical_ones_are(bpe: Tokenizer, tmp_path: Path, form: str):
    tokenizer = bpe if form == "chatml" else ours(form)
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    long = {"prompt": "q", "chosen": "capital " * 100, "rejected": "No. " + "capital " * 100}
    cut = prepare(tmp_path, tokenizer, [long, pair], pairs=True, seq_len=150)
    assert cut["truncated"] == 1 and cut["train"]["conversations"] == 2
    assert [len(tokens) for tokens, _ in documents_in(tmp_path / "rows/train")].count(75) == 2
    shown = [(source, text.plain) for source, text in show_examples(tmp_path / "rows", tokenizer, 2)]
    assert [(source, text.count("⟧")) for source, text in shown] == [("source-0", 2)] * 2
    assert any("<|im_start|>user\nq<|im_end|>" in text and "a<|im_end|>⟧" in text for _, text in shown)
    dropped = prepare(tmp_path, tokenizer, [long, {**pair, "rejected": "a"}, pair], pairs=True, truncation="drop")
    assert (dropped["dropped"], dropped["identical"], dropped["train"]["conversations"]) == (2, 1, 1)
    refused(prepare, tmp_path, tokenizer, [{**pair, "rejected": "a"}], pairs=True, match="1 are pairs of equal answers")
