"""Token ids to text as they come, up to a stop string."""

from collections.abc import Sequence

from affinage.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes of UTF-8


class Detokenizer:
    """The text of a growing list of tokens, released as soon as no later token can change it.

    Bytes of an unfinished character are held back, and so is whatever may be the beginning of a stop string. Text from
    a stop string on is never released.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = [text for text in stop if text]
        self._undecoded: list[int] = []
        self._held = ""
        self.released = ""
        self.stopped = False  # a stop string was met

    def push(self, token: int) -> str:
        """The text that one more token makes certain."""
        self._undecoded.append(token)
        text = self._tokenizer.decode(self._undecoded)
        unfinished = len(text) - len(text.rstrip(_REPLACEMENT))
        if 0 < unfinished < _LONGEST_CHARACTER:
            return ""
        self._undecoded = []
        return self._release(text, last=False)

    def finish(self) -> str:
        """The text still held back, now that no token follows."""
        text, self._undecoded = self._tokenizer.decode(self._undecoded), []
        return self._release(text, last=True)

    def _release(self, text: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            piece, self._held = self._held[: min(found)], ""
        else:
            # The longest end of the text that a stop string may begin with.
            longest = 0 if last else min(max((len(stop) - 1 for stop in self._stops), default=0), len(self._held))
            keep = next(
                (n for n in range(longest, 0, -1) if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0
            )
            cut = len(self._held) - keep
            piece, self._held = self._held[:cut], self._held[cut:]
        self.released += piece
        return piece
