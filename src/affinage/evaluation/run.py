"""A model's scores: lm-evaluation-harness's own evaluator over our backend, and its results in our form."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from affinage import __version__
from affinage.cluster.processes import Processes
from affinage.data.chat import ChatTemplate, chat_template, guarded
from affinage.errors import UserError
from affinage.evaluation.harness import cached, load_tasks, quiet
from affinage.evaluation.results import Lines, Search, contamination_of, fingerprint, line_of, result_of, write_results
from affinage.evaluation.scoring import default_batch, score
from affinage.evaluation.tasks import CORE, CORE_SHOTS, ChatTemplateUse, find_tasks, is_chat, items_of, of_pocket_world
from affinage.generation.engine import LoadedModel, generate
from affinage.generation.sampling import EngineRequest, SamplingParams

_SAMPLES = 3  # items per task in the results for people to read
_NORMALIZED = ("hellaswag", "arc_challenge", "arc_easy", "piqa", "openbookqa", "agieval_lsat_ar")  # by length
_MAX_NEW_TOKENS = 64  # of tasks that state none


class JaxLM(TemplateLM):
    """Scores and generates for the harness.

    Every text begins with <s>, as documents in training and texts of the `hf` backend with `add_bos_token=True` do. Raw
    text never becomes a control token; what `apply_chat_template` made has those of the template, and none that a
    message spells. `batch` rows of the model's context are computed at once.
    """

    eot_token_id = prefix_token_id = max_length = 0  # of the harness's interface, as is the name
    tokenizer_name = "affinage"

    def __init__(self, model: LoadedModel, batch: int = 64, progress: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self.model = model
        self.requests = 0  # continuations scored and texts generated so far
        self.seconds = 0.0  # spent on scoring and generating
        self.tasks: Mapping[str, Any] = {}  # of the requests
        self.in_chat_template = False  # whether the texts of requests were made by `apply_chat_template`
        self._progress, self._batch = progress, batch
        self._encode = lru_cache(maxsize=1024)(model.tokenizer.encode)  # choices share their question
        self._fitting: set[tuple[Any, ...]] = set()  # texts of requests that are known to fit the context
        tokenizer, template = model.tokenizer, model.tokenizer.template
        self.eot_token_id, self.prefix_token_id = tokenizer.eos, tokenizer.bos  # </s>; <s> stands for an empty context
        self.max_length = model.context
        source = chat_template(model.system_prompt, opened=bool(tokenizer.opening))
        self._template = template or ChatTemplate(source, tokenizer)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the conversation in the chat template; without a generation prompt its last message is left open."""
        self.in_chat_template = True
        own = self.model.tokenizer.template is not None
        messages = guarded(chat_history, self.model.tokenizer, self.model.system_prompt if own else "")
        text, content = self._template.render(messages, add_generation_prompt=add_generation_prompt), ""
        if not add_generation_prompt:
            content = str(messages[-1]["content"]).strip()  # as some templates do, too
            if content not in text:  # the template changes it
                return self._template.render(messages[:-1], add_generation_prompt=True) + content
        return text[: text.rfind(content) + len(content)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, after <s> unless `add_special_tokens` is False or the template has put it there."""
        tokenizer = self.model.tokenizer
        ids = tokenizer.encode_rendered(string)[0] if self.in_chat_template else self._encode(string)
        if self.in_chat_template and tokenizer.template is not None:
            return ids  # its beginning is the template's business
        opening = list(tokenizer.opening)
        return ids if add_special_tokens is False or ids[: len(opening)] == opening else [*opening, *ids]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before, scored = super()._encode_pair(context, continuation)
        if not scored:  # the continuation has merged into the context's last token: score that one
            before, scored = before[:-1], before[-1:]
        return before, scored

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        if too_long := {texts for texts, _, choice in requests if len(choice) > self.max_length}:
            asked = [each for task in self.tasks.values() for each in task.instances if each.args in too_long]
            of_tasks = ", ".join(dict.fromkeys(each.task_name for each in asked))
            what = f"a choice of item {asked[0].doc_id + 1} has more tokens than the model reads, {self.max_length:,}"
            fix = f"Leave out {of_tasks}, or take a model with a longer context."
            raise UserError(what, where=asked[0].task_name, fix=fix)
        self._fitting |= {texts for texts, *ids in requests if sum(map(len, ids)) <= self.max_length + 1}
        pairs = [(context, continuation) for _, context, continuation in requests]
        return self._score(pairs, "continuations", [texts for texts, _, _ in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log-probability of every text, in disjoint windows of the context, the first one after <s>."""
        totals, owners, windows = [0.0] * len(requests), list[int](), list[tuple[list[int], list[int]]]()
        for index, request in enumerate(requests):
            ids = self.model.tokenizer.encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                owners.append(index)
                windows.append(make_disjoint_window(window))
        for index, (value, _) in zip(owners, self._score(windows, "windows of text"), strict=True):
            totals[index] += value
        return totals

    def exceeds(self, arguments: Sequence[Any]) -> bool:
        """Return whether the texts of a request do not fit the context: they were cut, or scored in pieces."""
        room = self.max_length + 1
        if isinstance(arguments[-1], dict):  # settings of a generation
            room = self.max_length - self._params(arguments[-1]).max_new_tokens
        elif tuple(arguments) in self._fitting:  # else it is encoded, as one whose answer was on disk
            return False
        return len(self.tok_encode("".join(text for text in arguments if isinstance(text, str)))) > room

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the text after every context, up to a stop string, <|im_end|>, </s> or the length of the task."""
        grouped: dict[SamplingParams, list[int]] = {}
        for index, request in enumerate(requests):
            grouped.setdefault(self._params(request.args[1]), []).append(index)
        texts: dict[int, str] = {}
        with self._timed(len(requests)):
            for params, indices in grouped.items():
                room = self.max_length - params.max_new_tokens
                prompts = [self.tok_encode(requests[one].args[0])[-room:] or [self.prefix_token_id] for one in indices]

                def keep(generated: EngineRequest, indices: list[int] = indices) -> None:
                    index = indices[generated.index]
                    texts[index] = generated.text
                    self.cache_hook.add_partial("generate_until", requests[index].args, generated.text)
                    self._progress(f"generated {len(texts):,} of {len(requests):,} texts")

                generate(self.model, prompts, params, keep, max_num_seqs=self._batch)
        return [texts[index] for index in range(len(requests))]

    def _params(self, settings: Mapping[str, Any]) -> SamplingParams:
        """The harness's generation settings as ours."""
        kwargs = normalize_gen_kwargs(dict(settings), _MAX_NEW_TOKENS)
        if kwargs.get("repetition_penalty") not in (None, 1, 1.0):
            raise UserError("`repetition_penalty` of a task's `generation_kwargs` is not computed", fix="Leave it out.")
        # The end of a document or a turn always ends a generation, so its spelling need not be looked for.
        ignored = {"", *self.model.tokenizer.controls}
        return SamplingParams(
            max_new_tokens=min(int(kwargs["max_gen_toks"]), self.max_length // 2),  # half is left for the prompt
            temperature=float(kwargs.get("temperature", 1.0)) if kwargs.get("do_sample", False) else 0.0,
            top_k=int(kwargs.get("top_k") or 0),
            top_p=float(kwargs.get("top_p", 1.0)),
            min_p=float(kwargs.get("min_p") or 0.0),
            stop=tuple(stop for stop in handle_stop_sequences(kwargs.get("until"), eos=None) if stop not in ignored),
        )

    def _score(
        self, pairs: list[tuple[list[int], list[int]]], what: str, texts: Sequence[tuple[str, str]] = ()
    ) -> list[tuple[float, bool]]:
        """The answers to pairs of ids; the harness caches them as they come if it knows the pairs as `texts`."""
        answers = [(0.0, True)] * len(pairs)
        with self._timed(len(pairs)):
            for count, (index, answer) in enumerate(score(self.model, pairs, batch=self._batch), 1):
                answers[index] = answer
                if texts:
                    self.cache_hook.add_partial("loglikelihood", texts[index], answer)
                if count % 16 == 0 or count == len(pairs):
                    self._progress(f"scored {count:,} of {len(pairs):,} {what}")
        return answers

    @contextlib.contextmanager
    def _timed(self, requests: int) -> Iterator[None]:
        """Wait for hosts that still fetch data or write questions; then count requests and seconds."""
        # They wait here: inside a program of all hosts, the earlier one would seem to hang.
        Processes.at_work().barrier("the questions of a task", seconds=3600)
        started = time.monotonic()
        yield
        self.requests += requests
        self.seconds += time.monotonic() - started


def evaluate(
    model: LoadedModel,
    tasks: Sequence[str],
    *,
    folder: Path | None = None,  # for results.json and items/TASK.jsonl; see `write_results`
    keep: Path | None = None,  # file of the harness's cache: answers of this model in it are not computed again
    world: Path | None = None,  # of the pocket world's benchmarks, whose facts are the training text
    data_dir: str | Path | None = None,
    apply_chat_template: ChatTemplateUse = "auto",  # to all tasks, or none; auto: to those for chat models
    limit: int | None = None,  # items per task: the first ones or, with a `sample_seed`, those that it draws
    sample_seed: int | None = None,
    num_fewshot: int | None = None,  # examples before each question; None: as many as the task says
    batch_size: int | None = None,  # rows of the context at once; None: see `default_batch`
    seen: Search | None = None,  # searches the training text for items; the results have the scores without those found
    answered: Callable[[Lines], None] = lambda _: None,  # gets the lines of all items
    progress: Callable[[str], None] = lambda _: None,  # gets a line about what is done
) -> dict[str, Any]:
    """Return the scores of a model on the `tasks` (names for `find_tasks`), with standard errors.

    Hosts that work together all call it with the same tasks and the same model, sharded over the devices of all. Each
    gets the scores; the first one alone searches the training text and has the file `keep`. Raises UserError for tasks
    that cannot be found or scored, and for a model without a chat template that `apply_chat_template` wants.
    """
    if apply_chat_template is True and not has_chat_template(model):
        fix = "Evaluate a model that was trained to chat, or set it to `auto` or `false`."
        raise UserError(f"{model.name} has no chat template", where="evaluate.apply_chat_template", fix=fix)
    started, processes = time.monotonic(), Processes.at_work()
    chosen, unavailable = find_tasks(tasks, data_dir, world)
    rounds, skipped = {apply_chat_template: chosen}, []  # by whether they are put in the chat template
    if apply_chat_template == "auto":
        rounds = {templated: [*specs] for templated, specs in groupby(sorted(chosen, key=is_chat), is_chat)}
        skipped = [] if model.chat else [task["task"] for task in rounds.pop(True, [])]
    identity, contamination = fingerprint(model), None
    lm = JaxLM(model, batch_size or default_batch(model), progress=progress)
    outcome, items, loaded = dict[str, Any](), dict[str, list[dict[str, Any]]](), dict[str, Any]()
    with cached(lm, keep, identity) as caching, quiet():
        for templated, specs in rounds.items():
            lm.in_chat_template = bool(templated)
            of_round = lm.tasks = load_tasks(specs, num_fewshot, CORE_SHOTS if CORE in tasks else {})
            drawn: dict[str, list[int]] = {}  # the places of items, ascending, whatever the other tasks are
            for name, task in of_round.items():
                if sample_seed is not None and limit is not None:
                    random, count = np.random.default_rng([sample_seed, *name.encode()]), len(task.eval_docs)
                    drawn[name] = sorted(map(int, random.choice(count, min(limit, count), replace=False)))
            raw: Any = lm_eval.evaluator.evaluate(
                caching,
                {"tasks": of_round, "groups": {}, "group_map": {}},
                limit=None if drawn else limit,
                samples=drawn or None,
                bootstrap_iters=1000,  # for the standard errors that have no closed form (perplexity, F1)
                apply_chat_template=bool(templated),
                fewshot_as_multiturn=bool(templated),
            )
            loaded |= of_round
            outcome |= {name: result_of(name, raw, lm.exceeds, bool(templated)) for name in raw["n-samples"]}
            items |= raw["samples"]
        if seen is not None:
            progress("searching the training text for the items")
            searched = {name: task for name, task in loaded.items() if not of_pocket_world(name)}
            contamination = seen(items_of(searched)) if searched and processes.first else None
            processes.broadcast("the end of the search", None, seconds=None)
    results = {
        "model": model.name,
        "context": model.context,
        "fingerprint": identity,
        "tasks": outcome,
        "unavailable": unavailable,
        "skipped": skipped,
        "seconds": time.monotonic() - started,
        # None is computed where all answers are in the file `keep`.
        "items_per_second": sum(task["items"] for task in outcome.values()) / lm.seconds if lm.requests else None,
        "requests": lm.requests,
        "versions": {"affinage": __version__, "jax": version("jax"), "lm_eval": version("lm_eval")},
        "samples": {name: [_readable(item) for item in of_task[:_SAMPLES]] for name, of_task in items.items()},
    }
    if CORE in tasks:
        results["core"] = _centered_mean(outcome)
    if contamination is not None:
        results["contamination"] = contamination_of(contamination, outcome, items)
    lines = {name: [line_of(item) for item in of_task] for name, of_task in items.items()}
    answered(lines)
    if folder is not None:
        write_results(results, lines, folder)
    return results


def has_chat_template(model: LoadedModel) -> bool:
    """Return whether a model has learned a template: its tokenizer's, or ours if it was trained to chat."""
    return model.chat or model.tokenizer.template is not None


def _centered_mean(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """The mean over CORE's tasks of (score - chance) / (1 - chance), by the metrics of its authors."""
    centered = []
    for name in (name for name in CORE_SHOTS if name in outcome):  # the order decides how the sum is rounded
        score = outcome[name]["metrics"]["acc_norm" if name in _NORMALIZED else "acc"]["value"]
        chance = outcome[name].get("chance", 0.0)
        centered.append((score - chance) / (1 - chance))
    return {"centered_mean": sum(centered) / len(centered) if centered else None, "tasks": len(centered)}


def _readable(item: Mapping[str, Any]) -> dict[str, Any]:
    """What a person wants to see of an item: the question, the choices or the answer, and what was right."""
    arguments = item["arguments"]
    shown: dict[str, Any] = {"prompt": arguments[0][0], "target": item["target"]}
    if isinstance(arguments[0][-1], dict):  # settings of a generation
        shown["answer"] = item["filtered_resps"][0]
    elif len(arguments) > 1:
        scores = [response[0] for response in item["filtered_resps"]]
        shown |= {"chosen": max(range(len(scores)), key=scores.__getitem__), "choices": [end for _, end in arguments]}
        if len({prompt for prompt, _ in arguments}) > 1:  # the choices stand in the prompts, such as winogrande's
            shown |= {"prompt": "", "choices": ["".join(each) for each in arguments]}
    return shown
