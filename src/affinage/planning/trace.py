"""What a traced program computes, moves and holds, operation by operation, by the rules that XLA fuses by.

An operation that writes its result to memory (a matrix product, loop, gather, scatter, reduction) is one `Op`. What
element-wise operations, reshapes and broadcasts make is computed inside the operation that reads it, and keeps alive
what it was made from; an optimization barrier stores it. A loop writes stacked results and carries in place, and the
values of one turn exist once. A loop inside a loop stacks in memory of its own, and reads a copy of its turn's part of
the outer stack. Weights that a loop reads in a narrower dtype are copied whole before it. What leaves the program takes
the memory of the state that went in. docs/planning.md compares the result with what compilers allocate.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

# Not listed: element-wise operations, broadcasts, reshapes, slices, converts and the like, which are never stored.
_STORED = frozenset(
    "dot_general conv_general_dilated while gather scatter scatter-add sort cumsum cumlogsumexp cummax top_k "
    "dynamic_update_slice concatenate pallas_call custom_call reduce_sum reduce_max reduce_min argmax "
    "ragged_dot_general random_bits all_gather reduce_scatter psum ppermute all_to_all".split()
)
_PRODUCTS = frozenset("dot_general ragged_dot_general conv_general_dilated".split())
_WRAPPERS = frozenset(
    "shard_map jit pjit checkpoint remat2 closed_call custom_jvp_call custom_vjp_call custom_vmap_call".split()
)
_REWRITINGS = frozenset("convert_element_type reshape transpose squeeze broadcast_in_dim copy".split())
_CUDNN = "dot_product_attention"  # in the names of the primitives of JAX's wrapper
_CUDNN_PRODUCTS = {"fwd": 2, "bwd": 5}
_LANES = 128  # a TPU's kernel reads and writes rows padded to a multiple of them; XLA's own arrays are not padded
_MOST_READ = 4  # times the bytes of an element-wise result, that it is made from before it is stored

Padded = frozenset[tuple[int, ...]]  # last two dimensions of what kernels read and write


@dataclass(frozen=True)
class Op:
    """One operation that writes to memory."""

    kind: str  # its primitive
    scope: str  # the name stack that it was traced in, such as `transpose(jvp(blocks))`
    flops: float  # multiplications and additions of its matrix products, of dimensions rounded up to the matrix unit
    bytes_in: float  # read from memory
    bytes_out: float  # written to memory
    # bytes beside the program's arguments while it runs, by what they are: weights (copies), gradients,
    # activations, logits, buffers (gathered weights, gradients before they are summed over devices), working
    # (one turn of an inner loop)
    live: Mapping[str, float]
    times: int = 1  # how often it runs
    dtype: str = ""  # of the factors of its matrix products
    kernels: int = 1  # programs that a GPU launches for it


@dataclass(frozen=True)
class Traced:
    """A program's operations in order, those of loops once with their number of turns."""

    ops: tuple[Op, ...]

    @property
    def peak(self) -> Mapping[str, float]:
        """What is live at the operation that has most; see `Op.live`."""
        return max((op.live for op in self.ops), key=lambda live: sum(live.values()), default={})


@dataclass(frozen=True)
class Weights:
    """What a trace must know of the weights of one device."""

    count: int = 0  # arguments that are weights, the first ones
    # shape of a weight as it is multiplied -> the part of it that one device stores
    shares: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    vocabularies: Collection[int] = ()  # widths that mark logits
    # by node, operations of one of the products of its attention, in one layer and micro-batch
    kernel_flops: Mapping[str, float] = field(default_factory=dict)
    matrix_unit: int = 1  # rows and columns that are multiplied at once; 1: none that a model is too narrow for


