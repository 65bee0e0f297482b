"""The garbage collector leaves out what was there before, and what somebody else has frozen stays so."""

from __future__ import annotations

import gc

from mrl.system.garbage import older_objects_left_out


def test_what_was_there_is_left_out_until_the_end() -> None:
    before = gc.get_freeze_count()  # conftest.py freezes what the tests imported
    with older_objects_left_out():
        assert gc.get_freeze_count() == before
    gc.unfreeze()
    old: list[object] = [[]]
    new: list[object]
    try:
        with older_objects_left_out():
            new = [[]]
            watched = gc.get_objects()
            assert not any(found is old for found in watched)
            assert any(found is new for found in watched)
        assert any(found is old for found in gc.get_objects())
    finally:
        gc.freeze()
