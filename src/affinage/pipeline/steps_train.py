"""The training steps: pretraining, fine-tuning, and direct preference optimization, and what they need."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import rich
from rich.markup import escape

from affinage.cluster.processes import Processes
from affinage.config.data import POCKET_WORLD
from affinage.config.load import LoadedRecipe
from affinage.config.training import DpoSettings, MonitorSettings, PretrainSettings, TrainSettings, TuningSettings
from affinage.errors import UserError
from affinage.pipeline.imports import chat_template_of, extended, initial_folder, initial_params
from affinage.pipeline.models import BEGUN_WITH, MODEL, TOKENIZER, trained_params
from affinage.pipeline.monitor import monitor_of
from affinage.pipeline.step import StepContext, Summary, at
from affinage.pipeline.steps_data import check_task
from affinage.pipeline.store import content_hash, write_json
from affinage.plugins import plugin_sources
from affinage.results import read_json

if TYPE_CHECKING:
    from affinage.data.dataloader import DataLoader, ValidationRows
    from affinage.model import Graph
    from affinage.training import Feed, TrainJob

FEED = "feed.json"  # how to find the rows of a step again; the number of devices may have a part in the batch
Tuning = TypeVar("Tuning", bound=TuningSettings)


def pretrain(context: StepContext) -> Summary:
    """Train the model, from random weights or those that `init_from` names, on rows of documents."""
    settings, graph, rows = context.recipe.pretrain, graph_of(context), context.inputs["tokenize"]
    assert settings is not None
    feed, validation = token_rows(context, settings, rows)
    job = _job(
        context,
        graph,
        settings,
        feed,
        feed.context,
        data={"rows": content_hash(rows, "train")},
        documents=partial(documents_of, feed),
        validation=validation,
        initial_params=_begin_with(context, graph, ()),
        monitor=monitor_of(context, settings, graph, feed.context),
    )
    summary = _train(context, job, graph, {"context": feed.context, "system_prompt": ""})
    return summary | {"epochs": feed.epochs(settings.steps)}


def sft(context: StepContext) -> Summary:
    """Fine-tune the pretrained model, or the one that `init_from` names, on conversations."""
    from affinage.data.tokenizer import Tokenizer
    from affinage.data.tuning_data import show_examples

    asked, graph, rows = context.recipe.sft, graph_of(context), context.inputs["sft-data"]
    assert asked is not None
    if Processes.current.first:
        rich.print("sft: an example; what is trained on stands between ⟦ and ⟧")
        for _, example in show_examples(rows, Tokenizer(context.inputs["train-tokenizer"]), 1):
            rich.get_console().print(example, markup=False, highlight=False)
    feed, validation = token_rows(context, asked, rows)
    settings = within_epochs(asked, feed, "sft")
    job = _job(
        context,
        graph,
        settings,
        feed,
        feed.context,
        data={"rows": content_hash(rows, "train")},
        documents=partial(documents_of, feed),
        validation=validation,
        initial_params=_begin_with(context, graph, ("pretrain",), settings.from_step),
        monitor=monitor_of(context, settings, graph, feed.context, settings.system_prompt),
    )
    summary = _train(context, job, graph, _chat_facts(context, feed, settings.system_prompt))
    return _with_end(summary, settings, asked)


def dpo(context: StepContext) -> Summary:
    """Teach the model to prefer the chosen answers, held to the model that it was."""
    from affinage.data.dataloader import read_reference

    asked, inputs, graph = _dpo(context), context.inputs, graph_of(context)
    rows, reference = inputs["preference-data"], inputs.get("ref-logprobs")
    system_prompt = context.recipe.chat_system_prompt
    feed, held_out = token_rows(context, asked, rows)
    settings = within_epochs(asked, feed, "dpo")
    data = {"rows": content_hash(rows, "train")}
    for found in held_out.values():
        found.bytes = 0  # the loss is of pairs, not of text
    if reference is not None:
        feed.reference, validation = read_reference(reference / "train"), read_reference(reference / "validation")
        for name, found in held_out.items():
            found.reference = validation.get(name)
        data["reference"] = content_hash(reference, "train")
    monitor = monitor_of(context, settings, graph, feed.context, system_prompt)
    job = _dpo_job(context, graph, settings, feed, data=data, validation=held_out, monitor=monitor)
    # What it is used with is the model itself, whose loss is of the next token.
    summary = _train(context, job, graph, _chat_facts(context, feed, system_prompt))
    return _with_end(summary, settings, asked)


def ref_logprobs(context: StepContext) -> Summary:
    """Compute the log-probability that the model gives every answer before it learns from them."""
    import jax
    import numpy as np

    from affinage.data.atomic import write_array
    from affinage.data.dataloader import ValidationRows
    from affinage.data.token_shards import find_shard_folders
    from affinage.model.graph import ANSWERS
    from affinage.parallel import make_mesh
    from affinage.training.trainer import Trainer

    settings, rows = _dpo(context).model_copy(update={"lora": None}), context.inputs["preference-data"]
    feed, _ = token_rows(context, settings, rows)
    job = _dpo_job(context, graph_of(context), settings, feed)
    counts: dict[str, dict[str, int]] = {"train": {}, "validation": {}}
    compiled = None
    assert job.initial_params is not None
    try:
        trainer = Trainer(job, make_mesh(job.mesh, job.hardware.acquire()), feed.batch(0))
        params = job.initial_params(trainer.abstract.params)
        for part, of_part in counts.items():
            (context.folder / part).mkdir(exist_ok=True)
            for name, folder in find_shard_folders(rows / part).items():
                batches = ValidationRows(folder, batch=trainer.rows // settings.gradient_accumulation_steps)
                found = []
                for number, batch in enumerate(batches):
                    context.progress(f"{part}/{name} {number / len(batches):.0%}")
                    compiled = compiled or trainer.compile_value(ANSWERS, batch)
                    found.append(np.asarray(jax.device_get(compiled(params, trainer.put(batch))))[..., 0])
                if Processes.current.first:
                    write_array(context.folder / part / f"{name}.npy", np.concatenate(found)[: batches.rows])
                of_part[name] = batches.rows
    finally:
        job.hardware.release()
    return {"rows": counts, "documents": job.graph[ANSWERS].layer.model_dump()["documents"]}


def _dpo(context: StepContext) -> DpoSettings:
    assert context.recipe.dpo is not None
    return context.recipe.dpo


def _dpo_job(context: StepContext, base: "Graph", settings: DpoSettings, feed: Any, **fields: Any) -> "TrainJob":
    from affinage.data.tuning_data import documents_in_a_row
    from affinage.model.graph import preference_graph

    graph = preference_graph(base, settings, documents_in_a_row(context.inputs["preference-data"]))
    initial = _begin_with(context, base, ("sft", "pretrain"), settings.from_step)
    seq_len = settings.seq_len or context.recipe.packing.seq_len
    return _job(context, graph, settings, feed, seq_len, model=base, initial_params=initial, **fields)


# ---- what all of them share ----


def _job(
    context: StepContext,
    graph: "Graph",
    settings: TrainSettings,
    feed: "Feed",
    seq_len: int,
    *,
    model: "Graph | None" = None,
    **fields: Any,
) -> "TrainJob":
    """The job of a step, with more of its `fields`; `remat: auto` is chosen for `model`, or else for the graph."""
    from affinage.checkpoint.remote import Uploader
    from affinage.hardware.devices import acquire
    from affinage.parallel import MeshLayout, make_mesh, table_with
    from affinage.planning.auto_remat import remat_for_devices
    from affinage.tracking import trackers_of
    from affinage.training import TrainJob, rows_per_step
    from affinage.training.job import Extension

    recipe, runtime, parallel, name = context.recipe, context.recipe.runtime, context.recipe.parallel, context.step
    if parallel.remat == "auto":
        mesh = make_mesh(mesh_of(context), acquire())
        layout, rows = MeshLayout(mesh, table_with(parallel.sharding)), rows_per_step(settings, mesh.size)
        choice = remat_for_devices(model or graph, settings, parallel, layout, rows, seq_len)
        print(f"{name}: {choice}", flush=True)
        parallel = parallel.model_copy(update={"remat": choice.remat})
    url, keep = remote_of(context), runtime.checkpoint
    if url is not None:
        fields["uploader"] = Uploader(url, context.folder, keep_last=keep.keep_last, keep_every=keep.keep_every)
    extension = extended(context.loaded, name) if name in recipe.trainings else None
    return TrainJob(
        graph=graph,
        settings=settings,
        mesh=mesh_of(context),
        parallel=parallel,
        seed=recipe.seed,
        feed=feed,
        code=plugin_sources(context.loaded, [recipe.model, settings.deciding()]),
        folder=context.folder,
        name=name,
        runtime=runtime,
        trackers=trackers_of(runtime.trackers, recipe=recipe.name, training=name, runs=context.run_folder.parent),
        extends=None if extension is None else Extension(*extension),
        measured=context.on_metrics,
        **fields,
    )


def _train(context: StepContext, job: "TrainJob", graph: "Graph", facts: dict[str, Any]) -> Summary:
    """Train in the step's folder; `graph` and `facts` are what one must know, beside precision, to use the model."""
    from affinage.training import train

    settings = job.settings
    facts = {"graph": graph.to_dict(), **facts, "precision": settings.precision.model_dump(mode="json")}
    if isinstance(settings, TuningSettings) and settings.lora is not None:
        facts["lora"] = settings.lora.model_dump(mode="json")
    imported = None if {"pretrain", "sft"} & context.inputs.keys() else initial_folder(context.loaded)
    if imported is not None and (origin := read_json(imported / MODEL)["imported"].get("from")):
        facts[BEGUN_WITH] = origin
    if Processes.current.first:
        write_json(context.folder / MODEL, facts)
    return train(job)


