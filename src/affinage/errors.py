"""Errors that are the user's, or the machine's, and not defects: one message each, and an exit status."""

import contextlib
import difflib
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from affinage.secrets import masked

EXIT_USER_ERROR = 2  # a mistake in the input: one message, no traceback
EXIT_INTERRUPTED = 130  # by Ctrl-C, as a shell calls it
EXIT_PREEMPTED = 75  # stopped from outside after saving; EX_TEMPFAIL, so that a scheduler starts the run again

_NO_ROOM, _TOO_MANY = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), (errno.EMFILE, errno.ENFILE)
OF_NO_FILE = (*_NO_ROOM, *_TOO_MANY)  # errors of a machine that say nothing of the file that is read
_OF_A_NETWORK = (errno.ESTALE, errno.ETIMEDOUT)
_TRANSIENT = (errno.EIO, *_OF_A_NETWORK)
# Errors of these packages are of no file.
_NETWORK_PACKAGES = ("httpx", "httpx2", "requests", "urllib3", "aiohttp", "huggingface_hub", "botocore")
_FIXES = {  # errors of files that are no defect of ours -> what to do
    _NO_ROOM: "Make room, then run the same command again: what is complete is kept.",
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP): (
        "Name another file or folder, or let this one be read and written."
    ),
    _TRANSIENT: "The disk or its network failed: look there first.",
    _TOO_MANY: "Too many files are open: `ulimit -n 65536` lets more be.",
}
_NUMPY_HAS_NO_ROOM = re.compile(r"\d+ requested and \d+ written")  # of ndarray.tofile, and so of numpy.save
_OF_SQLITE = {8: errno.EROFS, 10: errno.EIO, 13: errno.ENOSPC, 14: errno.EACCES}  # by its own codes
_FULL = 2**24  # bytes: a disk with less has no room, and a file may have been removed since
_NUMBER = re.compile(r"\(os error (\d+)\)|os_error_code='(\d+)'")  # in messages of safetensors and TensorStore
# In messages of JAX's distributed runtime: of its collectives on CPUs and on GPUs, and of its coordinator.
_PEER_IS_GONE = re.compile(
    r"Gloo .* failed.*(by peer|imed out|timeout|Broken pipe|Connection refused|Socket closed)"
    r"|remote process exited|(UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED): .*CoordinationService",
    re.DOTALL | re.IGNORECASE,
)


class UserError(Exception):
    """A mistake of the user in one message: what is wrong, where, and what to do about it.

    The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        return masked(f"{line}\n  {self.fix}" if self.fix else line)


class TransientError(UserError):
    """A failure that may be over at the next try, such as that of a disk behind a network.

    The command line exits with status 1, after which `affinage launch` starts the run again, unlike after a mistake.
    """


class UserWarned(UserWarning):
    """A warning for users, without consequences; the command line prints it as one line."""


class Preempted(Exception):
    """The run was stopped from outside and has saved itself; the command line exits with EXIT_PREEMPTED."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question whether the user meant the nearest of `known`; "" if none is near."""
    return meant(difflib.get_close_matches(word, list(known), n=1))


def meant(names: Iterable[str]) -> str:
    """Return the question whether the user meant the first of `names`, or one of the others; "" for none."""
    first, *others = [f"`{name}`" for name in names] or [""]
    return (f"Did you mean {first}?" + (f" Or {', '.join(others)}?" if others else "")) if first else ""


def folder_is_gone(folder: str | os.PathLike[str], when: str) -> UserError:
    """Return the message that somebody has deleted or moved a folder of the user's runs, with words for when."""
    fix = "If it was moved, move it back or name its place with --runs. Then run the same command again."
    return UserError(f"this folder was deleted or moved {when}", where=str(folder), fix=fix)


@contextlib.contextmanager
def reports_move(file: Path) -> Iterator[None]:
    """Inside, whatever fails while somebody has deleted or moved the folder of `file` is a UserError that says so.

    A write that does not tell where it failed gets the name of the folder, if its disk is full.
    """
    try:
        yield
    except Exception as error:
        try:
            file.stat()
            is_nameless = errno_of(error) == errno.ENOSPC and not getattr(error, "filename", None)
            if is_nameless and shutil.disk_usage(file.parent).free < _FULL:
                error.filename = str(file.parent)  # type: ignore[attr-defined]
        except FileNotFoundError:
            if not isinstance(error, UserError | Preempted):
                raise folder_is_gone(file.parent, "while its result was made") from error
        except OSError:  # such as of a network
            pass
        raise


def of_the_machine(error: Exception) -> UserError | None:
    """Return the message about an error of files or of another process, no defect of affinage; None for all others."""
    if any(isinstance(cause, RuntimeError) and _PEER_IS_GONE.search(str(cause)) for cause in causes(error)):
        return TransientError("another process was lost; run the same command again")
    number = errno_of(error)
    fix = next((fix for numbers, fix in _FIXES.items() if number in numbers), None)
    if fix is None:
        return None
    kind = TransientError if number in _TRANSIENT else UserError
    return kind(os.strerror(number).lower(), where=str(getattr(error, "filename", None) or ""), fix=fix)


def errno_of(error: BaseException) -> int:
    """Return the number of an error of files, also where a library has it in its message only; 0 for other errors."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if isinstance(error, OSError) and _NUMPY_HAS_NO_ROOM.fullmatch(str(error)):
        return errno.ENOSPC
    if code := getattr(error, "sqlite_errorcode", None):
        return _OF_SQLITE.get(code & 0xFF, 0)
    in_words = _NUMBER.search(str(error))
    return int(in_words[1] or in_words[2]) if in_words else 0


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes; not what was merely being handled, such as a file that need not be there."""
    while error is not None:
        yield error
        error = error.__cause__


def is_of_network(error: BaseException) -> bool:
    """Return whether a network, or a package that speaks over one, is where an error comes from."""
    return any(
        isinstance(cause, ConnectionError | TimeoutError)
        or errno_of(cause) in _OF_A_NETWORK
        or type(cause).__module__.partition(".")[0] in _NETWORK_PACKAGES
        for cause in causes(error)
    )


def is_transient(error: BaseException) -> bool:
    """Return whether the network, or a server that may answer later, is to blame, so that another try may succeed."""
    for cause in causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None) or getattr(cause, "status", None)
        if isinstance(status, int) and 400 <= status < 500 and status not in (408, 429):
            return False
    return is_of_network(error)


def raise_of_network(error: BaseException) -> None:
    """Raise the failure of a disk's network that an error comes from, if any: it says nothing of the file.

    EIO is not one: a sector that cannot be read stays so.
    """
    for cause in causes(error):
        if (number := errno_of(cause)) in _OF_A_NETWORK:
            raise (cause if isinstance(cause, OSError) else OSError(number, os.strerror(number))) from error


def plain(text: str) -> str:
    """Return foreign text without characters that control a terminal; spaces that do not break are none."""
    return "".join(
        letter if letter.isprintable() or letter in "\u00a0\u202f" else repr(letter)[1:-1] for letter in text
    )


def first_line(error: BaseException) -> str:
    """Return the message of an error in one line of at most 300 letters."""
    lines = str(error).strip().splitlines()
    return plain(lines[0][:300]) if lines else type(error).__name__
