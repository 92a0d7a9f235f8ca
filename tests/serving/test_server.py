"""OpenAI's own client against a server of a tiny model."""

import asyncio
import gc
import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import openai
import pytest
from running_server import TOKEN, Running, running
from starlette.requests import Request
from starlette.responses import Response

from affinage.data.chat import encode_prompt
from affinage.generation.engine import Engine, EngineRequest, generate, token_logprobs
from affinage.generation.sampling import SamplingParams
from affinage.serving.server import CompletionRequest, Refused, Server
from tiny_models import CONTEXT, tiny_llama
from waiting import until

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Where is Paris?"}]
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(TOKEN) as one:
        yield one


@pytest.fixture(scope="module")
def client(served: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=TOKEN, max_retries=0, timeout=100)


def expected(prompt: list[int], tokens: int, rows: int = 1, **settings: object) -> list[EngineRequest]:
    return generate(tiny_llama(), [prompt] * rows, SamplingParams(tokens, **settings))  # type: ignore[arg-type]


PROMPT = [tiny_llama().tokenizer.bos, *tiny_llama().tokenizer.encode("The capital")]
CHAT_PROMPT = encode_prompt(MESSAGES, tiny_llama().tokenizer, "")


def test_a_chat_is_answered_as_the_generator_answers_it_whole_and_in_pieces(client: openai.OpenAI):
    said = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9, n=2, **SAMPLED)
    wanted = expected(CHAT_PROMPT, 9, rows=2, **SAMPLED)
    assert [choice.message.content for choice in said.choices] == [one.text for one in wanted]
    assert wanted[0].text != wanted[1].text and [model.id for model in client.models.list()] == ["tiny"] == [said.model]
    assert said.choices[0].message.role == "assistant" and said.choices[0].finish_reason == "length"
    written = sum(len(one.tokens) for one in wanted)
    usage, read = said.usage, len(CHAT_PROMPT)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (read, written, read + written)
    unseeded = [client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9) for _ in range(3)]
    assert len({one.choices[0].message.content for one in unseeded}) > 1, "temperature 1 unless a client says otherwise"
    settings = {"max_tokens": 40, "temperature": 0, "stream_options": {"include_usage": True}}
    whole = expected(CHAT_PROMPT, 40)[0]
    events = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **settings))
    assert events[0].choices[0].delta.role == "assistant" and len({event.id for event in events}) == 1
    pieces = [event.choices[0].delta.content for event in events if event.choices and event.choices[0].delta.content]
    assert "".join(pieces) == whole.text and len(pieces) > 3
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "length"
    assert events[-1].usage is not None and events[-1].usage.completion_tokens == len(whole.tokens)


def test_texts_are_continued_from_strings_and_from_tokens_up_to_stop_strings(client: openai.OpenAI):
    free = expected(PROMPT, 30)[0].text
    stop = free[10:13]
    for asked in ("The capital", PROMPT):
        said = client.completions.create(model="tiny", prompt=asked, max_tokens=30, temperature=0, stop=stop)
        assert said.choices[0].text == free[: free.index(stop)] and said.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="999999"):
        client.completions.create(model="tiny", prompt=[2, 999999])
    several = client.completions.create(model="tiny", prompt=["The capital", "La"], max_tokens=5, temperature=0)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == expected(PROMPT, 5)[0].text != several.choices[1].text
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stop": [stop]}
    stream = client.completions.create(**asked, stream=True)
    assert "".join(event.choices[0].text for event in stream) == free[: free.index(stop)]


def test_log_probabilities_of_answers_and_of_prompts(client: openai.OpenAI):
    wanted = token_logprobs(tiny_llama(), [*PROMPT, *expected(PROMPT, 5)[0].tokens], 2)
    settings = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 2}
    found = client.completions.create(**settings, echo=True).choices[0].logprobs
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx([own[1] for own, *_ in wanted[1:]], abs=1e-4)
    assert len(found.tokens) == len(found.top_logprobs) == len(found.text_offset) == len(PROMPT) + 5
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "temperature": 0, "top_logprobs": 2}
    entries = client.chat.completions.create(**asked, logprobs=True).choices[0].logprobs.content
    wanted = token_logprobs(tiny_llama(), [*CHAT_PROMPT, *expected(CHAT_PROMPT, 3)[0].tokens], 2)[-3:]
    assert [one.logprob for one in entries] == pytest.approx([own[1] for own, *_ in wanted], abs=1e-4)
    assert [len(one.top_logprobs) for one in entries] == [2, 2, 2]
    stream = client.completions.create(**settings | {"max_tokens": 3, "logprobs": 1}, stream=True)
    assert [len(e.choices[0].logprobs.tokens) for e in stream if e.choices[0].finish_reason] == [3]
    assert client.completions.create(**settings | {"max_tokens": 0}).choices[0].logprobs.tokens == []


def test_lm_evals_own_client_gives_the_scores_of_our_backend(served: Running, tmp_path, monkeypatch):
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from affinage.evaluation.run import JaxLM
    from affinage.hub.folder import CardFacts, export

    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)
    export(tiny_llama(), tmp_path / "m", facts=CardFacts("mit"))
    asked = {"model": "tiny", "tokenizer": str(tmp_path / "m"), "tokenized_requests": False}
    lm = LocalCompletionsAPI(f"{served.url}/v1/completions", **asked, batch_size=1, max_length=CONTEXT)
    pairs = [("The capital of France is", " Paris"), ("La monnaie du Japon", " est le yen"), ("twelve", " plus seven")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    found, wanted = lm.loglikelihood(requests), JaxLM(tiny_llama()).loglikelihood(requests)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], abs=2e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]


