"""How the hosts of a gang ended."""

from affinage.launch import Ending, Gang
from waiting import until


def endings(gang: Gang, hosts: int) -> list[Ending]:
    """Those of so many hosts, in the order of the hosts."""
    found: list[Ending] = []
    until(lambda: found.extend(gang.ended(0.5)) or len(found) >= hosts)
    return sorted(found, key=lambda ending: ending.host)
