"""The program: `affinage`, and `python -m affinage`."""

import os
import signal
import sys

from affinage.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from affinage.stopping import die_with_parent, handled_by

_WALKS = {"run", "data", "train", "sft", "dpo"}  # verbs that heed signals themselves once they have read the recipe


def main() -> None:
    """Run the command line of this process, which may be told to stop from its first moment on."""
    die_with_parent()
    walks = next((word for word in sys.argv[1:] if word != "--debug"), "") in _WALKS

    def leave_at_once(number: int, frame: object) -> None:
        os._exit(EXIT_INTERRUPTED if number == signal.SIGINT and not walks else EXIT_PREEMPTED)

    with handled_by(leave_at_once):
        from affinage.cli import main as run  # takes a moment

        if walks:
            return run()
    return run()


if __name__ == "__main__":
    main()
