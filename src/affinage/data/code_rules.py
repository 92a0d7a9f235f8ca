"""What source code must be to stay: the rules of StarCoder (Li et al. 2023, arXiv 2305.06161, section 3.1)."""

_MAX_LINE, _MAX_MEAN_LINE = 1000, 100  # characters
_MIN_ALNUM_RATIO = 0.25  # of all characters, white space included


def broken_rule(text: str) -> tuple[str, str] | None:
    """The first rule that a source file breaks, as (reason, detail); None if it is hand-written code by all of them.

    Long lines are data, minified or generated code; few letters and digits are data as well.
    """
    lines = text.split("\n")
    longest = max(map(len, lines))
    if longest > _MAX_LINE:
        return "code: a long line", f"{longest} characters"
    mean = sum(map(len, lines)) / len(lines)
    if mean > _MAX_MEAN_LINE:
        return "code: long lines", f"{mean:.0f} characters on average"
    share = sum(map(str.isalnum, text)) / max(1, len(text))
    if share < _MIN_ALNUM_RATIO:
        return "code: not enough letters", f"{share:.2f} of its characters"
    return None
