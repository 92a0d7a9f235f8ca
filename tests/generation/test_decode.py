"""Decoding with a cache against transformers and the full forward pass, and the promises about when it ends."""

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
from affinage.generation.engine import Engine, EngineRequest, generate, token_logprobs
from affinage.generation.sampling import Detokenizer, SamplingParams, SamplingTensors, choose, filtered
from affinage.hub.folder import CardFacts, export
from run_affinage import refused
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
    for place, ((token, logprob), *likeliest) in enumerate(token_logprobs(model, tokens, 3)):
        assert token == tokens[place + 1]
        assert logprob == pytest.approx(expected[place, token], abs=1e-4)
        best = np.sort(expected[place])[::-1][:3]
        assert [value for _, value in likeliest] == pytest.approx(best.tolist(), abs=1e-4)


# ---- text is released once, and as soon as no later token changes it


texts = st.text(st.sampled_from("abc é€🧀\n\tü"), max_size=25)


@given(texts)
def test_pieces_join_to_the_text(text):
    stream = Detokenizer(tokenizer())
    pieces = [stream.push(token) for token in tokenizer().encode(text)]
    assert "".join([*pieces, stream.push(None)]) == text
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


# ---- rows that join and leave a batch on its way


SAMPLED = SamplingParams(25, 0.9, 20, 0.9, 0.01, seed=1)
REQUESTS = [
    ([2, 50, 60, 70], SamplingParams(30)),
    ([2, *range(300, 310)], replace(SAMPLED, stop=("o",))),
    ([2, *range(270, 270 + CONTEXT - 20)], SamplingParams(500)),
    ([2, 270], replace(SAMPLED, max_new_tokens=5, seed=9)),
    ([2, *range(300, 330)], SamplingParams(9)),
    ([2, *range(300, 325), 20], SamplingParams(9)),  # begins as the one before
]


def facts(request: EngineRequest) -> tuple[list[int], str, str]:
    return request.tokens, request.text, request.finish_reason


def alone(prompt: list[int], params: SamplingParams) -> tuple[list[int], str, str]:
    return facts(generate(tiny_llama(), [prompt], params)[0])


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_llama(), max_num_seqs=2, steps=4, enable_prefix_caching=True)


def run(engine: Engine) -> dict[EngineRequest, str]:
    """The new texts of the requests that end."""
    texts: dict[EngineRequest, str] = {}
    while engine.waiting or engine.active:
        for request, text, _ in engine.step():
            texts[request] = texts.get(request, "") + text
    return {request: text for request, text in texts.items() if request.finish_reason}


def test_answers_do_not_depend_on_who_shares_the_batch_and_when_they_came(engine: Engine):
    requests = [EngineRequest(*request) for request in REQUESTS]
    engine.submit(requests[0])
    begun = "".join(text for _, text, _ in engine.step())
    for request in requests[1:]:
        engine.submit(request)
    with pytest.raises(ValueError, match="tokens"):
        engine.submit(EngineRequest([], SamplingParams(5)))
    ends = run(engine)
    for request, (prompt, params) in zip(requests, REQUESTS, strict=True):
        assert facts(request) == alone(prompt, params)
        assert ends[request] == request.text.removeprefix(begun if request is requests[0] else "")


def test_rows_of_one_prompt_are_drawn_apart(engine: Engine):
    params = replace(SAMPLED, max_new_tokens=12, temperature=1.5, seed=3)
    requests = [EngineRequest([2, 50], params, index) for index in range(3)]
    for request in requests:
        engine.submit(request)
    run(engine)
    assert list(map(facts, requests)) == list(map(facts, generate(tiny_llama(), [[2, 50]] * 3, params)))
    assert len({request.text for request in requests}) == 3


def test_who_goes_away_makes_room(engine: Engine):
    leaving, coming = [EngineRequest([2, 50 + n], SamplingParams(80)) for n in range(2)], EngineRequest(*REQUESTS[3])
    for request in (*leaving, coming):
        engine.submit(request)
    engine.step()
    for request in leaving:
        request.cancelled = True
    assert list(run(engine)) == [coming] and facts(coming) == alone(*REQUESTS[3])


