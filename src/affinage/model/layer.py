"""What a layer is: the settings and rules of one kind of node. A new one is a class in any file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from affinage.config.settings import Settings
from affinage.model.apply_config import ApplyConfig
from affinage.model.parameter import PyTree
from affinage.registry import Registry

if TYPE_CHECKING:
    from affinage.model.graph import Node

BATCH = "B"  # rows of a batch
SEQUENCE = "S"  # tokens of a row
Cache = Mapping[str, Array]


class ShapeMismatch(ValueError):
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

    def bind(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The dimensions with the symbols replaced, for instance by `{"B": 4, "S": 2048}`."""
        return tuple(sizes[d] if isinstance(d, str) else d for d in self.dims)

    def __str__(self) -> str:
        return "[" + ", ".join(str(d) for d in self.dims) + "]" + (" int" if self.dtype == "int" else "")


TOKENS = Shape((BATCH, SEQUENCE), "int")


def sequence_of(width: int) -> Shape:
    """Shape [B, S, width] of a vector at every token."""
    return Shape((BATCH, SEQUENCE, width))


def expect_sequence(x: Shape) -> int:
    """Width of an input that must be [B, S, width] floats."""
    if len(x.dims) != 3 or x.dims[:2] != (BATCH, SEQUENCE) or x.dtype != "float":
        raise ShapeMismatch(f"expected an input [B, S, width], got {x}")
    return x.width


@dataclass(frozen=True)
class Cost:
    """Floating point operations of one forward pass. Matrix products only: 2 * m * n * k each."""

    matmul: int = 0  # everything but the attention's two products
    attention: int = 0  # scores and weighted values over all S * S pairs, masked or not
    attention_causal: int = 0  # the same over the pairs that causality (and a window) leaves

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, times: int) -> "Cost":
        return Cost(*(value * times for value in vars(self).values()))


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
    batch: Mapping[str, Array]  # segment_ids, positions, prefix_segment_ids, loss_mask, rows where the caller has them
    key: PRNGKeyArray | None = None  # of this node and layer; None: no dropout
    layer: int | Array = 0  # index within the repeat; with a cache, the first index into it
    # Of this node, see `init_cache`: arrays [layers, B, ...], or [1, B, ...] of each layer one by one.
    cache: Cache | tuple[Cache, ...] | None = None
    shared: PyTree | None = None  # the parameters of the node that `shares` names
    prepared: Any = None  # what `prepare` returned, the same for all layers


@dataclass(frozen=True)
class Result:
    """A layer's value with its by-products. A layer without by-products returns the bare value."""

    value: Any
    cache: Cache | tuple[Cache, ...] | None = None  # as the context's
    # (sum, count): per-token means that are added to the training loss; the count is the same in all layers.
    losses: dict[str, tuple[Array, Array]] = field(default_factory=dict)
    metrics: dict[str, tuple[Array, Array]] = field(default_factory=dict)  # (sum, count)

    @staticmethod
    def of(value: Any) -> "Result":
        """A layer's result, whether it returned one or a bare value."""
        return value if isinstance(value, Result) else Result(value)


class Layer(Settings):
    """Base of all layers: the fields are the settings a recipe may give, the methods are the rules."""

    kind_name: ClassVar[str] = ""
    takes: ClassVar[tuple[str, ...]] = ("x",)  # names of the inputs, for arity and error messages
    is_loss: ClassVar[bool] = False
    # Rows may be several sequences that see a beginning together: it looks at no other token, or knows
    # `prefix_segment_ids`.
    joins: ClassVar[bool] = False
    constant: ClassVar[bool] = False  # no gradient goes through it, neither to its inputs nor to parameters

    def mixes_rows(self) -> bool:
        """Whether devices must apply it together: its value or its by-products are of all rows."""
        return False

    def bind(self, nodes: Mapping[str, "Node"]) -> Self:
        """The layer with what follows from other nodes of the graph; raises ValueError where nothing does."""
        return self

    @property
    def shares(self) -> str | None:
        """Name of another node whose parameters this one reads, or None."""
        return None

    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        """Shape of the value; raises ShapeMismatch for inputs without a rule."""
        raise NotImplementedError

    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        """Nested declarations of the node's own parameters."""
        return {}

    def cache(self, inputs: tuple[Shape, ...], batch: int, length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what one layer keeps of `length` tokens of `batch` rows when decoding."""
        return {}

    def prepare(self, inputs: tuple[Any, ...], context: LayerContext) -> Any:
        """What all layers of a repeat have in common (masks, rotary tables), computed once."""
        return None

    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Any:
        """The function itself: a value, or a Result."""
        raise NotImplementedError

    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        """Operations of one forward pass at these sizes of B and S."""
        return Cost()


LAYERS: Registry[type[Layer]] = Registry("layer")
L = TypeVar("L", bound=type[Layer])


def register_layer(name: str) -> Callable[[L], L]:
    """Registers a Layer under the name that recipes give as `kind`; a name that is taken is refused."""

    def register(cls: L) -> L:
        LAYERS.register(name)(cls).kind_name = name
        return cls

    return register
