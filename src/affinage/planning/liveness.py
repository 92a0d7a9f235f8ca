"""How many bytes a traced program holds at once, and how many it moves, by the rules that XLA fuses by.

A value is stored if an operation makes it that writes its result to memory: matrix products, loops, gathers, scatters,
reductions. What element-wise operations, reshapes and broadcasts make is computed where it is read, inside the
operation that reads it, and so holds on to what it was made from, unless a barrier keeps it out of there. A loop's
stacked results are written in place, and so are its carries; one turn's own values exist once. A loop inside a loop
stacks in memory of its own, from which the turn's part of the outer stack is copied, and what it reads of such a stack
is copied out of it before. A loop that reads its weights in a narrower dtype reads a copy of them all, made before it.
What comes out of the program takes the memory of the state that went in.

So does the TPU's compiler, up to its scheduling, with the programs of this package; docs/planning.md compares the two.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

from affinage.model.scans import parts_of_scan

# Not listed: element-wise operations, broadcasts, reshapes, slices, converts and the like, which are never stored.
_STORED = frozenset(
    "dot_general conv_general_dilated while cond gather scatter scatter-add sort cumsum cumlogsumexp cummax top_k "
    "dynamic_update_slice concatenate pallas_call custom_call reduce_sum reduce_max reduce_min argmax ragged_dot "
    "ragged_dot_general random_bits all_gather reduce_scatter psum ppermute all_to_all".split()
)
_PRODUCTS = frozenset("dot_general ragged_dot ragged_dot_general".split())
# What a program is wrapped in without meaning anything to memory.
_WRAPPERS = {
    "shard_map": "jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}
_WRAPPERS |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr"}
_REWRITINGS = frozenset("convert_element_type reshape transpose squeeze broadcast_in_dim copy".split())

# A TPU's kernel finds its rows filled up to a multiple of it. XLA turns its own arrays so that none is, but for rows
# that it gathers, unless a product reads them. Products of groups of rows are such a kernel, too.
_LANES = 128

Padded = frozenset[tuple[int, ...]]
Shares = Mapping[tuple[int, ...], float]  # shape of a weight, all layers together -> the part that one device holds


@dataclass
class Peak:
    """The moment at which most is held.

    Attributes:
        held: bytes beside the arguments, by what they are: gradients, weights (copies of), activations, logits, buffers
            of collectives (weights that are gathered, gradients that are not summed yet), working.
        moved: bytes read and written over the whole program.
        offloaded: bytes sent to the host's memory over the whole program.
    """

    held: dict[str, float] = field(default_factory=dict)
    moved: float = 0.0
    offloaded: float = 0.0

    @property
    def total(self) -> float:
        """Bytes held at the peak."""
        return sum(self.held.values())


@dataclass(eq=False)
class _Value:
    """Something a program computes; `sources` are the stored values it is computed from where it is not stored."""

    size: float  # bytes it holds
    kind: str = "activations"  # or weights, gradients, argument
    stored: bool = True
    sources: frozenset["_Value"] = frozenset()
    share: float | None = None  # of a weight and what is a mere rewriting of it
    narrowed: float = 0.0  # of a weight that is read in a narrower dtype: bytes of that copy
    read: float = 0.0  # bytes to read it
    row: int = 0  # where a TPU gathered whole rows, each in lanes of its own: their width
    stacked: bool = False  # turn by turn, by a loop: memory of its own
    cut: bool = False  # one turn's part of what a loop reads turn by turn

    def roots(self) -> frozenset["_Value"]:
        return frozenset({self}) if self.stored else self.sources


@dataclass(frozen=True)
class _Step:
    reads: frozenset[_Value]
    writes: tuple[_Value, ...]
    inside: Peak | None = None
    turns: int = 1
    whole: float = 0.0  # bytes of a gradient that the other devices have parts of, until it is summed over them


class _Program:
    """The operations of a jaxpr that store something, in order."""

    def __init__(self, shares: Shares, padded: Padded, vocabularies: Collection[int], *, lanes: bool) -> None:
        self.shares, self.padded, self.vocabularies, self.lanes = shares, padded, vocabularies, lanes
        self.steps: list[_Step] = []
        self.copies: dict[_Value, _Value] = {}  # of what loops read, where they do not read it as it is
        self.offloaded = 0.0

    def run(self, jaxpr: Jaxpr, inputs: Sequence[_Value]) -> list[_Value]:
        """Append the operations; the values that come out."""
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {variable: _Value(0.0) for variable in jaxpr.constvars}

        def read(atom: Any) -> _Value:
            return _Value(0.0) if isinstance(atom, Literal) else values[atom]

        narrow = _read_narrower(jaxpr, self.padded)
        for equation in jaxpr.eqns:
            arguments = [read(atom) for atom in equation.invars]
            name = equation.primitive.name
            if self.lanes and name == "scatter-add" and _is_one_of_a_row(equation, arguments[0]):
                name = "select_n"
            if name in _WRAPPERS and _WRAPPERS[name] in equation.params:
                inner = equation.params[_WRAPPERS[name]]
                results = self.run(getattr(inner, "jaxpr", inner), arguments)
            elif name == "scan":
                results = self._scan(equation, arguments)
            elif name == "optimization_barrier":
                results = self._held(equation, arguments, narrow)
            elif name == "ragged_dot_general" and self.lanes:
                results = [self._by_kernel(equation, arguments)]
            elif name == "device_put" and any(map(_on_host, (*equation.invars, *equation.outvars))):
                results = self._carried_over(equation, arguments)
            else:
                sizes = [narrow.get(variable, _bytes(variable, self.padded)) for variable in equation.outvars]
                pairs = zip(equation.outvars, sizes, strict=True)
                results = [self._result(variable.aval, size, name, arguments) for variable, size in pairs]
                if name == "gather":
                    results[0].row = _row(equation) if self.lanes else 0
                elif name in _PRODUCTS:
                    for root in _roots(arguments):
                        root.row = 0
                if name in _STORED:
                    self.steps.append(_Step(_roots(arguments), tuple(results), whole=self._others(equation)))
            values |= dict(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _result(self, aval: Any, size: float, name: str, arguments: Sequence[_Value]) -> _Value:
        if name in _STORED:
            return self._stored(aval, size, self.shares.get(aval.shape), "gradients")
        share = arguments[0].share if name in _REWRITINGS and arguments else None
        if share is None:
            return _Value(size, stored=False, sources=_roots(arguments))
        if name == "convert_element_type":
            arguments[0].narrowed = size
        return _Value(size * share, "weights", False, _roots(arguments), share)

    def _by_kernel(self, product: Any, arguments: Sequence[_Value]) -> _Value:
        """A product of groups of rows: its kernel reads what is stored, and writes float32 for its readers."""
        read = []
        for atom, value in zip(product.invars, arguments, strict=True):
            if _are_rows(atom) and (not value.stored or value.kind == "argument"):
                copy = _Value(size := _bytes(atom, self.padded), read=size)
                self.steps.append(_Step(value.roots(), (copy,)))
                value = copy
            read.append(value)
        (variable,) = product.outvars
        result = written = self._result(variable.aval, _bytes(variable), product.primitive.name, arguments)
        if _are_rows(variable):
            whole = _bytes(variable, self.padded)
            written = _Value(size := whole * 4 / variable.aval.dtype.itemsize, read=size)
            result = _Value(whole, stored=False, sources=frozenset({written}))
        self.steps.append(_Step(_roots(read), (written,)))
        return result

    def _others(self, equation: Any) -> float:
        """Bytes of a product that is the gradient of a weight, of which this device keeps only its part of the sum."""
        (variable, *_) = equation.outvars
        share = self.shares.get(getattr(variable.aval, "shape", ()), 1.0)
        return _bytes(variable, self.padded) * (1 - share) if equation.primitive.name == "dot_general" else 0.0

    def _held(self, equation: Any, arguments: list[_Value], narrow: Mapping[Any, float]) -> list[_Value]:
        """What a barrier keeps XLA from computing inside of its readers, and so stores."""
        results = []
        for variable, value in zip(equation.outvars, arguments, strict=True):
            inside_readers = not value.stored and value.share is None
            size = narrow.get(variable, _bytes(variable, self.padded))
            results.append(self._stored(variable.aval, size, None, "activations") if inside_readers else value)
        new = tuple(result for result, value in zip(results, arguments, strict=True) if result is not value)
        if new:
            self.steps.append(_Step(_roots(arguments), new))
        return results

    def _carried_over(self, equation: Any, arguments: list[_Value]) -> list[_Value]:
        """Copies to the host's memory, which hold nothing here, and back."""
        self.offloaded += sum(_whole(variable) for variable in equation.outvars if _on_host(variable))
        results = [self._stored(v.aval, _bytes(v, self.padded), None, "activations") for v in equation.outvars]
        self.steps.append(_Step(_roots(arguments), tuple(results)))
        return results

    def _stored(self, aval: Any, size: float, share: float | None, kind: str) -> _Value:
        size *= 1.0 if share is None else share
        if share is None:
            is_logits = len(aval.shape) > 1 and aval.shape[-1] in self.vocabularies
            kind = "logits" if is_logits else "activations"
        return _Value(size, kind, share=share, read=size)

    def _scan(self, equation: Any, arguments: list[_Value]) -> list[_Value]:
        parameters = equation.params
        constants, carries = parts_of_scan(parameters)
        sliced, turns = constants + carries, parameters["length"]
        body = parameters["jaxpr"].jaxpr
        inputs = [
            _Value(0.0, "argument", share=value.share, read=_bytes(variable, self.padded), cut=index >= sliced)
            for index, (variable, value) in enumerate(zip(body.invars, arguments, strict=True))
        ]
        inner = _Program(self.shares, self.padded, self.vocabularies, lanes=self.lanes)
        outputs = inner.run(body, inputs)
        self.offloaded += inner.offloaded * turns
        for value, variable in zip(inputs[sliced:], body.invars[sliced:], strict=True):
            if value.share is not None and value.share < 1:  # its other parts come from other devices
                value.size = value.narrowed or _bytes(variable, self.padded)
        copies = [self._copy(outer, value, turns) for outer, value in zip(arguments, inputs, strict=True)]
        inside = inner.peak(outputs)
        if not any(step.inside for step in inner.steps):  # one layer or one part of the logits, not a micro-batch
            apart = {kind: inside.held.get(kind, 0.0) for kind in ("logits", "buffers")}
            inside.held = {"working": inside.total - sum(apart.values())} | apart
        results = []
        for index, (variable, value) in enumerate(zip(equation.outvars, outputs, strict=True)):
            begun = arguments[constants + index] if index < carries else None
            if begun is not None and begun.kind == "argument" and not begun.size:  # written where the state is
                results.append(_Value(0.0, "argument", share=begun.share, read=begun.read))
                continue
            copied = value.kind == "weights"
            share = value.share if copied else self.shares.get(variable.aval.shape)
            size = _bytes(variable, self.padded)
            if value.roots() and {root.row for root in value.roots()} == {*variable.aval.shape[-1:]}:
                size *= _filling(variable.aval.shape[-1])
            result = self._stored(variable.aval, size, share, "weights" if copied else "gradients")
            result.stacked = index >= carries
            results.append(result)
        made = [copy for copy in copies if copy is not None]
        new = [copy for copy in made if not any(copy in step.writes for step in self.steps)]
        self.steps.append(_Step(_roots([*arguments, *made]), (*results, *new), inside, turns))
        return results

    def _copy(self, outer: _Value, inner: _Value, turns: int) -> _Value | None:
        """What a loop reads instead of `outer`.

        A weight in the dtype it computes in, a value that was not stored, an outer loop's part of a stack.
        """
        constant = not outer.stored and not outer.sources  # such as zeros, which the loop makes itself
        cut = outer.cut and outer.share is None
        if constant or (outer.stored and not cut and not (inner.narrowed and outer.kind == "argument")):
            return None
        if outer not in self.copies:
            size = outer.read if cut else inner.narrowed * turns * (outer.share or 1.0) if outer.stored else outer.size
            kind = "activations" if cut else "weights" if outer.stored else outer.kind
            self.copies[outer] = _Value(size, kind, share=outer.share, read=size)
        return self.copies[outer]

    def peak(self, outputs: Sequence[_Value] = ()) -> Peak:
        """Walk the operations in order. `outputs` of a loop's turn have their places already, but for stacks."""
        placed = {value for value in outputs if value.stored and not value.stacked}
        last: dict[_Value, int] = {}
        for index, step in enumerate(self.steps):
            last |= dict.fromkeys((*step.reads, *step.writes), index)
        live: set[_Value] = set()
        best = Peak()
        moved = sum(value.size for value in outputs if not value.stored)
        for index, step in enumerate(self.steps):
            live.update(value for value in step.writes if value not in placed)
            held: dict[str, float] = {}
            for value in (*live, *(value for value in step.reads if value.kind == "argument")):
                kind = "buffers" if value.kind == "argument" else value.kind
                held[kind] = held.get(kind, 0.0) + value.size
            for kind, size in (*(step.inside.held.items() if step.inside else ()), ("buffers", step.whole)):
                held[kind] = held.get(kind, 0.0) + size
            if sum(held.values()) > best.total:
                best.held = held
            if step.inside:
                moved += step.inside.moved * step.turns
            else:
                moved += sum(value.read for value in step.reads) + sum(value.size for value in step.writes)
            live = {value for value in live if last[value] > index}
        best.moved = moved
        return best


