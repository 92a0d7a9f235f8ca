"""A model as the folder that Hugging Face's libraries load."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from numpy.typing import NDArray
from safetensors.numpy import save_file

from affinage.data.json_files import write_atomically, write_json
from affinage.errors import UserError
from affinage.generation.model import LoadedModel
from affinage.hub.card import CardFacts, model_card
from affinage.hub.families import family_of
from affinage.hub.vocabulary import write_hf_tokenizer

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def export(
    model: LoadedModel,
    folder: Path,
    *,
    facts: CardFacts,
    dtype: str = "float32",
    chat: bool = False,
    place: str = "",
    sampling: Mapping[str, Any] | None = None,
    max_shard_size: int = 5_000_000_000,
) -> dict[str, Any]:
    """Write `folder`: configuration, weights in safetensors, tokenizer, chat template for chat models, and a card.

    The folder appears whole or not at all, in place of one that was there. The same model gives the same bytes. A
    weight file holds at most `max_shard_size` bytes. The card loads it from `place`, by default the folder's name.
    `sampling` are settings for generation_config.json, by default greedy decoding. Returns the files with their sizes.
    Raises UserError for graphs that no architecture of transformers computes, and for weights that `dtype` cannot hold.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    family, tokenizer = family_of(model.graph), model.tokenizer
    config = family.to_config(model.graph, context=model.context)
    ids = {"bos_token_id": tokenizer.bos, "pad_token_id": tokenizer.pad}
    # Transformers 5 reads "dtype", transformers 4 "torch_dtype".
    write_json(
        partial / "config.json", config | ids | {"eos_token_id": tokenizer.eos, "dtype": dtype, "torch_dtype": dtype}
    )
    generation = ids | {"eos_token_id": list(tokenizer.stops), "do_sample": False} | dict(sampling or {})
    write_json(partial / "generation_config.json", generation)
    tensors = family.to_tensors(jax.device_get(model.params), model.graph)
    _write_weights({name: _converted(name, tensor, dtype) for name, tensor in tensors.items()}, partial, max_shard_size)
    system_prompt = model.system_prompt if chat else ""
    write_hf_tokenizer(tokenizer, partial, context=model.context, chat=chat, system_prompt=system_prompt)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    opening = tokenizer.id_to_piece(tokenizer.bos) if tokenizer.fixed_ids else ""  # others have it in tokenizer.json
    sizes: dict[str, int] = {"parameters": parameters, "context": model.context}
    card = model_card(model.name, facts, place=place or folder.name, chat=chat, opening=opening, **sizes)
    write_atomically(partial / "README.md", card.encode())
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {"dtype": dtype, "parameters": parameters, "files": {path.name: path.stat().st_size for path in files}}


def _converted(name: str, tensor: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The tensor in the exported dtype. Raises UserError if it holds no finite numbers, before or after."""
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(tensor.astype(DTYPES[dtype]))
    if np.isfinite(converted).all():
        return converted
    if np.isfinite(tensor).all():
        fix = "Export it as bfloat16 or float32."
        raise UserError(f"the tensor {name} has values that {dtype} cannot hold", where="export.dtype", fix=fix)
    fix = "Export an earlier checkpoint: MODEL@STEP."
    raise UserError(f"the tensor {name} holds values that are not finite: the training diverged", fix=fix)


def _write_weights(tensors: dict[str, NDArray[Any]], folder: Path, max_shard_size: int) -> None:
    """One file, or numbered ones with an index, as transformers' save_pretrained would lay them out."""
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    for filename, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / filename, metadata={"format": "pt"})
        (folder / filename).chmod((folder / "config.json").stat().st_mode)  # safetensors makes files of its owner alone
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        write_json(folder / "model.safetensors.index.json", index)
