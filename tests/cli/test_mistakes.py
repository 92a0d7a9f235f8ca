"""A mistake ends with status 2 and one message that names the place or the nearest name; nothing is left behind."""

import json
import logging
import re
import shlex
from pathlib import Path

import pytest

from affinage.errors import Preempted

TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")

# What is typed, and what the message holds.
WRONG_NAMES = """
run quickstrat                                                     `quickstart`
run quickstart --set name=store                                    `store`
sft quickstart --set sft.sources=[no.jsonl]                        --set sft.sources: | no.jsonl
run quickstart --set dpo.from_step=9999                            --set dpo.from_step: | no step 9999
run quickstart --set data.sources=[]                               --set data.sources: | `[]` | must be at least 1
data lineage quickstart                                            --step
chat nobody                                                        `nobody`
generate a@b x                                                     `a@b`
eval runs/x                                                        `runs/x`
compare nobody no-one                                              `nobody`
sweep TINY                                                         sweep
launch quickstart --processes 2 --min-processes 2                  Ray
launch quickstart --processes 2 --min-processes 3 --on ray         --processes 2
export quickstart --base x                                         --adapter
train quickstart --set model.nodes.blocks.attention.heads=5        `blocks`
train quickstart --set model.nodes.embed.vocab=99                  3072
train quickstart --set mesh={data: 3}                              batch 8
plan quickstart --on ""                                            ``
checkpoint ls small --runs gs://bucket/runs                        --runs | gs://bucket/runs
train quickstart --runs a[1]                                       /a[1]/ | `[`
run quickstart --set base=novels                                   --set base | in a file
train                                                              RECIPE
"""
# In a folder where they are.
BROKEN = """
run empty.yaml                                                     empty.yaml
run latin.yaml                                                     latin.yaml | UTF-8
sweep grid.yaml                                                    grid.yaml:3 | pretrain.schedule.peak_lr
run LONG.yaml                                                      there is no recipe
data TINY --runs file                                              file
report damaged                                                     recipe.json
compare damaged damaged                                            recipe.json
compare cut cut                                                    quiz.jsonl
compare other other                                                quiz.jsonl
compare step step                                                  step: | no model
generate imported hello                                            model.json
import bare --to model                                             bare
import https://hub/gpt2 --to model                                 https://hub/gpt2: a model is named
world file                                                         file
world dangling/x                                                   dangling: | a link
new a/b                                                            `a/b`
"""


def table(text: str) -> list:
    rows = [re.split(r"  +", line) for line in text.strip().splitlines()]
    return [pytest.param(words, held.split(" | "), id=words) for words, held in rows]


def refused(affinage, line: str, held: list[str]) -> None:
    line = re.sub(r"--set (.*?)(?= --|$)", lambda found: f"--set {shlex.quote(found[1])}", line)
    words = [word.replace("TINY", TINY).replace("LONG", "a" * 300) for word in shlex.split(line)]
    status, out, said = affinage(*words)
    assert (status, out) == (2, "")
    assert "Traceback" not in said and said.count("Error") == 1
    flat = " ".join(re.sub("[│╭╮╰╯─]", " ", said).split())
    assert [each for each in held if each not in flat] == [], flat


@pytest.mark.parametrize(("line", "held"), table(WRONG_NAMES))
def test_a_wrong_name_or_setting(line: str, held: list[str], affinage, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(affinage, line, held)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "empty.yaml").touch()
    (folder / "latin.yaml").write_bytes(b"name: \xff\xfe\n")
    (folder / "grid.yaml").write_text(f"base: {TINY}\nname: grid\nsweep:\n  pretrain.schedule.peaklr: [0.1, 0.2]\n")
    (folder / "file").touch()
    for name in ("runs/damaged", "runs/bare", "bare", "imported/tokenizer", "cut/items", "other/items", "step"):
        (folder / name).mkdir(parents=True)
    (folder / "runs" / "damaged" / "recipe.json").write_text("{")
    for name, content in (("cut", "{"), ("other", '{"id": 1}')):
        (folder / name / "items" / "quiz.jsonl").write_text(content)
    (folder / "dangling").symlink_to("nowhere")
    (folder / "imported" / "model.json").write_text("{")
    request = {"step": "split", "version": 1, "settings": {}, "inputs": {}, "sources": {}}
    (folder / "step" / "request.json").write_text(json.dumps(request))
    return folder


@pytest.mark.parametrize(("line", "held"), table(BROKEN))
def test_a_broken_file(line: str, held: list[str], affinage, broken: Path, monkeypatch):
    monkeypatch.chdir(broken)
    before = sorted(broken.rglob("*"))
    refused(affinage, line, held)
    assert sorted(broken.rglob("*")) == before, "nothing is left behind"


def test_debug_shows_where_it_came_from_and_no_library_logs_its_error_beside_the_message(affinage):
    for words in (["--debug", "run", "nothing"], ["run", "nothing", "--debug"]):
        status, _, said = affinage(*words)
        assert status == 2 and "Traceback" in said
    assert not logging.getLogger("gcsfs").isEnabledFor(logging.ERROR)


@pytest.mark.parametrize(("error", "status", "held", "not_held"), [
    (Preempted("SIGTERM at step 3"), 75, "SIGTERM at step 3", "Traceback"),
    (KeyboardInterrupt(), 130, "", "Traceback"),
    (ModuleNotFoundError("no", name="affinage.nothing"), 1, "Traceback", "pip install"),  # a defect of ours
    (RuntimeError("refused: a-token-of-somebody"), 1, "RuntimeError: refused: ***", "of-somebody"),
], ids=lambda each: type(each).__name__ if isinstance(each, BaseException) else "")  # fmt: skip
def test_each_ending_has_its_status(error, status, held, not_held, affinage, monkeypatch):
    def opened(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setenv("HF_TOKEN", "a-token-of-somebody")
    monkeypatch.setattr("affinage.cli.models.opened", opened)
    found, _, said = affinage("chat", "m", "hello")
    assert found == status and held in said and not_held not in said
