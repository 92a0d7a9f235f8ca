"""Text released while tokens come in: nothing twice, nothing lost, nothing that a later token would change."""

from hypothesis import given
from hypothesis import strategies as st

from affinage.generation.engine import Detokenizer
from tiny_models import tokenizer

texts = st.text(st.sampled_from("abc é€🧀\n\tü"), max_size=25)


@given(texts)
def test_pieces_join_to_the_text(text):
    stream = Detokenizer(tokenizer())
    pieces = [stream.push(token) for token in tokenizer().encode(text)]
    assert "".join([*pieces, stream.push(None)]) == text == stream.released
    assert not any("\ufffd" in piece for piece in pieces)


@given(texts, st.lists(st.text(st.sampled_from("abc é€🧀\n"), min_size=1, max_size=3), max_size=3))
def test_text_ends_before_the_first_stop_string(text, stops):
    stream = Detokenizer(tokenizer(), stops)
    pieces = []
    for token in tokenizer().encode(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.push(None))
    released = "".join(pieces)
    ends = [text.index(stop) for stop in stops if stop in text]
    assert stream.stopped == bool(ends)
    # A stop string found early may be overtaken by a longer one that began before it but ended after it.
    assert text.startswith(released) and (released == text if not ends else min(ends) <= len(released))
    assert not ends or any(text[len(released) :].startswith(stop) for stop in stops)


def test_bytes_that_are_no_text_do_not_block_what_follows():
    tokens = [10 + 0xE2, *tokenizer().encode("abc")]  # ids 10 to 265 are the bytes
    stream = Detokenizer(tokenizer())
    assert "".join([stream.push(token) for token in tokens] + [stream.push(None)]) == "\ufffdabc"
