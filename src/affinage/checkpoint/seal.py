"""The seal of a checkpoint: SHA256SUMS, written last, with the hash of every file; `sha256sum -c` reads it, too.

A signed one has a line before those, which is a comment to `sha256sum`: an HMAC-SHA256 (RFC 2104) of all the others,
which whoever does not have the key can neither make nor change.
"""

import errno
import hashlib
import hmac
import os
import re
import stat
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from affinage.errors import raise_of_network
from affinage.signing import KEY_VARIABLE

SEAL = "SHA256SUMS"
_LARGEST = 2**26  # bytes of a seal: half a million files, where a checkpoint has some for each host
_LINE = re.compile(r"([0-9a-f]{64})  (\S[^\n]*)")
_SIGNED = re.compile(r"# hmac-sha256 ([0-9a-f]{64})")
UNSIGNED = f"it is not signed with the key that {KEY_VARIABLE} names"  # what is wrong with a seal, then


class Unsigned(ValueError):
    """A seal is whole, or not, but nobody has signed it with our key."""

    def __init__(self) -> None:
        super().__init__(UNSIGNED)


def seal(folder: Path, key: bytes | None = None) -> None:
    """Hash all files of a folder onto the disk, then write the seal; until then the folder has none.

    One thread reads, because a training goes on meanwhile. With a key it is signed.
    """
    names = sorted(name for name, status in _entries(folder) if stat.S_ISREG(status.st_mode))
    lines = [f"{_digest(folder / name, sync=True)}  {name}\n" for name in names]
    for inner, _, _ in os.walk(folder):
        _sync_folder(Path(inner))
    _write(folder, "".join(lines).encode(), key)


def sign(folder: Path, key: bytes) -> None:
    """Sign the seal that a folder has, whatever its files are; one that was signed with another key, anew.

    Raises ValueError or OSError if it cannot be read.
    """
    sealed = _read(folder / SEAL)
    _write(folder, "".join(f"{digest}  {name}\n" for name, digest in sealed.items()).encode(), key)


def _write(folder: Path, lines: bytes, key: bytes | None) -> None:
    part = folder / f".{SEAL}.part"
    with open(part, "wb") as file:
        if key is not None:
            file.write(f"# hmac-sha256 {_signature(lines, key)}\n".encode())
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / SEAL)
    _sync_folder(folder)


def _signature(lines: bytes, key: bytes) -> str:
    return hmac.digest(key, lines, "sha256").hex()


def damage(folder: Path, only: Collection[str] | None = None, key: bytes | None = None) -> str:
    """What is wrong with a sealed folder, in a few words; "" if it is bit for bit what was sealed.

    Found are changed, missing, additional, exchanged and linked files, and a seal that is not whole: a change of any
    of its lines either breaks the line, or makes it the line of another file or of other contents. Files whose name
    begins with a dot are nobody's.

    Args:
        folder: what `seal` was called with, or a copy of it.
        only: read the contents of the files in these sub-folders, and beside them, alone; None: of all files.
        key: that it must be signed with; None: whether it is signed does not matter.

    Raises:
        OSError: it could not be looked at, which says nothing of the folder: the network of the disk failed.
    """
    if folder.is_symlink():
        return "it is a symbolic link"
    try:
        sealed = _read(folder / SEAL, key)
    except (OSError, ValueError) as error:
        raise_of_network(error)
        return unreadable(error)
    found = dict(_entries(folder))
    for name, status in found.items():
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is a symbolic link, or no file at all"
    if missing := sorted(sealed.keys() - found.keys()):
        return f"{missing[0]} is missing"
    if added := sorted(found.keys() - sealed.keys() - {SEAL}):
        return f"{added[0]} was not there when it was sealed"
    wanted = [name for name in sealed if only is None or "/" not in name or name.partition("/")[0] in only]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda name: _digest(folder / name), wanted)
        try:
            changed = [name for name, digest in zip(wanted, digests, strict=True) if digest != sealed[name]]
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return f"it cannot be read: {error}"  # a sector of the disk is lost
    return f"{changed[0]} is not what was written" if changed else ""


def unreadable(error: OSError | ValueError) -> str:
    """What is wrong with a folder whose seal is not taken, from what reading it, or `parse`, has raised."""
    return UNSIGNED if isinstance(error, Unsigned) else f"its {SEAL} cannot be read: {error}"


def seal_hash(folder: Path) -> str:
    """A hash of all that was sealed, which names a checkpoint wherever it is copied to."""
    return _digest(folder / SEAL)


def is_what_was_sealed(path: Path, digest: str) -> bool:
    """Whether there is a file with this hash."""
    return path.is_file() and not path.is_symlink() and _digest(path) == digest


def _read(path: Path, key: bytes | None = None) -> dict[str, str]:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is a symbolic link, or no file at all")
    if status.st_size > _LARGEST:
        raise ValueError(f"it has {status.st_size:,} bytes")
    return parse(path.read_bytes(), key)


def parse(contents: bytes, key: bytes | None = None) -> dict[str, str]:
    """{name: hash} of the contents of a seal.

    Raises:
        Unsigned: a key is given, and it is not signed with that.
        ValueError: it is not whole.
    """
    text = contents.decode("utf-8")
    if not text.endswith("\n"):
        raise ValueError("it is cut off")
    first, *others = lines = text[:-1].split("\n")
    if signed := _SIGNED.fullmatch(first):
        lines = others
    if key is not None:
        of = _signature("".join(f"{line}\n" for line in lines).encode(), key)
        if signed is None or not hmac.compare_digest(signed[1], of):
            raise Unsigned
    sealed: dict[str, str] = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None or match[2] in sealed:
            raise ValueError(f"{line[:80]!r} is no line of it")
        sealed[match[2]] = match[1]
    return sealed


def _entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder but folders, by its path; links are not followed, and what begins with a dot not told.

    A link is an entry, be it to a file or to a folder.
    """
    for inner, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(inner, name)
            status = path.lstat()
            if name.startswith(".") or stat.S_ISDIR(status.st_mode):
                continue
            yield path.relative_to(folder).as_posix(), status


def _digest(path: Path, *, sync: bool = False) -> str:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return digest


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
