"""Verbs that generate text: `generate`, `chat`, `serve`."""

import contextlib
import json
import os
import re
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from affinage.cli import terminal
from affinage.cli.terminal import app, opened, opt, warn
from affinage.errors import UserError

_KEY = re.compile(r"[!-~]+")  # what a header can carry: ASCII without spaces
_VARIABLE = "AFFINAGE_API_KEY"
_KEY_FILE = f"The key that clients must send; or {_VARIABLE}. Default: generated if other machines can connect."
MaxNewTokens = Annotated[int, opt("Maximum number of new tokens.", "--max-new-tokens", min=1)]
SystemOption = Annotated[str | None, opt("Another system prompt than the one it was trained with.", "--system")]
Temperature = Annotated[float, opt("0 takes the most likely token; 1 draws as the model predicts.", min=0)]
TopK = Annotated[int, opt("Draw among this many of the likeliest tokens; 0: all.", min=0)]
TopP = Annotated[float, opt("Draw among the likeliest tokens with this share of the probability.")]
Seed = Annotated[int, opt("Seed of the draws.", min=0)]
Stop = Annotated[list[str] | None, opt("End before this text. May be repeated.", metavar="TEXT")]


@app.command()
def generate(
    model: terminal.ModelArgument,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Or through a pipe.")] = None,
    max_new_tokens: MaxNewTokens = 64,
    as_json: terminal.JsonOption = False,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    mesh: terminal.MeshOption = None,
    max_model_len: terminal.MaxLenOption = None,
    runs: terminal.RunsOption = terminal.RUNS,
) -> None:
    """Let a model continue texts.

    Example: affinage generate quickstart "The currency of France" "La monnaie de la France"
    """
    texts = prompts or ["" if sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")]
    "".join(texts).encode()  # raises, before a model is opened, for words of another encoding than UTF-8
    if not any(texts):
        raise UserError("no prompt was given", fix='For example: affinage generate MODEL "Once upon a time"')
    loaded, state = opened(model, runs, mesh, max_model_len)
    from affinage.api import prompt_tokens
    from affinage.generation.engine import generate as generated
    from affinage.generation.sampling import SamplingParams

    sampling = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed=seed, stop=tuple(stop or ()))
    rows = [prompt_tokens(text, loaded) for text in texts]
    for text, result in zip(texts, generated(loaded, rows, sampling)):
        line = {"prompt": text, "text": result.text, "finish_reason": result.finish_reason, **state}
        print(json.dumps(line, ensure_ascii=False) if as_json else text + result.text)


@app.command()
def chat(
    model: terminal.ModelArgument,
    question: Annotated[list[str] | None, typer.Argument(metavar="[QUESTION]...", help="Ask and leave.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    system: SystemOption = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    mesh: terminal.MeshOption = None,
    max_model_len: terminal.MaxLenOption = None,
    runs: terminal.RunsOption = terminal.RUNS,
) -> None:
    """Talk with a model. Commands: /reset, /system TEXT, /help, /quit.

    Example: affinage chat quickstart "What is the currency of France?"
    """
    "".join([*(question or ()), system or ""]).encode()  # as in `generate`
    loaded, _ = opened(model, runs, mesh, max_model_len)
    from affinage.generation.chat import ChatSession, converse
    from affinage.generation.sampling import SamplingParams

    write = partial(print, end="", flush=True)
    sampling = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed=seed, stop=tuple(stop or ()))
    session = ChatSession(loaded, sampling)
    if not loaded.chat:
        warn(f"{model} is not a chat model. It continues texts: affinage generate {shlex.quote(model)} ...")
    if system is not None:
        session.reset(system)
    for text in question or ():
        session.reset()
        for piece in session.reply(text):
            write(piece)
        write("\n")
    if not question:
        if sys.stdin.isatty():
            print(f"This is {loaded.name}. /help lists the commands, /quit leaves.", file=sys.stderr)
        converse(session, read_line, write)


def read_line() -> str | None:
    """A line from the terminal, with arrow keys to edit it and to go back; None where the person leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() uses it once it is there
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


@app.command()
def serve(
    model: terminal.ModelArgument,
    host: Annotated[str, opt("Address to listen on. 0.0.0.0: for other machines too.")] = "127.0.0.1",
    port: Annotated[int, opt("0: any that is free.", min=0, max=65535)] = 8000,
    api_key_file: Annotated[Path | None, opt(_KEY_FILE, exists=True, dir_okay=False)] = None,
    max_num_seqs: Annotated[int, opt("Answers generated at once.", "--max-num-seqs", min=1)] = 8,
    max_queue: Annotated[int, opt("Answers that may wait; more are refused with 429.", min=0)] = 64,
    max_tokens: Annotated[int, opt("The longest answer.", min=1)] = 1024,
    grace: Annotated[float, opt("Seconds that answers may still take after SIGTERM.", min=0)] = 30,
    system: SystemOption = None,
    mesh: terminal.MeshOption = None,
    max_model_len: terminal.MaxLenOption = None,
    runs: terminal.RunsOption = terminal.RUNS,
) -> None:
    """Serve a model over OpenAI's interface (/v1/chat/completions, /v1/completions), with a page to talk with it.

    Example: affinage serve quickstart --port 8000
    """
    # It is no argument, which every user of the machine could read.
    key = (os.environ.get(_VARIABLE) or None) if api_key_file is None else api_key_file.read_text("utf-8").strip()
    if key is not None and not _KEY.fullmatch(key):
        fix = "Use letters, digits and signs, without spaces."
        raise UserError("this is not a key that a header can carry", where=str(api_key_file or _VARIABLE), fix=fix)
    loaded, _ = opened(model, runs, mesh, max_model_len, reserves=True)
    from affinage.serving.server import run

    def announce(url: str, used: str | None) -> None:
        page = f"{url}/#token={'YOURS' if key else used}" if used else f"{url}/"
        print(f"{url}/v1 is the base URL for OpenAI clients (API key: {'yours' if key else used or 'any'}).")
        print(f"{page} is a page to talk with it. Ctrl-C ends it.", flush=True)

    if system is not None:
        loaded = replace(loaded, system_prompt=system)
    print("Compiling ...", flush=True)
    limits = {"max_num_seqs": max_num_seqs, "max_queue": max_queue, "max_tokens": max_tokens}
    run(loaded, announce, host=host, port=port, key=key, grace=grace, **limits)
