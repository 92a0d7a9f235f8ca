"""All chat templates that TRL ships, against transformers' own rendering; those that are refused stand here by name."""

import importlib.util
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from affinage.data.chat import drops_reasoning, encode_conversation
from affinage.data.hub_tokenizer import HubTokenizer
from affinage.errors import UserError

FOLDER = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s\"]+[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start_of_turn|end_of_turn|end_of_utterance)>"
)

QUESTIONS, ANSWERS = ("Where is\n the capital?", "été ?"), ("In Paris 🧀, où.", "12 + 7 = 19\n\nuser")
THOUGHTS = ("The capital, oh.\n\nI see.", "A sum; of two.")
PLAIN, REASONED = [], []
for question, answer, thought in zip(QUESTIONS, ANSWERS, THOUGHTS, strict=True):
    asked = {"role": "user", "content": question}
    PLAIN += [asked, {"role": "assistant", "content": answer}]
    REASONED += [asked, {"role": "assistant", "content": answer, "reasoning_content": thought}]
TALKS = {"plain": PLAIN, "system": [{"role": "system", "content": "Be brief."}, *PLAIN], "reasoning": REASONED}

NEMOTRON = ("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra")
# What the messages say of templates that are refused for every conversation, and for some.
LISTS, CLOCK = "the chat template does not write what message", "'strftime_now' is undefined"
ALWAYS = {
    **dict.fromkeys(("gptoss", "gptoss_training"), CLOCK),
    **dict.fromkeys(("idefics3", "idefics3_training", "smolvlm", "smolvlm_training"), LISTS),
    **dict.fromkeys(("llava_next", "llava_next_training"), "'str object' has no attribute 'text'"),
}
UNREASONED = {
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), "does not begin with '<think>': what the model would"),
    **dict.fromkeys(NEMOTRON, "with another text than it writes before it: what the model would have said is a guess"),
}
REFUSED = {
    "plain": ALWAYS | UNREASONED,
    "system": ALWAYS | UNREASONED | dict.fromkeys(("gemma", "gemma_training"), "System role not supported"),
    "reasoning": ALWAYS | {"qwen3_5_nothink": "does not begin with '</think>': what the model would have said"},
}
# A first line by which some of them are taken.
DATE = "{% macro strftime_now(format) %}2026-01-31{% endmacro %}\n"
THINKING, NOT_THINKING = "{% set enable_thinking = true %}\n", "{% set enable_thinking = false %}\n"
LED = [
    *((name, kind, DATE) for name in ("gptoss", "gptoss_training") for kind in TALKS),
    *((name, kind, NOT_THINKING) for name in NEMOTRON for kind in ("plain", "system")),
    ("qwen3_5_nothink", "reasoning", THINKING),
]
ENDLESS = {"glm4moe"}  # it writes nothing after an answer
BEGUN = {"deepseek_r1_distill", "deepseekv3"}  # they begin a thought, and never write one


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[HubTokenizer, PreTrainedTokenizerFast]:
    """One small tokenizer, as ours and as transformers', that has the special tokens of all templates."""
    special = sorted({*NAMES.values()}.union(*map(SPECIAL.findall, SOURCES.values())))
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=special, initial_alphabet=alphabet)
    fast.train_from_iterator([*QUESTIONS, *ANSWERS] * 9, trainer)
    fast.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return HubTokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)


def test_there_are_templates_and_every_refused_one_is_among_them():
    assert len(SOURCES) >= 72
    assert set().union(*REFUSED.values()) <= set(SOURCES)


@pytest.mark.parametrize("kind", TALKS)
@pytest.mark.parametrize("name", SOURCES)
def test_text_ids_and_mask_are_those_of_transformers(name: str, kind: str, both):
    if name in REFUSED[kind]:
        both[0].use_template(SOURCES[name])
        with pytest.raises(UserError, match=re.escape(REFUSED[kind][name])):
            encode_conversation(TALKS[kind], both[0], "")
    else:
        compare(name, SOURCES[name], TALKS[kind], *both)


@pytest.mark.parametrize(("name", "kind", "line"), LED)
def test_what_the_messages_advise_lets_a_template_be_taken(name: str, kind: str, line: str, both):
    assert name in REFUSED[kind]
    compare(name, line + SOURCES[name], TALKS[kind], *both)


def compare(name: str, source: str, messages: list[dict], ours: HubTokenizer, theirs: PreTrainedTokenizerFast):
    """Hold what is made of the messages to transformers' own texts, ids and masks, and the trained text to the answers.

    Some templates ask whether there is a clock; transformers has one.
    """
    write = partial(theirs.apply_chat_template, chat_template=source.replace("strftime_now is defined", "false"))
    ours.use_template(source)
    assert ours.template.render(messages) == write(messages, tokenize=False)
    documents = encode_conversation(messages, ours, "")
    places = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(documents) in (1, len(places))

    marked = re.search(r"\{%-?\s*generation\b", source)
    if marked:
        for (ids, trained), place in zip(documents, places[-len(documents) :], strict=True):
            told = write(messages[: place + 1], return_dict=True, return_assistant_tokens_mask=True)
            mask = np.array(told["assistant_masks"], bool)
            if len(documents) > 1:  # an answer that is written otherwise later is trained alone
                mask[: runs(mask)[-1][0]] = False
            assert ids == told["input_ids"] and trained == mask.tolist()
    said = []
    for ids, trained in documents:
        said += [(ids[:start], theirs.decode(ids[start:stop])) for start, stop in runs(trained)]
    assert len(said) == len(places)
    assert not any(ours.template.marks(ours).end in ids for ids, _ in documents)

    written = False
    for place, (before, text) in zip(places, said, strict=True):
        message = messages[place]
        content, thought = message["content"], message.get("reasoning_content")
        whole = write(messages[: place + 1], tokenize=False)
        written = bool(thought) and (thought in whole or name in BEGUN)
        assert text.count(content) == 1 and (not thought or text.count(thought) == written)
        others = [each["content"] for each in messages if each is not message]
        assert not any(other in text for other in others)
        if marked:
            continue
        assert before == write(messages[:place], add_generation_prompt=True, return_dict=False)
        start = write(messages[:place], add_generation_prompt=True, tokenize=False)
        after = text.partition(content)[2]
        assert after == "" if name in ENDLESS else re.fullmatch(f"({SPECIAL.pattern})+", after)
        if name in BEGUN:
            assert text == f"{thought}\n</think>\n\n{content}<｜end▁of▁sentence｜>"
        else:
            assert whole.startswith(start + text) and whole[len(start + text) :].strip() in ("", "</s>")
    assert drops_reasoning(messages, ours, "") == ("reasoning_content" in messages[-1] and not written)


def runs(trained) -> np.ndarray:
    """Beginning and end of each run of trained tokens, [runs, 2]."""
    return np.flatnonzero(np.diff(np.array([False, *trained, False]).astype(int))).reshape(-1, 2)
