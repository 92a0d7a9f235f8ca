"""Files to where fsspec reaches, byte for byte, whatever they hold."""

from pathlib import Path
from typing import Any

_WHOLE = 64_000_000  # bytes of a file that is read before it is sent: one that grows meanwhile is sent as it was

# gcsfs sends what is short between lines `--==0==` that end with a line feed alone. A server that ends lines with both
# (RFC 2046, 5.1.1) takes a carriage return at the end of the contents for a part of such a line, and drops it.


def upload(filesystem: Any, path: str, contents: bytes) -> None:
    """Make a file of these bytes; what fsspec raises is raised."""
    if _is_googles(filesystem) and _would_be_cut(contents):
        filesystem.pipe_file(path, contents, chunksize=len(contents))  # what is as long as a chunk goes without lines
    else:
        filesystem.pipe_file(path, contents)


def upload_file(filesystem: Any, path: str, file: Path) -> None:
    """Copy a file there; what fsspec raises is raised."""
    contents = read_if_short(file) if _is_googles(filesystem) else None
    if contents is None:
        filesystem.put_file(str(file), path)
    else:
        upload(filesystem, path, contents)


def read_if_short(file: Path) -> bytes | None:
    """The contents of a file for `upload`; None of a long one, which any `put_file` sends in parts, as it is."""
    return file.read_bytes() if file.stat().st_size <= _WHOLE else None


def _would_be_cut(contents: bytes) -> bool:
    return contents.endswith(b"\r") or contents.startswith(b"--") or b"\n--" in contents


def _is_googles(filesystem: Any) -> bool:
    protocol = filesystem.protocol
    return "gs" in ((protocol,) if isinstance(protocol, str) else protocol)
