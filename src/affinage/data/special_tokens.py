"""The ten ids that every tokenizer of affinage begins with, and the ids that divide rows of any tokenizer."""

from typing import NamedTuple

PAD, UNK, BOS, EOS, CODE, ENDCODE, IM_START, IM_END, NEWLINE, TAB = range(10)

# Ids 0 to 7 are control tokens: they stand for structure, and no raw text ever becomes one of them.
CONTROL_PIECES = ("<pad>", "<unk>", "<s>", "</s>", "<|code|>", "<|endcode|>", "<|im_start|>", "<|im_end|>")
NAMED = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>", "unk_token": "<unk>"}
# Newline and tab are tokens of their own, never part of a longer piece. That makes encoding a conversation segment by
# segment equal to encoding it whole, because every segment of ChatML begins or ends at a newline or a control token.
FIXED_PIECES = (*CONTROL_PIECES, "\n", "\t")

# The `language` of source code, which is wrapped in <|code|> and <|endcode|>. Only a source's settings give it.
CODE_LANGUAGE = "code"
CODE_FRAME = (BOS, CODE), (ENDCODE, EOS)


class Marks(NamedTuple):
    """The ids that rows are read by. A segment begins with `begin`, and after `end`."""

    begin: int | None  # None: the tokenizer puts nothing before a text
    end: int  # of a document
    pad: int  # fills rows up; `end` where the tokenizer has no id for it, and then the fill is segments of one token


MARKS = Marks(BOS, EOS, PAD)  # of affinage's own tokenizers
