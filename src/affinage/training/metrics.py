"""What is known of a run: metrics of steps, from the devices to metrics.jsonl, the console and trackers; where its time
went; its summary; and traces of some steps."""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import rich

from affinage.cluster.processes import Processes
from affinage.durations import duration
from affinage.errors import folder_is_gone
from affinage.hardware.devices import peak_bytes
from affinage.json_files import write_atomically
from affinage.model.graph import parameters
from affinage.results import read_json_lines, versions
from affinage.secrets import masked
from affinage.tracking import Trackers
from affinage.training.trainer import Trainer

METRICS = "metrics.jsonl"
_IN_FLIGHT = 2  # steps, so that the devices never wait for the host
_IN_FLIGHT_AT_MOST = 16  # of short steps ...
_SECONDS_IN_FLIGHT = 0.1  # ... that take no longer than this together: waking up for each costs a tenth of 5 ms
_NO_WAIT = 5e-5  # seconds for a batch that is there already; to look whether the devices are done costs as much
_SECONDS_BETWEEN_LINES = 10.0  # on the console, or ...
_SHARE_BETWEEN_LINES = 0.2  # ... of all steps
_RISE = 0.01  # of its lowest value, from where a validation loss has risen: less of it comes and goes by chance

Unhealthy = list[tuple[int, dict[str, float]]]  # (step, metrics) of those that skipped an update or are a spike


