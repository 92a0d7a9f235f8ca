"""The program, run in the process of the test."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from affinage.cli import main
from affinage.errors import UserError

Affinage = Callable[..., tuple[int, str, str]]


def set_words(*settings: str) -> list[str]:
    """The words of settings, each of which stands after `--set`."""
    return [word for setting in settings for word in ("--set", setting)]


def run(*words: str | Path, settings: Iterable[str] = (), status: int = 0) -> None:
    """Call it with words and settings; it must end with the status."""
    assert _status([*map(str, words), *set_words(*settings)]) == status


def _status(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code or 0  # type: ignore[return-value]


@pytest.fixture
def affinage(capsys: pytest.CaptureFixture[str]) -> Affinage:
    """Call it with words: (exit status, standard output, standard error)."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return _status([*words]), *capsys.readouterr()

    return run


@pytest.fixture
def answer(affinage: Affinage) -> Callable[..., Any]:
    """Call it with words and `--json`: the document that it prints, where nothing is wrong."""

    def run(*words: str) -> Any:
        status, out, said = affinage(*words, "--json")
        assert status == 0, said
        return json.loads(out)

    return run


def refused(call: Callable[..., object], *given: Any, match: Any = None, **named: Any) -> UserError:
    """The mistake for which a call is refused; its message has `match` in it."""
    with pytest.raises(UserError, match=match) as caught:
        call(*given, **named)
    return caught.value
