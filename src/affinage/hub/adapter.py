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
# What transformers 5 calls the weights of all experts of a layer, gate and up of each one above the other.
_EXPERTS, _GATE_UP, _DOWN = "mlp.experts", "gate_up_proj", "down_proj"


def write_adapter(folder: Path, adapters: Adapters, params: PyTree, *, base: str = "") -> dict[str, int]:
    """Write a folder that `peft.PeftModel.from_pretrained(model, folder)` puts beside the exported weights of the base.

    Args:
        folder: made if it is not there.
        adapters: of which model, and with which settings.
        params: A and B.
        base: the base's repository or exported folder, by which PEFT finds it; "" where there is none yet.

    Returns:
        {file: bytes}.

    Raises:
        UserError: a GPT-2, which has one matrix for what are three here.
    """
    family = family_of(adapters.graph)
    if family is FAMILIES["gpt2"]:
        fix = "Leave out --adapter: the exported weights have the adapters in them."
        raise UserError("GPT-2 stores query, key and value as one matrix, which PEFT adapts as one", fix=fix)
    tensors = adapter_tensors(adapters, params)
    modules = {
        _module(adapters, path).rpartition(".")[2] for path in adapters.targets if path not in adapters.of_experts
    }
    settings = adapters.settings
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": settings.r,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    config |= _config_of_experts(adapters)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "adapter_config.json", config)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod((folder / "adapter_config.json").stat().st_mode)
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def adapter_tensors(adapters: Adapters, params: PyTree) -> dict[str, NDArray[Any]]:
    """A [rank, inputs] and B [outputs, rank] under PEFT's names, float32; of experts the ranks of all in one."""
    tensors: dict[str, NDArray[Any]] = {}
    of_layers: dict[int, dict[str, tuple[NDArray[Any], NDArray[Any]]]] = {}
    for path in adapters.targets:
        for layer, (a, b) in enumerate(_of_layers(adapters, params, path)):
            if path in adapters.of_experts:
                of_layers.setdefault(layer, {})[path[-1]] = a, b
            else:
                place, rank = _PREFIX + _module(adapters, path).format(layer=layer), adapters.settings.r
                tensors[f"{place}.lora_A.weight"] = np.ascontiguousarray(a.reshape(-1, rank).T)
                tensors[f"{place}.lora_B.weight"] = np.ascontiguousarray(b.reshape(rank, -1).T)
    for layer, experts in of_layers.items():
        place = f"{_PREFIX}model.layers.{layer}.{_EXPERTS}"
        # Where a module has two such parameters, PEFT wraps the second one around the first.
        both = "down" in experts and len(experts) > 1
        if "down" in experts:
            tensors |= _as_of_a_parameter(place, *experts["down"])
        if len(experts) > ("down" in experts):
            tensors |= _as_of_a_parameter(f"{place}.base_layer" if both else place, *_gate_over_up(experts))
    return tensors


def _of_layers(adapters: Adapters, params: PyTree, path: tuple[str, ...]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    leaves = _at(params, path)
    a, b = (np.asarray(leaves[name], np.float32) for name in (LORA_A, LORA_B))
    return list(zip(a, b, strict=True)) if Decoder.of(adapters.graph).repeated else [(a, b)]


def _module(adapters: Adapters, path: tuple[str, ...]) -> str:
    """The module of transformers that holds a matrix of the blocks, with {layer} in its name."""
    tensors = family_of(adapters.graph).tensors
    return tensors[".".join(("blocks", *path[1:], "kernel"))].name.removesuffix(".weight")


def _gate_over_up(
    experts: Mapping[str, tuple[NDArray[Any], NDArray[Any]]],
) -> tuple[NDArray[Any], NDArray[Any]]:
    """A [experts, inputs, ranks] and B [experts, ranks, gate and up]: side by side, so that none reaches the other."""
    wide_a, tall_b = [], []
    for name in ("gate", "up"):
        if name in experts:
            a, b = experts[name]
            wide_a.append(a)
            tall_b.append(np.concatenate([b, np.zeros_like(b)][:: 1 if name == "gate" else -1], axis=2))
    return np.concatenate(wide_a, axis=2), np.concatenate(tall_b, axis=1)


def _as_of_a_parameter(place: str, a: NDArray[Any], b: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """From A [experts, inputs, rank] and B [experts, rank, outputs]: of PEFT's B the experts vary fastest."""
    return {
        f"{place}.lora_A.weight": np.ascontiguousarray(a.transpose(0, 2, 1).reshape(-1, a.shape[1])),
        f"{place}.lora_B.weight": np.ascontiguousarray(b.transpose(2, 1, 0).reshape(b.shape[2], -1)),
    }


def _config_of_experts(adapters: Adapters) -> dict[str, Any]:
    """PEFT's settings for parameters of experts; that of gate and up has the ranks of both."""
    names = {path[-1] for path in adapters.of_experts}
    if not names:
        return {}
    fused, settings = f"{_EXPERTS}.{_GATE_UP}", adapters.settings
    parameters = [fused] * bool(names & {"gate", "up"}) + [f"{_EXPERTS}.{_DOWN}"] * ("down" in names)
    config: dict[str, Any] = {"target_parameters": parameters}
    if names >= {"gate", "up"}:
        config |= {"rank_pattern": {fused: 2 * settings.r}, "alpha_pattern": {fused: 2 * settings.alpha}}
    return config


def _at(tree: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    for name in path:
        tree = tree[name]
    return tree
