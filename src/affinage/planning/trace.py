"""What a traced program computes, moves and holds, operation by operation, by the rules that XLA fuses by.

An operation that writes its result to memory (a matrix product, loop, gather, scatter, reduction) is one `Op`. What
element-wise operations, reshapes and broadcasts make is computed inside the operation that reads it, and keeps alive
what it was made from; an optimization barrier stores it. A loop writes stacked results and carries in place, and the
values of one turn exist once. A loop inside a loop stacks in memory of its own, and reads a copy of its turn's part of
the outer stack. Weights that a loop reads in a narrower dtype are copied whole before it. GPUs and TPUs differ in what
they keep for a matrix product, see `_Walker`. What leaves the program takes the memory of the state that went in.

docs/planning.md compares the result with what the compilers of TPUs and GPUs allocate.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

# Not listed: element-wise operations, broadcasts, reshapes, slices, converts and the like, which are never stored.
_STORED = frozenset(
    "dot_general conv_general_dilated while gather scatter scatter-add sort cumsum cumlogsumexp cummax top_k "
    "dynamic_update_slice concatenate pallas_call custom_call reduce_sum reduce_max reduce_min argmax ragged_dot "
    "ragged_dot_general random_bits all_gather reduce_scatter psum ppermute all_to_all".split()
)
_PRODUCTS = frozenset("dot_general ragged_dot ragged_dot_general conv_general_dilated".split())
# Primitives that only wrap a program, and the parameter that holds it.
_WRAPPERS = dict.fromkeys("shard_map jit pjit checkpoint remat2".split(), "jaxpr")
_WRAPPERS |= dict.fromkeys("closed_call custom_jvp_call custom_vjp_call".split(), "call_jaxpr")
_WRAPPERS |= {"custom_vjp_call_jaxpr": "fun_jaxpr", "custom_vmap_call": "call"}
_REWRITINGS = frozenset("convert_element_type reshape transpose squeeze broadcast_in_dim copy".split())
_CUDNN = "dot_product_attention"  # in the names of the primitives of JAX's wrapper
_CUDNN_PRODUCTS = {"fwd": 2, "bwd": 5}
# A TPU's kernel reads and writes rows padded to a multiple of 128 lanes. XLA lays out its own arrays without padding,
# except for rows that it gathers and that no matrix product reads. A product of groups of rows is a kernel, too.
_LANES = 128

_MOST_READ = 4  # times the bytes of an element-wise result, that it is made from before it is stored

Padded = frozenset[tuple[int, ...]]  # last two dimensions of what kernels read and write


@dataclass(frozen=True)
class Op:
    """One operation that writes to memory.

    Attributes:
        kind: its primitive.
        scope: the name stack that it was traced in, such as `transpose(jvp(blocks))`.
        flops: multiplications and additions of its matrix products, of dimensions rounded up to the matrix unit.
        bytes_in: read from memory.
        bytes_out: written to memory.
        live: bytes beside the program's arguments while it runs, by what they are: weights (copies), gradients,
            activations, logits, buffers (gathered weights, gradients before they are summed over devices), working
            (one turn of an inner loop).
        times: how often it runs.
        dtype: of the factors of its matrix products.
        kernels: programs that a GPU launches for it.
    """

    kind: str
    scope: str
    flops: float
    bytes_in: float
    bytes_out: float
    live: Mapping[str, float]
    times: int = 1
    dtype: str = ""
    kernels: int = 1


@dataclass(frozen=True)
class Traced:
    """A walked program.

    Attributes:
        ops: its operations in order, those of loops once with their number of turns.
        offloaded: bytes that it sends to the host's memory.
    """

    ops: tuple[Op, ...]
    offloaded: float = 0.0

    @property
    def peak(self) -> Mapping[str, float]:
        """What is live at the operation that has most; see `Op.live`."""
        return max((op.live for op in self.ops), key=lambda live: sum(live.values()), default={})


@dataclass(frozen=True)
class Weights:
    """What a trace must know of the weights of one device.

    Attributes:
        count: arguments that are weights, the first ones.
        shares: shape of a weight as it is multiplied -> the part of it that one device stores.
        vocabularies: widths that mark logits.
        kernel_flops: by node, operations of one of the products of its attention, in one layer and micro-batch.
        matrix_unit: rows and columns that are multiplied at once; 1: none that a model is too narrow for.
    """

    count: int = 0
    shares: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    vocabularies: Collection[int] = ()
    kernel_flops: Mapping[str, float] = field(default_factory=dict)
    matrix_unit: int = 1


def peak_memory(function: Callable[..., Any], *abstract: Any, platform: str) -> float:
    """Bytes that a function of trees of `jax.ShapeDtypeStruct` holds at most beside its arguments; nothing is run."""
    return sum(walk(jax.make_jaxpr(function)(*abstract).jaxpr, platform, Weights()).peak.values())


def walk(jaxpr: Jaxpr, platform: str, weights: Weights) -> Traced:
    """The operations of a traced program as it would be compiled for a platform (cpu, gpu or tpu)."""
    # XLA removes what nothing reads, such as a forward pass of which a backward pass that computes it again has all.
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    padded = _rows_of_kernels(jaxpr) if platform == "tpu" else frozenset()
    inputs = []
    for index, variable in enumerate(jaxpr.invars):
        share = weights.shares.get(_shape(variable)) if index < weights.count else None
        inputs.append(_Value(0.0, "argument", share=share, read=_bytes(variable) * (1.0 if share is None else share)))
    walker = _Walker(platform, weights, padded)
    outputs = walker.run(jaxpr, inputs)
    return Traced((*walker.finished(), *walker.returned(jaxpr, outputs)), walker.offloaded)


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
    row: int = 0  # width of rows that a TPU gathered, each padded to whole lanes
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
    """The stored operations of a jaxpr, in order.

    TPUs pad the rows of kernels. On GPUs and CPUs a matrix product reads factors from memory; on TPUs it computes
    element-wise operations on its factors itself.
    """

    def __init__(self, platform: str, weights: Weights, padded: Padded, scope: str = "") -> None:
        self.platform, self.weights, self.padded, self.scope = platform, weights, padded, scope
        self.steps: list[_Step] = []
        self.copies: dict[_Value, _Value] = {}  # what loops read in place of a value
        self.offloaded = 0.0

    def run(self, jaxpr: Jaxpr, inputs: Sequence[_Value]) -> list[_Value]:
        """Append the operations of a program; returns the values that leave it."""
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {variable: _Value(0.0) for variable in jaxpr.constvars}

        def read(atom: Any) -> _Value:
            return _Value(0.0) if isinstance(atom, Literal) else values[atom]

        narrow, outer = _read_narrower(jaxpr, self.padded), self.scope
        for equation in jaxpr.eqns:
            stack = str(equation.source_info.name_stack)
            self.scope = "/".join(filter(None, (outer, stack)))
            results = self._apply(equation, [read(atom) for atom in equation.invars], narrow)
            values |= dict(zip(equation.outvars, results, strict=True))
        self.scope = outer
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, equation: Any, arguments: list[_Value], narrow: Mapping[Any, float]) -> list[_Value]:
        name = equation.primitive.name
        if name in _WRAPPERS and _WRAPPERS[name] in equation.params:
            inner = equation.params[_WRAPPERS[name]]
            return self.run(getattr(inner, "jaxpr", inner), arguments)
        if name == "cond":  # the last branch is the usual one: that of true
            return self.run(equation.params["branches"][-1].jaxpr, arguments[1:])
        if name == "scan":
            return self._scan(equation, arguments)
        if name == "optimization_barrier":
            return self._barrier(equation, arguments, narrow)
        if name == "device_put" and any(map(_on_host, (*equation.invars, *equation.outvars))):
            return self._offload(equation, arguments)
        tpu = self.platform == "tpu"
        if tpu and name == "ragged_dot_general":
            return [self._grouped_product(equation, arguments)]
        stored = name in _STORED or _CUDNN in name
        if tpu and name == "scatter-add" and _is_one_of_a_row(equation, arguments[0]):
            stored = False
        if name in _PRODUCTS and not tpu:
            arguments = [
                self._materialized(atom, value) for atom, value in zip(equation.invars, arguments, strict=True)
            ]
        sizes = [narrow.get(variable, _bytes(variable, self.padded)) for variable in equation.outvars]
        pairs = zip(equation.outvars, sizes, strict=True)
        results = [self._result(variable, size, name, arguments, stored=stored) for variable, size in pairs]
        if not stored and not tpu and any(map(_reads_much, results)):
            # Such as the residual stream of layers that are no loop, of which every reader would read all layers again.
            results = [
                self._stored(variable, size, None, "activations")
                for variable, size in zip(equation.outvars, sizes, strict=True)
            ]
            stored = True
        if tpu and name == "gather":
            *others, width = equation.invars[0].aval.shape
            whole_rows = others and width > 1 and equation.params["slice_sizes"][-1] == width
            results[0].row = width if whole_rows else 0
        elif name in _PRODUCTS:
            for root in _roots(arguments):
                root.row = 0
        if stored:
            share = self.weights.shares.get(_shape(equation.outvars[0]), 1.0) if name == "dot_general" else 1.0
            unsummed = _bytes(equation.outvars[0], self.padded) * (1 - share)
            self._append(equation, arguments, results, unsummed=unsummed)
        return results

    def _append(self, equation: Any, reads: Sequence[_Value], writes: Sequence[_Value], **more: Any) -> None:
        name, flops, dtype = equation.primitive.name, 0.0, ""
        if name in _PRODUCTS:
            flops, dtype = _flops_of_product(equation, self.weights.matrix_unit), str(equation.invars[0].aval.dtype)
        elif name == "pallas_call" or _CUDNN in name:
            node = next((node for node in self.weights.kernel_flops if node in self.scope), "")
            flops = _products_of_kernel(equation) * self.weights.kernel_flops.get(node, 0.0)
        roots = _roots(reads)
        op = Op(name, self.scope, flops, sum(v.read for v in roots), sum(v.size for v in writes), {}, 1, dtype)
        self.steps.append(_Step(op, roots, tuple(writes), **more))

    def _result(self, variable: Any, size: float, name: str, arguments: Sequence[_Value], *, stored: bool) -> _Value:
        if stored:
            return self._stored(variable, size, self.weights.shares.get(_shape(variable)), "gradients")
        share = arguments[0].share if name in _REWRITINGS and arguments else None
        if share is None:
            return _Value(size, stored=False, sources=_roots(arguments))
        if name == "convert_element_type":
            arguments[0].narrowed = size
        return _Value(size * share, "weights", False, _roots(arguments), share)

    def _stored(self, variable: Any, size: float, share: float | None, kind: str) -> _Value:
        size *= 1.0 if share is None else share
        if share is None:
            shape = _shape(variable)
            kind = "logits" if len(shape) > 1 and shape[-1] in self.weights.vocabularies else "activations"
        return _Value(size, kind, share=share, read=size)

    def _materialized(self, atom: Any, value: _Value) -> _Value:
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
            self.copies[value] = copy = self._stored(atom, _bytes(atom), None, "activations")
            copy.kind = copy.kind if value.share is None else "buffers" if gathered else "weights"
            op = Op("fusion", self.scope, 0.0, sum(v.read for v in roots), copy.size, {})
            self.steps.append(_Step(op, roots, (copy,)))
        return self.copies[value]

    def _grouped_product(self, product: Any, arguments: Sequence[_Value]) -> _Value:
        """A TPU's product of groups of rows, a kernel: it reads what is stored, and writes float32 for its readers."""
        reads = []
        for atom, value in zip(product.invars, arguments, strict=True):
            if _are_rows(atom) and (not value.stored or value.kind == "argument"):
                copy = _Value(size := _bytes(atom, self.padded), read=size)
                op = Op("fusion", self.scope, 0.0, sum(v.read for v in value.roots()), size, {})
                self.steps.append(_Step(op, value.roots(), (copy,)))
                value = copy
            reads.append(value)
        (variable,) = product.outvars
        result = written = self._result(variable, _bytes(variable), product.primitive.name, arguments, stored=True)
        if _are_rows(variable):
            whole = _bytes(variable, self.padded)
            written = _Value(size := whole * 4 / variable.aval.dtype.itemsize, read=size)
            result = _Value(whole, stored=False, sources=frozenset({written}))
        self._append(product, reads, (written,))
        return result

    def _barrier(self, equation: Any, arguments: list[_Value], narrow: Mapping[Any, float]) -> list[_Value]:
        """What a barrier keeps XLA from computing inside of its readers is stored."""
        results = []
        for variable, value in zip(equation.outvars, arguments, strict=True):
            size = narrow.get(variable, _bytes(variable, self.padded))
            inlined = not value.stored and value.share is None
            results.append(self._stored(variable, size, None, "activations") if inlined else value)
        new = [result for result, value in zip(results, arguments, strict=True) if result is not value]
        if new:
            self._append(equation, arguments, new)
        return results

    def _offload(self, equation: Any, arguments: list[_Value]) -> list[_Value]:
        """Copies to the host's memory, which hold nothing here, and back."""
        self.offloaded += sum(_whole(variable) for variable in equation.outvars if _on_host(variable))
        results = [self._stored(v, _bytes(v, self.padded), None, "activations") for v in equation.outvars]
        self._append(equation, arguments, results)
        return results

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
        self.offloaded += inner.offloaded * turns
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
            copied = value.kind == "weights"
            share = value.share if copied else self.weights.shares.get(_shape(variable))
            # What an inner loop has stacked for a kernel is padded in that stack alone.
            size = _bytes(variable, frozenset() if value.stacked else self.padded)
            if value.roots() and {root.row for root in value.roots()} == {*_shape(variable)[-1:]}:
                size *= padding(_shape(variable)[-1], _LANES)
            result = self._stored(variable, size, share, "weights" if copied else "gradients")
            result.stacked = index >= carries
            results.append(result)
        made = [copy for copy in copies if copy is not None]
        new = [copy for copy in made if not any(copy in step.writes for step in self.steps)]
        # What the loop reads and writes is counted by the operations of its turns.
        op = Op("scan", self.scope, 0.0, 0.0, sum(copy.size for copy in new), {})
        step = _Step(op, _roots([*arguments, *made]), (*results, *new), tuple(inside), turns)
        self.steps.append(step)
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


