"""The training steps: pretraining, fine-tuning, and direct preference optimization."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich

from affinage.cluster.processes import Processes
from affinage.config.training import PretrainSettings, TrainSettings
from affinage.config.tuning import DpoSettings, TuningSettings
from affinage.errors import UserError
from affinage.pipeline.base_models import (
    BEGUN_WITH,
    MODEL,
    chat_template_of,
    checkpoints_of,
    extended,
    initial_folder,
    initial_params,
    origin_of,
    trained_params,
)
from affinage.pipeline.monitor import PretrainingMonitor, tuning_monitor, within_epochs
from affinage.pipeline.step import StepContext, Summary
from affinage.pipeline.store import content_hash, write_json
from affinage.plugins import plugin_sources

if TYPE_CHECKING:
    from affinage.config.parallel import ParallelSettings
    from affinage.data.dataloader import DataLoader, ValidationRows
    from affinage.data.tokenizer import Tokenizer
    from affinage.model import Graph
    from affinage.training import Feed, TrainJob, ValidationSet
    from affinage.training.job import Benchmarks, Judge

FEED = "feed.json"


def pretrain(context: StepContext) -> Summary:
    """Train the model, from random weights or those that `init` names, on rows of documents."""
    from affinage.data.tokenizer import Tokenizer

    settings = context.recipe.pretrain
    assert settings is not None
    graph = graph_of(context, Tokenizer.load(context.inputs["train-tokenizer"]))
    feed, validation = token_rows(context, settings, context.inputs["tokenize"])
    summary = _train(
        context,
        graph,
        settings,
        feed,
        validation,
        data={"rows": content_hash(context.inputs["tokenize"], "train")},
        documents=partial(documents_of, feed),
        facts={"context": feed.context, "system_prompt": ""},
        initial_params=_imported(context, graph),
        benchmarks=PretrainingMonitor(context, settings, graph, validation) if settings.monitor else None,
    )
    return summary | {"epochs": feed.epochs(settings.steps)}


def sft(context: StepContext) -> Summary:
    """Fine-tune the pretrained model, or the one that `init` names, on conversations."""
    from affinage.data.sft import show_examples
    from affinage.data.tokenizer import Tokenizer

    asked = context.recipe.sft
    assert asked is not None
    tokenizer = Tokenizer.load(context.inputs["train-tokenizer"])
    graph = graph_of(context, tokenizer)
    if Processes.current.first:
        rich.print("sft: an example; what is trained on stands between ⟦ and ⟧")
        for _, example in show_examples(context.inputs["sft-data"], tokenizer, 1):
            rich.get_console().print(example, markup=False, highlight=False)
    feed, validation = token_rows(context, asked, context.inputs["sft-data"])
    settings = within_epochs(asked, feed, "sft")
    return _train(
        context,
        graph,
        settings,
        feed,
        validation,
        data={"rows": content_hash(context.inputs["sft-data"], "train")},
        documents=partial(documents_of, feed),
        facts={"context": feed.context, "system_prompt": settings.system_prompt, **chat_facts(context)},
        initial_params=begin_with(context, graph, ("pretrain",), settings.from_step),
        judge=tuning_monitor(context, settings, asked.steps, graph, feed, settings.system_prompt),
    )


def chat_facts(context: StepContext) -> dict[str, str]:
    """The chat template, for whoever talks with the model; nothing for ChatML."""
    source = chat_template_of(context.loaded, context.inputs["train-tokenizer"])
    return {} if source is None else {"chat_template": source}


def begin_with(
    context: StepContext, graph: "Graph", trainings: Sequence[str], step: int | None = None
) -> Callable[[Any], Any] | None:
    """The weights of the first of `trainings` that the stage reads, or those that the recipe begins with.

    `step` is of the checkpoint, the last one by default. Raises UserError if it was not kept.
    """
    from affinage.checkpoint import CheckpointStore

    for name in trainings:
        if name in context.inputs:
            store = CheckpointStore(checkpoints_of(context.inputs[name], step))
            if step is not None and step not in store.steps():
                kept = ", ".join(map(str, store.steps()))
                raise UserError(
                    f"{name} has kept no checkpoint of step {step}, but of {kept}",
                    where=f"{context.folder.name.rpartition('-')[0]}.from_step",
                    fix=f"Keep them with runtime.checkpoint.keep_every, and train it again: --force {name}",
                )
            return partial(trained_params, context.inputs[name], graph, step)
    return _imported(context, graph)


def _imported(context: StepContext, graph: "Graph") -> Callable[[Any], Any] | None:
    """The weights that the recipe begins with; None for random ones."""
    folder = initial_folder(context.loaded)
    return None if folder is None else initial_params(folder, graph)


def _begun_with(context: StepContext) -> dict[str, str]:
    """Where others find the imported model that a training begins with, as far as that is known."""
    first = not {"pretrain", "sft"} & context.inputs.keys()
    folder = initial_folder(context.loaded) if first else None
    origin = "" if folder is None else origin_of(folder)
    return {BEGUN_WITH: origin} if origin else {}


def graph_of(context: StepContext, tokenizer: "Tokenizer") -> "Graph":
    """The recipe's model, with the tokenizer's vocabulary where it says `vocab: auto`.

    Raises:
        UserError: also if the tokenizer has ids that the model does not know.
    """
    from affinage.model import parse

    recipe, locate = context.recipe, context.loaded.locate
    graph = parse(with_vocabulary(recipe.model, tokenizer.vocabulary), locate)
    if tokenizer.vocabulary > graph.vocabulary:
        raise UserError(
            f"the tokenizer has {tokenizer.vocabulary} pieces, the model's vocabulary is {graph.vocabulary}",
            where=locate(("model", "nodes")),
            fix=f"Set `vocab: auto`, or at least {tokenizer.vocabulary}, where the model says {graph.vocabulary}.",
        )
    return graph


def with_vocabulary(model: Any, vocabulary: int) -> Any:
    """A copy of a `model:` mapping with every `vocab: auto` replaced."""
    if isinstance(model, dict):
        return {
            key: vocabulary if (key, value) == ("vocab", "auto") else with_vocabulary(value, vocabulary)
            for key, value in model.items()
        }
    return [with_vocabulary(entry, vocabulary) for entry in model] if isinstance(model, list) else model


def token_rows(
    context: StepContext, settings: PretrainSettings | TuningSettings, rows: Path
) -> "tuple[DataLoader, dict[str, ValidationRows]]":
    """The batches of a training and its held-out rows; what finds a step's rows again is written down."""
    from affinage.data.dataloader import DataLoader, validation_sets

    batch = _rows_per_step(context, settings)
    mixture = None if settings.mixture is None else [(each.from_step, each.weights) for each in settings.mixture]
    feed = DataLoader(rows / "train", seed=context.recipe.seed, batch=batch, mixture=mixture)
    # How to find the rows of a step again; the number of devices may have a part in the batch.
    told = {"rows": rows.name, "seed": context.recipe.seed, "batch": batch, "mixture": mixture, "steps": settings.steps}
    if Processes.current.first:
        write_json(context.folder / FEED, told)
    # A micro-batch is what fits in memory.
    held_out = validation_sets(
        rows / "validation", batch=batch // settings.gradient_accumulation_steps, limit=settings.eval_sequences
    )
    return feed, held_out


