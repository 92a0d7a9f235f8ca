"""Which parameters a training changes, and which it only reads: those under adapters, and a reference model's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from affinage.checkpoint import CheckpointStore
from affinage.config.training import DpoSettings, TrainSettings, TuningSettings
from affinage.model import Adapters, ApplyConfig, Declared, Graph, Node, apply
from affinage.model.analysis import analyze
from affinage.model.layer import BATCH, SEQUENCE, parameters_in
from affinage.model.layers.losses import REFERENCE

PyTree = Any
FROZEN = "frozen"  # the folder of their one checkpoint, beside those of a training
Batch = Mapping[str, Array]


@dataclass(frozen=True)
class ParamSplit:
    """The trainable and the frozen parameters of a training."""

    graph: Graph  # with the loss
    adapters: Adapters | None = None  # trained in place of the weights, which are frozen
    reference: bool = False  # whether the frozen weights are a reference model, see `with_reference`

    @property
    def trainable(self) -> Declared:
        """What declares the trained parameters."""
        return self.graph if self.adapters is None else self.adapters

    @property
    def has_frozen(self) -> bool:
        """Whether there are frozen weights."""
        return self.adapters is not None or self.reference

    def full_params(self, params: PyTree, frozen: PyTree) -> PyTree:
        """The tree that the graph is applied to."""
        return params if self.adapters is None else self.adapters.beside(frozen, params)

    def merge_lora(self, params: PyTree, frozen: PyTree) -> PyTree:
        """The weights of the model that the trained parameters make, as any other model has them."""
        return params if self.adapters is None else self.adapters.merged(frozen, params)

    def step_flops(self, rows: int, context: int) -> int:
        """Floating point operations of one training step, by the convention of `affinage.model.analysis`.

        Frozen matrices have no gradient, which is one product of three; a reference model is one forward pass more.
        """
        nodes = analyze(self.graph, rows, context)
        total = sum(node.training_flops + (node.flops if self.reference else 0) for node in nodes)
        return total + sum(self.adapted_flops(node, rows, context) for node in self.graph.nodes)

    def adapted_flops(self, node: Node, rows: int, context: int) -> int:
        """What adapters add to the operations of a node's training step, and what frozen matrices take away."""
        if self.adapters is None:
            return 0
        sizes = {BATCH: rows, SEQUENCE: context}
        products = node.layer.cost(self.graph.input_shapes(node), sizes).matmul * node.layers
        declared = parameters_in(self.adapters.parameters.get(node.name, {}))
        return 6 * rows * context * sum(p.active for p in declared) - products

    def with_reference(self, frozen: PyTree, batch: Batch, config: ApplyConfig) -> Batch:
        """The batch with the log-probabilities that a reference model gives its documents; without one, the batch."""
        if not self.reference:
            return batch
        (answers,) = self.graph[self.graph.loss].inputs
        scores = apply(self.graph, frozen, batch, replace(config, key=None, until=answers)).values[answers]
        return {**batch, REFERENCE: jax.lax.stop_gradient(scores[..., 0].astype(jnp.float32))}


def kept_frozen(training: Path, abstract: PyTree) -> PyTree:
    """The frozen weights of a training, on the devices and shardings of `abstract`; None if that is None."""
    return None if abstract is None else CheckpointStore(training / FROZEN).restore_params(0, abstract)


def split_params(graph: Graph, settings: TrainSettings) -> ParamSplit:
    """Split the parameters of a graph as the settings require. Raises UserError for matrices that it does not have."""
    lora = settings.lora if isinstance(settings, TuningSettings) else None
    reference = isinstance(settings, DpoSettings) and not settings.precompute_ref_log_probs
    return ParamSplit(graph, None if lora is None else Adapters(graph, lora), reference)
