"""The tensors of exports beside what vLLM's models load, read from its source: importing it takes a GPU.

pip download vllm --no-deps && VLLM_WHEEL=vllm-*.whl pytest -m full tests/hub/test_vllm_names.py
"""

import ast
import os
import re
import zipfile
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from test_import import GRAPHS

from affinage.hub.families import family_of
from affinage.model import parse

WHEEL = os.environ.get("VLLM_WHEEL", "")
MODULES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gpt2")
HAS_WEIGHTS = re.compile(r"(Linear|Norm|Embedding|LMHead)$")  # vLLM's and torch's layers that do, by their names

pytestmark = [pytest.mark.full, pytest.mark.skipif(not WHEEL, reason="needs a wheel of vLLM in VLLM_WHEEL")]


@pytest.fixture(scope="module")
def classes() -> dict[str, ast.ClassDef]:
    """vLLM's classes of the families, also by the names under which others import them."""
    by_name: dict[str, ast.ClassDef] = {}
    with zipfile.ZipFile(WHEEL) as wheel:
        trees = [ast.parse(wheel.read(f"vllm/model_executor/models/{name}.py")) for name in MODULES]
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.ClassDef):
            by_name[node.name] = node
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.ImportFrom):
            imported = [each for each in node.names if each.asname and each.name in by_name]
            by_name |= {str(each.asname): by_name[each.name] for each in imported}
    return by_name


class Loaded(NamedTuple):
    """What the classes of a model say of the names that they load."""

    attributes: set[str]  # names of modules, and of the matrices of an expert
    with_weights: set[str]  # those of layers with weights
    renamed: dict[str, str]  # part of a name -> part of the name of the module that has it


def loaded_by(architecture: str, classes: dict[str, ast.ClassDef]) -> Loaded:
    reached, loaded = [classes[architecture]], Loaded(set(), set(), {})
    for reading in reached:  # grows
        for node in ast.walk(reading):
            if isinstance(node, ast.Name) and node.id in classes and classes[node.id] not in reached:
                reached.append(classes[node.id])
            if isinstance(node, ast.Assign):
                targets = [each for target in node.targets for each in ast.walk(target)]
                names = {each.attr for each in targets if isinstance(each, ast.Attribute)}
                loaded.attributes.update(names)
                layer: Any = getattr(node.value, "func", None)
                if HAS_WEIGHTS.search(getattr(layer, "id", getattr(layer, "attr", ""))):
                    loaded.with_weights.update(names)
            if isinstance(node, ast.keyword) and node.arg == "ckpt_names":
                loaded.attributes.update(ast.literal_eval(node.value))
                loaded.with_weights.update(ast.literal_eval(node.value))
            if isinstance(node, ast.keyword) and node.arg == "orig_to_new_stacked":
                loaded.renamed.update({old: new for old, (new, _) in ast.literal_eval(node.value).items()})
    return loaded


@pytest.mark.parametrize("name", GRAPHS)
def test_vllm_has_a_place_for_every_tensor_and_a_tensor_for_every_place(name: str, classes: dict[str, ast.ClassDef]):
    graph = parse(GRAPHS[name])
    family, filled = family_of(graph), set[str]()
    params = jax.tree.map(lambda declared: np.zeros(declared.shape, np.float32), graph.parameters)
    loaded, exported = loaded_by(family.architecture, classes), family.to_tensors(params, graph)
    for tensor in exported:
        place = re.sub("|".join(map(re.escape, loaded.renamed)) or "$^", lambda part: loaded.renamed[part[0]], tensor)
        *modules, kind = place.split(".")
        assert kind in ("weight", "bias")
        assert [each for each in modules if not each.isdigit() and each not in loaded.attributes] == [], tensor
        filled.add(modules[-1])
    optional = {"lm_head"} if graph[graph.logits].layer.shares else set()
    if family.model_type != "qwen3":
        optional |= {"q_norm", "k_norm"}
    assert loaded.with_weights - filled <= optional
    assert all(any(old in tensor for tensor in exported) for old in loaded.renamed)
