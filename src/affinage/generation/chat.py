"""A conversation with a chat model in a terminal: its history, its commands, its answers as they come."""

import warnings
from collections.abc import Callable, Iterator

from affinage.data.chat import encode_prompt
from affinage.errors import UserError, UserWarned
from affinage.generation.engine import Engine, LoadedModel
from affinage.generation.sampling import EngineRequest, SamplingParams

HELP = "/reset forgets the conversation; /system TEXT begins one with that system message; /quit leaves."


class ChatSession:
    """Messages so far, and the model that answers them."""

    def __init__(self, model: LoadedModel, params: SamplingParams) -> None:
        self._model, self._params = model, params
        self._engine: Engine | None = None
        self.reset("")

    def reset(self, system: str | None = None) -> None:
        """Forget all messages; `system` is the system message from now on, where "" stands for the model's own."""
        if system is not None:
            self._system_prompt = system or self._model.system_prompt
        self.messages: list[dict[str, str]] = []
        self._first = 0  # of the messages that the model still sees

    def reply(self, text: str) -> Iterator[str]:
        """Yield pieces of the answer to `text`; both enter the history when the answer ends or is abandoned.

        The oldest exchanges leave the prompt when the conversation outgrows the context. Raises UserError for a text
        that does not fit even alone; the history is then as before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        model, new = self._model, self._params.max_new_tokens
        room = model.context - min(new, model.context // 4)
        for first in range(self._first, len(messages), 2):
            prompt = encode_prompt(messages[first:], model.tokenizer, self._system_prompt)
            if len(prompt) <= room:
                break
        else:
            what = f"the message needs {len(prompt):,} tokens, and the model reads {room:,}"
            raise UserError(what, fix="Write a shorter one, or a shorter system message.")
        needed = min(len(prompt) + new, model.context)
        if self._engine is None or self._engine.length < needed:
            length = max(1024, 2 * needed)  # not all of the context, which may be far longer than conversations
            self._engine = Engine(model, max_num_seqs=1, max_model_len=length, interactive=True)
        answer = ""
        try:
            for request, piece, ended in self._engine.run([EngineRequest(prompt, self._params)]):
                answer += piece
                yield piece
                if ended and request.finish_reason == "length" and request.limit < new:
                    warnings.warn(f"the answer fills the context of {model.context:,} tokens", UserWarned, stacklevel=2)
        finally:
            self.messages, self._first = [*messages, {"role": "assistant", "content": answer}], first


def converse(session: ChatSession, read: Callable[[], str | None], write: Callable[[str], None]) -> None:
    """Talk until `read` returns None or /quit; an interrupt (Ctrl-C) ends an answer alone."""
    while (line := read()) is not None and (text := line.strip()) != "/quit":
        name, _, argument = text.partition(" ")
        try:
            if name in ("/reset", "/system"):
                session.reset(argument.strip() if name == "/system" else None)
                write("A new conversation begins.")
            elif text.startswith("/"):
                write(HELP)
            elif text:
                for piece in session.reply(text):
                    write(piece)
        except KeyboardInterrupt:
            pass
        except UserError as error:  # a message that is too long, or one that the model's chat template refuses
            write(str(error))
        write("\n")
