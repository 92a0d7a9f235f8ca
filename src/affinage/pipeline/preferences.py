"""The work of the stages of direct preference optimisation: pairs to rows, the reference, the training."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from affinage.cluster.processes import Processes
from affinage.config.data import DataSettings
from affinage.config.tuning import DpoSettings
from affinage.pipeline.monitor import tuning_monitor, within_epochs
from affinage.pipeline.step import StepContext, Summary
from affinage.pipeline.store import content_hash
from affinage.pipeline.texts import chat_tokenizer, print_counts, searched_benchmarks
from affinage.pipeline.trainings import begin_with, chat_facts, graph_of, mesh_of, parallel_of, run_training, token_rows

if TYPE_CHECKING:
    from affinage.model import Graph
    from affinage.training import TrainJob


def preferences(context: StepContext) -> Summary:
    """Write pairs of answers as token shards."""
    from affinage.data.executor import open_executor
    from affinage.data.preferences import prepare_preferences

    recipe = context.recipe
    assert recipe.dpo is not None
    settings = recipe.data or DataSettings.model_construct()
    with searched_benchmarks(context) as searched, open_executor(settings) as executor:
        summary = prepare_preferences(
            recipe.dpo,
            chat_tokenizer(context),
            context.folder,
            context=recipe.dpo.seq_len or recipe.packing.seq_len,
            seed=recipe.seed,
            system_prompt=recipe.chat_system_prompt,
            world_folder=context.inputs.get("synthesize"),
            searched=searched,
            executor=executor,
            progress=context.progress,
        )
    print_counts(summary, "pairs")
    return summary


def reference(context: StepContext) -> Summary:
    """Compute the log-probability that the model gives every answer before it learns from them."""
    from affinage.model.preferred import ANSWERS
    from affinage.parallel import make_mesh
    from affinage.training.trainer import Trainer

    settings, rows = _settings(context).model_copy(update={"lora": None}), context.inputs["preference-data"]
    graph = _graph(context, settings)
    feed, _ = token_rows(context, settings, rows)
    job = _job(context, graph, settings, feed)
    begin = job.initial_params
    assert begin is not None
    try:
        program = Trainer(job, make_mesh(job.mesh, job.hardware.acquire()), feed.batch(0))
        params = begin(program.abstract.params)
        told = {part: _write_reference(context, program, params, rows, part) for part in ("train", "validation")}
    finally:
        job.hardware.release()
    return {"rows": told, "documents": graph[ANSWERS].kind.model_dump()["documents"]}


def _write_reference(context: StepContext, program: Any, params: Any, rows: Path, part: str) -> dict[str, int]:
    import jax
    import numpy as np

    from affinage.data.atomic import write_array
    from affinage.data.dataloader import ValidationRows
    from affinage.data.token_shards import find_shard_folders
    from affinage.model.preferred import ANSWERS

    (context.folder / part).mkdir(exist_ok=True)
    counts, compiled = {}, None
    for name, folder in find_shard_folders(rows / part).items():
        batches = ValidationRows(folder, batch=program.rows // program.job.settings.gradient_accumulation_steps)
        found = []
        for number, batch in enumerate(batches):
            context.progress(f"{part}/{name} {number / len(batches):.0%}")
            compiled = compiled or program.compile_value(ANSWERS, batch)
            found.append(np.asarray(jax.device_get(compiled(params, program.put(batch))))[..., 0])
        if Processes.current.first:
            write_array(context.folder / part / f"{name}.npy", np.concatenate(found)[: batches.rows])
        counts[name] = batches.rows
    return counts


def dpo(context: StepContext) -> Summary:
    """Teach the model to prefer the chosen answers, held to the model that it was."""
    from affinage.data.preferences import PreferenceFeed, PreferenceRows, read_reference

    asked, inputs = _settings(context), context.inputs
    rows, told = inputs["preference-data"], inputs.get("ref-logprobs")
    feed, held_out = token_rows(context, asked, rows)
    settings = within_epochs(asked, feed, "dpo")
    train, validation, data = None, {}, {"rows": content_hash(rows, "train")}
    system_prompt = context.recipe.chat_system_prompt
    if told is not None:
        train, validation = read_reference(told / "train"), read_reference(told / "validation")
        data["reference"] = content_hash(told, "train")
    return run_training(
        context,
        _job(
            context,
            _graph(context, settings),
            settings,
            feed if train is None else PreferenceFeed(feed, train),
            data=data,
            validation={name: PreferenceRows(found, validation.get(name)) for name, found in held_out.items()},
            judge=tuning_monitor(context, settings, asked.steps, _base_graph(context), feed, system_prompt),
        ),
        # What it is used with is the model itself, whose loss is of the next token.
        graph=_base_graph(context),
        facts={"context": feed.context, "system_prompt": system_prompt, **chat_facts(context)},
    )


def _job(context: StepContext, graph: "Graph", settings: DpoSettings, feed: Any, **more: Any) -> "TrainJob":
    from affinage.training import TrainJob

    base = _base_graph(context)
    tokens = context.recipe.packing.seq_len if settings.seq_len is None else settings.seq_len
    return TrainJob(
        graph=graph,
        settings=settings,
        mesh=mesh_of(context),
        parallel=parallel_of(context, base, settings, tokens),
        seed=context.recipe.seed,
        feed=feed,
        folder=context.folder,
        initial_params=begin_with(context, base, ("sft", "pretrain"), _settings(context).from_step),
        name=context.folder.name.rpartition("-")[0],
        **more,
    )


def _settings(context: StepContext) -> DpoSettings:
    assert context.recipe.dpo is not None
    return context.recipe.dpo


def _base_graph(context: StepContext) -> "Graph":
    from affinage.data.tokenizer import Tokenizer

    return graph_of(context, Tokenizer.load(context.inputs["train-tokenizer"]))


def _graph(context: StepContext, settings: DpoSettings) -> "Graph":
    from affinage.data.preferences import documents_in_a_row
    from affinage.model.preferred import preference_graph

    return preference_graph(_base_graph(context), settings, documents_in_a_row(context.inputs["preference-data"]))
