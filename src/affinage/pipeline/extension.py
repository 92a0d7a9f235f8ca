"""The training that one of a recipe's goes on from, where it has `resume_from`."""

from pathlib import Path

from affinage.config.load import LoadedRecipe
from affinage.config.training import TrainSettings
from affinage.errors import UserError


def extended(loaded: LoadedRecipe, section: str) -> tuple[Path, int] | None:
    """Folder and step of the checkpoint that `resume_from` of a section names; None if it names none.

    Raises:
        UserError: it is not there, or is of the run that this recipe makes itself.
    """
    settings = getattr(loaded.recipe, section)
    if not isinstance(settings, TrainSettings) or settings.resume_from is None:
        return None
    from affinage.checkpoint.seal import SEAL

    where = loaded.locate((section, "resume_from"))
    named, _, step = settings.resume_from.partition("@")
    folder = loaded.beside(named, (section, "resume_from"))
    folder = folder / section if (folder / section).is_dir() else folder
    if folder.parent.name == loaded.recipe.name:
        fix = "Give this recipe another `name`: what is extended stays as it is."
        raise UserError(f"`{settings.resume_from}` is this run itself", where=where, fix=fix)
    kept = sorted(
        int(path.parent.name)
        for path in (folder / "checkpoints").glob(f"*/{SEAL}")
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
    from affinage.checkpoint.seal import seal_hash

    return {"resume_from": seal_hash(found[0] / "checkpoints" / str(found[1]))}
