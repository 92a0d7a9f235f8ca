"""What the compiled step sends between devices, and how its weights lie: a refactor shows here what it changed.

Counts of the operations in the compiled text of a dense and a mixture model's step; one in a loop counts once.
`python tests/parallel/test_collectives.py` prints both tables anew.
"""

import collections
import math
import re
from typing import Any

import jax
import meshes
import pytest

from affinage.training.program import Program

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
RING = {"context_attention": "ring"}
NORMS = {"sharding": {"residual": ["context", "tensor"]}}

# mesh, settings, model: counts in the order of KINDS
STEPS: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "data": ({"data": 2}, {}, "dense"),
    "fsdp": ({"fsdp": 2}, {}, "dense"),
    "tensor": ({"tensor": 2}, {}, "dense"),
    "tensor-norms": ({"tensor": 2}, NORMS, "dense"),
    "context": ({"context": 2}, {}, "dense"),
    "context-ring": ({"context": 2}, RING, "dense"),
    "expert": ({"expert": 2}, {}, "moe"),
    "pipeline": ({"pipeline": 2}, {}, "dense"),
}
EXPECTED: dict[str, tuple[int, ...]] = {
    "data": (0, 2, 0, 0, 0),
    "fsdp": (22, 5, 0, 0, 0),
    "tensor": (0, 9, 0, 0, 0),
    "tensor-norms": (8, 10, 0, 3, 0),
    "context": (3, 3, 0, 0, 0),
    "context-ring": (0, 2, 0, 0, 9),
    "expert": (3, 4, 0, 4, 0),
    "pipeline": (0, 2, 0, 0, 2),
}

MESH = {"pipeline": 2, "fsdp": 2, "tensor": 2}
SHARDINGS: dict[str, str] = {
    "blocks.attention.key.kernel": "pipeline fsdp tensor",
    "blocks.attention.out.kernel": "pipeline tensor None fsdp",
    "blocks.attention.query.kernel": "pipeline fsdp tensor",
    "blocks.attention.value.kernel": "pipeline fsdp tensor",
    "blocks.attention_norm.scale": "pipeline fsdp",
    "blocks.ffn.down.kernel": "pipeline None tensor fsdp",
    "blocks.ffn.gate.kernel": "pipeline None fsdp tensor",
    "blocks.ffn.router.kernel": "pipeline fsdp",
    "blocks.ffn.shared.down.kernel": "pipeline tensor fsdp",
    "blocks.ffn.shared.gate.kernel": "pipeline fsdp tensor",
    "blocks.ffn.shared.up.kernel": "pipeline fsdp tensor",
    "blocks.ffn.up.kernel": "pipeline None fsdp tensor",
    "blocks.ffn_norm.scale": "pipeline fsdp",
    "embed.embedding": "tensor fsdp",
    "logits.kernel": "tensor fsdp",
    "norm.scale": "fsdp",
}


def step_of(name: str) -> Program:
    sizes, parallel, model = STEPS[name]
    return meshes.program(meshes.graph(model, layers=2), sizes, parallel=parallel)


def counts(name: str) -> tuple[int, ...]:
    return collectives(step_of(name).compile_training().as_text())


def collectives(text: str) -> tuple[int, ...]:
    found = collections.Counter(re.findall(rf" ({'|'.join(KINDS)})(?:-start)?\(", text))
    return tuple(found[kind] for kind in KINDS)


def shardings() -> dict[str, str]:
    params = meshes.program(meshes.graph("moe"), MESH, parallel={}).abstract.params
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): " ".join(map(str, leaf.sharding.spec)) or "whole"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


@pytest.mark.parametrize("name", STEPS)
def test_the_step_sends_what_it_sent(name: str):
    step = step_of(name)
    compiled = step.compile_training()
    assert dict(zip(KINDS, collectives(compiled.as_text()), strict=True)) == dict(
        zip(KINDS, EXPECTED[name], strict=True)
    )
    # The new state is written where the old one is: memory is planned so.
    state = jax.tree.leaves(step.abstract)
    bytes_of_a_device = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in state)
    assert compiled.memory_analysis().alias_size_in_bytes >= bytes_of_a_device


def test_the_weights_lie_where_they_lay():
    assert shardings() == SHARDINGS


if __name__ == "__main__":
    for name in STEPS:
        print(f'    "{name}": {counts(name)},', flush=True)
    for name, spec in shardings().items():
        print(f'    "{name}": "{spec}",')
