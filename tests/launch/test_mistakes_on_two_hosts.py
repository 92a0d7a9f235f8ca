"""A mistake of the user that a host finds is told once, and ends all of them with 2, not with stacks of JAX."""

import os
import subprocess
import sys
from pathlib import Path

from affinage.launch.process import reserved_port

TINY = Path(__file__).parents[1] / "recipes" / "tiny.yaml"


def test_a_mesh_for_other_devices_ends_both_hosts_with_one_message(tmp_path: Path):
    held, address = reserved_port()
    words = ["run", str(TINY), "--until", "pretrain", "--set", "mesh={data: 3}", "--runs", str(tmp_path)]
    hosts = []
    for host in range(2):
        place = {"AFFINAGE_COORDINATOR": address, "AFFINAGE_HOSTS": "2", "AFFINAGE_HOST": str(host)}
        environment = {**os.environ, "XLA_FLAGS": "", **place}
        command = [sys.executable, "-m", "affinage", *words]
        hosts.append(subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE))
    with held:
        said = [host.communicate(timeout=300)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [2, 2], said
    assert "data 3 makes 3 devices, but there are 2" in said[0] and said[0].count("Error: ") == 1, said[0]
    assert not any("Check failure" in each or "Traceback" in each for each in said), said
    assert "data 3 makes 3 devices" in said[1] or "host 0 has found a mistake" in said[1], said[1]
