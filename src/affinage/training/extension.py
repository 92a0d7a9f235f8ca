"""Going on from a checkpoint of another training: more steps, another end of the schedule, another mixture."""

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from affinage.checkpoint import CheckpointStore, CheckpointWarning
from affinage.checkpoint.compatibility import IDENTITY, check_compatible
from affinage.cluster.processes import Processes
from affinage.errors import UserError
from affinage.training.frozen import kept_frozen
from affinage.training.job import Extension
from affinage.training.program import Program
from affinage.training.state import TrainState
from affinage.training.summary import check_carried, identity

# What an extension is for. Of `mixture`, only what holds from its first step on.
_OPEN = ("steps", "schedule", "mixture")
_WHOLE: Sequence[Mapping[str, Any]] = ({"from_step": 0, "weights": {"all": 1.0}},)  # what no mixture means


def begin_extended(program: Program, extension: Extension) -> tuple[int, TrainState, dict[str, Any]]:
    """Step, state and facts to go on with; the metrics up to there are copied, so that the curve is whole.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or more differs than an extension may change.
    """
    job, store = program.job, CheckpointStore(extension.training / "checkpoints")
    where = f"{job.name}.resume_from"
    if extension.step not in store.steps():
        kept = ", ".join(map(str, store.steps())) or "none"
        raise UserError(f"there is no checkpoint of step {extension.step}; kept are {kept}", where=where)
    if job.settings.steps <= extension.step:
        fix = f"Set {job.name}.steps to more than {extension.step}."
        raise UserError(f"it has made {extension.step} of the {job.settings.steps} steps", where=where, fix=fix)
    meta = store.meta(extension.step)
    try:
        check_carried(meta)
    except ValueError as error:
        raise UserError(str(error), where=str(store.folder / str(extension.step))) from error
    accepted = (*job.runtime.checkpoint.allow_changes, *_OPEN)
    now = identity(program)
    _refuse_another_past(meta, now, extension.step, job.runtime.checkpoint.allow_changes, job.name)
    for change in check_compatible(meta, now, accepted, where=str(store.folder)):
        if change.name.partition(".")[0] not in _OPEN:
            warnings.warn(f"{job.name} is extended with another {change}", CheckpointWarning, stacklevel=2)
    frozen = kept_frozen(extension.training, program.abstract.frozen)
    state = TrainState(**store.restore(extension.step, program.abstract.named()), frozen=frozen)
    lines, own = extension.training / "metrics.jsonl", job.folder / "metrics.jsonl"
    if Processes.current.first and lines.is_file() and not own.exists():
        part = own.with_suffix(".part")
        shutil.copyfile(lines, part)
        part.replace(own)
    # The time between the two is nobody's.
    return extension.step, state, {name: fact for name, fact in meta.items() if name != "clock"}


def _refuse_another_past(
    meta: Mapping[str, Any], now: Mapping[str, Any], step: int, accepted: Sequence[str], name: str
) -> None:
    """Rows are drawn by counting from step 0: what was drawn before `step` must be what was trained on."""
    saved = meta.get(IDENTITY)
    if saved is None or "mixture" in accepted:
        return
    before, after = (_until(facts.get("mixture"), step) for facts in (saved, now))
    if before != after:
        stages = [*before, {"from_step": step, "weights": "those from here on"}]
        raise UserError(
            f"the mixture of the steps before {step} is another one",
            where=f"{name}.mixture",
            fix=f"Write what was trained on, too: {json.dumps(stages)}",
        )


def _until(mixture: Sequence[Mapping[str, Any]] | None, step: int) -> list[Mapping[str, Any]]:
    return [dict(stage) for stage in mixture or _WHOLE if stage["from_step"] < step]