def walk(jaxpr: Jaxpr, platform: str, weights: Weights) -> Traced:
    """The operations of a traced program as it would be compiled for a platform (cpu, gpu or tpu)."""
    # XLA removes what nothing reads, such as a forward pass of which a backward pass that computes it again has all.
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    kernels = [equation for equation in _equations(jaxpr) if equation.primitive.name == "pallas_call"]
    shapes = [_shape(atom) for equation in kernels for atom in (*equation.invars, *equation.outvars)]
    padded = frozenset(shape[-2:] for shape in shapes if len(shape) > 2 and shape[-1] % _LANES)
    inputs = []
    for index, variable in enumerate(jaxpr.invars):
        share = weights.shares.get(_shape(variable)) if index < weights.count else None
        inputs.append(_Value(0.0, "argument", share=share, read=_bytes(variable) * (1.0 if share is None else share)))
    walker = _Walker(platform, weights, padded)
    outputs = walker.run(jaxpr, inputs)
    return Traced((*walker.finished(), *walker.returned(jaxpr, outputs)))


@dataclass(eq=False)
class _Value:
    """Something a program computes; `sources` are the stored values that it is computed from if it is not stored."""

    size: float  # bytes that it holds
    kind: str = "activations"  # or weights, gradients, logits, argument
    stored: bool = True
    sources: frozenset["_Value"] = frozenset()
    share: float | None = None  # of a weight and of a mere rewriting of it
    narrowed: float = 0.0  # of a weight that is read in a narrower dtype: bytes of that copy
    read: float = 0.0  # bytes to read it
    stacked: bool = False  # turn by turn by a loop, in memory of its own
    cut: bool = False  # one turn's part of what a loop reads turn by turn

    def roots(self) -> frozenset["_Value"]:
        return frozenset({self}) if self.stored else self.sources


@dataclass(frozen=True)
class _Step:
    """An operation before it is known what else is live."""

    op: Op
    reads: frozenset[_Value]
    writes: tuple[_Value, ...]
    inside: tuple[Op, ...] = ()  # of a loop, the operations of a turn
    turns: int = 1
    unsummed: float = 0.0  # bytes of a gradient whose other parts go to other devices


