"""The program: `affinage`, and `python -m affinage`."""

import sys

from affinage.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from affinage.stopping import die_with_parent, nothing_to_lose

_WALKS = {"run", "data", "train", "sft", "dpo"}  # verbs that heed signals themselves once they have read the recipe


def main() -> None:
    """Run the command line of this process, which may be told to stop from its first moment on."""
    die_with_parent()
    walks = next((word for word in sys.argv[1:] if word != "--debug"), "") in _WALKS
    with nothing_to_lose(after_interrupt=EXIT_PREEMPTED if walks else EXIT_INTERRUPTED):
        from affinage.cli import main as run  # takes a moment

        if walks:
            return run()
    return run()


if __name__ == "__main__":
    main()
