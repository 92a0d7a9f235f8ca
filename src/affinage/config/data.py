"""Settings of the way from raw text to sequences of tokens: sources, cleaning, tokenizer, packing."""

import functools
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, StringConstraints, model_validator

from affinage.config.settings import Bytes, Settings
from affinage.config.yaml import parse

POCKET_WORLD = "pocket-world"
POCKET_BYTES = 3_000_000  # of the pocket world, where a recipe gives no size
_SUFFIX = re.compile(
    r"\.(txt|md|markdown|jsonl|ndjson|parquet|warc|wet|xml)(\.(gz|zst|bz2|xz))?$|\.(gz|zst|bz2|xz)$", re.IGNORECASE
)
Language = Annotated[str, StringConstraints(to_lower=True)]
Share = Annotated[float, Field(ge=0, le=1)]
DatatroveName = Literal[
    "GopherRepetitionFilter", "GopherQualityFilter", "C4QualityFilter", "FineWebQualityFilter", "PIIFormatter"
]


class PlaceSettings(Settings):
    """Where the files of a source are."""

    path: str = ""
    """A file, a folder, a glob, an fsspec URL, or `pocket-world` for what is generated."""
    dataset: str = ""
    """In place of `path`: a dataset of the Hugging Face Hub, or a folder of `datasets`; streamed."""
    config: str = ""
    """Configuration of a dataset that has several."""
    data_dir: str = ""
    """Folder within a dataset, such as data/python."""
    split: str = "train"
    """Split of a dataset."""
    revision: str = ""
    """Branch, tag or commit of a dataset, so that a later run reads the same."""
    name: str = ""
    """Name in reports and mixtures; by default the last part of the path."""

    @model_validator(mode="after")
    def _one_place(self) -> "PlaceSettings":
        if bool(self.path) == bool(self.dataset):
            raise ValueError("give either `path` or `dataset`")
        return self

    @property
    def place(self) -> str:
        """The path, or the name of the dataset."""
        return self.path or self.dataset

    @property
    def title(self) -> str:
        """Its name, or the last part of its place without suffixes and globs; safe as a part of a file name."""
        parts = re.split(r"[/\\]", self.path or f"{self.dataset}/{self.config}")
        names = [part for part in parts if part and not re.search(r"[*?\[]", part)] or ["source"]
        return safe_name(self.name or _SUFFIX.sub("", names[-1]))


class SourceSettings(PlaceSettings):
    """One source of documents. A plain string in a recipe is short for `path`."""

    preset: str = ""
    """In place of both: a well-known corpus, fineweb-edu, oscar-2301, the-stack, wikipedia or gutenberg."""
    kind: Literal["text", "code", "gutenberg"] = "text"
    """code skips language id and is wrapped in <|code|> <|endcode|>; gutenberg is a book, cut into parts."""
    language: Language = ""
    """ISO 639-1 code: documents in another language are removed; by default all of the recipe's languages stay."""
    trust_language: bool = False
    """Take the word of `language`, and identify none."""
    license: str = ""
    """License, which goes with every document into the manifest."""
    text_key: str = "text"
    """JSON key or Parquet column of the text; `a.b` is the key b within a."""
    id_key: str = "id"
    """Key of a document's id; without one, its place in the file."""
    url_key: str = "url"
    """Key of its URL, or a pattern of other keys: https://example.org/{repository}/{path}."""
    license_key: str = "license"
    """Key of its license."""
    max_bytes: Bytes | None = None
    """Maximum amount of text, such as 40MB; of the pocket world, the amount that is generated."""
    sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """Hash of the file at a web address, checked after the download."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, value: Any) -> Any:
        """Add the settings of the preset; what the recipe gives itself wins."""
        if not isinstance(value, dict) or not (name := value.get("preset")):
            return value
        if not isinstance(name, str) or (preset := _presets().get(name)) is None:
            raise ValueError(f"there is no preset {name!r}; there are {', '.join(_presets())}")
        language = str(value.get("language") or preset.get("language", "")).lower()
        elsewhere = value.get("path") or value.get("dataset")
        filled = {key: text for key, text in preset.items() if not (elsewhere and key in PlaceSettings.model_fields)}
        filled["name"] = f"{name}-{language}" if language else name
        if not language and any("{language}" in text for text in filled.values()):
            raise ValueError(f"the preset {name!r} needs a `language`")
        return {key: text.replace("{language}", language) for key, text in filled.items()} | value

    @model_validator(mode="after")
    def _consistent(self) -> "SourceSettings":
        if self.sha256 and not self.path.startswith(("http://", "https://")):
            raise ValueError("`sha256` is checked of files that are downloaded from a web address")
        if self.trust_language and not self.language:
            raise ValueError("`trust_language` needs a `language`")
        return self


@functools.cache
def _presets() -> dict[str, dict[str, str]]:
    return dict(parse(Path(__file__).with_name("presets.yaml").read_bytes(), "presets.yaml")[0])


def path_from_string(value: Any) -> Any:
    """Take `x` as short for `path: x`."""
    return {"path": value} if isinstance(value, str) else value


Source = Annotated[SourceSettings, BeforeValidator(path_from_string, json_schema_input_type=str | SourceSettings)]


def safe_name(name: str) -> str:
    """Return the name with everything but letters, digits, dot, dash and underscore replaced, fit for a file name."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "source"


