"""The conversation in the terminal, without a terminal."""

from affinage.data.chat import encode_prompt
from affinage.generation import chat
from affinage.generation.chat import HELP, ChatSession, converse
from affinage.generation.engine import generate
from affinage.generation.sampling import SamplingParams
from run_affinage import refused
from tiny_models import tiny_llama


def new_session(tokens=6):
    return ChatSession(tiny_llama(), SamplingParams(max_new_tokens=tokens))


def talk(session, *lines):
    waiting, written = list(lines), []
    converse(session, lambda: waiting.pop(0) if waiting else None, written.append)
    return "".join(written)


def test_an_answer_is_what_the_model_says_after_the_chat_prompt_and_commands_reset_it():
    session, system = new_session(), {"role": "system", "content": "be brief"}
    asked = {"role": "user", "content": "one"}
    for prompt, lines in (([asked], ["one", "/quit", "never read"]), ([system, asked], ["/system be brief", "one"])):
        said, ids = talk(session, *lines), encode_prompt(prompt, tiny_llama().tokenizer, "")
        expected = generate(tiny_llama(), [ids], SamplingParams(6))[0].text
        assert said.endswith(expected + "\n") and (said == expected + "\n" or lines[0] != "one")
        assert session.messages == [asked, {"role": "assistant", "content": expected}]
    talk(session, "/reset")
    assert session.messages == [] and HELP in talk(session, "/unknown")
    assert "tokens" in talk(session, "word " * 500) and session.messages == []  # too long


def test_the_oldest_exchanges_give_way_and_what_never_fits_is_refused(monkeypatch):
    shown = []

    def encode(messages, *rest):
        shown[:] = [message["content"] for message in messages]
        return encode_prompt(messages, *rest)

    monkeypatch.setattr(chat, "encode_prompt", encode)
    session = new_session()
    for number in range(8):
        talk(session, f"number {number}")
    assert "number 0" not in shown and "number 1" not in shown and shown[-1] == "number 7"
    said = [one["content"] for one in session.messages if one["role"] == "user"]
    assert said == [f"number {number}" for number in range(8)]
    before = list(session.messages)
    refused(lambda: list(session.reply("long " * 200)), match="tokens")
    assert session.messages == before


def test_an_interrupt_ends_the_answer_and_keeps_what_was_said():
    session = new_session(tokens=20)
    waiting, written = ["hello", None], []

    def write(text):
        written.append(text)
        if len(written) == 1:
            raise KeyboardInterrupt

    converse(session, lambda: waiting.pop(0), write)
    assert session.messages[-1] == {"role": "assistant", "content": written[0]}