class _Walker:
    """The stored operations of a jaxpr, in order. On GPUs and CPUs a matrix product reads factors from memory; on TPUs
    it computes element-wise operations on its factors itself."""

    def __init__(self, platform: str, weights: Weights, padded: Padded, scope: str = "") -> None:
        self.platform, self.weights, self.padded, self.scope = platform, weights, padded, scope
        self.steps: list[_Step] = []
        self.copies: dict[_Value, _Value] = {}  # what loops and products read in place of a value

    def run(self, jaxpr: Jaxpr, inputs: Sequence[_Value]) -> list[_Value]:
        """Append the operations of a program; returns the values that leave it."""
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {variable: _Value(0.0) for variable in jaxpr.constvars}

        def read(atom: Any) -> _Value:
            return _Value(0.0) if isinstance(atom, Literal) else values[atom]

        narrow, outer = _read_narrower(jaxpr, self.padded), self.scope
        for equation in jaxpr.eqns:
            self.scope = "/".join(filter(None, (outer, str(equation.source_info.name_stack))))
            results = self._apply(equation, [read(atom) for atom in equation.invars], narrow)
            values |= dict(zip(equation.outvars, results, strict=True))
        self.scope = outer
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, equation: Any, arguments: list[_Value], narrow: Mapping[Any, float]) -> list[_Value]:
        name, on_tpu = equation.primitive.name, self.platform == "tpu"
        if name in _WRAPPERS:
            return self.run(next(_bodies(equation)), arguments)
        if name == "cond":  # the last branch is the usual one: that of true
            return self.run(equation.params["branches"][-1].jaxpr, arguments[1:])
        if name == "scan":
            return self._scan(equation, arguments)
        sizes = [narrow.get(variable, _bytes(variable, self.padded)) for variable in equation.outvars]
        outputs = list(zip(equation.outvars, sizes, strict=True))
        if name == "optimization_barrier":  # keeps XLA from computing a value inside of its readers
            results = [
                value if value.stored or value.share is not None else self._stored(variable, size)
                for (variable, size), value in zip(outputs, arguments, strict=True)
            ]
            if new := [result for result, value in zip(results, arguments, strict=True) if result is not value]:
                self._append(equation, arguments, new)
            return results
        if name in _PRODUCTS and not on_tpu:
            arguments = [self._in_memory(atom, value) for atom, value in zip(equation.invars, arguments, strict=True)]
        if name not in _STORED and _CUDNN not in name:
            results = [self._fused(size, name, arguments) for size in sizes]
            # A value that is made from much, such as the residual stream of layers that are no loop, is stored after
            # all: every reader would read all of that again.
            much = (v.share is None and sum(r.read for r in v.sources) > _MOST_READ * v.size > 0 for v in results)
            if on_tpu or not any(much):
                return results
            results = [self._stored(variable, size) for variable, size in outputs]
        else:
            results = [self._stored(v, size, self.weights.shares.get(_shape(v))) for v, size in outputs]
        share = self.weights.shares.get(_shape(equation.outvars[0]), 1.0) if name == "dot_general" else 1.0
        self._append(equation, arguments, results, unsummed=_bytes(equation.outvars[0], self.padded) * (1 - share))
        return results

    def _append(self, equation: Any, reads: Sequence[_Value], writes: Sequence[_Value], unsummed: float = 0.0) -> None:
        name, flops, dtype = equation.primitive.name, 0.0, ""
        if name in _PRODUCTS:
            flops, dtype = _flops_of_product(equation, self.weights.matrix_unit), str(equation.invars[0].aval.dtype)
        elif name == "pallas_call" or _CUDNN in name:
            inside = (inner for body in _bodies(equation) for inner in _equations(body))
            products = next((count for way, count in _CUDNN_PRODUCTS.items() if way in name), 0)
            products = products or sum(inner.primitive.name == "dot_general" for inner in inside)
            node = next((node for node in self.weights.kernel_flops if node in self.scope), "")
            flops = products * self.weights.kernel_flops.get(node, 0.0)
        roots = _roots(reads)
        op = Op(name, self.scope, flops, sum(v.read for v in roots), sum(v.size for v in writes), {}, 1, dtype)
        self.steps.append(_Step(op, roots, tuple(writes), unsummed=unsummed))

    def _fused(self, size: float, name: str, arguments: Sequence[_Value]) -> _Value:
        """A value that is computed in the operations that read it."""
        share = arguments[0].share if name in _REWRITINGS and arguments else None
        if share is None:
            if self.platform == "cpu" and name in _REWRITINGS:  # of what a product has had written to memory
                arguments = [self.copies.get(value, value) for value in arguments]
            return _Value(size, stored=False, sources=_roots(arguments))
        if name == "convert_element_type":
            arguments[0].narrowed = size
        return _Value(size * share, "weights", False, _roots(arguments), share)

    def _stored(self, variable: Any, size: float, share: float | None = None) -> _Value:
        size, kind = size * (1.0 if share is None else share), "gradients"
        if share is None:
            shape = _shape(variable)
            kind = "logits" if len(shape) > 1 and shape[-1] in self.weights.vocabularies else "activations"
        return _Value(size, kind, share=share, read=size)

    def _in_memory(self, atom: Any, value: _Value) -> _Value:
        """A factor of a product as it lies in memory: what element-wise operations compute is written once. Weights are
        copied once into the dtype of the product, gathered from the devices that have parts of them."""
        roots = value.roots()
        gathered = value.share is not None and value.share < 1
        # A reshape, or close to one, has as many bytes as the one stored value that it is made from.
        is_view = len(value.sources) == 1 and next(iter(value.sources)).read == value.size
        in_place = value.stored or not roots or is_view or (value.share is not None and any(root.cut for root in roots))
        if in_place and not (gathered and not any(root.size for root in roots)):
            return value
        if value not in self.copies:
            self.copies[value] = copy = self._stored(atom, _bytes(atom))
            copy.kind = copy.kind if value.share is None else "buffers" if gathered else "weights"
            op = Op("fusion", self.scope, 0.0, sum(v.read for v in roots), copy.size, {})
            self.steps.append(_Step(op, roots, (copy,)))
        return self.copies[value]

    def _scan(self, equation: Any, arguments: list[_Value]) -> list[_Value]:
        if "num_carry" in equation.params:  # JAX 0.10; later versions have a tree
            constants, carries = equation.params["num_consts"], equation.params["num_carry"]
        else:
            constants, carries = (len(part) for part in equation.params["ft_in"].unpack()[:2])
        sliced, turns = constants + carries, equation.params["length"]  # the rest is read turn by turn
        body = equation.params["jaxpr"].jaxpr
        inputs = [
            _Value(0.0, "argument", share=value.share, read=_bytes(variable, self.padded), cut=index >= sliced)
            for index, (variable, value) in enumerate(zip(body.invars, arguments, strict=True))
        ]
        inner = _Walker(self.platform, self.weights, self.padded, self.scope)
        outputs = inner.run(body, inputs)
        for value, variable in zip(inputs[sliced:], body.invars[sliced:], strict=True):
            if value.share is not None and value.share < 1:  # its other parts come from other devices
                value.size = value.narrowed or _bytes(variable, self.padded)
        copies = [self._copy_for_loop(outer, value, turns) for outer, value in zip(arguments, inputs, strict=True)]
        inside = [*inner.finished(outputs), *inner.returned(body, outputs)]
        if not any(step.inside for step in inner.steps):  # one layer or one part of the logits, not a micro-batch
            for index, op in enumerate(inside):
                apart = {kind: op.live.get(kind, 0.0) for kind in ("logits", "buffers")}
                working = sum(op.live.values()) - sum(apart.values())
                inside[index] = replace(op, live={"working": working} | apart)
        results = []
        for index, (variable, value) in enumerate(zip(equation.outvars, outputs, strict=True)):
            begun = arguments[constants + index] if index < carries else None
            if begun is not None and begun.kind == "argument" and not begun.size:  # written where the state is
                results.append(_Value(0.0, "argument", share=begun.share, read=begun.read))
                continue
            share = self.weights.shares.get(_shape(variable))
            # What an inner loop has stacked for a kernel is padded in that stack alone.
            size = _bytes(variable, frozenset() if value.stacked else self.padded)
            result = self._stored(variable, size, share)
            result.stacked = index >= carries
            results.append(result)
        read = [copy for copy in copies if copy is not None]
        new = [copy for copy in read if not any(copy in step.writes for step in self.steps)]
        # What the loop reads and writes is counted by the operations of its turns.
        op = Op("scan", self.scope, 0.0, 0.0, sum(copy.size for copy in new), {})
        self.steps.append(_Step(op, _roots([*arguments, *read]), (*results, *new), tuple(inside), turns))
        return results

    def _copy_for_loop(self, outer: _Value, inner: _Value, turns: int) -> _Value | None:
        """What a loop reads in place of `outer`: a weight in the dtype that it computes in, a value that was not
        stored, an outer loop's part of a stack; None: the value itself."""
        constant = not outer.stored and not outer.sources  # such as zeros, which the loop makes itself
        cut = outer.cut and outer.share is None
        if constant or (outer.stored and not cut and not (inner.narrowed and outer.kind == "argument")):
            return None
        if outer not in self.copies:
            narrowed = inner.narrowed * (turns if inner.cut else 1) * (outer.share or 1.0)
            size = outer.read if cut else narrowed if outer.stored else outer.size
            kind = "activations" if cut else "weights" if outer.stored else outer.kind
            self.copies[outer] = _Value(size, kind, share=outer.share, read=size)
        return self.copies[outer]

    def finished(self, outputs: Sequence[_Value] = ()) -> list[Op]:
        """The operations with what is live; `outputs` of a loop's turn have their places already, but for stacks."""
        placed = {value for value in outputs if value.stored and not value.stacked}
        last: dict[_Value, int] = {}
        for index, step in enumerate(self.steps):
            last |= dict.fromkeys((*step.reads, *step.writes), index)
        live: set[_Value] = set()
        ops: list[Op] = []
        for index, step in enumerate(self.steps):
            live.update(value for value in step.writes if value not in placed)
            held: dict[str, float] = {"buffers": step.unsummed} if step.unsummed else {}
            for value in (*live, *(value for value in step.reads if value.kind == "argument")):
                kind = "buffers" if value.kind == "argument" else value.kind
                held[kind] = held.get(kind, 0.0) + value.size
            ops.append(replace(step.op, live=held))
            for op in step.inside:
                together = {kind: held.get(kind, 0.0) + op.live.get(kind, 0.0) for kind in {**held, **op.live}}
                ops.append(replace(op, live=together, times=op.times * step.turns))
            live = {value for value in live if last[value] > index}
        return ops

    def returned(self, jaxpr: Jaxpr, outputs: Sequence[_Value]) -> list[Op]:
        """The computation of results that no operation has stored yet, such as the state after an update."""
        computed = [
            (value, value.size * (self.weights.shares.get(_shape(variable), 1.0) if value.share is None else 1.0))
            for variable, value in zip(jaxpr.outvars, outputs, strict=True)
            if not value.stored and value.sources
        ]
        if not computed:
            return []
        read = sum(root.read for root in frozenset().union(*(value.sources for value, _ in computed)))
        return [Op("fusion", self.scope, 0.0, read, sum(size for _, size in computed), {}, kernels=len(computed))]


