"""Published chat templates, and small tokenizers that have their special tokens: ours and the same as transformers'."""

import importlib.util
import json
import re
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from affinage.data.tokenizer import Tokenizer
from source_forms import write_files

PIECES = {  # of tokenizers as SentencePiece's, in which </s> ends a turn
    "mistral": """{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}""",
    "zephyr": """{% for message in messages %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
}
_TO = TemporaryDirectory(prefix="affinage-test-")
_FOLDER = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.jinja"))} | PIECES
SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s\"]+[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start_of_turn|end_of_turn|end_of_utterance)>"
)

QUESTIONS, ANSWERS = ("Where is\n the capital?", "été ?"), ("In Paris 🧀, où.", "12 + 7 = 19\n\nuser")
THOUGHTS = ("The capital, oh.\n\nI see.", "A sum; of two.")
PLAIN, REASONED, THOUGHTFUL = [], [], []  # without reasoning, with it beside the content, and within the content
for question, answer, thought in zip(QUESTIONS, ANSWERS, THOUGHTS, strict=True):
    asked, said = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    PLAIN += [asked, said]
    REASONED += [asked, {**said, "reasoning_content": thought}]
    THOUGHTFUL += [asked, {**said, "content": f"<think>\n{thought}\n</think>\n\n{answer}"}]
SYSTEM = {"role": "system", "content": "Be brief."}

# Which templates are refused for which conversations, by any means but a guess.
TALKS = {"plain": PLAIN, "system": [SYSTEM, *PLAIN], "reasoning": REASONED}
NEMOTRON = ("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra")
CLOCK = {"gptoss", "gptoss_training"}  # they write the date
# They want messages that are lists, of texts and pictures.
LISTS = {f"{name}{kind}" for name in ("idefics3", "smolvlm", "llava_next") for kind in ("", "_training")}
BEGUN = {"deepseek_r1_distill", "deepseekv3"}  # they begin a thought, and never write one
# They ask for an answer with the beginning of a thought, and write answers without one: training them is a guess.
UNREASONED = {*BEGUN, *NEMOTRON}
REFUSED = {
    "plain": CLOCK | LISTS | UNREASONED,
    "system": CLOCK | LISTS | UNREASONED | {"gemma", "gemma_training", "mistral"},  # they know no system message
    "reasoning": CLOCK | LISTS | BEGUN | {"qwen3_5_nothink"},
}


@lru_cache
def folder_of(kind: str) -> Path:
    """A tokenizer's folder: of byte-level BPE (`bytes`), or of words that begin with a space and bytes (`pieces`)."""
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    if kind == "bytes":
        special = sorted({*named.values()}.union(*map(SPECIAL.findall, SOURCES.values())))
        fast, alphabet = FastTokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
        fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        special, alphabet = [*named.values(), *(f"<0x{byte:02X}>" for byte in range(256))], []
        fast = FastTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    fast.train_from_iterator([*QUESTIONS, *ANSWERS] * 9, trainer)
    if kind == "bytes":
        fast.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
        fast.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in ("<think>", "</think>")])
    told = json.loads(fast.to_str())
    told["added_tokens"] = [token for token in told["added_tokens"] if not token["content"].startswith("<0x")]
    config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named})
    return write_files(Path(_TO.name, kind), {"tokenizer.json": json.dumps(told), "tokenizer_config.json": config})


def with_template(source: str, kind: str = "bytes") -> Tokenizer:
    """Our tokenizer with any template."""
    return Tokenizer(folder_of(kind), source)


@cache
def ours(form: str, line: str = "") -> Tokenizer:
    """Our tokenizer with a published template, after a first line of one's own."""
    return with_template(line + SOURCES[form], "pieces" if form in PIECES else "bytes")


@lru_cache
def theirs(kind: str) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers reads it."""
    return PreTrainedTokenizerFast.from_pretrained(folder_of(kind))
