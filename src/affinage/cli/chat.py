"""Verbs that generate text: `generate`, `chat`, `serve`."""

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from affinage.cli.opening import OpenOptions, opened
from affinage.cli.options import JsonOption, ModelArgument, opt, verb, with_options
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.generation.sampling import SamplingParams

_KEY = re.compile(r"[!-~]+")  # what a header can carry: ASCII without spaces
_VARIABLE = "AFFINAGE_API_KEY"
_KEY_FILE = (
    f"A file with the key that clients must send; or {_VARIABLE} in the environment. Generated and printed if the "
    "address is open to other machines and none is given."
)
MaxNewTokens = Annotated[int, opt("Maximum number of new tokens.", "--max-new-tokens", min=1)]
SystemOption = Annotated[str | None, opt("Another system prompt than the one it was trained with.", "--system")]
_Share = Annotated[float, opt("Draw among tokens at least this share as likely as the likeliest.", min=0, max=1)]


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen, and what ends a text."""

    temperature: Annotated[float, opt("0 takes the most likely token; 1 draws as the model predicts.", min=0)] = 0.0
    top_k: Annotated[int, opt("Draw among this many of the likeliest tokens; 0: all.", min=0)] = 0
    top_p: Annotated[float, opt("Draw among the likeliest tokens with this share of the probability.")] = 1.0
    min_p: _Share = 0.0
    repetition_penalty: Annotated[float, opt("Make tokens less likely that were there already; 1: no penalty.")] = 1.0
    seed: Annotated[int, opt("Seed of the draws.", min=0)] = 0
    stop: Annotated[list[str] | None, opt("End before this text. May be repeated.", metavar="TEXT")] = None

    def params(self, max_new_tokens: int) -> "SamplingParams":
        """The parameters for at most `max_new_tokens` tokens."""
        from affinage.generation.sampling import SamplingParams

        return SamplingParams(max_new_tokens, **asdict(self) | {"stop": tuple(self.stop or ())})


@verb()
@with_options(sampling=SamplingOptions, opening=OpenOptions)
def generate(
    model: ModelArgument,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Or through a pipe.")] = None,
    max_new_tokens: MaxNewTokens = 64,
    as_json: JsonOption = False,
    *,
    sampling: SamplingOptions,
    opening: OpenOptions,
) -> None:
    """Let a model continue texts.

    Example: affinage generate quickstart "The currency of Japan" "La monnaie du Japon"
    """
    with _only_utf8("PROMPT"):
        texts = prompts or [_piped()]
        "".join(texts).encode()
    found = opened(model, opening)
    from affinage.api import prompt_tokens
    from affinage.generation.engine import generate as generated

    rows = [prompt_tokens(text, found.model) for text in texts]
    for text, result in zip(texts, generated(found.model, rows, sampling.params(max_new_tokens))):
        line = {"prompt": text, "text": result.text, "finish_reason": result.finish_reason, **found.facts}
        print(json.dumps(line, ensure_ascii=False) if as_json else text + result.text)


@verb()
@with_options(sampling=SamplingOptions, opening=OpenOptions)
def chat(
    model: ModelArgument,
    question: Annotated[list[str] | None, typer.Argument(metavar="[QUESTION]...", help="Ask and leave.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    system: SystemOption = None,
    *,
    sampling: SamplingOptions,
    opening: OpenOptions,
) -> None:
    """Talk with a model. Commands: /reset, /system TEXT, /save FILE, /help, /quit.

    Example: affinage chat quickstart "What is the currency of Japan?"
    """
    questions = question or []
    with _only_utf8("QUESTION, --system"):
        "".join([*questions, system or ""]).encode()
    found = opened(model, opening)
    from affinage.generation.chat import ChatSession, converse

    session = ChatSession(found.model, sampling.params(max_new_tokens))
    if not found.is_chat:
        note = "is not a chat model. It continues texts: affinage generate"
        print(f"Warning: {model} {note} {shlex.quote(model)} ...", file=sys.stderr)
    if system is not None:
        session.set_system(system)
    for text in questions:
        session.reset()
        for piece in session.reply(text):
            _write(piece)
        _write("\n")
    if not questions:
        if sys.stdin.isatty():
            print(f"This is {found.model.name}. /help lists the commands, /quit leaves.", file=sys.stderr)
        converse(session, read_line, _write)


def _piped() -> str:
    """The text of a pipe or a file, without its last line break; a terminal is not waited for."""
    text = "" if sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")
    if not text:
        fix = (
            'For example: affinage generate MODEL "La monnaie du Japon", or echo "La monnaie" | affinage generate MODEL'
        )
        raise UserError("no prompt was given", fix=fix)
    return text


@contextlib.contextmanager
def _only_utf8(where: str) -> Iterator[None]:
    """Inside, text in another encoding is a mistake of the user."""
    try:
        yield
    except UnicodeError as error:
        fix = "Convert it, for example with: iconv -f latin1 -t utf-8 FILE | affinage ..."
        raise UserError(f"this is not UTF-8: {error.reason}", where=where, fix=fix) from error  # type: ignore[attr-defined]


def read_line() -> str | None:
    """A line from the terminal, with arrow keys to edit it and to go back; None where the person leaves."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() uses it once it is there
    try:
        with _only_utf8("standard input"):
            return input("> " if terminal else "")
    except (EOFError, KeyboardInterrupt):
        if terminal:
            _write("\n")
        return None


def _write(text: str) -> None:
    print(text, end="", flush=True)


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
    from affinage.serving.server import run

    if system is not None:
        loaded = replace(loaded, system_prompt=system)
    print("Compiling ...", flush=True)
    limits = {"max_num_seqs": max_num_seqs, "max_queue": max_queue, "max_tokens": max_tokens}
    run(loaded, partial(_announce, own=key), host=host, port=port, key=key, grace=grace, **limits)


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


def _announce(url: str, key: str | None, own: str | None) -> None:
    page = f"{url}/#token={'YOURS' if own else key}" if key else f"{url}/"
    print(f"{url}/v1 is the base URL for OpenAI clients (API key: {'yours' if own else key or 'any'}).")
    print(f"{page} is a page to talk with it. Ctrl-C ends it.", flush=True)
