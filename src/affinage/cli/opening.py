"""How verbs open a model: over which devices, and for how many tokens at once."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from affinage.cli.options import find, opt
from affinage.cli.output import working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.generation.model import LoadedModel
    from affinage.pipeline.models import ModelState, Target

MAX_RESERVED = 4096  # tokens of context for which memory is reserved, of a model from elsewhere that reads more


def _mesh(text: str) -> dict[str, int | str]:
    """The devices along each axis, from `fsdp=4,tensor=2`."""
    sizes: dict[str, int | str] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis in sizes or not (size.isdecimal() or size == "auto"):
            fix = "For example: --mesh tensor=2, or --mesh fsdp=4,tensor=2; one size may be auto."
            raise UserError(f"`{text}` is not a mesh", where="--mesh", fix=fix)
        sizes[axis] = size if size == "auto" else int(size)
    return sizes


_MESH = "Split the weights over devices, e.g. tensor=2 or fsdp=4,tensor=2. Default: each has a copy."
_MAX_LEN = (
    "Longest prompt and answer together. Default: what the model was trained on; for a model from elsewhere "
    f"{MAX_RESERVED} where memory is reserved for it (serve, eval)."
)
MeshOption = Annotated[Any, opt(_MESH, "--mesh", metavar="AXIS=DEVICES,...", parser=_mesh, show_default=False)]
MaxLenOption = Annotated[int | None, opt(_MAX_LEN, "--max-model-len", metavar="TOKENS", min=2, show_default=False)]


def model_of(name: str, runs: Path, *, announce: bool = True) -> "tuple[Target, ModelState | None]":
    """Returns the model that a name stands for, and how far it is trained, which is printed (`announce`).

    Raises:
        UserError: there is none, or it is a run that is not complete; with the command that completes it.
    """
    from affinage.cluster.processes import is_first
    from affinage.pipeline.models import check_complete, checkpoints_of, locate, resolve, state_of

    target = find(name, runs) if announce else resolve(name, runs)
    check_complete(target, runs)
    state, model = state_of(target, runs), locate(target, runs)
    is_there = not isinstance(model.step, int) or (checkpoints_of(model.path, model.step) / str(model.step)).is_dir()
    if announce and state is not None and is_there and is_first():
        print(f"Model: {state}", file=sys.stderr)
    return model, state


def opened(
    name: str, runs: Path, mesh: Any, max_model_len: int | None, *, reserves: bool = False, announce: bool = True
) -> "tuple[LoadedModel, dict[str, Any]]":
    """Returns the model that a name stands for, opened on a mesh for texts of a length, and how far it is trained.

    With `reserves`, memory is held for the whole context: a model from elsewhere, whose context may be far longer than
    anybody needs, is limited to `MAX_RESERVED` unless a limit is given, and this is printed.

    Raises:
        UserError: as `model_of` and `open_model`, and for a context that is longer than the model's.
    """
    target, state = model_of(name, runs, announce=announce)  # before JAX is imported
    from affinage.cluster.processes import is_first
    from affinage.pipeline.opening import open_model

    with working(f"opening {name}"):
        model = open_model(target, runs, mesh=mesh)
    longest, length = model.context, max_model_len
    if length is not None and length > longest:
        what = f"`{name}` reads {longest:,} tokens at once, not {length:,}"
        raise UserError(what, where="--max-model-len", fix=f"Write {longest} at most, or leave it out.")
    if length is None and reserves and longest > MAX_RESERVED and state is None:
        length = MAX_RESERVED
        if is_first():
            limited = f"`{name}` can read {longest:,} tokens at once; {length:,} are used"
            print(f"{limited}. More take more memory: --max-model-len {longest}", file=sys.stderr)
    return replace(model, context=length or longest), asdict(state) if state else {}
