"""One small finished run, trained once a session, which all tests of what comes after a training read.

Run it again with exactly `WORDS`: any other settings are another run.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from run_affinage import set_words

RECIPE = Path(__file__).parent / "recipes" / "tiny.yaml"
SETTINGS = [
    "dpo={sources: [pocket-world], steps: 4, batch_size: 8, schedule: {peak_lr: 1.0e-3, min_lr: 1.0e-4}, sample: 0.2}",
    "dpo.validation_fraction=0.2",  # most pairs are longer than the context, and some of the held-out ones must not be
    "dpo.log_every=1",
    "dpo.eval_every=2",
    "dpo.eval_sequences=8",
    "dpo.num_epochs=null",
    "dpo.lora={r: 4}",
    "runtime.checkpoint={every_steps: 2}",
]
WORDS = [str(RECIPE), *set_words(*SETTINGS)]


def shared(base: Path) -> Path:
    """The runs folder beside the temporary folders of a session's workers; the first that asks makes it."""
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    runs = root / "tiny-runs"
    with FileLock(root / "tiny-runs.lock"):
        if not (runs / "tiny" / "report.html").exists():
            command = [sys.executable, "-m", "affinage", "run", *WORDS, "--runs", str(runs)]
            made = subprocess.run(command, capture_output=True, text=True)
            assert made.returncode == 0, made.stdout + made.stderr
    return runs


def copied(runs: Path, to: Path) -> Path:
    """A copy of a runs folder, its times and links included. It is small, and shares no file with the other."""
    return Path(shutil.copytree(runs, to, symlinks=True))
