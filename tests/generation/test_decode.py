"""Decoding with a cache against transformers and the full forward pass, and the promises about when it ends."""

import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import logits_process

from affinage.data.tokenizer import Tokenizer
from affinage.generation.engine import Engine, generate, token_logprobs
from affinage.generation.sampling import EngineRequest, SamplingParams, choose, filtered, rows_of
from affinage.hub.folder import CardFacts, export
from run_affinage import refused
from tiny_models import CONTEXT, full_logits, tiny_llama, tokenizer

PROMPTS = [[2, 50, 60, 70], [2], [2, *range(30, 61)], [2, 99, 98, 97, 96, 95]]


def test_256_tokens_of_greedy_text_are_those_of_transformers_and_a_stop_string_ends_both_alike(tmp_path):
    model = replace(tiny_llama(scale=3.0, layers=2), context=320)
    export(model, tmp_path / "model", facts=CardFacts(license="apache-2.0"))
    peer, tokenizer = (auto.from_pretrained(tmp_path / "model") for auto in (AutoModelForCausalLM, AutoTokenizer))
    prompt, params = [2, *model.tokenizer.encode("La capitale")], SamplingParams(256, ignore_eos=True)

    def theirs(**settings):
        settings |= {"do_sample": False, "eos_token_id": None, "tokenizer": tokenizer, "max_new_tokens": 256}
        return peer.generate(torch.tensor([prompt]), **settings)[0].tolist()[len(prompt) :]

    (free,) = generate(model, [prompt], params)
    assert free.tokens == theirs(min_new_tokens=256) and len(free.tokens) == 256
    assert len(set(free.tokens)) > 5, "a repeated token would prove little"
    stop = free.text[30:33]
    (stopped,) = generate(model, [prompt], replace(params, stop=(stop,)))
    assert stopped.tokens == theirs(stop_strings=[stop]) and stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]


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


def test_generation_never_leaves_the_context_and_a_layer_that_keeps_nothing_of_it_does_not_generate(monkeypatch):
    model, params = tiny_llama(), SamplingParams(500, ignore_eos=True)
    assert len(generate(model, [[2, *range(20, 20 + CONTEXT - 6)]], params)[0].tokens) == 5
    assert generate(model, [[2] * 64], SamplingParams(0))[0].finish_reason == "length"
    for prompt in ([2] * CONTEXT, []):
        with pytest.raises(ValueError, match="tokens"):
            generate(model, [prompt], SamplingParams(1))
    monkeypatch.setattr(type(model.graph.nodes[0].layer), "joins", False)
    refused(Engine, model, match="joins=True")


def test_streamed_pieces_make_up_the_generation_whatever_a_slot_holds_of_the_prompt(monkeypatch):
    model, params, prompt = tiny_llama(), SamplingParams(24, ignore_eos=True), list(PROMPTS[2])
    engine = Engine(model, max_num_seqs=1, interactive=True)

    def pieces(prompt):
        return [text for _, text, _ in engine.run([EngineRequest(prompt, params)])]

    for _ in range(3):  # turns of a conversation
        (whole,) = generate(model, [prompt], params)
        for _ in range(2):  # the second time the slot holds all of the prompt
            assert "".join(streamed := pieces(prompt)) == whole.text and len(streamed) > 3
        prompt = [*prompt, *whole.tokens[:10], 99, 98]
    stream = engine.run([EngineRequest(prompt, params)])
    next(stream)
    stream.close()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # while a program has the cache
        patch.setattr(engine, "_receive", lambda *_: signal.raise_signal(signal.SIGINT))
        pieces(prompt)
    assert not engine.active and "".join(pieces(prompt)) == generate(model, [prompt], params)[0].text


def test_log_probabilities_are_those_of_the_full_forward_pass():
    model, prompt = tiny_llama(), PROMPTS[3]
    tokens = [*prompt, *generate(model, [prompt], SamplingParams(6, ignore_eos=True))[0].tokens]
    expected = np.asarray(torch.log_softmax(torch.tensor(full_logits(model, tokens)), -1))
    first, *rest = token_logprobs(model, tokens, 3)
    assert first == [(tokens[0], None)] and len(rest) == len(tokens) - 1
    for place, ((token, logprob), *likeliest) in enumerate(rest):
        assert token == tokens[place + 1]
        assert logprob == pytest.approx(expected[place, token], abs=1e-4)
        assert [value for _, value in likeliest] == pytest.approx(sorted(expected[place])[:-4:-1], abs=1e-4)


