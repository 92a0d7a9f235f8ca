"""The messages for what the Hugging Face Hub answers when it does not give what was requested."""

from affinage.errors import TransientError, UserError, causes, first_line, is_transient

PATIENCE = 120.0  # seconds without an answer after which a request to the Hub has failed
_PACKAGES = ("httpx", "httpx2", "aiohttp", "huggingface_hub")


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

    cause = next((each for each in causes(error) if isinstance(each, errors.HfHubHTTPError)), None)
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    setting = "the source's `path`, or in data.mirror" if kind == "dataset" else "its place"
    fix = f"Is there a network? A copy on this machine can be named as {setting}."
    if cause is None and isinstance(error, errors.HFValidationError):
        what, fix = f"the Hub has no such {kind}: {name!r}", "A folder on this machine is written ./FOLDER."
    elif cause is None:
        what = f"the Hugging Face Hub cannot be reached for the {kind} {name!r}: {first_line(error)}"
        if not any(isinstance(each, errors.OfflineModeIsEnabled) for each in causes(error)):
            return TransientError(what, where=where, fix=fix)
        fix = f"HF_HUB_OFFLINE forbids it.{fix.partition('?')[2]}"
    elif isinstance(cause, errors.GatedRepoError):
        what, fix = f"the {kind} {name!r} is gated", f"Accept its terms at {page}, then log in: hf auth login."
    elif isinstance(cause, errors.RevisionNotFoundError):
        what, fix = f"the {kind} {name!r} has no revision {revision!r}", f"Those it has: {page}"
    elif isinstance(cause, errors.RepositoryNotFoundError):
        what = f"the Hub has no such {kind} (or hides it): {name!r}"
        fix = "Is the name right? A folder on this machine is written ./FOLDER; private ones need: hf auth login."
    elif is_transient(cause):
        what, fix = f"the Hub cannot give the {kind} {name!r} now: {first_line(cause)}", "Run the same command again."
        return TransientError(what, where=where, fix=fix)
    else:
        what = f"the Hub refuses the {kind} {name!r}: {first_line(cause)}"
        fix = "Log in: hf auth login. Or set HF_TOKEN." if cause.response.status_code == 401 else ""
    return UserError(what, where=where, fix=fix)


def is_of_the_network(error: Exception) -> bool:
    """Whether something failed because of the Hub or the way to it, and not because of what is in a file."""
    return any(
        isinstance(each, ConnectionError | TimeoutError) or type(each).__module__.partition(".")[0] in _PACKAGES
        for each in causes(error)
    )
