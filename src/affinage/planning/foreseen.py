"""What is known of a training before any step runs: weights of what no source gives, a rate that jumps back."""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp

from affinage.checkpoint.store import CHECKPOINTS, IDENTITY, CheckpointStore
from affinage.config.data import POCKET_WORLD, DataSettings
from affinage.config.load import LoadedRecipe
from affinage.config.training import ScheduleSettings, TrainSettings
from affinage.data.dataloader import ALL
from affinage.data.files import kind_of
from affinage.data.places import unique
from affinage.data.special_tokens import CODE_LANGUAGE
from affinage.data.tokenize import UNDETERMINED, group_name
from affinage.errors import UserError, did_you_mean
from affinage.training.optimizer import learning_rate


def check_weights(loaded: LoadedRecipe, settings: TrainSettings, data: DataSettings) -> Iterator[str]:
    """Yield a sentence about each weight that may have no text, where records may name sources; UserError: has none."""
    names, titles, others = set[str](), list[str](), False
    unclear = () if data.filters.language_threshold else (UNDETERMINED,)
    for source in data.sources:
        titles.append(unique(source.title, titles))
        stated = CODE_LANGUAGE if source.kind == "code" else source.language
        languages = {stated} if stated else {*data.languages, *unclear}
        if not data.languages or languages & {CODE_LANGUAGE, *data.languages}:
            names |= {titles[-1], *languages, *(group_name(titles[-1], each) for each in languages)}
        is_named = source.name or source.path == POCKET_WORLD or kind_of(source.path) in ("text", "warc", "dump")
        others |= not (is_named and (data.languages or stated))
    for number, stage in enumerate(settings.mixture or ()):
        for name in sorted(stage.weights.keys() - names) if {*stage.weights} != {ALL} else ():
            what, where = f"a weight for {name!r}", loaded.locate(("pretrain", "mixture", number, "weights", name))
            fix = f"{did_you_mean(name, names)} There are: {', '.join(sorted(names))}".lstrip()
            if not others:
                raise UserError(f"{what}, which no source gives", where=where, fix=fix)
            yield f"{where}: {what}, which is neither a source nor a language here, and may have no text. {fix}"


def lifted_rate(settings: TrainSettings, name: str, training: Path, step: int) -> Iterator[str]:
    """Yield a sentence if `step` of another `training`, which is continued, lies in a decay that the rate leaves."""
    facts = (store := CheckpointStore(training / CHECKPOINTS)).metadata(step).facts[IDENTITY]
    former = ScheduleSettings.model_construct(**facts["schedule"])
    rate, stable = learning_rate(former, facts["steps"]), 0.99 * former.peak_lr
    reached, goes_on = rate(jnp.int32(step - 1)), learning_rate(settings.schedule, settings.steps)(jnp.int32(step))
    if step > former.warmup(facts["steps"]) and reached < stable and goes_on > 1.1 * reached:
        kept = [f"@{each}" for each in store.steps() if each < step and rate(jnp.int32(each - 1)) >= stable]
        before = str(settings.resume_from).partition("@")[0] + kept[-1] if kept else "none is kept"
        rates = f"the learning rate jumps from {reached:.3g} to {goes_on:.3g}; from before the decay: {before}"
        yield f"{name} continues step {step:,}, in the decay of its schedule: {rates}"
