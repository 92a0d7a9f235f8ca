"""Being told to stop: a request that the loop honours between two steps."""

import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """While entered, SIGTERM and SIGINT set `signal_name` instead of ending the process.

    A second SIGINT raises KeyboardInterrupt at once: a save that it cuts off is not a checkpoint, nothing else is lost.
    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        self._before: dict[int, signal.Handlers | int | None] = {}

    def __bool__(self) -> bool:
        return bool(self.signal_name)

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)  # type: ignore[assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
