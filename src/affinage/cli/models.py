"""Verbs that use a model, `generate`, `chat`, `serve`, and those that bring one from or to Hugging Face."""

import contextlib
import json
import os
import re
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Literal

from affinage.cli import terminal
from affinage.cli.run import run_own_steps
from affinage.cli.terminal import app, arg, find, model_of, must_be_new, opened, opt, warn, working
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.pipeline.models import Target

_VARIABLE = "AFFINAGE_API_KEY"
_KEY_FILE = f"The key that clients must send; or {_VARIABLE}. Default: generated if other machines can connect."
_LINES = 1000  # of validation text that llama.cpp encodes, too
_PROBES = ("The capital of France is Paris.", "Où est la clé ? Ici, déjà !", "1 + 1 = 2\n\n\tfin 🧀")
MaxNewTokens = Annotated[int, opt("Maximum number of new tokens.", "--max-new-tokens", min=1)]
SystemOption = Annotated[str | None, opt("Another system prompt than the one it was trained with.", "--system")]
Temperature = Annotated[float, opt("0 takes the most likely token; 1 draws as the model predicts.", min=0)]
TopK = Annotated[int, opt("Draw among this many of the likeliest tokens; 0: all.", min=0)]
TopP = Annotated[float, opt("Draw among the likeliest tokens with this share of the probability.")]
Seed = Annotated[int, opt("Seed of the draws.", min=0)]
Stop = Annotated[list[str] | None, opt("End before this text. May be repeated.", metavar="TEXT")]


@app.command()
def generate(
    model: terminal.ModelArgument,
    prompts: Annotated[list[str] | None, arg("[PROMPT]...", "Or through a pipe.")] = None,
    max_new_tokens: MaxNewTokens = 64,
    as_json: terminal.JsonOption = False,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    mesh: terminal.MeshOption = None,
    max_model_len: terminal.MaxLenOption = None,
    runs: terminal.RunsOption = terminal.RUNS,
) -> None:
    """Let a model continue texts.

    Example: affinage generate quickstart "The currency of France" "La monnaie de la France"
    """
    texts = prompts or ["" if sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")]
    "".join(texts).encode()  # raises, before a model is opened, for words of another encoding than UTF-8
    if not any(texts):
        raise UserError("no prompt was given", fix='For example: affinage generate MODEL "Once upon a time"')
    loaded, state = opened(model, runs, mesh, max_model_len)
    from affinage.api import prompt_tokens
    from affinage.generation.engine import generate as generated
    from affinage.generation.sampling import SamplingParams

    sampling = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed=seed, stop=tuple(stop or ()))
    rows = [prompt_tokens(text, loaded) for text in texts]
    for text, result in zip(texts, generated(loaded, rows, sampling)):
        line = {"prompt": text, "text": result.text, "finish_reason": result.finish_reason, **state}
        print(json.dumps(line, ensure_ascii=False) if as_json else text + result.text)
        if result.finish_reason == "length" and result.limit < max_new_tokens:
            warn(f"the text ends after {len(result.tokens):,} new tokens: the context of {loaded.context:,} is full")