def _reads_much(value: _Value) -> bool:
    """Whether a value that is not stored is made from so much that computing it in every reader does not pay."""
    return value.share is None and sum(root.read for root in value.sources) > _MOST_READ * value.size > 0


def _shape(variable: Any) -> tuple[int, ...]:
    return getattr(variable.aval, "shape", ())


def _bytes(variable: Any, padded: Padded = frozenset()) -> float:
    return 0.0 if _on_host(variable) else _whole(variable, padded)


def _on_host(variable: Any) -> bool:
    return getattr(variable.aval, "memory_space", None) == jax.memory.Space.Host


def _whole(variable: Any, padded: Padded = frozenset()) -> float:
    """Bytes in whichever memory it is."""
    aval = variable.aval
    if not hasattr(aval, "dtype") or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0.0
    # Also what a kernel reads with heads and positions swapped: it is laid out for the kernel where it is made.
    of_kernel = aval.shape[-2:] in padded or (aval.shape[-3:-2] + aval.shape[-1:]) in padded
    fill = padding(aval.shape[-1], _LANES) if of_kernel else 1
    return float(math.prod(aval.shape) * aval.dtype.itemsize * fill)


def _is_one_of_a_row(scatter: Any, onto: _Value) -> bool:
    """Whether one number of every row of zeros is set, such as the gradient of a token's logit.

    A TPU's compiler compares positions with the index instead, inside of what reads the rows.
    """
    operand, _, updates = (atom.aval for atom in scatter.invars)
    rows = operand.shape[: len(scatter.params["dimension_numbers"].operand_batching_dims)]
    constant = not onto.stored and not onto.sources
    return constant and len(rows) == len(operand.shape) - 1 and updates.size == math.prod(rows)


