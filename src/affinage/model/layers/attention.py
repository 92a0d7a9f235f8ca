"""Multi-head self-attention with grouped queries, rotary positions, packed documents and a KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field, model_validator

from affinage.config.settings import Settings
from affinage.model.layer import Cost, LayerContext, ShapeMismatch
from affinage.model.layers.attention_ops import Workload, attention, choose, of_whole_rows
from affinage.model.layers.dense import dense, dense_flops, dense_parameters, dense_together
from affinage.model.layers.dropout import drop
from affinage.model.layers.embedding import positions_of
from affinage.model.layers.norm import NormSettings
from affinage.model.layers.rotary import RopeSettings, Tables, rotate
from affinage.model.parameter import PyTree


@dataclass(frozen=True)
class Prepared:
    """What `AttentionSettings.prepare` computes once for all layers."""

    impl: str  # the implementation, see `affinage.model.layers.attention_ops`
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

    def parameters(self, width: int, std: float, eps: float) -> PyTree:
        """Kernels [D, H, Dh], [D, K, Dh] twice and [H, Dh, D]."""
        head, heads = self.head_width(width), (self.heads, self.head_width(width))

        def inward(number: int, axis: str) -> PyTree:
            return dense_parameters((width,), (number, head), ("embed", axis, "head_dim"), bias=bias, std=std)

        bias, of_out = bool(self.bias), ("heads", "head_dim", "embed")
        tree: PyTree = {
            "query": inward(self.heads, "heads"),
            "key": inward(self.groups_of, "kv_heads"),
            "value": inward(self.groups_of, "kv_heads"),
            "out": dense_parameters(heads, (width,), of_out, bias=self.bias is True, std=std, residual=True),
        }
        if self.qk_norm:
            norm = NormSettings(kind="rms", eps=eps).parameters(head, axis="head_dim")
            tree |= {"query_norm": norm, "key_norm": norm}
        return tree

    def cache(self, width: int, batch: int, length: int) -> dict[str, tuple[int, ...]]:
        """Keys (after the rotation) and values of every position."""
        shape = (batch, self.groups_of, length, self.head_width(width))
        return {"key": shape, "value": shape}

    def prepare(self, x: Float[Array, "B S D"], context: LayerContext) -> "Prepared":
        """What all layers have in common: the implementation, positions, segments, the mask and the rotary tables."""
        config, head = context.config, self.head_width(x.shape[2])
        positions = positions_of(context, x.shape[0], x.shape[1])
        workload = Workload(
            config.platform,
            x.dtype,
            head,
            config.layout.whole(x.shape[1], "sequence"),
            capability=config.capability,
            cached=_continues(context),
            prefixes="prefix_segment_ids" in context.batch,
            dropout=self.dropout if context.key is not None else 0.0,
        )
        impl = choose("ring" if config.rings else config.attention, workload)
        return Prepared(
            impl=impl,
            positions=positions,
            segment_ids=context.batch.get("segment_ids"),
            mask=self._mask(context, positions) if impl == "xla" else None,
            rotary=self.rope.tables(positions, head, stored=config.platform == "cpu") if self.rope else None,
        )

    def _mask(self, context: LayerContext, positions: Int[Array, "B S"]) -> Bool[Array, "B S T"]:
        """True where a query [S] sees a key [T]: in its past and its document, or, decoding, in the row so far."""
        layout, length = context.config.layout, positions.shape[1]
        if _continues(context):
            return self._in_reach(positions, jnp.arange(_of(context.cache)["key"].shape[3])[None])
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
        prepared: Prepared = context.prepared
        config, cache, continues = context.config, None, _continues(context)
        named = zip(self._heads(params, x, context, eps), ("query", "key", "value"), strict=True)
        query, key, value = (checkpoint_name(heads, name) for heads, name in named)
        if context.cache is not None:
            cache = _write(_of(context.cache), *of_whole_rows(key, value, config.layout), context)
            if continues:
                key, value = (jnp.swapaxes(cache[name][context.layer], 1, 2) for name in ("key", "value"))
        dropped = self.dropout > 0 and context.key is not None
        out = attention(
            query,
            key,
            value,
            prepared.segment_ids,
            impl=prepared.impl,
            layout=config.layout,
            window=self.window,
            dropout=partial(drop, rate=self.dropout, context=context, site=1) if dropped else None,
            mask=prepared.mask,
            on_cpu=config.platform == "cpu" and not continues,
            capability=config.capability,
        )
        return dense(params["out"], checkpoint_name(out, "attended"), context, contracted=2), cache

    def _heads(self, params: PyTree, x: Array, context: LayerContext, eps: float) -> tuple[Array, Array, Array]:
        """Query [B, S, H, Dh], key and value [B, S, K, Dh], positions already in them."""
        query, key, value = dense_together([params[name] for name in ("query", "key", "value")], x, context)
        if self.qk_norm:
            norm = NormSettings(kind="rms", eps=eps)
            query, key = norm.apply(params["query_norm"], query), norm.apply(params["key_norm"], key)
        if (tables := context.prepared.rotary) is not None:
            query, key = rotate(query, tables), rotate(key, tables)
        constrain, of_key = context.config.constrain, ("batch", "sequence", "kv_heads", "head_dim")
        query = constrain(query, ("batch", "sequence", "heads", "head_dim"))
        return query, constrain(key, of_key), constrain(value, of_key)

    def cost(self, width: int, batch: int, length: int) -> Cost:
        """Four projections, and two products over pairs of tokens."""
        head, tokens = self.head_width(width), batch * length
        projections = 2 * dense_flops(width, self.heads * head, tokens)
        projections += 2 * dense_flops(width, self.groups_of * head, tokens)
        per_pair = 2 * 2 * self.heads * head
        return Cost(projections, per_pair * batch * length * length, per_pair * batch * self.pairs(length))

    def pairs(self, length: int, first: int = 0) -> int:
        """Keys that the queries of a row of `length` tokens see, from its token `first` on, all together."""

        def of(tokens: int) -> int:
            reach = min(tokens, self.window or tokens)
            return reach * (reach + 1) // 2 + (tokens - reach) * reach

        return of(length) - of(first)


def _of(cache: Any) -> Mapping[str, Array]:
    """The cache of the layer at hand."""
    assert not isinstance(cache, tuple)
    return cast(Mapping[str, Array], cache)


def _continues(context: LayerContext) -> bool:
    """Whether there may be tokens before these, in the cache."""
    return context.cache is not None and not context.config.from_start


def _write(cache: Mapping[str, Array], key: Array, value: Array, context: LayerContext) -> dict[str, Array]:
    """Puts new keys and values [B, S, K, Dh] into their slots [L, B, K, T, Dh]; a negative position is left out."""
    positions = context.prepared.positions
    slots = jnp.where(positions < 0, cache["key"].shape[3], positions)
    rows = jnp.arange(len(positions))[:, None]

    def write(stored: Array, new: Array) -> Array:
        # One scatter: a vmap over rows makes XLA copy the whole cache for every layer and token.
        return stored.at[context.layer, rows, :, slots].set(new.astype(stored.dtype), mode="drop")

    return {"key": write(cache["key"], key), "value": write(cache["value"], value)}
