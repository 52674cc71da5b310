"""How far long work is: a bar on a terminal, else a log line now and then."""

import time

import jax
from absl import logging
from tqdm import tqdm

_LOG_SECONDS = 10


class Progress:
    """Counts up to `total`, on the first process only; use it as a context manager.

    Args:
        what: is counted, e.g. "images encoded".
        total: how many there will be.
        done: how many there are to begin with.
    """

    def __init__(self, what: str, total: int, done: int = 0):
        self._what, self._total, self._done = what, total, done
        self._is_main = jax.process_index() == 0
        hidden = None if self._is_main else True  # None: unless this is a terminal
        self._bar = tqdm(total=total, initial=done, desc=what, leave=False, dynamic_ncols=True, disable=hidden)
        self._logged = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def update(self, count: int) -> None:
        """Adds to what is done; padding past the total counts as nothing."""
        count = min(count, self._total - self._done)
        self._done += count
        self._bar.update(count)
        if self._bar.disable and self._is_main and time.monotonic() - self._logged > _LOG_SECONDS:
            logging.info("%d of %d %s", self._done, self._total, self._what)
            self._logged = time.monotonic()
