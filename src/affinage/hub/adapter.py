"""Adapters in the form of PEFT: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from affinage.data.atomic import write_json
from affinage.errors import UserError
from affinage.hub import llama
from affinage.hub.decoder import Decoder
from affinage.hub.families import family_of
from affinage.model import Adapters
from affinage.model.adapters import LORA_A, LORA_B
from affinage.model.parameter import Tree

_PREFIX = "base_model.model."


def write_adapter(folder: Path, adapters: Adapters, params: Tree, *, base: str = "") -> dict[str, int]:
    """Write a folder that `peft.PeftModel.from_pretrained(model, folder)` puts beside the exported weights of the base.

    Args:
        folder: made if it is not there.
        adapters: of which model, and with which settings.
        params: A and B.
        base: the base's repository or exported folder, by which PEFT finds it; "" where there is none yet.

    Returns:
        {file: bytes}.

    Raises:
        UserError: for a model that is not of the Llama family (GPT-2 has one matrix for what are three here), and for
            adapters of experts.
    """
    if family_of(adapters.graph) is not llama:
        fix = "Leave out --adapter: the exported weights have the adapters in them."
        raise UserError("only adapters of models of the Llama family have a form that PEFT reads", fix=fix)
    if adapters.of_experts:
        fix = "Leave out --adapter: the exported weights have the adapters in them."
        raise UserError("PEFT has one adapter for the gate and up of an expert, these are two", fix=fix)
    tensors = adapter_tensors(adapters, params)
    modules = sorted({name.split(".")[-3] for name in tensors})
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = adapters.settings
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", config)
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def adapter_tensors(adapters: Adapters, params: Tree) -> dict[str, NDArray[Any]]:
    """A [rank, inputs] and B [outputs, rank] under PEFT's names, float32."""
    decoder = Decoder.of(adapters.graph)
    tensors: dict[str, NDArray[Any]] = {}
    for path in adapters.targets:
        leaves = _at(params, path)
        a, b = (np.asarray(leaves[name], np.float32) for name in (LORA_A, LORA_B))
        pairs = zip(a, b, strict=True) if decoder.repeated else [(a, b)]
        for layer, (one_a, one_b) in enumerate(pairs):
            name = llama.LAYER_NAMES[(*path[1:], "kernel")].removesuffix(".weight")
            place = f"{_PREFIX}model.layers.{layer}.{name}"
            rank = adapters.settings.rank
            tensors[f"{place}.lora_A.weight"] = np.ascontiguousarray(one_a.reshape(-1, rank).T)
            tensors[f"{place}.lora_B.weight"] = np.ascontiguousarray(one_b.reshape(rank, -1).T)
    return tensors


def _at(tree: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    for name in path:
        tree = tree[name]
    return tree
