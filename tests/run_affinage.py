"""The fixture `affinage`: the program, run in the process of the test."""

from collections.abc import Callable

import pytest

from affinage.cli import main

Affinage = Callable[..., tuple[int, str, str]]


@pytest.fixture
def affinage(capsys: pytest.CaptureFixture[str]) -> Affinage:
    """Call it with words: (exit status, standard output, standard error)."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        shown = capsys.readouterr()
        return ended.value.code or 0, shown.out, shown.err  # type: ignore[return-value]

    return run