def _rows_per_step(context: StepContext, settings: TrainSettings) -> int:
    from affinage.hardware.devices import acquire
    from affinage.parallel import make_mesh
    from affinage.training import rows_per_step

    return rows_per_step(settings, make_mesh(mesh_of(context), acquire()).size)


def mesh_of(context: StepContext) -> dict[str, int | str]:
    """The recipe's mesh."""
    return {str(axis): size for axis, size in context.recipe.mesh.items()}


def parallel_of(context: StepContext, graph: "Graph", settings: TrainSettings, tokens: int) -> "ParallelSettings":
    """How the work is split, with `remat: auto` chosen for the devices that are here and rows of `tokens` tokens."""
    parallel = context.recipe.parallel
    if parallel.remat != "auto":
        return parallel
    from affinage.hardware.devices import acquire
    from affinage.parallel import MeshLayout, make_mesh, table_with
    from affinage.planning.auto_remat import remat_for_devices
    from affinage.training import rows_per_step

    mesh = make_mesh(mesh_of(context), acquire())
    layout = MeshLayout(mesh, table_with(parallel.sharding))
    choice = remat_for_devices(graph, settings, parallel, layout, rows_per_step(settings, mesh.size), tokens)
    print(f"{context.folder.name.rpartition('-')[0]}: {choice}", flush=True)
    return parallel.model_copy(update={"remat": choice.remat})