@dataclass(frozen=True, eq=False)
class Traced:
    """A program, how many of its arguments are arrays of weights (the first ones), and the shapes that it returns."""

    jaxpr: Any
    weights: int
    made: Any


def trace(function: Callable[..., Any], weights: Any, *others: Any, axes: Sequence[tuple[str, int]] = ()) -> Traced:
    """A function of `weights` and `others`, trees of `jax.ShapeDtypeStruct`, as a program; it is not run.

    `axes` are names and sizes of those that its collectives speak of.
    """
    traced, made = jax.make_jaxpr(function, axis_env=axes, return_shape=True)(weights, *others)
    jaxpr, _ = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars), instantiate=True)
    return Traced(jaxpr, len(jax.tree.leaves(weights)), made)


def measure(traced: Traced, shares: Shares, platform: str, vocabularies: Collection[int] = ()) -> Peak:
    """What a program holds and moves beside its arguments.

    Args:
        traced: see `trace`.
        shares: of the weights.
        platform: that it would be compiled for.
        vocabularies: widths of logits, by which they are told from other values.
    """
    inputs = []
    for index, variable in enumerate(traced.jaxpr.invars):
        share = shares.get(variable.aval.shape) if index < traced.weights else None
        inputs.append(_Value(0.0, "argument", share=share, read=_bytes(variable) * (1.0 if share is None else share)))
    lanes = platform == "tpu"
    padded = _rows_of_kernels(traced.jaxpr) if lanes else frozenset()
    program = _Program(shares, padded, vocabularies, lanes=lanes)
    program.run(traced.jaxpr, inputs)
    peak = program.peak()
    peak.offloaded = program.offloaded
    return peak


