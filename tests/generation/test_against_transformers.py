"""What transformers generates with the exported weights, and what its logits processors leave, beside ours."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import logits_process as theirs_of

from affinage.generation.decode import Generator, Request
from affinage.generation.sampling import Sampling, filtered, knobs, knobs_of_rows
from affinage.hub.card import CardFacts
from affinage.hub.export import export
from tiny_models import tiny_llama

VOCABULARY = 97
CASES = [
    Sampling(temperature=0.6),
    Sampling(temperature=1.7),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_k=11),
    Sampling(1.0, top_k=500),
    Sampling(1.0, top_p=0.3),
    Sampling(1.0, top_p=0.95),
    Sampling(1.0, min_p=0.02),
    Sampling(1.0, min_p=0.5),
    Sampling(1.0, repetition_penalty=1.8),
    Sampling(1.0, repetition_penalty=0.6),
    Sampling(0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
    Sampling(1.4, top_k=60, top_p=0.99, min_p=0.01, repetition_penalty=0.9),
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("hub") / "model"
    model = replace(tiny_llama(scale=3.0), context=320)
    export(model, folder, facts=CardFacts(licence="apache-2.0"))
    return model, AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_256_tokens_of_greedy_text_are_those_of_transformers(exported):  # type: ignore[no-untyped-def]
    model, theirs, _ = exported
    for text in ("La capitale", "Twelve plus"):
        prompt = [2, *model.tokenizer.encode(text)]
        settings = {"max_new_tokens": 256, "min_new_tokens": 256, "do_sample": False, "eos_token_id": None}
        wanted = theirs.generate(torch.tensor([prompt]), **settings)[0].tolist()[len(prompt) :]
        ours = Generator(model).generate([prompt], Request(256, stop_ids=()))[0].tokens
        assert ours == wanted and len(ours) == 256
        assert len(set(ours)) > 5, "a repeated token would prove little"


def test_a_stop_string_and_a_penalty_end_it_where_they_end_transformers(exported):  # type: ignore[no-untyped-def]
    model, theirs, their_tokenizer = exported
    prompt = [2, *model.tokenizer.encode("La capitale")]
    sampling = Sampling(repetition_penalty=1.3)
    free = Generator(model).generate([prompt], Request(40, sampling, stop_ids=()))[0].text
    stop = free[30:33]
    ours = Generator(model).generate([prompt], Request(40, sampling, stop_ids=(), stop_strings=(stop,)))[0]
    wanted = theirs.generate(
        torch.tensor([prompt]),
        max_new_tokens=40,
        do_sample=False,
        repetition_penalty=1.3,
        eos_token_id=None,
        stop_strings=[stop],
        tokenizer=their_tokenizer,
    )[0].tolist()[len(prompt) :]
    assert ours.tokens == wanted and ours.ended_by == "text"
    assert ours.text == free[: free.index(stop)]


def theirs_filtered(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """In the order of `generate`."""
    steps = [theirs_of.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    steps += [theirs_of.TemperatureLogitsWarper(sampling.temperature)]
    steps += [theirs_of.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [theirs_of.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    steps += [theirs_of.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    for step in steps:
        logits = step(tokens, logits)
    return logits.numpy()


def drawn(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    logits = (3 * random.normal(size=(rows, VOCABULARY))).astype(np.float32)
    tokens = random.integers(0, VOCABULARY, (rows, 12))
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, tokens, True, axis=1)
    return logits, tokens, seen


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_filters_leave_what_transformers_leaves(sampling: Sampling):
    logits, tokens, seen = drawn(16)
    wanted = theirs_filtered(torch.tensor(logits), torch.tensor(tokens), sampling)
    ours = np.asarray(filtered(jnp.asarray(logits), knobs(sampling), sampling.filters, jnp.asarray(seen)))
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(wanted))
    np.testing.assert_allclose(ours, wanted, rtol=1e-6)
    assert (
        sampling.filters == {"temperature"}
        or not np.allclose(ours, logits / sampling.temperature)
        or sampling.top_k > 97
    )


def test_a_row_with_filters_of_its_own_is_as_if_all_had_them():
    logits, _, seen = drawn(len(CASES))
    every = frozenset({"repetition_penalty", "temperature", "top_k", "top_p", "min_p"})
    together = np.asarray(filtered(jnp.asarray(logits), knobs_of_rows(CASES), every, jnp.asarray(seen)))
    for row, sampling in enumerate(CASES):
        one = slice(row, row + 1)
        alone = filtered(jnp.asarray(logits[one]), knobs(sampling), sampling.filters, jnp.asarray(seen[one]))
        np.testing.assert_array_equal(together[one], np.asarray(alone))
