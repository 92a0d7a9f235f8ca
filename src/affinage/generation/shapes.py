"""Sizes that arrays are padded to, so that few shapes are compiled."""


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()