def test_no_program_is_compiled_after_the_warm_up(caplog):
    model = replace(tiny_llama(), compute_dtype="bfloat16")  # no other test has compiled it
    engine = Engine(model, max_num_seqs=1, max_model_len=100, enable_prefix_caching=True)
    engine.warm_up()
    with jax.log_compiles():
        for prompt in ([2, 50], [2, *range(270, 330)], [2, *range(270, 350)], [2, *range(270, 360)]):
            engine.submit(EngineRequest(prompt, SamplingParams(4)))
            run(engine)
            token_logprobs(model, prompt, 2)
    assert [record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()] == []


# ---- sampling


VOCABULARY = 97
CASES = [
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_k=11),
    SamplingParams(temperature=1.0, top_k=500),
    SamplingParams(temperature=1.0, top_p=0.3),
    SamplingParams(temperature=1.0, min_p=0.02),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.4, top_k=60, top_p=0.99, min_p=0.01),
]


def drawn(rows: int) -> np.ndarray:
    return (3 * np.random.default_rng(3).normal(size=(rows, VOCABULARY))).astype(np.float32)


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_filters_leave_what_transformers_leaves(sampling: SamplingParams):
    logits = drawn(16)
    steps = [logits_process.TemperatureLogitsWarper(sampling.temperature)]  # in the order of `generate`
    steps += [logits_process.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [logits_process.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    steps += [logits_process.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    wanted = torch.tensor(logits)
    for step in steps:
        wanted = step(None, wanted)
    ours = np.asarray(filtered(jnp.asarray(logits), SamplingTensors.of([sampling] * 16)))
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(wanted.numpy()))
    np.testing.assert_allclose(ours, wanted.numpy(), rtol=1e-6)


def test_a_row_with_filters_of_its_own_is_as_if_all_had_them():
    logits = drawn(len(CASES))
    together = np.asarray(filtered(jnp.asarray(logits), SamplingTensors.of(CASES)))
    for row, sampling in enumerate(CASES):
        one = slice(row, row + 1)
        alone = filtered(jnp.asarray(logits[one]), SamplingTensors.of([sampling]))
        np.testing.assert_array_equal(together[one], np.asarray(alone))


def draw(logits, sampling, rows, steps):
    logits = jnp.asarray(logits, jnp.float32)
    rows, steps = jnp.asarray(rows, jnp.int32), jnp.asarray(steps, jnp.int32)
    return np.asarray(choose(logits, SamplingTensors.of([sampling] * len(logits)), rows, steps))


def test_greedy_takes_the_first_of_the_best_and_filters_never_exclude_every_token():
    assert draw([[0.0, 3.0, 3.0], [1.0, 0.0, -1.0]], SamplingParams(), [0, 1], [0, 0]).tolist() == [1, 0]
    strict = SamplingParams(temperature=0.5, top_k=1, top_p=1e-6, min_p=1.0)
    logits = np.random.default_rng(0).normal(size=(5, 50)).astype(np.float32)
    np.testing.assert_array_equal(draw(logits, strict, np.arange(5), np.zeros(5)), logits.argmax(-1))


def test_draws_follow_the_tempered_distribution():
    logits, count = np.array([1.0, 0.0, -1.0, 2.0], np.float32), 20_000
    tokens = draw(np.tile(logits, (count, 1)), SamplingParams(temperature=0.7), np.arange(count), np.zeros(count))
    powers = np.exp(logits / 0.7)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / count, powers / powers.sum(), atol=0.02)


def test_a_draw_depends_on_seed_row_and_step_and_on_nothing_else():
    logits, sampling = np.zeros((1, 1000), np.float32), SamplingParams(temperature=1.0, seed=5)
    alone = draw(logits, sampling, [3], [7])
    assert draw(np.tile(logits, (4, 1)), sampling, [1, 2, 3, 4], [7, 7, 7, 7])[2] == alone[0]
    others = [(SamplingParams(temperature=1.0, seed=6), [3], [7]), (sampling, [4], [7]), (sampling, [3], [8])]
    assert all(draw(logits, *other)[0] != alone[0] for other in others)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 2.0}, {"seed": -1}, {"stop": ("",)}]
)
def test_values_out_of_range_are_refused(wrong):
    refused(lambda: SamplingParams(**wrong))
