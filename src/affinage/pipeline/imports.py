"""Models that a training begins with: imported ones (`init_from`), and checkpoints of other runs (`resume_from`).

The folder of an imported model holds model.json (as a training's does), checkpoints/0 with the weights, tokenizer/, and
recipe.yaml. Every verb takes it as a model.
"""

import hashlib
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from affinage.config.load import LoadedRecipe
from affinage.errors import UserError
from affinage.pipeline.models import MODEL, RELEASE, TOKENIZER, chat_of_hub
from affinage.pipeline.store import write_json
from affinage.results import read_json

RECIPE = "recipe.yaml"
_TEMPLATE = """\
# Begins with the weights and the tokenizer of {name}, which lie beside this file.
#
#   affinage run {file} --set data.sources='[my_text/]'      to train on, on text of yours
#   affinage run {file} --set data=null --set pretrain=null  to fine-tune only, with `sft` uncommented
{settings}
data:
  sources: [my_text/]
  languages: []  # all stay; [en, fr] keeps documents in these

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
    """Write `folder`, whole or not at all, from one with config.json, safetensors and a tokenizer.

    The recipe in it is called `name`. With `chat_tokens` the vocabulary gets the tokens of ChatML that it lacks; their
    embeddings begin at the mean. Otherwise `origin`, where Hugging Face's libraries find the model, is written down.
    Raises UserError for what cannot be taken over exactly.
    """
    import jax
    import jax.numpy as jnp

    from affinage.checkpoint import CheckpointStore
    from affinage.data.tokenizer import add_chat_tokens
    from affinage.hub.families import with_ids
    from affinage.hub.read import read_hub_folder, release_in
    from affinage.pipeline.opening import fitting_tokenizer

    model = read_hub_folder(source)
    tokenizer, digest = fitting_tokenizer(source, model.graph.vocabulary), model.weights.digest()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / TOKENIZER).mkdir(parents=True)
    tokenizer.write(partial / TOKENIZER)
    added: tuple[int, ...] = ()
    if chat_tokens and not tokenizer.fixed_ids:
        added = add_chat_tokens(partial / TOKENIZER)
        graph, params = with_ids(model.graph, model.params, added)
        model = replace(model, graph=graph, params=params)
    system_prompt, template = chat_of_hub(source)
    files = sorted((partial / TOKENIZER).iterdir())
    contents = json.dumps([(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files])
    imported: dict[str, Any] = {
        "sha256": {"weights": digest, "tokenizer": hashlib.sha256(contents.encode()).hexdigest()},
        "chat": system_prompt is not None or template is not None,
        RELEASE: release_in(source),
        **({"from": origin} if origin and not added else {}),
    }
    context, graph_dict = model.architecture.context, model.graph.to_dict()
    facts = {"graph": graph_dict, "context": context, "system_prompt": system_prompt or ""}
    facts |= {"precision": {}, "imported": imported} | ({} if template is None else {"chat_template": template})
    write_json(partial / MODEL, facts)
    settings = {"name": name, "init_from": ".", "packing": {"seq_len": context}, "model": graph_dict}
    settings["export"] = {"dtype": model.architecture.dtype}
    recipe = _TEMPLATE.format(
        name=name,
        file=shlex.quote(str(folder / RECIPE)),
        settings=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120),
        system_prompt=json.dumps(system_prompt or "", ensure_ascii=False),
    )
    (partial / RECIPE).write_text(recipe, encoding="utf-8")
    store = CheckpointStore(partial / "checkpoints")
    store.save(0, {"params": jax.tree.map(jnp.asarray, model.params)}, {"imported": digest})
    store.wait()
    partial.rename(folder)
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
        "family": model.architecture.family,
        "context": context,
        "vocabulary": model.graph.vocabulary,
        "ignored": model.architecture.ignored,
    }


# ---- what a recipe begins with ----


def initial_folder(loaded: LoadedRecipe) -> Path | None:
    """The folder that `init_from` names; None for random weights. Raises UserError if it is no imported model."""
    if loaded.recipe.init_from is None:
        return None
    folder = loaded.beside(loaded.recipe.init_from, ("init_from",))
    if "imported" not in read_json(folder / MODEL):
        what = f"there is no imported model in `{loaded.recipe.init_from}`"
        fix = "Make one: affinage import FOLDER_OR_HUB_ID --to FOLDER"
        raise UserError(what, where=loaded.locate(("init_from",)), fix=fix)
    return folder


def chat_template_of(loaded: LoadedRecipe, tokenizer: Path | None) -> str | None:
    """The Jinja template of the recipe's conversations, with the tokenizer in a folder; None for ChatML."""
    chosen = loaded.recipe.chat_template
    if chosen == "chatml":
        return None
    where = loaded.locate(("chat_template",))
    if chosen == "tokenizer":
        from affinage.data.tokenizer import template_in

        if tokenizer is not None and (template := template_in(tokenizer)):
            return template
        fix = "Name a Jinja file, or write `chat_template: chatml`."
        raise UserError("the tokenizer has no chat template of its own", where=where, fix=fix)
    path = loaded.beside(chosen, ("chat_template",))
    try:
        text = path.read_text(encoding="utf-8")
        return str(json.loads(text)["chat_template"] if path.suffix == ".json" else text)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        fix = "`chatml`, `tokenizer`, a Jinja file, or a tokenizer_config.json with a `chat_template`."
        raise UserError(f"there is no chat template in `{chosen}`", where=where, fix=fix) from error


def extended(loaded: LoadedRecipe, section: str) -> tuple[Path, int] | None:
    """Folder and step of the checkpoint that `resume_from` of a training names; None if it names none."""
    named: str | None = getattr(loaded.recipe, section).resume_from
    if named is None:
        return None
    from affinage.checkpoint.store import complete_steps

    where, (path, _, step) = loaded.locate((section, "resume_from")), named.partition("@")
    folder = loaded.beside(path, (section, "resume_from"))
    folder = folder / section if (folder / section).is_dir() else folder
    if folder.parent.name == loaded.recipe.name:
        fix = "Give this recipe another `name`: what is extended stays as it is."
        raise UserError(f"`{named}` is this run itself", where=where, fix=fix)
    steps = complete_steps(folder / "checkpoints")
    if not steps or (step and step not in map(str, steps)):
        fix = f"Name a training: runs/NAME/pretrain, or one of its steps: @{', @'.join(map(str, steps))}."
        raise UserError(f"there is no checkpoint `{named}`", where=where, fix=fix)
    return folder.resolve(), int(step) if step else steps[-1]


def extension_fingerprint(loaded: LoadedRecipe, section: str) -> dict[str, str]:
    """What the key of the training holds of it: a hash of the checkpoint, wherever it is."""
    if (extension := extended(loaded, section)) is None:
        return {}
    from affinage.checkpoint import CheckpointStore

    folder, step = extension
    return {"resume_from": CheckpointStore(folder / "checkpoints").metadata(step).fingerprint}
