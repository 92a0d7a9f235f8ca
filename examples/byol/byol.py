"""BYOL (Grill et al., 2020) on images: layers, data, training and a linear probe, as a plug-in of affinage.

    python examples/byol/byol.py [--steps N] [--draws N] [--seed N] [--folder DIR]

trains without labels on scikit-learn's 1,797 handwritten digits of 8 x 8 pixels and prints the accuracy of a logistic
regression on held-out digits: on the learned features, on those of the same network untrained, and on the pixels.

The file registers its layers when it is imported, so a recipe that names it in `plugins` can use them, as
`byol-digits.yaml` beside it does. The target network is the moving average of the parameters that `ema` keeps in any
training.

Layer norms and standardized kernels stand where the paper has batch norms: a row's loss must not depend on the other
rows, or accumulation and the mesh would change it. That this replaces batch statistics in BYOL is due to Richemond et
al. (2020); with layer norms alone, all vectors became one within 50 steps.
"""

import argparse
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod, sqrt
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from pydantic import BeforeValidator, Field, PrivateAttr
from typing_extensions import override

from affinage.checkpoint import CheckpointStore
from affinage.config.load import load_recipe
from affinage.data.order import permuted
from affinage.model import ApplyConfig, Graph, Loss, abstract_params, apply, init_params, parse
from affinage.model.forward import apply_node
from affinage.model.graph import Node
from affinage.model.layer import Cost, Layer, LayerContext, ParamSpec, PyTree, Shape, ShapeMismatch, register_layer
from affinage.model.layers.dense import NormSettings, dense, dense_parameters
from affinage.training import TrainJob, train
from affinage.training.state import Purpose, random_key

Images = Float[np.ndarray, "N H W C"]
Labels = Int[np.ndarray, " N"]

RECIPE = Path(__file__).with_name("byol-digits.yaml")


# ---- layers ----


