"""What a file holds and how it is compressed, by its name."""

TEXT_SUFFIXES = (".txt", ".md", ".markdown")  # one document a file
LINES_SUFFIXES = (".jsonl", ".ndjson")  # one document a line
TABLE_SUFFIXES = (".parquet",)  # one document a row
WARC_SUFFIXES = (".warc", ".wet")  # one document a web page
DUMP_SUFFIXES = (".xml",)  # one document an article of a MediaWiki dump
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
READABLE = ".txt, .md, .jsonl, .warc, .wet, MediaWiki's .xml (each also .gz, .zst, .bz2, .xz) and .parquet"

_KINDS = {
    "text": TEXT_SUFFIXES,
    "lines": LINES_SUFFIXES,
    "warc": WARC_SUFFIXES,
    "dump": DUMP_SUFFIXES,
}
# Source code is one document a file too, whatever its suffix; these are known not to be text.
_NO_CODE = (".png", ".jpg", ".gif", ".pdf", ".zip", ".tar", ".so", ".o", ".pyc", ".class", ".exe", ".bin", ".ico")


def compression_of(name: str) -> str:
    """The suffix that says how a file is compressed, or ""."""
    return next((suffix for suffix in COMPRESSED_SUFFIXES if name.lower().endswith(suffix)), "")


def kind_of(name: str, *, code: bool = False) -> str:
    """`text`, `lines`, `table`, `warc` or `dump` by the name's suffix; "" if affinage does not read such files.

    In a source of `code`, files of other names are text as well.
    """
    name = name.lower()
    if name.endswith(TABLE_SUFFIXES):
        return "table"
    bare = name.removesuffix(compression_of(name))
    found = next((kind for kind, suffixes in _KINDS.items() if bare.endswith(suffixes)), "")
    return "text" if code and (not found or found == "dump") and not bare.endswith(_NO_CODE) else found
