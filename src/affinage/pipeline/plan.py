"""What a run would do: which steps are complete, which must run, and why."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affinage.data.places import is_url
from affinage.errors import UserError
from affinage.pipeline.sources import fingerprints, remote_fingerprints
from affinage.pipeline.step import Step
from affinage.pipeline.store import Request, Store, read_request

ELSEWHERE = "complete at the remote"  # the reason of a step whose result is only there
_SHOWN = 3  # differences named per step


Sources = tuple[dict[str, str], dict[str, str]]  # fingerprints, and the URLs that could not be checked -> why


@dataclass(frozen=True)
class PlannedStep:
    """A step, what its result is a function of, and whether that result is there."""

    step: Step
    request: Request
    complete: bool
    reason: str
    unchecked: dict[str, str]  # URLs that it reads and of which no server gave the version -> why

    @property
    def name(self) -> str:
        """The step's name."""
        return self.step.name

    @property
    def forced(self) -> bool:
        """Whether it runs because of `--force`."""
        return self.reason.startswith("forced")


def select(steps: Sequence[Step], until: Sequence[str]) -> list[Step]:
    """Returns the steps of `until` and all that they read, in order; every step if `until` is empty."""
    known = {step.name: step for step in steps}
    for name in until:
        if name not in known:
            fix = f"Its steps: {', '.join(known)}." if known else ""
            raise UserError(f"this recipe has no step `{name}`", fix=fix)
    wanted = set(until or known)
    for step in reversed(steps):
        if step.name in wanted:
            wanted.update(step.inputs)
    return [step for step in steps if step.name in wanted]


def plan(
    steps: Sequence[Step],
    store: Store,
    run_folder: Path,
    *,
    force: Sequence[str] = (),
    elsewhere: Callable[[Request], bool] = lambda _: False,
    taken: dict[str, Sources] | None = None,
) -> list[PlannedStep]:
    """Compare what the steps would make with what is in the store, without running anything.

    Args:
        steps: each after the steps that it reads.
        store: of the results.
        run_folder: its links lead to the results of the previous run, which the reasons compare with.
        force: steps to run again although their results are there, with all that read them.
        elsewhere: whether a result that is not in the store can be copied from somewhere.
        taken: fingerprints of sources that were taken before, by step; those that are taken now are added.
    """
    planned: dict[str, PlannedStep] = {}
    taken = {} if taken is None else taken
    for step in steps:
        before = read_request(run_folder / step.name)
        if step.name not in taken:
            taken[step.name] = _sources(step, before[0] if before else None)
        sources, unchecked = taken[step.name]
        request = Request(
            step=step.name,
            version=step.version,
            settings=step.config,
            inputs={name: planned[name].request.key for name in step.inputs},
            sources=sources,
        )
        forced_inputs = [name for name in step.inputs if planned[name].forced]
        complete, reason = True, "complete"
        if step.name in force:
            complete, reason = False, "forced"
        elif forced_inputs:
            complete, reason = False, f"forced by {forced_inputs[0]}"
        elif not store.is_complete(request):
            complete = elsewhere(request)
            reason = ELSEWHERE if complete else _reason(step, store, request, before)
        planned[step.name] = PlannedStep(step, request, complete, reason, unchecked)
    return list(planned.values())


def _sources(step: Step, before: Request | None) -> Sources:
    """The fingerprints, and the URLs that could not be checked.

    Where the user's files are gone, the former fingerprints stay, as their result is still good.
    """
    found = step.sources | fingerprints(step.files)
    unchecked: dict[str, str] = {}
    if urls := [path for path in step.files if is_url(path)]:
        remote, unchecked = remote_fingerprints(urls, before.sources if before else {})
        found |= remote
    if found or before is None or before.settings != step.config:
        return found, unchecked
    return before.sources, unchecked


def _reason(step: Step, store: Store, request: Request, before: tuple[Request, str] | None) -> str:
    folder = store.path(request)
    if damage := store.damage(request):
        return f"damaged: {damage}"
    if read_request(folder):
        if not step.resumable:
            return "not finished; starts again"
        # By the mark that is written last: `affinage.checkpoint` takes importing JAX.
        if step.has_progress and not any(folder.glob("checkpoints/[0-9]*/commit_success.txt")):
            return "not finished; without a checkpoint to resume from"
        return "not finished; resumes"
    if before is None:
        return "never ran"
    return "; ".join(_differences(before[0], request)) or "never ran in this store"


def _differences(old: Request, new: Request) -> Iterator[str]:
    if changed := _changes(dict(_flat(old.settings)), dict(_flat(new.settings))):
        yield "settings changed: " + _listed([f"{key} {_shown(was)} → {_shown(now)}" for key, was, now in changed])
    if changed := _changes(old.sources, new.sources):
        yield "files changed: " + _listed([key for key, _, _ in changed])
    if changed := _changes(old.inputs, new.inputs):
        yield "input changed: " + _listed([key for key, _, _ in changed])
    if old.version != new.version:
        yield f"version changed: {old.version} → {new.version}"


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    keys = [*old, *(key for key in new if key not in old)]
    return [(key, old.get(key, "nothing"), new.get(key, "nothing")) for key in keys if old.get(key) != new.get(key)]


def _shown(value: Any) -> str:
    """A setting as a recipe would write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flat(value: Any, dotted: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _flat(child, f"{dotted}.{key}" if dotted else key)
    elif isinstance(value, list) and any(isinstance(child, dict) for child in value):
        for index, child in enumerate(value):
            yield from _flat(child, f"{dotted}.{index}")
    else:
        yield dotted, value


def _listed(parts: list[str]) -> str:
    more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return ", ".join(parts[:_SHOWN]) + more
