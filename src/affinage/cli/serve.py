"""The verb `serve`: a model for programs that speak OpenAI's interface, and a page to talk with it."""

import re
from dataclasses import replace
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
    token: Annotated[
        str | None,
        typer.Option(
            envvar="AFFINAGE_TOKEN",
            help="What clients must send as API key. Made up and printed if other machines can ask and none is given.",
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

    if token is not None and not _TOKEN.fullmatch(token):
        raise UserError("a token is made of letters, digits and signs, without spaces", where="--token, AFFINAGE_TOKEN")
    loaded = opened(model, opening, sets_aside=True)
    if system is not None:
        loaded = replace(loaded, system_prompt=system)
    place = Place(host, port, token, grace)
    run(loaded, place, Limits(max_tokens=max_tokens), batch=batch, queue=queue, ready=_announce)


def _announce(url: str, place: "Place") -> None:
    key = place.token or "any"
    lines = [f"{url}/v1 is the base URL for OpenAI clients (API key: {key})."]
    page = f"{url}/#token={place.token}" if place.token else f"{url}/"
    lines.append(f"{page} is a page to talk with it. Ctrl-C ends it.")
    print("\n".join(lines), flush=True)
