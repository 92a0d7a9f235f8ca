"""Node kinds of the user's own, as docs/layers.md tells to write them."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_what_runs_and_why import changed, keys, real

from affinage.api import graph_of
from affinage.config.load import load_recipe
from affinage.errors import UserWarned
from affinage.model import ApplyConfig, apply, init_params, parse
from affinage.model.layer import LAYERS
from affinage.model.layers.dense import GATED, NORMS
from affinage.pipeline.build import build_steps
from affinage.pipeline.opening import open_model
from affinage.registry import load_named_plugins, load_plugins, plugin_files
from affinage.training.optimizer import OPTIMIZERS, SCHEDULES, learning_rate, make_optimizer
from run_affinage import refused

DOCUMENT = Path(__file__).parents[2] / "docs" / "layers.md"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The folder with the files that the document shows."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, content in re.findall(r"```\w+ (\S+)\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL):
        (tmp_path / name).write_text(content)
    yield tmp_path
    added = {"channel_mix": LAYERS, "reglu": GATED, "l1": NORMS, "signed_momentum": OPTIMIZERS, "staircase": SCHEDULES}
    for name, registry in added.items():
        registry.pop(name, None)


def check(loaded, name: str) -> None:
    runner = real(loaded, until=[name])
    runner.check(runner.plan())


def test_the_documents_optimizer_and_schedule_are_taken_by_a_recipe(written):
    loaded = load_recipe(written / "own_optimizer.yaml")
    check(loaded, "pretrain")
    settings, weights = loaded.recipe.pretrain, {"w": jnp.zeros((2, 2))}
    optimizer = make_optimizer(settings.optimizer, {"w": True})
    direction, _ = optimizer.update({"w": jnp.array([[3.0, -1.0], [0.5, -2.0]])}, optimizer.init(weights), weights)
    np.testing.assert_array_equal(direction["w"], [[1, -1], [1, -1]])
    rates = [float(learning_rate(settings.schedule, 2200)(jnp.int32(step))) for step in (1, 1000, 2199)]
    np.testing.assert_allclose(rates, [5e-4 * 2 / 110, 2.5e-4, 1.25e-4], rtol=1e-5)


def test_an_activation_and_a_norm_are_one_function_each(written):
    loaded = load_recipe(written / "my_blocks.yaml")
    refused(parse, loaded.recipe.model, loaded.locate, vocabulary=300, match="`reglu`")
    load_plugins(loaded)
    graph = parse(loaded.recipe.model, loaded.locate, vocabulary=300)
    assert parse(graph.to_dict()) == graph
    params = init_params(graph, jax.random.key(0))
    assert set(params["blocks"]["ffn_norm"]) == {"scale"}
    block, first = graph["blocks"].layer, jax.tree.map(lambda leaf: leaf[0], params["blocks"])
    x = np.asarray(apply(graph, params, {"tokens": jnp.arange(5)[None]}, ApplyConfig()).values["embed"])
    normed = x / (np.abs(x).mean(-1, keepdims=True) + block.norm.eps)
    np.testing.assert_allclose(block.norm.apply(first["ffn_norm"], jnp.asarray(x)), normed, rtol=1e-5)


def test_a_changed_plugin_changes_the_model_and_not_the_data_also_by_what_it_imports(written, capsys):
    text = (written / "my_nodes.py").read_text().replace("mix * first + (1 - mix)", "first + HALF")
    (written / "my_nodes.py").write_text(f"from halves import HALF\nprint('not data')\n{text}")
    (written / "halves.py").write_text("HALF = 0.5\n")
    recipe = partial(load_recipe, written / "my_recipe.yaml")
    with pytest.warns(UserWarned, match="my_recipe.yaml:6: the loss does not depend on mix of node `mixed`"):
        graph_of(recipe())
    before = keys(recipe(["export={}"]))
    (written / "halves.py").write_text("HALF = 0.25\n")
    after = changed(before, keys(recipe(["export={}"])))
    judged = {f"evaluate-{name}" for name in ("base", "sft", "dpo")}
    assert set(after) == {"pretrain", "sft", "ref-logprobs", "dpo", "export", "report"} | judged
    assert capsys.readouterr().out == ""


def test_a_plugin_that_is_not_there_or_fails_is_told_with_its_line(written):
    (written / "my_nodes.py").write_text("1 / 0")
    loaded = load_recipe(written / "my_recipe.yaml")
    failed = refused(load_plugins, loaded, match="ZeroDivisionError")
    (written / "my_nodes.py").write_text("def f(:")
    assert [*plugin_files(loaded)] == ["my_nodes.py"]  # what is wrong with it is told where it is loaded
    (written / "my_nodes.py").unlink()
    missing = refused(load_plugins, loaded)
    assert all(told.where.endswith("my_recipe.yaml:3") and told.fix for told in (failed, missing))


MISTAKES = {
    ("if inputs[0] != inputs[1]", "if inputs[0] / inputs[1]"): "`shape` fails: TypeError",
    ("return inputs[0]\n", "return inputs[0].dims\n"): "not a Shape",
    ('return {"mix"', 'return 1, {"mix"'): "`parameters` fails",
    ('("embed",)', '("embd",)'): "each dimension has None or one of",
    ('params["mix"]', 'params["mx"]'): "`apply` fails: KeyError: 'mx'",
    ("return mix * first + (1 - mix)", "return mix * first[:, :1]  # "): "not float32[2, 128, 128]",
}


def test_a_mistake_in_a_plugins_layer_is_one_message_with_its_node(written):
    text = (written / "my_nodes.py").read_text()
    for change, named in MISTAKES.items():
        LAYERS.pop("channel_mix", None)
        (written / "my_nodes.py").write_text(text.replace(*change))
        caught = refused(graph_of, load_recipe(written / "my_recipe.yaml"))
        assert caught.where.endswith("my_recipe.yaml:6") and "`mixed`" in caught.what and named in caught.what


def test_without_a_recipe_the_environment_names_it(written, monkeypatch):
    facts = {"graph": {"inputs": ["tokens"], "nodes": {"mixed": {"kind": "channel_mix", "in": "tokens"}}}}
    (written / "model.json").write_text(json.dumps(facts | {"precision": {}}))
    (written / "tokenizer").mkdir()
    caught = refused(open_model, str(written), written, match="unknown kind `channel_mix`")
    assert "AFFINAGE_PLUGINS=my_nodes.py affinage" in caught.fix
    monkeypatch.setenv("AFFINAGE_PLUGINS", str(written / "my_nodes.py"))
    load_named_plugins()
    assert "channel_mix" in LAYERS


@pytest.mark.parametrize("name", ["my_recipe", "my_blocks"])
def test_a_graph_that_transformers_has_not_is_refused_before_it_is_trained(written, name):
    caught = refused(check, load_recipe(written / f"{name}.yaml", ["export={}"]), "export")
    assert caught.where == "--set export" and "`export: null`" in caught.fix
    stages = [stage.name for stage in build_steps(load_recipe(written / f"{name}.yaml"))]
    assert "pretrain" in stages and "export" not in stages
