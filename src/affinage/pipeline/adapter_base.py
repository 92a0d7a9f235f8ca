"""What model trained adapters belong on, and where Hugging Face's libraries find it."""

import os
from dataclasses import dataclass
from pathlib import Path

from affinage.pipeline.initial import begun_with
from affinage.pipeline.models import export_of, made_from
from affinage.pipeline.names import TRAININGS, Target, locate
from affinage.pipeline.store import read_request


@dataclass(frozen=True)
class AdapterBase:
    """The model that a training began with."""

    model: str  # as verbs take it; "" for an imported one
    place: str  # a repository of the hub, or a folder that transformers loads; "" where none is known


def adapter_base(target: Target, runs: Path) -> AdapterBase:
    """The base of the training that `target` is: the training before it, or the model that its recipe begins with.

    Raises UserError as `locate` does.
    """
    training, _ = locate(target, runs)
    request = read_request(training)
    before = next((name for name in TRAININGS if request is not None and name in request[0].inputs), None)
    found = None if before is None else made_from(training, before)
    if request is None or before is None or found is None:
        return AdapterBase("", begun_with(training))
    step = request[0].settings.get(request[0].step, {}).get("from_step")
    exports = [] if step else [export_of(found, export.parent) for export in sorted(runs.glob("*/export"))]
    exported = next(filter(None, exports), None)
    beside = None if target.run is None else target.run / before
    model = str(beside if beside is not None and beside.exists() and beside.samefile(found) else found)
    return AdapterBase(model + (f"@{step}" if step else ""), "" if exported is None else os.path.abspath(exported))
