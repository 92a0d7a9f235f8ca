"""The models that trainings begin with: an imported one (`init_from`), or one of another run (`resume_from`)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affinage.config.load import LoadedRecipe
from affinage.config.training import TrainSettings
from affinage.errors import UserError
from affinage.pipeline.names import KEPT, MODEL, checkpoints_of
from affinage.pipeline.store import read_manifest
from affinage.results import read_json

if TYPE_CHECKING:
    from jax.sharding import Sharding

    from affinage.model import Adapters, Graph

BEGUN_WITH = "begun_with"  # in it: where Hugging Face's libraries find the imported model that a training began with
TOKENIZER = "tokenizer"  # beside them in an imported model; a trained one's is a result of its own


def initial_folder(loaded: LoadedRecipe) -> Path | None:
    """The folder that `init_from` names, relative to the file that says so; None for random weights.

    Raises:
        UserError: there is no imported model.
    """
    if loaded.recipe.init_from is None:
        return None
    folder = loaded.beside(loaded.recipe.init_from, ("init_from",))
    if "imported" not in read_json(folder / MODEL):
        raise UserError(
            f"there is no imported model in `{loaded.recipe.init_from}`",
            where=loaded.locate(("init_from",)),
            fix="Make one: affinage import FOLDER_OR_HUB_ID --to FOLDER",
        )
    return folder


def origin_of(imported: Path) -> str:
    """Where Hugging Face's libraries find the model that was imported: a repository, or a folder; "" if unknown."""
    return str(read_json(imported / MODEL)["imported"].get("from", ""))


def begun_with(training: Path) -> str:
    """The same of the imported model that a training began with; "" also for a folder that is there no more."""
    origin = str(read_json(training / MODEL).get(BEGUN_WITH, ""))
    return "" if Path(origin).is_absolute() and not Path(origin).is_dir() else origin


def chat_template_of(loaded: LoadedRecipe, tokenizer: Path | None) -> str | None:
    """The Jinja template that the recipe's conversations are written in; None for ChatML.

    `tokenizer` is the folder of the tokenizer in use. Raises UserError if there is no such template.
    """
    chosen = loaded.recipe.chat_template
    if chosen == "chatml":
        return None
    where = loaded.locate(("chat_template",))
    if chosen == "tokenizer":
        from affinage.data.tokenizer import template_in

        found = None if tokenizer is None else template_in(tokenizer)
        fix = "Name a Jinja file, or write `chat_template: chatml`."
        if not found:
            raise UserError("the tokenizer has no chat template of its own", where=where, fix=fix)
        return found
    path = loaded.beside(chosen, ("chat_template",))
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)["chat_template"] if path.suffix == ".json" else text
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        fix = "`chatml`, `tokenizer`, a Jinja file, or a tokenizer_config.json with a `chat_template`."
        raise UserError(f"there is no chat template in `{chosen}`", where=where, fix=fix) from error
    return str(found)


def trained_params(training: Path, graph: "Graph", step: int | None, abstract: Any) -> Any:
    """The weights of a training's model, with its adapters merged into them where it trained such.

    Args:
        training: its folder.
        graph: the model.
        step: of the checkpoint; the one that stands for the training if None.
        abstract: of the graph's parameters, with shardings.
    """
    import jax

    from affinage.checkpoint import CheckpointStore
    from affinage.parallel.sharding import replicated
    from affinage.training.frozen import kept_frozen

    found = trained_adapters(training, graph, step, replicated(jax.tree.leaves(abstract)[0].sharding.mesh))
    if found is None:
        return CheckpointStore(checkpoints_of(training, step)).restore_params(_wanted(training, step), abstract)
    adapters, trained = found
    frozen = kept_frozen(training, abstract)
    merge = jax.jit(adapters.merged, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract), donate_argnums=0)
    return merge(frozen, trained)


