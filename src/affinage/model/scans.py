"""What the loops of a traced program say of themselves, in the words of JAX 0.10 and of 0.11."""

from collections.abc import Mapping
from typing import Any


def parts_of_scan(parameters: Mapping[str, Any]) -> tuple[int, int]:
    """How many arguments of a `scan` are constants, and how many it carries from turn to turn; the rest it cuts up.

    Args:
        parameters: of its equation.
    """
    if "num_carry" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    constants, carried, _ = parameters["ft_in"].unpack()
    return len(constants), len(carried)
