"""Verbs for models that come from the Hugging Face Hub or go there: `import`, `export`."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from affinage.cli.options import RUNS, RunsOption, SetOption, TargetArgument, Walking, is_recipe, recorded, run_folder
from affinage.cli.run import walk
from affinage.cli.working import Working
from affinage.errors import UserError
from affinage.paths import from_home

if TYPE_CHECKING:
    from affinage.generation.model import LoadedModel
    from affinage.hub.card import CardFacts

_PROBES = ("The capital of France is Paris.", "Où est la clé ? Ici, déjà !", "1 + 1 = 2\n\n\tfin 🧀")

_DTYPE, _LICENCE, _SHARD_GIGABYTES = "float32", "apache-2.0", 5.0


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command("import")(import_)
    app.command("export")(export)


def import_(
    source: Annotated[
        str, typer.Argument(metavar="FOLDER_OR_HUB_ID", help="Llama, Mistral, Mixtral, Qwen 2 or 3, GPT-2.")
    ],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Where to write; default: its name, here.")
    ] = None,
    chat_tokens: Annotated[
        bool, typer.Option("--chat-tokens", help="Give it <|im_start|> and <|im_end|> if it lacks them.")
    ] = False,
) -> None:
    """Take in a model of the Hugging Face Hub: a MODEL for every verb, and a recipe to train it further.

    What its config.json says is computed exactly or refused by name. No code of the model's is loaded or run.

    Example: affinage import gpt2 --to my_gpt2
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(source.rstrip("/")).name).lstrip("._-") or "imported"
    folder = to or Path(name)
    if to is None and folder.exists():
        what = f"the model would be written into `{folder}`, which is there already"
        raise UserError(what, fix="Say where to with --to, for example --to my_model.")
    _must_be_new(folder)
    from affinage.hub.repository import local_copy
    from affinage.pipeline.imports import import_model

    with Working(f"taking in {source}"):
        at = from_home(source)
        origin = os.path.abspath(at) if at.is_dir() else source
        found = import_model(local_copy(source), folder, name, chat_tokens=chat_tokens, origin=origin)
    typer.echo(
        f"A {found['family']} of {found['parameters']:,} parameters, {found['vocabulary']:,} token ids and "
        f"{found['context']:,} positions is in {folder}, with a recipe: {folder}/recipe.yaml"
    )


def export(
    target: TargetArgument,
    overrides: SetOption = None,
    runs: RunsOption = RUNS,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="MODEL only: where to write.")] = None,
    dtype: Annotated[str, typer.Option(help="MODEL only: float32, bfloat16 or float16.")] = _DTYPE,
    licence: Annotated[str, typer.Option(help="MODEL only: SPDX identifier of the weights.")] = _LICENCE,
    shard_gigabytes: Annotated[
        float, typer.Option(min=1e-6, help="MODEL only: most of one file, in 1e9 bytes.")
    ] = _SHARD_GIGABYTES,
    trim: Annotated[
        bool, typer.Option("--trim-vocabulary", help="MODEL only: leave out ids that the tokenizer does not have.")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="MODEL only: the LoRA adapters it trained alone, as PEFT reads them.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(metavar="FOLDER_OR_HUB_ID", help="With --adapter: where PEFT finds the model that it belongs on."),
    ] = None,
    check: Annotated[bool, typer.Option("--verify", help="Compare with what transformers makes of it.")] = False,
    push: Annotated[
        str | None, typer.Option(metavar="REPO_ID", help="Then upload it to the Hugging Face Hub; needs HF_TOKEN.")
    ] = None,
    public: Annotated[bool, typer.Option(help="With --push: a repository that is made is public.")] = False,
) -> None:
    """Write the Hugging Face folder of any model, or of a recipe's last one, as a stage of its run.

    A run that has written it already is not written again: --verify and --push take its folder.

    Examples: affinage export quickstart --verify

    affinage export runs/quickstart/pretrain@2100 --to my_model --dtype bfloat16 --push me/my_model

    affinage export quickstart/sft --adapter --to my_adapter
    """
    if adapter:
        _write_adapter(target, runs, to, base, check or push is not None)
        return
    if base is not None:
        raise UserError("--base goes with --adapter", where="--base", fix="Leave it out for a whole model.")
    offline = "HF_HUB_OFFLINE" in os.environ
    if is_recipe(target, runs):
        settings = ["export={verify: true}" if check else "export={}"]
        folder = walk(target, Walking([*(overrides or ()), *settings], runs), ("export",)) / "export" / "model"
    else:
        if overrides:
            raise UserError("--set is of recipes", where=target, fix="Leave it out for a model.")
        written = {"dtype": dtype, "max_shard_size": shard_gigabytes, "trim_vocabulary": trim}
        anew = (dtype, licence, shard_gigabytes, trim) != (_DTYPE, _LICENCE, _SHARD_GIGABYTES, False)
        folder = _exported(target, runs, anew=anew) if to is None else to
        if to is not None:
            _write(target, runs, to, written, licence=licence)
        if check:
            _verify(target, runs, folder)
        typer.echo(f"The model is in {folder}.")
    if push is not None:
        if not offline:
            import huggingface_hub

            # Set for the run of a recipe that needs no network, and read when the export was written.
            os.environ.pop("HF_HUB_OFFLINE", None)
            huggingface_hub.constants.HF_HUB_OFFLINE = False
        from affinage.hub.repository import push as upload

        with Working(f"uploading to {push}"):
            address = upload(folder, push, private=not public)
        typer.echo(f"The model is at {address}.")


