"""A disk that takes no more is told as such, and what was saved before stays whole."""

import errno
import subprocess
import sys
from pathlib import Path

from affinage.checkpoint import CheckpointStore

_SAVES = """
import resource, sys
from pathlib import Path
import jax.numpy as jnp
from affinage.checkpoint import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]))
state = {"params": {"w": jnp.ones((1000, 1000))}}
store.save(1, state, {})
store.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))  # as a quota ends a file
try:
    store.save(2, state, {})
    store.wait()
except OSError as error:
    sys.exit(error.errno)
"""


def test_a_save_for_which_there_is_no_room_is_an_error_of_the_disk(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", _SAVES, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == errno.EFBIG
    assert "Traceback" not in done.stderr
    store = CheckpointStore(tmp_path)
    assert store.steps() == [1] and not store.damage(1)
