"""Streaming of text while it is decoded."""

from __future__ import annotations

import queue
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from headstart.decode.engine import Ticket
from headstart.support.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True)
class Answer:
    """The text generated for one prompt.

    Attributes:
        text: without special tokens and without messages of other channels than the answer's; includes a stop string
            that ended it. Empty if the target has no tokenizer.
        tokens: token ids, the end-of-turn token included.
        finish_reason: "end" (the model ended its turn), "length" or "stop".
        tokens_per_round: τ, mean tokens per forward of the target after the prompt; 1 without drafts.
        tokens_per_second: of this row, from the call to the last token, prefill included.
        first_token_ms: from the call to the first token.
        drafter_error: error of a drafter, also a Python warning; the text is complete, decoded without that drafter.
        rounds: forwards of the target after the prompt.
        paused_rounds: rounds without drafts, because these would not have paid or to time plain rounds.
        seed: repeats a sampled text; None for a greedy one.
        heads: version of the heads that drafted; empty if none did.
        logprobs: with the option `logprobs`, for each token a dict of log-probabilities by token id: its own first,
            then those of the most likely tokens. They are plain decoding's, see `DecodeOptions`.
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
    logprobs: list[dict[int, float]] | None = None


_Tokens = tuple[list[int], int]
"""Tokens of a round, and the number of leading ones that were drafted."""
Inbox = queue.SimpleQueue[_Tokens | Answer | BaseException | None]
"""Results of a request, see `Submit`."""
Submit = Callable[[Inbox], Ticket]
"""Function that submits a request: its tokens go into the inbox, then the answer or an error, then None."""


def warn_of_failures(answers: Iterable[Answer]) -> None:
    """Warn once if drafters failed, at the user's line three calls above."""
    if errors := dict.fromkeys(answer.drafter_error for answer in answers if answer.drafter_error):
        problem = f"A drafter failed ({'; '.join(errors)}); decoding went on without it."
        warnings.warn(problem, RuntimeWarning, stacklevel=4)


class Stream(Iterator[str]):
    """Iterator over the pieces of a text while it is decoded.

    The engine passes on token ids once per round; the reader's thread turns them into text.

    Attributes:
        answer: the whole answer after the last piece, None before.
        drafted: number of leading characters of the newest piece that were accepted drafts.
    """

    def __init__(self, submit: Submit, pieces: IncrementalDetokenizer) -> None:
        self.answer: Answer | None = None
        self.drafted = 0
        self._pieces = pieces
        self._decoding = _Decoding(submit)
        # The decoding has no reference to this object, so it ends when this is garbage-collected.
        self._end = weakref.finalize(self, self._decoding.end)

    def __next__(self) -> str:
        try:
            return self._next()
        except BaseException:  # including StopIteration
            self.close()
            raise

    def close(self) -> None:
        """End the decoding, from any thread, at the latest after the running forward (of one chunk of a long prompt).
        Garbage collection calls this, too."""
        self._end()
        self._decoding.wait()

    def _next(self) -> str:
        while (message := self._decoding.next()) is not None:
            self.drafted = 0
            if isinstance(message, tuple):
                tokens, drafted = message
                piece = self._pieces.push(tokens[:drafted])
                self.drafted = len(piece)
                piece += self._pieces.push(tokens[drafted:])
            else:
                self.answer = message
                warn_of_failures([message])
                piece = self._pieces.flush()
            if piece:
                return piece
        raise StopIteration


class _Decoding:
    """A request and its queue of results."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._inbox: Inbox = queue.SimpleQueue()
        self._ticket: Ticket | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def next(self) -> _Tokens | Answer | None:
        """Return the next tokens, then the answer, then None. Raises the engine's exception again."""
        with self._lock:
            if self._ticket is None and not self._stopped.is_set():
                self._ticket = self._submit(self._inbox)
        if self._stopped.is_set():
            return None
        message = self._inbox.get()
        if isinstance(message, BaseException):
            raise message
        return message

    def end(self) -> None:
        """Cancel the request and unblock its reader, without a lock or a wait: garbage is collected in any thread."""
        if self._ticket is not None:
            self._ticket.cancel()
        self._stopped.set()
        self._inbox.put(None)

    def wait(self) -> None:
        """Wait until a cancelled request has left."""
        with self._lock:
            ticket = self._ticket
        if ticket is not None:
            ticket.cancel()  # in case it was submitted meanwhile
            ticket.left.wait()
