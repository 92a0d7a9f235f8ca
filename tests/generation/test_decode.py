"""Decoding with a cache against the full forward pass, token by token, and the promises about when it ends."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from affinage.generation.decode import Generator, Request
from affinage.generation.model import logits_of
from affinage.generation.sampling import Sampling, penalise_repetition
from tiny_models import CONTEXT, tiny_llama

PROMPTS = [[2, 50, 60, 70], [2], [2, *range(30, 61)], [2, 99, 98, 97, 96, 95]]


@partial(jax.jit, static_argnames="graph")
def all_logits(graph, params, row):
    lazy, _ = logits_of(graph, params, row, jnp.arange(row.shape[1])[None], "float32")
    return lazy.array()


def full_forward(model, tokens):
    row = np.zeros((1, CONTEXT), np.int32)  # what follows a token cannot change its logits
    row[0, : len(tokens)] = tokens
    return np.asarray(all_logits(model.graph, model.params, row))[0, len(tokens) - 1]


def slow_greedy(model, prompt, count, stop=(), penalty=1.0):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        logits = jnp.asarray(full_forward(model, tokens))[None]
        if penalty != 1.0:
            seen = jnp.zeros(logits.shape, bool).at[0, jnp.asarray(tokens)].set(True)
            logits = penalise_repetition(logits, seen, jnp.float32(penalty))
        chosen = int(jnp.argmax(logits))
        if chosen in stop:
            break
        tokens.append(chosen)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_cached_greedy_decoding_equals_the_full_forward_pass(penalty):
    model = tiny_llama()
    request = Request(max_new_tokens=24, sampling=Sampling(repetition_penalty=penalty), stop_ids=())
    results = Generator(model, batch=3, steps_per_dispatch=5).generate(PROMPTS, request)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == slow_greedy(model, prompt, 24, penalty=penalty)
        assert result.ended_by == "length"
        assert result.text == model.tokenizer.decode(result.tokens)


def test_a_stop_token_ends_the_row_and_is_not_part_of_it():
    model = tiny_llama()
    free = slow_greedy(model, PROMPTS[0], 24)
    stop = free[10]
    expected = free[: free.index(stop)]
    results = Generator(model, steps_per_dispatch=4).generate(PROMPTS, Request(24, stop_ids=(stop,)))
    assert results[0].tokens == expected
    assert results[0].ended_by == "token"
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == slow_greedy(model, prompt, 24, stop=(stop,))


def test_a_stop_string_cuts_the_text():
    model = tiny_llama()
    text = Generator(model).generate([PROMPTS[2]], Request(30, stop_ids=()))[0].text
    stop = text[6:9]
    request = Request(30, stop_ids=(), stop_strings=(stop,))
    result = Generator(model, steps_per_dispatch=3).generate([PROMPTS[2]], request)[0]
    assert result.text == text[: text.index(stop)]
    assert result.ended_by == "text"


def test_generation_never_leaves_the_context():
    model = tiny_llama()
    result = Generator(model).generate([[2, *range(20, 20 + CONTEXT - 6)]], Request(500, stop_ids=()))[0]
    assert len(result.tokens) == 5
    with pytest.raises(ValueError, match="between 1 and"):
        Generator(model).generate([[2] * CONTEXT], Request(1))


def test_sampled_text_is_repeatable_and_independent_of_the_batch():
    model = tiny_llama()
    request = Request(16, Sampling(temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, seed=3), stop_ids=())
    together = Generator(model, batch=4).generate(PROMPTS, request)
    apart = Generator(model, batch=1, steps_per_dispatch=7).generate(PROMPTS, request)
    assert [one.tokens for one in together] == [one.tokens for one in apart]
    again = Generator(model).generate([PROMPTS[0]] * 2, request)
    assert again[0].tokens == together[0].tokens
    assert again[0].tokens != again[1].tokens


def test_streamed_pieces_make_up_the_generation():
    model = tiny_llama()
    request = Request(40, stop_ids=())
    whole = Generator(model).generate([PROMPTS[3]], request)[0]
    pieces, stream = [], Generator(model).stream(PROMPTS[3], request)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            assert end.value == whole
            break
    assert "".join(pieces) == whole.text and len(pieces) > 3


def test_shapes_are_shared_between_prompts_of_similar_length():
    model = tiny_llama(seed=1)
    generator = Generator(model)
    generator.generate([[2, 30, 31]], Request(8))
    before = generator._decode._cache_size(), generator._prefill._cache_size()
    generator.generate([[2, 30, 31, 32, 33]], Request(9))
    assert (generator._decode._cache_size(), generator._prefill._cache_size()) == before
