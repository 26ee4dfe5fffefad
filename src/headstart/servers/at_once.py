"""Several questions under way at once, answered by whoever is asked in threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TypeVar, cast

T = TypeVar("T")

_CHECK_SECONDS = 0.1


class Stopped(Exception):
    """Raised by work whose result nobody waits for any more."""


def answered(
    count: int,
    at_once: int,
    ask: Callable[[int, threading.Event], T],
    check: Callable[[], None] = lambda: None,
) -> Generator[tuple[int, T], None, None]:
    """Numbers of questions with their answers, as these come, most of them `at_once`. Close it where it is left early:
    nothing is asked then.

    `ask` gives the answer to a question; its event is set once nobody waits for answers any more. `check` is called
    while answers are waited for. What both raise is raised here.
    """
    waiting, done = queue.SimpleQueue[int](), queue.SimpleQueue[tuple[int, T | None, BaseException | None]]()
    for number in range(count):
        waiting.put(number)
    stop = threading.Event()

    def work() -> None:
        with suppress(queue.Empty):
            while not stop.is_set():
                number = waiting.get_nowait()
                try:
                    done.put((number, ask(number, stop), None))
                except BaseException as error:
                    done.put((number, None, error))
                    return

    try:
        for _ in range(min(at_once, count)):
            # An answer that nobody waits for any more does not keep the program from ending.
            threading.Thread(target=work, name="request", daemon=True).start()
        remaining = count
        while remaining:
            check()
            try:
                number, answer, error = done.get(timeout=_CHECK_SECONDS)
            except queue.Empty:
                continue
            if error is not None:
                raise error
            remaining -= 1
            yield number, cast(T, answer)
    finally:
        stop.set()
