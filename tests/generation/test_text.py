"""Text released while tokens come in: nothing twice, nothing lost, nothing that a later token would change."""

from hypothesis import given
from hypothesis import strategies as st

from affinage.generation.text import TextStream
from tiny_models import tokenizer

texts = st.text(st.sampled_from("abc é€🧀\n\tü"), max_size=25)


def chunks(tokens, size):
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


@given(texts, st.integers(1, 5))
def test_pieces_join_to_the_text(text, size):
    stream = TextStream(tokenizer())
    pieces = [stream.push(chunk) for chunk in chunks(tokenizer().encode(text), size)]
    assert "".join([*pieces, stream.finish()]) == text == stream.released
    assert not any("\ufffd" in piece for piece in pieces)


@given(texts, st.lists(st.text(st.sampled_from("abc é€🧀\n"), min_size=1, max_size=3), max_size=3), st.integers(1, 4))
def test_text_ends_before_the_first_stop_string(text, stops, size):
    stream = TextStream(tokenizer(), stops)
    pieces = []
    for chunk in chunks(tokenizer().encode(text), size):
        pieces.append(stream.push(chunk))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    released = "".join(pieces)
    ends = [text.index(stop) for stop in stops if stop in text]
    assert stream.stopped == bool(ends)
    # A stop string found early may be overtaken by a longer one that began before it but ended after it.
    assert text.startswith(released) and (released == text if not ends else min(ends) <= len(released))
    assert not ends or any(text[len(released) :].startswith(stop) for stop in stops)


def test_bytes_that_are_no_text_do_not_block_what_follows():
    tokens = [10 + 0xE2, *tokenizer().encode("abc")]  # ids 10 to 265 are the bytes
    stream = TextStream(tokenizer())
    assert "".join([stream.push([token]) for token in tokens] + [stream.finish()]) == "\ufffdabc"
