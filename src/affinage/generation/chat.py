"""A conversation with a chat model in a terminal: its history, its commands, its answers as they come."""

import shlex
from collections.abc import Callable, Iterator
from typing import Literal

from affinage.data.atomic import write_json
from affinage.data.chat import encode_prompt
from affinage.errors import UserError
from affinage.generation.engine import Engine
from affinage.generation.model import LoadedModel
from affinage.generation.sampling import SamplingParams
from affinage.paths import from_home

Language = Literal["en", "fr"]
_SHORTEST = 1024  # tokens of the first cache
_STREAMED_STEPS = 4  # tokens per dispatch when someone reads along

WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "greeting": "This is {model}. /help lists the commands, /quit leaves.",
        "base": "Warning: {model} is not a chat model. It continues texts: affinage generate {model} ...",
        "too_long": "The message needs {tokens} tokens, and the model reads {room}. Write a shorter one.",
        "help": """\
/reset          forget the conversation
/system TEXT    begin again with TEXT as the system message (empty: the model's own)
/save FILE      write the conversation as JSON
/help           show this
/quit           leave (as the end of input does)""",
        "reset": "The conversation is forgotten.",
        "system": "A new conversation with this system message.",
        "own_system": "A new conversation with the model's own system message.",
        "saved": "Written to {file}.",
    },
    "fr": {
        "greeting": "Voici {model}. /help donne les commandes, /quit quitte.",
        "base": "Attention\u00a0: {model} n’est pas un modèle de dialogue. Il continue des textes\u00a0: "
        "affinage generate {model} ...",
        "too_long": "Le message demande {tokens} tokens, et le modèle en lit {room}. Écrivez-en un plus court.",
        "help": """\
/reset          oublier la conversation
/system TEXTE   recommencer avec TEXTE comme message système (vide\u00a0: celui du modèle)
/save FICHIER   écrire la conversation en JSON
/help           afficher ceci
/quit           quitter (comme la fin de l’entrée)""",
        "reset": "La conversation est oubliée.",
        "system": "Une nouvelle conversation avec ce message système.",
        "own_system": "Une nouvelle conversation avec le message système du modèle.",
        "saved": "Écrit dans {file}.",
    },
}


class TooLong(UserError):
    """A message that does not fit the model's context even alone."""

    def __init__(self, tokens: int, room: int) -> None:
        self.facts = {"tokens": tokens, "room": room}
        super().__init__(WORDS["en"]["too_long"].format(**self.facts), fix="A shorter system message helps, too.")


class ChatSession:
    """Messages so far, and the model that answers them in `language`."""

    def __init__(self, model: LoadedModel, params: SamplingParams, language: Language = "en") -> None:
        self.words, self._model, self._params = WORDS[language], model, params
        self._engine: Engine | None = None
        self._system_prompt = model.system_prompt
        self.messages: list[dict[str, str]] = []
        self._first = 0  # of the messages that the model still sees

    def greeting(self) -> str:
        """Return what a person reads before the first question."""
        return self.words["greeting"].format(model=self._model.name)

    def set_system(self, text: str) -> None:
        """Begin again with this system message; an empty one stands for the model's own."""
        self._system_prompt = text or self._model.system_prompt
        self.reset()

    def reset(self) -> None:
        """Forget all messages."""
        self.messages, self._first = [], 0

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
            raise TooLong(len(prompt), room)
        needed = min(len(prompt) + new, model.context)
        if self._engine is None or self._engine.length < needed:
            # Not all of the context, which may be far longer than any conversation. Each turn computes what is new.
            length = max(_SHORTEST, 2 * needed)
            self._engine = Engine(
                model, max_num_seqs=1, max_model_len=length, steps=_STREAMED_STEPS, enable_prefix_caching=True
            )
        answer = ""
        try:
            for piece in self._engine.stream(prompt, self._params):
                answer += piece
                yield piece
        finally:
            self.messages, self._first = [*messages, {"role": "assistant", "content": answer}], first

    def command(self, text: str) -> str:
        """Carry out a line that begins with a slash and return the message about it."""
        name, _, argument = text.partition(" ")
        argument, words = argument.strip(), self.words
        match name:
            case "/reset":
                self.reset()
            case "/system":
                self.set_system(argument)
                return words["system" if argument else "own_system"]
            case "/save" if argument:
                system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
                try:
                    write_json(from_home(argument), {"messages": system + self.messages})
                except OSError as error:
                    return f"{argument}: {error.strerror}"
                return words["saved"].format(file=argument)
            case _:  # /help, and what is no command
                return words["help"]
        return words["reset"]


def base_model_warning(model: str, language: Language = "en") -> str:
    """Return what a person reads who talks with a model that was never fine-tuned."""
    return WORDS[language]["base"].format(model=shlex.quote(model))


def converse(session: ChatSession, read: Callable[[], str | None], write: Callable[[str], None]) -> None:
    """Talk until `read` returns None or /quit. `write` gets text as it is to appear, line ends included.

    An interrupt (Ctrl-C) during an answer ends the answer, not the conversation.
    """
    while (line := read()) is not None and (text := line.strip()) != "/quit":
        if not text:
            continue
        try:
            for piece in [session.command(text)] if text.startswith("/") else session.reply(text):
                write(piece)
        except KeyboardInterrupt:
            pass
        except TooLong as error:
            write(session.words["too_long"].format(**error.facts))
        except UserError as error:  # of the model's own chat template
            write(str(error))
        write("\n")