LONG = [{"role": "user", "content": "long " * CONTEXT}]


@pytest.mark.parametrize(("wrong", "status", "named"), [
    ({"model": "gpt"}, 404, "gpt"),
    ({"messages": LONG}, 400, "95"),
    ({"temperature": -1}, 400, "temperature"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"n": 5}, 400, "4 choices"),  # two at once, and two that wait
    ({"n": 10**15}, 400, "4 choices"),
    ({"extra_body": {"response_format": {"type": "json_object"}}}, 400, "response_format"),
    ({"stop": ["x"] * 17}, 400, "stop"),
    ({"top_logprobs": 21}, 400, "top_logprobs"),
    ({"extra_body": {"guided_json": {"type": "object"}}}, 400, "guided_json"),
    ({"extra_body": {"min_tokens": 3}}, 400, "min_tokens"),
    ({"extra_body": {"repetition_penalty": 1.0, "skip_special_tokens": False}}, 400, "skip_special_tokens"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
    ({"messages": MESSAGES[::-1]}, 400, "message 2"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 2**20}]}, 413, "1,048,576 bytes"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")  # fmt: skip
def test_what_cannot_be_done_is_refused_in_openais_form(client: openai.OpenAI, wrong: dict, status: int, named: str):
    with pytest.raises(openai.APIStatusError, match=named) as told:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES} | wrong)
    assert told.value.status_code == status
    assert (told.value.code == "context_length_exceeded") == (wrong.get("messages") is LONG)


def ask(url: str, body: bytes | list[bytes] | None = None, **headers: str) -> tuple[int, dict]:
    asked = urllib.request.Request(url, body, {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


ALLOWED = {"Authorization": f"Bearer {TOKEN}"}


def test_only_those_who_know_the_token_may_ask(served: Running):
    for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": TOKEN}, {"Authorization": "Bearer é"}):
        status, told = ask(f"{served.url}/v1/models", **wrong)
        assert status == 401 and told["error"]["code"] == "invalid_api_key"
    assert ask(f"{served.url}/health") == (200, {"status": "ok"})
    assert ask(f"{served.url}/v1/nothing", **ALLOWED)[0] == 404
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{served.url}/v1/completions", timeout=300)
    assert refused.value.code == 405 and refused.value.headers["Allow"] == "POST"


def test_bodies_that_are_no_requests_are_refused(served: Running):
    surrogate = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
    nan = b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}'
    for body in (b"{", b"[" * 5000, b"[]", b'{"messages": []}', surrogate, nan):
        assert ask(f"{served.url}/v1/chat/completions", body, Content_Type="application/json", **ALLOWED)[0] == 400
    in_parts = {"Content_Type": "application/json", "Authorization": f"bearer {TOKEN}", "Transfer_Encoding": "chunked"}
    for parts, status in (
        ([b'{"max_', b'tokens": 1, "response_format": {"type": "text"}}'], 200),
        ([b" " * 2**19] * 3, 413),
    ):
        assert ask(f"{served.url}/v1/completions", parts, **in_parts)[0] == status
    assert ask(f"{served.url}/v1/chat/completions", b"{}", Content_Type="text/plain", **ALLOWED)[0] == 415


def test_without_a_token_no_other_name_of_this_machine_is_answered():
    with running() as served:
        assert ask(f"{served.url}/v1/models")[0] == 200
        assert ask(f"{served.url}/v1/models", Host="localhost:1")[0] == 200
        with pytest.raises(ValueError, match="Expecting value"):  # the refusal is plain text
            ask(f"{served.url}/v1/models", Host="rebound.example:80")


def test_an_error_of_the_device_is_not_shown_and_the_next_request_is_answered(client: openai.OpenAI, monkeypatch):
    def fail(*_args: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Engine, "step", fail)
    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "temperature": 0}
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(**settings)
    assert "memory" not in str(failed.value)
    monkeypatch.setattr(Engine, "step", fail)
    with pytest.raises(openai.APIError, match="its log has the reason"):
        list(client.chat.completions.create(**settings, stream=True))
    again = client.chat.completions.create(**settings)
    assert again.choices[0].message.content == expected(CHAT_PROMPT, 2)[0].text


def test_a_full_queue_says_when_to_come_again_and_a_client_that_leaves_frees_its_place(served: Running, client):
    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
    with served.held_up():
        waiting = client.chat.completions.create(**settings, stream=True)
        until(lambda: len(served.server.news) == 1)
        with pytest.raises(openai.RateLimitError) as full:
            client.chat.completions.create(**settings, n=4)
        assert int(full.value.response.headers["Retry-After"]) >= 1
        waiting.close()
        until(lambda: not served.server.news)
    assert len(client.chat.completions.create(**settings, n=4).choices) == 4


def test_no_more_streams_wait_than_may_and_one_that_never_begins_gives_its_place_back():
    server, body = Server(tiny_llama(), None, max_num_seqs=1, max_queue=1, max_tokens=9), b'{"stream": true}'

    async def receive() -> dict:
        return {"type": "http.request", "body": body}

    async def come() -> Response:
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        return await server._answer(CompletionRequest, Request(scope, receive))

    async def crowd() -> None:
        came = await asyncio.gather(*[come() for _ in range(5)], return_exceptions=True)
        assert sum(isinstance(each, Refused) and each.status_code == 429 for each in came) == 3
        del came
        gc.collect()
        await asyncio.sleep(0.1)
        assert not server.news

    asyncio.run(crowd())
