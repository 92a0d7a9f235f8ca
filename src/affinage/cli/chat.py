"""Verbs that generate text: `generate`, `chat`."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from affinage.cli.opening import OpenOptions, opened
from affinage.cli.options import JsonOption, LangOption, ModelArgument, opt, verb, with_options
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.generation.sampling import SamplingParams

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
    lang: LangOption = None,
    *,
    sampling: SamplingOptions,
    opening: OpenOptions,
) -> None:
    """Talk with a model. Commands: /reset, /system TEXT, /save FILE, /help, /quit.

    Messages are in the language of the terminal (LANG), or in that of --lang.

    Example: affinage chat quickstart "What is the currency of Japan?"
    """
    questions = question or []
    with _only_utf8("QUESTION, --system"):
        "".join([*questions, system or ""]).encode()
    locale = next((os.environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if os.environ.get(name)), "")
    language = lang or ("fr" if locale.startswith("fr") else "en")
    found = opened(model, opening)
    from affinage.generation.chat import ChatSession, base_model_warning, converse

    session = ChatSession(found.model, sampling.params(max_new_tokens), language)
    if not found.is_chat:
        print(base_model_warning(model, language), file=sys.stderr)
    if system is not None:
        session.set_system(system)
    for text in questions:
        session.reset()
        for piece in session.reply(text):
            _write(piece)
        _write("\n")
    if not questions:
        if sys.stdin.isatty():
            print(session.greeting(), file=sys.stderr)
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
