"""The training steps: pretraining, fine-tuning, and direct preference optimization, and their checks."""

import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from affinage.checkpoint import CheckpointStore
from affinage.checkpoint.remote import Uploader, download
from affinage.checkpoint.store import IDENTITY
from affinage.cluster.processes import Processes
from affinage.config.training import DpoSettings, PretrainSettings, ScheduleSettings, TrainSettings, TuningSettings
from affinage.data.dataloader import DataLoader, ValidationRows, mixture_of, stages_of
from affinage.data.token_shards import find_shard_folders
from affinage.data.tokenizer import Tokenizer
from affinage.data.tuning_data import documents_in_a_row
from affinage.data_check import check_weights, never_begun, repetition
from affinage.errors import UserError, UserWarned
from affinage.hardware.devices import acquire
from affinage.json_files import check_place, write_json
from affinage.model import Graph, abstract_params, logical_axes, parse
from affinage.model.graph import ANSWERS, preference_graph
from affinage.model_check import check_rows
from affinage.parallel.sharding import MeshLayout, make_mesh, table_with
from affinage.parallel.strategy import strategy_for
from affinage.pipeline.models import FEED, MODEL, ROWS, SAVED, chat_template_of, extended, initial_folder, steps_of
from affinage.pipeline.monitor import BenchmarkMonitor
from affinage.pipeline.opening import initial_params, trained_params
from affinage.pipeline.step import StepContext, Summary, located, mesh_of, print_line
from affinage.pipeline.steps_data import check_benchmarks
from affinage.pipeline.store import content_hash, read_manifest
from affinage.registry import plugin_sources
from affinage.results import read_json
from affinage.tracking import TrackedRun, trackers_of
from affinage.training import TrainJob, rows_per_step, train
from affinage.training.layerwise import check_update
from affinage.training.optimizer import check_choices, learning_rate
from affinage.training.state import split_params
from affinage.training.trainer import Trainer


def train_step(context: StepContext) -> Summary:
    """Train the model, from random weights or those of the training or import before, on the rows of its data step."""
    recipe, name, inputs = context.recipe, context.step, context.inputs
    requested = getattr(recipe, name)
    rows = inputs[ROWS[name]]
    feed, validation = _token_rows(context, requested, rows)
    settings = within_epochs(requested, feed, name)
    prompt = "" if name == "pretrain" else recipe.chat_system_prompt if name == "dpo" else requested.system_prompt
    data = {"rows": content_hash(rows, "train")}
    if (reference := inputs.get("ref-logprobs")) is not None:
        for title, shards in feed.shards.items():
            shards.reference = np.load(reference / f"train/{title}.npy", mmap_mode="r", allow_pickle=False)
        for title, each in validation.items():
            each.bytes = 0  # the loss is of pairs, not of text
            each.shards.reference = np.load(reference / f"validation/{title}.npy", mmap_mode="r", allow_pickle=False)
        data["reference"] = content_hash(reference, "train")
    graph = _graph_of(context)
    monitor = settings.monitor and BenchmarkMonitor(context, settings, graph, feed.context, prompt)
    job = _job(context, graph, settings, feed, data=data, validation=validation, monitor=monitor)
    if Processes.current.first:
        # What one must know, beside the checkpoints, to use the model.
        facts = {"graph": graph.to_dict(), "context": feed.context, "system_prompt": prompt}
        facts["precision"] = settings.precision.model_dump(mode="json")
        if isinstance(settings, TuningSettings):
            template = chat_template_of(context.loaded, inputs["train-tokenizer"])
            facts |= {} if template is None else {"chat_template": template}
            facts |= {} if settings.lora is None else {"lora": settings.lora.model_dump(mode="json")}
        if (folder := initial_folder(context.loaded)) is not None:
            imported = read_json(folder / MODEL)["imported"]
            facts["release"] = imported.get("release", {})
            if not {"pretrain", "sft"} & inputs.keys() and "from" in imported:
                facts["begun_with"] = imported["from"]
        write_json(context.folder / MODEL, facts)
    summary = train(job)
    if context.saves_to != context.folder and Processes.current.first:
        for name in SAVED:  # of an earlier start
            shutil.rmtree(context.folder / name, ignore_errors=True)
        download(str(context.remote), context.folder, print_line, newest=None)
    return summary if settings.steps == requested.steps or summary["ended"] else summary | {"ended": "epochs"}


