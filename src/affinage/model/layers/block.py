"""The Transformer block."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array
from pydantic import Discriminator, Field, Tag
from typing_extensions import override

from affinage.model.layer import Cost, Layer, LayerContext, Result, Shape, expect_sequence, register_layer, sequence_of
from affinage.model.layers.attention import AttentionSettings, Prepared
from affinage.model.layers.dropout import drop
from affinage.model.layers.ffn import FfnSettings
from affinage.model.layers.moe import MoeSettings
from affinage.model.layers.norm import NormSettings
from affinage.model.parameter import PyTree


def _ffn_or_moe(value: Any) -> str:
    """The class of settings that a `kind` belongs to; any other kind than moe is an activation's name."""
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return (MoeSettings if kind == "moe" else FfnSettings).__name__


@register_layer("transformer_block")
class TransformerBlock(Layer):
    """Causal self-attention and a feed-forward layer, each added to the residual stream."""

    joins = narrows = True

    attention: AttentionSettings
    ffn: Annotated[
        Annotated[FfnSettings, Tag(FfnSettings.__name__)] | Annotated[MoeSettings, Tag(MoeSettings.__name__)],
        Discriminator(_ffn_or_moe),
    ]
    norm: NormSettings = NormSettings()
    placement: Literal["pre", "post", "parallel"] = "pre"
    """Where the norms stand. pre: x + f(norm(x)) (GPT-2, Llama); post: norm(x + f(x)) (Vaswani et al., 2017); parallel:
    both halves of one norm(x), added together (GPT-J, PaLM)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Of what each half adds to the residual stream."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the first kernels."""

    @override
    def mixes_rows(self) -> bool:
        return isinstance(self.ffn, MoeSettings)  # which expert is fullest, and a balance over the batch

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        width = expect_sequence(inputs[0])
        self.attention.head_width(width)
        return sequence_of(width)

    @override
    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        width = inputs[0].width
        tree: PyTree = {
            "attention_norm": self.norm.parameters(width),
            "attention": self.attention.parameters(width, self.init_std, self.norm.eps),
            "ffn": self.ffn.parameters(width, self.init_std),
        }
        if self.placement != "parallel":
            tree["ffn_norm"] = self.norm.parameters(width)
        return tree

    @override
    def cache(self, inputs: tuple[Shape, ...], batch: int, length: int) -> dict[str, tuple[int, ...]]:
        return self.attention.cache(inputs[0].width, batch, length)

    @override
    def prepare(self, inputs: tuple[Any, ...], context: LayerContext) -> Prepared:
        return self.attention.prepare(inputs[0], context)

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Result:
        x = checkpoint_name(inputs[0], "block_input")
        constrain = context.config.constrain
        before = self._norm(params, "attention_norm", x) if self.placement != "post" else x
        # Where the table splits the residual stream further than what goes through the matrices (Korthikanti et al.,
        # 2022), the parts are gathered here and each half's sum is scattered.
        before = constrain(before, ("batch", "sequence", "width"))
        attended, cache = self.attention.apply(params["attention"], before, context, self.norm.eps)
        attended = constrain(attended, ("batch", "residual", "width"))
        attended = checkpoint_name(context.narrowed(x) + drop(attended, self.dropout, context, site=2), "residual")
        if self.placement == "pre":
            before = self._norm(params, "ffn_norm", attended)
        elif self.placement == "post":
            before = attended = self._norm(params, "attention_norm", attended)
        else:
            before = context.narrowed(before)
        if self.placement != "parallel":
            before = constrain(before, ("batch", "sequence", "width"))
        fed = self.ffn.apply(params["ffn"], before, context)
        products = fed if isinstance(fed, Result) else Result(fed)
        y = constrain(products.value, ("batch", "residual", "width"))
        y = attended + drop(y, self.dropout, context, site=3)
        if self.placement == "post":
            y = self._norm(params, "ffn_norm", y)
        return Result(constrain(y, ("batch", "residual", "width")), cache, products.losses, products.metrics)

    def _norm(self, params: PyTree, name: str, x: Array) -> Array:
        return self.norm.apply(params[name], x)

    @override
    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        width, (batch, length) = inputs[0].width, inputs[0].bind(sizes)[:2]
        return self.attention.cost(width, batch, length) + Cost(matmul=self.ffn.flops(width, batch, length))
