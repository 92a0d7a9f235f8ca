"""Random views of images, each drawn from the step's key, the global row and the view, and from nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray
from pydantic import Field
from typing_extensions import override

from affinage.model.kind import Context, NodeKind, node_kind
from affinage.model.parameter import Tree
from affinage.model.shape import Shape, ShapeMismatch


@node_kind("augment")
class Augment(NodeKind):
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
    def apply(self, params: Tree, inputs: tuple[Any, ...], context: Context) -> Float[Array, "B V H W C"]:
        images = inputs[0].astype(jnp.float32)
        size = images.shape[0]
        if context.key is None:
            same = jnp.broadcast_to(images[:, None], (size, self.views, *images.shape[1:]))
            return same.astype(context.call.compute_dtype)
        key, rows = context.key, context.batch.get("rows", jnp.arange(size))

        def of_row(row: Array, image: Array) -> Array:
            keys = jax.random.split(jax.random.fold_in(key, row), self.views)
            return jax.vmap(lambda view_key: self._view(view_key, image))(keys)

        return jax.vmap(of_row)(rows, images).astype(context.call.compute_dtype)

    def _view(self, key: PRNGKeyArray, image: Float[Array, "H W C"]) -> Float[Array, "H W C"]:
        moves, contrast, erasure, noise = jax.random.split(key, 4)
        view = self._moved(moves, image)
        view = view * (1 + self.contrast * jax.random.uniform(contrast, (), minval=-1, maxval=1))
        view = jnp.where(self._erased(erasure, (image.shape[0], image.shape[1]))[:, :, None], 0.0, view)
        return view + self.noise * jax.random.normal(noise, image.shape)

    def _moved(self, key: PRNGKeyArray, image: Float[Array, "H W C"]) -> Float[Array, "H W C"]:
        """An affine map about the centre with bilinear interpolation; zero from outside."""
        draws = jax.random.uniform(key, (6,), minval=-1, maxval=1)
        angle = jnp.deg2rad(self.rotate) * draws[0]
        turn = jnp.array([[jnp.cos(angle), -jnp.sin(angle)], [jnp.sin(angle), jnp.cos(angle)]])
        lean = jnp.array([[1.0, 0.0], [self.shear * draws[1], 1.0]])
        resize = (1 + self.scale * draws[2:4])[:, None]
        height, width = image.shape[:2]
        centre = (jnp.array([height, width], jnp.float32) - 1)[:, None] / 2
        grid = jnp.stack(jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij")).reshape(2, -1)
        offsets = self.shift * draws[4:6, None]
        # Written out: a product in a chip's native precision would round coordinates to bfloat16.
        linear = jnp.sum(turn[:, :, None] * lean[None], axis=1)
        source = jnp.sum(linear[:, :, None] * (resize * (grid - centre))[None], axis=1) + centre + offsets
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
