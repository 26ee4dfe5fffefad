"""Text that appears as it is decided: a stream of pieces."""

from __future__ import annotations

import queue
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from headstart.decode.loop import Check, OnTokens
from headstart.support.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True)
class Answer:
    """What was generated for one prompt.

    Attributes:
        text: without the end-of-turn token and other special tokens, and without messages of other channels than that
            of answers; a stop string that ended the text is part of it. Empty when the target has no tokenizer.
        tokens: token ids, the end-of-turn token included.
        finish_reason: why it ended: "end" (the model ended its turn), "length" or "stop".
        tokens_per_round: τ, mean tokens per forward of the target after the prompt; 1 without drafts.
        tokens_per_second: tokens over the wall-clock seconds from the call to the last token, reading the prompt
            included; in a batch, this row's tokens only.
        first_token_ms: from the call to the first token.
        drafter_error: what a drafter raised, when one did, which a Python warning says too; the text is complete all
            the same, decoded on without it.
        rounds: forwards of the target after the prompt.
        paused_rounds: of these, how many drafted nothing because plain decoding was faster here.
        seed: that the text was sampled with, and that repeats it; None of greedy text.
        heads: version of the heads that drafted; empty where none did.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    tokens_per_round: float
    tokens_per_second: float
    first_token_ms: float
    drafter_error: str | None = None
    rounds: int = 0
    paused_rounds: int = 0
    seed: int | None = None
    heads: str = ""


Run = Callable[[OnTokens, Check], Answer]
"""Decodes one prompt."""
_Tokens = tuple[list[int], int]
"""What a round decided, and how much of it was drafted."""


def warn_of_failures(answers: Iterable[Answer]) -> None:
    """One Python warning for a call whose drafters failed, at the line of the user's that stands three calls above."""
    if errors := dict.fromkeys(answer.drafter_error for answer in answers if answer.drafter_error):
        problem = f"A drafter failed ({'; '.join(errors)}); decoding went on without it."
        warnings.warn(problem, RuntimeWarning, stacklevel=4)


class Stream(Iterator[str]):
    """Pieces of a text as they are decided.

    Decoding runs in a thread of its own and hands over token ids once a round; they become text in the reader's.
    """

    def __init__(self, run: Run, pieces: IncrementalDetokenizer) -> None:
        self._answer: Answer | None = None
        self._drafted = 0
        self._pieces = pieces
        self._decoding = _Decoding(run)
        # The decoding has no reference to this object and ends when that is collected, or with the interpreter: torch
        # aborts the process if it is torn down under a thread.
        self._end = weakref.finalize(self, self._decoding.end)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        try:
            return self._next()
        except BaseException:  # the end of the text among them
            self.close()
            raise

    @property
    def answer(self) -> Answer | None:
        """The whole answer once the last piece was read, None before."""
        return self._answer

    @property
    def drafted(self) -> int:
        """How many characters of the newest piece, from the first on, are drafts that were accepted."""
        return self._drafted

    def close(self) -> None:
        """End the decoding early, from any thread: at the latest when the forward that runs is over, in a long prompt
        that of a piece. Happens by itself when the stream is no longer used."""
        self._end()

    def _next(self) -> str:
        while (message := self._decoding.next()) is not None:
            self._drafted = 0
            if isinstance(message, tuple):
                tokens, drafted = message
                piece = self._pieces.push(tokens[:drafted])
                self._drafted = len(piece)
                piece += self._pieces.push(tokens[drafted:])
            else:
                self._answer = message
                warn_of_failures([message])
                piece = self._pieces.rest()
            if piece:
                return piece
        raise StopIteration


class _Decoding:
    """A thread that decodes, and what it has handed over."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._inbox: queue.SimpleQueue[_Tokens | Answer | BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def next(self) -> _Tokens | Answer | None:
        """Return the next tokens, then the answer, then None. Raises the thread's exception again."""
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._work, name="headstart-stream", daemon=True)
                self._thread.start()
        if self._stopped.is_set():
            return None
        message = self._inbox.get()
        if isinstance(message, BaseException):
            raise message
        return message

    def end(self) -> None:
        """Stop the thread and unblock its reader; returns once the thread has ended."""
        with self._lock:
            self._stopped.set()
        self._inbox.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        try:
            self._inbox.put(self._run(lambda _row, tokens, drafted: self._inbox.put((tokens, drafted)), self._check))
        except _Stopped:
            pass
        except BaseException as error:  # raised again in the reader's thread
            self._inbox.put(error)
        self._inbox.put(None)

    def _check(self) -> None:
        if self._stopped.is_set():
            raise _Stopped


class _Stopped(BaseException):
    """The stream was closed."""