texts = st.text(st.sampled_from("abc é€🧀\n\tü"), max_size=25)


def released(tokens, stops=()):
    """The pieces of text that tokens release one by one, up to a stop string, and whether there was one."""
    request, pieces = EngineRequest([2], SamplingParams(stop=tuple(stops))), []
    for token in tokens:
        pieces.append(request.push(token, tokenizer()))
        if request.finish_reason:
            break
    pieces.append(request.push(None, tokenizer()))
    assert request.text == "".join(pieces)
    return pieces, request.finish_reason == "stop"


@given(texts, st.lists(st.text(st.sampled_from("abc é€🧀\n"), min_size=1, max_size=3), max_size=3))
def test_pieces_join_to_the_text_up_to_the_first_stop_string(text, stops):
    pieces, stopped = released(tokenizer().encode(text))
    assert "".join(pieces) == text and not stopped and not any("\ufffd" in piece for piece in pieces)
    pieces, stopped = released(tokenizer().encode(text), stops)
    shown, ends = "".join(pieces), [text.index(stop) for stop in stops if stop in text]
    assert stopped == bool(ends)
    # A stop string found early may be overtaken by a longer one that began before it but ended after it.
    assert text.startswith(shown) and (shown == text if not ends else min(ends) <= len(shown))
    assert not ends or any(text[len(shown) :].startswith(stop) for stop in stops)


def test_bytes_that_are_no_text_do_not_block_what_follows():
    tokens = [10 + 0xE2, *tokenizer().encode("abc")]  # ids 10 to 265 are the bytes
    assert "".join(released(tokens)[0]) == "\ufffdabc"


SAMPLED = SamplingParams(25, 0.9, 20, 0.9, 0.01, seed=1)
REQUESTS = [
    ([2, 50, 60, 70], SamplingParams(30)),
    ([2, *range(300, 310)], replace(SAMPLED, stop=("o",))),
    ([2, *range(270, 270 + CONTEXT - 20)], SamplingParams(500)),
    ([2, 270], replace(SAMPLED, max_new_tokens=5, seed=9)),
    ([2, *range(300, 330)], SamplingParams(9)),
    ([2, *range(300, 325), 20], SamplingParams(9)),  # begins as the one before
]


def facts(request):
    return request.tokens, request.text, request.finish_reason


def alone(prompt, params):
    return facts(generate(tiny_llama(), [prompt], params)[0])


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny_llama(), max_num_seqs=2, interactive=True)


def test_answers_do_not_depend_on_who_shares_the_batch_and_when_they_came(engine):
    requests = [EngineRequest(*request) for request in REQUESTS]
    engine.submit(requests[0])
    texts = dict.fromkeys(requests, "")
    for request, text, _ in [*engine.step(), *engine.run(requests[1:])]:
        texts[request] += text
    for request, (prompt, params) in zip(requests, REQUESTS, strict=True):
        assert facts(request) == alone(prompt, params) and texts[request] == request.text


def test_rows_of_one_prompt_are_drawn_apart(engine):
    params = replace(SAMPLED, max_new_tokens=12, temperature=1.5, seed=3)
    requests = [EngineRequest([2, 50], params, index) for index in range(3)]
    assert {request for request, _, ended in engine.run(requests) if ended} == set(requests)
    assert list(map(facts, requests)) == list(map(facts, generate(tiny_llama(), [[2, 50]] * 3, params)))
    assert len({request.text for request in requests}) == 3


def test_who_goes_away_makes_room(engine):
    leaving, coming = [EngineRequest([2, 50 + n], SamplingParams(80)) for n in range(2)], EngineRequest(*REQUESTS[3])
    for request in leaving:
        engine.submit(request)
    engine.step()
    for request in leaving:
        request.cancelled = True
    assert {request for request, _, _ in engine.run([coming])} == {coming} and facts(coming) == alone(*REQUESTS[3])


