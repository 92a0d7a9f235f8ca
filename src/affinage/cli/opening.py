"""How verbs open a model in order to use it: over which devices, and how much it reads at once."""

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from affinage.cli.options import RUNS, RunsOption
from affinage.cli.working import Working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.generation.model import LoadedModel

SET_ASIDE = 4096  # tokens of a row for which memory is set aside where a model from elsewhere would read more


def _sizes(said: str) -> dict[str, int | str]:
    """Devices along each axis, of `fsdp=4,tensor=2`."""
    sizes: dict[str, int | str] = {}
    for part in said.split(","):
        axis, _, size = part.strip().partition("=")
        if axis in sizes or not (size.isdecimal() or size == "auto"):
            fix = "For example: --mesh tensor=2, or --mesh fsdp=4,tensor=2; one size may be auto."
            raise UserError(f"`{said}` is no mesh", where="--mesh", fix=fix)
        sizes[axis] = size if size == "auto" else int(size)
    return sizes


MeshOption = Annotated[
    Any,
    typer.Option(
        "--mesh",
        metavar="AXIS=DEVICES,...",
        parser=_sizes,
        help="Split the weights over devices, e.g. tensor=2 or fsdp=4,tensor=2. Default: each has a copy.",
        show_default=False,
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="TOKENS",
        min=2,
        help="Read at most so many tokens at once, prompt and answer together. Default: what the model was trained "
        f"on; for models from elsewhere {SET_ASIDE} where memory is set aside for it (serve, eval).",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Opening:
    """Options of verbs that open a model; see `options.sharing`."""

    mesh: MeshOption = None
    context: ContextOption = None
    runs: RunsOption = RUNS


def opened(spec: str, how: Opening, *, sets_aside: bool = False) -> "LoadedModel":
    """The model that `spec` names, as the options say.

    Where `sets_aside`, memory is held for rows of the whole context: that of a model from elsewhere, which may be far
    more than anybody needs, is limited to `SET_ASIDE` if no other limit is asked for, and this is said.

    Raises:
        UserError: as `open_model`, and for a context that is longer than the model's.
    """
    from affinage.hardware.hosts import Hosts
    from affinage.pipeline.models import is_from_elsewhere, locate_model, open_model

    with Working(f"opening {spec}"):
        loaded = open_model(spec, how.runs, mesh=how.mesh)
    own, asked = loaded.context, how.context
    if asked is not None and asked > own:
        fix = f"Write {own} at most, or leave it out."
        raise UserError(f"`{spec}` reads {own:,} tokens at once, not {asked:,}", where="--context", fix=fix)
    if asked is None and sets_aside and own > SET_ASIDE and is_from_elsewhere(locate_model(spec, how.runs)[0]):
        asked = SET_ASIDE
        if Hosts.current.first:
            said = f"`{spec}` can read {own:,} tokens at once; {asked:,} are used. More take more memory: --context"
            print(f"{said} {own}", file=sys.stderr)
    return replace(loaded, context=asked or own)
