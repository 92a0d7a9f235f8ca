"""A disk that is full is told as that, by whatever library the writing is done."""

import os
import subprocess
import sys

import numpy as np
import pytest

from affinage.data.signatures import mapped_anew

SAVES = {
    "numpy": "import numpy; numpy.save(sys.argv[1], numpy.zeros(100_000))",
    "safetensors": "import numpy, safetensors.numpy as s; s.save_file({'a': numpy.zeros(100_000)}, sys.argv[1])",
    "pyarrow": "import pyarrow as p, pyarrow.parquet as q; q.write_table(p.table({'a': [*range(10**5)]}), sys.argv[1])",
}
LIMITED = """
import os, resource, signal, sys
from affinage.errors import of_the_machine
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does by itself
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    {save}
except Exception as error:
    print(of_the_machine(error).fix)
"""


@pytest.mark.parametrize("library", SAVES)
def test_a_file_that_cannot_grow_is_told_as_a_lack_of_room(tmp_path, library):
    script = LIMITED.format(save=SAVES[library])
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "file")], capture_output=True, text=True)
    assert done.stdout.startswith("Make room"), done.stderr


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="nothing reserves room here")
def test_a_mapped_file_has_its_room_before_it_is_written(tmp_path):
    # Else a full disk would kill the process by a signal, in the middle of deduplication.
    array = mapped_anew(tmp_path / "a.npy", np.int64, 1_000_000)
    assert (tmp_path / "a.npy").stat().st_blocks * 512 >= 8_000_000
    array[:] = np.arange(1_000_000)
    array.flush()
    assert np.array_equal(np.load(tmp_path / "a.npy"), np.arange(1_000_000))
