"""The ten ids that every tokenizer of affinage begins with, and what gives rows their structure in any tokenizer."""

from dataclasses import dataclass

PAD, UNK, BOS, EOS, CODE, ENDCODE, IM_START, IM_END, NEWLINE, TAB = range(10)

# Ids 0 to 7 are control tokens: they stand for structure, and no raw text ever becomes one of them.
CONTROL_PIECES = ("<pad>", "<unk>", "<s>", "</s>", "<|code|>", "<|endcode|>", "<|im_start|>", "<|im_end|>")
# Newline and tab are tokens of their own, never part of a longer piece. That makes encoding a conversation segment by
# segment equal to encoding it whole, because every segment of ChatML begins or ends at a newline or a control token.
FIXED_PIECES = (*CONTROL_PIECES, "\n", "\t")

# What stands in a document's `language` if it is source code: its tokens are wrapped in <|code|> and <|endcode|>. Only
# a source's settings give it; what a document says of itself never does.
CODE_LANGUAGE = "code"


def frame(language: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and after the tokens of a document: `<s>` and `</s>`, around source code its own pair as well."""
    return ((BOS, CODE), (ENDCODE, EOS)) if language == CODE_LANGUAGE else ((BOS,), (EOS,))


@dataclass(frozen=True)
class Marks:
    """The ids that rows are read by. A segment begins with `begin`, and after `end`."""

    begin: int | None  # None: the tokenizer puts nothing before a text
    end: int  # of a document
    pad: int  # fills rows up; `end` where the tokenizer has no id for it, and then the fill is segments of one token


MARKS = Marks(BOS, EOS, PAD)  # of affinage's own tokenizers