def ref_logprobs(context: StepContext, settings: DpoSettings) -> Summary:
    """Compute the log-probability that the model gives every answer before it learns from them."""
    rows, settings = context.inputs["preference-data"], settings.model_copy(update={"lora": None})
    feed, _ = _token_rows(context, settings, rows)
    job = _job(context, _graph_of(context), settings, feed)
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
                answers = []
                for number, batch in enumerate(batches):
                    context.progress(f"{part}/{name} {number / len(batches):.0%}")
                    compiled = compiled or trainer.compile_value(ANSWERS, batch)
                    answers.append(np.asarray(jax.device_get(compiled(params, trainer.put(batch))))[..., 0])
                if Processes.current.first:
                    np.save(context.folder / part / f"{name}.npy", np.concatenate(answers)[: batches.rows])
                of_part[name] = batches.rows
    finally:
        job.hardware.release()
    return {"rows": counts, "documents": job.graph[ANSWERS].layer.model_dump()["documents"]}


def _job(context: StepContext, base: Graph, settings: TrainSettings, feed: DataLoader, **fields: Any) -> TrainJob:
    """The job of a step that trains the model `base`, with more of its `fields`."""
    recipe, runtime, parallel, name = context.recipe, context.recipe.runtime, context.recipe.parallel, context.step
    graph, inputs = base, context.inputs
    if isinstance(settings, DpoSettings):
        graph = preference_graph(base, settings, documents_in_a_row(inputs["preference-data"]))
    if context.remote is not None:
        rules = runtime.checkpoint.model_dump(include={"keep_last", "keep_every"})
        fields["uploader"] = uploader = Uploader(context.remote, context.folder, **rules)
        fields["store"] = CheckpointStore(f"{context.saves_to}/checkpoints", saved=uploader.saved, **rules)
    initial: Callable[[Any], Any] | None = None  # random weights
    if (before := inputs.get("sft") or inputs.get("pretrain")) is not None:
        initial = partial(trained_params, before, base, getattr(settings, "from_step", None))
    elif (folder := initial_folder(context.loaded)) is not None:
        initial = initial_params(folder, base)
    return TrainJob(
        graph=graph,
        settings=settings,
        mesh=mesh_of(recipe),
        parallel=parallel,
        seed=recipe.seed,
        feed=feed,
        initial_params=initial,
        code=plugin_sources(context.loaded, [recipe.model, settings.deciding()]),
        folder=context.folder,
        name=name,
        runtime=runtime,
        trackers=trackers_of(runtime.trackers),
        tracked=TrackedRun(f"{recipe.name}/{name}", recipe.name, context.run_folder.parent.absolute()),
        extends=extended(context.loaded, name) if name in recipe.trainings else None,
        measured=context.on_metrics,
        **fields,
    )


def _graph_of(context: StepContext) -> Graph:
    """The recipe's model, with the tokenizer's vocabulary for `vocab: auto`."""
    vocabulary, locate = Tokenizer(context.inputs["train-tokenizer"]).vocabulary, context.loaded.locate
    graph = parse(context.recipe.model, locate, vocabulary=vocabulary)
    _check_vocabulary(vocabulary, graph, "model.nodes")
    return graph


def _check_vocabulary(vocabulary: int, graph: Graph, where: str) -> None:
    if vocabulary > graph.vocabulary:
        what = f"the tokenizer has {vocabulary} pieces, the model's vocabulary is {graph.vocabulary}"
        raise UserError(what, where=where, fix=f"Set `vocab: auto`, or at least {vocabulary}, in the model.")


def _token_rows(
    context: StepContext, settings: PretrainSettings | TuningSettings, rows: Path
) -> tuple[DataLoader, dict[str, ValidationRows]]:
    """The batches of a training and its held-out rows; what finds a step's rows again is written down."""
    batch, seed = rows_per_step(settings, make_mesh(mesh_of(context.recipe), acquire()).size), context.recipe.seed
    mixture = mixture_of(settings)
    feed = DataLoader(rows / "train", seed=seed, batch=batch, mixture=mixture)
    if Processes.current.first:
        facts = {"rows": rows.name, "seed": seed, "batch": batch, "mixture": mixture, "steps": settings.steps}
        write_json(context.folder / FEED, facts)
    rows_at_once = batch // settings.gradient_accumulation_steps  # a micro-batch is what fits in memory
    opened = partial(ValidationRows, batch=rows_at_once, limit=settings.eval_sequences)
    return feed, {name: opened(path) for name, path in find_shard_folders(rows / "validation").items()}


