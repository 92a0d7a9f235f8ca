"""Linear probes: how much of the labels a straight cut through frozen features finds."""

from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float, Int

Images = Float[np.ndarray, "N H W C"]
Labels = Int[np.ndarray, " N"]
Features = Callable[[Images], Float[np.ndarray, "N D"]]

_ITERATIONS = 5000  # of the solver; enough for it to converge on standardised features


def linear_probe(
    features: Float[np.ndarray, "N D"],
    labels: Labels,
    held_out_features: Float[np.ndarray, "M D"],
    held_out_labels: Labels,
) -> float:
    """Share of held-out labels that a logistic regression on standardised features predicts.

    Scikit-learn's LogisticRegression with its default regularisation (C = 1).
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=_ITERATIONS))
    return float(probe.fit(features, labels).score(held_out_features, held_out_labels))


def compare(
    features: Mapping[str, Features],
    train: tuple[Images, Labels],
    held_out: tuple[Images, Labels],
    *,
    labels_per_class: int | None,
    draws: int,
    seed: int,
) -> dict[str, dict[str, float]]:
    """The same probe on the same labelled images for several features.

    Args:
        features: by name, images to vectors.
        train: the images and labels the probe may learn from.
        held_out: those it is judged on.
        labels_per_class: how many it learns from, drawn at random; None: all of them.
        draws: of labels, over which accuracy is averaged; one where all labels are used.
        seed: of the draws.

    Returns:
        {name: {accuracy, stderr}}; stderr is the standard error of the mean over draws, or of a single accuracy the
        binomial one over the held-out images.
    """
    (images, labels), (held_out_images, held_out_labels) = train, held_out
    random = np.random.default_rng(seed)
    subsets = [_drawn(labels, labels_per_class, random) for _ in range(draws if labels_per_class else 1)]
    results = {}
    for name, function in features.items():
        seen, unseen = function(images), function(held_out_images)
        scores = [linear_probe(seen[rows], labels[rows], unseen, held_out_labels) for rows in subsets]
        accuracy = float(np.mean(scores))
        of_images = float(np.sqrt(accuracy * (1 - accuracy) / len(held_out_labels)))
        error = float(np.std(scores, ddof=1) / np.sqrt(len(scores))) if len(scores) > 1 else of_images
        results[name] = {"accuracy": accuracy, "stderr": error}
    return results


def _drawn(labels: Labels, per_class: int | None, random: np.random.Generator) -> np.ndarray:
    """Rows of `per_class` examples of every class."""
    if per_class is None:
        return np.arange(len(labels))
    return np.concatenate([random.permutation(np.flatnonzero(labels == c))[:per_class] for c in np.unique(labels)])
