"""The verb `serve`: a model for programs that speak OpenAI's interface, and a page to talk with it."""

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from affinage.cli.chat import SystemOption
from affinage.cli.opening import OpenOptions, opened
from affinage.cli.options import ModelArgument, opt, verb, with_options
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.serving.server import Place

_KEY = re.compile(r"[!-~]+")  # what a header can carry: ASCII without spaces
_VARIABLE = "AFFINAGE_API_KEY"
_KEY_FILE = (
    f"A file with the key that clients must send; or {_VARIABLE} in the environment. Generated and printed if the "
    "address is open to other machines and none is given."
)


@verb()
@with_options(opening=OpenOptions)
def serve(
    model: ModelArgument,
    host: Annotated[str, opt("Address to listen on. 0.0.0.0: for other machines too.")] = "127.0.0.1",
    port: Annotated[int, opt("0: any that is free.", min=0, max=65535)] = 8000,
    api_key_file: Annotated[Path | None, opt(_KEY_FILE)] = None,
    max_num_seqs: Annotated[int, opt("Answers generated at once.", "--max-num-seqs", min=1)] = 8,
    max_queue: Annotated[int, opt("Answers that may wait; more are refused with 429.", min=0)] = 64,
    max_tokens: Annotated[int, opt("The longest answer.", min=1)] = 1024,
    grace: Annotated[float, opt("Seconds that answers may still take after SIGTERM.", min=0)] = 30,
    system: SystemOption = None,
    *,
    opening: OpenOptions,
) -> None:
    """Serve a model over OpenAI's interface (/v1/chat/completions, /v1/completions), with a page to talk with it.

    Example: affinage serve quickstart --port 8000
    """
    key = _api_key(api_key_file)
    loaded = opened(model, opening, reserves=True).model
    from affinage.serving.server import Limits, Place, run

    if system is not None:
        loaded = replace(loaded, system_prompt=system)
    place, limits = Place(host, port, key, grace), Limits(max_tokens=max_tokens)
    print("Compiling ...", flush=True)
    ready = partial(_announce, key=key)
    run(loaded, place, limits, max_num_seqs=max_num_seqs, max_queue=max_queue, ready=ready)


def _api_key(file: Path | None) -> str | None:
    """The key in a file or in the environment; not in an argument, which every user of the machine can read."""
    where, text = _VARIABLE, os.environ.get(_VARIABLE, "")
    if file is not None:
        try:
            where, text = str(file), file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            fix = "Write a key into it: letters, digits and signs."
            raise UserError(f"no key can be read there: {error}", where="--api-key-file", fix=fix) from error
    key = text.strip()
    if (key or file is not None) and not _KEY.fullmatch(key):
        fix = "Use letters, digits and signs, without spaces."
        raise UserError("this is not a key that a header can carry", where=where, fix=fix)
    return key or None


def _announce(url: str, place: "Place", key: str | None) -> None:
    shown = "yours" if key else place.key or "any"
    page = f"{url}/#token={'YOURS' if key else place.key}" if place.key else f"{url}/"
    print(f"{url}/v1 is the base URL for OpenAI clients (API key: {shown}).")
    print(f"{page} is a page to talk with it. Ctrl-C ends it.", flush=True)
