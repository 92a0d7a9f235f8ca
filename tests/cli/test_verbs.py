"""The command line as people and scripts meet it: help, messages, exit statuses, speed."""

import ast
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from affinage.cli.program import app, main
from affinage.errors import Preempted
from affinage.hardware.present import accelerator_is_here

VERBS = [
    "run", "data", "train", "sft", "eval", "compare", "generate", "chat", "export", "report", "graph", "doctor",
    "world", "import", "checkpoint",
]  # fmt: skip
TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")
PROGRAM = [sys.executable, "-c", "from affinage.cli import main; main()"]


def affinage(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=300, **options)


@pytest.fixture
def fails(capsys, tmp_path, monkeypatch):
    """Run the program in this process and return (exit status, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        return caught.value.code, capsys.readouterr().err

    return run


def test_help_lists_the_verbs_and_each_has_an_example():
    help = CliRunner().invoke(app, ["--help"]).output
    for verb in VERBS:
        assert f" {verb} " in help
        page = CliRunner().invoke(app, [verb, "--help"])
        assert page.exit_code == 0
        assert f"affinage {verb}" in page.output and "Example" in page.output


def test_help_imports_nothing_heavy_and_little():
    heavy = {"jax", "numpy", "pyarrow", "polars", "pydantic", "lm_eval", "transformers", "torch"}
    code = (
        "import sys; from affinage.cli import main\n"
        "try: main(['--help'])\n"
        f"except SystemExit: found = [name for name in {heavy} if name in sys.modules]\n"
        "print(found, len(sys.modules), file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    found, _, modules = shown.stderr.strip().rpartition(" ")
    assert found == "[]" and int(modules) < 500  # of which its quickness is made


ENTERED = """
import os, sys, typer
from affinage.cli.program import app
found = {}
def enter(group):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            enter(command)
        else:
            command.params = []
            command.callback = lambda name=name: found.update({name: os.environ.get("JAX_PLATFORMS")})
            command.no_args_is_help = False
def paths(group, before=()):
    for name, command in group.commands.items():
        yield from paths(command, (*before, name)) if hasattr(command, "commands") else [[*before, name]]
program = typer.main.get_command(app)
enter(program)
for words in paths(program):
    os.environ.pop("JAX_PLATFORMS", None)
    program(words, standalone_mode=False)
    assert "jax" not in sys.modules
