"""A whole suite of benchmarks by a model of a recipe's shape: what the host takes, what is computed, how fast it is.

Parts of eval_speed.py. The weights are random: what is computed does not depend on them.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

TARGET = 1000.0  # requests per second
OFF = "of the peak, the host's time off"


def tokenizer_at(path: Path, folder: Path):
    """Of a folder as affinage or transformers writes it; or of GPT-2's merges, its vocabulary beside them."""
    from tokenizers import AddedToken, ByteLevelBPETokenizer

    from affinage.data.tokenizer import Tokenizer

    if path.is_dir():
        return Tokenizer.load(path)
    [vocabulary] = path.parent.glob("*.json")
    published, end = ByteLevelBPETokenizer(str(vocabulary), str(path)), "<|endoftext|>"
    published.add_special_tokens([AddedToken(end, special=True)])
    published.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": end, "eos_token": end}))
    return Tokenizer.load(folder)


def model_like(recipe: str, tokenizer, *, drawn: bool):
    """A model of the recipe's shape and precision with random weights on the device; with none if not `drawn`.

    Where the tokenizer has more ids than the recipe's vocabulary, the model has as many.
    """
    import jax
    import jax.numpy as jnp

    from affinage.config.load import load_recipe
    from affinage.generation.model import LoadedModel
    from affinage.hardware.chips import chip
    from affinage.model import abstract_params, init_params, parse
    from affinage.pipeline.trainings import with_vocabulary
    from affinage.training.trainer import compute_dtype

    settings = load_recipe(recipe).recipe
    graph = parse(with_vocabulary(settings.model, tokenizer.vocabulary))
    if graph.vocabulary < tokenizer.vocabulary:
        nodes = {
            name: node | {"vocab": tokenizer.vocabulary} if "vocab" in node else node
            for name, node in settings.model["nodes"].items()
        }
        graph = parse(settings.model | {"nodes": nodes})
    device, precision = jax.devices()[0], settings.pretrain.precision
    on_cpu = drawn and device.platform == "cpu"
    computed = "float32" if on_cpu else compute_dtype(precision, chip(device.device_kind)).name if drawn else "bfloat16"
    kept = jnp.dtype(computed)  # weights are read in the precision that they are multiplied in
    params = jax.jit(lambda key: init_params(graph, key, kept))(jax.random.key(0)) if drawn else None
    return LoadedModel(
        graph=graph,
        params=abstract_params(graph, kept) if params is None else params,
        tokenizer=tokenizer,
        name=recipe,
        context=settings.packing.seq_len,
        compute_dtype=computed,
    )


@dataclass
class Computed:
    """What batches came to, before and after sharing and packing; one for each pass over the suite."""

    whole: int = 0  # tokens, were every continuation run after its own context, in rows of its length
    shared: int = 0  # tokens, those that an item's continuations share once
    padded: int = 0  # tokens that are computed
    asked: int = 0  # of which logits are computed, padding included
    batches: int = 0
    shapes: set[tuple[Any, ...]] = field(default_factory=set)
    flops: float = 0.0

    def add(self, batches: list, graph) -> None:
        from affinage.model.analysis import analyse

        for batch in batches:
            families = [family for row in batch.rows for family in row]
            rows = [row for family in families for row in family.rows]
            # A row answers several requests where these differ in their last token alone.
            self.whole += sum(len(row.tokens) * len(answered) for row in rows for answered in row.requests)
            self.shared += sum(family.length for family in families)
            self.padded += batch.tokens.size
            self.asked += batch.at.size
            self.batches += 1
            self.shapes.add((batch.tokens.shape, batch.at.shape, batch.joined))
            costs = {node.name: node.flops_all_pairs for node in analyse(graph, *batch.tokens.shape).nodes}
            logits = costs.pop(graph.logits)
            self.flops += sum(costs.values()) + logits * batch.at.size / batch.tokens.size

    @contextmanager
    def counting(self, graph) -> Iterator[None]:
        """While entered, adds the batches that are made."""
        from affinage.evaluation import scoring

        make = scoring.batches

        def counted(*arguments: Any, **settings: Any) -> list:
            found = make(*arguments, **settings)
            self.add(found, graph)
            return found

        with patch.object(scoring, "batches", counted):
            yield

    def told(self, requests: int) -> dict[str, float]:
        return {
            "tokens a request, each after its own context": self.whole / requests,
            "tokens a request, contexts shared": self.shared / requests,
            "tokens a request, computed": self.padded / requests,
            "logits a request, computed": self.asked / requests,
            "batches": self.batches,
            "shapes": len(self.shapes),
            "FLOPs a request": self.flops / requests,
        }


