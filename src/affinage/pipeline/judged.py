"""Which answers to benchmarks there are of what a user names, and whether they are of the model as it is now."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affinage.errors import UserError
from affinage.evaluation.benchmarks import BENCHMARKS
from affinage.evaluation.result_folder import ITEMS, STATE, read_results
from affinage.pipeline.initial import MODEL, checkpoints_of
from affinage.pipeline.models import JUDGED, TRAININGS, is_hub_folder, locate_model, stands
from affinage.pipeline.sources import fingerprints
from affinage.pipeline.store import read_manifest, read_request

_STAGES = {stage: training for training, stage in JUDGED.items()}
_OF_A_MODEL = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")  # files of a Hugging Face folder


@dataclass(frozen=True)
class Judged:
    """A folder of answers, and where they are not of the model as it is now, the command that judges it anew."""

    folder: Path
    anew: str = ""


def judged(name: str, runs: Path, kept: Path) -> Judged | None:
    """The answers of what is called `name`; of those that judge the same model, ones of it as it is now come first.

    Args:
        name: a run, a model, or a folder of results.
        runs: where runs are that are named without a folder.
        kept: where answers are kept that no recipe asked for; see `affinage eval MODEL`.
    """
    places = [Path(name), runs / name]
    for place in places:
        if _has_answers(place):
            run = place.parent
            return Judged(place, "" if stage_is_current(run, place.name) else _command_of(run))
    found = [Judged(kept, _kept_anew(kept, name, runs))] if _has_answers(kept) else []
    for place in places:
        # A training is called by the folder beside that of its answers, a run stands for its last one.
        run, stages = (place.parent, [JUDGED[place.name]]) if place.name in JUDGED else (place, [*reversed(_STAGES)])
        stage = next((stage for stage in stages if _has_answers(run / stage)), None)
        if stage is not None:
            found.append(Judged(run / stage, "" if stage_is_current(run, stage) else _command_of(run)))
    return next((one for one in found if not one.anew), found[0] if found else None)


def state_of(spec: str, runs: Path) -> str:
    """What tells a model, named as for `open_model`, from what it was or will be, without reading its weights.

    Raises UserError if there is no such model.
    """
    from affinage.checkpoint.seal import seal_hash
    from affinage.checkpoint.steps import complete_steps

    folder, step = locate_model(spec, runs)
    if is_hub_folder(folder):
        files = [file for file in sorted(folder.iterdir()) if file.suffix in _OF_A_MODEL and file.is_file()]
        told = [[Path(file).name, digest] for file, digest in fingerprints(map(str, files)).items()]
    else:
        checkpoints = checkpoints_of(folder, step)
        there = [each for each in complete_steps(checkpoints) if step in (None, each)]
        told = [[str(each), seal_hash(checkpoints / str(each))] for each in there[-1:]]
        told.append([MODEL, hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()])
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=12).hexdigest()


def training_of(spec: str, runs: Path) -> dict[str, Any]:
    """Which training made a model, named as for `open_model`: its `key`, and the `step` if it is not all of it.

    {} where no recipe made it. Raises UserError if there is no such model.
    """
    from affinage.checkpoint.steps import complete_steps

    folder, step = locate_model(spec, runs)
    request = read_request(folder.parent if is_hub_folder(folder) else folder)  # of an export, or of the training
    if request is None:
        return {}
    made, key = request
    if is_hub_folder(folder):
        exported = next((made.inputs[name] for name in TRAININGS if name in made.inputs), None)
        return {} if exported is None else {"key": exported}
    if step is None and read_manifest(folder) is None:
        step = complete_steps(checkpoints_of(folder))[-1]
    return {"key": key} if step is None else {"key": key, "step": step}


def stage_is_current(run: Path, stage: str) -> bool:
    """Whether what a stage of a run has judged is the training that the run has now; True where nothing tells."""
    request = read_request(run / stage) if stage in _STAGES else None
    if request is None:
        return True
    training = _STAGES[stage]
    now = read_request(run / training)
    return now is None or (request[0].inputs.get(training) == now[1] and stands(run, training))


def _has_answers(folder: Path) -> bool:
    return (folder / ITEMS).is_dir()


def _kept_anew(kept: Path, name: str, runs: Path) -> str:
    results = read_results(kept)
    try:
        if results.get(STATE) == state_of(name, runs):
            return ""
    except UserError:
        return ""  # the model is gone, and these are all there is of it
    if any((place / "recipe.json").is_file() for place in (Path(name), runs / name)):
        return f"affinage eval {name}"
    tasks = list(results.get("tasks", {}))
    named = tasks and all(task in BENCHMARKS for task in tasks)  # others may be files, which results do not name
    return f"affinage eval {name} --tasks {','.join(tasks) if named else '...'}"


def _command_of(run: Path) -> str:
    try:
        command = json.loads((run / "run.json").read_text(encoding="utf-8"))["command"]
    except (OSError, ValueError, KeyError, TypeError):
        command = f"affinage run {run.name}"
    return str(command)