def _chat_facts(context: StepContext, feed: "DataLoader", system_prompt: str) -> dict[str, Any]:
    template = chat_template_of(context.loaded, context.inputs["train-tokenizer"])
    facts = {"context": feed.context, "system_prompt": system_prompt}
    return facts if template is None else facts | {"chat_template": template}


def _begin_with(
    context: StepContext, graph: "Graph", trainings: Sequence[str], step: int | None = None
) -> Callable[[Any], Any] | None:
    """The weights of the first of `trainings` that the step reads, or those that the recipe begins with.

    `step` is of the checkpoint, the last one by default.
    """
    before = next((context.inputs[name] for name in trainings if name in context.inputs), None)
    if before is not None:
        return partial(trained_params, before, graph, step)
    folder = initial_folder(context.loaded)
    return None if folder is None else initial_params(folder, graph)


def graph_of(context: StepContext) -> "Graph":
    """The recipe's model, with the tokenizer's vocabulary where it says `vocab: auto`.

    Raises:
        UserError: also if the tokenizer has ids that the model does not know.
    """
    from affinage.data.tokenizer import Tokenizer
    from affinage.model import parse

    vocabulary, locate = Tokenizer(context.inputs["train-tokenizer"]).vocabulary, context.loaded.locate
    graph = parse(with_vocabulary(context.recipe.model, vocabulary), locate)
    if vocabulary > graph.vocabulary:
        raise _too_few(vocabulary, graph, locate(("model", "nodes")))
    return graph