class Spans:
    """Seconds of this process's CPU by what they were spent on; of nested ones each has what the inner ones leave."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open = ["the rest"]
        self._last = time.process_time()

    def _switch(self) -> None:
        now = time.process_time()
        self.seconds[self._open[-1]] += now - self._last
        self._last = now

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **settings: Any) -> Any:
            self._switch()
            self._open.append(name)
            try:
                return function(*arguments, **settings)
            finally:
                self._switch()
                self._open.pop()

        return timed

    def close(self) -> dict[str, float]:
        self._switch()
        return dict(self.seconds)


def _nothing(params: Any, tokens: Any, at: Any, targets: Any, joined: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """In place of the compiled program: numbers of the right shapes, at once."""
    told = np.asarray(targets)
    return -(1 + told % 97).astype(np.float32), told % 3 == 0


@contextmanager
def _host_alone(spans: Spans) -> Iterator[None]:
    """While entered, nothing is computed, batches are those of an accelerator, and `spans` has where time goes."""
    import jax
    import lm_eval.evaluator
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

    from affinage.evaluation import run, scoring
    from affinage.evaluation.backend import JaxLM
    from affinage.generation.model import LoadedModel

    told = [
        ("items read", run, ("find_tasks", "task_manager")),
        ("items read", TaskManager, ("load",)),
        ("requests written (lm-eval)", Task, ("build_all_requests",)),
        ("texts tokenised", JaxLM, ("loglikelihood",)),
        ("grouped, joined and packed", scoring, ("in_pieces", "group_requests", "find_families")),
        ("grouped, joined and packed", scoring, ("batches",)),
        ("handed to the device", LoadedModel, ("place",)),
        ("answers read and kept", scoring.Scorer, ("score",)),
        ("metrics and hashes (lm-eval)", lm_eval.evaluator, ("evaluate",)),
        ("standard errors (lm-eval)", lm_eval.evaluator, ("_process_results",)),
        ("results written", run, ("write_results",)),
    ]
    with ExitStack() as stack:
        stack.enter_context(patch.object(scoring, "_compiled", lambda *_: spans.of("handed to the device", _nothing)))
        stack.enter_context(patch.object(run, "fingerprint", lambda model: "none"))
        stack.enter_context(patch.object(jax, "default_backend", lambda: "gpu"))
        for what, place, names in told:
            for name in names:
                stack.enter_context(patch.object(place, name, spans.of(what, getattr(place, name))))
        yield


def host_only(model, data: Path, tasks: list[str], *, limit: int | None, batch: int, repeats: int) -> list[dict]:
    """Lines of results: requests per CPU second of the host, and what a chip would have to compute for a request."""
    from tempfile import TemporaryDirectory

    from affinage.evaluation.run import evaluate
    from affinage.model.analysis import parameters

    passes, computed, requests = [], Computed(), 0
    for turn in range(repeats + 1):
        few = 5 if turn == 0 else limit  # imports, and compiles what tokenises
        spans, computed = Spans(), Computed()
        with TemporaryDirectory() as folder, _host_alone(spans), computed.counting(model.graph):
            place = Path(folder)
            results = evaluate(
                model, tasks, data_dir=data, limit=few, batch_size=batch, folder=place, keep=place / "answers.jsonl"
            )
        requests = results["requests"]
        if turn:
            passes.append(spans.close())
            taken = sum(passes[-1].values())
            print(f"host, pass {turn}: {requests:,} requests, {taken:.1f} CPU s, {requests / taken:,.0f} a CPU s")
    chosen = sorted(passes, key=lambda one: sum(one.values()))[len(passes) // 2]
    seconds = sum(chosen.values())
    for what, taken in sorted(chosen.items(), key=lambda one: -one[1]):
        print(f"  {what:<32}{taken:8.2f} s {taken / seconds:6.1%} {1e6 * taken / requests:8.1f} us a request")
    host = {
        "name": "host alone",
        "ours": requests / seconds,
        "peer": None,
        "unit": "requests per CPU second",
        "requests": requests,
        "microseconds of a request": {what: 1e6 * taken / requests for what, taken in chosen.items()},
        "of passes": [requests / sum(one.values()) for one in passes],
    }
    size = parameters(model.graph).total
    return [host, arithmetic(computed, requests, seconds, size, model.name) | {"rows": batch, **_held(model)}]


def _held(model) -> dict[str, int]:
    """What the planner says an H200 holds beside the weights, in rows of the context; 64 at most are taken."""
    import jax

    from affinage.evaluation.batch_size import ROOM, bytes_of_a_row
    from affinage.hardware.chips import named

    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.params))
    row = bytes_of_a_row(model, "gpu")
    fitting = int(ROOM * (named("H200").memory_per_device - weights) // row)
    print(f"rows of {model.context} tokens that an H200 holds: {fitting} of {row / 1e6:.0f} MB")
    return {"rows that an H200 holds, planned": fitting}


def arithmetic(computed: Computed, requests: int, host_seconds: float, parameters: int, name: str) -> dict[str, Any]:
    """What share of an H200's peak the target takes, from what is computed; nothing is measured here."""
    from affinage.hardware.chips import named

    peak = named("H200").flops_per_device
    told = computed.told(requests)
    flops = told["FLOPs a request"]
    left = 1 / TARGET - host_seconds / requests  # where the chip waits for the host, all the time
    shares = {"of the peak": TARGET * flops / peak, OFF: flops / left / peak if left > 0 else None}
    for what, value in told.items():
        print(f"  {what:<46}{value:,.1f}" if value < 1e6 else f"  {what:<46}{value:.3g}")
    in_turns = f"{shares[OFF]:.1%} where chip and host take turns" if left > 0 else "the host alone is slower"
    print(
        f"{name}, {parameters:,} parameters: {TARGET:,.0f} requests/s are {TARGET * flops / 1e12:.1f} TFLOP/s, "
        f"{TARGET * flops / peak:.1%} of an H200's {peak / 1e12:.0f} in bfloat16; {in_turns}. Arithmetic, not measured."
    )
    return {"name": f"arithmetic of {name} on an H200", "parameters": parameters, "peak_flops": peak} | told | shares


