"""SIGTERM and SIGINT ask the loop to save and leave."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class TrainingInterrupted(Exception):
    """Training stopped early on a signal, after saving.

    signum: the signal's number; step: the step of the checkpoint.
    """

    def __init__(self, signum: int, step: int):
        super().__init__(f"{signal.Signals(signum).name}: saved step {step}; the same command goes on from there")
        self.signum, self.step = signum, step


class StopSignal:
    """A context in which the first SIGTERM or SIGINT is noted in `received`, and a second one acts as usual.

    Signals can only be caught in the main thread; elsewhere the context does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._restore()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
