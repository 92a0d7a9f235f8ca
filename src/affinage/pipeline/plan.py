"""What a run would do: which steps are complete, which must run, and why."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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


def sources_of(step: Step, before: Request | None) -> Sources:
    """The fingerprints, and the URLs that could not be checked.

    Where the user's files are gone, the former fingerprints stay, as their result is still good.
    """
    remote, unchecked = remote_fingerprints(step.files, before.sources if before else {})
    found = step.sources | fingerprints(step.files) | remote
    if found or before is None or before.settings != step.config:
        return found, unchecked
    return before.sources, unchecked


def reason_to_run(step: Step, store: Store, request: Request, before: tuple[Request, str] | None) -> str:
    """Why a step must run: how it differs from the request `before`, of the previous run."""
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
