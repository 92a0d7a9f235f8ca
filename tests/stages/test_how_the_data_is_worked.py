"""How the data stages are carried out is in no stage's key, and published tokenizers are measured in a stage apart."""

from pathlib import Path

import pytest

from affinage.errors import UserError
from affinage.recipe.load import load_recipe
from affinage.stages.flow import Flow, Runs
from affinage.stages.foresight import check
from affinage.stages.road import road_of

RECIPE = """\
name: small
model: {inputs: [tokens], nodes: {embed: {kind: embedding, in: tokens}}}
data: {sources: [texts.txt]}
pretrain: {steps: 20, batch: 8, schedule: {peak: 1e-3, floor: 1e-4}}
"""


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "texts.txt").write_text("some text")

    def keys(*overrides: str) -> dict[str, str]:
        loaded = load_recipe("r.yaml", overrides)
        return {step.stage.name: step.request.key for step in Flow(loaded, Runs(tmp_path), road_of(loaded)).plan()}

    return keys


def test_engine_workers_and_memory_change_no_key(keys):
    ray = ["data.engine=ray", "data.ray_address=h:1", "data.ray_open_cluster=true"]
    assert keys() == keys(*ray, "data.workers=3", "data.memory_megabytes=9")


def test_tokenizers_to_compare_with_change_no_other_key(keys, tmp_path):
    published = tmp_path / "theirs.model"
    published.write_bytes(b"1")
    with_one = keys(f"tokenizer.compare=[{published}]")
    assert {name: key for name, key in with_one.items() if name != "compare-tokenizers"} == keys()
    published.write_bytes(b"2")
    assert keys(f"tokenizer.compare=[{published}]")["compare-tokenizers"] != with_one["compare-tokenizers"]


def test_a_tokenizer_that_is_not_there_is_told_before_anything_runs(keys):
    keys()
    with pytest.raises(UserError, match=r"theirs\.model"):
        check(load_recipe("r.yaml", ["tokenizer.compare=[theirs.model]"]), {"compare-tokenizers"})
