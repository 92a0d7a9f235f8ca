"""A conversation with a chat model: its history, its commands, its answers as they come."""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
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

HELP = """\
/reset          forget the conversation
/system TEXT    begin again with TEXT as the system message (none: the model's own)
/save FILE      write the conversation as JSON
/help           show this
/quit           leave (so does the end of input)"""
AIDE = """\
/reset          oublier la conversation
/system TEXTE   recommencer avec TEXTE comme message système (rien\u00a0: celui du modèle)
/save FICHIER   écrire la conversation en JSON
/help           afficher ceci
/quit           quitter (comme la fin de l’entrée)"""
_WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "greeting": "This is {model}. /help lists the commands, /quit leaves.",
        "base": 'Warning: {model} was not taught to answer, it continues texts: affinage generate {model} "..."',
        "too_long": "The message has {tokens} tokens with its surroundings, and the model reads {room}. "
        "Write a shorter one, or a shorter /system message.",
        "not_saved": "{file} cannot be written: {why}",
        "help": HELP,
        "unknown": "There is no {name}.",
        "no_file": "/save needs the name of a file.",
        "reset": "The conversation is forgotten.",
        "system": "A new conversation with this system message.",
        "own_system": "A new conversation with the model's own system message.",
        "saved": "Written to {file}.",
    },
    "fr": {
        "greeting": "Voici {model}. /help donne les commandes, /quit quitte.",
        "base": "Attention\u00a0: {model} n’a pas appris à répondre, il continue des textes\u00a0: "
        'affinage generate {model} "..."',
        "too_long": "Le message fait {tokens} tokens avec ce qui l’entoure, et le modèle en lit {room}. "
        "Écrivez-en un plus court, ou un message /system plus court.",
        "not_saved": "{file} ne peut pas être écrit\u00a0: {why}",
        "help": AIDE,
        "unknown": "{name} n’existe pas.",
        "no_file": "/save demande le nom d’un fichier.",
        "reset": "La conversation est oubliée.",
        "system": "Une nouvelle conversation avec ce message système.",
        "own_system": "Une nouvelle conversation avec le message système du modèle.",
        "saved": "Écrit dans {file}.",
    },
}


class TooLong(UserError):
    """A message that does not fit even alone."""

    def __init__(self, tokens: int, room: int) -> None:
        self.tokens, self.room = tokens, room
        what = f"the message has {tokens} tokens with its surroundings, and the model reads {room}"
        super().__init__(what, fix="write a shorter one, or a shorter /system message")


class ChatSession:
    """Messages so far, and the model that answers them."""

    def __init__(self, model: LoadedModel, params: SamplingParams) -> None:
        self._model, self._params = model, params
        self._engine: Engine | None = None
        self._system_prompt = model.system_prompt
        self.messages: list[dict[str, str]] = []
        self._first = 0  # of the messages that the model is still shown

    @property
    def model(self) -> str:
        """What the user called the model."""
        return self._model.name

    def reset(self) -> None:
        """Forget all messages."""
        self.messages, self._first = [], 0

    def set_system(self, text: str) -> None:
        """Begin again with this system message; an empty one means the model's own."""
        self._system_prompt = text or self._model.system_prompt
        self.reset()

    def save(self, path: Path) -> None:
        """Write the conversation as {"messages": [...]}, the system message included; OSError where that fails."""
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        write_json(path, {"messages": system + self.messages})

    def reply(self, text: str) -> Iterator[str]:
        """Pieces of the answer to `text`; both are in the history once the answer has ended or is no longer wanted.

        The model is no longer shown the oldest exchanges when the conversation outgrows the context. Raises UserError
        for a text that does not fit even alone; the history is then as before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt, first = self._fit(messages)
        answer = ""
        try:
            for piece in self._engine_for(prompt).stream(prompt, self._params):
                answer += piece
                yield piece
        finally:
            self.messages, self._first = [*messages, {"role": "assistant", "content": answer}], first

    def _engine_for(self, prompt: list[int]) -> Engine:
        """An engine with room for the answer. It keeps what the model was shown: each turn computes what is new."""
        needed = min(len(prompt) + self._params.max_new_tokens, self._model.context)
        if self._engine is None or self._engine.length < needed:
            length = max(_SHORTEST, 2 * needed)  # not all of a context that may be far longer than any conversation
            settings = {"max_num_seqs": 1, "max_model_len": length, "steps": _STREAMED_STEPS}
            self._engine = Engine(self._model, **settings, enable_prefix_caching=True)
        return self._engine

    def _fit(self, messages: list[dict[str, str]]) -> tuple[list[int], int]:
        """The prompt of the latest messages that leave room for an answer, and the first of those messages."""
        model = self._model
        room = model.context - min(self._params.max_new_tokens, model.context // 4)
        for first in range(self._first, len(messages), 2):
            prompt = encode_prompt(messages[first:], model.tokenizer, self._system_prompt)
            if len(prompt) <= room:
                return prompt, first
        raise TooLong(len(prompt), room)


def greeting(session: ChatSession, language: Language = "en") -> str:
    """What a person is told before the first question."""
    return _WORDS[language]["greeting"].format(model=session.model)


def base_model_warning(model: str, language: Language = "en") -> str:
    """What a person is told who talks with a model that was never fine-tuned."""
    return _WORDS[language]["base"].format(model=shlex.quote(model))


def converse(
    session: ChatSession, read: Callable[[], str | None], write: Callable[[str], None], language: Language = "en"
) -> None:
    """Talk until `read` returns None or /quit. `write` is given text as it is to appear, line ends included.

    `language` is the one that commands are answered in.

    An interrupt (Ctrl-C) during an answer ends the answer, not the conversation.
    """
    while (line := read()) is not None:
        text = line.strip()
        if not text:
            continue
        if text.startswith("/"):
            if text == "/quit":
                return
            write(_command(session, text, _WORDS[language]) + "\n")
            continue
        try:
            for piece in session.reply(text):
                write(piece)
        except KeyboardInterrupt:
            pass
        except TooLong as error:
            write(_WORDS[language]["too_long"].format(tokens=error.tokens, room=error.room))
        except UserError as error:  # of the model's own chat template
            write(str(error))
        write("\n")


def _command(session: ChatSession, text: str, words: dict[str, str]) -> str:
    """Carry out a command and say what was done."""
    name, _, argument = text.partition(" ")
    argument = argument.strip()
    match name:
        case "/reset":
            session.reset()
            return words["reset"]
        case "/system":
            session.set_system(argument)
            return words["system" if argument else "own_system"]
        case "/save" if not argument:
            return words["no_file"]
        case "/save":
            try:
                session.save(from_home(argument))
            except OSError as error:
                return words["not_saved"].format(file=argument, why=error.strerror)
            return words["saved"].format(file=argument)
        case "/help":
            return words["help"]
    return words["unknown"].format(name=name) + "\n" + words["help"]
