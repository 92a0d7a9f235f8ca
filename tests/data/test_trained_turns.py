"""Of templates that write earlier turns otherwise once more follows, every answer is trained once, where it is said."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from template_forms import LATER, MARKED, PHI3, QWEN, SYSTEM, THINKING, USER, folder_of, ours, theirs

from affinage.data.chat import drops_reasoning, encode_conversation, encode_documents
from affinage.data.conversations import prepare_conversations, show_examples
from affinage.data.feed import RowFeed
from affinage.data.hub_tokenizer import HubTokenizer
from affinage.data.preferences import prepare_preferences
from affinage.errors import UserError
from affinage.recipe.tuning import DpoSettings, SftSettings

THOUGHT = {"role": "assistant", "content": "<think>\nWhere, oh où ?\n</think>\n\nParis 🧀."}
SUM = {"role": "assistant", "content": "<think>\n12 + 7.\n\nThat is 19.\n</think>\n\n19\n\nuser"}
PLAIN = {"role": "assistant", "content": "La capitale"}
SETTINGS = {"steps": 1, "batch": 1, "schedule": {"peak": 1, "floor": 0}, "held_out": 0}


def told(form: str) -> list[list[dict]]:
    talks = [
        [USER, THOUGHT],
        [USER, THOUGHT, USER, SUM, USER, THOUGHT],
        [SYSTEM, USER, SUM, LATER[0], THOUGHT, USER],
    ]
    # Qwen 3's writes an empty thought where there is none; R1's begins one, so that such an answer would be a guess.
    return [*talks, [USER, PLAIN, USER, THOUGHT], [USER, PLAIN, USER, PLAIN]] if form == "qwen-3" else talks


def answers_of(form: str, messages: list[dict]) -> list[tuple[list[int], list[int]]]:
    """Of every answer what transformers asks the model with, and what the model must say then."""
    found, tokenizer = [], theirs(form)
    for number in [n for n, message in enumerate(messages) if message["role"] == "assistant"]:
        asked = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, return_dict=False)
        if form == "qwen-3":
            whole = tokenizer.apply_chat_template(messages[: number + 1], return_dict=False)
            assert whole[: len(asked)] == asked and tokenizer.decode(whole[-1:]) == "\n"
            found.append((asked, whole[len(asked) : -1]))
        else:
            said = messages[number]["content"].removeprefix("<think>\n") + tokenizer.eos_token
            found.append((asked, tokenizer(said, add_special_tokens=False)["input_ids"]))
    return found


@pytest.mark.parametrize("form", THINKING)
def test_every_token_of_an_answer_is_trained_once_after_what_generation_sees(form: str):
    for messages in told(form):
        found = []
        for ids, trained in encode_conversation(messages, ours(form), ""):
            edges = np.flatnonzero(np.diff(np.array([False, *trained, False]).astype(int)))
            found += [(ids[:start], ids[start:stop]) for start, stop in edges.reshape(-1, 2)]
        assert found == answers_of(form, messages)


def beside(message: dict) -> dict:
    """Its reasoning, if any, beside its content."""
    thought, mark, content = message["content"].removeprefix("<think>\n").partition("\n</think>\n\n")
    return {**message, "content": content, "reasoning_content": thought} if mark else message


@pytest.mark.parametrize("form", THINKING)
def test_reasoning_beside_the_content_is_trained_as_if_it_stood_in_it(form: str):
    for messages in told(form):
        apart = [beside(message) for message in messages]
        assert (apart != messages) == any("<think>" in message["content"] for message in messages)
        assert not drops_reasoning(apart, ours(form), "")
        # R1's leaves the newlines after the reasoning of earlier turns where it stood in them.
        found, expected = (encode_conversation(each, ours(form), "") for each in (apart, messages))
        assert found == expected if form == "qwen-3" else said(found) == said(expected)


def said(parts: list[tuple[list[int], list[bool]]]) -> list[list[int]]:
    return [[i for i, t in zip(*part, strict=True) if t] for part in parts]


def test_reasoning_never_becomes_a_control_token():
    spelled = {**PLAIN, "reasoning_content": "oh<|im_end|>\n<|im_start|>user"}
    [(ids, _)] = encode_conversation([USER, spelled], ours("qwen-3"), "")
    [(plain, _)] = encode_conversation([USER, PLAIN], ours("qwen-3"), "")
    for piece in ("<|im_start|>", "<|im_end|>"):
        assert ids.count(ours("qwen-3").controls[piece]) == plain.count(ours("qwen-3").controls[piece])
    assert not drops_reasoning([USER, spelled], ours("qwen-3"), "")


def test_what_ends_a_document_is_no_token_that_ends_a_thought():
    tokenizer = HubTokenizer(folder_of("qwen"))
    said = "{{ message.content + '<|im_end|>' }}"
    tokenizer.use_template("{% for message in messages %}" + said + "{% endfor %}")
    assert tokenizer.template.marks(tokenizer).end == tokenizer.controls["<|endoftext|>"]
    thought = "{% if message.reasoning_content %}{{ message.reasoning_content + '<|endoftext|>' }}{% endif %}"
    tokenizer.use_template("{% for message in messages %}" + thought + said + "{% endfor %}")
    assert tokenizer.template.marks(tokenizer).end == tokenizer.controls["<|im_start|>"]


def test_reasoning_that_is_not_written_is_counted(tmp_path: Path):
    talks = [[USER, beside(THOUGHT), USER, PLAIN], [USER, PLAIN], [USER, {**PLAIN, "thinking": None}]]
    assert "reasoning_dropped" not in prepare(tmp_path, talks)
    summary = prepare(tmp_path, talks, form="qwen")
    assert summary["reasoning_dropped"] == summary["by_source"]["chats"]["reasoning_dropped"] == 1
    assert summary["train"]["conversations"] == 3
    pair = {"prompt": [USER, beside(SUM), USER], "chosen": [beside(THOUGHT)], "rejected": [PLAIN]}
    path = tmp_path / "pairs.jsonl"
    chosen = DpoSettings.model_validate({**SETTINGS, "sources": [str(path)]})
    for prompt, form, dropped in ((pair["prompt"], "qwen-3", 1), ([USER], "qwen-3", 0), ([USER], "qwen", 1)):
        path.write_text(json.dumps({**pair, "prompt": prompt}) + "\n")
        summary = prepare_preferences(chosen, ours(form), tmp_path / "rows", context=400, seed=0, system_prompt="")
        assert summary.get("reasoning_dropped", 0) == dropped  # Qwen 3's leaves out that of earlier turns


def test_answers_that_the_template_leaves_as_they_are_stay_in_one_text():
    tokenizer = ours("qwen-3")
    asked = [USER, PLAIN, USER, THOUGHT, USER, SUM]
    assert len(encode_conversation(asked, tokenizer, "")) == 3
    shy = HubTokenizer(folder_of("qwen"))  # it leaves reasoning alone out
    later = "message.content.split('</think>')[-1]"
    shy.use_template(QWEN.replace("message.content +", f"(message.content if loop.last else {later}) +"))
    first, second = encode_conversation(asked, shy, "")
    said = [shy.decode([i for i, t in zip(*each, strict=True) if t], keep_special=True) for each in (first, second)]
    assert said[0] == THOUGHT["content"] + "<|im_end|>"
    assert said[1] == PLAIN["content"] + "<|im_end|>" + SUM["content"] + "<|im_end|>"
    shy.use_template(QWEN)
    assert len(encode_conversation(asked, shy, "")) == 1


def test_blocks_of_generation_are_unrolled_as_well():
    tokenizer = HubTokenizer(folder_of("qwen"))
    tokenizer.use_template(
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ (message.content if loop.last else message.content.split('</think>')[-1]) + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    parts = encode_conversation([USER, THOUGHT, USER, SUM], tokenizer, "")
    said = [tokenizer.decode([i for i, t in zip(*each, strict=True) if t], keep_special=True) for each in parts]
    assert said == [answer["content"] + "<|im_end|>" for answer in (THOUGHT, SUM)]


def test_a_block_around_the_end_of_the_text_is_of_the_last_answer():
    tokenizer = HubTokenizer(folder_of("phi-3"))
    blocks = PHI3.replace(
        "message['content'] + '<|end|>\n' }}",
        "'' }}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|end|>\n' }}{% endgeneration %}{% else %}"
        "{{ message['content'] + '<|end|>\n' }}{% endif %}",
    )
    tokenizer.use_template(blocks.replace("{{ eos_token }}", "{% generation %}{{ eos_token }}{% endgeneration %}"))
    parts = encode_conversation([USER, THOUGHT, USER, SUM], tokenizer, "")
    said = [tokenizer.decode([i for i, t in zip(*each, strict=True) if t], keep_special=True) for each in parts]
    assert said == [answer["content"] + "<|end|>\n<|endoftext|>" for answer in (THOUGHT, SUM)]


def test_a_conversation_that_the_assistant_begins_is_trained_by_its_blocks():
    tokenizer = HubTokenizer(folder_of("qwen"))
    tokenizer.use_template("{{ messages[0].role[:0] }}" + MARKED)  # of no messages such templates can make nothing
    ((ids, trained),) = encode_conversation([PLAIN, USER, PLAIN], tokenizer, "")
    said = tokenizer.decode([i for i, t in zip(ids, trained, strict=True) if t], keep_special=True)
    assert said == 2 * (PLAIN["content"] + "<|im_end|>")


def test_what_the_model_would_have_said_is_not_guessed():
    with pytest.raises(UserError, match=r"asks for message 4 with another text .* does not begin with '<think>'"):
        encode_conversation([USER, THOUGHT, USER, PLAIN], ours("deepseek-r1"), "")


def test_a_template_that_leaves_out_what_is_said_is_refused():
    tokenizer = HubTokenizer(folder_of("qwen"))
    parts = "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    tokenizer.use_template("{% for message in messages %}<|im_start|>" + parts + "<|im_end|>{% endfor %}")
    with pytest.raises(UserError, match="does not write what message 2 says"):
        encode_conversation([USER, THOUGHT], tokenizer, "")
    marked = "<|im_start|>{% generation %}" + parts + "<|im_end|>{% endgeneration %}"
    tokenizer.use_template("{% for message in messages %}" + marked + "{% endfor %}")
    with pytest.raises(UserError, match="does not write what message 2 says"):
        encode_conversation([USER, THOUGHT], tokenizer, "")


def write(path: Path, talks: list[list[dict]]) -> Path:
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path


def prepare(folder: Path, talks: list[list[dict]], *, context: int = 300, form: str = "qwen-3", **settings: object):
    source = {"path": str(write(folder / "chats.jsonl", talks)), "examples": settings.pop("examples", None)}
    chosen = SftSettings.model_validate({**SETTINGS, "system_prompt": "", "sources": [source], **settings})
    return prepare_conversations(chosen, ours(form), folder / "rows", context=context, seed=0)


def segments(folder: Path) -> list[tuple[list[int], list[bool]]]:
    rows = len(np.load(next(folder.glob("*/rows-*.npy"))))
    batch = RowFeed(folder, seed=0, batch=rows).batch(0)
    found = []
    for tokens, ids, mask in zip(batch["tokens"], batch["segment_ids"], batch["loss_mask"], strict=True):
        parts = [(tokens[ids == number].tolist(), mask[ids == number].astype(bool).tolist()) for number in set(ids)]
        found += [part for part in parts if any(part[1])]
    return found


@pytest.mark.parametrize("form", THINKING)
def test_unrolled_conversations_share_rows_and_are_counted(form: str, tmp_path: Path):
    talks = told(form)
    summary = prepare(tmp_path, talks, form=form)
    expected = [part for talk in talks for part in encode_documents(talk, ours(form), "")]
    assert sorted(segments(tmp_path / "rows/train")) == sorted(expected)
    assert summary["unrolled"] == len(talks) - 1 and summary["train"]["conversations"] == len(talks)
    assert summary["dropped"] == summary["truncated"] == 0
    ((_, shown),) = show_examples(tmp_path / "rows", ours(form), 1, documents=99)
    console = Console(width=10_000)
    with console.capture() as capture:
        console.print(shown, markup=False)
    assert "That is 19." in "".join(part.partition("⟧")[0] for part in capture.get().split("⟦")[1:])


def test_parts_of_a_conversation_are_drawn_and_held_out_together(tmp_path: Path):
    talks = [[USER, THOUGHT, {"role": "user", "content": str(number)}, SUM] for number in range(12)]
    summary = prepare(tmp_path, talks, examples=7)
    assert summary["not_sampled"] == 5 and summary["train"]["conversations"] == 7
    assert len(segments(tmp_path / "rows/train")) == 14
    summary = prepare(tmp_path, [[*talk[2:], *talk[:2]] for talk in talks], held_out=0.3)
    held_out = segments(tmp_path / "rows/validation")
    assert summary["train"]["conversations"] + summary["validation"]["chats"]["conversations"] == 12
    assert len(held_out) % 2 == 0 and len(held_out) + len(segments(tmp_path / "rows/train")) == 24


def test_of_an_unrolled_conversation_what_is_too_long_is_cut_or_left_out(tmp_path: Path):
    long = {"role": "assistant", "content": "<think>\n" + "capital " * 200 + "\n</think>\n\nParis."}
    talks = [[USER, THOUGHT, USER, long, USER, SUM], [USER, PLAIN]]
    parts = [part for talk in talks for part in encode_documents(talk, ours("qwen-3"), "")]
    short = [part for part in parts if len(part[0]) <= 150]
    assert len(parts) == 4 and len(short) == 3
    for rule, kept in (("cut", 4), ("turns", 3), ("drop", 1)):
        summary = prepare(tmp_path, talks, context=150, too_long=rule)
        found = segments(tmp_path / "rows/train")
        assert len(found) == kept and (rule == "drop" or all(part in found for part in short))
        assert summary["truncated"] == (rule != "drop") and summary["dropped"] == (rule == "drop")


def test_a_line_that_the_template_cannot_write_is_skipped_where_one_says_so(tmp_path: Path):
    talks = [[USER, PLAIN], [USER, THOUGHT]]
    with pytest.raises(UserError, match="does not begin with '<think>'"):
        prepare(tmp_path, talks, form="deepseek-r1")
    summary = prepare(tmp_path, talks, form="deepseek-r1", bad_conversations="skip")
    assert summary["bad"] == summary["train"]["conversations"] == 1


@pytest.mark.parametrize("form", THINKING)
def test_a_side_of_a_pair_is_what_the_model_would_say(form: str, tmp_path: Path):
    pair = {"prompt": [USER, SUM, USER], "chosen": [THOUGHT], "rejected": [SUM]}
    path = tmp_path / "pairs.jsonl"
    chosen = DpoSettings.model_validate({**SETTINGS, "sources": [str(path)]})
    path.write_text(json.dumps(pair) + "\n")
    prepare_preferences(chosen, ours(form), tmp_path / "rows", context=400, seed=0, system_prompt="")
    sides = [answers_of(form, [*pair["prompt"], *pair[side]])[-1] for side in ("chosen", "rejected")]
    found = segments(tmp_path / "rows/train")
    assert [([i for i, t in zip(*each, strict=True) if t]) for each in found] == [said for _, said in sides]
    assert all(ids[: len(asked)] == asked for (ids, _), (asked, _) in zip(found, sides, strict=True))
    path.write_text(json.dumps(pair | {"chosen": [THOUGHT, USER, SUM]}) + "\n")
    with pytest.raises(UserError, match="several answers"):
        prepare_preferences(chosen, ours(form), tmp_path / "rows", context=400, seed=0, system_prompt="")
