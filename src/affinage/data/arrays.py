"""Arrays as training data: images from a file, split once, and batches of them as a function of seed and step."""

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from affinage.config.data import DIGITS, ArraySettings
from affinage.data.permutation import permuted
from affinage.errors import UserError
from affinage.paths import from_home

Batch = dict[str, np.ndarray]
Images = Float[np.ndarray, "N H W C"]
Labels = Int[np.ndarray, " N"]

TRAIN, HELD_OUT = "train", "held-out"  # the two folders of `prepare_arrays`
_IMAGES, _LABELS = "images.npy", "labels.npy"


def prepare_arrays(settings: ArraySettings, folder: Path, *, seed: int) -> dict[str, Any]:
    """Write the images of `settings` into `folder/train` and `folder/held-out`.

    Images become float32 [N, H, W, C]; whole numbers are divided by their largest value. Labels, where there are any,
    lie beside them for whoever judges the model: the feed never reads them.

    Returns:
        Counts: train, held_out, shape, labels (classes).

    Raises:
        UserError: for files without such arrays.
    """
    images, labels = _read(settings)
    order = permuted(np.arange(len(images)), len(images), seed, "arrays").tolist()
    held_out = round(settings.validation_fraction * len(images))
    if not held_out < len(images):
        raise UserError(f"all {len(images)} images would be held out", where="data.arrays.validation_fraction")
    for name, chosen in ((TRAIN, order[held_out:]), (HELD_OUT, order[:held_out])):
        (folder / name).mkdir(parents=True, exist_ok=True)
        np.save(folder / name / _IMAGES, images[chosen])
        if labels is not None:
            np.save(folder / name / _LABELS, labels[chosen])
    return {
        "images": len(images),
        "train": {"images": len(images) - held_out},
        "held_out": {"images": held_out},
        "shape": list(images.shape[1:]),
        "classes": None if labels is None else len(np.unique(labels)),
    }


def read_arrays(folder: Path) -> tuple[Images, Labels | None]:
    """The images of one folder of `prepare_arrays`, memory-mapped, and their labels if there are any."""
    images = np.load(folder / _IMAGES, mmap_mode="r", allow_pickle=False)
    labels = folder / _LABELS
    return images, np.load(labels, allow_pickle=False) if labels.is_file() else None


class ArrayFeed:
    """Endless shuffled batches of images; every epoch has its own order. Labels are not read."""

    def __init__(self, folder: Path, *, seed: int, batch: int) -> None:
        """`folder` is one of `prepare_arrays`; `batch` is images per step."""
        self._images, _ = read_arrays(folder)
        self._seed = seed
        self.batch_size = batch
        self.shape: tuple[int, ...] = self._images.shape[1:]  # of one image
        self.rows = len(self._images)

    def where(self, step: int) -> list[int]:
        """Number of every image of the batch of `step`."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        return [
            int(permuted(np.array([p % self.rows]), self.rows, self._seed, "images", p // self.rows)[0])
            for p in positions
        ]

    def batch(self, step: int) -> Batch:
        """`images` float32 [B, H, W, C] and `rows` int32 [B], the image's place in the global batch."""
        return {"images": self._images[self.where(step)], "rows": np.arange(self.batch_size, dtype=np.int32)}

    def iterate(self, start_step: int = 0) -> Iterator[Batch]:
        """Batches from `start_step` on, for ever."""
        step = start_step
        while True:
            yield self.batch(step)
            step += 1


def _read(settings: ArraySettings) -> tuple[Images, Labels | None]:
    if settings.path == DIGITS:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return _as_images(digits.images.astype(np.int64), settings), digits.target.astype(np.int64)
    try:
        found = np.load(from_home(settings.path), allow_pickle=False)
        if isinstance(found, np.ndarray):
            return _as_images(found, settings), None
        members = {name: found[name] for name in (settings.images, settings.labels) if name in found}
    except (OSError, ValueError, EOFError, MemoryError, OverflowError, zipfile.BadZipFile, zlib.error) as error:
        fix = f"Name a .npz or .npy file, or `{DIGITS}`."
        raise UserError(f"`{settings.path}` cannot be read: {error}", where="data.arrays", fix=fix) from error
    if settings.images not in members:
        raise UserError(
            f"`{settings.path}` holds no array `{settings.images}`",
            where="data.arrays",
            fix=f"It holds: {', '.join(found)}. Set `images` to one of them.",
        )
    labels = members.get(settings.labels)
    images = _as_images(members[settings.images], settings)
    if labels is not None and labels.shape != (len(images),):
        raise UserError(f"{len(images)} images have labels of shape {labels.shape}", where="data.arrays")
    return images, labels


def _as_images(array: np.ndarray, settings: ArraySettings) -> Images:
    if array.ndim not in (3, 4) or array.dtype.kind not in "uif" or not array.size:
        raise UserError(
            f"`{settings.path}` holds an array {list(array.shape)} of {array.dtype}, not images",
            where="data.arrays",
            fix="Images are numbers [N, height, width] or [N, height, width, channels].",
        )
    largest = 1.0 if array.dtype.kind == "f" else 255.0 if array.dtype == np.uint8 else max(float(array.max()), 1.0)
    images: Images = (array / largest).astype(np.float32)
    return images if images.ndim == 4 else images[..., None]
