"""Python's garbage collector in a process with large libraries and an event loop."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def older_objects_left_out() -> Iterator[None]:
    """Within it, collections look only at objects made within it.

    A full collection walks through every object there is: hundreds of thousands of torch's and transformers', which
    stay anyway. That takes a third of a second each time, in which nothing else runs, and a loop that makes thousands
    of rollouts a step causes several a minute. Where somebody has frozen objects before (`gc.freeze`), nothing is done.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
