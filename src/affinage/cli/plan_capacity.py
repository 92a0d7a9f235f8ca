"""`affinage plan RECIPE --width`: the largest model of a width that a slice trains, by its compiler's verdict."""

import json
import sys
from typing import TYPE_CHECKING, Any

from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.hardware.slices import Slice
    from affinage.planning.capacity import Attempt, Capacity
    from affinage.planning.plan import Counted


def capacity_and_show(
    recipe: str, overrides: list[str], where: "Slice", width: int, tries: int, counted: "Counted", as_json: bool
) -> None:
    """Print every attempt as it comes, and the largest with its settings and its predicted step."""
    from affinage.config.load import load_recipe
    from affinage.planning.capacity import capacity, shape

    given = [*shape(width, where), *overrides]
    if "blocks" not in load_recipe(recipe, []).recipe.model["nodes"]:
        raise UserError(f"{recipe} has no node `blocks`", where="--width", fix="affinage plan capacity --width ...")
    found = capacity(recipe, given, where, tries=tries, told=_say, counted=counted)
    if as_json:
        print(json.dumps(_told(found), indent=1))
        return
    largest, made = found.largest, found.plan
    print(f"\n{where.name}: {largest.parameters / 1e9:.1f}B parameters, {largest.layers} layers of width {width}")
    fax = found.fax
    if fax:
        print(
            f"FAX reached {fax.parameters / 1e9:.1f}B at {fax.seconds:.2f} s a step: "
            f"{largest.parameters / fax.parameters:.2f} times as many. Its feed-forward width and heads are not "
            "stated; assumed here are those below."
        )
    print(f"predicted: {made.time.seconds:.2f} s a step, bound by {made.time.bound}")
    print("\n" + " ".join(["affinage plan", recipe, "--on", where.name, *(f"--set '{o}'" for o in found.overrides)]))


def _say(attempt: "Attempt") -> None:
    from affinage.hardware.slices import memory_text

    verdict = attempt.verdict
    said = f"fits, {memory_text(verdict.peak_bytes)}" if verdict.fits else f"refused, {memory_text(verdict.peak_bytes)}"
    print(
        f"{attempt.layers} layers, {attempt.parameters / 1e9:.1f}B: {said}, after {verdict.seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def _told(found: "Capacity") -> dict[str, Any]:
    attempts = [
        {"layers": one.layers, "parameters": one.parameters, "compiled": vars(one.verdict)} for one in found.attempts
    ]
    largest, fax = found.largest, found.fax
    return {
        "layers": largest.layers,
        "parameters": largest.parameters,
        "overrides": list(found.overrides),
        "seconds": found.plan.time.seconds,
        "fax": vars(fax) | {"ratio": largest.parameters / fax.parameters} if fax else None,
        "attempts": attempts,
    }