def suite(model, data: Path, tasks: list[str], *, limit: int | None, batch: int | str, repeats: int) -> list[dict]:
    """A line of results: requests a second of the whole evaluation on the device that JAX finds."""
    import jax

    from affinage.evaluation.batch_size import rows_that_fit
    from affinage.evaluation.run import evaluate
    from affinage.hardware.chips import chip

    device = jax.devices()[0]
    rows = rows_that_fit(model) if batch == "auto" else int(batch)
    print(f"{device.device_kind}: {model.compute_dtype}, {rows} rows of {model.context} tokens at once", flush=True)
    seconds, computed, requests = [], Computed(), 0
    for turn in range(repeats + 1):
        computed = Computed()
        started = time.perf_counter()
        with computed.counting(model.graph):
            requests = evaluate(model, tasks, data_dir=data, limit=limit, batch_size=rows)["requests"]
        seconds.append(time.perf_counter() - started)
        said = "with compilation" if turn == 0 else "compiled"
        print(f"{said}: {requests:,} requests in {seconds[-1]:.1f} s, {requests / seconds[-1]:,.0f}/s", flush=True)
    taken = median(seconds[1:])
    peak = chip(device.device_kind).flops_per_device
    result = {
        "name": f"{model.name} on {device.device_kind}",
        "ours": requests / taken,
        "peer": TARGET,
        "unit": "requests per second, lm-eval's own work included",
        "ratio": requests / taken / TARGET,
        "with compilation": requests / seconds[0],
        "share_of_peak": computed.flops / taken / peak if peak else None,
        "rows": rows,
        "dtype": model.compute_dtype,
    }
    if peak:
        print(f"{result['share_of_peak']:.1%} of the chip's peak in bfloat16")
    return [result | computed.told(requests)]
