"""A conversation with a chat model: its history, its commands, its answers as they come."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from affinage.data.atomic import write_json
from affinage.data.chat import encode_prompt
from affinage.errors import UserError
from affinage.generation.decode import Generator, Request

Language = Literal["en", "fr"]

HELP = """\
/reset          forget the conversation
/system TEXT    begin anew with TEXT as the system message (none: the model's own)
/save FILE      write the conversation as JSON
/help           show this
/quit           leave (so does the end of input)"""
AIDE = """\
/reset          oublier la conversation
/system TEXTE   recommencer avec TEXTE comme message système (rien : celui du modèle)
/save FICHIER   écrire la conversation en JSON
/help           afficher ceci
/quit           quitter (comme la fin de l'entrée)"""
_WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "help": HELP,
        "unknown": "There is no {name}.",
        "no_file": "/save needs the name of a file.",
        "reset": "The conversation is forgotten.",
        "system": "A new conversation with this system message.",
        "own_system": "A new conversation with the model's own system message.",
        "saved": "Written to {file}.",
    },
    "fr": {
        "help": AIDE,
        "unknown": "{name} n'existe pas.",
        "no_file": "/save demande le nom d'un fichier.",
        "reset": "La conversation est oubliée.",
        "system": "Une nouvelle conversation avec ce message système.",
        "own_system": "Une nouvelle conversation avec le message système du modèle.",
        "saved": "Écrit dans {file}.",
    },
}


class ChatSession:
    """Messages so far, and the model that answers them."""

    def __init__(self, generator: Generator, request: Request) -> None:
        self._generator = generator
        self._request = request
        self._system_prompt = generator.model.system_prompt
        self.messages: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget all messages."""
        self.messages = []

    def set_system(self, text: str) -> None:
        """Begin anew with this system message; an empty one means the model's own."""
        self._system_prompt = text or self._generator.model.system_prompt
        self.reset()

    def save(self, path: Path) -> None:
        """Write the conversation as {"messages": [...]}, the system message included."""
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        try:
            write_json(path, {"messages": system + self.messages})
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}", where=str(path)) from error

    def reply(self, text: str) -> Iterator[str]:
        """Pieces of the answer to `text`; both are in the history once the answer has ended or is no longer wanted.

        The oldest exchanges are forgotten when the conversation outgrows the context. Raises UserError for a text that
        does not fit even alone; the history is then as before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt, messages = self._fit(messages)
        answer = ""
        try:
            for piece in self._generator.stream(prompt, self._request):
                answer += piece
                yield piece
        finally:
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _fit(self, messages: list[dict[str, str]]) -> tuple[list[int], list[dict[str, str]]]:
        """The prompt of the latest messages that leave room for an answer, and those messages."""
        model = self._generator.model
        room = model.context - min(self._request.max_new_tokens, model.context // 4)
        while True:
            prompt = encode_prompt(messages, model.tokenizer, self._system_prompt)
            if len(prompt) <= room:
                return prompt, messages
            if len(messages) == 1:
                raise UserError(
                    f"the message has {len(prompt)} tokens with its surroundings, and the model reads {room}",
                    fix="write a shorter one, or a shorter /system message",
                )
            messages = messages[2:]


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
        except UserError as error:
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
                session.save(Path(argument).expanduser())
            except UserError as error:
                return str(error)
            return words["saved"].format(file=argument)
        case "/help":
            return words["help"]
    return words["unknown"].format(name=name) + "\n" + words["help"]
