"""The messages for what the Hugging Face Hub answers when it does not give what was requested."""

from affinage.errors import TransientError, UserError, causes, first_line, is_transient

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
    """The message for an error with which the Hub, or the way to it, answered; a TransientError if it may pass.

    `error` is as huggingface_hub or `datasets` raised it, `kind` is dataset or model, `name` and `revision` are of the
    repository, and `where` is the place in the recipe.
    """
    from huggingface_hub import constants, errors

    cause = next((one for one in causes(error) if isinstance(one, errors.HfHubHTTPError)), error)
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    answer = ""
    if isinstance(cause, errors.HfHubHTTPError):
        answer = f"{cause.response.status_code} {cause.response.reason_phrase}".strip()
    copies = _COPIES[kind]
    match cause:
        case errors.GatedRepoError():
            what, fix = f"the {kind} {name!r} is gated", f"Accept its terms at {page}, then log in: hf auth login."
        case errors.RevisionNotFoundError():
            what, fix = f"the {kind} {name!r} has no revision {revision!r}", f"Those it has: {page}"
        case errors.RepositoryNotFoundError() | errors.HFValidationError():
            what = f"the Hub has no such {kind} (or hides it): {name!r}"
            fix = "Is the name right? A folder on this machine is written ./FOLDER; private ones need: hf auth login."
        case errors.HfHubHTTPError() if cause.response.status_code == 401:
            known = "authorization" in cause.response.request.headers
            what = f"the Hub {'does not accept the token' if known else 'answers nobody without a token'}: {answer}"
            fix = "Log in: hf auth login. Or set HF_TOKEN."
        case errors.HfHubHTTPError() if not is_transient(cause):
            what, fix = f"the Hub refuses the {kind} {name!r}: {first_line(cause)}", ""
        case errors.HfHubHTTPError():
            return TransientError(f"the Hub cannot give the {kind} {name!r} now: {answer}", where=where, fix=_LATER)
        case _:
            what = f"the Hugging Face Hub cannot be reached for the {kind} {name!r}: {first_line(error)}"
            if not any(isinstance(one, errors.OfflineModeIsEnabled) for one in causes(error)):
                return TransientError(what, where=where, fix=f"Is there a network? {copies}")
            fix = f"HF_HUB_OFFLINE forbids it. {copies}"
    return UserError(what, where=where, fix=fix)


def dataset_of(url: str) -> str:
    """The dataset that a file at hf://datasets/OWNER/NAME... is of; "" for other URLs."""
    return "/".join(url.split("/")[3:5]).partition("@")[0] if url.startswith("hf://datasets/") else ""


def refusal_of(url: str, error: Exception, where: str = "") -> UserError | None:
    """The message where the Hub refuses a dataset of its; None for other URLs, and for what may pass."""
    if not dataset_of(url):
        return None
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    answer = next((one for one in causes(error) if isinstance(one, HfHubHTTPError)), None)
    if answer is None or isinstance(answer, EntryNotFoundError) or answer.response.status_code not in (401, 403, 404):
        return None
    return refusal(error, "dataset", dataset_of(url), revision=url.partition("@")[2].partition("/")[0], where=where)


def is_of_the_network(error: Exception) -> bool:
    """Whether something failed because of the Hub or the way to it, and not because of what is in a file."""
    packages = ("httpx", "httpx2", "aiohttp", "huggingface_hub")
    return any(
        isinstance(one, ConnectionError | TimeoutError) or type(one).__module__.partition(".")[0] in packages
        for one in causes(error)
    )
