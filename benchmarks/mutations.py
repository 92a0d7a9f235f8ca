"""Whether `make test` notices when a central line is wrong: each one is changed in a copy, and its tests are run.

    python benchmarks/mutations.py [--quick] [--only WORD]

A mutation that no test fails for is printed as SURVIVED, and ends the benchmark with status 1. `--quick` tries one.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MODEL = "src/affinage/model/layers"


class Mutation(NamedTuple):
    """A wrong line, and the folder of tests whose quick tier is to find it."""

    what: str
    path: str
    right: str
    wrong: str
    tests: str


MUTATIONS = [
    Mutation(
        "targets are not shifted",
        f"{MODEL}/losses.py",
        "targets = jnp.roll(tokens, -1, axis=1)",
        "targets = tokens",
        "tests/model",
    ),
    Mutation(
        "the last target of a document counts",
        f"{MODEL}/losses.py",
        "jnp.roll(segments, -1, axis=1) == segments",
        "jnp.roll(segments, -1, axis=1) >= segments",
        "tests/model",
    ),
    Mutation(
        "a token sees the one after it",
        f"{MODEL}/attention.py",
        "behind >= 0 if self.window",
        "behind >= -1 if self.window",
        "tests/model",
    ),
    Mutation(
        "documents of a row see each other",
        f"{MODEL}/attention.py",
        "mask & (segments[:, :, None] == of_all(segments)[:, None, :])",
        "mask & (segments[:, :, None] >= of_all(segments)[:, None, :])",
        "tests/model",
    ),
    Mutation(
        "scores are scaled by 1 / width of a head",
        f"{MODEL}/attention_ops.py",
        "key[:, :, keys]) * width**-0.5",
        "key[:, :, keys]) * width**-1.0",
        "tests/model",
    ),
    Mutation(
        "the gradient of a softmax takes the largest in place of the sum",
        f"{MODEL}/attention_ops.py",
        "(products - weights.astype(jnp.float32) * jnp.sum(",
        "(products - weights.astype(jnp.float32) * jnp.max(",
        "tests/model",
    ),
    Mutation(
        "RMS norm takes the sum of squares",
        f"{MODEL}/norm.py",
        "y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32)",
        "y = x32 * jax.lax.rsqrt(jnp.sum(jnp.square(x32)",
        "tests/model",
    ),
    Mutation(
        "rotary embeddings turn the other way",
        f"{MODEL}/rotary.py",
        "[first * cos - second * sin, second * cos + first * sin]",
        "[first * cos + second * sin, second * cos - first * sin]",
        "tests/model",
    ),
    Mutation(
        "micro-batches are averaged, not summed",
        "src/affinage/training/step.py",
        "return jax.tree.map(jnp.add, total, gradient(part)), None",
        "return jax.tree.map(lambda a, b: (a + b) / 2, total, gradient(part)), None",
        "tests/training",
    ),
    Mutation(
        "the gradient is of the sum, not of the mean",
        "src/affinage/training/step.py",
        "lambda g: g / jnp.maximum(loss_tokens, 1.0)",
        "lambda g: g",
        "tests/training",
    ),
    Mutation(
        "weights move up the gradient",
        "src/affinage/training/step.py",
        "p.astype(jnp.float32) - rate * d",
        "p.astype(jnp.float32) + rate * d",
        "tests/training",
    ),
    Mutation(
        "Adam's two decays are exchanged",
        "src/affinage/training/optimizer.py",
        "return optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.eps)",
        "return optax.scale_by_adam(b1=settings.b2, b2=settings.b1, eps=settings.eps)",
        "tests/training",
    ),
    Mutation(
        "the gradient is not clipped",
        "src/affinage/training/optimizer.py",
        "_clipped_to(settings.max_grad_norm)",
        "_clipped_to(1e9)",
        "tests/training",
    ),
    Mutation(
        "norms and biases decay, too",
        "src/affinage/training/optimizer.py",
        "optax.add_decayed_weights(np.float32(settings.weight_decay), weights.decayed)",
        "optax.add_decayed_weights(np.float32(settings.weight_decay))",
        "tests/training",
    ),
    Mutation(
        "the rejected answer is preferred",
        f"{MODEL}/losses.py",
        "return values[:, 0::2] - values[:, 1::2]",
        "return values[:, 1::2] - values[:, 0::2]",
        "tests/model",
    ),
    Mutation(
        "the user's words are trained on",
        "src/affinage/data/chat.py",
        'message["role"] == "assistant" and number >= first',
        "number >= first",
        "tests/data",
    ),
]


def failing(scratch: Path, tests: str, left_out: list[str]) -> list[str]:
    """The tests that fail in the copy of the repository, up to the first one."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "--no-header", "-rfE", "-m", "not full", tests]
    command += [word for name in left_out for word in ("--deselect", name)]
    environment = {**os.environ, "PYTHONPATH": str(scratch / "src")}
    said = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=600).stdout
    return re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", said, re.MULTILINE)


def caught_by(mutation: Mutation, scratch: Path) -> str:
    """The first test that fails with the line changed and passes without; empty: none does."""
    file = scratch / mutation.path
    text = file.read_text(encoding="utf-8")
    assert text.count(mutation.right) == 1, f"{mutation.path}: {text.count(mutation.right)} x {mutation.right}"
    red: list[str] = []
    while True:
        file.write_text(text.replace(mutation.right, mutation.wrong), encoding="utf-8")
        found = failing(scratch, mutation.tests, red)
        file.write_text(text, encoding="utf-8")
        if not found:
            return ""
        if not failing(scratch, found[0], []):
            return found[0]
        if found[0] in red:
            raise SystemExit(f"{found[0]} fails without a mutation and cannot be left out")
        print(f"fails without a mutation, too: {found[0]}", file=sys.stderr, flush=True)
        red.append(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first one alone")
    parser.add_argument("--only", default="", metavar="WORD", help="those with this in their description")
    arguments = parser.parse_args()
    tried = [mutation for mutation in MUTATIONS if arguments.only in mutation.what][: 1 if arguments.quick else None]
    caught = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for part in ("src", "tests", "recipes", "examples"):
            shutil.copytree(ROOT / part, scratch / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", scratch)
        for mutation in tried:
            found = caught_by(mutation, scratch)
            caught += [found] if found else []
            print(f"{mutation.what:45} {found or 'SURVIVED'}", flush=True)
    result = {"name": "mutations caught", "ours": len(caught), "peer": len(tried), "unit": "mutations"}
    print(json.dumps({"benchmark": "mutations", "results": [result | {"ratio": len(caught) / max(len(tried), 1)}]}))
    sys.exit(len(caught) < len(tried))


if __name__ == "__main__":
    main()
