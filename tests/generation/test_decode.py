"""Decoding with a cache against transformers and the full forward pass, and the promises about when it ends."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from affinage.generation.decode import Generator, Request
from affinage.generation.sampling import Sampling
from affinage.hub.card import CardFacts
from affinage.hub.export import export
from tiny_models import CONTEXT, full_logits, tiny_llama

PROMPTS = [[2, 50, 60, 70], [2], [2, *range(30, 61)], [2, 99, 98, 97, 96, 95]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "model"
    model = replace(tiny_llama(scale=3.0, layers=2), context=320)
    export(model, folder, facts=CardFacts(license="apache-2.0"))
    return model, AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def theirs_after(exported, prompt, **settings):
    _, theirs, tokenizer = exported
    settings |= {"do_sample": False, "eos_token_id": None, "tokenizer": tokenizer}
    return theirs.generate(torch.tensor([prompt]), **settings)[0].tolist()[len(prompt) :]


def test_256_tokens_of_greedy_text_are_those_of_transformers(exported):
    model = exported[0]
    prompt = [2, *model.tokenizer.encode("La capitale")]
    ours = Generator(model).generate([prompt], Request(256, stop_ids=()))[0].tokens
    assert ours == theirs_after(exported, prompt, max_new_tokens=256, min_new_tokens=256) and len(ours) == 256
    assert len(set(ours)) > 5, "a repeated token would prove little"


def test_a_stop_string_and_a_penalty_end_it_where_they_end_transformers(exported):
    model = exported[0]
    prompt = [2, *model.tokenizer.encode("La capitale")]
    sampling = Sampling(repetition_penalty=1.3)
    free = Generator(model).generate([prompt], Request(40, sampling, stop_ids=()))[0].text
    stop = free[30:33]
    ours = Generator(model).generate([prompt], Request(40, sampling, stop_ids=(), stop_strings=(stop,)))[0]
    theirs = theirs_after(exported, prompt, max_new_tokens=40, repetition_penalty=1.3, stop_strings=[stop])
    assert ours.tokens == theirs and ours.ended_by == "text" and ours.text == free[: free.index(stop)]


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


def test_cached_greedy_decoding_equals_the_full_forward_pass():
    model = tiny_llama()
    for penalty in (1.0, 1.7):
        request = Request(24, Sampling(repetition_penalty=penalty), stop_ids=())
        for prompt, result in zip(PROMPTS, new_generator(model).generate(PROMPTS, request), strict=True):
            assert result.tokens == slow_greedy(model, prompt, 24, penalty=penalty)
            assert result.ended_by == "length" and result.text == model.tokenizer.decode(result.tokens)


def test_a_stop_token_ends_the_row_and_is_not_part_of_it():
    model = tiny_llama()
    stop = slow_greedy(model, PROMPTS[0], 24)[10]
    results = new_generator(model).generate(PROMPTS, Request(24, stop_ids=(stop,)))
    assert results[0].ended_by == "token"
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == slow_greedy(model, prompt, 24, stop=(stop,))


def test_generation_never_leaves_the_context():
    generator = new_generator(tiny_llama())
    assert len(generator.generate([[2, *range(20, 20 + CONTEXT - 6)]], Request(500, stop_ids=()))[0].tokens) == 5
    with pytest.raises(ValueError, match="tokens"):
        generator.generate([[2] * CONTEXT], Request(1))


def test_sampled_text_is_repeatable_and_independent_of_the_batch():
    model, prompts = tiny_llama(), [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    request = Request(16, Sampling(1.3, 40, 0.95, 0.01, repetition_penalty=1.1, seed=3), stop_ids=())
    together = new_generator(model).generate(prompts, request)
    apart = new_generator(model, batch=1).generate(prompts, request)
    assert [one.tokens for one in together] == [one.tokens for one in apart]
    again = new_generator(model).generate([PROMPTS[0], *prompts], request)
    assert again[0].tokens == together[0].tokens != again[1].tokens


def test_streamed_pieces_make_up_the_generation():
    model, request = tiny_llama(), Request(24, stop_ids=())
    whole = new_generator(model).generate([PROMPTS[3]], request)[0]
    pieces, stream = [], new_generator(model).stream(PROMPTS[3], request)
    with pytest.raises(StopIteration) as end:
        while True:
            pieces.append(next(stream))
    assert end.value.value == whole
    assert "".join(pieces) == whole.text and len(pieces) > 3
