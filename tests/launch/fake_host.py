"""What a host of a launcher's test runs in place of affinage: says where it is, then does as it is told."""

import os
import signal
import sys
import time
from pathlib import Path

from affinage.stopping import die_with_parent

die_with_parent()
what, *words = sys.argv[1:]
host = os.environ["AFFINAGE_HOST"]
print(f"host {host} of {os.environ['AFFINAGE_HOSTS']} at {os.environ['AFFINAGE_COORDINATOR']}", flush=True)


def write(name: str, text: str) -> None:
    """All of it at once: whoever waits for the file reads it as soon as it is there."""
    part = Path(words[0], f".{name}.part")
    part.write_text(text)
    part.rename(part.with_name(name))


def saved(number: int, frame: object) -> None:
    write(f"saved-{host}", signal.Signals(number).name)
    print("saved", flush=True)
    sys.exit(75)


if what == "read":
    print(Path(words[0]).read_text(), flush=True)
elif what == "wait":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, saved)
    write(f"process-{host}", str(os.getpid()))
    time.sleep(600)
elif what == "signs":
    print(f"signs with {os.environ.get('AFFINAGE_SEAL_KEY_FILE')}", flush=True)
elif what == "fail":
    sys.exit(3 if host == "1" else 0)
elif what == "end":
    sys.exit(int(words[0]))
elif what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write(f"process-{host}", str(os.getpid()))
    time.sleep(600)
