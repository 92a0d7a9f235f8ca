"""Images as training data: split once, then batches as a function of seed and step."""

import numpy as np
import pytest

from affinage.config.data import ArraySettings
from affinage.data.arrays import HELD_OUT, TRAIN, ArrayFeed, prepare_arrays, read_arrays
from affinage.errors import UserError


def prepared(folder, **arrays) -> dict:
    np.savez(folder / "some.npz", **arrays)
    return prepare_arrays(ArraySettings(path=str(folder / "some.npz")), folder, seed=3)


def test_the_split_loses_nothing_and_a_batch_is_a_function_of_seed_and_step(tmp_path):
    images = np.arange(40 * 4 * 4, dtype=np.uint16).reshape(40, 4, 4)
    summary = prepared(tmp_path, images=images, labels=np.arange(40))
    assert summary["train"]["images"] == 30 and summary["shape"] == [4, 4, 1]
    labels = [read_arrays(tmp_path / name)[1] for name in (TRAIN, HELD_OUT)]
    assert sorted(np.concatenate(labels)) == list(range(40))
    images, classes = read_arrays(tmp_path / TRAIN)
    np.testing.assert_allclose(images[:, 0, 0, 0] * (40 * 16 - 1), classes * 16, rtol=1e-5)

    feed, again, other = (ArrayFeed(tmp_path / TRAIN, seed=seed, batch=10) for seed in (1, 1, 2))
    for step, batch in zip((5, 6, 7), feed.iterate(5), strict=False):
        assert set(batch) == {"images", "rows"} and batch["images"].dtype == np.float32
        np.testing.assert_array_equal(batch["images"], again.batch(step)["images"])
    epochs = [[image for step in range(3 * e, 3 * e + 3) for image in feed.where(step)] for e in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(30))] * 2
    assert epochs[0] != epochs[1] and other.where(0) != feed.where(0)


def test_digits_come_with_scikit_learn(tmp_path):
    summary = prepare_arrays(ArraySettings(path="digits"), tmp_path, seed=0)
    assert (summary["images"], summary["classes"], summary["shape"]) == (1797, 10, [8, 8, 1])
    images, _ = read_arrays(tmp_path / TRAIN)
    assert images.min() == 0 and images.max() == 1


@pytest.mark.parametrize("arrays", [{"pixels": np.zeros((3, 4, 4))}, {"images": np.zeros((3, 4))}], ids=list)
def test_files_without_images_are_refused(tmp_path, arrays):
    with pytest.raises(UserError) as error:
        prepared(tmp_path, **arrays)
    assert error.value.where == "data.arrays" and error.value.fix
