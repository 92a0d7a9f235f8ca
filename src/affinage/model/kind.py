"""What a kind of node is, and the registry of kinds. A new kind is a class in any file; nothing here changes for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from affinage.config.settings import Settings
from affinage.model.call import Call
from affinage.model.parameter import Tree
from affinage.model.shape import Shape
from affinage.registry import Registry

if TYPE_CHECKING:
    from affinage.model.node import Node


Cache = Mapping[str, Array]


@dataclass(frozen=True)
class Cost:
    """Floating point operations of one forward pass. Matrix products only: 2 * m * n * k each."""

    matmul: int = 0  # everything but the attention's two products
    attention: int = 0  # scores and weighted values over all S * S pairs, masked or not
    attention_causal: int = 0  # the same over the pairs that causality (and a window) leaves

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.attention_causal + other.attention_causal,
        )

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.matmul * times, self.attention * times, self.attention_causal * times)


@dataclass(frozen=True)
class Context:
    """What a node sees besides its parameters and inputs."""

    call: Call
    batch: Mapping[str, Array]  # segment_ids, positions, parents, loss_mask, rows where the caller has them
    key: PRNGKeyArray | None = None  # of this node and layer; None: no dropout
    layer: int | Array = 0  # index within the repeat; with a cache, the first index into it
    cache: Cache | None = None  # this node's arrays [layers, B, ...], or this layer's [1, B, ...]: see `init_cache`
    caches: tuple[Cache, ...] | None = None  # of a repeated node whose layers have theirs one by one, before `cache`
    shared: Tree | None = None  # the parameters of the node that `shares` names
    prepared: Any = None  # what `prepare` returned, the same for all layers
    at: Int[Array, "R P"] | None = None  # of a node that `narrows`, and its last layer: see `Call`

    def narrowed(self, x: Float[Array, "B S *D"]) -> Array:
        """Of the tokens those at the places that `at` names, [R, P, *D]; all of them where it names none."""
        if self.at is None:
            return x
        parts = x.reshape(len(self.at), -1, *x.shape[2:])
        return jnp.take_along_axis(parts, self.at.reshape(*self.at.shape, *(1,) * (x.ndim - 2)), axis=1)


@dataclass(frozen=True)
class Result:
    """A node's value with its by-products. A node without by-products returns the bare value."""

    value: Any
    cache: Cache | None = None  # as the context's
    # (sum, count): per-token means that are added to the training loss; the count is the same in all layers.
    losses: dict[str, tuple[Array, Array]] = field(default_factory=dict)
    metrics: dict[str, tuple[Array, Array]] = field(default_factory=dict)  # (sum, count)
    caches: tuple[Cache, ...] | None = None  # as the context's


class NodeKind(Settings):
    """Base of all kinds: the fields are the settings a recipe may give, the methods are the rules."""

    kind_name: ClassVar[str] = ""
    takes: ClassVar[tuple[str, ...]] = ("x",)  # names of the inputs, for arity and error messages
    is_loss: ClassVar[bool] = False
    # Rows may be several sequences that see a beginning together: it looks at no other token, or knows `parents`.
    joins: ClassVar[bool] = False
    by_token: ClassVar[bool] = False  # what it makes of a token depends on nothing but its inputs' vectors there
    narrows: ClassVar[bool] = False  # it heeds the context's `at`
    constant: ClassVar[bool] = False  # no gradient goes through it, neither to its inputs nor to parameters

    def mixes_rows(self) -> bool:
        """Whether devices must apply it together: its value or its by-products are of all rows."""
        return False

    def complete(self, others: Mapping[str, "NodeKind"]) -> Self:
        """Fills settings that follow from other nodes of the graph; raises ValueError where they do not."""
        return self

    def bind(self, nodes: Mapping[str, "Node"]) -> Self:
        """Takes what it needs to know of other nodes, all of them complete; raises ValueError where it cannot."""
        return self

    @property
    def shares(self) -> str | None:
        """Name of another node whose parameters this one reads, or None."""
        return None

    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        """Shape of the value; raises ShapeMismatch for inputs without a rule."""
        raise NotImplementedError

    def parameters(self, inputs: tuple[Shape, ...]) -> Tree:
        """Nested declarations of the node's own parameters."""
        return {}

    def cache(self, inputs: tuple[Shape, ...], batch: int, length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what one layer keeps of `length` tokens of `batch` rows when decoding."""
        return {}

    def prepare(self, inputs: tuple[Any, ...], context: Context) -> Any:
        """What all layers of a repeat have in common (masks, rotary tables), computed once."""
        return None

    def apply(self, params: Tree, inputs: tuple[Any, ...], context: Context) -> Any:
        """The function itself: a value, or a Result."""
        raise NotImplementedError

    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        """Operations of one forward pass at these sizes of B and S."""
        return Cost()


KINDS: Registry[type[NodeKind]] = Registry("node kind")

K = TypeVar("K", bound=type[NodeKind])


def node_kind(name: str) -> Callable[[K], K]:
    """Registers a NodeKind under the name that recipes call it by; a taken name is refused."""

    def register(cls: K) -> K:
        KINDS.register(name)(cls).kind_name = name
        return cls

    return register
