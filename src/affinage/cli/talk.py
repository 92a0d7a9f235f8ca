"""Verbs that let a model speak: `generate`, `chat`."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from affinage.cli.opening import Opening, opened
from affinage.cli.options import JsonOption, LangOption, ModelArgument, sharing
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.generation.chat import Language
    from affinage.generation.decode import Request

Tokens = Annotated[int, typer.Option(min=1, help="At most so many tokens.")]


@dataclass(frozen=True)
class Choosing:
    """How the next token is chosen, and what ends a text: options of both verbs."""

    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the most likely token; 1 draws as the model would.")
    ] = 0.0
    top_k: Annotated[int, typer.Option(min=0, help="Draw among so many of the likeliest tokens; 0: among all.")] = 0
    top_p: Annotated[
        float, typer.Option(help="Draw among the likeliest tokens with this share of the probability.")
    ] = 1.0
    min_p: Annotated[
        float, typer.Option(min=0, max=1, help="Draw among tokens at least this share as likely as the likeliest.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="Make tokens that were there already less likely; 1: none.")
    ] = 1.0
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text. May be repeated.")] = (
        None
    )

    def request(self, tokens: int) -> "Request":
        """For at most so many tokens."""
        from affinage.generation.decode import Request
        from affinage.generation.sampling import Sampling

        sampling = Sampling(
            self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty, seed=self.seed
        )
        return Request(tokens, sampling, stop_strings=tuple(self.stop or ()))


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command("generate")(generate)
    app.command("chat")(chat)


@sharing(choosing=Choosing, opening=Opening)
def generate(
    model: ModelArgument,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Or through a pipe.")] = None,
    tokens: Tokens = 64,
    as_json: JsonOption = False,
    *,
    choosing: Choosing,
    opening: Opening,
) -> None:
    """Let a model continue texts.

    Example: affinage generate quickstart "The currency of Japan" "La monnaie du Japon"
    """
    texts = _as_text(prompts or []) or [_piped()]
    from affinage.api import prompt_tokens
    from affinage.generation.decode import Generator

    loaded = opened(model, opening)
    request = choosing.request(tokens)
    rows = [prompt_tokens(text, loaded) for text in texts]
    for text, result in zip(texts, Generator(loaded).generate(rows, request)):
        if as_json:
            print(json.dumps({"prompt": text, "text": result.text, "ended_by": result.ended_by}, ensure_ascii=False))
        else:
            print(text + result.text)


def _piped() -> str:
    """What a pipe or a file gives, without the end of its last line; nobody is made to wait for what is not typed."""
    fix = 'For example: affinage generate MODEL "La monnaie du Japon", or echo "La monnaie" | affinage generate MODEL'
    if sys.stdin.isatty():
        raise UserError("no prompt was given", fix=fix)
    with _read_as_text():
        text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise UserError("no prompt was given, and standard input is empty", fix=fix)
    return text


@contextlib.contextmanager
def _read_as_text() -> Iterator[None]:
    """Inside, standard input is read: what is no text there is a mistake of whoever gives it."""
    try:
        yield
    except UnicodeDecodeError as error:
        fix = "If it is Latin-1: iconv -f latin1 -t utf-8 FILE | affinage ..."
        raise UserError(f"this is not UTF-8: {error}", where="standard input", fix=fix) from error


def _as_text(words: Sequence[str]) -> list[str]:
    """Arguments as they were given. Raises UserError for one in another encoding than the terminal's."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            shown = word.encode(errors="replace").decode()
            raise UserError("this is not UTF-8", where=f"`{shown}`", fix="Save it as UTF-8, then try again.") from error
    return list(words)


@sharing(choosing=Choosing, opening=Opening)
def chat(
    model: ModelArgument,
    question: Annotated[list[str] | None, typer.Argument(metavar="[QUESTION]...", help="Ask and leave.")] = None,
    tokens: Tokens = 256,
    system: Annotated[str | None, typer.Option(help="Another system prompt than the one it was trained with.")] = None,
    lang: LangOption = None,
    *,
    choosing: Choosing,
    opening: Opening,
) -> None:
    """Talk with a model. Commands: /reset, /system TEXT, /save FILE, /help, /quit.

    They are answered in the language of the terminal (LANG), or in that of --lang.

    Example: affinage chat quickstart "What is the currency of Japan?"
    """
    from affinage.generation.chat import ChatSession, converse, greeting
    from affinage.generation.decode import Generator

    asked = _as_text(question or [])
    _as_text([system or ""])
    language = lang or _language()
    session = ChatSession(Generator(opened(model, opening)), choosing.request(tokens))
    _warn_of_a_base_model(model, opening.runs, language)
    if system is not None:
        session.set_system(system)
    if not asked:
        if sys.stdin.isatty():
            print(greeting(session, language), file=sys.stderr)
        converse(session, read_line, _write, language)
        return
    for text in asked:
        session.reset()
        for piece in session.reply(text):
            _write(piece)
        _write("\n")


def _warn_of_a_base_model(spec: str, runs: Path, language: "Language") -> None:
    from affinage.generation.chat import base_model_warning
    from affinage.pipeline.models import is_chat, locate_model

    training, _ = locate_model(spec, runs)
    if not is_chat(training):
        print(base_model_warning(spec, language), file=sys.stderr)


def _language() -> "Language":
    """The language of the terminal, English if it is neither of ours."""
    told = next((os.environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if os.environ.get(name)), "")
    return "fr" if told.startswith("fr") else "en"


def read_line() -> str | None:
    """A line of the terminal's, with arrow keys to edit it and to go back; None where the person leaves."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() uses it once it is there
    try:
        with _read_as_text():
            return input("> " if terminal else "")
    except (EOFError, KeyboardInterrupt):
        if terminal:
            _write("\n")
        return None


def _write(text: str) -> None:
    print(text, end="", flush=True)
