"""The program: `affinage`, and `python -m affinage`."""

import sys

from affinage.stopping import die_with_parent, nothing_to_lose

_WALKS = {"run", "data", "train", "sft", "dpo"}  # verbs that heed signals themselves once they have read the recipe


def main() -> None:
    """Run the command line of this process, which may be told to stop from its first moment on."""
    die_with_parent()
    with nothing_to_lose():
        from affinage.cli import main as run  # takes a moment

        if set(sys.argv[1:2]) & _WALKS:
            return run()
    return run()


if __name__ == "__main__":
    main()
