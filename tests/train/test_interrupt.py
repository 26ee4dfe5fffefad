"""Ctrl-C in training: the first signal waits for the step, an immediate second one is ignored, a later one raises."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from headstart.train import interrupt as module
from headstart.train.interrupt import Interrupt


def test_handler_from_c_ends_as_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reports it as None, which it cannot install again."""
    own = signal.signal
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

    def install(number: int, handler: Any) -> None:
        own(number, handler)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", install)
            interrupt = Interrupt().__enter__()
        interrupt.__exit__()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_later_request_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        now[0] += 0.5
        signal.raise_signal(signal.SIGTERM)  # forwarded by a launcher
        assert interrupt.requested
        now[0] += 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
