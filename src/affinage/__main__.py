"""The program: `affinage`, and `python -m affinage`."""

import os
import signal
import sys

from affinage.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from affinage.stopping import die_with_parent, handled_by


def main() -> None:
    """Run the command line of this process, which a signal may end from its first moment on."""
    die_with_parent()
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # standard streams that are closed: files would be in place
        pass
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is missing: nothing needs it
    interrupt = signal.getsignal(signal.SIGINT)

    def leave_at_once(number: int, frame: object) -> None:
        os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED)

    with handled_by(leave_at_once):
        from affinage.cli import main as run  # takes a moment

        signal.signal(signal.SIGINT, interrupt)
        run()


if __name__ == "__main__":
    main()
