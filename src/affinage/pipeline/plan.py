"""What a run would do: which steps are complete, which must run, and why."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from affinage.config.load import LoadedRecipe
from affinage.differing import differing
from affinage.errors import UserError
from affinage.pipeline.sources import fingerprints, remote_fingerprints
from affinage.pipeline.step import Step
from affinage.pipeline.store import Request, Store, read_request

ELSEWHERE = "complete at the remote"  # the reason of a step whose result is only there
_SHOWN = 3  # differences named per step
_WORDS = {"sources": "files", "inputs": "input"}

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
            raise UserError(f"this recipe has no step `{name}`", fix=f"Its steps: {', '.join(known)}.")
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
    """Compare what the steps, each after those that it reads, would make with what is in the store.

    The reasons compare with the previous run, to whose results the links in `run_folder` lead. Steps of `force`, and
    all that read them, are not complete. `elsewhere` says whether a result can be copied from somewhere. `taken` has
    the fingerprints of sources that were taken before, by step; those that are taken now are added.
    """
    planned: dict[str, PlannedStep] = {}
    taken = {} if taken is None else taken
    for step in steps:
        before = read_request(run_folder / step.name)
        if step.name not in taken:
            taken[step.name] = _sources(step, before[0] if before else None)
        sources, unchecked = taken[step.name]
        inputs = {name: planned[name].request.key for name in step.inputs}
        request = Request(step.name, step.version, step.config, inputs, sources)
        complete, reason = False, ""
        if step.name in force:
            reason = "forced"
        elif forced_inputs := [name for name in step.inputs if planned[name].forced]:
            reason = f"forced by {forced_inputs[0]}"
        elif store.is_complete(request):
            complete, reason = True, "complete"
        elif elsewhere(request):
            complete, reason = True, ELSEWHERE
        planned[step.name] = PlannedStep(
            step, request, complete, reason or _reason(step, store, request, before), unchecked
        )
    return list(planned.values())


def _sources(step: Step, before: Request | None) -> Sources:
    """The fingerprints, and the URLs that could not be checked.

    Where the user's files are gone, the former fingerprints stay, as their result is still good.
    """
    remote, unchecked = remote_fingerprints(step.files, before.sources if before else {})
    found = step.sources | fingerprints(step.files) | remote
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
    for name in ("settings", "sources", "inputs", "version"):
        parts = []
        for key, values in differing([getattr(each, name) for each in (old, new)], absent="nothing"):
            was, now = (each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values)
            parts.append(f"{key} {was} → {now}".lstrip() if name in ("settings", "version") else key)
        if parts:
            more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
            yield f"{_WORDS.get(name, name)} changed: {', '.join(parts[:_SHOWN])}{more}"


def check(loaded: LoadedRecipe, planned: Iterable[PlannedStep]) -> None:
    """Raise UserError for what is known to fail in a step that must run, before the first of them runs."""
    for each in planned:
        if not each.complete and each.step.check is not None:
            each.step.check(loaded)
