"""The Transformer block."""

from collections.abc import Mapping
from typing import Annotated, Any

from jax.ad_checkpoint import checkpoint_name
from pydantic import Discriminator, Field, Tag
from typing_extensions import override

from affinage.model.layer import Cost, Layer, LayerContext, Result, Shape, expect_sequence, register_layer, sequence_of
from affinage.model.layers.attention import AttentionSettings, Prepared
from affinage.model.layers.dense import FfnSettings
from affinage.model.layers.dropout import drop
from affinage.model.layers.moe import MoeSettings
from affinage.model.layers.norm import NormSettings
from affinage.model.parameter import PyTree


def _ffn_or_moe(value: Any) -> str:
    """The tag of the class of settings that a `kind` belongs to; any other kind than moe is an activation's name."""
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return (MoeSettings if kind == "moe" else FfnSettings).__name__


@register_layer("transformer_block")
class TransformerBlock(Layer):
    """Causal self-attention and a feed-forward layer f, each added to the residual stream as x + f(norm(x))."""

    joins = True

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

    @override
    def mixes_rows(self) -> bool:
        return isinstance(self.ffn, MoeSettings)  # its metric of the fullest expert is over all rows

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        width = expect_sequence(inputs[0])
        self.attention.head_width(width)
        return sequence_of(width)

    @override
    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        width = inputs[0].width
        return {
            "attention_norm": self.norm.parameters(width),
            "attention": self.attention.parameters(width, self.init_std, self.norm.eps),
            "ffn_norm": self.norm.parameters(width),
            "ffn": self.ffn.parameters(width, self.init_std),
        }

    @override
    def cache(self, inputs: tuple[Shape, ...], batch: int, length: int) -> dict[str, tuple[int, ...]]:
        return self.attention.cache(inputs[0].width, batch, length)

    @override
    def prepare(self, inputs: tuple[Any, ...], context: LayerContext) -> Prepared:
        return self.attention.prepare(inputs[0], context)

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Result:
        pin = context.config.constrain
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

    @override
    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        width, (batch, length) = inputs[0].width, inputs[0].bind(sizes)[:2]
        return self.attention.cost(width, batch, length) + Cost(matmul=self.ffn.flops(width, batch, length))
