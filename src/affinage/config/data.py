"""Settings of the road from raw text to rows of tokens."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, Field, model_validator

from affinage.config.cleaning import CleanSettings, DecontaminateSettings
from affinage.config.settings import Bytes, Settings
from affinage.config.sources import POCKET_WORLD, Language, Source, SourceSettings, path_from_string

__all__ = [
    "DIGITS",
    "POCKET_WORLD",
    "ArraySettings",
    "CleanSettings",
    "DataSettings",
    "DedupSettings",
    "PackingSettings",
    "SourceSettings",
    "SplitSettings",
    "TokenizerSettings",
]

DIGITS = "digits"


class DedupSettings(Settings):
    """Exact and near duplicates (MinHash-LSH with the exact Jaccard similarity checked on candidates)."""

    threshold: float = Field(default=0.8, gt=0, le=1)
    """Of word n-gram sets; pairs at or above are duplicates."""
    n_grams: int = Field(default=5, ge=1)
    """Words per shingle."""
    num_buckets: int = Field(default=16, ge=1)
    """16 bands of 6 rows find a pair at exactly J = 0.8 with p = 0.992."""
    hashes_per_bucket: int = Field(default=6, ge=1)
    """Hashes in a band: more of them find fewer pairs below `threshold`."""


class SplitSettings(Settings):
    """The part of the corpus that is never trained on."""

    validation_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Share of documents, per source and language."""
    group_separator: str = ""
    """Documents whose ids agree up to it stay together: "#" keeps the sections of a book so."""
    max_similarity: float = Field(default=0.8, ge=0, le=1)
    """Training documents as near to a validation document (Jaccard of word 5-grams), or nearer, are left out; 0: none.
    """
    by: Literal["document", "tail"] = "document"
    """Tail: the last part of every document (for a single long text)."""


class ArraySettings(Settings):
    """Images instead of text. A plain string in a recipe is short for `path`."""

    path: str
    """.npz, or .npy without labels, or `digits` for scikit-learn's 1,797 handwritten digits of 8 x 8 pixels."""
    images: str = "images"
    """The array of an .npz that holds them: [N, height, width] or with channels last."""
    labels: str = "labels"
    """The array that holds their classes; never trained on, only probed for."""
    validation_fraction: float = Field(default=0.25, ge=0, lt=1)
    """Share of images that is never trained on."""


class DataSettings(Settings):
    """Where the text comes from and what is done to it before it becomes tokens; or `arrays`, and nothing else."""

    sources: tuple[Source, ...] = Field(default=(), min_length=1, validate_default=False)
    arrays: Annotated[
        ArraySettings | None, BeforeValidator(path_from_string, json_schema_input_type=str | ArraySettings | None)
    ] = None
    sample: float = Field(default=1.0, gt=0, le=1)
    """Share of the documents of each source, chosen by their ids."""
    on_error: Literal["skip", "raise"] | None = None
    """Records that cannot be read, and files that are truncated or damaged: `skip` counts them and keeps what can be
    read, `raise` ends with an error. Default: records are skipped and counted, a damaged file is an error."""
    root: str = ""
    """A folder or URL that relative source paths start from; default: the working directory."""
    mirror: str = ""
    """A folder or URL with a copy of every remote source, each in a folder of its name; used instead."""
    languages: tuple[Language, ...] = ("en", "fr")
    """ISO 639-1; documents in others are removed; []: none is."""
    clean: CleanSettings = CleanSettings()
    dedup: DedupSettings | None = DedupSettings()
    """Null: keep duplicates."""
    decontaminate: DecontaminateSettings | None = DecontaminateSettings()
    """Null: benchmarks may be trained on."""
    split: SplitSettings = SplitSettings()
    executor: Literal["local", "ray"] = "local"
    """How the work is done, never what comes out: these are in no stage's key. the cores of this machine, or Ray's (pip
    install 'affinage[ray]')."""
    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Tasks at the same time; auto: one a core."""
    ray_address: str = ""
    """Of a running cluster (`auto`, `HOST:6379`); empty: Ray is started on this machine."""
    ray_open_cluster: bool = False
    """Join also one that others can reach, and that asks for no token."""
    memory_bytes: Bytes = ByteSize(512_000_000)
    """What deduplication's sorting and comparing may hold at once."""

    @model_validator(mode="after")
    def _text_or_arrays(self) -> "DataSettings":
        if bool(self.sources) == (self.arrays is not None):
            raise ValueError("give either `sources` of text, or `arrays`")
        return self


class TokenizerSettings(Settings):
    """How text becomes token ids. Ids 0 to 7 are always pad, unk, s, /s, code, endcode, im_start, im_end."""

    kind: Literal["bpe", "char"] = "bpe"
    """SentencePiece BPE with byte fallback, or one id per character."""
    vocab_size: int = Field(default=50_000, ge=300)
    """Pieces, the special ones included; `char` ignores it."""
    character_coverage: float = Field(default=0.9999, gt=0, le=1)
    """Share of the corpus's characters that get a piece of their own."""
    sample_bytes: Bytes = ByteSize(100_000_000)
    """Text to train on, balanced over languages; RAM is about 10x."""
    split_digits: bool = True
    """Every digit its own token, so that numbers have one spelling."""
    compare: tuple[str, ...] = ()
    """Published tokenizers to measure ours beside: tokenizer.json, .model, vocab.bpe."""


class PackingSettings(Settings):
    """How documents are packed into rows of tokens."""

    seq_len: int = Field(default=2048, ge=8)
    """Tokens in a row."""
    num_shards: int = Field(default=1, ge=1)
    """Files that the training rows are spread over, at least 1 a source and language."""
    strategy: Literal["concat", "best_fit"] = "concat"
    """Best_fit keeps documents whole where they fit into a row."""
    output_path: str = ""
    """Where training rows are written and read (gs://bucket/rows); default: the step's folder."""
