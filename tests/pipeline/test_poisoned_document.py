"""One document of a corpus makes the loss not finite: its updates are left out of the whole run, and it is named."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from affinage.checkpoint import CheckpointStore
from affinage.cli.program import main
from affinage.model.layer import LAYERS
from affinage.pipeline.lineage import TrainingRows
from affinage.pipeline.steps_train import documents_of
from tiny_corpus import sentence

POISON, STEPS = "tales/poison", 12
PLUGIN = '''
import jax.numpy as jnp

from affinage.model.layer import Layer, register_layer


@register_layer("spoilt_by")
class SpoiltBy(Layer):
    """Its input, which is not a number in every row that has this token."""

    token: int

    def shape(self, inputs):
        return inputs[0]

    def apply(self, params, inputs, context):
        spoilt = jnp.any(context.batch["tokens"] == self.token, axis=-1)
        return jnp.where(spoilt[:, None, None], jnp.nan, inputs[0])
'''
RECIPE = """
name: poisoned
seed: 0
plugins: [spoilt.py]
data:
  sources: [{{path: {folder}/tales.jsonl, language: en}}]
  filters: {{language_threshold: 0, min_characters: 10, min_alnum_ratio: 0}}
  dedup: null
  split: {{validation_fraction: 0.1}}
tokenizer: {{kind: char}}
packing: {{seq_len: 64, strategy: best_fit}}
model:
  inputs: [tokens]
  nodes:
    embed: {{kind: embedding, in: tokens, vocab: auto, width: 16}}
    spoilt: {{kind: spoilt_by, in: embed, token: 0}}
    logits: {{kind: unembed, in: spoilt, vocab: auto, tied: false}}
    loss: {{kind: next_token_loss, in: [logits, tokens]}}
mesh: {{data: 1}}
pretrain:
  steps: {steps}
  batch_size: 4
  schedule: {{peak_lr: 3.0e-2, min_lr: 3.0e-3, warmup_steps: 2}}
  log_every: 1
  eval_every: {steps}
runtime: {{checkpoint: {{every_steps: 1, keep_last: {steps}}}}}
"""


def affinage(verb: str, recipe: Path, name: str, *settings: str) -> Path:
    """The folder of a run in which a verb has come to its end."""
    sets = [word for setting in (f"name={name}", *settings) for word in ("--set", setting)]
    with pytest.raises(SystemExit) as ended:
        main([verb, str(recipe), "--runs", str(recipe.parent / "runs"), *sets])
    assert not ended.value.code
    return recipe.parent / "runs" / name


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of two dozen tales, one with a letter that no other has."""
    folder, draw = tmp_path_factory.mktemp("poisoned"), random.Random(0)
    texts = {f"tale-{i}": " ".join(sentence(draw, "en") for _ in range(3)) for i in range(20)}
    texts["poison"] = "A river of Ω and winter bread."
    lines = [json.dumps({"id": name, "text": text}) for name, text in texts.items()]
    (folder / "tales.jsonl").write_text("\n".join(lines))
    (folder / "spoilt.py").write_text(PLUGIN)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, steps=STEPS))
    yield folder / "recipe.yaml"
    del LAYERS["spoilt_by"]


def state(folder: Path, step: int) -> list[bytes]:
    """Weights and moments, bit for bit."""
    saved = CheckpointStore(folder / "checkpoints").restore(step, {"params": None, "opt_state": None})
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(saved)]


def test_the_updates_of_a_poisoned_document_are_left_out_bit_by_bit_and_it_is_named(recipe: Path):
    rows = TrainingRows(affinage("data", recipe, "rows"), "pretrain")
    spoilt = f"model.nodes.spoilt.token={rows.tokenizer.encode('Ω')[-1]}"
    skipped = affinage("train", recipe, "skipped", spoilt)
    batches = {step: documents_of(rows.feed, step) for step in range(1, STEPS + 1)}
    poisoned = [step for step, batch in batches.items() if any(POISON in row["documents"] for row in batch)]
    assert 1 <= len(poisoned) <= 4 and poisoned != [1]

    told = [json.loads(line) for line in (skipped / "pretrain/health.jsonl").read_text().splitlines()]
    assert [(event["step"], event["action"]) for event in told] == [(step, "skipped") for step in poisoned]
    assert [event["documents"] for event in told] == [batches[step] for step in poisoned]  # and of these, the row
    for step in poisoned:
        assert state(skipped / "pretrain", step) == state(skipped / "pretrain", step - 1)