@app.command()
def chat(
    model: terminal.ModelArgument,
    question: Annotated[list[str] | None, arg("[QUESTION]...", "Ask and leave.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    system: SystemOption = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    mesh: terminal.MeshOption = None,
    max_model_len: terminal.MaxLenOption = None,
    runs: terminal.RunsOption = terminal.RUNS,
) -> None:
    """Talk with a model. Commands: /reset, /system TEXT, /help, /quit.

    Example: affinage chat quickstart "What is the currency of France?"
    """
    "".join([*(question or ()), system or ""]).encode()  # as in `generate`
    loaded, _ = opened(model, runs, mesh, max_model_len)
    from affinage.generation.chat import ChatSession, converse
    from affinage.generation.sampling import SamplingParams

    write = partial(print, end="", flush=True)
    sampling = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed=seed, stop=tuple(stop or ()))
    session = ChatSession(loaded, sampling)
    if not loaded.chat:
        warn(f"{model} is not a chat model. It continues texts: affinage generate {shlex.quote(model)} ...")
    if system is not None:
        session.reset(system)
    for text in question or ():
        session.reset()
        for piece in session.reply(text):
            write(piece)
        write("\n")
    if not question:
        if sys.stdin.isatty():
            print(f"This is {loaded.name}. /help lists the commands, /quit leaves.", file=sys.stderr)
        converse(session, read_line, write)


def read_line() -> str | None:
    """A line from the terminal, with arrow keys to edit it and to go back; None where the person leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() uses it once it is there
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


@app.command()
def serve(
    model: terminal.ModelArgument,
    host: Annotated[str, opt("Address to listen on. 0.0.0.0: for other machines too.")] = "127.0.0.1",
    port: Annotated[int, opt("0: any that is free.", min=0, max=65535)] = 8000,
    api_key_file: Annotated[Path | None, opt(_KEY_FILE, exists=True, dir_okay=False)] = None,
    max_num_seqs: Annotated[int, opt("Answers generated at once.", "--max-num-seqs", min=1)] = 8,
    max_queue: Annotated[int, opt("Answers that may wait; more are refused with 429.", min=0)] = 64,
    max_tokens: Annotated[int, opt("The longest answer.", min=1)] = 1024,
    grace: Annotated[float, opt("Seconds that answers may still take after SIGTERM.", min=0)] = 30,
    system: SystemOption = None,
    mesh: terminal.MeshOption = None,
    max_model_len: terminal.MaxLenOption = None,
    runs: terminal.RunsOption = terminal.RUNS,
) -> None:
    """Serve a model over OpenAI's interface (/v1/chat/completions, /v1/completions), with a page to talk with it.

    A request without `temperature` draws at 1, as OpenAI's do; `chat` and `generate` take the likeliest token.

    Example: affinage serve quickstart --port 8000
    """
    # It is no argument, which every user of the machine could read.
    key = (os.environ.get(_VARIABLE) or None) if api_key_file is None else api_key_file.read_text("utf-8").strip()
    if key is not None and not re.fullmatch("[!-~]+", key):
        fix = "Use letters, digits and signs, without spaces."
        raise UserError("this is not a key that a header can carry", where=str(api_key_file or _VARIABLE), fix=fix)
    loaded, _ = opened(model, runs, mesh, max_model_len, reserves=True)
    from affinage.serving.server import run

    def announce(url: str, used: str | None) -> None:
        page = f"{url}/#token={'YOURS' if key else used}" if used else f"{url}/"
        print(f"{url}/v1 is the base URL for OpenAI clients (API key: {'yours' if key else used or 'any'}).")
        print(f"{page} is a page to talk with it. Ctrl-C ends it.", flush=True)

    if system is not None:
        loaded = replace(loaded, system_prompt=system)
    print("Compiling ...", flush=True)
    limits = {"max_num_seqs": max_num_seqs, "max_queue": max_queue, "max_tokens": max_tokens}
    run(loaded, announce, host=host, port=port, key=key, grace=grace, **limits)


@app.command("import")
def import_(
    source: Annotated[str, arg("FOLDER_OR_HUB_ID", "Llama, Mistral, Mixtral, Qwen 2 or 3, GPT-2.")],
    to: Annotated[Path | None, opt("Where to write; default: its name, here.", "--to", metavar="DIR")] = None,
) -> None:
    """Import a model of the Hugging Face Hub: a MODEL for every verb, and a recipe to train it further.

    What its config.json says is computed exactly or refused by name. No code of the model is loaded or run.

    Example: affinage import gpt2 --to my_gpt2
    """
    if "://" in source:
        raise UserError("a model is named by its folder or its id, not by a URL", where=source, fix="Write OWNER/NAME.")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(source.rstrip("/")).name).lstrip("._-") or "imported"
    folder, place = to or Path(name), Path(source).expanduser()
    must_be_new(folder)
    from affinage.hub.folder import local_copy
    from affinage.model.graph import parameters
    from affinage.pipeline.opening import import_model

    with working(f"importing {source}"):
        origin = str(place.absolute()) if place.is_dir() else source
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
    license: Annotated[str | None, opt("SPDX identifier, for the card; default: the import's, or none.")] = None,
    adapter: Annotated[bool, opt("With --to: only the trained LoRA adapters, for PEFT.", "--adapter")] = False,
    base: Annotated[str | None, opt("With --adapter: the model below it, a folder or hub id.", metavar="BASE")] = None,
    check: Annotated[bool, opt("Compare with what transformers computes from it.", "--verify")] = False,
    check_gguf: Annotated[bool, opt("Convert with llama.cpp and compare with it.", "--verify-gguf")] = False,
) -> None:
    """Write the Hugging Face folder of any model; or of a run's last one, as a step of the run.

    A run that has written it already is not exported again: --verify takes its folder. `hf upload OWNER/NAME FOLDER`
    puts a folder on the Hugging Face Hub.

    Example: affinage export quickstart/pretrain@1800 --to my_model --dtype bfloat16
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
    target = find(model, runs)
    if to is None:
        settings = [f"export.{name}={json.dumps(value)}" for name, value in chosen.items()]
        to = _export_of_run(target, terminal.PipelineOptions([*(overrides or ()), *settings], runs, force))
    elif adapter:
        _write_adapter(target, runs, to, base)
        return
    else:
        _write_model(target, runs, to, **chosen)
    if check or check_gguf:
        _compare(target, runs, to, check, check_gguf)
    note = "" if "\nlicense: " in (to / "README.md").read_text("utf-8") else " Its card states no license (--license)."
    print(f"The model is in {to}.{note}")


def _export_of_run(target: "Target", options: terminal.PipelineOptions) -> Path:
    """The folder that a run's export step wrote, after running that step if it is missing."""
    from affinage.pipeline import models, store

    if target.kind not in ("recipe", "run") or target.step is not None:
        fix = "Name a folder: --to my_model"
        raise UserError("only a whole run has an export of its own", where=target.name, fix=fix)
    if not options.overrides and not options.force:
        models.check_complete(target, options.runs)
        run = models.run_of(target, options.runs)
        request = store.read_request(run / "export") if store.read_manifest(run / "export") else None
        # One from before the recipe had its last training, or with one that it has no more, is of another model.
        if request and [each for each in models.TRAININGS if each in request.inputs] == models.trainings_of(run):
            return run / "export" / "model"
    instead = "Name a folder: --to my_model; or have it written as a step of the run: --set export={}"
    return run_own_steps(target, options, "export", ("export",), instead) / "export" / "model"


def _write_adapter(target: "Target", runs: Path, to: Path, base: str | None) -> None:
    must_be_new(to)
    model, _ = model_of(target, runs)
    from affinage.hub.folder import write_adapter
    from affinage.pipeline import models, opening

    base = base or str(models.facts_of(model.path).get("begun_with", ""))
    write_adapter(to, *opening.open_adapters(model, runs), base=base)
    print(f"The adapter is in {to}. Its base: {base or 'the model before this training: export it, --base names it'}.")


def _write_model(target: "Target", runs: Path, to: Path, license: str | None = None, **how: Any) -> None:
    """Export a model, with a card of what its run knows and, if it is not trained to its end, how far it is."""
    must_be_new(to)
    model, state = model_of(target, runs)
    from affinage.hub import folder
    from affinage.pipeline import models, opening
    from affinage.report import facts, page

    run = model.run
    of_run = (models.recorded(run).get("export") or {}) if run else {}
    license = license or of_run.get("license") or models.license_of(model.path)
    results = models.results_of(model.path, run) if run and model.step is None else {}
    at = state if state and (state["step"] != state["steps"] or model.step is not None) else None
    card = page.card_facts(facts.collect_facts(run or model.path, results), license, at=at)
    card = replace(card, tuned=models.is_tuned(model.path), command=card.command if results else "")
    # The name of the model may be a path, and a card does not show this machine's folders.
    name = model.path.name if Path(model.name).is_absolute() else model.name
    loaded = replace(opening.open_model(model, runs), name=name)
    terminal.announce(state)
    folder.export(loaded, to, facts=card, place=to.name if to.is_absolute() else str(to), **how)


def _compare(target: "Target", runs: Path, folder: Path, with_transformers: bool, with_gguf: bool) -> None:
    """Print how well others agree with a model: transformers, and llama.cpp."""
    from affinage.hub.verify import TRICKY_TEXTS, verify, verify_gguf
    from affinage.pipeline.lineage import documents
    from affinage.pipeline.opening import open_model
    from affinage.results import Verified

    target, _ = model_of(target, runs)
    model = open_model(target, runs)
    if with_transformers:
        with working("comparing with transformers"):
            print(Verified(**verify(folder, model, _PROBES)))
    if with_gguf:
        split = documents(target.run, "split", "validation") if target.run and (target.run / "split").is_dir() else ()
        lines = [line for document in split for line in document["text"].splitlines() if line]
        held_out = Random(0).sample(lines, min(_LINES, len(lines)))  # of all sources and languages
        with working("comparing with llama.cpp"):
            facts = verify_gguf(folder, model, [*_PROBES, *TRICKY_TEXTS, *held_out])
        apart = f"{facts['largest_logit_difference']:.1e} of the largest apart"
        print(f"llama.cpp computes the same: ids of {facts['texts']:,} lines, logits at most {apart}")
