"""The verb `serve`: a model for programs that speak OpenAI's interface, and a page to talk with it."""

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from affinage.cli.opening import Opening, opened
from affinage.cli.options import ModelArgument, sharing
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.serving.running import Place

_TOKEN = re.compile(r"[!-~]+")  # what a header can carry: ASCII without spaces


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("serve")(serve)


@sharing(opening=Opening)
def serve(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Where to listen. 0.0.0.0: for other machines too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with what clients must send as API key; or AFFINAGE_TOKEN in the environment. "
            "Made up and printed if other machines can ask and none is given.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Answers at once.")] = 8,
    queue: Annotated[int, typer.Option(min=0, help="Answers that may wait; more are refused with status 429.")] = 64,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The longest answer.")] = 1024,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that answers may still take after SIGTERM.")] = 30,
    system: Annotated[str | None, typer.Option(help="Another system prompt than the one it was trained with.")] = None,
    *,
    opening: Opening,
) -> None:
    """Serve a model over OpenAI's interface (/v1/chat/completions, /v1/completions), with a page to talk with it.

    Example: affinage serve quickstart --port 8000
    """
    from affinage.serving.running import Place, run
    from affinage.serving.server import Limits

    token = _given(token_file)
    loaded = opened(model, opening, sets_aside=True)
    if system is not None:
        loaded = replace(loaded, system_prompt=system)
    place = Place(host, port, token, grace)
    announce = partial(_announce, given=token)
    run(loaded, place, Limits(max_tokens=max_tokens), batch=batch, queue=queue, ready=announce)


def _given(file: Path | None) -> str | None:
    """The token of a file, or of the environment: whoever lists a machine's processes can read arguments."""
    where, text = "AFFINAGE_TOKEN", os.environ.get("AFFINAGE_TOKEN", "")
    if file is not None:
        try:
            where, text = str(file), file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"no token can be read there: {error}", where="--token-file") from error
    token = text.strip()
    if (token or file is not None) and not _TOKEN.fullmatch(token):
        raise UserError("a token is made of letters, digits and signs, without spaces", where=where)
    return token or None


def _announce(url: str, place: "Place", given: str | None) -> None:
    key = "the one you gave" if given else place.token or "any"
    lines = [f"{url}/v1 is the base URL for OpenAI clients (API key: {key})."]
    page = f"{url}/#token={'YOURS' if given else place.token}" if place.token else f"{url}/"
    lines.append(f"{page} is a page to talk with it. Ctrl-C ends it.")
    print("\n".join(lines), flush=True)
