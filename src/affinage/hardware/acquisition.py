"""Getting hold of hardware: one small surface for what is here, what is only described, and what is rented."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

Gives = TypeVar("Gives", covariant=True)


class Hardware(Protocol[Gives]):
    """Something to compute on, of one of three forms, or of your own.

    `devices.Present` gives JAX's devices that a training computes on; `described.Described` those that a step is
    compiled for, which need not exist; `cloud.CloudSlice` hosts, on each of which a process then finds what is present.
    What it is like, a `Slice`, is what one asks for, and known before.
    """

    def acquire(self) -> Sequence[Gives]:
        """Get it, waiting where that takes time. Called again it gives what is there now, without a second one.

        A training that somebody starts again is left after 20 times `runtime.hang_timeout` of it.

        Raises:
            UserError: where it cannot be had.
        """
        ...

    def release(self) -> None:
        """Give it back. Harmless where it was not acquired, or was given back before."""
        ...