def _too_few(vocabulary: int, graph: "Graph", where: str) -> UserError:
    what = f"the tokenizer has {vocabulary} pieces, the model's vocabulary is {graph.vocabulary}"
    fix = f"Set `vocab: auto`, or at least {vocabulary}, where the model says {graph.vocabulary}."
    return UserError(what, where=where, fix=fix)


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

    batch, seed = _rows_per_step(context, settings), context.recipe.seed
    mixture = None if settings.mixture is None else [(each.from_step, each.weights) for each in settings.mixture]
    feed = DataLoader(rows / "train", seed=seed, batch=batch, mixture=mixture)
    if Processes.current.first:
        facts = {"rows": rows.name, "seed": seed, "batch": batch, "mixture": mixture, "steps": settings.steps}
        write_json(context.folder / FEED, facts)
    # A micro-batch is what fits in memory.
    rows_at_once = batch // settings.gradient_accumulation_steps
    return feed, validation_sets(rows / "validation", batch=rows_at_once, limit=settings.eval_sequences)


def documents_of(feed: "DataLoader", step: int) -> list[dict[str, Any]]:
    """{row, folder, number, documents} of every row of the batch of a step, counted from 1."""
    from affinage.data.lineage import spans_of_row

    found = []
    for row, (folder, number) in enumerate(feed.where(step - 1)):
        spans = spans_of_row(feed.shards[folder], number)
        documents = [f"{span['source']}/{span['id']}" for span in spans]
        found.append({"row": row, "folder": folder, "number": number, "documents": documents})
    return found


