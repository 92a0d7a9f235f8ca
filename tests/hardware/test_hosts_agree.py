"""What several hosts must agree on is the same on each of them."""

import os
import subprocess
import sys
from pathlib import Path

from affinage.launch.process import reserved_port

PROGRAM = """
from affinage.hardware.devices import prepare
from affinage.hardware.joining import joined
prepare()
with joined() as hosts:
    print([hosts.least("rows", value) for value in ([7, 2, 5], [5, 3, 5])[hosts.index]], flush=True)
    hosts.meet("the end")
"""


def test_all_take_the_least_of_what_they_say_each_time(tmp_path: Path):
    held, address = reserved_port()
    places = [{"AFFINAGE_COORDINATOR": address, "AFFINAGE_HOSTS": "2", "AFFINAGE_HOST": str(host)} for host in (0, 1)]
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "JAX_PLATFORMS": "cpu", **place},
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for place in places
    ]
    try:
        said = [host.communicate(timeout=300)[0].strip() for host in hosts]
    finally:
        for host in hosts:
            host.kill()
        held.close()
    assert said == ["[5, 2, 5]"] * 2
