"""Where the seconds of a run went."""

import contextlib
import time
from collections.abc import Iterator, Mapping

ACCOUNTS = ("compile", "restore", "train", "validation", "save")


class Ledger:
    """Seconds by account, over all starts of a run.

    What was done and then lost in a kill is not in it: it goes on from the accounts of the checkpoint.
    """

    def __init__(self, carried: Mapping[str, float] | None = None) -> None:
        self.seconds = dict.fromkeys(ACCOUNTS, 0.0)
        self.carry(carried or {})

    def carry(self, earlier: Mapping[str, float]) -> None:
        """Add the accounts of the starts before this one."""
        for account, seconds in earlier.items():
            if account in self.seconds:
                self.seconds[account] += seconds

    @contextlib.contextmanager
    def account(self, name: str) -> Iterator[None]:
        """Add the time inside to an account."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def rounded(self) -> dict[str, float]:
        """The accounts and their total, in seconds."""
        return {name: round(s, 3) for name, s in {**self.seconds, "total": sum(self.seconds.values())}.items()}