print(found)
"""


FROM_PYTHON = """
import os
from affinage.api import graph_of, recipe
graph_of(recipe("quickstart"))
print({"graph_of": os.environ.get("JAX_PLATFORMS")})
"""


@pytest.mark.skipif(accelerator_is_here(), reason="JAX then looks for what is here")
@pytest.mark.parametrize(("code", "some"), [(ENTERED, {"run", "chat", "serve", "ls"}), (FROM_PYTHON, {"graph_of"})])
def test_where_libtpu_is_and_no_tpu_nothing_looks_for_one(tmp_path, code, some):
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").touch()
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    found = ast.literal_eval(shown.stdout)
    assert found.keys() >= some and set(found.values()) == {"cpu"}


def test_an_estimate_for_a_tpu_needs_no_library_of_accelerators(tmp_path):
    code = (
        "import sys; from affinage.cli import main\n"
        "sys.modules |= dict.fromkeys(['libtpu', 'jax_cuda12_plugin'])  # importing them is an ImportError\n"
        "main(['plan', 'gpt2-124m', '--on', 'v4-8'])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert shown.returncode == 0 and "gpt2-124m on v4-8" in shown.stdout, shown.stderr


def test_planning_data_needs_no_jax(tmp_path):
    code = f"import sys; from affinage.cli import main\ntry: main(['data', {TINY!r}, '--dry-run'])\nfinally: "
    shown = subprocess.run(
        [sys.executable, "-c", code + "print('jax' in sys.modules)"], capture_output=True, text=True, cwd=tmp_path
    )
    assert "stages would run" in shown.stdout and shown.stdout.rstrip().endswith("False")
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quickstrat", "--on", "v4-8"], "no run named `quickstrat`"),
        (["quickstart", "--on", "v9-8"], "no slice is called `v9-8`"),
        (["quickstart", "--on", "v4-8", "--set", "pretrain.stesp=1"], "`pretrain.stesp` is not a setting"),
    ],
)
def test_a_mistake_in_what_is_planned_is_told_before_jax_is_imported(tmp_path, words, message):
    code = f"import sys; from affinage.cli import main\ntry: main({['plan', *words]!r})\nfinally: "
    shown = subprocess.run(
        [sys.executable, "-c", code + "print('jax' in sys.modules)"], capture_output=True, text=True, cwd=tmp_path
    )
    assert message in shown.stderr and shown.stdout.rstrip().endswith("False")


def test_dry_run_as_json(tmp_path):
    shown = affinage("run", TINY, "--dry-run", "--json", "--until", "clean", cwd=tmp_path)
    rows = json.loads(shown.stdout)
    assert [row["stage"] for row in rows] == ["world", "collect", "clean"]
    assert rows[0]["runs"] and rows[0]["reason"] == "never ran"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["run", "quickstrat"], 2, "Error: there is no recipe named `quickstrat`\n  Did you mean `quickstart`?"),
        (["run", "quickstart", "--set", "pretrain.stesp=1"], 2, "Error: --set pretrain.stesp: `pretrain.stesp` is not"),
        (["run", "quickstart", "--until", "rowz"], 2, "this recipe has no stage `rowz`"),
        (["run", "quickstart", "--force", "x"], 2, "this recipe has no stage `x`"),
        (["sft", "quickstart", "--set", "sft=null"], 2, "this recipe has no stage `sft`"),
        (["chat", "nobody"], 2, "there is no model `nobody`\n  There are no trained models in runs."),
        (["generate", "a@b", "x"], 2, "`@b` is no checkpoint"),
        (["eval", "runs/x"], 2, "no task was named"),
        (["eval", "quickstart", "--tasks", "piqa,boolq", "--data-dir", "no"], 2, "there is no `no`"),
        (["eval", "quickstart", "--tasks", "boolq", "--data-dir", "."], 2, "no items of `boolq` in ."),
        (["compare", "nobody", "no one"], 2, "there are no results of `nobody`"),
        (["run", "quickstart", "--set", "name=store"], 2, "`store` is where results are kept"),
        (["run", "quickstart", "--set", "data=null"], 2, "no `data` section"),
        (["graph", "quickstart", "--set", "model.nodes.embed.kind=embeding"], 2, "--set model.nodes.embed.kind:"),
        (
            ["train", "quickstart", "--set", "model.nodes.blocks.attention.heads=5"],
            2,
            "with --set model.nodes.blocks.attention.heads=5: node `blocks` (transformer_block): width 128",
        ),
        (["graph", "quickstart", "--set", "model.nodes.embed.width=99"], 2, "with --set model.nodes.embed.width=99: "),
        (["train", "quickstart", "--set", "model.nodes.embed.vocab=99"], 2, "the tokenizer will have 3072 pieces"),
        (["train", "quickstart", "--set", "pretrain.mixture={pocket-wrld: 1}"], 2, "Did you mean `pocket-world`?"),
        (["data", "quickstart", "--set", "rows.url=nowhere://x"], 2, "Protocol not known: nowhere"),
        (["train", "quickstart", "--set", "mesh={data: 3}"], 2, "batch 8 does not divide"),
        (["train", "quickstart", "--set", "mesh={tensor: 8}"], 2, "does not divide over tensor = 8"),
        (["train", "quickstart", "--set", "mesh={pipeline: 2}"], 2, "3 layers of `blocks` do not divide into 2 stages"),
        (["sft", "quickstart", "--set", "sft.sources=[no.jsonl]"], 2, "--set sft.sources: there is no `no.jsonl`"),
        (["run", "quickstart", "--set", "evaluate.tasks=[a/b.yaml]"], 2, "there is no `a/b.yaml`"),
        (["data", "quickstart", "--set", "data.sources=[no/]"], 2, "Error: --set data.sources: no such file"),
        (["graph", "quickstart", "--json", "--mermaid"], 2, "--json, --mermaid and --svg are three outputs"),
        (["data", "quickstart", "--set", "data.sources=[no/]"], 2, "Put it there, or name text of yours"),
        (["run"], 2, "Missing argument"),
        (["run"], 2, "For example: affinage run quickstart"),
        (["data", "where"], 2, "For example: affinage data where quickstart"),
        (["data", "where", "quickstart"], 2, "For example: affinage data where quickstart"),
        (["rum"], 2, "No such command"),
    ],
)
def test_mistakes_end_in_one_message_and_status_2(fails, arguments, status, message):
    code, said = fails(*arguments)
    assert code == status
    assert message in said
    assert "Traceback" not in said


def test_debug_shows_where_it_came_from_wherever_it_stands(fails):
    for arguments in (["--debug", "run", "nothing"], ["run", "nothing", "--debug"]):
        code, said = fails(*arguments)
        assert code == 2 and "Traceback" in said and "there is no recipe" in said


def test_other_endings_have_their_own_status(fails, monkeypatch):
    def raising(error: BaseException):
        def verb(*arguments: object) -> None:
            raise error

        return verb

    for error, status, message in [
        (Preempted("SIGTERM at step 3"), 75, "Stopped: SIGTERM at step 3. Run the same command to go on."),
        (KeyboardInterrupt(), 130, ""),
        (ModuleNotFoundError("no", name="transformers.models"), 2, "pip install 'affinage[verify]'"),
    ]:
        monkeypatch.setattr("affinage.cli.talk.opened", raising(error))
        code, said = fails("chat", "m", "hello")
        assert code == status and message in said
    monkeypatch.setattr("affinage.cli.talk.opened", raising(ModuleNotFoundError("no", name="affinage.nothing")))
    code, said = fails("chat", "m", "hello")  # a defect of ours is not dressed up as the user's
    assert code == 1 and "Traceback" in said and "pip install" not in said
    monkeypatch.setenv("HF_TOKEN", "a-token-of-somebody")
    monkeypatch.setattr("affinage.cli.talk.opened", raising(RuntimeError("refused: a-token-of-somebody")))
    code, said = fails("chat", "m", "hello")
    assert code == 1 and "RuntimeError: refused: ***" in said and "of-somebody" not in said


def test_told_to_stop_while_a_data_stage_runs(tmp_path):
    started = subprocess.Popen(
        [*PROGRAM, "data", TINY, "--set", "data.sources=[{path: pocket-world, megabytes: 60}]"],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("runs/store/world-*/request.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    _, said = started.communicate(timeout=300)
    assert started.returncode == 75
    assert "Run the same command to go on." in said


def test_colours_only_for_people():
    shown = affinage("run", "nothing", env=os.environ | {"NO_COLOR": "1"})
    assert "\x1b" not in shown.stdout + shown.stderr
    assert "\x1b" not in affinage("--help").stdout


def test_graph_prints_what_a_model_costs():
    shown = CliRunner().invoke(app, ["graph", "quickstart"]).output
    assert "transformer_block × 3" in shown and "1,426,304" in shown
    rows = json.loads(CliRunner().invoke(app, ["graph", "quickstart", "--json"]).output)
    assert rows["nodes"][-1]["parameters"] == 1_426_304 and rows["batch"] == 8
    assert rows["parameters"]["total"] == rows["parameters"]["active"] == 1_426_304
    assert f"{rows['parameters']['embedding']:,} in embeddings" in shown
    total, memory = rows["nodes"][-1], rows["memory"]
    assert f"{total['training_flops_all_pairs']:.4g} if attention counts" in shown
    assert total["training_flops"] < total["training_flops_all_pairs"]
    assert "cache of one row" in shown and memory["cache_of_a_row"] > 0
    assert all(
        f"({policy})" in shown and memory["activations"][policy] > 0 for policy in ("none", "dots", "block", "full")
    )
    assert CliRunner().invoke(app, ["graph", "quickstart", "--mermaid"]).output.startswith("flowchart TD\n")


def test_graph_draws_the_learning_rates():
    words = ["graph", "gpt2-124m", "--schedule", "--set", "pretrain.steps=1000"]
    words += ["--set", "pretrain.schedule={name: cosine, peak: 1.0e-3, floor: 1.0e-4, warmup_steps: 100}"]
    rates = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)["pretrain"]
    by_step = {row["step"]: row["learning_rate"] for row in rates}
    # The last step of the warm-up and the last of all are among those that are shown.
    assert by_step[99] == pytest.approx(1e-3) and by_step[999] == pytest.approx(1e-4, rel=1e-2)
    for step, rate in by_step.items():
        falling = 1e-4 + 0.45e-3 * (1 + math.cos(math.pi * (step - 100) / 900))
        assert rate == pytest.approx(1e-3 * (step + 1) / 100 if step < 100 else falling, rel=2e-2), step
    drawn = CliRunner().invoke(app, words).output
    assert drawn.startswith("pretrain: learning rate by step")
    bars = {int(line.split()[0].replace(",", "")): line.count("█") for line in drawn.splitlines()[1:]}
    assert bars.keys() == by_step.keys() and max(bars.values()) == bars[99] == 48
    assert all(bars[step] == round(48 * rate / 1e-3) for step, rate in by_step.items())


def test_graph_of_a_model_of_images():
    shown = CliRunner().invoke(app, ["graph", "byol-digits"]).output
    assert "256 examples" in shown and "token" not in shown and "cache" not in shown
    facts = json.loads(CliRunner().invoke(app, ["graph", "byol-digits", "--json"]).output)
    training = {row["name"]: row["training_flops"] / row["flops"] for row in facts["nodes"] if row["flops"]}
    assert training["target"] == 1 and training["projector"] == 3 and facts["context"] is None


def test_doctor_works_without_a_network(tmp_path):
    offline = os.environ | {"https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    facts = json.loads(affinage("doctor", "--json", cwd=tmp_path, env=offline).stdout)
    assert facts["devices"][0]["platform"] == "cpu"
    assert facts["network"] == {"https://huggingface.co": False}
    assert facts["machine"]["disk_free_bytes"] > 0
    assert facts["versions"]["jax"]
