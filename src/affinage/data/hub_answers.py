"""What the Hugging Face Hub answers when it does not give what was requested, in the words of a message."""

from affinage.errors import TransientError, UserError, causes, first_line

_NETWORK = ("httpx", "httpx2", "aiohttp", "huggingface_hub")  # packages whose errors are of the network, not of a file
PATIENCE = 120.0  # seconds without an answer after which a request to the Hub has failed
_LATER = "Run the same command again: what is complete is kept."
_COPIES = {  # what there is without the Hub
    "dataset": "A copy on this machine can be named as the source's `path`, or in data.mirror.",
    "model": "The folder of a copy on this machine can be named instead.",
}


def limit_requests(seconds: float = PATIENCE) -> None:
    """Give huggingface_hub's requests a limit: they have none where a Hub accepts the connection and sends nothing."""
    from huggingface_hub import get_session

    get_session().timeout = seconds


def refusal(error: Exception, kind: str, name: str, *, revision: str = "", where: str = "") -> UserError:
    """The message for an error that the Hub, or the way to it, answered a request for a repository with.

    It is a TransientError where a later attempt may succeed.

    Args:
        error: as huggingface_hub or `datasets` raised it.
        kind: `dataset` or `model`.
        name: of the repository.
        revision: that was requested, if any.
        where: in the recipe, for the message.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cause = next((one for one in causes(error) if isinstance(one, HfHubHTTPError)), error)
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    if isinstance(cause, GatedRepoError):
        fix = f"Accept its terms at {page}, then log in: hf auth login."
        return UserError(f"the {kind} {name!r} is gated", where=where, fix=fix)
    if isinstance(cause, RevisionNotFoundError):
        return UserError(f"the {kind} {name!r} has no revision {revision!r}", where=where, fix=f"Those it has: {page}")
    if isinstance(cause, RepositoryNotFoundError | HFValidationError):
        fix = "Is the name right? A folder on this machine is written ./FOLDER; private ones need: hf auth login."
        return UserError(f"the Hub has no such {kind} (or hides it): {name!r}", where=where, fix=fix)
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        answer = f"{status} {cause.response.reason_phrase}".strip()
        if status == 401:
            known = "authorization" in cause.response.request.headers
            what = "does not accept the token" if known else "answers nobody without a token"
            return UserError(f"the Hub {what}: {answer}", where=where, fix="Log in: hf auth login. Or set HF_TOKEN.")
        if status == 429 or status >= 500:
            what = f"the Hub cannot give the {kind} {name!r} now: {answer}"
            return TransientError(what, where=where, fix=_LATER)
        return UserError(f"the Hub refuses the {kind} {name!r}: {first_line(cause)}", where=where)
    what = f"the Hugging Face Hub cannot be reached for the {kind} {name!r}: {first_line(error)}"
    if any(isinstance(one, OfflineModeIsEnabled) for one in causes(error)):
        return UserError(what, where=where, fix=f"HF_HUB_OFFLINE forbids it. {_COPIES[kind]}")
    return TransientError(what, where=where, fix=f"Is there a network? {_COPIES[kind]}")


def dataset_of(url: str) -> str:
    """The dataset that a file at hf://datasets/OWNER/NAME... is of; "" for other URLs."""
    return "/".join(url.split("/")[3:5]).partition("@")[0] if url.startswith("hf://datasets/") else ""


def refusal_of(url: str, error: BaseException | None, where: str = "") -> UserError | None:
    """The message where the Hub refuses a dataset of its; None for other URLs, and for what may pass."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    if not dataset_of(url) or not isinstance(error, Exception):
        return None
    answer = next((one for one in causes(error) if isinstance(one, HfHubHTTPError)), None)
    if answer is None or isinstance(answer, EntryNotFoundError) or answer.response.status_code not in (401, 403, 404):
        return None
    return refusal(error, "dataset", dataset_of(url), revision=url.partition("@")[2].partition("/")[0], where=where)


def is_of_the_network(error: Exception) -> bool:
    """Whether something failed because of the Hub or the way to it, and not because of what is in a file."""
    return any(
        isinstance(one, ConnectionError | TimeoutError) or type(one).__module__.partition(".")[0] in _NETWORK
        for one in causes(error)
    )
