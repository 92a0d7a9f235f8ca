"""The steps that evaluate and export the models of trainings, and their checks."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from affinage.cluster.processes import Processes
from affinage.config.data import DecontaminateSettings
from affinage.config.recipe import EvaluateSettings, ExportSettings
from affinage.data.chat import encode_prompt
from affinage.data.decontaminate import BenchmarkItem, Contamination, ItemIndex, contamination, texts_of_rows
from affinage.data.documents import read_documents
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError
from affinage.evaluation.results import Search
from affinage.generation.engine import LoadedModel, generate
from affinage.generation.sampling import SamplingParams
from affinage.hub.families import family_of
from affinage.hub.folder import export as write_hub_folder
from affinage.json_files import write_json
from affinage.model import parse
from affinage.pipeline.models import TRAININGS, Target, license_of, made_from
from affinage.pipeline.opening import open_model
from affinage.pipeline.step import StepContext, Summary, mesh_of
from affinage.report.facts import collect_facts
from affinage.report.page import card_facts

_ANSWERS = "answers.db"  # of an evaluation that is not complete yet
_SAMPLE_TOKENS = 64  # of each answer to a prompt or question of the report


def evaluate(context: StepContext, training: str, settings: EvaluateSettings) -> Summary:
    """Evaluate the model of a training."""
    from affinage.evaluation import run  # imports the harness, which takes seconds

    recipe, inputs = context.recipe, context.inputs
    decontaminate = recipe.data.decontaminate if recipe.data else None
    model = _trained(context, training, f"{recipe.name}/{training}")
    unlearned = settings.apply_chat_template is True and not run.has_chat_template(model)
    results = run.evaluate(
        model,
        settings.tasks,
        folder=context.folder if Processes.current.first else None,
        keep=context.folder / _ANSWERS,
        world=inputs.get("synthesize"),
        data_dir=settings.data_dir,
        limit=settings.limit,
        num_fewshot=settings.num_fewshot,
        apply_chat_template="auto" if unlearned else settings.apply_chat_template,
        seen=contamination_search(inputs[training], decontaminate) if settings.contamination else None,
        progress=context.progress,
    )
    kind, prompts = ("question", recipe.report.questions) if model.chat else ("prompt", recipe.report.prompts)
    answers = zip(prompts, _answers(model, prompts), strict=True)
    results["samples"][f"{kind}s"] = [{kind: prompt, "text": answer} for prompt, answer in answers]
    if Processes.current.first:
        write_json(context.folder / "results.json", results)
        (context.folder / _ANSWERS).unlink()  # the results are there now
    return results


def _answers(model: LoadedModel, prompts: Sequence[str]) -> list[str]:
    """What the model writes after prompts, or answers to questions."""
    tokenizer, rows = model.tokenizer, []
    for prompt in prompts:
        talk = [{"role": "user", "content": prompt}]
        start = [*tokenizer.opening, *tokenizer.encode(prompt)]
        rows.append(encode_prompt(talk, tokenizer, model.system_prompt) if model.chat else start)
        if len(rows[-1]) >= model.context:
            what = f"{prompt[:40]!r} has {len(rows[-1])} tokens; this model takes at most {model.context - 1}"
            raise UserError(what, where="report")
    return [answer.text for answer in generate(model, rows, SamplingParams(max_new_tokens=_SAMPLE_TOKENS))]


def export(context: StepContext, settings: ExportSettings) -> Summary:
    """Write the Hugging Face folder of the last model into `model/`."""
    inputs, folder = context.inputs, context.folder / "model"
    training = next(name for name in TRAININGS if name in inputs)
    model = _trained(context, training, context.recipe.name)
    license = settings.license or license_of(inputs[training])
    facts = card_facts(collect_facts(context.run_folder, inputs), license)
    return write_hub_folder(model, folder, facts=facts, dtype=settings.dtype)


def _trained(context: StepContext, training: str, name: str) -> LoadedModel:
    """The model of a training, split over the recipe's mesh by the recipe's table."""
    # The mesh is of the devices of all processes: one that works alone has copies on its own.
    mesh = mesh_of(context.recipe) if Processes.current.together else None
    target = Target(name, "model", context.inputs[training], run=context.run_folder)
    return open_model(target, context.run_folder.parent, mesh=mesh, sharding=context.recipe.parallel.sharding)


def check_export(context: StepContext) -> None:
    """transformers has such a model."""
    loaded = context.loaded
    try:
        family_of(parse(loaded.recipe.model, loaded.locate, vocabulary=loaded.recipe.tokenizer.vocab_size))
    except UserError as error:
        fix = "Set `export: null`: everything else works with it, as a MODEL too."
        raise UserError(error.what, where=loaded.locate(("export",)), fix=fix) from error


def contamination_search(training: Path, settings: DecontaminateSettings | None = None) -> Search | None:
    """What finds items, as `settings` say, in all texts that a model was trained on; None if there are none here."""
    split, tokenizer = made_from(training, "split"), made_from(training, "train-tokenizer")
    tuned = [made_from(training, step) for step in ("sft-data", "preference-data")]
    chats = [(chat / "train", tokenizer) for chat in tuned if chat is not None and tokenizer is not None]

    def texts() -> Iterator[pa.Array]:
        for batch in read_documents(split / "train", ["text"]) if split is not None else ():
            yield batch.column("text")
        for rows, folder in chats:
            yield from texts_of_rows(rows, Tokenizer(folder))

    def search(items: Iterable[BenchmarkItem]) -> Contamination:
        return contamination(ItemIndex(items, (settings or DecontaminateSettings()).n_grams), texts())

    return search if split is not None or chats else None
