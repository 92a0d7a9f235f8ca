"""Text released while tokens come in: nothing twice, nothing lost, nothing that a later token would change."""

from hypothesis import given
from hypothesis import strategies as st

from affinage.generation.detokenizer import Detokenizer
from tiny_models import tokenizer

texts = st.text(st.sampled_from("abc é€🧀\n\tü"), max_size=25)


@given(texts)
def test_pieces_join_to_the_text(text):
    stream = Detokenizer(tokenizer())
    pieces = [stream.push(token) for token in tokenizer().encode(text)]
    assert "".join([*pieces, stream.finish()]) == text == stream.released
    assert not any("\ufffd" in piece for piece in pieces)
