"""Damage checkpoints in every way that disks, copies and people do, and see what is loaded.

    python benchmarks/rot.py [--quick] [--faults 10000]

Each time the newest of two checkpoints gets one of nine faults (faults.py): flipped bits; files cut
off, zeroed or added; trees from another step; copies that ended early; links; marks of a finished save around what is
none. The newest must be passed over, the one before restored as a run does, and its bits those that were saved. Of one
in ten Orbax by itself is asked for the damaged step.
"""

import argparse
import json
import os
import random
import tempfile
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import faults
import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from affinage.checkpoint import CheckpointStore, CheckpointWarning

ORBAX_TOO = 10  # one in so many
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
ABSTRACT = {"params": {"w": jax.ShapeDtypeStruct((600,), np.float32, sharding=HERE)}}


def weights(step: int) -> np.ndarray:
    return np.arange(600, dtype=np.float32) + step


def by_orbax(folder: Path) -> str:
    """What Orbax makes of the damaged step."""
    context = ocp.Context()
    context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    try:
        with context:
            found = ocp.load_checkpointables(folder / faults.NEW, ABSTRACT)["params"]["w"]
    except Exception:
        return "refused"
    return "whole" if np.asarray(found).tobytes() == weights(2).tobytes() else "wrong weights"


def rot(folder: Path, count: int) -> Counter[str]:
    sound, damaged = folder / "sound", folder / "damaged"
    store = CheckpointStore(sound, keep_last=2)
    for step in (1, 2):
        store.save(step, {"params": {"w": jnp.asarray(weights(step))}}, {})
    store.wait()
    found: Counter[str] = Counter()
    warnings.simplefilter("ignore", CheckpointWarning)
    for number in range(count):
        turn, kind = divmod(number, len(faults.FAULTS))
        name = list(faults.FAULTS)[kind]
        faults.place(sound, damaged)
        faults.FAULTS[name](damaged, random.Random(number))
        step, state, _ = CheckpointStore(damaged).restore_newest(ABSTRACT) or (0, {"params": {"w": np.zeros(0)}}, {})
        found["not passed over"] += step == 2
        found["older one not taken"] += step != 1
        found["other bits"] += np.asarray(state["params"]["w"]).tobytes() != weights(1).tobytes()
        found[name] += 1
        if turn % ORBAX_TOO == 0:
            found["asked of Orbax"] += 1
            found[f"Orbax: {by_orbax(damaged)}"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="280 faults")
    parser.add_argument("--faults", type=int, default=10_000)
    asked = parser.parse_args()
    count = 280 if asked.quick else asked.faults
    with tempfile.TemporaryDirectory(prefix="affinage-bench-") as folder:
        found = rot(Path(folder), count)
    print(dict(found))
    asked_of_orbax = found["asked of Orbax"]
    lines = (
        ("faults", count, None),
        ("damaged checkpoints taken for whole", found["not passed over"], None),
        ("older ones not taken", found["older one not taken"], None),
        ("restored with other bits than were saved", found["other bits"], None),
        (f"of {asked_of_orbax} also asked of Orbax: damaged, loaded, other bits", 0, found["Orbax: wrong weights"]),
    )
    results = [{"name": name, "ours": ours, "peer": peer, "unit": "", "ratio": None} for name, ours, peer in lines]
    print(json.dumps({"benchmark": "rot", "results": results}))


if __name__ == "__main__":
    main()
