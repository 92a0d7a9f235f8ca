"""How the arrays of a call lie on the devices, as far as the nodes need to know it."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from jaxtyping import Array

from affinage.model.parameter import Axes


class Layout:
    """Everything whole on one device; `affinage.parallel` has the layout of a mesh.

    Nodes speak of logical axes only: which mesh axes split them is the layout's to know.
    """

    def constrain(self, x: Array, axes: Axes) -> Array:
        """Pins an activation to the split that its logical axes have."""
        return x

    def resplit(self, x: Array, before: Axes, after: Axes) -> Array:
        """Pins an activation to one split, then to another: what XLA makes an all-to-all of."""
        return self.constrain(self.constrain(x, before), after)

    def whole(self, length: int, axis: str) -> int:
        """How long an axis is over all devices of which an array shows `length`: a plan's shows one device's part."""
        return length

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """The mesh axes of more than one device that split a logical axis; names for collectives inside `mapped`."""
        return ()

    def parts(self, *axes: str) -> int:
        """Into how many parts an array is split along these logical axes of it."""
        return 1

    @property
    def may_map(self) -> bool:
        """Whether `mapped` can be differentiated here: inside a pipeline it cannot."""
        return True

    def mapped(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        outputs: Any,
        *,
        over: Collection[str] | None = None,
    ) -> Callable[..., Any]:
        """`function` as every device runs it on the parts that lie there, with collectives of its own.

        Args:
            function: of arrays.
            inputs: logical axes of each argument, as a tree of its form.
            outputs: those of the result, as a tree of its form.
            over: logical axes that are taken apart, the others stay XLA's business; None: all of them.
        """
        return function
