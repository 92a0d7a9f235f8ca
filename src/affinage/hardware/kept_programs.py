"""Which compiled programs JAX keeps for the next start: none whose collectives XLA would read back unordered."""

import functools
import re
from typing import Any

_COLLECTIVE = re.compile(
    r" (?:all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|reduce-scatter)(?:-start)?\("
)


def keep_only_what_reads_back_whole() -> None:
    """Have JAX's persistent cache leave out what `loses_order` once it has been written. Calling it again is harmless.

    JAX asks no one whether to keep a program, so that this replaces what it calls to do so.
    """
    from jax._src import compilation_cache

    put: Any = compilation_cache.put_executable_and_time
    if hasattr(put, "__wrapped__"):
        return

    @functools.wraps(put)
    def put_what_reads_back_whole(key: str, name: str, executable: Any, backend: Any, seconds: int) -> None:
        on_cpus = backend.platform == "cpu"
        if not (on_cpus and any(loses_order(module.to_string()) for module in executable.hlo_modules())):
            put(key, name, executable, backend, seconds)

    replaced: Any = compilation_cache
    replaced.put_executable_and_time = put_what_reads_back_whole


def loses_order(hlo: str) -> bool:
    """Whether XLA's runtime for CPUs may run this program's collectives in another order once it has been written.

    The devices of a program must run its collectives in one order, as several go through the same connections. XLA has
    them all use one resource, one after the other. Written and read back (jaxlib 0.10, `WhileThunkFromProto`) those of
    each loop use one of their own, and what lies outside runs at the same time: hosts mix up each other's messages, and
    have wrong numbers, or wait for ever.

    Args:
        hlo: the text of the compiled module.
    """
    in_entry = False
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            in_entry = line.startswith("ENTRY")
        elif not in_entry and _COLLECTIVE.search(line):
            return True
    return False
