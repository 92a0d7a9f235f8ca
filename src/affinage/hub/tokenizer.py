"""The files by which transformers loads a tokenizer of ours, and gives the same ids."""

from pathlib import Path
from typing import Any

from affinage.data.atomic import write_json
from affinage.data.chat import chat_template
from affinage.data.foreign_json import read_object
from affinage.data.special_tokens import BOS, CODE, CONTROL_PIECES, ENDCODE, EOS, IM_END, IM_START, PAD, UNK
from affinage.data.tokenizer import CONFIG, TEMPLATE, Tokenizer
from affinage.errors import UserError


def write_hf_tokenizer(
    tokenizer: Tokenizer, folder: Path, *, context: int, chat: bool = True, system_prompt: str = ""
) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer loads.

    `context` is the model's longest input in tokens. A chat model gets the chat template, with `system_prompt` as its
    default, and ends its turns with <|im_end|>; any other ends with </s>. Neither adds <s> by itself, as `encode` does
    not. Text that spells a control token stays text only with `split_special_tokens=True`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.write(folder)
    if tokenizer.fixed_ids:
        (folder / TEMPLATE).unlink(missing_ok=True)  # of another export, beside which it would win
        write_json(folder / CONFIG, _config(context, _template(tokenizer, system_prompt) if chat else None))
    elif chat:
        _write_template(tokenizer, folder, system_prompt)


def _write_template(tokenizer: Tokenizer, folder: Path, system_prompt: str) -> None:
    """The template of our conversations in place of the one that the tokenizer came with."""
    opening = tokenizer.opening
    if tokenizer.template is None and opening not in ((), (tokenizer.bos,)):
        raise UserError(f"no chat template can say that a text begins with the ids {list(opening)}", where=str(folder))
    (folder / TEMPLATE).unlink(missing_ok=True)
    config = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    config["chat_template"] = _template(tokenizer, system_prompt)
    write_json(folder / CONFIG, config)


def _template(tokenizer: Tokenizer, system_prompt: str) -> str:
    """The template that the model was taught, or ChatML's with its system prompt."""
    if tokenizer.template is not None:
        return tokenizer.template.source
    return chat_template(system_prompt, opened=bool(tokenizer.opening))


def _config(context: int, template: str | None) -> dict[str, Any]:
    config = {
        # LlamaTokenizer would rebuild the tokenizer with a space before the text; this class takes the file as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": CONTROL_PIECES[BOS],
        "eos_token": CONTROL_PIECES[EOS if template is None else IM_END],
        "pad_token": CONTROL_PIECES[PAD],
        "unk_token": CONTROL_PIECES[UNK],
        "additional_special_tokens": [CONTROL_PIECES[i] for i in (CODE, ENDCODE, IM_START, IM_END)],
        "add_bos_token": False,
        "add_prefix_space": False,  # llama.cpp would add a space before the text and after every control token
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": context,
    }
    return config | ({} if template is None else {"chat_template": template})
