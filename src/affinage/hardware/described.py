"""Devices to compile for that need not be here."""

from typing import TYPE_CHECKING, Any

from affinage.errors import UserError
from affinage.hardware.chips import chip
from affinage.hardware.slices import Slice

if TYPE_CHECKING:
    import jax

NOT_NEEDED = "The estimate needs nothing: leave out --compile."


class Described:
    """A slice that is compiled for, see `affinage.hardware.acquisition.Hardware`.

    Of TPUs those devices that libtpu's compiler knows by the slice's topology; else those that are here.
    """

    def __init__(self, where: Slice) -> None:
        self._where = where

    def acquire(self) -> "list[jax.Device]":
        """As many devices as the slice has; of a CPU one.

        Raises:
            UserError: where there are not enough GPUs of the kind.
        """
        import jax

        if self._where.platform == "tpu":
            return self._tpus()
        return jax.devices("cpu")[:1] if self._where.platform == "cpu" else self._gpus()

    def release(self) -> None:
        """Nothing is held."""

    def _tpus(self) -> "list[jax.Device]":
        from jax.experimental import topologies

        described: dict[str, Any] = {"chip_config_name": self._where.variant} if self._where.variant else {}
        described |= {"num_slices": self._where.slices} if self._where.slices > 1 else {}
        return list(topologies.get_topology_desc(self._where.topology, "tpu", **described).devices)

    def _gpus(self) -> "list[jax.Device]":
        import jax

        wanted, kind = self._where, self._where.chip.name
        try:
            here = jax.devices("gpu")
        except RuntimeError:
            here = []
        of_kind = [device for device in here if chip(device.device_kind).name == kind]
        if len(of_kind) < wanted.devices:
            has = ", ".join(sorted({device.device_kind for device in here})) or "none"
            raise UserError(
                f"compiling for {wanted.name} needs {wanted.devices} {kind} on this machine; its GPUs: {has}",
                where="--compile",
                fix=NOT_NEEDED,
            )
        return of_kind[: wanted.devices]