def test_no_program_is_compiled_after_the_warm_up(caplog):
    model = replace(tiny_llama(), compute_dtype="bfloat16")  # no other test has compiled it
    engine = Engine(model, max_num_seqs=1, max_model_len=100, interactive=True)
    engine.warm_up()
    with jax.log_compiles():
        for prompt in ([2, 50], [2, *range(270, 330)], [2, *range(270, 350)], [2, *range(270, 360)]):
            list(engine.run([EngineRequest(prompt, SamplingParams(4))]))
            token_logprobs(model, prompt, 2)
    assert [record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()] == []


CASES = [
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_k=11),
    SamplingParams(temperature=1.0, top_k=500),
    SamplingParams(temperature=1.0, top_p=0.3),
    SamplingParams(temperature=1.0, min_p=0.02),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.4, top_k=60, top_p=0.99, min_p=0.01),
]


def rows(params, indices=None, steps=None):
    """Rows of these indices that have made so many steps; by default 0."""
    nothing = [0] * len(params)
    standing = zip(params, indices or nothing, steps or nothing, strict=True)
    return rows_of([EngineRequest([2], each, index, tokens=[2] * step) for each, index, step in standing])


def test_filters_leave_what_transformers_leaves_whatever_the_other_rows_have():
    logits = (3 * np.random.default_rng(3).normal(size=(len(CASES), 16, 97))).astype(np.float32)
    each = [sampling for sampling in CASES for _ in range(16)]
    together = np.asarray(filtered(jnp.asarray(logits.reshape(-1, 97)), rows(each))).reshape(logits.shape)
    for sampling, own, ours in zip(CASES, logits, together, strict=True):
        steps = [logits_process.TemperatureLogitsWarper(sampling.temperature)]  # in the order of `generate`
        steps += [logits_process.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        steps += [logits_process.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        steps += [logits_process.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
        wanted = torch.tensor(own)
        for step in steps:
            wanted = step(None, wanted)
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(wanted.numpy()))
        np.testing.assert_allclose(ours, wanted.numpy(), rtol=1e-6)
        np.testing.assert_array_equal(ours, np.asarray(filtered(jnp.asarray(own), rows([sampling] * 16))))


def draw(logits, sampling, indices, steps):
    return np.asarray(choose(jnp.asarray(logits, jnp.float32).T, rows([sampling] * len(logits), indices, steps)))


def test_greedy_takes_the_first_of_the_best_and_filters_never_exclude_every_token():
    assert draw([[0.0, 3.0, 3.0], [1.0, 0.0, -1.0]], SamplingParams(), [0, 1], [0, 0]).tolist() == [1, 0]
    strict = SamplingParams(temperature=0.5, top_k=1, top_p=1e-6, min_p=1.0)
    logits = np.random.default_rng(0).normal(size=(5, 50)).astype(np.float32)
    np.testing.assert_array_equal(draw(logits, strict, range(5), [0] * 5), logits.argmax(-1))


def test_draws_follow_the_tempered_distribution():
    logits, count = np.array([1.0, 0.0, -1.0, 2.0], np.float32), 20_000
    tokens = draw(np.tile(logits, (count, 1)), SamplingParams(temperature=0.7), range(count), [0] * count)
    powers = np.exp(logits / 0.7)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / count, powers / powers.sum(), atol=0.02)


def test_a_draw_depends_on_seed_row_and_step_and_on_nothing_else():
    logits, sampling = np.zeros((1, 1000), np.float32), SamplingParams(temperature=1.0, seed=5)
    alone = draw(logits, sampling, [3], [7])
    assert draw(np.tile(logits, (4, 1)), sampling, [1, 2, 3, 4], [7, 7, 7, 7])[2] == alone[0]
    others = [(SamplingParams(temperature=1.0, seed=6), [3], [7]), (sampling, [4], [7]), (sampling, [3], [8])]
    assert all(draw(logits, *other)[0] != alone[0] for other in others)


def test_values_out_of_range_are_refused():
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 2.0}, {"seed": -1}, {"stop": ("",)}):
        refused(SamplingParams, **wrong)
