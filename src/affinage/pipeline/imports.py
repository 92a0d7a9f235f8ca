"""Models from elsewhere: a folder of the hub becomes one that every verb takes as MODEL and a recipe can begin with.

The folder holds model.json (as a training's does), checkpoints/0 with the weights, tokenizer/, and recipe.yaml.
"""

import hashlib
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from affinage.errors import UserError
from affinage.pipeline.base_models import TOKENIZER
from affinage.pipeline.names import MODEL
from affinage.pipeline.store import write_json

if TYPE_CHECKING:
    from affinage.data.tokenizer import Tokenizer
    from affinage.hub.read import HubModel

RECIPE = "recipe.yaml"
_ANY_TEXT = "The quick brown fox, 0123456789; été; привет; 世界\n"  # a tokenizer that has words has some of these

_HEADER = """\
# Begins with the weights and the tokenizer of {name}, which lie beside this file. Its graph is what config.json says.
#
#   affinage run {file} --set data.sources='[my_text/]'      to train on, on text of yours
#   affinage run {file} --set data=null --set pretrain=null  to fine-tune only, once there are conversations
"""
_TAIL = """
data:
  sources: [my_text/]
  languages: [en]

pretrain:
  steps: 1000
  batch_size: 8
  schedule: {{peak_lr: 5.0e-5, min_lr: 5.0e-6, warmup_ratio: 0.05}}

# sft:
#   sources: [my_conversations.jsonl]
#   system_prompt: {system_prompt}
#   steps: 1000
#   batch_size: 8
#   schedule: {{peak_lr: 2.0e-5, min_lr: 2.0e-6, warmup_ratio: 0.05}}
"""


def import_model(
    source: Path, folder: Path, name: str, *, chat_tokens: bool = False, origin: str = ""
) -> dict[str, Any]:
    """Write `folder` from a folder of the Hugging Face Hub; it appears whole or not at all.

    Args:
        source: config.json, safetensors and the tokenizer's files.
        folder: where to write; must not be there.
        name: what the recipe is called.
        chat_tokens: give the vocabulary those of ChatML's tokens that it lacks; their embeddings begin at the mean.
        origin: the repository or the folder where Hugging Face's libraries find it; written down unless it gets tokens.

    Raises:
        UserError: what is in `source` cannot be honoured exactly.
    """
    import jax

    from affinage.hub.read import read_hub_folder
    from affinage.hub.vocabulary import with_ids

    model = read_hub_folder(source)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / TOKENIZER).mkdir(parents=True)
    tokenizer = fitting_tokenizer(source, model.graph.vocabulary)
    digest = model.weights.digest()
    added: tuple[int, ...] = ()
    if chat_tokens and not tokenizer.fixed_ids:
        added = tokenizer.add_chat_tokens()
        graph, params = with_ids(model.graph, model.params, added)
        model = replace(model, graph=graph, params=params)
    tokenizer.write(partial / TOKENIZER)
    system_prompt, template = system_prompt_of(source), own_template_of(source)
    facts: dict[str, Any] = {
        "graph": model.graph.to_dict(),
        "context": model.architecture.context,
        "system_prompt": system_prompt or "",
        "precision": {},
        "imported": {
            "sha256": {"weights": digest, "tokenizer": _digest(partial / TOKENIZER)},
            "chat": system_prompt is not None or template is not None,
            **({"from": origin} if origin and not added else {}),
        },
    }
    if template is not None:
        facts["chat_template"] = template
    write_json(partial / MODEL, facts)
    _write_recipe(partial / RECIPE, folder / RECIPE, name, model, system_prompt or "")
    _write_weights(partial, model, digest)
    partial.rename(folder)
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
        "family": model.architecture.family,
        "context": model.architecture.context,
        "vocabulary": model.graph.vocabulary,
        "tokenizer": tokenizer.kind,
        "ignored": model.architecture.ignored,
    }


def fitting_tokenizer(source: Path, vocabulary: int) -> "Tokenizer":
    """The tokenizer of a folder of the hub; UserError if it does not fit.

    That is: it has ids that a model of `vocabulary` ids has not, or none to write text with.
    """
    from affinage.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(source)
    if tokenizer.vocabulary > vocabulary:
        fix = "Put the tokenizer.json there that the model was trained with."
        raise UserError(
            f"the tokenizer has {tokenizer.vocabulary} ids, the model {vocabulary}", where=str(source), fix=fix
        )
    if tokenizer.kind == "hub" and len(set(tokenizer.encode(_ANY_TEXT))) < 2:
        raise UserError(
            f"the tokenizer has {tokenizer.vocabulary} ids, the model {vocabulary}, and it cannot write text with them",
            where=str(source),
            fix="Put the tokenizer.json that the model was trained with there.",
        )
    return tokenizer


def _write_weights(folder: Path, model: "HubModel", digest: str) -> None:
    import jax
    import jax.numpy as jnp

    from affinage.checkpoint import CheckpointStore

    store = CheckpointStore(folder / "checkpoints")
    store.save(0, {"params": jax.tree.map(jnp.asarray, model.params)}, {"imported": digest})
    store.wait()


def _digest(folder: Path) -> str:
    contents = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in sorted(folder.iterdir())]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def system_prompt_of(source: Path) -> str | None:
    """What a chat model of ours is told by default; None of any other model."""
    from affinage.data.chat import system_prompt_in
    from affinage.data.tokenizer import template_in

    template = template_in(source)
    return None if template is None else system_prompt_in(template)


def own_template_of(source: Path) -> str | None:
    """The chat template of a model that is none of ours, but talks."""
    from affinage.data.tokenizer import template_in

    return template_in(source) if system_prompt_of(source) is None else None


def _write_recipe(path: Path, shown: Path, name: str, model: "HubModel", system_prompt: str) -> None:
    settings = {
        "name": name,
        "init_from": ".",
        "packing": {"seq_len": model.architecture.context},
        "model": model.graph.to_dict(),
        "export": {"dtype": model.architecture.dtype},
    }
    body = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    quoted = yaml.safe_dump(system_prompt, default_style='"', allow_unicode=True, width=10**6).strip()
    head, tail = _HEADER.format(name=name, file=shlex.quote(str(shown))), _TAIL.format(system_prompt=quoted)
    path.write_text(head + body + tail, encoding="utf-8")
