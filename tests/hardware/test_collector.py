"""Collections leave alone what was there before, come seldom, and free garbage all the same."""

import gc
import weakref

import pytest

from affinage.hardware.collector import collected_seldom, what_lives_is_left_alone


class Knot:
    """Holds itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_made_inside_is_freed_and_what_was_there_before_after_it_though_an_error_ends_it():
    before, seldom = Knot(), gc.get_threshold()
    with pytest.raises(ValueError), what_lives_is_left_alone(), collected_seldom():
        seen, made = weakref.ref(before), weakref.ref(Knot())
        del before
        gc.collect()
        assert made() is None, "what is made inside is collected"
        assert seen() is not None, "what was there before is not even looked at"
        assert gc.get_threshold() > seldom
        raise ValueError
    gc.collect()
    assert seen() is None and gc.get_threshold() == seldom, "afterwards everything is as before"