def _are_rows(atom: Any) -> bool:
    """Whether what a product of groups reads or writes has rows of tokens, not a matrix for every group."""
    return len(atom.aval.shape) == 2


def _rows_of_kernels(jaxpr: Jaxpr) -> Padded:
    rows: set[tuple[int, ...]] = set()
    for equation in jaxpr.eqns:
        atoms: list[Any] = [*equation.invars, *equation.outvars]
        if equation.primitive.name == "pallas_call":
            shapes = [_shape(atom) for atom in atoms]
            rows |= {shape[-2:] for shape in shapes if len(shape) > 2 and shape[-1] % _LANES}
        elif equation.primitive.name == "ragged_dot_general":
            rows |= {_shape(atom) for atom in atoms if _are_rows(atom)}
        else:
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                rows |= _rows_of_kernels(getattr(inner, "jaxpr", inner))
    return frozenset(rows)


def _read_narrower(jaxpr: Jaxpr, padded: Padded) -> dict[Any, float]:
    """Results that are only read in fewer bytes, and so stored in them: by a conversion, which the operation that
    makes them does itself, or by products whose other factor is narrower."""
    readers: dict[Any, list[Any]] = {}
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if not isinstance(atom, Literal):
                readers.setdefault(atom, []).append(equation)
    returned = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    narrowed = {}
    for variable, reading in readers.items():
        names = {equation.primitive.name for equation in reading}
        whole = _bytes(variable, padded)
        if variable in returned:
            continue
        if names == {"convert_element_type"} and len(reading) == 1:
            narrowed[variable] = min(_bytes(reading[0].outvars[0], padded), whole)
        elif names == {"dot_general"}:
            narrowest = min(atom.aval.dtype.itemsize for equation in reading for atom in equation.invars)
            narrowed[variable] = whole / variable.aval.dtype.itemsize * narrowest
    return narrowed


