"""What a worker of a launcher's test runs in place of affinage: prints where it is, then does as its words say.

wait FOLDER [FILE...]    prints the files, and waits for SIGTERM; then it saves, and exits with 75
exit STATUS
mistake 2                the first worker ends with a mistake, and the other is aborted as by JAX, with a page of stacks
"""

import os
import signal
import sys
import time
from pathlib import Path

from affinage.stopping import die_with_parent

what, word, *files = sys.argv[1:]
worker = os.environ["AFFINAGE_PROCESS_ID"]


def write(name: str, text: str) -> None:
    """All of it at once: whoever waits for the file reads it as soon as it is there."""
    part = Path(word, f".{name}.part")
    part.write_text(text)
    part.rename(part.with_name(name))


def saved(number: int, frame: object) -> None:
    write(f"saved-{worker}", signal.Signals(number).name)
    sys.exit(75)


die_with_parent()
print(f"worker {worker} of {os.environ['AFFINAGE_NUM_PROCESSES']}", flush=True)
if what == "mistake" and worker == "1":
    time.sleep(1)
    print("*** Check failure stack trace: ***", flush=True)
    os.abort()
if what in ("exit", "mistake"):
    sys.exit(int(word))
signal.signal(signal.SIGTERM, saved)
for file in files:
    print(Path(file).read_text(), flush=True)
write(f"process-{worker}", f"{os.getpid()} {os.getppid()}")
time.sleep(600)
