"""The Transformer block, and its attention with grouped queries, rotary positions, documents and a KV cache."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int
from pydantic import Discriminator, Field, Tag, model_validator

from affinage.config.settings import Settings
from affinage.model.layer import Cost, Layer, LayerContext, PyTree, Result, Shape, ShapeMismatch, register_layer
from affinage.model.layers.attention import attention, choose, of_whole_rows
from affinage.model.layers.dense import NORMS, FfnSettings, NormSettings, dense, dense_parameters, dense_together, drop
from affinage.model.layers.embedding import positions_of
from affinage.model.layers.kernels import Keys
from affinage.model.layers.moe import MoeSettings

Tables = tuple[Float[Array, "B S d"], Float[Array, "B S d"]]  # cosines and sines
_OF_QUERY, _OF_KEY = (("batch", "sequence", heads, "head_dim") for heads in ("heads", "kv_heads"))


# ---- rotary positions ----
# Su et al. (2021) in the half-rotation layout of Hugging Face's Llama: element i of a head is rotated together with
# element i + d/2, where papers (and the original Llama weights) pair 2i with 2i + 1. The two are the same model after
# a permutation of the rows of the query and key projections.


class RopeScaling(Settings):
    """How a model trained on short rows turns in longer ones."""

    kind: Literal["linear", "llama3"]
    """All waves stretched, or the long ones."""
    factor: float = Field(ge=1)
    """By which the context grows."""
    low_frequency: float = Field(default=1.0, gt=0)
    """Llama3: waves longer than original_context / this are stretched."""
    high_frequency: float = Field(default=4.0, gt=0)
    """Llama3: waves shorter than original_context / this stay."""
    original_context: int = Field(default=8192, ge=1)
    """Llama3: tokens of a row in the first training."""

    def scaled(self, frequencies: Float[Array, "d"]) -> Float[Array, "d"]:
        """All frequencies divided by the factor (Chen et al., 2023), or only the low ones (Llama 3, section 3.4)."""
        if self.kind == "linear":
            return frequencies / self.factor
        waves = self.original_context * frequencies / (2 * jnp.pi)  # in the original context
        unscaled = jnp.clip((waves - self.low_frequency) / (self.high_frequency - self.low_frequency), 0.0, 1.0)
        return frequencies * (unscaled + (1.0 - unscaled) / self.factor)


class RopeSettings(Settings):
    """How positions turn queries and keys."""

    theta: float = Field(default=10_000.0, gt=0)
    """Base of the wavelengths; frequency i is theta ** (-2i / d), i from 0."""
    scaling: RopeScaling | None = None
    """For rows longer than those of the first training."""

    def tables(self, positions: Int[Array, "B S"], head_dim: int) -> Tables:
        """Cosines and sines in float32 of the angles at these positions."""
        frequencies = self.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
        if self.scaling:
            frequencies = self.scaling.scaled(frequencies)
        angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None]
        return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B S H D"], tables: Tables) -> Float[Array, "B S H D"]:
    """Turns the pairs (i, i + D / 2) of every head by the angle of its position."""
    cos, sin = (table[:, :, None] for table in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


# ---- the attention half of a block ----


class Prepared(NamedTuple):
    """What `AttentionSettings.prepare` computes once for all layers."""

    impl: str  # the implementation, see `affinage.model.layers.attention`
    positions: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"] | None
    mask: Bool[Array, "b S T"] | None  # of plain products
    rotary: Tables | None


class AttentionSettings(Settings):
    """The attention half of a block."""

    heads: int = Field(ge=1)
    """Of queries."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Keys and values shared by groups of heads; default: as many."""
    head_dim: int | None = Field(default=None, ge=1)
    """Default: width / heads."""
    rope: RopeSettings | None = None
    """Rotary positions; null: none."""
    bias: bool | Literal["qkv"] = False
    """On all four projections, or (Qwen 2) on the first three."""
    qk_norm: bool = False
    """RMS norm of every query and key head before the rotation (Qwen 3)."""
    window: int | None = Field(default=None, ge=1)
    """A token sees itself and this many less one before it; null: all."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Of the attention probabilities."""

    @model_validator(mode="after")
    def _groups(self) -> "AttentionSettings":
        if self.heads % self.groups_of:
            raise ValueError(f"{self.heads} heads do not divide into {self.groups_of} kv_heads")
        return self

    @property
    def groups_of(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    def head_width(self, width: int) -> int:
        """Elements of one head; an even number where there are rotary positions."""
        if self.head_dim is None and width % self.heads:
            raise ShapeMismatch(f"width {width} does not divide into {self.heads} heads; give head_dim")
        head = self.head_dim or width // self.heads
        if self.rope and head % 2:
            raise ShapeMismatch(f"rotary positions need an even head_dim, got {head}")
        return head

    def parameters(self, width: int, std: float) -> PyTree:
        """Kernels [D, H, Dh], [D, K, Dh] twice and [H, Dh, D]."""
        head, bias = self.head_width(width), bool(self.bias)

        def inward(number: int, axis: str) -> PyTree:
            return dense_parameters((width,), (number, head), ("embed", axis, "head_dim"), bias=bias, std=std)

        key, of_out = inward(self.groups_of, "kv_heads"), ("heads", "head_dim", "embed")
        out = dense_parameters((self.heads, head), (width,), of_out, bias=self.bias is True, std=std, residual=True)
        tree: PyTree = {"query": inward(self.heads, "heads"), "key": key, "value": key, "out": out}
        if self.qk_norm:
            norm = NormSettings(kind="rms").parameters(head, axis="head_dim")
            tree |= {"query_norm": norm, "key_norm": norm}
        return tree

    def prepare(self, x: Float[Array, "B S D"], context: LayerContext) -> "Prepared":
        """What all layers have in common: the implementation, positions, segments, the mask and the rotary tables."""
        config, head = context.config, self.head_width(x.shape[2])
        positions = positions_of(context, x.shape[0], x.shape[1])
        length, dropout = config.layout.whole(x.shape[1], "sequence"), self.dropout if context.key is not None else 0.0
        only_xla = _continues(context) or "prefix_segment_ids" in context.batch
        impl = choose(config, x.dtype, head, length, dropout=dropout, only_xla=only_xla)
        mask = self._mask(context, positions) if impl == "xla" else None
        rotary = self.rope.tables(positions, head) if self.rope else None
        if rotary and config.platform == "cpu":  # a product is stored; else XLA computes them for every head and layer
            rotary = (rotary[0] @ jnp.eye(head // 2), rotary[1] @ jnp.eye(head // 2))
        return Prepared(impl, positions, context.batch.get("segment_ids"), mask, rotary)

    def _mask(self, context: LayerContext, positions: Int[Array, "B S"]) -> Bool[Array, "B S T"]:
        """True where a query [S] sees a key [T]: in its past and its document, or, decoding, in the row so far."""
        if _continues(context):
            return self._in_reach(positions, jnp.arange(context.cache["key"].shape[3])[None])
        layout, length = context.config.layout, positions.shape[1]
        of_all = partial(layout.resplit, before=("batch", "sequence"), after=("batch", "keys"))
        segments, prefixes = context.batch.get("segment_ids"), context.batch.get("prefix_segment_ids")
        if segments is not None and prefixes is not None:  # positions say what comes before a token
            seen = of_all(segments)[:, None, :]
            alike = (segments[:, :, None] == seen) | (prefixes[:, :, None] == seen)
            return alike & self._in_reach(positions, of_all(positions))
        mask = self._in_reach(jnp.arange(length)[None], jnp.arange(layout.whole(length, "sequence"))[None])
        return mask if segments is None else mask & (segments[:, :, None] == of_all(segments)[:, None, :])

    def _in_reach(self, query: Int[Array, "b S"], key: Int[Array, "b T"]) -> Bool[Array, "b S T"]:
        behind = query[:, :, None] - key[:, None, :]
        return behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)

    def apply(
        self, params: PyTree, x: Float[Array, "B S D"], context: LayerContext, eps: float
    ) -> tuple[Float[Array, "B S D"], Mapping[str, Array] | None]:
        """The attended values, and the advanced cache where there is one."""
        config, prepared, cache, continues = context.config, context.prepared, None, _continues(context)
        query, key, value = dense_together([params[name] for name in ("query", "key", "value")], x, context)
        if self.qk_norm:
            query = NORMS["rms"](params["query_norm"], query, eps)
            key = NORMS["rms"](params["key_norm"], key, eps)
        if prepared.rotary is not None:
            query, key = rotate(query, prepared.rotary), rotate(key, prepared.rotary)
        query = checkpoint_name(config.layout.constrain(query, _OF_QUERY), "query")
        key = checkpoint_name(config.layout.constrain(key, _OF_KEY), "key")
        value = checkpoint_name(config.layout.constrain(value, _OF_KEY), "value")
        if context.cache is not None:
            cache = _write(context.cache, *of_whole_rows(key, value, config.layout), context)
        if cache is not None and continues:
            key, value = (jnp.swapaxes(cache[name][context.layer], 1, 2) for name in ("key", "value"))
        dropped = self.dropout > 0 and context.key is not None
        dropout = partial(drop, rate=self.dropout, context=context, site=1) if dropped else None
        of_xla = {"dropout": dropout, "mask": prepared.mask, "in_blocks": config.platform == "cpu" and not continues}
        args = (query, key, value, prepared.segment_ids, prepared.impl, config)
        out = attention(*args, window=self.window, **of_xla)
        return dense(params["out"], checkpoint_name(out, "attended"), context, contracted=2), cache

    def pairs(self, length: int, first: int = 0) -> int:
        """Keys that the queries of a row of `length` tokens see, from its token `first` on, all together."""

        def of(tokens: int) -> int:
            reach = min(tokens, self.window or tokens)
            return reach * (reach + 1) // 2 + (tokens - reach) * reach

        return of(length) - of(first)


def _continues(context: LayerContext) -> bool:
    """Whether there may be tokens before these, in the cache."""
    return context.cache is not None and not context.config.from_start


def _write(cache: Mapping[str, Array], key: Keys, value: Keys, context: LayerContext) -> dict[str, Array]:
    """Puts new keys and values into their slots [L, B, K, T, D]; a negative position is left out."""
    positions = context.prepared.positions
    slots = jnp.where(positions < 0, cache["key"].shape[3], positions)
    at, new = (context.layer, jnp.arange(len(positions))[:, None], slice(None), slots), {"key": key, "value": value}
    # One scatter for each: a vmap over rows makes XLA copy the whole cache for every layer and token.
    return {name: cache[name].at[at].set(each.astype(cache[name].dtype), mode="drop") for name, each in new.items()}


def _ffn_or_moe(value: Any) -> str:
    """The tag of the class of settings that a `kind` belongs to; any other kind than moe is an activation's name."""
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return (MoeSettings if kind == "moe" else FfnSettings).__name__


@register_layer("transformer_block", joins=True)
class TransformerBlock(Layer):
    """Causal self-attention and a feed-forward layer f, each added to the residual stream as x + f(norm(x))."""

    attention: AttentionSettings
    ffn: Annotated[
        Annotated[FfnSettings, Tag("FfnSettings")] | Annotated[MoeSettings, Tag("MoeSettings")],
        Discriminator(_ffn_or_moe),
    ]
    norm: NormSettings = NormSettings()
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Of what each half adds to the residual stream."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the first kernels."""

    def mixes_rows(self) -> bool:
        return isinstance(self.ffn, MoeSettings)  # its metric of the fullest expert is over all rows

    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        width = inputs[0].require_sequence().width
        return {
            "attention_norm": self.norm.parameters(width),
            "attention": self.attention.parameters(width, self.init_std),
            "ffn_norm": self.norm.parameters(width),
            "ffn": self.ffn.parameters(width, self.init_std),
        }

    def cache(self, inputs: tuple[Shape, ...], batch: int, length: int) -> dict[str, tuple[int, ...]]:
        head = self.attention.head_width(inputs[0].width)
        return dict.fromkeys(("key", "value"), (batch, self.attention.groups_of, length, head))

    def prepare(self, inputs: tuple[Any, ...], context: LayerContext) -> Prepared:
        return self.attention.prepare(inputs[0], context)

    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Result:
        pin = context.config.layout.constrain
        # Where the table splits the residual stream further than what goes through the matrices (Korthikanti et al.,
        # 2022), the parts are gathered before each half and its sum is scattered.
        gathered, scattered = ("batch", "sequence", "width"), ("batch", "residual", "width")
        x = checkpoint_name(inputs[0], "block_input")
        before = pin(self.norm.apply(params["attention_norm"], x), gathered)
        attended, cache = self.attention.apply(params["attention"], before, context, self.norm.eps)
        x = checkpoint_name(x + drop(pin(attended, scattered), self.dropout, context, site=2), "residual")
        before = pin(self.norm.apply(params["ffn_norm"], x), gathered)
        fed = Result.of(self.ffn.apply(params["ffn"], before, context))
        y = x + drop(pin(fed.value, scattered), self.dropout, context, site=3)
        return Result(pin(y, scattered), cache, fed.losses, fed.metrics)

    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        attention, width, (batch, length) = self.attention, inputs[0].width, inputs[0].bind(sizes)[:2]
        head = attention.head_width(width)
        projections = 4 * batch * length * width * (attention.heads + attention.groups_of) * head  # of all four
        pairs = 2 * 2 * attention.heads * head * batch * attention.pairs(length)
        return Cost(projections + self.ffn.flops(width, batch, length), pairs)
