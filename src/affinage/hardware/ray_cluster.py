"""Getting hold of a Ray cluster: one that runs, or one of our own on this machine alone."""

import atexit
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

import affinage
from affinage.errors import UserError

_SILENT = {"RAY_USAGE_STATS_ENABLED": "0"}  # nothing is reported to its makers
# Ray's way to say "this machine only": told 127.0.0.1, it would look for an address that others can reach. Read when
# Ray is imported.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def connect(address: str, cpus: int | None, *, asked_by: str, address_by: str, temporary: Path | None = None) -> Any:
    """Ray's module, connected; whoever gets it calls `shutdown`. A connection that is there already is taken.

    Args:
        address: of a running cluster (`auto`, `HOST:6379`, `ray://HOST:10001`), to which the code of affinage is
            brought, and which is warned of if it asks for no token; "" starts one on this machine, which listens on the
            loopback address only and talks to those that know a secret.
        cpus: that a cluster of our own has; None for all.
        asked_by: the setting or option that wants Ray, for messages.
        address_by: the one that says where it is.
        temporary: where a Ray of our own keeps its sockets and logs; its path must be short.

    Raises:
        UserError: Ray is not installed, or does not answer.
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
            fix="Start a cluster with `ray start --head`, or leave the address empty for this machine alone.",
        ) from error
    if address:
        warn_if_open()
    return ray


def warn_if_open() -> None:
    """Say so where the cluster that was joined asks nobody for a token; Ray itself sets the mode where it finds one."""
    if os.environ.get("RAY_AUTH_MODE", "disabled").lower() == "disabled":
        print(
            "Warning: whoever reaches the ports of this Ray cluster can run code on it. "
            "Start it with RAY_AUTH_MODE=token, and set that here, too.",
            file=sys.stderr,
        )


def _make_token() -> None:
    """A secret in a file that nobody else can read, for as long as this process; Ray reads both when it is imported."""
    with tempfile.NamedTemporaryFile("w", prefix="affinage-ray-", suffix=".token", delete=False) as file:
        file.write(secrets.token_hex(32))
    atexit.register(Path(file.name).unlink, missing_ok=True)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=file.name)
