"""Our tokenizers as Hugging Face fast tokenizers that give the same ids."""

from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from affinage.data.atomic import write_atomically, write_json
from affinage.data.chat import chat_template
from affinage.data.foreign_json import read_object
from affinage.data.hub_tokenizer import CONFIG, TEMPLATE
from affinage.data.special_tokens import (
    BOS,
    CODE,
    CONTROL_PIECES,
    ENDCODE,
    EOS,
    FIXED_PIECES,
    IM_END,
    IM_START,
    PAD,
    UNK,
)
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError

_SPACE = "\u2581"  # how SentencePiece spells a space inside a piece


def write_hf_tokenizer(
    tokenizer: Tokenizer, folder: Path, *, context: int, chat: bool = True, system_prompt: str = ""
) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer loads, and our own file.

    `context` is the model's longest input in tokens. A chat model gets the chat template, with `system_prompt` as its
    default, and ends its turns with <|im_end|>; any other ends with </s>. Neither adds <s> by itself, as `encode` does
    not. Text that spells a control token stays text only with `split_special_tokens=True`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not tokenizer.fixed_ids:  # it is Hugging Face's already
        tokenizer.write(folder)
        if chat:
            _write_template(tokenizer, folder, system_prompt)
        return
    fast = _from_sentencepiece(tokenizer.model_path) if tokenizer.model_path else _from_characters(tokenizer)
    fast.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in CONTROL_PIECES])
    write_atomically(folder / "tokenizer.json", fast.to_str(pretty=True).encode())
    write_json(
        folder / "tokenizer_config.json", _config(context, _template(tokenizer, system_prompt) if chat else None)
    )
    tokenizer.write(folder)  # for an import, and for programs that read SentencePiece models


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


def _from_sentencepiece(path: Path) -> FastTokenizer:
    """BPE with byte fallback and the merges that a SentencePiece model implies."""
    model = SentencePieceProcessor(model_file=str(path))
    vocabulary = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    fast = FastTokenizer(
        models.BPE(vocabulary, merges_of(model), unk_token=CONTROL_PIECES[UNK], fuse_unk=True, byte_fallback=True)
    )
    fast.normalizer = normalizers.Replace(" ", _SPACE)
    fast.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast


def merges_of(model: SentencePieceProcessor) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a piece, the best-scored piece first.

    SentencePiece keeps the pieces only: it joins whichever neighbours make the best-scored piece, so every way to
    split a piece into two is a merge.
    """
    ids = range(len(FIXED_PIECES), model.get_piece_size())
    joined = {model.id_to_piece(i): i for i in ids if not model.is_byte(i)}
    merges = []
    for piece in sorted(joined, key=lambda piece: -model.get_score(joined[piece])):
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(left, right) for left, right in splits if left in joined and right in joined]
        merges += sorted(known, key=lambda pair: (joined[pair[0]], joined[pair[1]]))
    return merges


def _from_characters(tokenizer: Tokenizer) -> FastTokenizer:
    """One token per character."""
    vocabulary = {tokenizer.id_to_piece(i): i for i in range(tokenizer.vocabulary)}
    fast = FastTokenizer(models.WordLevel(vocabulary, unk_token=CONTROL_PIECES[UNK]))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    return fast