def documents_of(feed: "DataLoader", step: int) -> list[dict[str, Any]]:
    """{row, folder, number, documents} of every row of the batch of a step, counted from 1."""
    from affinage.data.lineage import spans_of_rows

    places = feed.where(step - 1)
    spans = {
        name: spans_of_rows(feed.shards[name], [number for folder, number in places if folder == name])
        for name in {folder for folder, _ in places}
    }
    named = [[f"{span['source']}/{span['id']}" for span in spans.get(name, {}).get(n, [])] for name, n in places]
    return [
        {"row": row, "folder": folder, "number": number, "documents": documents}
        for row, ((folder, number), documents) in enumerate(zip(places, named, strict=True))
    ]


def _train(
    context: StepContext,
    graph: "Graph",
    settings: TrainSettings,
    feed: "Feed",
    validation: "Mapping[str, ValidationSet]",
    *,
    data: dict[str, str],
    documents: Callable[[int], Any] | None = None,
    facts: dict[str, Any] | None = None,
    initial_params: Callable[[Any], Any] | None = None,
    judge: "Judge | None" = None,
    benchmarks: "Benchmarks | None" = None,
) -> Summary:
    from affinage.training import TrainJob

    tokens = (facts or {}).get("context", 1)
    job = TrainJob(
        graph=graph,
        settings=settings,
        mesh=mesh_of(context),
        parallel=parallel_of(context, graph, settings, tokens),
        seed=context.recipe.seed,
        feed=feed,
        data=data,
        code=plugin_sources(context.loaded, [context.recipe.model, settings.deciding()]),
        documents=documents,
        validation=validation,
        folder=context.folder,
        initial_params=initial_params,
        judge=judge,
        benchmarks=benchmarks,
        name=context.folder.name.rpartition("-")[0],
    )
    return run_training(context, job, graph=graph, facts=facts or {})


def remote_of(context: StepContext) -> str | None:
    """Where a training is copied to: a folder that is called like its own; None if nowhere."""
    remote = context.recipe.runtime.remote
    return None if remote is None else f"{remote.rstrip('/')}/{context.folder.name}"


def bring_from_remote(context: StepContext, *, forced: bool) -> None:
    """Begin with the newest checkpoint that is at the recipe's `remote`, where it is newer than what is here.

    If the training is `forced`, what is there is removed in place of that.

    Raises:
        UserError: nobody answers there.
    """
    url = remote_of(context)
    if url is not None:
        from affinage.checkpoint.uploader import download_newest, forget

        if forced:
            forget(url)
            return
        name = context.folder.name.rpartition("-")[0]
        tell = partial(rich.get_console().print, markup=False, highlight=False, soft_wrap=True)
        download_newest(url, context.folder, lambda line: tell(f"{name}: {line}"))


def run_training(context: StepContext, job: "TrainJob", *, graph: "Graph", facts: dict[str, Any]) -> Summary:
    """Train in the stage's folder; `graph` and `facts` are what one must know, beside precision, to use the model."""
    from affinage.checkpoint.store import remove_incomplete
    from affinage.checkpoint.uploader import CHECKPOINTS, Uploader
    from affinage.tracking import trackers_of
    from affinage.training import train
    from affinage.training.job import Extension

    settings, recipe = context.recipe.runtime.trackers, context.recipe.name
    makers = trackers_of(settings, recipe=recipe, training=job.name, runs=context.run_folder.parent)
    extension = extended(context.loaded, job.name)
    keep, url = context.recipe.runtime.checkpoint, remote_of(context)
    if url is not None:
        uploader = Uploader(url, context.folder, keep_last=keep.keep_last, keep_every=keep.keep_every)
        job = replace(job, uploader=uploader)
    begun = None if extension is None else Extension(*extension)
    job = replace(job, runtime=context.recipe.runtime, trackers=makers, extends=begun, measured=context.on_metrics)
    lora = job.settings.lora if isinstance(job.settings, TuningSettings) else None
    told = {"graph": graph.to_dict(), **facts, **_begun_with(context)}
    told |= {"lora": lora.model_dump(mode="json")} if lora else {}
    if Processes.current.first:
        write_json(context.folder / MODEL, told | {"precision": job.settings.precision.model_dump(mode="json")})
    summary = train(job)
    if Processes.current.first:
        remove_incomplete(context.folder / CHECKPOINTS)  # they are no part of the result
    return summary