def within_epochs(
    settings: PretrainSettings | TuningSettings, feed: DataLoader, where: str
) -> PretrainSettings | TuningSettings:
    """The settings with at most the steps that `num_epochs` allows, and a schedule that ends with them.

    A warm-up that is longer becomes a tenth of the steps. Warns of fewer steps, and of data that is read too often.
    """
    if not isinstance(settings, TuningSettings):
        if (advice := repetition(max(feed.epochs(settings.steps).values()))) and Processes.current.first:
            warnings.warn(f"{where} {advice}", UserWarned, stacklevel=2)
        return settings
    steps = feed.steps_within(most := settings.num_epochs or float("inf"), settings.steps)
    if steps == settings.steps:
        return settings
    if Processes.current.first:
        needed = int(np.ceil(max(feed.epochs(settings.steps).values())))
        advice = f"num_epochs: {most:g} allows no more; for all of them set {where}.num_epochs={needed}, or null"
        warnings.warn(f"{where} makes {steps:,} of {settings.steps:,} steps: {advice}", UserWarned, stacklevel=2)
    shorter = {"warmup_steps": steps // 10} if settings.schedule.warmup_steps > steps else {}
    return settings.model_copy(update={"steps": steps, "schedule": settings.schedule.model_copy(update=shorter)})


def _lifted_rate(settings: TrainSettings, name: str, training: Path, step: int) -> Iterator[str]:
    """Yield a sentence if `step` of another `training`, which is continued, lies in a decay that the rate leaves."""
    facts = (store := CheckpointStore(training / "checkpoints")).metadata(step).facts[IDENTITY]
    former = ScheduleSettings.model_construct(**facts["schedule"])
    rate, next_rate = learning_rate(former, facts["steps"]), learning_rate(settings.schedule, settings.steps)
    reached, goes_on = rate(jax.numpy.int32(step - 1)), next_rate(jax.numpy.int32(step))
    if step > former.warmup(facts["steps"]) and goes_on > 1.1 * reached:
        kept = [at for at in store.steps() if at < step and rate(jax.numpy.int32(at - 1)) > 0.99 * former.peak_lr]
        before = f"{str(settings.resume_from).partition('@')[0]}@{kept[-1]}" if kept else "none is kept"
        rates = f"the learning rate jumps from {reached:.3g} to {goes_on:.3g}; from before the decay: {before}"
        yield f"{name} continues step {step:,}, in the decay of its schedule: {rates}"


def check_training(context: StepContext, name: str) -> None:
    """The model, its mesh, batch and settings fit together, and what the training reads is there."""
    loaded, recipe, settings = context.loaded, context.recipe, getattr(context.recipe, name)
    folder, extension, own = initial_folder(loaded), extended(loaded, name), getattr(settings, "seq_len", None)
    check_place(context.saves_to)
    if settings.monitor is not None:
        check_benchmarks(context, (name, "monitor"))
    wanted, micro_batches = recipe.tokenizer.vocab_size, settings.gradient_accumulation_steps
    graph = parse(recipe.model, loaded.locate, vocabulary=wanted)
    check_rows(graph, length := own or recipe.packing.seq_len)
    check_choices(settings, lambda path: loaded.locate((name, *path)))
    with located(loaded, name):
        advice = [*never_begun(recipe, name)]
        if isinstance(settings, TuningSettings):
            stages_of({source.title: (source.title, "") for source in settings.sources}, mixture_of(settings), 1)
        elif recipe.data is not None:
            check_weights([weight for stage in settings.mixture or () for weight in stage.weights], recipe.data)
        if extension is not None:
            advice += _lifted_rate(settings, name, *extension)
        for each in advice if context.step == name else ():
            warnings.warn(each, UserWarned, stacklevel=2)
        trackers_of(recipe.runtime.trackers)
        if (step := getattr(settings, "from_step", None)) is not None:
            if (before := next((each for each in ("sft", "pretrain") if each in context.inputs), None)) is None:
                raise UserError(f"no training comes before {name}", where="from_step", fix="Leave it out.")
            if step > (last := getattr(recipe, before).steps):
                raise UserError(f"{before} has no step {step}", where="from_step", fix=f"Its last step is {last}.")
            if read_manifest(context.inputs[before]):
                steps_of(context.inputs[before], step, "from_step")
        if folder is not None:
            initial_params(folder, graph)
        elif recipe.tokenizer.kind == "bpe":
            _check_vocabulary(wanted, graph, "tokenizer.vocab_size")
        mesh = make_mesh(mesh_of(recipe), acquire())
        layout = MeshLayout(mesh, table_with(recipe.parallel.sharding))
        check_update(split_params(graph, settings), settings, in_stages=mesh.shape["pipeline"] > 1)
        rows = rows_per_step(settings, mesh.size)
        layout.check(graph, rows, micro_batches, length, "seq_len" if own else "packing.seq_len")
        strategy_for(mesh, recipe.parallel).check(graph, rows // micro_batches, layout)
        layout.param_shardings(logical_axes(graph), abstract_params(graph))
