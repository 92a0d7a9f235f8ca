"""Kernels are compiled once for all processes, and work where nothing can be cached."""

import os
import subprocess
import sys

PROGRAM = """
from numba.core import caching
{before}
from affinage.data.compiled import kernel
from affinage.data.code_points import decode
import numpy as np
print(decode(np.frombuffer("é".encode(), np.uint8), np.int64(0)), decode.stats.cache_hits.total())
"""


def run(cache: str, before: str = "") -> str:
    environment = os.environ | {"NUMBA_CACHE_DIR": cache}
    command = [sys.executable, "-c", PROGRAM.format(before=before)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split("\n")[0]


def test_a_second_process_does_not_compile(tmp_path):
    assert run(str(tmp_path)) == "(233, 2) 0"
    assert run(str(tmp_path)) == "(233, 2) 1"


def test_without_a_writable_cache_kernels_are_compiled_in_memory(tmp_path):
    nowhere = "caching.CacheImpl._locator_classes = []"
    assert run(str(tmp_path), nowhere) == "(233, 2) 0"