# ---- preferences ----


def ref_logprobs(context: StepContext) -> Summary:
    """Compute the log-probability that the model gives every answer before it learns from them."""
    from affinage.model.preferred import ANSWERS
    from affinage.parallel import make_mesh
    from affinage.training.trainer import Trainer

    settings, rows = _dpo(context).model_copy(update={"lora": None}), context.inputs["preference-data"]
    graph = _preference_graph(context, settings)
    feed, _ = token_rows(context, settings, rows)
    job = _dpo_job(context, graph, settings, feed)
    begin = job.initial_params
    assert begin is not None
    try:
        trainer = Trainer(job, make_mesh(job.mesh, job.hardware.acquire()), feed.batch(0))
        params = begin(trainer.abstract.params)
        told = {part: _write_reference(context, trainer, params, rows, part) for part in ("train", "validation")}
    finally:
        job.hardware.release()
    return {"rows": told, "documents": graph[ANSWERS].kind.model_dump()["documents"]}


def _write_reference(context: StepContext, trainer: Any, params: Any, rows: Path, part: str) -> dict[str, int]:
    import jax
    import numpy as np

    from affinage.data.atomic import write_array
    from affinage.data.dataloader import ValidationRows
    from affinage.data.token_shards import find_shard_folders
    from affinage.model.preferred import ANSWERS

    (context.folder / part).mkdir(exist_ok=True)
    counts, compiled = {}, None
    for name, folder in find_shard_folders(rows / part).items():
        batches = ValidationRows(folder, batch=trainer.rows // trainer.job.settings.gradient_accumulation_steps)
        found = []
        for number, batch in enumerate(batches):
            context.progress(f"{part}/{name} {number / len(batches):.0%}")
            compiled = compiled or trainer.compile_value(ANSWERS, batch)
            found.append(np.asarray(jax.device_get(compiled(params, trainer.put(batch))))[..., 0])
        if Processes.current.first:
            write_array(context.folder / part / f"{name}.npy", np.concatenate(found)[: batches.rows])
        counts[name] = batches.rows
    return counts


def dpo(context: StepContext) -> Summary:
    """Teach the model to prefer the chosen answers, held to the model that it was."""
    from affinage.data.preferences import PreferenceFeed, PreferenceRows, read_reference

    asked, inputs = _dpo(context), context.inputs
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
        _dpo_job(
            context,
            _preference_graph(context, settings),
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


def _dpo_job(context: StepContext, graph: "Graph", settings: DpoSettings, feed: Any, **more: Any) -> "TrainJob":
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
        initial_params=begin_with(context, base, ("sft", "pretrain"), _dpo(context).from_step),
        name=context.folder.name.rpartition("-")[0],
        **more,
    )


def _dpo(context: StepContext) -> DpoSettings:
    assert context.recipe.dpo is not None
    return context.recipe.dpo


def _base_graph(context: StepContext) -> "Graph":
    from affinage.data.tokenizer import Tokenizer

    return graph_of(context, Tokenizer.load(context.inputs["train-tokenizer"]))


def _preference_graph(context: StepContext, settings: DpoSettings) -> "Graph":
    from affinage.data.preferences import documents_in_a_row
    from affinage.model.preferred import preference_graph

    return preference_graph(_base_graph(context), settings, documents_in_a_row(context.inputs["preference-data"]))
