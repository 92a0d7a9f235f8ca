"""Before anything runs: which stages are complete, which must run, and why."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from affinage.errors import UserError
from affinage.pipeline.code import code_of
from affinage.pipeline.stage import Stage
from affinage.pipeline.store import REQUEST, Request, Store, read_request

ELSEWHERE = "complete at the remote"  # the reason of a step whose result is not here
_SHOWN = 3  # differences named per stage


@dataclass(frozen=True)
class Step:
    """A stage, what exactly is asked of it, and whether that has been done."""

    stage: Stage
    request: Request
    complete: bool
    reason: str


def needed(stages: Sequence[Stage], until: Sequence[str]) -> list[Stage]:
    """The stages of `until` and everything they read, in order; all of them if `until` is empty."""
    known = {stage.name: stage for stage in stages}
    for name in until:
        if name not in known:
            raise UserError(
                f"this recipe has no stage `{name}`", fix="Its stages: " + ", ".join(known) + "." if known else ""
            )
    wanted = set(until or known)
    for stage in reversed(stages):
        if stage.name in wanted:
            wanted.update(stage.inputs)
    return [stage for stage in stages if stage.name in wanted]


def plan(
    stages: Sequence[Stage],
    store: Store,
    run_folder: Path,
    *,
    force: Sequence[str] = (),
    any_code: bool = False,
    elsewhere: Callable[[Request], bool] | None = None,
) -> list[Step]:
    """What is there and what must run, without running or importing anything.

    Args:
        stages: in an order in which each comes after what it reads.
        store: where results are.
        run_folder: its links lead to the results of the run before, which the reasons compare with.
        force: stages to run although their results are there; what reads them runs too.
        any_code: take a result made by another version of the code, if all else is equal.
        elsewhere: whether a result that is not in the store is where it can be taken from; None: there is none.
    """
    steps: dict[str, Step] = {}
    for stage in stages:
        before = read_request(run_folder / stage.name)
        request = Request(
            stage=stage.name,
            settings=stage.settings,
            inputs={name: steps[name].request.key for name in stage.inputs},
            sources=_sources(stage, before[0] if before else None),
            code=code_of(stage.work),
        )
        if any_code and not store.is_complete(request):
            request = _made_by_other_code(store, request) or request
        anew = [name for name in stage.inputs if steps[name].reason.startswith("forced")]
        if stage.name in force:
            complete, reason = False, "forced"
        elif anew:
            complete, reason = False, f"forced by {anew[0]}"
        elif store.is_complete(request):
            complete, reason = True, "complete"
        elif elsewhere is not None and elsewhere(request):
            complete, reason = True, ELSEWHERE
        else:
            complete, reason = False, _reason(stage, store, request, before)
        steps[stage.name] = Step(stage, request, complete, reason)
    return list(steps.values())


def _sources(stage: Stage, before: Request | None) -> dict[str, str]:
    """The fingerprints, or the former ones if the user's files are gone: what was collected from them is still good."""
    if stage.sources or before is None or before.settings != stage.settings:
        return stage.sources
    return before.sources


def _made_by_other_code(store: Store, request: Request) -> Request | None:
    candidates = []
    for file in store.folder.glob(f"{request.stage}-*/{REQUEST}"):
        found = read_request(file.parent)
        if found and replace(found[0], code=request.code) == request:
            candidates.append((store.is_complete(found[0]), file.stat().st_mtime_ns, found[0]))
    return max(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None


def _reason(stage: Stage, store: Store, request: Request, before: tuple[Request, str] | None) -> str:
    damage = store.damage(request)
    if damage:
        return f"damaged: {damage}"
    if read_request(store.path(request)):
        return f"not finished; {_how_it_goes_on(stage, store.path(request))}"
    if before is None:
        return "never ran"
    return "; ".join(_differences(before[0], request)) or "never ran in this store"


def _how_it_goes_on(stage: Stage, folder: Path) -> str:
    if not stage.continues:
        return "starts anew"
    if not stage.live:
        return "what is done of it is kept"
    # By the seal, which is last: to ask `checkpoint` takes importing JAX.
    sealed = any(folder.glob("checkpoints/[0-9]*/SHA256SUMS"))
    return "goes on where it was" if sealed else "no checkpoint is here to go on from"


def _differences(old: Request, new: Request) -> Iterator[str]:
    settings = _changes(dict(_flat(old.settings)), dict(_flat(new.settings)))
    if settings:
        yield "settings changed: " + _listed([f"{key} {_shown(was)} → {_shown(now)}" for key, was, now in settings])
    sources = _changes(old.sources, new.sources)
    if sources:
        yield "files changed: " + _listed([key for key, _, _ in sources])
    inputs = _changes(old.inputs, new.inputs)
    if inputs:
        yield "input changed: " + _listed([key for key, _, _ in inputs])
    code = _changes(old.code, new.code)
    if code:
        yield "code changed: " + _listed([key for key, _, _ in code])


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
