"""Well-known corpora: where they are, what their columns are called, and under which licence they come.

Names, columns and licences are those of the dataset cards on huggingface.co; `{language}` is the source's `language`.
"""

from collections.abc import Mapping
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # 1.3T tokens of English web pages, chosen by a classifier for educational value.
    "fineweb-edu": {
        "dataset": "HuggingFaceFW/fineweb-edu",
        "config": "default",
        "url_key": "url",
        "language": "en",
        "license": "odc-by",
    },
    # Common Crawl of November 2022 by language. Gated: accept its terms on the Hub, then `hf auth login`. Its loading
    # script no longer runs, so its files are read; 2301 holds `content`, and the record's headers beside it.
    "oscar-2301": {
        "path": "hf://datasets/oscar-corpus/OSCAR-2301/{language}_meta/*.jsonl.zst",
        "text_key": "content",
        "id_key": "warc_headers.warc-record-id",
        "url_key": "warc_headers.warc-target-uri",
        "license": "cc0-1.0 (metadata only; the pages have their authors' rights)",
    },
    # Source code under permissive licences, near-deduplicated. Gated like OSCAR. `data_dir: data/python` takes one
    # programming language, `filter: {lang: [Python, Java]}` reads all and keeps these.
    "the-stack": {
        "dataset": "bigcode/the-stack-dedup",
        "kind": "code",
        "text_key": "content",
        "id_key": "hexsha",
        "url_key": ("https://github.com/{max_stars_repo_name}/blob/{max_stars_repo_head_hexsha}/{max_stars_repo_path}"),
        "license_key": "max_stars_repo_licenses",
    },
    # Wikipedia as plain text. A newer one is the `path` of a dump: .../frwiki-latest-pages-articles-multistream.xml.bz2
    "wikipedia": {
        "dataset": "wikimedia/wikipedia",
        "config": "20231101.{language}",
        "url_key": "url",
        "license": "cc-by-sa-4.0",
    },
    # Books in the public domain in the USA; the splits are named by language.
    "gutenberg": {"dataset": "manu/project_gutenberg", "split": "{language}", "kind": "gutenberg"},
}

# What says where the text is: a source that gives one of them takes none of these from its preset.
_PLACE = ("path", "dataset", "config", "data_dir", "split", "revision")


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a source with what its preset says filled in; what the recipe gives itself wins.

    Raises ValueError for a preset that does not exist, or needs a language that is not given.
    """
    name = given["preset"]
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    preset = PRESETS[name]
    language = str(given.get("language") or preset.get("language", "")).lower()
    elsewhere = bool(given.get("path") or given.get("dataset"))
    filled = {}
    for key, value in preset.items():
        if elsewhere and key in _PLACE:
            continue
        if isinstance(value, str) and "{language}" in value:
            if not language:
                raise ValueError(f"the preset {name!r} needs a `language`")
            value = value.replace("{language}", language)
        filled[key] = value
    return filled | dict(given)
