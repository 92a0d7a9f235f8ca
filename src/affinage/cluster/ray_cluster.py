"""Connecting to a Ray cluster: one that runs, or one that is started on this machine alone."""

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
from affinage.errors import UserError, first_line

_TO_START = 120.0  # seconds for a worker of a busy cluster


def connect(
    address: str, cpus: int | None, *, where: str, open_by: str, may_be_open: bool, temporary: Path | None = None
) -> Any:
    """Return Ray's module, connected; who calls this calls `shutdown`. An existing connection is taken.

    Args:
        address: of a running cluster (`auto`, `HOST:6379`, `ray://HOST:10001`), to which Ray ships this code; ""
            starts one on this machine, which listens on the loopback address only and requires a token.
        cpus: of a cluster that is started here; None for all.
        where: the setting or option that says where the cluster is, for messages.
        open_by: the one that allows a cluster which others can reach and which requires no token.
        may_be_open: whether that is set; then there is a warning.
        temporary: where a Ray that is started here keeps its sockets and logs; its path must be short.

    Raises:
        UserError: Ray is not installed, does not answer, or is open to all.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is reported to its makers
    if not address:
        # Ray's way to say "this machine only"; for 127.0.0.1 it would look for an address that others can reach.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:  # both are read when Ray is imported
            _make_token()
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed", where=where, fix="pip install 'affinage[ray]'") from None
    if ray.is_initialized():
        return ray
    options: dict[str, Any] = {"address": address or "local", "log_to_driver": False, "logging_level": "error"}
    if address:
        options["runtime_env"] = {"py_modules": [str(Path(affinage.__file__).parent)]}
    else:
        options |= {"num_cpus": cpus, "include_dashboard": False}
        options |= {"_temp_dir": str(temporary)} if temporary else {}
    try:
        ray.init(**options)
        if not address or on_loopback(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]):
            return ray
        # Asked of a worker, which has the cluster's environment: a cluster that requires no token accepts any.
        mode = ray.remote(num_cpus=0)(lambda: os.environ.get("RAY_AUTH_MODE", "disabled"))
        requires_token = str(ray.get(mode.remote(), timeout=_TO_START)).lower() != "disabled"
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        ray.shutdown()
        fix = "Start a cluster with `RAY_AUTH_MODE=token ray start --head`, and have its token here, too (`ray status` "
        fix += "shows whether it runs); or leave the address empty for this machine alone."
        raise UserError(f"Ray does not answer: {first_line(error)}", where=where, fix=fix) from error
    if not requires_token:
        what = f"whoever reaches the ports of the Ray cluster at {address} can run code on it: it requires no token"
        if not may_be_open:
            ray.shutdown()
            fix = "Make a token by `ray get-auth-token --generate`, start Ray with it and RAY_AUTH_MODE=token on every "
            fix += f"machine, and have both here, too. In a network that is yours alone: {open_by}."
            raise UserError(what, where=where, fix=fix)
        print(f"Warning: {what}.", file=sys.stderr)
    return ray


def on_loopback(addresses: Iterable[str]) -> bool:
    """Whether only this machine can reach nodes of Ray, which listen on these addresses."""
    try:
        return all(ipaddress.ip_address(address).is_loopback for address in addresses)
    except ValueError:  # a name, which Ray keeps of every machine but this one
        return False


def _make_token() -> None:
    """Write a secret into a file that nobody else can read, for as long as this process runs."""
    with tempfile.NamedTemporaryFile("w", prefix="affinage-ray-", suffix=".token", delete=False) as file:
        file.write(secrets.token_hex(32))
    atexit.register(Path(file.name).unlink, missing_ok=True)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=file.name)