def _rows_per_step(context: StepContext, settings: TrainSettings) -> int:
    from affinage.hardware.devices import acquire
    from affinage.parallel import make_mesh
    from affinage.training import rows_per_step

    return rows_per_step(settings, make_mesh(mesh_of(context), acquire()).size)


def mesh_of(context: StepContext) -> dict[str, int | str]:
    """The recipe's mesh."""
    return {str(axis): size for axis, size in context.recipe.mesh.items()}


def remote_of(context: StepContext) -> str | None:
    """Where a training is copied to; None if nowhere."""
    remote = context.recipe.runtime.remote
    return None if remote is None else f"{remote.rstrip('/')}/{context.folder.name}"


def bring_from_remote(context: StepContext, forced: bool) -> None:
    """Begin with the newest checkpoint that is at the recipe's `remote`, where it is newer than what is here.

    If the training is `forced`, what is there is removed instead. Raises UserError if the server does not answer.
    """
    url = remote_of(context)
    if url is None:
        return
    from affinage.checkpoint.remote import download_newest, forget

    if forced:
        forget(url)
        return
    tell = partial(rich.get_console().print, markup=False, highlight=False, soft_wrap=True)
    download_newest(url, context.folder, lambda line: tell(f"{context.step}: {line}"))


# ---- the end by epochs ----


