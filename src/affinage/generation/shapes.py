"""Sizes that arrays are padded to, so that few shapes are compiled."""


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


def half_step(value: int) -> int:
    """The smallest power of two, or three quarters of one, that is at least `value`."""
    whole = power_of_two(value)
    return whole * 3 // 4 if whole >= 4 and value <= whole * 3 // 4 else whole
