"""Settings of one source of text or conversations, and the presets of well-known corpora."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from affinage.config.settings import Bytes, Settings
from affinage.config.yaml import parse

POCKET_WORLD = "pocket-world"
POCKET_BYTES = 3_000_000  # of the pocket world, where a recipe gives no size
_PLACE = ("path", "dataset", "config", "data_dir", "split", "revision")
_SUFFIX = re.compile(
    r"\.(txt|md|markdown|jsonl|ndjson|parquet|warc|wet|xml)(\.(gz|zst|bz2|xz))?$|\.(gz|zst|bz2|xz)$", re.IGNORECASE
)
Language = Annotated[str, StringConstraints(to_lower=True)]


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
    def title(self) -> str:
        """Its name, or one made from where it is; safe as a part of a file name."""
        return safe_name(self.name) if self.name else default_name(self.path or f"{self.dataset}/{self.config}")


class SourceSettings(PlaceSettings):
    """One source of documents. A plain string in a recipe is short for `path`."""

    preset: str = ""
    """In place of both: a well-known corpus, fineweb-edu, oscar-2301, the-stack, wikipedia or gutenberg."""
    kind: Literal["text", "code", "gutenberg"] = "text"
    """code skips language id, is wrapped in <|code|> <|endcode|> and is a group of its own beside the languages;
    gutenberg is a book of Project Gutenberg, cut into chapters without its header and license."""
    language: Language = ""
    """ISO 639-1 code of what is wanted of it: documents that language id does not find to be in it are removed. By
    default all of the recipe's languages are."""
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
    license_key: str = ""
    """Key of its license; by default licence or license."""
    filter: dict[str, str | tuple[str, ...]] = {}
    """Keep only the records whose key has this value, or one of these."""
    max_bytes: Bytes | None = None
    """Maximum amount of text, such as 40MB; of the pocket world, the amount that is generated."""
    sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """Hash of the file at a web address, checked after the download."""
    download: bool = True
    """Download files at web addresses once into the cache; false: read them over the network each time."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        return with_preset(given) if isinstance(given, dict) and given.get("preset") else given

    @model_validator(mode="after")
    def _hash_of_a_download(self) -> "SourceSettings":
        if self.sha256 and not (self.path.startswith(("http://", "https://")) and self.download):
            raise ValueError("`sha256` is checked of files that are downloaded from a web address")
        if self.trust_language and not self.language:
            raise ValueError("`trust_language` needs a `language`")
        return self

    @property
    def title(self) -> str:
        """See `PlaceSettings.title`; of a preset its name and language."""
        preset = "-".join(filter(None, (self.preset, self.language))) if self.preset else ""
        return safe_name(self.name or preset) if self.name or preset else super().title


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a source with those of its preset filled in; what the recipe gives itself wins.

    Raises ValueError for a preset that does not exist, or needs a language that is not given.
    """
    name, presets = given["preset"], _presets()
    if not isinstance(name, str) or name not in presets:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(presets)}")
    language = str(given.get("language") or presets[name].get("language", "")).lower()
    elsewhere = given.get("path") or given.get("dataset")
    filled = {key: value for key, value in presets[name].items() if not (elsewhere and key in _PLACE)}
    if not language and any("{language}" in value for value in filled.values()):
        raise ValueError(f"the preset {name!r} needs a `language`")
    return {key: value.replace("{language}", language) for key, value in filled.items()} | dict(given)


@functools.cache
def _presets() -> dict[str, dict[str, str]]:
    file = Path(__file__).with_name("presets.yaml")
    return dict(parse(file.read_text(encoding="utf-8"), file.name).value)


def path_from_string(value: Any) -> Any:
    """`x` is short for `path: x`."""
    return {"path": value} if isinstance(value, str) else value


Source = Annotated[SourceSettings, BeforeValidator(path_from_string, json_schema_input_type=str | SourceSettings)]


def safe_name(name: str) -> str:
    """The name with everything but letters, digits, dot, dash and underscore replaced, fit for a file name."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "source"


def default_name(path: str) -> str:
    """The name of a source without one: the last part of its path, without suffixes or globs."""
    parts = [part for part in re.split(r"[/\\]", path) if part and not re.search(r"[*?\[]", part)]
    return safe_name(_SUFFIX.sub("", parts[-1])) if parts else "source"
