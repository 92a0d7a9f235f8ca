"""Decoding with a cache against transformers and the full forward pass, and the promises about when it ends."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from affinage.data.tokenizer import Tokenizer
from affinage.generation.engine import Engine, generate, token_logprobs
from affinage.generation.sampling import Detokenizer, SamplingParams
from affinage.hub.folder import CardFacts, export
from affinage.model.layers import attention, block
from tiny_models import CONTEXT, full_logits, tiny_llama, tokenizer

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
    ours = generate(model, [prompt], SamplingParams(256, ignore_eos=True))[0].tokens
    assert ours == theirs_after(exported, prompt, max_new_tokens=256, min_new_tokens=256) and len(ours) == 256
    assert len(set(ours)) > 5, "a repeated token would prove little"


def test_a_stop_string_ends_it_where_they_end_transformers(exported):
    model = exported[0]
    prompt = [2, *model.tokenizer.encode("La capitale")]
    params = SamplingParams(40, ignore_eos=True)
    free = generate(model, [prompt], params)[0].text
    stop = free[30:33]
    ours = generate(model, [prompt], replace(params, stop=(stop,)))[0]
    theirs = theirs_after(exported, prompt, max_new_tokens=40, stop_strings=[stop])
    assert ours.tokens == theirs and ours.finish_reason == "stop" and ours.text == free[: free.index(stop)]


def slow_greedy(model, prompt, count, stop=()):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        chosen = int(full_logits(model, tokens)[-1].argmax())
        if chosen in stop:
            break
        tokens.append(chosen)
    return tokens[len(prompt) :]


def test_cached_greedy_decoding_equals_the_full_forward_pass_up_to_a_stop_token():
    model = tiny_llama()
    results = generate(model, PROMPTS, SamplingParams(24, ignore_eos=True), max_num_seqs=2)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == slow_greedy(model, prompt, 24)
        assert result.finish_reason == "length" and result.text == model.tokenizer.decode(result.tokens)
    stop = slow_greedy(model, PROMPTS[0], 24)[10]
    tokenizer = type("Stopping", (Tokenizer,), {"stops": (stop,)})(model.tokenizer.folder)
    results = generate(replace(model, tokenizer=tokenizer), PROMPTS, SamplingParams(24))
    assert results[0].finish_reason == "eos"
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == slow_greedy(model, prompt, 24, stop=(stop,))


@pytest.mark.parametrize(("platform", "layers"), [("gpu", 4), ("tpu", 5)])  # programs of a graph are kept
def test_what_is_compiled_for_accelerators_generates_the_same(platform, layers, monkeypatch):
    """In the forms that programs have there: layers one by one or scanned, matrices cast and joined."""
    model, prompts = tiny_llama(layers=layers), PROMPTS[:2]
    expected = [slow_greedy(model, prompt, 8) for prompt in prompts]
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    results = generate(model, prompts, SamplingParams(8, ignore_eos=True), max_num_seqs=2)
    assert [result.tokens for result in results] == expected


def test_attention_reads_the_cache_where_it_holds_something(monkeypatch):
    """A prompt from its beginning is computed as in training, by the platform's kernel; what follows is not."""
    found = []

    def choose(*about, only_xla, **more):
        found.append((about[-1], only_xla))
        return attention.choose(*about, only_xla=only_xla, **more)

    monkeypatch.setattr(block, "choose", choose)
    engine = Engine(tiny_llama(layers=3), max_num_seqs=1, enable_prefix_caching=True)
    prompt = [2, *range(300, 320)]
    texts = {}
    for tokens in (prompt, [*prompt, 40], [*prompt, *range(320, 390)]):
        texts[tuple(tokens)] = "".join(engine.stream(tokens, SamplingParams(4, ignore_eos=True)))
    assert found == [(64, False), (1, True), (64, True), (CONTEXT, True)]
    for tokens, text in texts.items():
        assert text == engine.model.tokenizer.decode(slow_greedy(engine.model, tokens, 4))


def test_generation_never_leaves_the_context():
    model, params = tiny_llama(), SamplingParams(500, ignore_eos=True)
    assert len(generate(model, [[2, *range(20, 20 + CONTEXT - 6)]], params)[0].tokens) == 5
    for prompt in ([2] * CONTEXT, []):
        with pytest.raises(ValueError, match="tokens"):
            generate(model, [prompt], SamplingParams(1))


def test_streamed_pieces_make_up_the_generation_whatever_a_slot_holds_of_the_prompt():
    model, params = tiny_llama(), SamplingParams(24, ignore_eos=True)
    engine = Engine(model, max_num_seqs=1, steps=4, enable_prefix_caching=True)
    prompt = list(PROMPTS[2])
    for _ in range(3):  # turns of a conversation
        pieces = list(engine.stream(prompt, params))
        (whole,) = generate(model, [prompt], params)
        assert "".join(pieces) == whole.text and len(pieces) > 3
        prompt = [*prompt, *whole.tokens[:10], 99, 98]
    stream = engine.stream(prompt, params)
    next(stream)
    stream.close()
    (other,) = generate(model, [PROMPTS[3]], params)
    assert not engine.active and "".join(engine.stream(PROMPTS[3], params)) == other.text


def test_log_probabilities_are_those_of_the_full_forward_pass():
    model, prompt = tiny_llama(), PROMPTS[3]
    (result,) = generate(model, [prompt], SamplingParams(6, ignore_eos=True))
    tokens = [*prompt, *result.tokens]
    expected = np.asarray(torch.log_softmax(torch.tensor(full_logits(model, tokens)), -1))
    for place, one in enumerate(token_logprobs(model, tokens, 3)):
        assert one.token == tokens[place + 1]
        assert one.logprob == pytest.approx(expected[place, one.token], abs=1e-4)
        best = np.sort(expected[place])[::-1][:3]
        assert [value for _, value in one.top] == pytest.approx(best.tolist(), abs=1e-4)


# ---- text is released once, and as soon as no later token changes it


texts = st.text(st.sampled_from("abc é€🧀\n\tü"), max_size=25)


@given(texts)
def test_pieces_join_to_the_text(text):
    stream = Detokenizer(tokenizer())
    pieces = [stream.push(token) for token in tokenizer().encode(text)]
    assert "".join([*pieces, stream.push(None)]) == text == stream.released
    assert not any("\ufffd" in piece for piece in pieces)


@given(texts, st.lists(st.text(st.sampled_from("abc é€🧀\n"), min_size=1, max_size=3), max_size=3))
def test_text_ends_before_the_first_stop_string(text, stops):
    stream = Detokenizer(tokenizer(), stops)
    pieces = []
    for token in tokenizer().encode(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.push(None))
    released = "".join(pieces)
    ends = [text.index(stop) for stop in stops if stop in text]
    assert stream.stopped == bool(ends)
    # A stop string found early may be overtaken by a longer one that began before it but ended after it.
    assert text.startswith(released) and (released == text if not ends else min(ends) <= len(released))
    assert not ends or any(text[len(released) :].startswith(stop) for stop in stops)


def test_bytes_that_are_no_text_do_not_block_what_follows():
    tokens = [10 + 0xE2, *tokenizer().encode("abc")]  # ids 10 to 265 are the bytes
    stream = Detokenizer(tokenizer())
    assert "".join([stream.push(token) for token in tokens] + [stream.push(None)]) == "\ufffdabc"
