"""How the verbs that use a model open it: over which devices, with which context, and how it is made to choose."""

import io
import json
import shutil
from pathlib import Path

import jax
import pytest

from affinage.pipeline.opening import import_model, open_model

PROMPTS = ["The capital of France", "La monnaie du"]
LATIN = "été".encode("latin-1").decode("utf-8", "surrogateescape")  # as Python gives the words of a command line


@pytest.fixture(scope="module")
def folder(tiny_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the tiny run, of 64 tokens, as a Hugging Face folder `theirs` and imported as `ours`."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_runs / "tiny" / "export" / "model", folder / "theirs")
    import_model(folder / "theirs", folder / "ours", "ours")
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("name", ["theirs", "ours"])
def test_weights_are_read_into_the_parts_of_a_mesh_and_say_the_same(folder: Path, name: str, affinage):
    whole = open_model(str(folder / name), folder).params
    split = open_model(str(folder / name), folder, mesh={"fsdp": 2, "tensor": 2}).params
    device = jax.devices()[0]
    held = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(split))
    assert all(leaf.addressable_data(0).devices() == {device} for leaf in jax.tree.leaves(split))
    assert held < 0.27 * sum(leaf.nbytes for leaf in jax.tree.leaves(whole))
    assert jax.tree.all(jax.tree.map(lambda a, b: (jax.device_get(a) == jax.device_get(b)).all(), whole, split))
    words = ["generate", name, *PROMPTS, "--max-new-tokens", "8", "--json"]
    said = [affinage(*words, *mesh) for mesh in ([], ["--mesh", "tensor=2"])]
    assert [status for status, _, _ in said] == [0, 0] and said[0][1] == said[1][1]
    told = [json.loads(line) for line in said[0][1].splitlines()]
    assert [one["prompt"] for one in told] == PROMPTS and {one["finish_reason"] for one in told} <= {"length", "eos"}
    assert "the context of 40" in affinage("generate", name, "x", "--max-model-len", "40")[2]
    with pytest.warns(UserWarning, match="the context of 40"):
        affinage("chat", name, "x", "--max-model-len", "40")


@pytest.mark.parametrize(("words", "held"), [
    ("chat theirs hello --mesh tensor=8", "tensor = 8"),
    ("eval ours --tasks boolq --mesh fsdp=16", "fsdp 16"),
    ("generate theirs x --mesh rows=2", "--mesh: `rows=2`"),
    ("generate theirs x --mesh tensor", "--mesh: `tensor`"),
    ("generate theirs x --max-model-len 65", "--max-model-len"),
    (f"generate theirs {'word' * 40} --max-model-len 12", "at most 11"),
    ("generate theirs x --top-p 0", "top_p = 0.0"),
    ("generate theirs LATIN", "UTF-8"),
    ("chat theirs x --system LATIN", "UTF-8"),
])  # fmt: skip
def test_what_cannot_be_is_one_message(affinage, words: str, held: str):
    status, _, said = affinage(*(word.replace("LATIN", LATIN) for word in words.split()))
    assert status == 2 and held in said and "Traceback" not in said


def test_a_prompt_is_piped_in_or_given_and_nobody_waits_for_one(affinage, monkeypatch):
    def piped(text: str, terminal: bool = False) -> tuple[int, str, str]:
        given = io.StringIO(text)
        monkeypatch.setattr(given, "isatty", lambda: terminal)
        monkeypatch.setattr("sys.stdin", given)
        return affinage("generate", "theirs", "--max-new-tokens", "4")

    assert piped(f"{PROMPTS[1]}\n") == affinage("generate", "theirs", PROMPTS[1], "--max-new-tokens", "4")
    for status, out, said in (piped("\n"), piped("never read", terminal=True)):
        assert (status, out) == (2, "") and said.startswith("Error: ") and "affinage generate MODEL" in said