def _roots(values: Sequence[_Value]) -> frozenset[_Value]:
    return frozenset(root for value in values for root in value.roots() if root.size or root.read)


def _bytes(variable: Any, padded: Padded = frozenset()) -> float:
    return 0.0 if _on_host(variable) else _whole(variable, padded)


def _on_host(variable: Any) -> bool:
    return getattr(variable.aval, "memory_space", None) == jax.memory.Space.Host


def _whole(variable: Any, padded: Padded = frozenset()) -> float:
    """Bytes wherever they are."""
    aval = variable.aval
    if not hasattr(aval, "dtype") or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0.0
    fill = _filling(aval.shape[-1]) if aval.shape[-2:] in padded else 1
    return float(prod(aval.shape) * aval.dtype.itemsize * fill)


def _filling(width: int) -> float:
    """By how much rows of this width grow where each fills whole lanes."""
    return -(-width // _LANES) * _LANES / width


def _row(gather: Any) -> int:
    """The width of the rows that a gather takes; 0 where it takes single numbers or parts of rows."""
    *others, width = gather.invars[0].aval.shape
    return width if others and width > 1 and gather.params["slice_sizes"][-1] == width else 0


def _is_one_of_a_row(scatter: Any, onto: _Value) -> bool:
    """Whether one number of every row of zeros is set, such as the gradient of a token's logit among all of them.

    A TPU's compiler compares positions with the index instead, inside of what reads the rows.
    """
    operand, _, updates = (atom.aval for atom in scatter.invars)
    rows = operand.shape[: len(scatter.params["dimension_numbers"].operand_batching_dims)]
    constant = not onto.stored and not onto.sources
    return constant and len(rows) == len(operand.shape) - 1 and updates.size == prod(rows)


def _are_rows(atom: Any) -> bool:
    """Whether what a product of groups reads or writes has rows of tokens, not a matrix for every group."""
    return len(atom.aval.shape) == 2


def _rows_of_kernels(jaxpr: Jaxpr) -> Padded:
    """The last two dimensions of what kernels read and write."""
    found: set[tuple[int, ...]] = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            avals: list[Any] = [atom.aval for atom in (*equation.invars, *equation.outvars)]
            shapes = [aval.shape for aval in avals]
            found |= {shape[-2:] for shape in shapes if len(shape) > 2 and shape[-1] % _LANES}
        elif equation.primitive.name == "ragged_dot_general":
            atoms: list[Any] = [*equation.invars, *equation.outvars]
            found |= {atom.aval.shape for atom in atoms if _are_rows(atom)}
        else:
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                found |= _rows_of_kernels(getattr(inner, "jaxpr", inner))
    return frozenset(found)


def _read_narrower(jaxpr: Jaxpr, padded: Padded) -> dict[Any, float]:
    """Results that are only read in fewer bytes, and so stored in them: the bytes.

    By a conversion, which the product that makes them does itself; by products whose other factor is narrower.
    """
    readers: dict[Any, list[Any]] = {}
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if not isinstance(atom, Literal):
                readers.setdefault(atom, []).append(equation)
    returned = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    found = {}
    for variable, reading in readers.items():
        names = {equation.primitive.name for equation in reading}
        whole = _bytes(variable, padded)
        if variable in returned:
            continue
        if names == {"convert_element_type"} and len(reading) == 1:
            found[variable] = min(_bytes(reading[0].outvars[0], padded), whole)
        elif names == {"dot_general"}:
            narrowest = min(atom.aval.dtype.itemsize for equation in reading for atom in equation.invars)
            found[variable] = whole / variable.aval.dtype.itemsize * narrowest
    return found
