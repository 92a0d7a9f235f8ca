"""What benchmarks share: options, clocks, results with their JSON line, trainers, an exported random model."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "data"), str(TESTS / "cluster")]

Result = dict[str, Any]
Part = TypeVar("Part")


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's docstring, with the option `--quick`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and short, to see that it runs")
    return parser


def parts_of(doc: str | None, parts: Mapping[str, Part], default: Sequence[str]) -> tuple[dict[str, Part], bool]:
    """Parse options and names of parts; return those parts (`default` if none is named), and whether it is quick."""
    parser = options_of(doc)
    parser.add_argument("parts", nargs="*", metavar="PART", default=default)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(parts)}")
    return {name: parts[name] for name in options.parts}, options.quick


def result(name: str, ours: float, unit: str, peer: float | None = None, **more: Any) -> Result:
    """Return a line of the results and print it; `ratio` is ours / peer."""
    ratio = ours / peer if peer else None
    beside = f", peer {peer:,.4g}: {ratio:.3f}" if ratio is not None else ""
    facts = "".join(f", {key} {value:.4g}" for key, value in more.items() if isinstance(value, float))
    print(f"{name}: {ours:,.4g} {unit}{beside}{facts}", flush=True)
    return {"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": ratio, **more}


def finish(benchmark: str, results: Sequence[Result], **facts: Any) -> None:
    """Print the JSON line that ends a benchmark."""
    print(json.dumps({"benchmark": benchmark, "results": list(results), **facts}))


def median_seconds(run: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the median time of some runs, by the wall clock or `time.process_time`."""
    times = []
    for _ in range(repeats):
        start = clock()
        run()
        times.append(clock() - start)
    return median(times)


def random_llama(folder: Path, layers: int, width: int, ffn: int, vocabulary: int, context: int) -> Path:
    """Export a Llama with random weights and heads of 64 as a Hugging Face folder."""
    import jax

    from affinage.generation.engine import LoadedModel
    from affinage.hub.folder import CardFacts, export
    from affinage.model import parse
    from affinage.model.forward import init_params
    from tiny_models import LLAMA, tokenizer

    nodes: dict[str, Any] = LLAMA["nodes"]
    attention = {"heads": width // 64, "rope": {"theta": 10000}}
    nodes = nodes | {
        "embed": nodes["embed"] | {"width": width, "vocab": vocabulary},
        "blocks": nodes["blocks"] | {"repeat": layers, "attention": attention, "ffn": {"kind": "swiglu", "width": ffn}},
        "logits": nodes["logits"] | {"vocab": vocabulary},
    }
    graph = parse(LLAMA | {"nodes": nodes})
    params = jax.jit(lambda key: init_params(graph, key))(jax.random.key(0))
    export(LoadedModel(graph, params, tokenizer(), "random", context), folder, facts=CardFacts(license="apache-2.0"))
    return folder


def trainer_of(graph: Any, settings: Any, mesh: dict[str, int | str], batch: Any, parallel: Any = None) -> Any:
    """Return a Trainer on as many of this machine's devices as the mesh names, for its steps alone: it has no feed."""
    from affinage.config.training import ParallelSettings
    from affinage.hardware.devices import acquire
    from affinage.parallel.sharding import make_mesh
    from affinage.training import TrainJob
    from affinage.training.trainer import Trainer

    no_feed: Any = None
    parallel = parallel or ParallelSettings()
    job = TrainJob(graph=graph, settings=settings, mesh=mesh, seed=0, feed=no_feed, folder=Path(), parallel=parallel)
    return Trainer(job, make_mesh(mesh, acquire()), batch)


def batch_of(tokens: np.ndarray, segments: np.ndarray | None = None, positions: np.ndarray | None = None) -> Any:
    """Return a batch as a feed makes it of tokens int32 [rows, context]; by default a row is one document."""
    rows, context = tokens.shape
    batch = {
        "tokens": tokens,
        "positions": np.tile(np.arange(context, dtype=np.int32), (rows, 1)) if positions is None else positions,
        "loss_mask": np.ones((rows, context), np.float32),
        "rows": np.arange(rows, dtype=np.int32),
    }
    return batch if segments is None else batch | {"segment_ids": segments}
