"""Which results of benchmarks there are of what a name stands for, and whether they are of the model as it is now."""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affinage.errors import UserError
from affinage.evaluation.benchmarks import BENCHMARKS
from affinage.evaluation.results import STATE, read_results
from affinage.pipeline.models import (
    COMMAND,
    EVALUATIONS,
    ITEMS,
    MODEL,
    TRAININGS,
    Target,
    averaged_steps,
    checkpoints_of,
    command,
    incomplete,
    is_current,
    is_hub_folder,
    locate,
    planned_trainings,
    recorded,
    resolve,
)
from affinage.pipeline.sources import fingerprints
from affinage.pipeline.store import read_manifest, read_request
from affinage.results import read_json

_STEPS = {step: training for training, step in EVALUATIONS.items()}
_OF_A_MODEL = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")  # files of a Hugging Face folder


@dataclass(frozen=True)
class EvalResults:
    """A folder of results, and where they are not of the model as it is now, the command that makes them again."""

    folder: Path
    again: str = ""


def eval_results(name: str, runs: Path) -> EvalResults | None:
    """The results of a run, a model or a step; of several for one model, those of it as it is now come first."""
    kept, found = results_folder(name, runs), []
    try:
        target = resolve(name, runs)
    except UserError:  # the model is gone, and its results are all there is of it
        return EvalResults(kept) if (kept / ITEMS).is_dir() else None
    if target.kind == "result":
        again = _step_again(target.path.parent, target.path.name)
        return EvalResults(target.path, again) if (target.path / ITEMS).is_dir() else None
    if (kept / ITEMS).is_dir():
        found.append(EvalResults(kept, _kept_again(kept, target, runs)))
    run, last = (target.path, "") if target.kind == "run" else (target.path.parent, target.path.name)
    if target.step is None and target.kind in ("run", "model"):
        steps = [EVALUATIONS[last]] if last in EVALUATIONS else [EVALUATIONS[name] for name in TRAININGS]
        found += [EvalResults(run / step, _step_again(run, step)) for step in steps if (run / step / ITEMS).is_dir()][
            :1
        ]
    return next((one for one in found if not one.again), found[0] if found else None)


def results_folder(name: str, runs: Path) -> Path:
    """Where the results of a model are kept that no recipe evaluates; its name has a hash of the model's path."""
    try:
        target = resolve(name, runs)
        place, step = target.path, "" if target.step is None else f"@{target.step}".replace(":", "-")
    except UserError:
        word, at, number = name.partition("@")
        place, step = Path(word), at + number.replace(":", "-")
    place, root = Path(os.path.abspath(place)), Path(os.path.abspath(runs))
    inside = place.is_relative_to(root)
    path = str(place.relative_to(root) if inside else place)
    called = re.sub(r"[^A-Za-z0-9._-]+", "-", path if inside else place.name)
    if called != path:
        called = f"{called}-{hashlib.blake2b(path.encode(), digest_size=4).hexdigest()}"
    return runs / "evaluations" / f"{called}{step}"


def model_fingerprint(target: Target, runs: Path) -> str:
    """A hash that tells a model from what it was or will be, without reading its weights."""
    from affinage.checkpoint.metadata import fingerprint
    from affinage.checkpoint.store import complete_steps

    folder, step = locate(target, runs)
    if target.kind == "hub":
        files = [file for file in sorted(folder.iterdir()) if file.suffix in _OF_A_MODEL and file.is_file()]
        parts = [[Path(file).name, digest] for file, digest in fingerprints(map(str, files)).items()]
    else:
        checkpoints = checkpoints_of(folder, step)
        there = averaged_steps(step, complete_steps(checkpoints))
        parts = [[str(each), fingerprint(checkpoints / str(each))] for each in there]
        parts += [["average", step]] if isinstance(step, str) else []
        parts.append([MODEL, hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()])
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


def training_of(target: Target) -> dict[str, Any]:
    """Which training made a model: its `key`, and the `step` if it is not all of it; {} where no recipe made it."""
    from affinage.checkpoint.store import complete_steps

    folder, step, is_hub = target.path, target.step, is_hub_folder(target.path)
    request = read_request(folder.parent if is_hub else folder)  # of an export, or of the training
    if request is None:
        return {}
    if is_hub:
        return next(({"key": request[0].inputs[name]} for name in TRAININGS if name in request[0].inputs), {})
    if isinstance(step, str):  # an average of checkpoints is the result of no training
        return {}
    if step is None and read_manifest(folder) is None:
        step = complete_steps(checkpoints_of(folder))[-1]
    return {"key": request[1]} | ({} if step is None else {"step": step})


def is_evaluated(run: Path) -> bool:
    """Whether all trainings of a run are complete, and evaluated as they are now."""
    steps = [EVALUATIONS[name] for name in planned_trainings(run)]
    complete = all(read_manifest(run / step) is not None and not _step_again(run, step) for step in steps)
    return complete and not incomplete(run) and recorded(run).get("evaluate") is not None


def _step_again(run: Path, step: str) -> str:
    """The command of a run whose step has evaluated another training than the run has now; "" where it is the same."""
    training = _STEPS.get(step, "")
    request, now = read_request(run / step), read_request(run / training)
    if not training or request is None or now is None:
        return ""
    if request[0].inputs.get(training) == now[1] and is_current(run, training):
        return ""
    return str(read_json(run / COMMAND).get("command") or command("run", run.name))


def _kept_again(kept: Path, target: Target, runs: Path) -> str:
    results = read_results(kept)
    try:
        if results.get(STATE) == model_fingerprint(target, runs):
            return ""
    except UserError:
        return ""
    if target.kind == "run" and target.run is not None:
        return command("eval", target.name, runs=runs)
    tasks = list(results.get("tasks", {}))
    named = tasks and all(task in BENCHMARKS for task in tasks)  # others may be files, which results do not name
    return command("eval", target.name, "--tasks", ",".join(tasks) if named else "...", runs=runs)
