"""Full collections leave alone what was there before, and only as long as they are told to."""

import gc
import weakref

import pytest

from affinage.hardware.collector import collected_seldom, what_lives_is_left_alone


class Knot:
    """Holds itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_made_inside_is_freed_and_what_was_there_before_after_it():
    before = Knot()
    with what_lives_is_left_alone():
        seen, made = weakref.ref(before), weakref.ref(Knot())
        del before
        gc.collect()
        assert made() is None, "what is made inside is collected"
        assert seen() is not None, "what was there before is not even looked at"
    gc.collect()
    assert seen() is None, "afterwards everything is collected again"


def test_an_error_inside_ends_it_too():
    with pytest.raises(ValueError), what_lives_is_left_alone():
        raise ValueError
    assert gc.get_freeze_count() == 0


def test_few_collections_come_of_many_objects_and_garbage_is_freed_all_the_same():
    came: list[str] = []
    gc.callbacks.append(lambda phase, _: came.append(phase) if phase == "start" else None)
    before = gc.get_threshold()
    try:
        with collected_seldom():
            gone = weakref.ref(Knot())
            kept = [[number] for number in range(50_000)]
            assert not came
            kept += [[number] for number in range(150_000)]
            assert 1 <= len(came) <= 4 and gone() is None
        assert gc.get_threshold() == before
    finally:
        gc.callbacks.pop()
