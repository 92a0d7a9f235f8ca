"""What tests of verbs share."""

from collections.abc import Callable

import pytest

from affinage.cli import main


@pytest.fixture
def affinage(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the program in this process: (exit status, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        shown = capsys.readouterr()
        return caught.value.code or 0, shown.out, shown.err

    return run
