"""Connecting to a Ray cluster: one that runs, or one that is started on this machine alone."""

import atexit
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

import affinage
from affinage.errors import UserError, first_line


def connect(address: str, cpus: int | None, *, where: str) -> Any:
    """Return Ray's module, connected; the caller calls its `shutdown`. An existing connection is taken.

    `address` is of a running cluster (`auto`, `HOST:6379`, `ray://HOST:10001`), to which Ray ships this code; "" starts
    one on this machine, with `cpus` (None for all), which listens on the loopback address only and requires a token.
    UserError at `where`: Ray is missing, or does not answer.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is reported to its makers
    if not address:
        # Ray's way to say "this machine only"; for 127.0.0.1 it would look for an address that others can reach.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:  # both are read when Ray is imported
            with tempfile.NamedTemporaryFile("w", prefix="affinage-ray-", suffix=".token", delete=False) as file:
                file.write(secrets.token_hex(32))
            atexit.register(Path(file.name).unlink, missing_ok=True)
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=file.name)
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
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        ray.shutdown()
        fix = "`ray status` shows whether the cluster runs; an empty address starts one on this machine."
        raise UserError(f"Ray does not answer: {first_line(error)}", where=where, fix=fix) from error
    return ray
