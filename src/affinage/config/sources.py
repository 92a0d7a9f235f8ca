"""Settings of one source of text, and where its text is."""

import os
import re
from collections.abc import Container, Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from affinage.config.presets import with_preset
from affinage.config.settings import Bytes, Settings

POCKET_WORLD = "pocket-world"
POCKET_BYTES = 3_000_000  # of the pocket world, unless a recipe says how much
_SUFFIX = re.compile(
    r"\.(txt|md|markdown|jsonl|ndjson|parquet|warc|wet|xml)(\.(gz|zst|bz2|xz))?$|\.(gz|zst|bz2|xz)$", re.IGNORECASE
)


Language = Annotated[str, StringConstraints(to_lower=True)]


class SourceSettings(Settings):
    """One place that documents come from. A plain string in a recipe is short for `path`."""

    path: str = ""
    """A file, a folder, a glob, an fsspec URL, or `pocket-world` for the generated corpus."""
    dataset: str = ""
    """Instead of `path`: a dataset of the Hugging Face Hub, or a folder of `datasets`; streamed."""
    preset: str = ""
    """A well-known corpus: fineweb-edu, oscar-2301, the-stack, wikipedia, gutenberg."""
    config: str = ""
    """Of a dataset that has several."""
    data_dir: str = ""
    """A folder within a dataset, such as data/python."""
    split: str = "train"
    """Of a dataset."""
    revision: str = ""
    """Of a dataset: a branch, tag or commit, so that a later run reads the same."""
    name: str = ""
    """How reports call it; default: the last part of the path."""
    kind: Literal["text", "code", "gutenberg"] = "text"
    """Text; code: goes past language id, is wrapped in <|code|> <|endcode|> and is its own group beside the languages;
    gutenberg: a book of Project Gutenberg, freed of its header and licence and cut into chapters."""
    language: Language = ""
    """ISO 639-1 code, if the user knows it; default: identified per document."""
    license: str = ""
    """Carried with every document into the manifest."""
    text_key: str = "text"
    """The JSON key or Parquet column that holds the text; `a.b` is the key b within a."""
    id_key: str = "id"
    """Of a document; where it has none, its place in the file."""
    url_key: str = "url"
    """Or a pattern of other keys: https://example.org/{repository}/{path}."""
    license_key: str = ""
    """Default: licence or license."""
    filter: dict[str, str | tuple[str, ...]] = {}
    """Only records whose key has this value, or one of these."""
    max_bytes: Bytes | None = None
    """Of text, at most, such as 40MB; of the pocket world: how much is generated."""
    sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """Of the file at a URL, checked after the download."""
    download: bool = True
    """Files at URLs are fetched once into the cache; false: read over the network each time."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        return with_preset(given) if isinstance(given, dict) and given.get("preset") else given

    @model_validator(mode="after")
    def _one_place(self) -> "SourceSettings":
        if bool(self.path) == bool(self.dataset):
            raise ValueError("give either `path`, or `dataset`, or a `preset`")
        return self

    @property
    def title(self) -> str:
        """Its name, or one made from where it is; safe as a part of a file name."""
        if self.name or self.preset:
            return safe_name(self.name or "-".join(filter(None, (self.preset, self.language))))
        return default_name(self.path or f"{self.dataset}/{self.config}")

    @property
    def is_remote(self) -> bool:
        """Whether its text is on another machine: a URL, or a dataset of the Hub."""
        return is_url(self.path) or (bool(self.dataset) and not is_folder(self.dataset))


def path_from_string(value: Any) -> Any:
    """`x` is short for `path: x`."""
    return {"path": value} if isinstance(value, str) else value


Source = Annotated[SourceSettings, BeforeValidator(path_from_string, json_schema_input_type=str | SourceSettings)]


def location(source: SourceSettings, root: str, mirror: str) -> str:
    """Where the files of a source are; of a dataset that is not a local folder, its name on the Hub.

    Relative paths start from `root`. With a `mirror`, what is remote is `<mirror>/<name of the source>` instead.
    """
    if source.path == POCKET_WORLD:
        return POCKET_WORLD
    if mirror and source.is_remote:
        return f"{os.path.expanduser(mirror).rstrip('/')}/{source.title}"
    place = os.path.expanduser(source.path or source.dataset)
    if source.is_remote or not root or os.path.isabs(place) or "://" in place:
        return place
    return f"{os.path.expanduser(root).rstrip('/')}/{place}"


def is_on_hub(source: SourceSettings, mirror: str) -> bool:
    """Whether a source is a dataset that must be asked of the Hub."""
    return bool(source.dataset) and source.is_remote and not mirror


def safe_name(name: str) -> str:
    """The name with everything but letters, digits, dot, dash and underscore replaced, fit for a file name."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "source"


def default_name(path: str) -> str:
    """How reports call a source whose recipe gives no name: the last part of its path, without suffixes or globs."""
    parts = [part for part in re.split(r"[/\\]", path) if part and not re.search(r"[*?\[]", part)]
    return safe_name(_SUFFIX.sub("", parts[-1])) if parts else "source"


def is_url(path: str) -> bool:
    """Whether a path leads off this machine."""
    return "://" in path and not path.startswith(("file://", "memory://"))


def is_folder(dataset: str) -> bool:
    """Whether a dataset is a folder: the Hub's names are `name` or `owner/name`, everything else is a path."""
    return dataset.startswith((".", "/", "~")) or dataset.count("/") > 1


def unique(title: str, taken: Container[str]) -> str:
    """The title, with the first number from 2 on that makes it another than those taken."""
    name, number = title, 2
    while name in taken:
        name, number = f"{title}-{number}", number + 1
    return name


def leads_back(link: str, above: Iterable[str]) -> bool:
    """Whether a link leads to a folder that it lies in; `above` are the real paths of those that led to it."""
    target = os.path.realpath(link)
    return any(f"{one}/".startswith(f"{target}/") for one in above)


def printable(path: str) -> str:
    """A path as text: bytes in it that are not UTF-8, as old archives have them, are spelled (caf\\xe9.txt)."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
