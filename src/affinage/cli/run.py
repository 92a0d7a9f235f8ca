"""Verbs that run the steps of a recipe, here or in several processes; and the report of what they made."""

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from affinage.cli import terminal
from affinage.cli.terminal import PipelineOptions, arg, emit, find, load, only_data_on_stdout, opt, write
from affinage.cluster.processes import init_distributed
from affinage.errors import UserError
from affinage.json_files import whole_folder
from affinage.stopping import StopSignals, without_readers

if TYPE_CHECKING:
    from affinage.pipeline.models import Target


@terminal.app.command()
def run(
    recipe: terminal.RecipeArgument,
    until: terminal.UntilOption = None,
    overrides: terminal.SetOption = None,
    runs: terminal.RunsOption = terminal.RUNS,
    force: terminal.ForceOption = None,
    dry_run: terminal.DryRunOption = False,
    as_json: terminal.JsonOption = False,
) -> None:
    """Run a recipe, from raw text to the report. Steps that are complete are not run again.

    Example: affinage run quickstart --set pretrain.steps=200
    """
    run_pipeline(recipe, PipelineOptions(overrides, runs, force, dry_run, as_json), until or ())


def verb_until(name: str, steps: Sequence[str], rows: str, help: str, group: typer.Typer = terminal.app) -> None:
    """Register a verb that runs a recipe up to those of `steps` that it has, or shows those of its step `rows`."""

    @group.command(name, help=help)
    def verb(
        recipe: terminal.RecipeArgument,
        show: Annotated[int | None, opt("Only prepare the data, and show N examples.", min=1, metavar="N")] = None,
        overrides: terminal.SetOption = None,
        runs: terminal.RunsOption = terminal.RUNS,
        force: terminal.ForceOption = None,
        dry_run: terminal.DryRunOption = False,
        as_json: terminal.JsonOption = False,
    ) -> None:
        options = PipelineOptions(overrides, runs, force, dry_run, as_json)
        folder = run_pipeline(recipe, options, (rows,) if show else steps, any_of=True)
        if not show or dry_run:
            return
        from affinage.data.tokenizer import Tokenizer
        from affinage.pipeline.models import made_from
        from affinage.report.examples import show_examples

        tokenizer = made_from((folder / rows).resolve(), "train-tokenizer")
        if tokenizer is None:
            raise UserError("the tokenizer of this data is gone", where=str(folder / rows), fix="Run the recipe again.")
        with only_data_on_stdout(as_json):
            for title, example in show_examples(folder / rows, Tokenizer(tokenizer), show):
                write(f"\n{title}: what is trained on stands between ⟦ and ⟧")
                write(example)


for _name, _step, _data, _until, _example in (
    ("train", "pretrain", "tokenize", "pretraining", "--set pretrain.steps=200"),
    ("sft", "sft", "sft-data", "supervised fine-tuning", "--show 3"),
    ("dpo", "dpo", "preference-data", "direct preference optimization", "--set dpo.beta=0.3"),
):
    _help = f"Run up to the end of {_until}: `run --until {_step}`; or show what it would be trained on."
    verb_until(_name, (_step,), _data, f"{_help}\n\nExample: affinage {_name} quickstart {_example}")


@terminal.app.command()
def launch(
    recipe: terminal.RecipeArgument,
    processes: Annotated[int, opt("Number of processes that train together.", min=1, metavar="N")],
    on: Annotated[Literal["local", "ray"], opt("On this machine, or on a Ray cluster.")] = "local",
    devices: Annotated[int | None, opt("Devices that the CPU of each process simulates.", min=1, metavar="N")] = None,
    overrides: terminal.SetOption = None,
    runs: terminal.RunsOption = terminal.RUNS,
    until: terminal.UntilOption = None,
    max_failures: Annotated[int, opt("Restarts after a process was killed or failed.", min=0)] = 10,
    grace: Annotated[float, opt("Seconds to save in when this program is stopped.", min=1)] = 35.0,
    address: Annotated[str, opt("ray: of the cluster (auto, HOST:6379); default: one on this machine.")] = "",
    min_processes: Annotated[int | None, opt("ray: go on with this many machines.", min=1, metavar="N")] = None,
) -> None:
    """Run a recipe in several processes, and start them again when one is lost.

    All processes must see the same folder of runs, unless `runtime.remote` is a gs:// URL. For Slurm, GKE and others
    see docs/clusters.md.

    Example: affinage launch quickstart --processes 2 --devices 4 --set mesh.data=auto
    """
    if on == "local" and (address or min_processes):
        raise UserError("--address and --min-processes are for Ray", where="--on local", fix="Write --on ray.")
    if min_processes is not None and min_processes > processes:
        fix = f"Write {processes} at most."
        raise UserError(f"more than --processes {processes}", where=f"--min-processes {min_processes}", fix=fix)
    loaded, run = load(recipe, overrides, runs)  # a mistake is reported once, before anything is started
    from affinage.cluster.launch import WorkerGroup, start_local, supervise
    from affinage.pipeline.models import RECIPE

    file = (loaded.path if run is None else run / RECIPE).resolve()
    words = ["run", str(file), "--runs", str(runs.absolute()), *_words("--set", overrides), *_words("--until", until)]
    say = partial(print, flush=True)
    with contextlib.ExitStack() as cleanup:
        start: Callable[..., WorkerGroup] = partial(start_local, workers=processes, devices=devices, say=say)
        if on == "ray":
            from affinage.cluster.ray_launch import RayLauncher
            from affinage.registry import plugin_files

            paths = [*loaded.files, *(file for files in plugin_files(loaded).values() for file in files)]
            files = {os.fspath(path.resolve()): path.read_bytes() for path in paths}
            cluster: Any = {"address": address, "min_workers": min_processes, "devices": devices}
            launcher = RayLauncher(processes, files=files, say=say, **cluster)
            start = cleanup.enter_context(contextlib.closing(launcher)).start
        status = supervise(start, words, max_failures=max_failures, grace=grace, say=say)
    raise typer.Exit(status)


