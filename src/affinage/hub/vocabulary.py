"""The tokenizer's files as transformers loads them, and the number of token ids of a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from affinage.data.chat import chat_template
from affinage.data.json_files import read_object, write_json
from affinage.data.special_tokens import BOS, CODE, CONTROL_PIECES, ENDCODE, EOS, IM_END, IM_START, PAD, UNK
from affinage.data.tokenizer import CONFIG, TEMPLATE, Tokenizer
from affinage.errors import UserError
from affinage.hub.family_spec import Decoder
from affinage.model.graph import Graph, parse
from affinage.model.layer import PyTree


def write_hf_tokenizer(
    tokenizer: Tokenizer, folder: Path, *, context: int, chat: bool = True, system_prompt: str = ""
) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer loads.

    `context` is the model's longest input in tokens. A chat model gets the chat template it was trained with, or
    ChatML's with `system_prompt` as its default, and ends its turns with <|im_end|>; any other ends with </s>. Neither
    adds <s> by itself, as `encode` does not. Text that spells a control token stays text only with
    `split_special_tokens=True`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.write(folder)
    if not (chat or tokenizer.fixed_ids):
        return
    if not tokenizer.fixed_ids and tokenizer.template is None and tokenizer.opening not in ((), (tokenizer.bos,)):
        what = f"no chat template can begin a text with the ids {list(tokenizer.opening)}"
        raise UserError(what, where=str(folder), fix="Export the base model.")
    (folder / TEMPLATE).unlink(missing_ok=True)  # of another export, beside which it would win
    config = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if tokenizer.fixed_ids:
        config = {
            # LlamaTokenizer would rebuild the tokenizer with a space before the text; this class takes the file as is.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": CONTROL_PIECES[BOS],
            "eos_token": CONTROL_PIECES[IM_END if chat else EOS],
            "pad_token": CONTROL_PIECES[PAD],
            "unk_token": CONTROL_PIECES[UNK],
            "additional_special_tokens": [CONTROL_PIECES[i] for i in (CODE, ENDCODE, IM_START, IM_END)],
            "add_bos_token": False,
            "add_prefix_space": False,  # llama.cpp would add a space before the text and after every control token
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": context,
        }
    if chat:
        own, opened = tokenizer.template, bool(tokenizer.opening)
        config["chat_template"] = chat_template(system_prompt, opened=opened) if own is None else own.source
    write_json(folder / CONFIG, config)


def with_ids(graph: Graph, params: PyTree, ids: Sequence[int]) -> tuple[Graph, PyTree]:
    """Return the model with rows for new ids, each the mean of those below the first of them.

    A vocabulary that is padded that far stays as large as it is. A token that was never seen is then no likelier than
    the others (Hewitt, Initializing new word embeddings, 2021).
    """
    if not ids:
        return graph, params
    size, decoder, written, changed = (
        max(graph.vocabulary, max(ids) + 1),
        Decoder.of(graph),
        graph.to_dict(),
        {**params},
    )

    def grown(rows: Float[np.ndarray, "V D"]) -> Float[np.ndarray, "W D"]:
        old = np.asarray(rows)
        new = np.concatenate([old, np.zeros((size - len(old), old.shape[1]), old.dtype)])
        new[list(ids)] = old[: min(ids)].mean(axis=0, dtype=np.float64)
        return new

    for name in (decoder.nodes["embed"].name, decoder.nodes["logits"].name):
        settings: dict[str, Any] = written["nodes"][name]
        settings |= {"vocab": size} if "vocab" in settings else {}
        if name in params:
            changed[name] = {leaf: grown(rows) for leaf, rows in params[name].items()}
    return parse(written), changed
