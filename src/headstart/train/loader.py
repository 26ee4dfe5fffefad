"""Batches of the next steps, read in a thread of their own while a step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import torch

from headstart.heads.base import HeadBatch

Step = TypeVar("Step")


def read_ahead(
    steps: Iterable[Step], read: Callable[[Step], list[HeadBatch]], ahead: int
) -> Generator[tuple[Step, list[HeadBatch]]]:
    """Each step with its batches, in the order of the steps; an error of reading comes at the step that it belongs to.

    Close the iterator when no more steps are wanted: what is being read is then waited for.

    Args:
        steps: known without what training makes of the ones before.
        read: the batches of a step, in another thread unless `ahead` is 0; never two at a time.
        ahead: steps that are read in advance.
    """
    if not ahead:
        for step in steps:
            yield step, read(step)
        return
    coming, waiting = iter(steps), deque[tuple[Step, Future[list[HeadBatch]]]]()
    # One core is enough to copy; the others compute. The setting is the thread's own.
    with ThreadPoolExecutor(1, "headstart-batches", torch.set_num_threads, (1,)) as reader:
        try:
            while True:
                for step in islice(coming, ahead + 1 - len(waiting)):
                    waiting.append((step, reader.submit(read, step)))
                if not waiting:
                    return
                step, batches = waiting.popleft()
                yield step, batches.result()
        finally:
            reader.shutdown(wait=True, cancel_futures=True)


def pinned(batch: HeadBatch) -> HeadBatch:
    """The batch in memory that a GPU copies from while it computes, where there is a GPU of torch's own."""
    return batch.each(lambda tensor: tensor.pin_memory() if torch.cuda.is_available() else tensor)


def sent(batch: HeadBatch, device: torch.device) -> HeadBatch:
    """The batch on a device."""
    return batch.each(lambda tensor: tensor.to(device, non_blocking=True))
