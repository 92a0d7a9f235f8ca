"""What a host of a launcher's test runs in place of affinage: says where it is, then does as it is told.

wait FOLDER [FILE...]    reads the files out, and waits to be told to stop; then it saves, and ends with 75
stubborn FOLDER          waits, and ignores it
end STATUS
"""

import os
import signal
import sys
import time
from pathlib import Path

what, word, *files = sys.argv[1:]
host = os.environ["AFFINAGE_HOST"]


def write(name: str, text: str) -> None:
    """All of it at once: whoever waits for the file reads it as soon as it is there."""
    part = Path(word, f".{name}.part")
    part.write_text(text)
    part.rename(part.with_name(name))


def saved(number: int, frame: object) -> None:
    write(f"saved-{host}", signal.Signals(number).name)
    sys.exit(75)


print(f"host {host} of {os.environ['AFFINAGE_HOSTS']} at {os.environ['AFFINAGE_COORDINATOR']}", flush=True)
if what == "end":
    sys.exit(int(word))
signal.signal(signal.SIGTERM, saved if what == "wait" else signal.SIG_IGN)
for file in files:
    print(Path(file).read_text(), flush=True)
write(f"process-{host}", str(os.getpid()))
time.sleep(600)