@register_layer("augment")
class Augment(Layer):
    """Views [B, V, H, W, C] of images [B, H, W, C]: moved, turned, resized, dimmed, erased in part, with noise.

    Without a key (when features are read) every view is the image itself.
    """

    takes = ("images",)
    views: int = Field(default=2, ge=1)
    """Of every image."""
    shift: float = Field(default=0.0, ge=0)
    """Pixels, at most, along each axis."""
    rotate: float = Field(default=0.0, ge=0, le=180)
    """Degrees, at most, either way."""
    scale: float = Field(default=0.0, ge=0, lt=1)
    """Share of the size, at most, larger or smaller, per axis."""
    shear: float = Field(default=0.0, ge=0, lt=1)
    """Columns moved per row, at most, either way."""
    contrast: float = Field(default=0.0, ge=0, lt=1)
    """Values are multiplied by 1 ± at most this."""
    erase: float = Field(default=0.0, ge=0, lt=1)
    """Side of a rectangle set to zero, as a share of the image, at most."""
    noise: float = Field(default=0.0, ge=0)
    """Standard deviation of what is added to every value."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        (images,) = inputs
        if len(images.dims) != 4 or images.dtype != "float":
            raise ShapeMismatch(f"expected images [B, height, width, channels], got {images}")
        return Shape((images.dims[0], self.views, *images.dims[1:]))

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Float[Array, "B V H W C"]:
        images = inputs[0].astype(jnp.float32)
        size = images.shape[0]
        if context.key is None:
            same = jnp.broadcast_to(images[:, None], (size, self.views, *images.shape[1:]))
            return same.astype(context.config.compute_dtype)
        key, rows = context.key, context.batch.get("rows", jnp.arange(size))

        def of_row(row: Array, image: Array) -> Array:
            keys = jax.random.split(jax.random.fold_in(key, row), self.views)
            return jax.vmap(lambda view_key: self._view(view_key, image))(keys)

        return jax.vmap(of_row)(rows, images).astype(context.config.compute_dtype)

    def _view(self, key: PRNGKeyArray, image: Float[Array, "H W C"]) -> Float[Array, "H W C"]:
        moves, contrast, erasure, noise = jax.random.split(key, 4)
        view = self._moved(moves, image)
        view = view * (1 + self.contrast * jax.random.uniform(contrast, (), minval=-1, maxval=1))
        view = jnp.where(self._erased(erasure, (image.shape[0], image.shape[1]))[:, :, None], 0.0, view)
        return view + self.noise * jax.random.normal(noise, image.shape)

    def _moved(self, key: PRNGKeyArray, image: Float[Array, "H W C"]) -> Float[Array, "H W C"]:
        """An affine map about the center with bilinear interpolation; zero from outside."""
        draws = jax.random.uniform(key, (6,), minval=-1, maxval=1)
        angle = jnp.deg2rad(self.rotate) * draws[0]
        turn = jnp.array([[jnp.cos(angle), -jnp.sin(angle)], [jnp.sin(angle), jnp.cos(angle)]])
        lean = jnp.array([[1.0, 0.0], [self.shear * draws[1], 1.0]])
        resize = (1 + self.scale * draws[2:4])[:, None]
        height, width = image.shape[:2]
        center = (jnp.array([height, width], jnp.float32) - 1)[:, None] / 2
        grid = jnp.stack(jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij")).reshape(2, -1)
        offsets = self.shift * draws[4:6, None]
        # Written out: a product in a chip's native precision would round coordinates to bfloat16.
        linear = jnp.sum(turn[:, :, None] * lean[None], axis=1)
        source = jnp.sum(linear[:, :, None] * (resize * (grid - center))[None], axis=1) + center + offsets
        sample = jax.vmap(
            lambda channel: jax.scipy.ndimage.map_coordinates(channel, list(source), order=1, mode="constant"),
            in_axes=2,
            out_axes=1,
        )
        return sample(image).reshape(image.shape)

    def _erased(self, key: PRNGKeyArray, size: tuple[int, int]) -> Array:
        """Where a rectangle is, bool [H, W]."""
        sides_key, corner_key = jax.random.split(key)
        whole = jnp.array(size, jnp.float32)
        sides = self.erase * whole * jax.random.uniform(sides_key, (2,))
        first = jax.random.uniform(corner_key, (2,)) * (whole - sides) - 0.5
        inside = [
            (jnp.arange(n) >= first[axis]) & (jnp.arange(n) < first[axis] + sides[axis]) for axis, n in enumerate(size)
        ]
        return inside[0][:, None] & inside[1][None, :]


_LAYER_NORM = NormSettings(kind="layer", eps=1e-5)
_SMALLEST = 1e-8  # sum of squares below which a kernel has no direction
_WINDOW = 3  # height and width of a convolution
_SHORTEST = 1e-12  # length below which a vector has no direction


def _layers_parameters(widths: tuple[int, ...], *, norm_last: bool) -> PyTree:
    """Dense layers from the first width to the last, with a norm and a ReLU between them, and on request one after."""
    tree: PyTree = {}
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        last = layer == len(widths) - 2
        tree[f"dense_{layer}"] = dense_parameters(
            (inputs,), (outputs,), ("ffn", "embed"), bias=True, std=sqrt(2 / inputs)
        )
        if not last or norm_last:
            tree[f"norm_{layer}"] = _LAYER_NORM.parameters(outputs)
    return tree


def standardized(kernel: Float[Array, "*I O"]) -> Float[Array, "*I O"]:
    """The kernel with mean 0 and variance 1 / inputs for every output, float32 (Qiao et al., 2019).

    What all inputs have in common then reaches no output, which keeps the vectors of different images apart.
    """
    kernel = kernel.astype(jnp.float32)
    inputs = tuple(range(kernel.ndim - 1))
    centered = kernel - jnp.mean(kernel, axis=inputs, keepdims=True)
    total = jnp.sum(jnp.square(centered), axis=inputs, keepdims=True)
    return centered * jax.lax.rsqrt(total + _SMALLEST)


def _layers(params: PyTree, x: Float[Array, "*N D"], context: LayerContext) -> Float[Array, "*N E"]:
    for layer in range(sum(name.startswith("dense_") for name in params)):
        own = params[f"dense_{layer}"]
        x = dense({**own, "kernel": standardized(own["kernel"])}, x, context)
        if f"norm_{layer}" in params:
            x = jax.nn.relu(_LAYER_NORM.apply(params[f"norm_{layer}"], x))
    return x


def _layers_flops(widths: tuple[int, ...], rows: int) -> int:
    flops = [2 * rows * inputs * outputs for inputs, outputs in pairwise(widths)]
    return sum(flops)


@register_layer("encoder")
class Encoder(Layer):
    """Vectors [B, ..., width] of images [B, ..., H, W, C]."""

    takes = ("images",)
    net: Literal["mlp", "conv"] = "mlp"
    """Of the flattened image, or of it as it is with kernels of 3 x 3."""
    hidden: tuple[int, ...] = ()
    """Mlp: widths of its hidden layers; conv: channels, the size halved after each."""
    width: int = Field(ge=1)
    """Of the vectors."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        dims = inputs[0].dims
        if len(dims) < 4 or not all(isinstance(size, int) for size in dims[-3:]):
            raise ShapeMismatch(f"expected images [B, ..., height, width, channels], got {inputs[0]}")
        if self.net == "conv" and min(_image(inputs[0])[:2]) >> len(self.hidden) < 1:
            raise ShapeMismatch(f"images {inputs[0]} cannot be halved {len(self.hidden)} times")
        return Shape((*dims[:-3], self.width))

    @override
    def mixes_rows(self) -> bool:
        return self.net == "conv"  # a kernel's gradients of several copies become one program that XLA does not divide

    @override
    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        tree: PyTree = {}
        channels = (_image(inputs[0])[2], *self.hidden)
        for layer, (before, after) in enumerate(pairwise(channels) if self.net == "conv" else ()):
            shape, std = (_WINDOW, _WINDOW, before, after), sqrt(2 / (_WINDOW**2 * before))
            tree[f"conv_{layer}"] = {
                "kernel": ParamSpec(shape, (None, None, None, "embed"), std=std),
                **_LAYER_NORM.parameters(after),
            }
        return tree | _layers_parameters(self._widths(inputs[0]), norm_last=True)

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Float[Array, "*N D"]:
        x = inputs[0].astype(context.config.compute_dtype)
        leading = x.shape[:-3]
        x = x.reshape(-1, *x.shape[-3:])
        for layer in range(len(self.hidden) if self.net == "conv" else 0):
            own = params[f"conv_{layer}"]
            x = jax.lax.conv_general_dilated(
                x,
                standardized(own["kernel"]).astype(x.dtype),
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = _halved(jax.nn.relu(_LAYER_NORM.apply(own, x)))
        return _layers(params, x.reshape(*leading, prod(x.shape[1:])), context)

    @override
    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        rows = prod(inputs[0].bind(sizes)[:-3])
        total = _layers_flops(self._widths(inputs[0]), rows)
        height, width, channels = _image(inputs[0])
        for layer, after in enumerate(self.hidden if self.net == "conv" else ()):
            pairs = _taps(height >> layer) * _taps(width >> layer)
            total += 2 * rows * pairs * channels * after
            channels = after
        return Cost(matmul=total)

    def _widths(self, images: Shape) -> tuple[int, ...]:
        """Of the dense layers, from the flat image or the last channels to the vector."""
        height, width, channels = _image(images)
        if self.net == "mlp":
            return (height * width * channels, *self.hidden, self.width)
        halvings = len(self.hidden)
        return ((height >> halvings) * (width >> halvings) * (self.hidden or (channels,))[-1], self.width)


def _taps(size: int) -> int:
    """Pairs of a pixel and a place in its window along an axis, those in the border of zeros left out."""
    return sum(0 <= pixel + tap < size for pixel in range(size) for tap in range(-(_WINDOW // 2), _WINDOW // 2 + 1))


def _image(images: Shape) -> tuple[int, int, int]:
    height, width, channels = (int(size) for size in images.dims[-3:])
    return height, width, channels


def _halved(x: Float[Array, "N H W C"]) -> Float[Array, "N h w C"]:
    """Means over 2 x 2 pixels; an odd last row or column is left out."""
    count, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return jnp.mean(x.reshape(count, height // 2, 2, width // 2, 2, channels), axis=(2, 4))


class _Mlp(Layer):
    hidden: int = Field(ge=1)
    """Width of the hidden layer; BYOL: 4096."""
    width: int = Field(ge=1)
    """Of the vectors; BYOL: 256."""

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        if inputs[0].dtype != "float" or len(inputs[0].dims) < 2:
            raise ShapeMismatch(f"expected vectors [B, ..., width], got {inputs[0]}")
        return Shape((*inputs[0].dims[:-1], self.width))

    @override
    def parameters(self, inputs: tuple[Shape, ...]) -> PyTree:
        return _layers_parameters((inputs[0].width, self.hidden, self.width), norm_last=False)

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Float[Array, "*N D"]:
        return _layers(params, inputs[0], context)

    @override
    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        rows = prod(inputs[0].bind(sizes)[:-1])
        return Cost(matmul=_layers_flops((inputs[0].width, self.hidden, self.width), rows))


@register_layer("projector")
class Projector(_Mlp):
    """Vectors in which views are compared, so that the encoder's need not forget how the views differ."""


@register_layer("predictor")
class Predictor(_Mlp):
    """The online branch's guess of the target's vector; without it the two would collapse to a constant."""


@register_layer("cosine_regression_loss")
class CosineRegressionLoss(Layer):
    """Every view's prediction against every other view's target, per example: 2 - 2 cos, summed over ordered pairs.

    With two views it is the symmetrised loss of Grill et al. (2020, equation 2). The count is of examples.
    """

    takes = ("predictions", "targets")
    is_loss = True

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        predictions, targets = inputs
        if len(predictions.dims) != 3 or predictions != targets:
            raise ShapeMismatch(f"expected two inputs [B, views, width] of one shape, got {predictions} and {targets}")
        if not isinstance(predictions.dims[1], int) or predictions.dims[1] < 2:
            raise ShapeMismatch(f"expected at least two views to compare, got {predictions}")
        return Shape(())

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Loss:
        predictions, targets = (_directions(x.astype(jnp.float32)) for x in inputs)
        size, views, _ = predictions.shape
        # Pair by pair: an einsum would round to bfloat16 on some chips what must be exact near a cosine of 1.
        cosines = jnp.sum(predictions[:, :, None] * targets[:, None], axis=-1)
        others = 1.0 - jnp.eye(views, dtype=jnp.float32)
        return Loss(jnp.sum((2.0 - 2.0 * cosines) * others[None]), jnp.float32(size))


def _directions(x: Float[Array, "B V D"]) -> Float[Array, "B V D"]:
    return x / jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), _SHORTEST**2))


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


@register_layer("ema_copy")
class EmaCopy(Layer):
    """The nodes of a chain, applied with the moving average of their parameters (BYOL's target network).

    The training must keep one: `ema: {decay: 0.99}`. No gradient reaches the copy or its input.
    """

    of: Annotated[tuple[str, ...], BeforeValidator(_one_or_more, json_schema_input_type=str | tuple[str, ...])] = Field(
        min_length=1
    )
    """Nodes, first to last."""
    _copied: tuple[Node, ...] = PrivateAttr(default=())
    constant = True

    @override
    def bind(self, nodes: Mapping[str, Node]) -> Self:
        for name in self.of:
            if name not in nodes:
                raise ValueError(f"of: `{name}` is not a node")
            kind = nodes[name].layer
            if len(kind.takes) != 1 or kind.shares or isinstance(kind, EmaCopy):
                raise ValueError(f"of: `{name}` is a {kind.kind_name}, which cannot be copied")
        bound = self.model_copy()
        bound._copied = tuple(nodes[name] for name in self.of)
        return bound

    @override
    def shape(self, inputs: tuple[Shape, ...]) -> Shape:
        shape = inputs[0]
        for node in self._copied:
            shape = node.layer.shape((shape,))
        return shape

    @override
    def apply(self, params: PyTree, inputs: tuple[Any, ...], context: LayerContext) -> Array:
        if context.config.ema_params is None:
            raise ValueError("a graph with ema_copy needs the moving average of the parameters: `ema` in the training")
        x = jax.lax.stop_gradient(inputs[0])
        for node in self._copied:
            key = None if context.key is None else jax.random.fold_in(context.key, zlib.crc32(node.name.encode()))
            own = context.config.ema_params.get(node.name, {})
            x = apply_node(node, own, (x,), replace(context, key=key, cache=None)).value
        return x

    @override
    def cost(self, inputs: tuple[Shape, ...], sizes: Mapping[str, int]) -> Cost:
        total, shape = 0, inputs[0]
        for node in self._copied:
            total += node.layer.cost((shape,), sizes).matmul * node.layers
            shape = node.layer.shape((shape,))
        return Cost(matmul=total)


# ---- data ----


def digits(seed: int, validation_fraction: float = 0.25) -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    """Images float32 [N, 8, 8, 1] from 0 to 1 with their classes: those to train on, and those held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = (found.images / 16.0).astype(np.float32)[..., None], found.target.astype(np.int64)
    order = permuted(np.arange(len(images)), len(images), seed, "arrays")
    held_out, chosen = np.split(order, [round(validation_fraction * len(images))])
    return (images[chosen], labels[chosen]), (images[held_out], labels[held_out])


class ImageFeed:
    """Endless shuffled batches of images, a function of seed and step; every epoch has its own order."""

    def __init__(self, images: Images, *, seed: int, batch_size: int) -> None:
        self._images, self._seed, self._batch_size = images, seed, batch_size

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """`images` float32 [B, H, W, C] and `rows` int32 [B], the image's place in the global batch."""
        number, size = len(self._images), self._batch_size
        places = [
            permuted(np.array([place % number]), number, self._seed, "images", place // number)[0]
            for place in range(step * size, (step + 1) * size)
        ]
        return {"images": self._images[places], "rows": np.arange(size, dtype=np.int32)}

    def iterate(self, start_step: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """Batches from `start_step` on, without end."""
        while True:
            yield self.batch(start_step)
            start_step += 1


# ---- probe ----


def linear_probe(features: Callable[[Images], np.ndarray], train: Any, held_out: Any, rows: np.ndarray) -> float:
    """Share of held-out labels that a logistic regression on standardized features predicts, taught by some rows."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    (images, labels), (unseen, unseen_labels) = train, held_out
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000))
    return float(probe.fit(features(images)[rows], labels[rows]).score(features(unseen), unseen_labels))


def compare(
    features: Mapping[str, Callable[[Images], np.ndarray]], train: Any, held_out: Any, per_class: int | None, draws: int
) -> dict[str, float]:
    """Accuracy of the same probe on each kind of features, the mean over `draws` choices of `per_class` labels.

    With `per_class` None all labels are used, once.
    """
    labels, random = train[1], np.random.default_rng(0)

    def some() -> np.ndarray:
        return np.concatenate([random.permutation(np.flatnonzero(labels == c))[:per_class] for c in np.unique(labels)])

    subsets = [np.arange(len(labels))] if per_class is None else [some() for _ in range(draws)]
    return {
        name: float(np.mean([linear_probe(function, train, held_out, rows) for rows in subsets]))
        for name, function in features.items()
    }


def vectors(graph: Graph, params: PyTree, node: str = "encoder") -> Callable[[Images], np.ndarray]:
    """A function from images [N, H, W, C] to the node's vectors [N, D]; without a key all views are the image."""
    read = jax.jit(lambda images: apply(graph, params, {"images": images}, ApplyConfig(until=node)).values[node][:, 0])
    return lambda images: np.asarray(read(images), np.float32)


def run(folder: Path, *, seed: int = 0, steps: int | None = None, draws: int = 10) -> dict[str, dict[str, float]]:
    """Trains in `folder` and returns the accuracies: {labels per class: {trained, untrained, pixels}}."""
    recipe = load_recipe(RECIPE).recipe
    graph, settings = parse(recipe.model), recipe.pretrain
    settings = settings.model_copy(update={"steps": steps or settings.steps})
    training, held_out = digits(seed)
    feed = ImageFeed(training[0], seed=seed, batch_size=settings.batch_size)
    train(TrainJob(graph=graph, settings=settings, mesh=recipe.mesh, seed=seed, feed=feed, folder=folder, name="byol"))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), abstract_params(graph)
    )
    features = {
        "trained": vectors(
            graph, CheckpointStore(folder / "checkpoints").restore(None, {"params": abstract})["params"]
        ),
        "untrained": vectors(graph, init_params(graph, random_key(seed, Purpose.INITIAL_WEIGHTS))),
        "pixels": lambda images: images.reshape(len(images), -1),
    }
    return {str(n or "all"): compare(features, training, held_out, n, draws) for n in (None, 10, 5)}


def main() -> None:
    """Print a line for each number of labels, and the numbers as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, help="updates; default: the recipe's")
    parser.add_argument("--draws", type=int, default=10, help="random choices of few labels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of checkpoints and metrics; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        found = run(folder, seed=options.seed, steps=options.steps, draws=options.draws)
    for labels, scores in found.items():
        shown = ", ".join(f"{name} {score:.1%}" for name, score in scores.items())
        print(f"labels per class {labels}: {shown}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
