"""What may be over when it is tried again ends with 1, after which a launcher starts again, and not with 2."""

import errno
import os
import subprocess
import sys

import pytest

from affinage.errors import TransientError, UserError, of_the_machine
from affinage.launch.process import reserved_port

ALONE = """
import sys
from affinage.cli.program import main
from affinage.hardware import joining

joining.JOIN = 2
main(["run", sys.argv[1], "--runs", sys.argv[2]])
"""


def test_a_host_whose_others_do_not_come_ends_so_that_it_is_started_again(tmp_path):
    recipe = os.path.join(os.path.dirname(os.path.dirname(__file__)), "recipes", "tiny.yaml")
    held, address = reserved_port()
    with held:
        environment = {"AFFINAGE_COORDINATOR": address, "AFFINAGE_HOSTS": "2", "AFFINAGE_HOST": "1"}
        ended = subprocess.run(
            [sys.executable, "-c", ALONE, recipe, str(tmp_path)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert ended.returncode == 1, ended.stderr
    assert "host 1 of 2 did not meet the others within 2 s" in ended.stderr
    assert "Traceback" not in ended.stderr and "stack trace" not in ended.stderr


@pytest.mark.parametrize(("number", "passes"), [(errno.EIO, True), (errno.ESTALE, True), (errno.ENOSPC, False)])
def test_a_disk_behind_a_network_may_come_back_and_a_full_one_does_not(number: int, passes: bool):
    told = of_the_machine(OSError(number, os.strerror(number), "runs"))
    assert isinstance(told, UserError) and isinstance(told, TransientError) == passes
