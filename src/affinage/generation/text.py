"""Token ids to text as they come, up to a stop string."""

from collections.abc import Iterable, Sequence

from affinage.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes of UTF-8


class TextStream:
    """The text of a growing list of tokens, released as soon as no later token can change it.

    Bytes of an unfinished character are held back, and so is whatever may be the beginning of a stop string. Text from
    a stop string on is never released.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stop_strings if stop]
        self._undecoded: list[int] = []
        self._held = ""
        self.released = ""
        self.stopped = False  # a stop string was met

    def push(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` make certain."""
        self._undecoded += tokens
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

    def _release(self, text: str, last: bool) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            piece, self._held = self._held[: min(found)], ""
        else:
            keep = 0 if last else self._possible_beginning()
            cut = len(self._held) - keep
            piece, self._held = self._held[:cut], self._held[cut:]
        self.released += piece
        return piece

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        return next(
            (
                length
                for length in range(min(longest, len(self._held)), 0, -1)
                if any(stop.startswith(self._held[-length:]) for stop in self._stops)
            ),
            0,
        )
