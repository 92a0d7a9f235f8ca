"""The messages for what the Hugging Face Hub answers when it does not give what was requested."""

from affinage.errors import TransientError, UserError, causes, first_line, is_transient

PATIENCE = 120.0  # seconds without an answer after which a request to the Hub has failed


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

    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    what = f"the Hub does not give the {kind} {name!r}" + (f" at revision {revision!r}" if revision else "")
    fix = f"Is the name right? See {page}. Private ones need: hf auth login (or HF_TOKEN). A folder on this machine is "
    fix += "written ./FOLDER."
    for cause in causes(error):
        if isinstance(cause, errors.GatedRepoError):
            what, fix = f"the {kind} {name!r} is gated", f"Accept its terms at {page}, then log in: hf auth login."
            return UserError(what, where=where, fix=fix)
        refused = isinstance(cause, errors.HfHubHTTPError) and not is_transient(cause)
        if refused or isinstance(cause, errors.HFValidationError):
            return UserError(f"{what}: {first_line(cause)}", where=where, fix=fix)
    fix = f"Is there a network? Run the same command again, or name a copy of the {kind} on this machine in its place"
    what = f"the Hugging Face Hub cannot be reached for the {kind} {name!r}: {first_line(error)}"
    offline = any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in causes(error))
    message = UserError if offline else TransientError
    return message(what, where=where, fix=fix + (", or data.mirror." if kind == "dataset" else "."))