def _write(target: str, runs: Path, to: Path, written: dict[str, Any], *, licence: str) -> None:
    _must_be_new(to)
    from affinage.hub.export import DTYPES, export
    from affinage.pipeline.models import is_chat, locate_model, open_model

    if written["dtype"] not in DTYPES:
        raise UserError(f"`{written['dtype']}` is not a dtype of weights", fix=f"Choose one of: {', '.join(DTYPES)}.")
    model: LoadedModel = open_model(target, runs)
    chat = is_chat(locate_model(target, runs)[0])
    export(model, to, facts=_card(target, runs, licence), chat=chat, **written)


def _card(target: str, runs: Path, licence: str) -> "CardFacts":
    """What the card says of a model: all that its run knows, of a checkpoint and of a folder from elsewhere nothing."""
    from affinage.hub.card import CardFacts
    from affinage.pipeline.models import locate_model, results_of
    from affinage.report.card import card_facts
    from affinage.report.facts import collect_facts

    training, step = locate_model(target, runs)
    named = run_folder(target, runs)
    run = next((place for place in (named, named and named.parent) if place and recorded(place)), None)
    results = results_of(training, run) if run is not None and step is None else {}
    if run is None or not results:
        return CardFacts(licence=licence)
    return card_facts(collect_facts(run, results), licence)


def _write_adapter(target: str, runs: Path, to: Path | None, base: str | None, more: bool) -> None:
    if to is None or more or is_recipe(target, runs):
        fix = "affinage export MODEL --adapter --to FOLDER; its base is exported as any other model is."
        raise UserError("--adapter goes with a MODEL and --to alone", where=target, fix=fix)
    _must_be_new(to)
    from affinage.hub.adapter import write_adapter
    from affinage.pipeline.adapter_base import adapter_base
    from affinage.pipeline.models import open_adapters

    found = adapter_base(target, runs)
    place = base or found.place
    files = write_adapter(to, *open_adapters(target, runs), base=place)
    typer.echo(f"The adapter is in {to}: {sum(files.values()) / 1e6:,.1f} MB.")
    if place:
        typer.echo(f'It belongs on {place}; both: peft.AutoPeftModelForCausalLM.from_pretrained("{to}")')
        return
    model = found.model or "the imported model that its recipe begins with"
    typer.echo(f"It belongs on {model}, which has to be exported, too:")
    typer.echo(f"  affinage export {found.model or 'MODEL'} --to my_base")
    typer.echo(f'  PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("my_base"), "{to}")')
    typer.echo("Written with --base my_base, it says so itself.")


def _exported(target: str, runs: Path, *, anew: bool) -> Path:
    """The folder that the run itself wrote of the model."""
    from affinage.pipeline.models import export_of, locate_model

    training, step = locate_model(target, runs)
    run = run_folder(target, runs)
    found = export_of(training, run) if run is not None and step is None and not anew else None
    if found is None:
        fix = "Name a folder: --to my_model"
        raise UserError("where to? The run has not written such an export of this model itself", fix=fix)
    return found


def _verify(target: str, runs: Path, folder: Path) -> None:
    from affinage.cli.watch import verified_in_words
    from affinage.hub.verify import verify
    from affinage.pipeline.models import open_model

    with Working("comparing with transformers"):
        told = verified_in_words(verify(folder, open_model(target, runs), _PROBES))
    typer.echo(told)


def _must_be_new(folder: Path) -> None:
    if folder.exists():
        raise UserError("this is there already", where=str(folder), fix="Name a folder that is not there yet.")
