"""Settings of what makes a text fit to be trained on: cleaning, language id, decontamination."""

from typing import Annotated, Literal

from pydantic import Field

from affinage.config.settings import Settings

Share = Annotated[float, Field(ge=0, le=1)]
DEFAULT_THRESHOLD = 0.8


class GopherSettings(Settings):
    """Repetition rules of Gopher (Rae et al. 2021, table A1): shares above which a document is removed; 1: no rule."""

    duplicate_lines: Share = 0.30
    """Of lines, that were there before."""
    duplicate_paragraphs: Share = 0.30
    """Of paragraphs, that were there before."""
    duplicate_line_characters: Share = 0.20
    """Of characters, in such lines."""
    duplicate_paragraph_characters: Share = 0.20
    """Of characters, in such paragraphs."""
    top_ngrams: tuple[Share, Share, Share] = (0.20, 0.18, 0.16)
    """Of characters, in the most frequent 2-, 3-, 4-gram."""
    duplicate_ngrams: tuple[Share, Share, Share, Share, Share, Share] = (
        0.15,
        0.14,
        0.13,
        0.12,
        0.11,
        0.10,
    )
    """Of characters, in 5- to 10-grams that were there before."""
    bullet_lines: Share = 0.90
    """Of lines, that begin with a bullet (appendix A1.1)."""
    ellipsis_lines: Share = 0.30
    """Of lines, that end in an ellipsis."""


class C4Settings(Settings):
    """Rules of C4 (Raffel et al. 2020, section 2.2), without its list of bad words."""

    min_sentence_ends: Share = 0.12
    """Share of lines that end a sentence. C4 drops all other lines, a third of the."""
    lorem_ipsum: bool = True
    """Text; FineWeb (arXiv 2406.17557, 3.6) found this share of them to gain nearly as much and lose a third of that
    remove documents that hold this phrase."""
    curly_brackets: bool = True
    """Remove documents with "{": code where text is wanted."""


class MaskSettings(Settings):
    """Personal data that is replaced in the text. An empty replacement leaves its kind alone."""

    email: str = "email@example.com"
    """This domain is nobody's (RFC 2606)."""
    ipv4: str = "192.0.2.1"
    """Nor are these addresses (RFC 5737, RFC 3849)."""
    ipv6: str = "2001:db8::1"
    """Of the addresses kept for documentation (RFC 3849)."""
    public_only: bool = True
    """Addresses of private networks, loopback and examples stay."""


class CodeSettings(Settings):
    """What source code must be to stay, in place of the rules for letters, repetition and language (StarCoder's)."""

    max_line: int = Field(default=1000, gt=0)
    """Characters of the longest line."""
    max_mean_line: float = Field(default=100, gt=0)
    """Characters."""
    min_alnum_ratio: Share = 0.25
    """Of all characters, white space included."""


class CleanSettings(Settings):
    """What a document must be to stay in the corpus (Julian's rules)."""

    min_characters: int = Field(default=100, ge=0)
    """Shorter ones are removed."""
    max_characters: int = Field(default=500_000, gt=0)
    """Longer ones are removed, or."""
    long_documents: Literal["remove", "split"] = "remove"
    """... split into parts at paragraph ends."""
    min_alnum_ratio: Share = 0.7
    """Share of letters and digits among non-space characters."""
    language_threshold: Share | dict[str, Share] = DEFAULT_THRESHOLD
    """Probability of lid.176.ftz below which a document is removed; 0 turns language id off. A mapping has one for each
    language or source that it names, and `default` for all others: {default: 0.8, fr: 0.7, wikipedia: 0.65}."""
    mixed_languages: bool = False
    """The probabilities of the recipe's languages count together."""
    gopher: GopherSettings | None = None
    """Rules against repetition; `{}` for the published thresholds."""
    c4: C4Settings | None = None
    """Rules for lines of web pages; `{}` for the published ones."""
    mask: MaskSettings | None = None
    """E-mail and IP addresses; `{}` replaces them by addresses that are nobody's."""
    code: CodeSettings = CodeSettings()
    """For documents of sources of `kind: code`."""

    @property
    def identifies_languages(self) -> bool:
        """Whether the language of any document is identified."""
        given = self.language_threshold
        return any(given.values()) or given.get("default") is None if isinstance(given, dict) else given > 0

    def threshold_of(self, source: str, language: str = "") -> float:
        """The language threshold of a document, by the name of its source, or else by its language."""
        given = self.language_threshold
        if not isinstance(given, dict):
            return given
        return next((given[key] for key in (source, language, "default") if key in given), DEFAULT_THRESHOLD)


class DecontaminateSettings(Settings):
    """Documents that hold an item of a benchmark are found by runs of words in common."""

    benchmarks: bool = True
    """Look for the items of what `evaluate.tasks` names; never for the pocket world, whose facts are its text."""
    benchmark_files: tuple[str, ...] = ()
    """Your own: .jsonl (.gz, .zst), .parquet, .txt (an item a line), task files."""
    n_grams: int = Field(default=13, ge=1)
    """Words in common that count as a match (GPT-3, appendix C)."""
    min_words: int = Field(default=8, ge=1)
    """Shorter items are looked for whole, down to this many words."""
    boilerplate: int = Field(default=10, ge=1)
    """A run of words in more items of a benchmark than this, or in more documents, is no match: an instruction such as
    "choose the answer that best completes the sentence", a famous quotation. GPT-3 takes 10 documents."""
    action: Literal["remove", "cut"] = "remove"
    """The document, or the match with 200 characters on both sides of it."""