def _flops_of_product(product: Any, unit: int) -> float:
    left, right, result = product.invars[0].aval.shape, product.invars[1].aval, product.outvars[0].aval.size
    if product.primitive.name == "conv_general_dilated":
        return 2.0 * result * right.size / right.shape[product.params["dimension_numbers"].rhs_spec[0]]
    numbers, groups = product.params.get("dimension_numbers"), 1
    if numbers is None:
        ragged = product.params["ragged_dot_dimension_numbers"]
        numbers = ragged.dot_dimension_numbers
        (contracted, _), _ = numbers
        if set(ragged.lhs_ragged_dimensions) & set(contracted):  # each group has its part of them
            groups = product.invars[2].aval.shape[-1]
    (contracted, _), (_, batch) = numbers
    inner = math.prod(left[axis] for axis in contracted)
    columns = right.size // inner // math.prod(right.shape[axis] for axis in batch)
    flops = 2.0 * result * inner / groups
    if unit == 1 or columns == 1:
        return flops
    return flops * padding(inner, unit) * padding(columns, unit)


def padding(size: int, unit: int) -> float:
    """By how much a size grows where it is rounded up to whole units."""
    return -(-size // unit) * unit / size


def _products_of_kernel(kernel: Any) -> int:
    """Matrix products of a kernel of attention over its pairs of tokens."""
    name = kernel.primitive.name
    if _CUDNN in name:
        return next(count for way, count in _CUDNN_PRODUCTS.items() if way in name)

    def products(jaxpr: Jaxpr) -> int:
        inner = (jax.extend.core.jaxprs_in_params(equation.params) for equation in jaxpr.eqns)
        own = sum(equation.primitive.name == "dot_general" for equation in jaxpr.eqns)
        return own + sum(products(getattr(one, "jaxpr", one)) for several in inner for one in several)

    body = kernel.params["jaxpr"]
    return products(getattr(body, "jaxpr", body))
