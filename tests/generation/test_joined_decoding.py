"""Rows that join and leave a batch on its way generate what they generate alone."""

from dataclasses import replace

import jax
import pytest

from affinage.generation.engine import Engine, EngineRequest, Generation, generate, token_logprobs
from affinage.generation.sampling import SamplingParams
from tiny_models import CONTEXT, tiny_llama

SAMPLED = SamplingParams(25, 0.9, 20, 0.9, 0.01, seed=1)
REQUESTS = [
    ([2, 50, 60, 70], SamplingParams(30)),
    ([2, *range(300, 310)], replace(SAMPLED, stop=("o",))),
    ([2, *range(270, 270 + CONTEXT - 20)], SamplingParams(500)),
    ([2, 270], replace(SAMPLED, max_new_tokens=5, seed=9)),
    ([2, *range(300, 330)], SamplingParams(9)),
    ([2, *range(300, 325), 20], SamplingParams(9)),  # begins as the one before
]


def alone(prompt: list[int], params: SamplingParams) -> Generation:
    return generate(tiny_llama(), [prompt], params)[0]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_llama(), max_num_seqs=2, steps=4, enable_prefix_caching=True)


def run(engine: Engine) -> dict[EngineRequest, tuple[str, Generation]]:
    texts: dict[EngineRequest, str] = {}
    ends: dict[EngineRequest, tuple[str, Generation]] = {}
    while engine.waiting or engine.active:
        for request, text, end in engine.step():
            texts[request] = texts.get(request, "") + text
            if end is not None:
                ends[request] = texts[request], end
    return ends


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
        whole = alone(prompt, params)
        assert ends[request] == (whole.text.removeprefix(begun if request is requests[0] else ""), whole)


def test_rows_of_one_prompt_are_drawn_apart(engine: Engine):
    params = replace(SAMPLED, max_new_tokens=12, temperature=1.5, seed=3)
    requests = [EngineRequest([2, 50], params, index) for index in range(3)]
    for request in requests:
        engine.submit(request)
    ends = run(engine)
    generations = [ends[request][1] for request in requests]
    assert generations == generate(tiny_llama(), [[2, 50]] * 3, params)
    assert len({generation.text for generation in generations}) == 3


def test_who_goes_away_makes_room(engine: Engine):
    leaving, coming = [EngineRequest([2, 50 + n], SamplingParams(80)) for n in range(2)], EngineRequest(*REQUESTS[3])
    for request in (*leaving, coming):
        engine.submit(request)
    engine.step()
    for request in leaving:
        request.cancelled = True
    assert {request: end for request, (_, end) in run(engine).items()} == {coming: alone(*REQUESTS[3])}


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
