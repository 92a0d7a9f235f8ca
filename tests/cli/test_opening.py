"""How the verbs that use a model open it: over which devices, with which context, and how it is made to choose."""

import io
import json
import shutil
from pathlib import Path

import jax
import pytest

from affinage.pipeline.opening import import_model, open_model

PROMPTS = ["The capital of France", "La monnaie du"]
LONG = 5000  # tokens, of a context
LATIN = "été".encode("latin-1").decode("utf-8", "surrogateescape")  # as Python gives the words of a command line


@pytest.fixture(scope="module")
def folder(tiny_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the tiny run, of 64 tokens, a Hugging Face folder `theirs` and imported as `ours`; `long` says that
    it takes 5,000."""
    folder, exported = tmp_path_factory.mktemp("models"), tiny_runs / "tiny" / "export" / "model"
    for name in ("theirs", "long"):
        shutil.copytree(exported, folder / name)
    import_model(folder / "theirs", folder / "ours", "ours")
    config = json.loads((folder / "long" / "config.json").read_text())
    (folder / "long" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    return folder


@pytest.fixture
def affinage(affinage, folder: Path, monkeypatch):
    """The program, where the models are."""
    monkeypatch.chdir(folder)
    return affinage


@pytest.mark.parametrize("name", ["theirs", "ours"])
def test_weights_are_read_into_the_parts_of_a_mesh(folder: Path, name: str):
    whole = open_model(str(folder / name), folder).params
    split = open_model(str(folder / name), folder, mesh={"fsdp": 2, "tensor": 2}).params
    device = jax.devices()[0]
    held = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(split))
    assert all(leaf.addressable_data(0).devices() == {device} for leaf in jax.tree.leaves(split))
    assert held < 0.27 * sum(leaf.nbytes for leaf in jax.tree.leaves(whole))
    assert jax.tree.all(jax.tree.map(lambda a, b: (jax.device_get(a) == jax.device_get(b)).all(), whole, split))


def test_a_model_over_a_mesh_says_the_same(affinage):
    words = ["generate", "ours", *PROMPTS, "--max-new-tokens", "8", "--json"]
    said = [affinage(*words, *mesh) for mesh in ([], ["--mesh", "tensor=2"])]
    assert [status for status, _, _ in said] == [0, 0] and said[0][1] == said[1][1] != ""


@pytest.mark.parametrize(
    ("words", "held"),
    [
        ("chat theirs hello --mesh tensor=8", "tensor = 8"),
        ("eval ours --tasks boolq --mesh fsdp=16", "fsdp 16"),
        ("generate theirs x --mesh rows=2", "--mesh: `rows=2`"),
        ("generate theirs x --mesh tensor", "--mesh: `tensor`"),
        ("generate theirs x --max-model-len 65", "--max-model-len"),
        (f"generate theirs {'word' * 40} --max-model-len 12", "at most 11"),
        ("generate theirs x --top-p 0", "top_p = 0.0"),
        ("generate theirs LATIN", "UTF-8"),
        ("chat theirs x --system LATIN", "UTF-8"),
    ],
)
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