def trained_adapters(
    training: Path, graph: "Graph", step: int | None, sharding: "Sharding"
) -> "tuple[Adapters, Any] | None":
    """The adapters that a training trained, and their A and B; None if it trained the weights themselves."""
    import jax
    import jax.numpy as jnp

    from affinage.checkpoint import CheckpointStore
    from affinage.config.tuning import LoraSettings
    from affinage.model import Adapters, abstract_params

    facts = read_json(training / MODEL)
    if facts.get("lora") is None:
        return None
    adapters = Adapters(graph, LoraSettings(**facts["lora"]))
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract_params(adapters, jnp.dtype(facts["precision"]["params"])),
    )
    return adapters, CheckpointStore(checkpoints_of(training, step)).restore_params(_wanted(training, step), abstract)


def _wanted(training: Path, step: int | None) -> int | None:
    """The checkpoint that must be read; None for the newest that is there, as long as the training goes on."""
    if step is not None or checkpoints_of(training).name == KEPT or read_manifest(training) is None:
        return step
    steps = read_json(training / "summary.json").get("steps")
    return steps if isinstance(steps, int) else None


def initial_fingerprint(loaded: LoadedRecipe) -> dict[str, str]:
    """What the keys of stages hold of it: hashes of its weights and tokenizer, wherever its folder is."""
    folder = initial_folder(loaded)
    return (
        {}
        if folder is None
        else {f"init {part}": digest for part, digest in read_json(folder / MODEL)["imported"]["sha256"].items()}
    )


def initial_params(folder: Path, graph: "Graph") -> Callable[[Any], Any]:
    """A function that loads an imported model's weights as the parameters of `graph`, given with shardings.

    Raises:
        UserError: the graph has other parameters than the model.
    """
    from affinage.checkpoint import CheckpointStore
    from affinage.model import parse
    from affinage.model.parameter import map_parameters

    def shapes(graph: "Graph") -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        map_parameters(lambda path, parameter: found.update({".".join(path): parameter.shape}), graph.parameters)
        return found

    own, given = shapes(graph), shapes(parse(read_json(folder / MODEL)["graph"]))
    for name in sorted(own.keys() | given.keys()):
        if own.get(name) != given.get(name):
            raise UserError(
                f"the recipe's model has {name} {own.get(name, 'not at all')}, "
                f"the one it begins with {given.get(name, 'not at all')}",
                where="init_from",
                fix="Let `model:` be what the imported model's recipe.yaml says.",
            )
    store = CheckpointStore(folder / "checkpoints")
    return lambda abstract: store.restore_params(0, abstract)


def extended(loaded: LoadedRecipe, section: str) -> tuple[Path, int] | None:
    """Folder and step of the checkpoint that `resume_from` of a section names; None if it names none.

    Raises:
        UserError: it is not there, or is of the run that this recipe makes itself.
    """
    settings = getattr(loaded.recipe, section)
    if not isinstance(settings, TrainSettings) or settings.resume_from is None:
        return None
    from affinage.checkpoint.metadata import COMMIT

    where = loaded.locate((section, "resume_from"))
    named, _, step = settings.resume_from.partition("@")
    folder = loaded.beside(named, (section, "resume_from"))
    folder = folder / section if (folder / section).is_dir() else folder
    if folder.parent.name == loaded.recipe.name:
        fix = "Give this recipe another `name`: what is extended stays as it is."
        raise UserError(f"`{settings.resume_from}` is this run itself", where=where, fix=fix)
    kept = sorted(
        int(path.parent.name)
        for path in (folder / "checkpoints").glob(f"*/{COMMIT}")
        if path.parent.name.isdecimal() and not path.parent.is_symlink()
    )
    if not kept or (step and (not step.isdecimal() or int(step) not in kept)):
        there = f"of steps {', '.join(map(str, kept))}" if kept else "none at all"
        raise UserError(
            f"there is no checkpoint `{settings.resume_from}`, {there if kept else 'and ' + there}",
            where=where,
            fix="Name a training and, if it shall not be the last one kept, a step: runs/NAME/pretrain@STEP",
        )
    return folder.resolve(), int(step) if step else kept[-1]


def extension_fingerprint(loaded: LoadedRecipe, section: str) -> dict[str, str]:
    """What the key of the training's stage holds of it: a hash of the checkpoint, wherever it is."""
    found = extended(loaded, section)
    if found is None:
        return {}
    from affinage.checkpoint.metadata import fingerprint

    return {"resume_from": fingerprint(found[0] / "checkpoints" / str(found[1]))}