@terminal.app.command()
def world(
    folder: Annotated[Path, arg("FOLDER", "Where to write; must not be there.")],
    megabytes: Annotated[float, opt("How much text, in 1e6 bytes.", min=0.01)] = 3.0,
    seed: Annotated[int, opt("Seed of the texts.", min=0)] = 0,
) -> None:
    """Write the pocket world into a folder: documents, conversations, preference pairs and benchmarks.

    Example: affinage world my_world --megabytes 10
    """
    from affinage.data.synthetic import write_world

    terminal.must_be_new(folder)
    with terminal.working("the pocket world"), whole_folder(folder) as made:
        write_world(made, megabytes=megabytes, seed=seed)
    print(f"The pocket world is in {folder}.")


@terminal.app.command()
def report(
    run: terminal.RunArgument,
    runs: terminal.RunsOption = terminal.RUNS,
    lang: terminal.LangOption = None,
    out: Annotated[Path | None, opt("Where to write; default: in the run.", "--out", metavar="FILE")] = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Write the report of a run, one HTML file. With --out, a run that is not complete has a report of what there is.

    Example: affinage report quickstart --lang fr --out rapport.html
    """
    from affinage.pipeline.models import check_complete, run_of, untrained

    target = find(run, runs)
    folder = run_of(target, runs)
    if out is None:
        check_complete(target, runs, instead="For a report of what there is, name a file: --out report.html")
    elif missing := untrained(folder):
        terminal.warn(f"`{run}` is not complete; to train: {', '.join(missing)}")
    os.environ["JAX_PLATFORMS"] = "cpu"  # only shapes are computed: the accelerator is not taken
    from affinage.report import write_report

    file = out or folder / "report.html"
    facts = write_report(folder, file, lang)
    emit({"report": str(file), **facts}, as_json, [facts["summary"], f"The report is in {file}."])


def run_pipeline(
    name: str, options: PipelineOptions, until: Sequence[str], *, any_of: bool = False, only: Sequence[str] = ()
) -> Path:
    """Run the steps of a recipe, or of a run's recipe, until some of them; show them and return the run's folder.

    With `any_of`, steps of `until` that the recipe does not have are left out, as long as it has one of them. With
    `only`, no other steps run and no result is printed; UserError: others are not complete.
    """
    with StopSignals(), without_readers():  # a signal that comes while the recipe is read has nothing to save
        loaded, run_folder = load(name, options.overrides, options.runs)
        runs = options.runs if run_folder is None else run_folder.parent  # a run named by its path is run where it is
        from affinage.cli.watch import Watch, show_plan, show_result
        from affinage.pipeline.build import build_steps
        from affinage.pipeline.models import command
        from affinage.pipeline.runner import PipelineRunner

        steps, recipe = build_steps(loaded), loaded.recipe
        if not steps:
            what = "this recipe has none of `data`, `sft` and `dpo`, so there is nothing to run"
            raise UserError(what, where=str(loaded.path), fix=f"`{command('graph', name)}` shows its model.")
        if any_of:
            until = [step for step in until if step in {each.name for each in steps}] or until
        runner = PipelineRunner(loaded, runs, steps, until=until, force=options.force or ())
        if options.dry_run:
            plan = runner.plan()
            runner.check(plan)
            show_plan(plan, options.as_json)
            return runner.folder
        with init_distributed(recipe.runtime.heartbeat_timeout) as processes, only_data_on_stdout(options.as_json):
            if not processes.first:
                runner.follow()
                return runner.folder
            plan = runner.plan()
            waiting = [step.name for step in plan if not step.complete]
            if only and (before := [step for step in waiting if step not in only]):
                words = [*_words("--set", options.overrides), *_words("--until", until)]
                fix = f"Run them: {command('run', name, *words, runs=runs)}"
                raise UserError(f"steps that come before are not complete: {', '.join(before)}", where=name, fix=fix)
            with processes.all_at_work():  # the mesh is of all their devices
                runner.check(plan)
            if recipe.pretrain is not None and recipe.pretrain_tokens is not None and "pretrain" in waiting:
                write(f"pretrain: {recipe.pretrain.steps:,} steps, {recipe.pretrain_tokens:,} tokens")
            seconds = runner.run(Watch())
        if not only:
            show_result(runner, [step.name for step in plan], seconds, options.as_json)
        return runner.folder


def _words(option: str, values: Sequence[str] | None) -> list[str]:
    """The words of an option that may be repeated."""
    return [word for value in values or () for word in (option, value)]


def run_own_steps(target: "Target", options: PipelineOptions, section: str, steps: Sequence[str], instead: str) -> Path:
    """Run the last steps of a run, those of a `section` of its recipe, and nothing before them; returns its folder.

    `instead` is what to do where the recipe of the run does not have the section.
    """
    from affinage.pipeline.models import check_complete, recorded, run_of

    if not options.overrides:
        check_complete(target, options.runs)
        if recorded(run_of(target, options.runs)).get(section) is None:
            raise UserError(f"the recipe of this run has no `{section}`", where=target.name, fix=instead)
    return run_pipeline(target.name, options, steps, any_of=True, only=steps)
