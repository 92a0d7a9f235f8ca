"""The losses of preference pairs against torch, with TRL's formulas, on the same weights and batch."""

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from affinage.model import ApplyConfig, Graph, apply, init_params, parse

VOCABULARY, WIDTH, ROWS, CONTEXT, DOCUMENTS = 50, 8, 4, 24, 4
WEIGHTS = [("embed", "embedding"), ("norm", "scale"), ("logits", "kernel")]


def graph(**settings: object) -> Graph:
    documents = {"kind": "document_log_probabilities", "in": ["logits", "tokens"], "documents": DOCUMENTS}
    return parse(
        {
            "inputs": ["tokens"],
            "nodes": {
                "embed": {"kind": "embedding", "in": "tokens", "vocab": VOCABULARY, "width": WIDTH},
                "norm": {"kind": "rms_norm", "in": "embed"},
                "logits": {"kind": "unembed", "in": "norm", "tied": False, "vocab": VOCABULARY},
                "answers": documents | {key: settings.pop(key) for key in ("chunk",) if key in settings},
                "loss": {"kind": "preference_loss", "in": "answers", **settings},
            },
        }
    )


def batch() -> dict[str, np.ndarray]:
    """Rows of two pairs, but the last of one; every document's first tokens are its prompt."""
    draw = np.random.default_rng(0)
    segment_ids = np.zeros((ROWS, CONTEXT), np.int32)
    mask = np.zeros((ROWS, CONTEXT), np.float32)
    for row in range(ROWS):
        documents = 2 if row == ROWS - 1 else 4
        cuts = [0, *np.sort(draw.choice(np.arange(1, 7) * 3, documents - 1, replace=False)), 21]
        for number in range(documents):
            segment_ids[row, cuts[number] :] = number + 1
            mask[row, cuts[number] + 1 : cuts[number + 1]] = 1
    return {
        "tokens": draw.integers(0, VOCABULARY, (ROWS, CONTEXT)).astype(np.int32),
        "segment_ids": segment_ids,
        "loss_mask": mask,
        "reference_log_probabilities": (draw.normal(size=(ROWS, DOCUMENTS)) * 3 - 20).astype(np.float32),
    }


def in_torch(params: dict, given: dict, beta: float) -> tuple:
    """TRL's DPO step, one document at a time: (loss, gradients, metrics)."""
    weights = {node: torch.tensor(np.asarray(params[node][name]), requires_grad=True) for node, name in WEIGHTS}
    losses, rewards, found = [], [], []
    for row in range(ROWS):
        sums = []
        for number in range(1, int(given["segment_ids"][row].max()) + 1):
            inside = given["segment_ids"][row] == number
            ids = torch.tensor(given["tokens"][row][inside], dtype=torch.long)
            completion = torch.tensor(given["loss_mask"][row][inside])[1:]
            x = F.rms_norm(weights["embed"][ids], (WIDTH,), weights["norm"], eps=1e-6)
            logits = x @ weights["logits"].T
            per_token = F.log_softmax(logits, dim=-1)[:-1].gather(1, ids[1:, None])[:, 0]
            sums.append((per_token * completion).sum())
        for pair in range(len(sums) // 2):
            c, r = sums[2 * pair], sums[2 * pair + 1]
            rc, rr = (torch.tensor(v) for v in given["reference_log_probabilities"][row, 2 * pair : 2 * pair + 2])
            losses.append(-F.logsigmoid(beta * ((c - r) - (rc - rr))))
            rewards.append(((beta * (c - rc)).item(), (beta * (r - rr)).item()))
            found.append((c.item(), r.item()))
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {name: leaf.grad.numpy() for name, leaf in weights.items()}
    chosen, rejected = np.array(rewards).T
    metrics = {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/accuracies": (chosen > rejected).mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "logps/chosen": np.array(found)[:, 0].mean(),
        "logps/rejected": np.array(found)[:, 1].mean(),
    }
    return loss.item(), gradients, metrics


@pytest.mark.parametrize("chunk", [pytest.param("auto", marks=pytest.mark.full), 7])
def test_loss_gradients_and_metrics_are_those_of_torch(chunk: int | str):
    model, beta = graph(beta=0.5, chunk=chunk), 0.5
    params = init_params(model, jax.random.key(0))
    # Of weights as small as the first ones nothing would be learned about the formulas.
    params = jax.tree.map(lambda leaf: 20.0 * leaf if leaf.ndim > 1 else leaf, params)
    given = batch()

    def mean(params: dict) -> tuple:
        outputs = apply(model, params, given, ApplyConfig(platform="gpu"))
        return outputs.values["loss"].mean(), outputs.metrics

    (loss, metrics), gradients = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
    expected, expected_gradients, expected_metrics = in_torch(params, given, beta)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    for node, name in WEIGHTS:
        scale = np.abs(expected_gradients[node]).max()
        np.testing.assert_allclose(gradients[node][name], expected_gradients[node], atol=1e-4 * scale, rtol=1e-4)
    means = {name: float(total / count) for name, (total, count) in metrics.items()}
    assert means == pytest.approx(expected_metrics, rel=1e-4)
    assert {float(count) for _, count in metrics.values()} == {7.0}
