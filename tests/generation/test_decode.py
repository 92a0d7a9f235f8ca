"""Decoding with a cache against the full forward pass, token by token, and the promises about when it ends."""

import numpy as np
import pytest

from affinage.generation import decode
from affinage.generation.decode import Generation, Generator, Request
from affinage.generation.sampling import Sampling
from tiny_models import CONTEXT, full_logits, tiny_llama

PROMPTS = [[2, 50, 60, 70], [2], [2, *range(30, 61)], [2, 99, 98, 97, 96, 95]]


def slow_greedy(model, prompt, count, stop=(), penalty=1.0):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        logits = full_logits(model, tokens)[-1].copy()
        seen = list(set(tokens))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        chosen = int(logits.argmax())
        if chosen in stop:
            break
        tokens.append(chosen)
    return tokens[len(prompt) :]


def new_generator(model, batch=4):
    return Generator(model, batch=batch, steps_per_dispatch=5)


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_cached_greedy_decoding_equals_the_full_forward_pass(penalty):
    model = tiny_llama()
    request = Request(max_new_tokens=24, sampling=Sampling(repetition_penalty=penalty), stop_ids=())
    results = new_generator(model).generate(PROMPTS, request)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == slow_greedy(model, prompt, 24, penalty=penalty)
        assert result.ended_by == "length"
        assert result.text == model.tokenizer.decode(result.tokens)


def test_a_stop_token_ends_the_row_and_is_not_part_of_it():
    model = tiny_llama()
    free = slow_greedy(model, PROMPTS[0], 24)
    stop = free[10]
    expected = free[: free.index(stop)]
    results = new_generator(model).generate(PROMPTS, Request(24, stop_ids=(stop,)))
    assert results[0].tokens == expected
    assert results[0].ended_by == "token"
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == slow_greedy(model, prompt, 24, stop=(stop,))


def test_a_stop_string_cuts_the_text():
    model = tiny_llama()
    text = new_generator(model).generate([PROMPTS[2]], Request(30, stop_ids=()))[0].text
    stop = text[6:9]
    request = Request(30, stop_ids=(), stop_strings=(stop,))
    result = new_generator(model).generate([PROMPTS[2]], request)[0]
    assert result.text == text[: text.index(stop)]
    assert result.ended_by == "text"


def test_generation_never_leaves_the_context():
    model = tiny_llama()
    result = new_generator(model).generate([[2, *range(20, 20 + CONTEXT - 6)]], Request(500, stop_ids=()))[0]
    assert len(result.tokens) == 5
    with pytest.raises(ValueError, match="tokens"):
        new_generator(model).generate([[2] * CONTEXT], Request(1))


def test_sampled_text_is_repeatable_and_independent_of_the_batch():
    model = tiny_llama()
    request = Request(16, Sampling(temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, seed=3), stop_ids=())
    together = new_generator(model).generate(PROMPTS, request)
    apart = new_generator(model, batch=1).generate(PROMPTS, request)
    assert [one.tokens for one in together] == [one.tokens for one in apart]
    again = new_generator(model).generate([PROMPTS[0], *PROMPTS[:3]], request)
    assert again[0].tokens == together[0].tokens
    assert again[0].tokens != again[1].tokens


def test_streamed_pieces_make_up_the_generation():
    model = tiny_llama()
    request = Request(40, stop_ids=())
    whole = new_generator(model).generate([PROMPTS[3]], request)[0]
    pieces, stream = [], new_generator(model).stream(PROMPTS[3], request)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            assert end.value == whole
            break
    assert "".join(pieces) == whole.text and len(pieces) > 3


def test_prefill_and_decode_are_compiled_once_per_bucket(monkeypatch):
    """Prompts of up to 16 and of 17 to 32 tokens, in caches of 64 and of 96 slots, whatever else differs."""
    traced, logits_of = [], decode.logits_of
    monkeypatch.setattr(decode, "logits_of", lambda *given, **told: traced.append(1) or logits_of(*given, **told))
    decode.compiled.cache_clear()  # graphs that are equal share programs, also those of other tests
    generator = new_generator(tiny_llama())

    def generate(lengths: list[int], tokens: int, *stop_strings: str) -> list[Generation]:
        prompts = [[2, *range(30, 29 + length)] for length in lengths]
        return generator.generate(prompts, Request(tokens, stop_ids=(), stop_strings=stop_strings))

    short, long = ([1, 7, 9, 16], 40), ([17, 20, 25, 32], 60)
    said = generate(*short)
    generate(*long)
    programs = len(traced)
    generate([3, 4, 11, 12], 8)
    generate([1, 18, 31, 32], 64)
    # Rows that the host ends at a stop string, while others of their batch go on.
    stop = next(text for text in (one.text[4:7] for one in said) if 0 < sum(text in one.text for one in said) < 4)
    assert {one.ended_by for one in generate(*short, stop)} == {"text", "length"}
    assert len(traced) == programs > 0
    decode.compiled.cache_clear()
