"""Adapters in the form of PEFT: adapter_config.json and adapter_model.safetensors."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from affinage.data.json_files import write_json
from affinage.errors import UserError
from affinage.hub.families import FAMILIES, family_of
from affinage.hub.family_spec import Decoder
from affinage.model import Adapters
from affinage.model.layer import PyTree
from affinage.model.lora import LORA_A, LORA_B


def write_adapter(folder: Path, adapters: Adapters, params: PyTree, *, base: str = "") -> dict[str, int]:
    """Write a folder that `peft.PeftModel.from_pretrained(model, folder)` puts beside the exported weights of the base.

    `params` are A and B. `base` is the base's repository or exported folder, by which PEFT finds it; "" if there is
    none yet. Returns {file: bytes}. Raises UserError for a GPT-2, whose matrices transformers stores together.
    """
    if family_of(adapters.graph) is FAMILIES["gpt2"]:
        fix = "Leave out --adapter: the exported weights have the adapters in them."
        raise UserError("PEFT adapts no single matrix of a GPT-2", fix=fix)
    settings = adapters.settings
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": settings.r,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({_module(adapters, path).rpartition(".")[2] for path in adapters.targets}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "adapter_config.json", config)
    weights = folder / "adapter_model.safetensors"
    save_file(adapter_tensors(adapters, params), weights, metadata={"format": "pt"})
    weights.chmod((folder / "adapter_config.json").stat().st_mode)  # safetensors makes files of its owner alone
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def adapter_tensors(adapters: Adapters, params: PyTree) -> dict[str, NDArray[Any]]:
    """Return A [rank, inputs] and B [outputs, rank] under PEFT's names, float32."""
    tensors: dict[str, NDArray[Any]] = {}
    repeated, rank = Decoder.of(adapters.graph).repeated, adapters.settings.r
    for path in adapters.targets:
        leaves: Any = params
        for name in path:
            leaves = leaves[name]
        a, b = (np.asarray(leaves[name], np.float32) for name in (LORA_A, LORA_B))
        for layer, (of_layer_a, of_layer_b) in enumerate(zip(a, b, strict=True) if repeated else [(a, b)]):
            place = "base_model.model." + _module(adapters, path).format(layer=layer)
            tensors[f"{place}.lora_A.weight"] = np.ascontiguousarray(of_layer_a.reshape(-1, rank).T)
            tensors[f"{place}.lora_B.weight"] = np.ascontiguousarray(of_layer_b.reshape(rank, -1).T)
    return tensors


def _module(adapters: Adapters, path: tuple[str, ...]) -> str:
    """The module of transformers that holds a matrix of the blocks, with {layer} in its name."""
    tensors = family_of(adapters.graph).tensors
    return tensors[".".join(("blocks", *path[1:], "kernel"))].name.removesuffix(".weight")
