"""Adapters in the form of PEFT: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from affinage.data.atomic import write_json
from affinage.errors import UserError
from affinage.hub.families import FAMILIES, family_of
from affinage.hub.family_spec import Decoder
from affinage.model import Adapters
from affinage.model.lora import LORA_A, LORA_B
from affinage.model.parameter import PyTree

_PREFIX = "base_model.model."
# Transformers 5 has the weights of all experts of a layer in one tensor, gate and up of each one above the other.
_EXPERTS, _GATE_UP, _DOWN = "mlp.experts", "gate_up_proj", "down_proj"
_Pair = tuple[NDArray[Any], NDArray[Any]]  # A and B of a layer


def write_adapter(folder: Path, adapters: Adapters, params: PyTree, *, base: str = "") -> dict[str, int]:
    """Write a folder that `peft.PeftModel.from_pretrained(model, folder)` puts beside the exported weights of the base.

    `params` are A and B. `base` is the base's repository or exported folder, by which PEFT finds it; "" if there is
    none yet. Returns {file: bytes}. Raises UserError for a GPT-2, which has one matrix for three of ours.
    """
    family = family_of(adapters.graph)
    if family is FAMILIES["gpt2"]:
        fix = "Leave out --adapter: the exported weights have the adapters in them."
        raise UserError("GPT-2 stores query, key and value as one matrix, which PEFT adapts as one", fix=fix)
    settings, of_experts = adapters.settings, {path[-1] for path in adapters.of_experts}
    plain = [path for path in adapters.targets if path not in adapters.of_experts]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": settings.r,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": sorted({_module(adapters, path).rpartition(".")[2] for path in plain}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if of_experts:
        fused = f"{_EXPERTS}.{_GATE_UP}"
        parameters = [fused] * bool(of_experts & {"gate", "up"}) + [f"{_EXPERTS}.{_DOWN}"] * ("down" in of_experts)
        config["target_parameters"] = parameters
        if of_experts >= {"gate", "up"}:  # the adapter of both has the ranks of both
            config |= {"rank_pattern": {fused: 2 * settings.r}, "alpha_pattern": {fused: 2 * settings.alpha}}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "adapter_config.json", config)
    weights = folder / "adapter_model.safetensors"
    save_file(adapter_tensors(adapters, params), weights, metadata={"format": "pt"})
    weights.chmod((folder / "adapter_config.json").stat().st_mode)  # safetensors makes files of its owner alone
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def adapter_tensors(adapters: Adapters, params: PyTree) -> dict[str, NDArray[Any]]:
    """Return A [rank, inputs] and B [outputs, rank] under PEFT's names, float32; experts have all ranks in one."""
    tensors: dict[str, NDArray[Any]] = {}
    of_layers: dict[int, dict[str, _Pair]] = {}
    repeated, rank = Decoder.of(adapters.graph).repeated, adapters.settings.r
    for path in adapters.targets:
        leaves: Any = params
        for name in path:
            leaves = leaves[name]
        a, b = (np.asarray(leaves[name], np.float32) for name in (LORA_A, LORA_B))
        for layer, (one_a, one_b) in enumerate(zip(a, b, strict=True) if repeated else [(a, b)]):
            if path in adapters.of_experts:
                of_layers.setdefault(layer, {})[path[-1]] = one_a, one_b
            else:
                place = _PREFIX + _module(adapters, path).format(layer=layer)
                tensors[f"{place}.lora_A.weight"] = np.ascontiguousarray(one_a.reshape(-1, rank).T)
                tensors[f"{place}.lora_B.weight"] = np.ascontiguousarray(one_b.reshape(rank, -1).T)
    for layer, experts in of_layers.items():
        place = f"{_PREFIX}model.layers.{layer}.{_EXPERTS}"
        if "down" in experts:
            tensors |= _of_a_parameter(place, *experts["down"])
            place += ".base_layer"  # if a module has two such parameters, PEFT wraps the second one around the first
        if experts.keys() - {"down"}:
            tensors |= _of_a_parameter(place, *_gate_over_up(experts))
    return tensors


def _module(adapters: Adapters, path: tuple[str, ...]) -> str:
    """The module of transformers that holds a matrix of the blocks, with {layer} in its name."""
    tensors = family_of(adapters.graph).tensors
    return tensors[".".join(("blocks", *path[1:], "kernel"))].name.removesuffix(".weight")


def _gate_over_up(experts: Mapping[str, _Pair]) -> _Pair:
    """A [experts, inputs, ranks] and B [experts, ranks, gate and up], the ranks side by side, without mixing."""
    wide_a, tall_b = [], []
    for name in ("gate", "up"):
        if name in experts:
            a, b = experts[name]
            wide_a.append(a)
            tall_b.append(np.concatenate([b, np.zeros_like(b)][:: 1 if name == "gate" else -1], axis=2))
    return np.concatenate(wide_a, axis=2), np.concatenate(tall_b, axis=1)


def _of_a_parameter(place: str, a: NDArray[Any], b: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """From A [experts, inputs, rank] and B [experts, rank, outputs]; in PEFT's B the experts vary fastest."""
    return {
        f"{place}.lora_A.weight": np.ascontiguousarray(a.transpose(0, 2, 1).reshape(-1, a.shape[1])),
        f"{place}.lora_B.weight": np.ascontiguousarray(b.transpose(2, 1, 0).reshape(b.shape[2], -1)),
    }