class MetricLogger:
    """Takes the metrics of every step while they are still being computed, and writes them a little later.

    docs/metrics.md describes the lines of metrics.jsonl; times in them are means since the line before, in seconds.
    No step appears twice: lines after the step `start` that a run resumes from are dropped. What is not finite is null.
    """

    def __init__(self, trainer: Trainer, goodput: "GoodputTimer", start: int, console: "ConsoleWriter") -> None:
        self._trainer, self._job, self._goodput, self._console = trainer, trainer.job, goodput, console
        self._path = self._job.folder / METRICS if Processes.current.first else None
        facts = {"settings": self._job.settings.model_dump(mode="json"), "seed": self._job.seed}
        facts |= {"devices": trainer.devices(), "versions": versions()}
        run = self._job.tracked._replace(start=start, facts=json.loads(masked(json.dumps(facts))))
        self._trackers = Trackers(self._job.trackers if self._path else {}, run, self._job.folder, console.say)
        self._file: TextIO | None = None
        self._pending: deque[tuple[int, Mapping[str, jax.Array], float]] = deque()
        # On a CPU that plays several devices, the collectives of two steps that share its threads can deadlock.
        self._ahead = 0 if trainer.is_simulated else _IN_FLIGHT
        # Several processes must look at the same steps.
        self._adapts = not trainer.is_simulated and Processes.current.count == 1
        self.cut(start)

    def __enter__(self) -> "MetricLogger":
        self._trackers.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._trackers.__exit__(kind)

    def log(self, step: int, metrics: Mapping[str, jax.Array], data_time: float) -> Unhealthy:
        """Take the metrics of a step that was just dispatched, before which the loop has waited for its batch.

        Returns the unhealthy ones of the earlier steps that are done.
        """
        last: Any = self._pending[-1][1]["loss"] if self._pending else None
        if data_time > _NO_WAIT and (last is None or last.is_ready()):
            self._goodput.move(data_time, "compute", "data")  # the devices had nothing left to do
        self._pending.append((step, metrics, data_time))
        if len(self._pending) <= self._ahead:
            return []
        return self._finish(len(self._pending) - max(self._ahead // 2, min(self._ahead, _IN_FLIGHT)))

    def drain(self) -> Unhealthy:
        """Wait for all steps in flight and write their lines, before something is saved; returns the unhealthy ones.

        Raises UserError if somebody has deleted or moved the folder that the training writes to.
        """
        if self._path is not None and not self._path.exists():
            raise folder_is_gone(self._path.parent, "while the training ran")
        return self._finish(len(self._pending))

    def write(self, step: int, **values: Any) -> None:
        """Write a line that is not of a training step."""
        self._write({"step": step, **values})
        if "validation" in values:
            self._console.validation(step, values["validation"])
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave the time since the last step out of the speed: it was spent on something else."""
        self._clock_step, self._clock, self._waited = self._done, time.perf_counter(), 0.0

    def cut(self, step: int) -> None:
        """Forget all that came after a step."""
        self._pending.clear()
        self._done = step
        if self._path is not None:
            if self._file is not None:
                self._file.close()
            keep_lines(self._path, lambda row: row["step"] <= step)
            self._file = self._path.open("a", buffering=1, encoding="utf-8")  # a kill keeps what was written
        self.restart_clock()

    def _finish(self, count: int) -> Unhealthy:
        """Wait for the oldest steps in flight, and write the lines that are due; they share one step time."""
        group = [self._pending.popleft() for _ in range(count)]
        if not group:
            return []
        group[-1][1]["loss"].block_until_ready()
        self._done, now, settings = group[-1][0], time.perf_counter(), self._job.settings
        self._waited += sum(data_time for _, _, data_time in group)
        steps, trainer = max(self._done - self._clock_step, 1), self._trainer
        step_time, data_time, peak = (now - self._clock) / steps, self._waited / steps, trainer.peak_flops
        if self._adapts:
            self._ahead = min(max(int(_SECONDS_IN_FLIGHT / max(step_time, 1e-9)), _IN_FLIGHT), _IN_FLIGHT_AT_MOST)
        unhealthy = Unhealthy()
        for step, metrics, _ in group:
            bad = any(metrics[name].item() for name in ("skipped", "spike") if name in metrics)
            due = step % settings.log_every == 0 or step in (1, settings.steps)
            if due or bad:
                values = {name: float(value.item()) for name, value in metrics.items()}
                row = {
                    "step": step,
                    **values,
                    "tokens": step * trainer.tokens,
                    "tokens_per_second": round(trainer.tokens / step_time, 1),
                    "mfu": None if peak is None else trainer.flops_per_step / step_time / peak,
                    "step_time": round(step_time, 6),
                    "data_time": round(data_time, 6),
                    "goodput": round(self._goodput.goodput, 4),
                }
                self._console.training(self._write(row))
                self._clock_step, self._clock, self._waited = self._done, now, 0.0
                if bad:
                    unhealthy.append((step, values))
        return unhealthy

    def _write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        clean: dict[str, Any] = finite(row)
        if self._file is not None:
            self._file.write(json.dumps(clean) + "\n")
        self._trackers.log(clean)
        self._job.measured(clean)
        return clean


def keep_lines(path: Path, keeps: Callable[[dict[str, Any]], bool]) -> None:
    """Leave of a file's JSON lines those for which `keeps` is true, completely or not at all."""
    lines = [json.dumps(row) + "\n" for row in read_json_lines(path) if keeps(row)]
    write_atomically(path, "".join(lines).encode())


def finite(value: Any) -> Any:
    """A value, or those of a mapping, as JSON has it: what is not finite is None."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# lost: work that was done and not saved, before a kill or a rollback. paused: between two starts. idle: all the rest,
# such as opening files.
ACCOUNTS = ("compute", "compile", "data", "validation", "save", "restore", "lost", "paused", "idle")


class GoodputTimer:
    """Seconds by account, over all starts of a run. The clock never stops: at any moment one account is running.

    The time of change of `written`, a file that the training writes to, says when the start before this one ended.
    """

    def __init__(self, written: Path | None = None) -> None:
        self._seconds = dict.fromkeys(ACCOUNTS, 0.0)
        self._running, self._since, self._started = "idle", time.perf_counter(), time.time()
        self._last = written.stat().st_mtime if written is not None and written.exists() else 0.0

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Add the accounts of the starts before, as the restored checkpoint has them; what was done since is `lost`."""
        for account, seconds in meta.get("seconds", {}).items():
            self._seconds[account] += seconds
        if (saved := meta.get("clock")) is not None:
            last = max(saved, min(self._last, self._started))
            self._seconds["lost"] += last - saved
            self._seconds["paused"] += max(self._started - last, 0.0)  # a clock may stand behind

    @contextlib.contextmanager
    def account(self, name: str) -> Iterator[None]:
        """Inside, the time goes to this account, except for what is inside of another one in it."""
        before = self._running
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Take seconds from one account to another."""
        self._switch(self._running)
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def lose_since(self, meta: Mapping[str, Any]) -> None:
        """Account for a rollback to the checkpoint with these facts: what came after it was for nothing."""
        for account in ("compute", "data", "validation", "save"):
            self.move(self.seconds()[account] - meta.get("seconds", {}).get(account, 0.0), account, "lost")

    def seconds(self) -> dict[str, float]:
        """The accounts, rounded."""
        self._switch(self._running)
        return {name: round(seconds, 3) for name, seconds in self._seconds.items()}

    @property
    def goodput(self) -> float:
        """The share of all seconds since the first start in which the devices computed steps that count."""
        self._switch(self._running)
        return min(self._seconds["compute"] / max(sum(self._seconds.values()), 1e-9), 1.0)

    def _switch(self, account: str) -> None:
        now = time.perf_counter()
        self._seconds[self._running] += now - self._since
        self._running, self._since = account, now


class ConsoleWriter:
    """What a person sees while a run trains: a line now and then; metrics.jsonl has all of them."""

    def __init__(self, name: str, steps: int, start: int, *, shown: bool = True) -> None:
        self._name, self._steps, self._shown = name, steps, shown
        self._last_line, self._last_step = -_SECONDS_BETWEEN_LINES, start

    def training(self, row: Mapping[str, Any]) -> None:
        """Show a training line, if the last one was long ago."""
        now, step = time.monotonic(), row["step"]
        is_late = now - self._last_line >= _SECONDS_BETWEEN_LINES
        if is_late or step == self._steps or step - self._last_step >= _SHARE_BETWEEN_LINES * self._steps:
            self._last_line, self._last_step = now, step
            self.say(f"step {step:,}/{self._steps:,}  {step_line(row, self._steps)}")

    def validation(self, step: int, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Show a validation line."""
        parts = []
        for name, score in scores.items():
            bits = f" ({score['bits_per_byte']:.3f} bits/byte)" if "bits_per_byte" in score else ""
            parts.append(f"{name} loss {score['loss']:.4f}{bits}")
        self.say(f"step {step:,}/{self._steps:,}  validation: {', '.join(parts)}")

    def say(self, message: str) -> None:
        """Show a message."""
        if self._shown:
            rich.get_console().print(f"{self._name}: {message}", highlight=False, markup=False, soft_wrap=True)


def step_line(row: Mapping[str, Any], steps: int) -> str:
    """Loss, tokens/s, MFU if the peak is known, gradient norm, learning rate, time left, for people."""
    loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
    grad_norm = "not finite" if row["grad_norm"] is None else f"{row['grad_norm']:.2f}"
    speed = row["tokens_per_second"]
    parts = [f"loss {loss}", f"{speed:,.0f} tok/s"]
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    parts += [f"grad {grad_norm}", f"lr {row['learning_rate']:.2e}"]
    if row.get("skipped"):
        parts.append("UPDATE SKIPPED")
    if speed and row["step"] < steps:
        parts.append(f"ETA {duration((steps - row['step']) * row['tokens'] / row['step'] / speed)}")
    return "  ".join(parts)


# ---- at the end ----


def write_summary(trainer: Trainer, goodput: GoodputTimer, steps: int, **facts: Any) -> dict[str, Any]:
    """Return the JSON-able summary of a run that ended after a number of steps; the first process writes summary.json.

    The speed and `mfu` are from the seconds of the steps alone. `facts` are more of its fields.
    """
    rows = list(read_json_lines(trainer.job.folder / METRICS))
    lines = [row for row in rows if "loss" in row]
    seconds, tokens = goodput.seconds(), steps * trainer.tokens
    training, peak, flops = seconds["compute"] + seconds["data"], trainer.peak_flops, trainer.flops_per_step * steps
    count = parameters(trainer.job.graph)
    summary = {
        "parameters": {
            "total": count.total,
            "embedding": count.embedding,
            "non_embedding": count.total - count.embedding,
            "trained": sum(parameter.size for parameter in jax.tree.leaves(trainer.split.trainable.parameters)),
        },
        "flops_per_step": trainer.flops_per_step,
        "steps": steps,
        "tokens": tokens,
        "seconds": seconds | {"total": round(sum(seconds.values()), 3)},
        "tokens_per_second": tokens / training if training else None,
        "mfu": flops / training / peak if peak and training else None,
        "first_loss": lines[0]["loss"] if lines else None,
        "final_loss": lines[-1]["loss"] if lines else None,
        "skipped_updates": sum(bool(line["skipped"]) for line in lines),
        "validation": next((row["validation"] for row in reversed(rows) if "validation" in row), {}),
        "validation_rise": _validation_rises(rows),
        "predicted": {"parameters": count.total, "flops": flops},
        "memory": {"peak_bytes": peak_bytes(trainer.mesh.local_devices)},
        "devices": trainer.devices(),
        **facts,
    }
    if Processes.current.first:
        write_atomically(trainer.job.folder / "summary.json", json.dumps(summary, indent=1).encode())
    return summary


def _validation_rises(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The lowest and the last loss, with their steps, of each validation set whose loss has risen since its lowest."""
    curves: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        for name, score in row.get("validation", {}).items():
            if score["loss"] is not None:
                curves.setdefault(name, []).append((score["loss"], row["step"]))
    ends = {name: (*min(curve), *curve[-1]) for name, curve in curves.items()}
    fields = ("lowest", "lowest_step", "last", "last_step")
    return {name: dict(zip(fields, end)) for name, end in ends.items() if end[2] - end[0] > _RISE * abs(end[0])}


class Profiler:
    """Traces from one of two `steps` to the other into `profile/`, for TensorBoard and Perfetto, in each process."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path) -> None:
        self._first, self._last = sorted(steps or (0, 0))
        processes = Processes.current
        self._folder = folder / "profile" / (f"process-{processes.index}" if processes.count > 1 else "")
        self._running = False

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Enter this while a step is dispatched."""
        if self._first <= step <= self._last and not self._running:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of Python would be an event
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
            self._running = True
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def end(self, step: float = math.inf, values: Any = ()) -> None:
        """Close the trace after its last step; `values` are ready when the devices are done with this step."""
        if self._running and step >= self._last:
            jax.block_until_ready(values)
            self._running = False
            jax.profiler.stop_trace()
