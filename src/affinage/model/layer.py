"""What a layer is: the settings and rules of one kind of node. A new one is a class in any file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from affinage.config.settings import Settings
from affinage.errors import UserError
from affinage.model.apply_config import ApplyConfig, Axes, PyTree
from affinage.registry import Registry

if TYPE_CHECKING:
    from affinage.model.graph import Node

BATCH = "B"  # rows of a batch
SEQUENCE = "S"  # tokens of a row
Batch = Mapping[str, Array]
Pairs = dict[str, tuple[Array, Array]]  # name -> (sum, count)


class ShapeMismatch(UserError):
    """A node was given an input it has no rule for; the message says what it expected."""


@dataclass(frozen=True)
class Shape:
    """Dimensions of a value (`B` and `S` are symbols) and whether its elements are integers or floats."""

    dims: tuple[int | str, ...]
    dtype: Literal["int", "float"] = "float"

    @property
    def width(self) -> int:
        """The last dimension, which must be known."""
        if not self.dims or not isinstance(self.dims[-1], int):
            raise ShapeMismatch(f"expected an input whose last dimension is its width, got {self}")
        return self.dims[-1]

    def require_sequence(self) -> "Shape":
        """The shape itself, which must be [B, S, width] of floats."""
        if len(self.dims) != 3 or self.dims[:2] != (BATCH, SEQUENCE) or self.dtype != "float":
            raise ShapeMismatch(f"expected an input [B, S, width], got {self}")
        return self

    def bind(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The dimensions with the symbols replaced, for instance by `{"B": 4, "S": 2048}`."""
        return tuple(sizes[d] if isinstance(d, str) else d for d in self.dims)

    def __str__(self) -> str:
        return "[" + ", ".join(str(d) for d in self.dims) + "]" + (" int" if self.dtype == "int" else "")


TOKENS = Shape((BATCH, SEQUENCE), "int")

# ---- parameters, declared before any array exists ----


@dataclass(frozen=True)
class ParamSpec:
    """One array of a node: its shape, the logical axis of every dimension, and its first values."""

    shape: tuple[int, ...]
    axes: Axes
    init: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.02  # of the normal; GPT-2's and Llama's value
    residual: bool = False  # the last projection before a residual sum: std is divided by sqrt(2 * layers) (GPT-2)
    decay: bool = True  # whether weight decay applies: yes for matrices and embeddings, no for norms and biases
    inputs: tuple[int, ...] = ()  # of a hidden layer's matrix, the dimensions that its input is multiplied along
    used: int | None = None  # of the entries along the axis `experts`, how many multiply a token; None: all

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def active(self) -> int:
        """Number of elements that one token uses."""
        return self.size if self.used is None else self.size // self.shape[self.axes.index("experts")] * self.used

    def stacked(self, layers: int) -> "ParamSpec":
        """The parameter of this many copies of the layer, along a new first axis."""
        inputs = tuple(axis + 1 for axis in self.inputs)
        return replace(self, shape=(layers, *self.shape), axes=("layers", *self.axes), inputs=inputs)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Of a hidden layer's matrix, the dimensions of its output; the others count layers and experts."""
        besides = {*self.inputs, *(i for i, axis in enumerate(self.axes) if axis in ("layers", "experts"))}
        return tuple(i for i in range(len(self.shape)) if i not in besides) if self.inputs else ()


# ---- what goes into a layer and comes out ----


@dataclass(frozen=True)
class Cost:
    """Floating point operations of one forward pass. Matrix products only: 2 * m * n * k each."""

    matmul: int = 0  # everything but the attention's two products
    attention: int = 0  # scores and weighted values, over the pairs that causality (and a window) leaves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """A sum over counted targets and their number, both float32 scalars. Divide once, after every sum over batches."""

    sum: Float[Array, ""]
    count: Float[Array, ""]

    def mean(self) -> Float[Array, ""]:
        """Sum over count; 0 when nothing was counted."""
        return self.sum / jnp.maximum(self.count, 1.0)


@dataclass(frozen=True)
class LayerContext:
    """What a layer sees besides its parameters and inputs."""

    config: ApplyConfig
    batch: Batch  # segment_ids, positions, prefix_segment_ids, loss_mask, rows where the caller has them
    key: PRNGKeyArray | None = None  # of this node and layer; None: no dropout
    layer: int | Array = 0  # index within the repeat; with a cache, the first index into it
    # Of this node, see `init_cache`: arrays [layers, B, ...], or [1, B, ...] of each layer one by one.
    cache: Any = None
    shared: PyTree | None = None  # the parameters of the node that `shares` names
    prepared: Any = None  # what `prepare` returned, the same for all layers


@dataclass(frozen=True)
class Result:
    """A layer's value with its by-products. A layer without by-products returns the bare value."""

    value: Any
    cache: Any = None  # as the context's
    losses: Pairs = field(default_factory=dict)  # means that the training loss is raised by; all layers have one count
    metrics: Pairs = field(default_factory=dict)

    @staticmethod
    def of(value: Any) -> "Result":
        """A layer's result, whether it returned one or a bare value."""
        return value if isinstance(value, Result) else Result(value)


class Layer(Settings):
    """Base of all layers: the fields are the settings a recipe may give, the methods are the rules."""

    kind_name: ClassVar[str] = ""
    takes: ClassVar[tuple[str, ...]] = ("x",)  # names of the inputs, for arity and error messages
    is_loss: ClassVar[bool] = False
    joins: ClassVar[bool] = False  # see `register_layer`
    constant: ClassVar[bool] = False  # no gradient goes through it, neither to its inputs nor to parameters

    def mixes_rows(self) -> bool:
        """Whether devices must apply it together: its value or its by-products are of all rows."""
        return False

    def bind(self, nodes: Mapping[str, "Node"]) -> Self:
        """The layer with what follows from other nodes of the graph; raises ShapeMismatch where nothing does."""
        return self

    @property
    def shares(self) -> str | None:
        """Name of another node whose parameters this one reads, or None."""
        return None

    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        """Shape of the value, by default that of the first input; raises ShapeMismatch for inputs without a rule."""
        return inputs[0]

    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        """Nested declarations of the node's own parameters; raises ShapeMismatch, too."""
        return {}

    def cache(self, inputs: tuple[Shape, ...], batch: int, length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what one layer keeps of `length` tokens of `batch` rows when decoding."""
        return {}

    def prepare(self, inputs: tuple[Any, ...], context: LayerContext) -> Any:
        """What all layers of a repeat have in common (masks, rotary tables), computed once."""
        return None

    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Any:
        """The function itself: a value, or a Result."""
        raise NotImplementedError("the class does not have it")

    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        """Operations of one forward pass at these sizes of B and S."""
        return Cost()


LAYERS: Registry[type[Layer]] = Registry("layer")
L = TypeVar("L", bound=type[Layer])


def register_layer(name: str, *, joins: bool = False) -> Callable[[L], L]:
    """Registers a Layer under the name that recipes give as `kind`; a name that is taken is refused.

    `joins`: it looks at no other token, or knows `prefix_segment_ids`, so that rows may share a beginning.
    """

    def register(cls: L) -> L:
        LAYERS.register(name)(cls).kind_name, cls.joins = name, joins
        return cls

    return register
