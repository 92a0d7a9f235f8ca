"""Verbs for models that come from the Hugging Face Hub or go there: `import`, `export`."""

import json
import os
import re
from collections import defaultdict
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from affinage.cli import terminal
from affinage.cli.run import run_own_steps
from affinage.cli.terminal import app, arg, find, model_of, must_be_new, opt, warn, working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.pipeline.models import Target

_LINES = 1000  # of validation text that llama.cpp encodes, too
_PROBES = ("The capital of France is Paris.", "Où est la clé ? Ici, déjà !", "1 + 1 = 2\n\n\tfin 🧀")


@app.command("import")
def import_(
    source: Annotated[str, arg("FOLDER_OR_HUB_ID", "Llama, Mistral, Mixtral, Qwen 2 or 3, GPT-2.")],
    to: Annotated[Path | None, opt("Where to write; default: its name, here.", "--to", metavar="DIR")] = None,
) -> None:
    """Import a model of the Hugging Face Hub: a MODEL for every verb, and a recipe to train it further.

    What its config.json says is computed exactly or refused by name. No code of the model is loaded or run.

    Example: affinage import gpt2 --to my_gpt2
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(source.rstrip("/")).name).lstrip("._-") or "imported"
    folder = to or Path(name)
    must_be_new(folder)
    from affinage.hub.folder import local_copy
    from affinage.model.graph import parameters
    from affinage.pipeline.opening import import_model

    with working(f"importing {source}"):
        place = Path(os.path.expanduser(source))
        origin = os.path.abspath(place) if place.is_dir() else source
        hub = import_model(local_copy(source), folder, name, origin=origin)
    if hub.architecture.ignored:
        warn(f"config.json has keys without a meaning for this family: {', '.join(hub.architecture.ignored)}")
    size = f"{parameters(hub.graph).total:,} parameters and {hub.architecture.context:,} positions"
    print(f"A {hub.architecture.family} of {size} is in {folder}, with a recipe: {folder}/recipe.yaml")


@app.command()
def export(
    model: terminal.ModelArgument,
    overrides: terminal.SetOption = None,
    runs: terminal.RunsOption = terminal.RUNS,
    force: terminal.ForceOption = None,
    to: Annotated[Path | None, opt("Where to write; default: the run's own export.", "--to", metavar="DIR")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, opt("Of the weights; default: float32.")] = None,
    license: Annotated[str | None, opt("SPDX identifier; default: the import's, or apache-2.0.")] = None,
    adapter: Annotated[bool, opt("With --to: only the trained LoRA adapters, for PEFT.", "--adapter")] = False,
    base: Annotated[str | None, opt("With --adapter: the model below it, a folder or hub id.", metavar="BASE")] = None,
    check: Annotated[bool, opt("Compare with what transformers computes from it.", "--verify")] = False,
    check_gguf: Annotated[bool, opt("Convert with llama.cpp and compare with it.", "--verify-gguf")] = False,
) -> None:
    """Write the Hugging Face folder of any model; or of a run's last one, as a step of the run.

    A run that has written it already is not exported again: --verify takes its folder. `hf upload OWNER/NAME FOLDER`
    puts a folder on the Hugging Face Hub.

    Examples: affinage export quickstart --verify

    affinage export quickstart/pretrain@1800 --to my_model --dtype bfloat16
    """
    chosen: Any = {name: value for name, value in (("dtype", dtype), ("license", license)) if value}
    if adapter and (to is None or check or check_gguf):
        fix = "affinage export MODEL --adapter --to FOLDER; its base is exported as any other model is."
        raise UserError("--adapter goes with a MODEL and --to alone", where=model, fix=fix)
    if base is not None and not adapter:
        raise UserError("--base goes with --adapter", where=model, fix="Add --adapter, or leave it out.")
    if to is not None and (overrides or force):
        fix = "Leave them out, or leave out --to."
        raise UserError("--set and --force are for the run's own export, --to is for another", where=model, fix=fix)
    if to is None:
        settings = [f"export.{name}={json.dumps(value)}" for name, value in chosen.items()]
        to = _export_of_run(model, terminal.PipelineOptions([*(overrides or ()), *settings], runs, force))
    else:
        must_be_new(to)
        target, state = model_of(model, runs)
        if adapter:
            from affinage.hub.folder import write_adapter
            from affinage.pipeline.models import facts_of
            from affinage.pipeline.opening import open_adapters

            base = base or str(facts_of(target.path).get("begun_with", ""))
            write_adapter(to, *open_adapters(target, runs), base=base)
            unknown = "the model before this training: export it, and name it by --base"
            print(f"The adapter is in {to}. Its base: {base or unknown}.")
            return
        _write_model(target, state, runs, to, **chosen)
    if check or check_gguf:
        _compare(model, runs, to, check, check_gguf)
    print(f"The model is in {to}.")


def _export_of_run(name: str, settings: terminal.PipelineOptions) -> Path:
    """The folder that a run's export step wrote, after running that step if it is missing."""
    from affinage.pipeline.models import TRAININGS, run_of, trainings_of
    from affinage.pipeline.store import read_manifest, read_request

    target = find(name, settings.runs)
    if target.kind not in ("recipe", "run") or target.step is not None:
        raise UserError("only a whole run has an export of its own", where=name, fix="Name a folder: --to my_model")
    if not settings.overrides and not settings.force:
        model_of(name, settings.runs)  # that is trained to its end
        run = run_of(target, settings.runs)
        request = read_request(run / "export") if read_manifest(run / "export") else None
        # One from before the recipe had its last training, or with one that it has no more, is of another model.
        if request is not None and [each for each in TRAININGS if each in request.inputs] == trainings_of(run):
            return run / "export" / "model"
    instead = "Name a folder: --to my_model; or have it written as a step of the run: --set export={}"
    return run_own_steps(name, settings, "export", ("export",), instead) / "export" / "model"


