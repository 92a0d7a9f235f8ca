"""Token ids to text as they come, up to a stop string."""

from collections.abc import Sequence

from affinage.data.tokenizer import REPLACEMENT, Tokenizer

_LONGEST_CHARACTER = 4  # bytes of UTF-8


class Detokenizer:
    """The text of a growing list of tokens, released as soon as no later token can change it.

    Bytes of an unfinished character are held back, and so is text that a stop string may begin with. Text from a stop
    string on is never released.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = [text for text in stop if text]
        self._undecoded: list[int] = []
        self._held = ""
        self.released = ""
        self.stopped = False  # a stop string was met

    def push(self, token: int) -> str:
        """Return the text that one more token makes certain."""
        self._undecoded.append(token)
        text = self._tokenizer.decode(self._undecoded)
        if 0 < len(text) - len(text.rstrip(REPLACEMENT)) < _LONGEST_CHARACTER:
            return ""
        self._undecoded = []
        return self._release(text, longest=max((len(stop) - 1 for stop in self._stops), default=0))

    def finish(self) -> str:
        """Return the text still held back, after the last token."""
        text, self._undecoded = self._tokenizer.decode(self._undecoded), []
        return self._release(text, longest=0)

    def _release(self, text: str, *, longest: int) -> str:
        """Return what is certain of the held text and `text`; at most `longest` characters are held back."""
        if self.stopped:
            return ""
        held = self._held + text
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        self.stopped = bool(places)
        lengths = range(min(longest, len(held)), 0, -1)
        kept = next((n for n in lengths if any(stop.startswith(held[-n:]) for stop in self._stops)), 0)
        end = min(places) if places else len(held) - kept
        self._held = held[end:]
        self.released += held[:end]
        return held[:end]