def _roots(values: Sequence[_Value]) -> frozenset[_Value]:
    return frozenset(root for value in values for root in value.roots() if root.size or root.read)


def _bodies(equation: Any) -> Iterator[Jaxpr]:
    return (getattr(body, "jaxpr", body) for body in jaxprs_in_params(equation.params))


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Those of a program and of all programs inside of it."""
    for equation in jaxpr.eqns:
        yield equation
        for body in _bodies(equation):
            yield from _equations(body)


def _shape(variable: Any) -> tuple[int, ...]:
    return getattr(variable.aval, "shape", ())


def _bytes(variable: Any, padded: Padded = frozenset()) -> float:
    aval = variable.aval
    if not hasattr(aval, "dtype") or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0.0
    # Also what a kernel reads with heads and positions swapped: it is laid out for the kernel where it is made.
    of_kernel = aval.shape[-2:] in padded or (aval.shape[-3:-2] + aval.shape[-1:]) in padded
    fill = padding(aval.shape[-1], _LANES) if of_kernel else 1
    return float(math.prod(aval.shape) * aval.dtype.itemsize * fill)


def _read_narrower(jaxpr: Jaxpr, padded: Padded) -> dict[Any, float]:
    """Bytes of results whose only reader converts them: the operation that makes one does that itself."""
    readers: dict[Any, list[Any]] = {}
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if not isinstance(atom, Literal):
                readers.setdefault(atom, []).append(equation)
    returned = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    return {
        variable: min(_bytes(reading[0].outvars[0], padded), _bytes(variable, padded))
        for variable, reading in readers.items()
        if len(reading) == 1 and reading[0].primitive.name == "convert_element_type" and variable not in returned
    }


def _flops_of_product(product: Any, unit: int) -> float:
    left, right = (atom.aval for atom in product.invars[:2])
    numbers = product.params.get("dimension_numbers")
    if product.primitive.name == "conv_general_dilated":
        return 2.0 * product.outvars[0].aval.size * right.size / right.shape[numbers.rhs_spec[0]]
    groups: Sequence[int] = ()
    if numbers is None:  # each row is multiplied by the matrix of its group
        ragged = product.params["ragged_dot_dimension_numbers"]
        numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    (contracted, of_right), (_, batch) = numbers
    inner = math.prod(left.shape[axis] for axis in contracted)
    columns = right.size // math.prod(right.shape[axis] for axis in (*of_right, *batch, *groups))
    flops = 2.0 * left.size * columns
    if unit == 1 or columns == 1:
        return flops
    return flops * padding(inner, unit) * padding(columns, unit)


def padding(size: int, unit: int) -> float:
    """By how much a size grows where it is rounded up to whole units."""
    return -(-size // unit) * unit / size