def _write_model(
    target: "Target", state: dict[str, Any], runs: Path, to: Path, license: str | None = None, **how: Any
) -> None:
    """Export a model, with a card of what its run knows and, if it is not trained to its end, how far it is."""
    from affinage.hub.folder import CardFacts
    from affinage.hub.folder import export as write
    from affinage.pipeline.models import is_tuned, license_of, recorded, results_of
    from affinage.pipeline.opening import open_model
    from affinage.report.facts import collect_facts
    from affinage.report.page import card_facts

    of_run = (recorded(target.run).get("export") or {}) if target.run is not None else {}
    license = license or of_run.get("license") or license_of(target.path)
    results = results_of(target.path, target.run) if target.run is not None and target.step is None else {}
    facts = CardFacts(license)
    if target.run is not None and results:
        facts = card_facts(collect_facts(target.run, results), license)
    facts = replace(facts, tuned=is_tuned(target.path))  # also while it is being trained
    if state and (state["step"] != state["steps"] or target.step is not None):
        facts = replace(facts, training={**facts.training, "Checkpoint": terminal.describe(state)})
    # The name of the model may be a path, and a card does not show this machine's folders.
    model = replace(open_model(target, runs), name=target.path.name if Path(target.name).is_absolute() else target.name)
    write(model, to, facts=facts, place=to.name if to.is_absolute() else str(to), **how)


def _compare(name: str, runs: Path, folder: Path, with_transformers: bool, with_gguf: bool) -> None:
    """Print how well others agree with a model: transformers, and llama.cpp."""
    from affinage.hub.verify import TRICKY_TEXTS, verify, verify_gguf
    from affinage.pipeline.lineage import documents
    from affinage.pipeline.models import locate, resolve
    from affinage.pipeline.opening import open_model
    from affinage.results import Verified

    target = locate(resolve(name, runs), runs)
    model = open_model(target, runs)
    if with_transformers:
        with working("comparing with transformers"):
            print(Verified(**verify(folder, model, _PROBES)))
    if with_gguf:
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        run = target.run
        for document in documents(run, "split", "validation") if run and (run / "split").is_dir() else ():
            lines = groups[document["source"], document["language"]]
            lines += document["text"].splitlines() if len(lines) < _LINES else []
        held_out = (line for rows in zip_longest(*groups.values()) for line in rows if line)
        with working("comparing with llama.cpp"):
            facts = verify_gguf(folder, model, [*_PROBES, *TRICKY_TEXTS, *islice(held_out, _LINES)])
        apart = f"{facts['largest_logit_difference']:.1e} of the largest apart"
        print(f"llama.cpp computes the same: ids of {facts['texts']:,} lines, logits at most {apart}")
