"""The queue of the server: each choice of a request is a stream, and a number of them is decoded at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from headstart.streaming import Answer, Stream


class Closed(Exception):
    """A job was closed before its last answer: its client has gone, or the server stops."""


class Job:
    """The streams of one request.

    Attributes:
        outcome: "completed" after the last answer, "failed" if decoding raised, else "cancelled".
        waited: seconds that each choice waited for its turn, by number.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams, self.outcome = streams, "cancelled"
        self.tasks = list[asyncio.Task[None]]()  # one a stream, then one that watches the client
        self.waited = [0.0] * len(streams)
        self.events = asyncio.Queue[tuple[int, str | Answer | BaseException | None]]()

    async def __aiter__(self) -> AsyncIterator[tuple[int, str | Answer]]:
        """Yield each choice's number with its pieces and its answer, as they come. Raises `Closed`, or the exception of
        the decoding."""
        left = len(self.streams)
        while left:
            index, event = await self.events.get()
            if event is None:
                raise Closed
            if isinstance(event, BaseException):
                self.outcome = "failed"
                raise event
            left -= isinstance(event, Answer)
            self.outcome = self.outcome if left else "completed"
            yield index, event


class Jobs:
    """Running and queued jobs. All methods run in the event loop; streams are read in threads.

    Attributes:
        running, waiting: streams that are decoded, and streams that wait for their turn.
        draining: whether new jobs are refused.
    """

    def __init__(self, max_requests: int, max_queue: int) -> None:
        self.running, self.waiting, self.draining = set[Stream](), set[Stream](), False
        self.capacity = max_requests + max_queue
        self._slots = asyncio.Semaphore(max_requests)
        self._readers = ThreadPoolExecutor(max_requests, "headstart-serve")
        self._jobs = set[Job]()

    def start(self, streams: Sequence[Stream]) -> Job | None:
        """Queue a job; return None if the queue has no room for it."""
        if len(self.running) + len(self.waiting) + len(streams) > self.capacity:
            return None
        job = Job(streams)
        self._jobs.add(job)
        self.waiting.update(streams)
        job.tasks += [asyncio.create_task(self._decode(job, index)) for index in range(len(streams))]
        return job

    def close(self, job: Job) -> None:
        """End the decoding of a job, if any is left, without waiting for it."""
        self._jobs.discard(job)
        for stream, task in zip(job.streams, job.tasks, strict=False):
            if stream in self.waiting:
                self.waiting.discard(stream)
                task.cancel()
            elif stream in self.running:
                asyncio.get_running_loop().run_in_executor(None, stream.close)
        job.events.put_nowait((0, None))

    def close_all(self) -> None:
        for job in list(self._jobs):
            self.close(job)

    async def _decode(self, job: Job, index: int) -> None:
        stream, queued, loop = job.streams[index], perf_counter(), asyncio.get_running_loop()

        def read() -> None:
            """Post pieces, then the answer (None if the stream was closed) or an exception."""
            try:
                for piece in stream:
                    loop.call_soon_threadsafe(job.events.put_nowait, (index, piece))
                end: Answer | BaseException | None = stream.answer
            except BaseException as error:
                end = error
            loop.call_soon_threadsafe(job.events.put_nowait, (index, end))

        async with self._slots:
            self.waiting.discard(stream)
            self.running.add(stream)
            job.waited[index] = perf_counter() - queued
            await loop.run_in_executor(self._readers, read)
            self.running.discard(stream)
