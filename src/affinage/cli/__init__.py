"""The program `affinage`: it runs a verb, and turns errors into messages and exit statuses."""

import importlib
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

import affinage
from affinage import errors
from affinage.cli.terminal import app, opt
from affinage.hardware.devices import prepare
from affinage.secrets import masked
from affinage.stopping import PARENT, left_when_done, without_readers

for _name in ("gcsfs", "sqlitedict"):  # they log the errors that they raise, with a traceback
    logging.getLogger(_name).setLevel(logging.CRITICAL)
for _name in "run data eval plan models config".split():
    importlib.import_module(f"affinage.cli.{_name}")  # which registers its verbs, in the order of the help


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"affinage {affinage.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, opt("Print it.", "--version", callback=_show_version, is_eager=True)] = False,
    debug: Annotated[bool, opt("Show the traceback of every error.", "--debug")] = False,
) -> None:
    """Options of the program itself; `--debug` may also stand after the verb, and is read by `main`."""
    prepare()  # before any verb, because what it imports may import JAX


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. Without arguments it is that of this process, which then does nothing else.

    Exit status: 0 done, 1 a defect of affinage (with traceback) or a failure that may be over at the next try, 2 a
    mistake of the user (with what to do about it), 75 stopped after saving (run it again to resume), 130 interrupted.
    """
    if arguments is not None:
        _run(arguments)
        return
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, category, *place, **more: (
        f"Warning: {message}\n"  # a place in the code would not help a user
        if issubclass(category, errors.UserWarned)
        else before(message, category, *place, **more)
    )
    if isinstance(sys.stdout, io.TextIOWrapper):  # files and pipes hold UTF-8; a terminal shows what it can
        sys.stdout.reconfigure(encoding=None if sys.stdout.isatty() else "utf-8", errors="backslashreplace")
    with left_when_done(), without_readers(of_output=False):
        _run(sys.argv[1:])


def _run(arguments: Sequence[str]) -> None:
    words = [word for word in arguments if word != "--debug"]
    try:
        app(words, prog_name="affinage")
    except Exception as error:
        stopped = isinstance(error, errors.Preempted)
        mistake = _mistake_in(error)
        if len(words) < len(arguments) or not (stopped or mistake):
            print(masked(traceback.format_exc()), file=sys.stderr)
        if stopped:
            print(f"Stopped: {error}. Run the same command to resume.", file=sys.stderr)
            sys.exit(errors.EXIT_PREEMPTED)
        if mistake is not None:
            print(f"Error: {mistake}", file=sys.stderr)
        sys.exit(1 if mistake is None or isinstance(mistake, errors.TransientError) else errors.EXIT_USER_ERROR)


def _mistake_in(error: Exception) -> errors.UserError | None:
    """The message of an error that is no defect of affinage; None for a defect."""
    if isinstance(error, UnicodeError):
        return errors.UserError(f"this is not UTF-8: {error}", fix="Convert it: iconv -f latin1 -t utf-8 FILE")
    # Where a launcher starts it again, a file that another machine writes may be there the next time.
    if isinstance(error, FileNotFoundError | FileExistsError) and error.filename and PARENT not in os.environ:
        fix = "Was it deleted or moved, or does a link lead nowhere? --debug shows what needs it."
        return errors.UserError((error.strerror or "").lower(), where=str(error.filename), fix=fix)
    return error if isinstance(error, errors.UserError) else errors.of_the_machine(error)
