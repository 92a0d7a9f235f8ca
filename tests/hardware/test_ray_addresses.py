"""Which clusters of Ray only this machine can reach."""

from types import SimpleNamespace

import pytest

from affinage.hardware.ray_cluster import _on_loopback


@pytest.mark.parametrize(
    ("addresses", "alone"),
    [
        (["127.0.0.1", "127.0.0.1"], True),
        (["127.0.0.1", "10.0.0.2"], False),
        (["head.cluster.local"], False),  # Ray keeps a name that it was given
    ],
)
def test_a_cluster_is_this_machines_alone_where_all_addresses_are_loopback(addresses: list[str], alone: bool):
    nodes = [{"NodeManagerAddress": address, "Alive": True} for address in addresses]
    nodes.append({"NodeManagerAddress": "10.0.0.9", "Alive": False})
    assert _on_loopback(SimpleNamespace(nodes=lambda: nodes)) is alone
