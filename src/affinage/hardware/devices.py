"""Get hold of the devices that a run computes on."""

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from affinage.errors import UserError
from affinage.hardware.allocator import keep_freed_memory
from affinage.hardware.hosts import Hosts
from affinage.hardware.kept_programs import keep_only_what_reads_back_whole
from affinage.hardware.present import accelerator_is_here

if TYPE_CHECKING:
    import jax


def prepare() -> None:
    """Set what only has an effect before JAX is imported, and what makes a second start fast.

    Call it first in a process that will train. Calling it again, or too late, is harmless.
    """
    if "jax" not in sys.modules:
        if importlib.util.find_spec("libtpu") is not None and not accelerator_is_here():
            # It is there for its compiler: looking for a TPU with it takes a second, and says in five lines that there
            # is none.
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        keep_freed_memory()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's C++ side talks about itself at lower levels


def compilation_cache() -> Path:
    """The user's folder of compiled steps. It holds native code: nobody else may write there."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "affinage" / f"programs-jax-{importlib.metadata.version('jax')}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def acquire() -> "list[jax.Device]":
    """All devices that JAX finds, ready to compute: of all hosts where they work together, else of this one.

    Raises:
        UserError: where JAX finds no device of the platform that was asked for.
    """
    prepare()
    import jax

    # An entry of the cache costs milliseconds to write; the small programs of a start add up to seconds.
    # The variable itself is left alone: each process that this one starts has a folder by its own environment.
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(compilation_cache()))
    jax.config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    keep_only_what_reads_back_whole()
    try:
        return list(jax.devices() if Hosts.current.together else jax.local_devices())
    except (RuntimeError, AssertionError) as error:  # an assertion, without words, where the platform has no plug-in
        wanted = os.environ.get("JAX_PLATFORMS", "")
        raise UserError(
            f"JAX finds no usable device: {str(error) or f'it has no support for {wanted}'}",
            where=f"JAX_PLATFORMS={wanted}" if wanted else "",
            fix="Unset JAX_PLATFORMS to use what is here, or install JAX for the accelerator, e.g. `jax[cuda12]`.",
        ) from error


class Present:
    """The devices that are here, see `affinage.hardware.acquisition.Hardware`."""

    def acquire(self) -> "list[jax.Device]":
        """See `acquire`."""
        return acquire()

    def release(self) -> None:
        """They are this process's until it ends."""
