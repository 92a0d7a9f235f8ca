"""A stand-in for ssh: after a folder, in which each address has its own, it drops the options and gives the rest to a
shell of its own session. SIGUSR1 makes it lose its connection.

Like ssh it ends with 255 then, where it does not reach a machine (`gone`), and after what a signal killed. Of a machine
in whose folder is a file `dead` nothing comes: neither an answer nor the end of what ran.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

folder, *words = sys.argv[1:]
while words[0].startswith("-"):
    del words[: 2 if words[0] == "-o" else 1]
address, *line = words
if address == "gone":
    sys.exit(255)
here = Path(folder, address)
here.mkdir(exist_ok=True)


def hang() -> None:
    while (here / "dead").exists():
        time.sleep(0.05)


hang()
not_there = ("AFFINAGE_PARENT", "AFFINAGE_SEAL_KEY_FILE")
environment = {name: value for name, value in os.environ.items() if name not in not_there}


def lose(number: int, frame: object) -> None:
    far.send_signal(signal.SIGHUP)
    os._exit(255)


signal.signal(signal.SIGUSR1, lose)
far = subprocess.Popen(["sh", "-c", " ".join(line)], cwd=here, env=environment, start_new_session=True)
status = far.wait()
hang()
sys.exit(255 if status < 0 else status)
