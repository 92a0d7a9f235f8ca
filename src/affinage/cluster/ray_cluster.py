"""Getting hold of a Ray cluster: one that runs, or one of our own on this machine alone."""

import atexit
import ipaddress
import os
import secrets
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import affinage
from affinage.errors import UserError

_SILENT = {"RAY_USAGE_STATS_ENABLED": "0"}  # nothing is reported to its makers
# Ray's way to say "this machine only": told 127.0.0.1, it would look for an address that others can reach. Read when
# Ray is imported.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_TELLS = 120.0  # seconds for a worker of a busy cluster to start


def connect(
    address: str,
    cpus: int | None,
    *,
    asked_by: str,
    address_by: str,
    open_by: str,
    may_be_open: bool = False,
    temporary: Path | None = None,
) -> Any:
    """Ray's module, connected; whoever gets it calls `shutdown`. A connection that is there already is taken.

    Args:
        address: of a running cluster (`auto`, `HOST:6379`, `ray://HOST:10001`), to which the code of affinage is
            brought; "" starts one on this machine, which listens on the loopback address only and talks to those that
            know a secret.
        cpus: that a cluster of our own has; None for all.
        asked_by: the setting or option that wants Ray, for messages.
        address_by: the one that says where it is.
        open_by: the one that allows a cluster which others can reach and which asks for no token.
        may_be_open: whether that was said; then it is warned of.
        temporary: where a Ray of our own keeps its sockets and logs; its path must be short.

    Raises:
        UserError: Ray is not installed, does not answer, or is open to all.
    """
    os.environ.update(_SILENT if address else _SILENT | _LOOPBACK)
    if not address and "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        _make_token()
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed", where=asked_by, fix="pip install 'affinage[ray]'") from None
    if ray.is_initialized():
        return ray
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address:
        code = str(Path(affinage.__file__).parent)
        options |= {"address": address, "runtime_env": {"py_modules": [code]}}
    else:
        options |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        options |= {"_temp_dir": str(temporary)} if temporary else {}
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"Ray does not answer: {str(error).splitlines()[0]}",
            where=address_by,
            fix="Start a cluster with `RAY_AUTH_MODE=token ray start --head`, and have its token here, too; "
            "or leave the address empty for this machine alone.",
        ) from error
    if address and (
        on_loopback(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])
        or _asks_for_token(ray, address_by)
    ):
        return ray
    if address:
        what = f"whoever reaches the ports of the Ray cluster at {address} can run code on it: it asks for no token"
        if not may_be_open:
            ray.shutdown()
            raise UserError(
                what,
                where=address_by,
                fix="Make a token by `ray get-auth-token --generate`, start Ray with it and RAY_AUTH_MODE=token on "
                f"every machine, and have both here, too. In a network that is yours alone: {open_by}.",
            )
        print(f"Warning: {what}.", file=sys.stderr)
    return ray


def on_loopback(addresses: Iterable[str]) -> bool:
    """Whether only this machine can reach nodes of Ray, which listen on nothing but these addresses."""
    try:
        return all(ipaddress.ip_address(address).is_loopback for address in addresses)
    except ValueError:  # a name, which Ray keeps of every machine but this one
        return False


def _asks_for_token(ray: Any, address_by: str) -> bool:
    """Whether the cluster does; a worker of it has the environment that it was started with.

    What this process was told of a token says nothing: a cluster that asks for none takes whoever has one.
    """
    mode = ray.remote(num_cpus=0)(lambda: os.environ.get("RAY_AUTH_MODE", "disabled"))
    try:
        return str(ray.get(mode.remote(), timeout=_TELLS)).lower() != "disabled"
    except ray.exceptions.RayError as error:
        ray.shutdown()
        why = str(error).partition("\n")[0]
        raise UserError(
            f"no worker of Ray starts: {why}", where=address_by, fix="`ray status` shows what it has."
        ) from error


def _make_token() -> None:
    """A secret in a file that nobody else can read, for as long as this process; Ray reads both when it is imported."""
    with tempfile.NamedTemporaryFile("w", prefix="affinage-ray-", suffix=".token", delete=False) as file:
        file.write(secrets.token_hex(32))
    atexit.register(Path(file.name).unlink, missing_ok=True)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=file.name)
