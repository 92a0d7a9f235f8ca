"""What lies behind a network: places at URLs, another try where one fails, and what the Hugging Face Hub answers."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from affinage.errors import TransientError, UserError, causes, first_line, is_transient

Result = TypeVar("Result")
PAUSES = (1.0, 4.0, 16.0)  # seconds before work that met a passing error of the network is tried again


def is_local(place: str) -> bool:
    """Return whether a path or URL is of this machine's file system."""
    return "://" not in place or place.startswith(("file://", "local://"))


def is_url(path: str) -> bool:
    """Whether a path leads off this machine."""
    return not (is_local(path) or path.startswith("memory://"))


def is_inside(name: str) -> bool:
    """Whether a name that somebody else wrote is of a file below a folder, and leads nowhere else."""
    return "\\" not in name and "\0" not in name and not {"", ".", ".."} & {*name.split("/")}


@contextlib.contextmanager
def errors_at(url: str) -> Iterator[None]:
    """Turn errors in here into a UserError that names the URL; what may pass on the network stays as it is."""
    try:
        yield
    except (ImportError, ValueError, OSError) as error:
        if is_transient(error):
            raise
        fix = "May you read and write there? Packages for gs:// come with pip install 'affinage[gcs]', those for s3:// "
        fix += "with 'affinage[s3]'. What is complete is kept; run again to go on."
        raise UserError(f"this place cannot be used: {error or type(error).__name__}", where=url, fix=fix) from error


def upload(filesystem: Any, path: str, contents: bytes) -> None:
    """Write a file of these bytes at a path of a file system; an object store shows it once it is complete."""
    protocols = filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,)
    # gcsfs sends less than a chunk as one part between lines, and servers disagree on where a part ends that has a
    # carriage return or such a line of its own. A whole chunk is sent as it is.
    options = {"chunksize": min(len(contents), 50 * 2**20)} if "gs" in protocols and contents else {}
    filesystem.pipe_file(path, contents, **options)


def with_retries(work: Callable[[], Result], where: str = "") -> Result:
    """Return what `work` returns, tried again after each of `PAUSES` where the network fails.

    Raises TransientError, after which a run may be started again, if it keeps failing; other errors at once.
    """
    for pause in (0.0, *PAUSES):
        time.sleep(pause)
        try:
            return work()
        except Exception as error:
            if isinstance(error, UserError) or not is_transient(error):
                raise
            failure = error
    what = f"the network failed {len(PAUSES) + 1} times: {first_line(failure)}"
    raise TransientError(what, where=where, fix="Run the same command again: what is complete is kept.") from failure


# ---- the Hub ----


def limit_requests(seconds: float = 120.0) -> None:
    """Let huggingface_hub's requests fail after some seconds without an answer, for which they would wait forever."""
    from huggingface_hub import get_session

    get_session().timeout = seconds


def refusal(error: Exception, kind: str, name: str, *, revision: str = "", where: str = "") -> UserError:
    """The message for an error of huggingface_hub or `datasets`; a TransientError if it may pass.

    `kind` is dataset or model, `name` and `revision` are of the repository, and `where` is the place in the recipe.
    """
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    for cause in causes(error):
        final = isinstance(cause, errors.HFValidationError | errors.OfflineModeIsEnabled)
        if isinstance(cause, errors.GatedRepoError):
            fix = f"Accept its terms at {page}, then log in: hf auth login."
            return UserError(f"the {kind} {name!r} is gated", where=where, fix=fix)
        if final or (isinstance(cause, errors.HfHubHTTPError) and not is_transient(cause)):
            what = f"the Hub does not give the {kind} {name!r}" + (f" at revision {revision!r}" if revision else "")
            fix = f"Is the name right? See {page}. Private ones need: hf auth login (or HF_TOKEN). A folder on this "
            return UserError(f"{what}: {first_line(cause)}", where=where, fix=f"{fix}machine is written ./FOLDER.")
    what = f"the Hugging Face Hub cannot be reached for the {kind} {name!r}: {first_line(error)}"
    fix = f"Is there a network? Run the same command again, or name a copy of the {kind} on this machine in its place"
    return TransientError(what, where=where, fix=fix + (", or data.mirror." if kind == "dataset" else "."))
