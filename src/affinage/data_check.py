"""Checks of the settings of data before anything is read, and advice on those that are probably a mistake."""

import itertools
from collections.abc import Iterable, Iterator

from affinage.config.data import POCKET_WORLD, DataSettings, SourceSettings
from affinage.config.recipe import Recipe
from affinage.config.training import TuningSettings
from affinage.data.conversations import open_source
from affinage.data.dataloader import ALL
from affinage.data.ingest import find_parts
from affinage.data.places import is_on_hub, located
from affinage.data.readers import at_commit
from affinage.data.special_tokens import CODE_LANGUAGE
from affinage.data.tokenize import UNDETERMINED, group_name
from affinage.errors import UserError, did_you_mean

MANY_EPOCHS = 40  # passes over the same data after which a further one teaches nothing (Muennighoff et al., 2023)


def check_documents(source: SourceSettings, settings: DataSettings) -> None:
    """Check that a source is there, without reading it. Raises UserError if it is not."""
    source = located(source, settings)
    if source.path.startswith("hf://datasets/"):  # a gated one shows its files to everybody
        name = "/".join(source.path.split("/")[3:5]).partition("@")[0]
        at_commit(source.model_copy(update={"dataset": name}), "")
    if is_on_hub(source):
        at_commit(source, "")
    elif source.path != POCKET_WORLD:
        find_parts(source, "")


def check_conversations(settings: TuningSettings, index: int) -> None:
    """Raise UserError unless a source exists, and has a name of its own; what is at a URL is not looked for."""
    source = settings.sources[index]
    if settings.mixture is not None and source.title in [other.title for other in settings.sources[:index]]:
        what = f"two sources are called {source.title}, and `mixture` weighs names"
        raise UserError(what, fix="Give each a `name` of its own.")
    if source.path != POCKET_WORLD and "://" not in located(source, settings).place:
        open_source(source, settings)


def check_weights(weights: Iterable[str], data: DataSettings) -> None:
    """Raise UserError for a weight of a mixture that no text can have, where all sources and languages are named."""
    if data.languages and all(source.name or source.path == POCKET_WORLD for source in data.sources):
        titles, languages = [source.title for source in data.sources], [*data.languages, CODE_LANGUAGE, UNDETERMINED]
        names = [*titles, *languages, *itertools.starmap(group_name, itertools.product(titles, languages)), ALL]
        if unknown := [name for name in weights if name not in names]:
            fix = f"{did_you_mean(unknown[0], names)} There are: {', '.join(names[:-1])}".lstrip()
            raise UserError(f"a weight for {unknown[0]!r}, which no source gives", where="mixture", fix=fix)


def never_begun(recipe: Recipe, name: str) -> Iterator[str]:
    """Yield a sentence about each stage of a mixture that would begin after the last step of the training `name`; and,
    for the first training, about a trace that would begin after the last step of all."""
    settings = getattr(recipe, name)
    for number, stage in enumerate(settings.mixture or ()):
        if stage.from_step >= settings.steps:
            yield f"{name}.mixture[{number}] never begins: it waits for step {stage.from_step:,} of {settings.steps:,}"
    longest, first = max(getattr(recipe, each).steps for each in recipe.trainings), min(recipe.runtime.profile or (0,))
    if first > longest and name == recipe.trainings[0]:
        yield f"runtime.profile never begins: it waits for step {first:,} of {longest:,}"


def repetition(epochs: float) -> str:
    """Return the advice for a training that reads its data very many times over, "" for others."""
    if epochs <= MANY_EPOCHS:
        return ""
    return f"reads its data {epochs:,.0f} times: it will learn it by heart; give it more text or fewer steps"
