"""Tokenizers with templates in the forms that families of chat models publish, and conversations for them."""

import json
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from affinage.data.hub_tokenizer import HubTokenizer, template_in

TEXT = [
    "The capital of France is Paris. La capitale, où est-elle ? user assistant system [INST] x",
    "été naïf 🧀 12 + 7 = 19",
]

# Templates in the forms that these families publish, with the special tokens of their tokenizers.
LLAMA3 = """{% for message in messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + \
'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
QWEN = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are a model.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
PHI3 = """{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
MARKED = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\
{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Of models that reason: what they thought is left out of earlier turns, by Qwen 3's; of all, by DeepSeek R1's, which
# begins it for them. `<think>` is a token, but no special one.
QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content, thought = message.content, '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
DEEPSEEK_R1 = """{{ bos_token }}{% for message in messages %}{% set content = message['content'] %}\
{% if message['role'] == 'system' %}{{ content }}\
{% elif message['role'] == 'user' %}{{ '<｜User｜>' + content }}{% else %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""

CHATML_TOKENS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
FORMS = {
    "llama-3": (LLAMA3, "bytes", {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
                ["<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"], "<|eot_id|>"),
    "qwen": (QWEN, "bytes", CHATML_TOKENS, ["<|im_start|>"], "<|im_end|>"),
    "mistral": (MISTRAL, "pieces", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, [], "</s>"),
    "zephyr": (ZEPHYR, "pieces", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"},
               [], "</s>"),
    "phi-3": (PHI3, "bytes", {"eos_token": "<|endoftext|>"},
              ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>"], "<|end|>"),
    "marked": (MARKED, "bytes", CHATML_TOKENS, ["<|im_start|>"], "<|im_end|>"),
}  # fmt: skip
THINKING = {
    "qwen-3": (QWEN3, "bytes", CHATML_TOKENS, ["<|im_start|>"], "<|im_end|>"),
    "deepseek-r1": (DEEPSEEK_R1, "bytes",
                    {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
                    ["<｜User｜>", "<｜Assistant｜>", "<｜▁pad▁｜>"], "<｜end▁of▁sentence｜>"),
}  # fmt: skip
USER, ANSWER = {"role": "user", "content": "Where is\n the capital?"}, {"role": "assistant", "content": "Paris 🧀, où."}
SYSTEM = {"role": "system", "content": "Be brief."}
LATER = [{"role": "user", "content": "été ?"}, {"role": "assistant", "content": "12 + 7 = 19\n\nuser"}]


@lru_cache
def folder_of(form: str) -> Path:
    template, kind, named, more, _ = (FORMS | THINKING)[form]
    special = [*dict.fromkeys(named.values()), *more]
    if kind == "bytes":
        fast = FastTokenizer(models.BPE())
        fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:  # as of SentencePiece: words begin with a space, other characters are bytes
        fast = FastTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special, alphabet = [*special, *(f"<0x{byte:02X}>" for byte in range(256))], []
    fast.train_from_iterator(
        TEXT * 9, trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet)
    )
    folder = Path(mkdtemp(prefix="affinage-test-"))
    if kind == "pieces":
        told = json.loads(fast.to_str())
        told["added_tokens"] = [token for token in told["added_tokens"] if not token["content"].startswith("<0x")]
        (folder / "tokenizer.json").write_text(json.dumps(told))
    else:
        fast.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
        if form in THINKING:
            fast.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in ("<think>", "</think>")])
        fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@lru_cache
def ours(form: str) -> HubTokenizer:
    tokenizer = HubTokenizer(folder_of(form))
    tokenizer.use_template(template_in(folder_of(form)))
    return tokenizer


@lru_cache
def theirs(form: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder_of(form))
