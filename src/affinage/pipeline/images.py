"""The work of the stages that prepare images and judge what was learned from them."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import rich

from affinage.errors import UserError
from affinage.pipeline.step import StepContext, Summary
from affinage.pipeline.steps_train import MODEL

if TYPE_CHECKING:
    from affinage.model import Graph


def arrays(context: StepContext) -> Summary:
    """Split the images into those that are trained on and those that are held out."""
    from affinage.data.arrays import prepare_arrays

    assert context.recipe.data is not None and context.recipe.data.arrays is not None
    return prepare_arrays(context.recipe.data.arrays, context.folder, seed=context.recipe.seed)


def probe(context: StepContext) -> Summary:
    """The same linear probe on trained features, on those of the weights that training began with, and on pixels."""
    from affinage.data.arrays import HELD_OUT, TRAIN, read_arrays
    from affinage.evaluation.probe import compare

    recipe, settings = context.recipe, context.recipe.probe
    assert settings is not None
    (images, labels), (unseen, unseen_labels) = (
        read_arrays(context.inputs["arrays"] / name) for name in (TRAIN, HELD_OUT)
    )
    if labels is None or unseen_labels is None or not len(unseen):
        raise UserError("a probe needs labels, and images held out", where="probe")
    features = _features(context, settings.features)
    results = []
    for count in (None, *settings.labels_per_class):
        name = "all labels" if count is None else f"{count} labels per class"
        context.progress(name)
        scores = compare(
            features,
            (images, labels),
            (unseen, unseen_labels),
            labels_per_class=count,
            draws=settings.draws,
            seed=recipe.seed,
        )
        results.append({"labels_per_class": count, "scores": scores})
        shown = ", ".join(f"{who} {s['accuracy']:.1%} ± {s['stderr']:.1%}" for who, s in scores.items())
        rich.print(f"probe: accuracy with {name}: {shown}")
    return {"features": settings.features, "held_out": len(unseen), "draws": settings.draws, "probe": results}


def _features(context: StepContext, node: str) -> dict[str, Callable[[Any], Any]]:
    """By name, functions from images [N, H, W, C] to vectors [N, D]."""
    import jax
    import jax.numpy as jnp

    from affinage.checkpoint import CheckpointStore
    from affinage.model import abstract_params, init_params, parse
    from affinage.training.state import Purpose, random_key

    facts = json.loads((context.inputs["pretrain"] / MODEL).read_text(encoding="utf-8"))
    graph, dtype = parse(facts["graph"]), jnp.dtype(facts["precision"]["params"])
    if node not in graph:
        raise UserError(f"the model has no node `{node}`", where="probe.features", fix="Name the one that encodes.")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), abstract_params(graph, dtype)
    )
    trained = CheckpointStore(context.inputs["pretrain"] / "checkpoints").restore_params(None, abstract)
    untrained = init_params(graph, random_key(context.recipe.seed, Purpose.INITIAL_WEIGHTS), dtype)
    return {
        "trained": lambda images: _vectors(graph, trained, node, images),
        "random": lambda images: _vectors(graph, untrained, node, images),
        "pixels": lambda images: images.reshape(len(images), -1),
    }


def _vectors(graph: "Graph", params: Any, node: str, images: Any) -> Any:
    import jax
    import numpy as np

    from affinage.model import Call, apply

    read = jax.jit(lambda params, images: apply(graph, params, {"images": images}, Call(until=node)).values[node])
    values = np.asarray(read(params, np.asarray(images)), np.float32)
    # Without a key all views of an image are the image itself.
    return values[:, 0] if values.ndim == 3 else values.reshape(len(values), -1)
