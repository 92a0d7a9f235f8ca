"""Bytes of one device by what they are for, from shapes alone."""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax.numpy as jnp

from affinage.config.parallel import ParallelSettings
from affinage.config.training import TrainSettings
from affinage.hardware.chips import Chip
from affinage.model import Call
from affinage.model.activations import batch_shapes
from affinage.model.remat import with_remat
from affinage.parallel import Pipeline
from affinage.planning.liveness import Peak, Traced, measure, trace
from affinage.planning.local import Split, state_bytes
from affinage.planning.part import Part, part_of
from affinage.training.frozen import frozen_of
from affinage.training.state import TrainState, abstract_state
from affinage.training.trainer import optimizer_of, step_of


@dataclass(frozen=True)
class Memory:
    """Bytes on one device while it trains. The first four are its state, the others exist during a step.

    Attributes:
        weights: the parameters that are trained.
        frozen: those that are not, under adapters or of a reference model.
        optimizer: what the optimizer keeps of them, such as two moments.
        averages: moving averages that the model reads.
        batch: the arrays of the rows.
        weight_copies: in the dtype of the products.
        gradients: sums of gradients, and those of the micro-batch at hand.
        activations: kept by the forward pass for the backward pass.
        logits: of the tokens at hand, and what is computed of them.
        buffers: of collectives: weights that are gathered, gradients that are not summed over the devices yet.
        working: other values of the layer, or of the part of the loss, at hand.
        moved: bytes that a step reads and writes.
        host: kept by the forward pass in the host's memory, for this device.
    """

    weights: int
    frozen: int
    optimizer: int
    averages: int
    batch: int
    weight_copies: int
    gradients: int
    activations: int
    logits: int
    buffers: int
    working: int
    moved: int
    host: int = 0

    @property
    def state(self) -> int:
        """What is there between steps."""
        return self.weights + self.frozen + self.optimizer + self.averages

    @property
    def total(self) -> int:
        """At the peak of a step."""
        return self.state + self.batch + self.weight_copies + self.gradients + self.transient

    @property
    def transient(self) -> int:
        """Of the rows at hand."""
        return self.activations + self.logits + self.buffers + self.working


def step_memory(split: Split, settings: TrainSettings, chip: Chip, platform: str) -> Memory:
    """Memory of the training step that would run; it is traced, not compiled."""
    whole = frozen_of(split.graph, settings)
    optimizer = optimizer_of(whole, settings)
    dtype = jnp.dtype(settings.precision.params)
    state = abstract_state(whole, dtype, optimizer, split.layout)
    held = partial(state_bytes, sizes=split.sizes)
    batch = batch_shapes(split.local_graph, split.local_rows * split.micro_batches, split.local_context)
    peak = _peak(split, settings, chip, platform)
    return Memory(
        weights=held(state.params),
        frozen=held(state.frozen),
        optimizer=held(state.opt_state),
        averages=held(state.averages),
        batch=sum(leaf.size * leaf.dtype.itemsize for leaf in batch.values()),
        weight_copies=int(peak.held.get("weights", 0)),
        gradients=int(peak.held.get("gradients", 0)),
        activations=int(peak.held.get("activations", 0)),
        logits=int(peak.held.get("logits", 0)),
        buffers=int(peak.held.get("buffers", 0)),
        working=int(peak.held.get("working", 0)),
        moved=int(peak.moved),
        host=int(peak.offloaded / split.micro_batches),
    )


def call_of(settings: TrainSettings, parallel: ParallelSettings, dtype: str, platform: str) -> Call:
    """How training applies the model in a dtype on a platform, which need not be here."""
    call = Call(compute_dtype=jnp.dtype(dtype), platform=platform, described=True, attention=settings.attention)
    rings = parallel.context_attention == "ring"
    return with_remat(replace(call, ring_attention=rings), parallel.remat)


def _peak(split: Split, settings: TrainSettings, chip: Chip, platform: str) -> Peak:
    traced = _traced_step(part_of(split, settings, chip, platform))
    kinds = [node.kind for node in split.local_graph.nodes]
    vocabularies = {vocabulary for kind in kinds if (vocabulary := getattr(kind, "vocab", None))}
    return measure(traced, split.shares, platform, vocabularies)


@lru_cache(maxsize=128)
def _traced_step(part: Part) -> Traced:
    """The training step of one device."""
    graph, settings = part.graph, part.settings
    whole = frozen_of(graph, settings)
    optimizer = optimizer_of(whole, settings)
    layout = part.layout
    call = replace(call_of(settings, part.parallel, part.dtype, part.platform), layout=layout)
    if part.stages > 1:
        pipeline = Pipeline({}, part.parallel.pipeline_micro_batches, part.parallel.pipeline_rounds)
        call = pipeline.adapt(call)
    step = step_of(whole, optimizer, settings, call, seed=0)
    state = abstract_state(whole, jnp.dtype(settings.precision.params), optimizer, layout)
    batch = batch_shapes(graph, part.rows * settings.gradient_accumulation_steps, part.context)

    def of_weights(weights: Any, rest: TrainState, batch: Any) -> Any:
        params, frozen = weights
        return step(rest._replace(params=params, frozen=frozen), batch)

    rest = state._replace(params=None, frozen=None)
    return trace(of_weights, (state.params, state.frozen), rest, batch, axes=layout.axes)