def within_epochs(settings: Tuning, feed: "DataLoader", where: str) -> Tuning:
    """The settings with at most the steps that `num_epochs` allows, and a schedule that ends with them.

    A warm-up that is longer becomes a tenth of the steps. Raises UserError if the schedule begins after them.
    """
    if settings.num_epochs is None:
        return settings
    steps, high = 1, settings.steps
    while steps < high:  # to the last step after which no source was read more often
        middle = (steps + high + 1) // 2
        fits = max(feed.epochs(middle).values()) <= settings.num_epochs
        steps, high = (middle, high) if fits else (steps, middle - 1)
    schedule = settings.schedule
    if steps == settings.steps:
        return settings
    if schedule.from_step >= steps:
        what = (
            f"{settings.num_epochs:g} epochs end at step {steps:,}, and the schedule begins at {schedule.from_step:,}"
        )
        fix = "Allow more epochs (null: any number), or give more conversations."
        raise UserError(what, where=f"{where}.num_epochs", fix=fix)
    if schedule.warmup_steps > steps - schedule.from_step:
        schedule = schedule.model_copy(update={"warmup_steps": (steps - schedule.from_step) // 10})
    if Processes.current.first:
        why = escape(epochs_exceeded(feed, steps, settings.num_epochs))
        rich.print(f"{where}: ends at step {steps:,} of {settings.steps:,}, when {why}; null lets it go on")
    return settings.model_copy(update={"steps": steps, "schedule": schedule})


def epochs_exceeded(feed: "DataLoader", last_step: int, epochs: float) -> str:
    """Why a training ends at its last step: which rows one step more would read more often than `epochs`."""
    seen = feed.epochs(last_step + 1)
    spent = [name for name, times in seen.items() if times > epochs]
    rows = "its rows" if len(spent) == len(seen) else f"the rows of {', '.join(spent)}"
    return f"{rows} have been seen as often as `num_epochs: {epochs:g}` allows"


def _with_end(summary: Summary, settings: TuningSettings, asked: TuningSettings) -> Summary:
    """The summary, which says where `num_epochs` ended the training before the last step that the recipe asks for."""
    return summary if settings.steps == asked.steps or summary["ended"] else summary | {"ended": "epochs"}


# ---- what can be known to fail before the first step runs ----


def check_training(loaded: LoadedRecipe, name: str) -> None:
    """The model, its mesh, batch and settings fit together, and what the training reads is there."""
    from affinage.hardware.devices import acquire
    from affinage.model import abstract_params, logical_axes, parse
    from affinage.parallel import MeshLayout, apply_config_on, make_mesh, param_shardings, strategy_for, table_with
    from affinage.parallel.sharding import check_axes_used, check_positions_divide, check_rows_divide
    from affinage.tracking import trackers_of
    from affinage.training import rows_per_step
    from affinage.training.frozen import split_params
    from affinage.training.layerwise import check_remat, check_update
    from affinage.training.optimizer import check_choices

    recipe, settings, line = loaded.recipe, getattr(loaded.recipe, name), partial(at, loaded)
    with line("runtime", "trackers"):
        trackers_of(recipe.runtime.trackers, recipe=recipe.name, training=name, runs=Path())
    _check_monitor(loaded, name, settings.monitor)
    _check_from_step(loaded, name)
    wanted = recipe.tokenizer.vocab_size
    graph = parse(with_vocabulary(recipe.model, wanted), loaded.locate)
    folder = initial_folder(loaded)
    if folder is not None:
        from affinage.data.tokenizer import Tokenizer

        with line("init_from"):
            initial_params(folder, graph)
            given = Tokenizer(folder / TOKENIZER)
            if recipe.sft is not None or recipe.dpo is not None:
                given.use_template(chat_template_of(loaded, folder / TOKENIZER))
                _ = given.conversation_marks
    elif recipe.tokenizer.kind == "bpe" and wanted > graph.vocabulary:
        raise _too_few(wanted, graph, loaded.locate(("tokenizer", "vocab_size")))
    check_choices(settings, lambda path: loaded.locate((name, *path)))
    with line("mesh"):
        mesh = make_mesh(dict(recipe.mesh.items()), acquire())
    with line(name, "lora"):
        split = split_params(graph, settings)
    with line(name, "optimizer_in_backward"):
        check_update(split, settings, in_stages=mesh.shape["pipeline"] > 1)
    with line("parallel", "remat"):
        check_remat(settings, recipe.parallel.remat)
    with line("parallel", "sharding"):
        table = table_with(recipe.parallel.sharding)
    with line(name, "batch_size"):
        rows = rows_per_step(settings, mesh.size)
        check_rows_divide(rows, settings.gradient_accumulation_steps, mesh, table)
    with line("mesh"):
        check_axes_used(graph, mesh.shape, table)
        call = apply_config_on(MeshLayout(mesh, table), settings.attention, recipe.parallel)
        strategy_for(mesh, recipe.parallel).check(graph, rows // settings.gradient_accumulation_steps, call)
        param_shardings(mesh, logical_axes(graph), abstract_params(graph), table)
    with line("packing", "seq_len"):
        check_positions_divide(recipe.packing.seq_len, mesh, table)


def _check_monitor(loaded: LoadedRecipe, training: str, monitor: MonitorSettings | None) -> None:
    """The benchmarks of a monitor exist; without them the training could not go on."""
    from affinage.evaluation.benchmarks import of_pocket_world
    from affinage.paths import from_home

    if monitor is None:
        return
    data = loaded.recipe.data
    if monitor.data_dir is not None and not from_home(monitor.data_dir).is_dir():
        where = loaded.locate((training, "monitor", "data_dir"))
        raise UserError(
            f"there is no folder {monitor.data_dir}", where=where, fix="Paths start from the working directory."
        )
    has_world = any(source.path == POCKET_WORLD for source in (data.sources if data else ()))
    for index, task in enumerate(monitor.tasks):
        key = (training, "monitor", "tasks", index)
        if training == "pretrain" and of_pocket_world(task) and not has_world:
            what = "the pocket world's benchmarks are about facts that only its text tells"
            fix = "Add `pocket-world` to data.sources, or choose other benchmarks."
            raise UserError(what, where=loaded.locate(key), fix=fix)
        check_task(loaded, task, monitor.data_dir, key)


def _check_from_step(loaded: LoadedRecipe, name: str) -> None:
    """The training that follows one that is still to be made begins with a step that this one will save and keep."""
    from affinage.checkpoint.store import kept_steps

    recipe, settings, keep = loaded.recipe, getattr(loaded.recipe, name), loaded.recipe.runtime.checkpoint
    last, after = settings.steps, recipe.trainings[recipe.trainings.index(name) + 1 :]
    step = getattr(recipe, after[0]).from_step if after else None
    if step is None or step == last or (step < last and getattr(settings, "num_epochs", None) is not None):
        return  # where epochs end a training is known once its data are there
    saved = range(keep.every_steps, last, keep.every_steps)
    if step not in saved or step not in kept_steps([*saved, last], keep.keep_last, keep.keep_every):
        raise UserError(
            f"{name} will keep no checkpoint of step {step}: of its {last} steps it saves every {keep.every_steps} "
            f"and keeps the last {keep.keep_last}"
            + (f" and multiples of {keep.keep_every}" if keep.keep_every else ""),
            where=loaded.locate((after[0], "from_step")),
            fix=f"Set runtime.checkpoint.every_steps and keep_every to numbers that divide {step}.",
        )
