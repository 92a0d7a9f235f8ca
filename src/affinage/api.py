"""affinage from Python, for notebooks and scripts: a recipe becomes a run, and a run becomes a model.

    from affinage.api import generate, graph_of, recipe, run

    mine = recipe("quickstart", {"name": "mine", "pretrain.steps": 200})
    print(graph_of(mine).depth)
    made = run(mine, until="pretrain", on_metrics=print)
    print(generate(made.model(), ["The capital"]))

These are the verbs `run`, `graph` and `generate` of the command line, with the same results in the same folders.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affinage.cluster.processes import Processes
from affinage.config.load import LoadedRecipe, load_recipe
from affinage.durations import duration
from affinage.errors import UserError
from affinage.hardware.devices import prepare
from affinage.pipeline.build import build_steps
from affinage.pipeline.runner import PipelineRunner, ProgressListener
from affinage.registry import load_plugins
from affinage.results import read_json_lines

if TYPE_CHECKING:
    from affinage.generation.engine import LoadedModel
    from affinage.model import Graph


def recipe(name: str | Path, changes: Mapping[str, Any] | None = None) -> LoadedRecipe:
    """Load a recipe by its file, or a packaged one by its name, with values changed by dotted key.

    Raises:
        UserError: for every mistake in it, with the line or the key.
    """
    return load_recipe(name, [f"{key}={json.dumps(value)}" for key, value in (changes or {}).items()])


def graph_of(loaded: LoadedRecipe, vocabulary: int | None = None) -> "Graph":
    """Returns the recipe's model; `vocabulary` is the size of `vocab: auto`, by default that of the tokenizer."""
    prepare()
    from affinage.model import parse
    from affinage.model_check import check_model

    load_plugins(loaded)
    size = loaded.recipe.tokenizer.vocab_size if vocabulary is None else vocabulary
    graph = parse(loaded.recipe.model, loaded.locate, vocabulary=size)
    check_model(graph, loaded.recipe.packing.seq_len)
    return graph


@dataclass(frozen=True)
class Run:
    """The results of a recipe in its folder."""

    name: str
    runs: Path

    @property
    def folder(self) -> Path:
        """Holds a link to the result of every step, and the report."""
        return self.runs / self.name

    def metrics(self, training: str = "pretrain") -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, oldest first; those of steps have `loss`, those of validations `validation`."""
        return list(read_json_lines(self.folder / training / "metrics.jsonl"))

    def checkpoints(self, training: str = "pretrain") -> Path:
        """The folder with one Orbax checkpoint for each kept step, named by the step."""
        return self.folder / training / "checkpoints"

    def model(
        self, training: str = "", step: int | None = None, mesh: Mapping[str, int | str] | None = None
    ) -> "LoadedModel":
        """The model of a training and step, by default the last ones; split over a mesh such as {"tensor": 2}.

        Raises UserError if there is no such training or step, or the model does not divide over the mesh.
        """
        prepare()
        from affinage.pipeline.opening import open_model

        place = self.folder / training if training else self.folder
        return open_model(str(place) + ("" if step is None else f"@{step}"), self.runs, mesh=mesh)


def run(
    loaded: LoadedRecipe,
    *,
    until: str | Sequence[str] = (),
    runs: str | Path = "runs",
    on_metrics: Callable[[Mapping[str, Any]], None] | None = None,
) -> Run:
    """Run a recipe to its end, or until one or several steps. Complete steps are not run again, stopped ones resume.

    `on_metrics` is called with every line of a training's metrics, such as {"step": 10, "loss": 2.5, ...}.

    Raises:
        Preempted: it was interrupted and has saved its state; the same call resumes.
        UserError: for a mistake in the recipe or its files.
    """
    listener: Any = ProgressListener()
    listener.on_metrics = on_metrics or listener.on_metrics
    listener.on_end = lambda step, result, seconds: print(f"{step.name:<18}{duration(seconds)}", flush=True)
    prepare()
    wanted = [until] if isinstance(until, str) else until
    runner = PipelineRunner(loaded, Path(runs), build_steps(loaded), until=wanted)
    with Processes.current.all_at_work():
        runner.check(runner.plan())
    runner.run(listener)
    return Run(loaded.recipe.name, Path(runs))


def generate(
    model: "LoadedModel", prompts: Sequence[str], tokens: int = 64, *, stop: str | Sequence[str] = (), **sampling: Any
) -> list[str]:
    """Continue each of the prompts by at most `tokens` tokens, or until one of the texts of `stop` comes.

    `sampling` are `temperature`, `top_k`, `top_p`, `min_p` and `seed`, as of
    `affinage.generation.sampling.SamplingParams`; by default the likeliest token is taken.
    """
    from affinage.generation.engine import generate as generated
    from affinage.generation.sampling import SamplingParams

    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    params = SamplingParams(max_new_tokens=tokens, stop=stops, **sampling)
    rows = [prompt_tokens(prompt, model) for prompt in prompts]
    return [result.text for result in generated(model, rows, params)]


def prompt_tokens(text: str, model: "LoadedModel") -> list[int]:
    """The ids of a text as the beginning of a document. Raises UserError if it does not fit the model's context."""
    tokenizer = model.tokenizer
    prompt = [*tokenizer.opening, *tokenizer.encode(text)] or [tokenizer.bos]  # not every model has an opening
    if len(prompt) >= model.context:
        raise UserError(f"the prompt has {len(prompt)} tokens; this model takes at most {model.context - 1}")
    return prompt
