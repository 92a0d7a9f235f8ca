"""Settings of the way from raw text to sequences of tokens."""

from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field

from affinage.config.settings import Bytes, Settings
from affinage.config.sources import POCKET_WORLD as POCKET_WORLD
from affinage.config.sources import Language, Source
from affinage.config.sources import SourceSettings as SourceSettings

DEFAULT_THRESHOLD = 0.8
Share = Annotated[float, Field(ge=0, le=1)]
DatatroveName = Literal[
    "GopherRepetitionFilter", "GopherQualityFilter", "C4QualityFilter", "FineWebQualityFilter", "PIIFormatter"
]


class FilterSettings(Settings):
    """What a document must be to stay in the corpus (Julian's rules)."""

    min_characters: int = Field(default=100, ge=0)
    """Shorter documents are removed."""
    max_characters: int = Field(default=500_000, gt=0)
    """Longer documents are removed or split."""
    long_documents: Literal["remove", "split"] = "remove"
    """split: cut long documents at the ends of paragraphs."""
    min_alnum_ratio: Share = 0.7
    """Share of letters and digits among non-space characters."""
    language_threshold: Share | dict[str, Share] = DEFAULT_THRESHOLD
    """Probability of lid.176.ftz below which a document is removed; 0 turns language id off. A mapping has it by
    language or source, and `default` for all others: {default: 0.8, fr: 0.7, wikipedia: 0.65}."""
    mixed_languages: bool = False
    """Add up the probabilities of the recipe's languages."""
    datatrove: dict[DatatroveName, dict[str, Any]] = {}
    """Filters of datatrove, and its formatter of personal data, by name with their arguments, such as
    {GopherRepetitionFilter: {}, PIIFormatter: {remove_ips: false}} (pip install 'affinage[filters]'); slower."""

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


class DedupSettings(Settings):
    """Exact and near duplicates (MinHash-LSH with the exact Jaccard similarity checked on candidates)."""

    threshold: float = Field(default=0.8, gt=0, le=1)
    """Jaccard similarity of word n-grams at which two documents are duplicates."""
    n_grams: int = Field(default=5, ge=1)
    """Words of an n-gram."""
    num_buckets: int = Field(default=16, ge=1)
    """16 buckets of 6 hashes find a pair at exactly J = 0.8 with a probability of 0.992."""
    hashes_per_bucket: int = Field(default=6, ge=1)
    """More hashes find fewer pairs below `threshold`."""
    against: str = ""
    """A run, or a folder of Parquet files, whose documents were released before: copies of them are removed, too."""


class DecontaminateSettings(Settings):
    """Documents that hold an item of a benchmark are found by runs of words in common."""

    benchmarks: bool = True
    """Search for the items of `evaluate.tasks`, except the pocket world's, whose facts are its text."""
    benchmark_files: tuple[str, ...] = ()
    """Files of your own: .jsonl (.gz, .zst), .parquet, .txt (an item a line), task files."""
    n_grams: int = Field(default=13, ge=1)
    """Words in common that count as a match (GPT-3, appendix C)."""
    min_words: int = Field(default=8, ge=1)
    """Shorter items are matched whole, down to this many words."""
    boilerplate: int = Field(default=10, ge=1)
    """A run of words in more items of a benchmark, or in more documents, than this is no match (GPT-3: documents)."""


class SplitSettings(Settings):
    """The part of the corpus that is never trained on."""

    validation_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Share of documents, per source and language."""
    group_separator: str = ""
    """Documents whose ids agree up to it stay together: "#" keeps the sections of a book together."""
    by: Literal["document", "tail"] = "document"
    """tail: the end of every document (for a single long text)."""


class DataSettings(Settings):
    """Where the text comes from and what is done to it before it becomes tokens."""

    sources: tuple[Source, ...] = Field(min_length=1)
    sample: float = Field(default=1.0, gt=0, le=1)
    """Share of the documents of each source, chosen by their ids."""
    on_error: Literal["skip", "raise"] | None = None
    """For records that cannot be read and damaged files: skip and count them, or end with an error. By default records
    are skipped and a damaged file is an error."""
    root: str = ""
    """Folder or URL that relative paths of sources start from; by default the working directory."""
    mirror: str = ""
    """Folder or URL with a copy of every remote source, each in a folder of its name, to read in its place."""
    languages: tuple[Language, ...] = ("en", "fr")
    """ISO 639-1 codes; documents in other languages are removed. []: all stay."""
    filters: FilterSettings = FilterSettings()
    dedup: DedupSettings | None = DedupSettings()
    """null: keep duplicates."""
    decontaminate: DecontaminateSettings | None = DecontaminateSettings()
    """null: benchmarks may be trained on."""
    split: SplitSettings = SplitSettings()
    executor: Literal["local", "ray"] = "local"
    """The cores of this machine, or Ray's (pip install 'affinage[ray]'). Like the next three it changes no result."""
    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Tasks at the same time; auto: one per core."""
    ray_address: str = ""
    """Address of a running cluster (`auto`, `HOST:6379`); by default Ray is started on this machine."""
    ray_open_cluster: bool = False
    """Join also a cluster that others can reach and that asks for no token."""


class TokenizerSettings(Settings):
    """How text becomes token ids. Ids 0 to 7 are always pad, unk, s, /s, code, endcode, im_start, im_end."""

    kind: Literal["bpe", "char"] = "bpe"
    """SentencePiece BPE with byte fallback, or one id per character."""
    vocab_size: int = Field(default=50_000, ge=300)
    """Number of pieces, the special ones included; `char` ignores it."""
    character_coverage: float = Field(default=0.9999, gt=0, le=1)
    """Share of the corpus's characters with a piece of their own."""
    sample_bytes: Bytes = ByteSize(100_000_000)
    """Text to train on, balanced over languages; training takes about ten times this memory."""
    split_digits: bool = True
    """Every digit is a token, so that numbers have one spelling."""
    compare: tuple[str, ...] = ()
    """Published tokenizers to compare with: folders with a tokenizer.json."""


class PackingSettings(Settings):
    """How documents are packed into sequences of tokens."""

    seq_len: int = Field(default=2048, ge=8)
    """Tokens of a sequence."""
    num_shards: int = Field(default=1, ge=1)
    """Files of the training sequences, at least one per source and language, and none for less than 8 MB of text."""
    strategy: Literal["concat", "best_fit"] = "concat"
    """best_fit keeps documents whole where they fit."""
    output_path: str = ""
    """Where training sequences are written and read (gs://bucket/rows); by default the step's folder."""
