"""The program `affinage`: its verbs, and what becomes of errors."""

import importlib
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import affinage
from affinage.cli.options import Verb, opt
from affinage.errors import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
    Preempted,
    TransientError,
    UserError,
    UserWarned,
    of_the_machine,
)
from affinage.secrets import masked
from affinage.stopping import left_when_done

_EXTRAS = {"transformers": "verify", "torch": "verify", "libtpu": "tpu"}  # package -> extra

app = typer.Typer(
    name="affinage",
    help="From raw text in two languages to a released, evaluated chat model.\n\nBegin with: affinage run quickstart",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_VERBS = "run launch sweep data checkpoint eval compare plan report hub chat serve config graph doctor"
for _name in _VERBS.split():
    importlib.import_module(f"affinage.cli.{_name}").add_to(app)


def _show_examples(app: typer.Typer) -> None:
    """Make `Verb`s of all verbs that are registered, those of groups, too."""
    for verb in app.registered_commands:
        verb.cls = Verb
    for group in app.registered_groups:
        if group.typer_instance is not None:
            group.typer_instance.info.context_settings = {"help_option_names": ["-h", "--help"]}
            _show_examples(group.typer_instance)


_show_examples(app)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"affinage {affinage.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, opt("Print it.", "--version", callback=_show_version, is_eager=True)] = False,
    debug: Annotated[bool, opt("Show the traceback of every error.", "--debug")] = False,
) -> None:
    """Options of the program itself; `--debug` may also stand after the verb, and is read by `main`."""
    from affinage.hardware.devices import prepare

    prepare()  # before any verb: what it imports may import JAX


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. Without arguments it is that of this process, which is all that it does.

    Exit status: 0 done, 1 a defect of affinage (with traceback) or what may be over when it is tried again, 2 a mistake
    of the user (with what to do about it), 75 stopped after saving (start it again to go on), 130 interrupted.
    docs/terminal.md has them in full.
    """
    if arguments is None:
        warnings.formatwarning = _one_line(warnings.formatwarning)
        with left_when_done():
            _run(sys.argv[1:])
    else:
        _run(arguments)


def _one_line(otherwise: Callable[..., str]) -> Callable[..., str]:
    """How Python prints warnings: ours without the place in the code, which tells a user nothing."""

    def shown(message: Warning | str, category: type[Warning], *place: object, **more: object) -> str:
        if issubclass(category, UserWarned):
            return f"Warning: {message}\n"
        return otherwise(message, category, *place, **more)

    return shown


def _run(given: Sequence[str]) -> None:
    words = [word for word in given if word != "--debug"]
    debug = len(words) < len(given)
    try:
        app(words, prog_name="affinage")
    except (UserError, Preempted, ModuleNotFoundError) as error:
        if debug:
            _say(masked(traceback.format_exc()))
        _exit(error)
    except SystemExit as ended:
        if ended.code == EXIT_INTERRUPTED:
            _say("Interrupted.")
        raise
    except Exception as error:
        mistake = of_the_machine(error)
        if debug or mistake is None:
            _say(masked(traceback.format_exc()))
            sys.exit(1)
        _exit(mistake)


def _exit(error: UserError | Preempted | ModuleNotFoundError) -> None:
    if isinstance(error, Preempted):
        _say(f"Stopped: {error}. Run the same command to go on.")
        sys.exit(EXIT_PREEMPTED)
    if isinstance(error, UserError):
        _say(f"Error: {error}")
        sys.exit(1 if isinstance(error, TransientError) else EXIT_USER_ERROR)
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        _say(masked("".join(traceback.format_exception(error))))
        sys.exit(1)
    _say(f"Error: this needs the package `{package}`\n  Install it: pip install 'affinage[{_EXTRAS[package]}]'")
    sys.exit(EXIT_USER_ERROR)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