class FilterSettings(Settings):
    """What a document must be to stay in the corpus (Julian's rules)."""

    min_characters: int = Field(default=100, ge=0)
    """Shorter documents are removed."""
    max_characters: int = Field(default=500_000, gt=0)
    """Longer documents are removed."""
    min_alnum_ratio: Share = 0.7
    """Share of letters and digits among non-space characters."""
    language_threshold: Share = 0.8
    """Probability of lid.176.ftz below which a document is removed; 0 turns language id off."""
    mixed_languages: bool = False
    """Add up the probabilities of the recipe's languages: a document may be in several of them."""
    datatrove: dict[DatatroveName, dict[str, Any]] = {}
    """Filters of datatrove, and its formatter of personal data, by name with their arguments: affinage[filters]."""


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
    """Files of your own: .jsonl (.gz, .zst), .parquet, .txt (an item a line)."""
    n_grams: int = Field(default=13, ge=1)
    """Words in common that count as a match (GPT-3, appendix C); items of 8 words or more are matched whole."""


class SplitSettings(Settings):
    """The part of the corpus that is never trained on."""

    validation_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Share of documents, per source and language."""
    group_separator: str = ""
    """Documents whose ids agree up to it stay together: "#" keeps the sections of a book together."""
    by: Literal["document", "tail"] = "document"
    """tail: the end of every document (for a single long text)."""


class ReadingSettings(Settings):
    """How sources are read, of documents and of conversations."""

    root: str = ""
    """Folder or URL that relative paths of sources start from; by default the working directory."""
    mirror: str = ""
    """Folder or URL with a copy of every remote source, each in a folder of its name, to read in its place."""
    sample: float = Field(default=1.0, gt=0, le=1)
    """Share of each source, of documents chosen by their ids, of conversations by their content."""
    on_error: Literal["raise", "skip"] = "raise"
    """A damaged file or a line that is no conversation: an error; or read up to the damage, passed over, counted."""


class DataSettings(ReadingSettings):
    """Where the text comes from and what is done to it before it becomes tokens."""

    sources: tuple[Source, ...] = Field(min_length=1)
    """Documents to train on."""
    languages: tuple[Language, ...] = ("en", "fr")
    """ISO 639-1 codes; documents in other languages are removed. []: all stay."""
    filters: FilterSettings = FilterSettings()
    """{min_characters: 1, min_alnum_ratio: 0, language_threshold: 0} keeps all text up to `max_characters`."""
    dedup: DedupSettings | None = DedupSettings()
    """null: keep duplicates."""
    decontaminate: DecontaminateSettings | None = DecontaminateSettings()
    """null: benchmarks may be trained on."""
    split: SplitSettings = SplitSettings()
    executor: Literal["local", "ray"] = "local"
    """The cores of this machine, or Ray's (pip install 'affinage[ray]'). Like the next two it changes no result."""
    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Tasks at the same time; auto: one per core."""
    ray_address: str = ""
    """Address of a running cluster (`auto`, `HOST:6379`); by default Ray is started on this machine."""


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


class PackingSettings(Settings):
    """How documents are packed into sequences of tokens."""

    seq_len: int = Field(default=2048, ge=8)
    """Tokens of a sequence."""
    num_shards: int = Field(default=1, ge=1)
    """Files of the training sequences, at least one per source and language, at most one per 8 MB of text ingested."""
    strategy: Literal["concat", "best_fit"] = "concat"
    """best_fit keeps documents whole where they fit."""
    output_path: str = ""
    """Where training sequences are written and read (gs://bucket/rows); by default the step's folder."""
