"""A feed that is too slow can be seen in the metrics."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiny

from affinage.training import TrainJob, train

SLOW, STEPS = 0.05, 6  # seconds to make a batch


class SlowFeed(tiny.RandomFeed):
    def iterate(self, start_step: int) -> Iterator[dict[str, np.ndarray]]:
        for batch in super().iterate(start_step):
            time.sleep(SLOW)
            yield batch


def test_waiting_is_counted_per_step_and_in_all(tmp_path: Path):
    job = TrainJob(
        graph=tiny.graph(layers=1),
        settings=tiny.settings(STEPS, log_every=2, validate_every=STEPS),
        mesh={"data": 1},
        seed=0,
        feed=SlowFeed(),
        folder=tmp_path,
    )
    summary = train(job)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 4, 6]
    assert all(line["data_wait"] >= SLOW for line in lines)  # each has the mean of its steps
    assert summary["data_wait"] >= STEPS * SLOW - 0.001  # rounded
    assert summary["data_wait"] <= summary["seconds"]["compute"] + summary["seconds"]["data"]
