"""Which sequences share a row: best fit, longest first."""

from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `capacity` each: every item goes where the least room is left over.

    Best-fit decreasing (Johnson et al., SIAM J. Comput. 3(4), 1974): at most 11/9 of the fewest bins, plus 4. Items
    of one length keep their order. Raises ValueError if an item is longer than `capacity`.
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(f"an item of {max(lengths)} does not fit into {capacity}")
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # bins by the room that is left in them
    rooms = 0  # bit r is set if some bin has room r: finding the tightest one is one shift of a Python integer
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[item]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        with_room[room - length].append(chosen)
        rooms |= 1 << (room - length)
    return bins
