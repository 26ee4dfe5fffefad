"""A loss that is not a number: whose data it came from, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate.utils import gather_object

from headstart.errors import UserError
from headstart.heads.base import HeadBatch
from headstart.train.batches import Batch, states_by_conversation


def not_finite(step: int, loss: float, group: list[Batch], own: list[Batch], batches: Sequence[HeadBatch]) -> UserError:
    """What to say of a step whose loss or gradient is not finite. Every process calls it.

    Args:
        step: its number.
        loss: of the step.
        group: the batches of the step, over all processes.
        own: those of this process.
        batches: the same, as they were read.
    """
    broken = [
        index
        for indices, batch in zip(own, batches, strict=True)
        for index, states in zip(indices, states_by_conversation(batch), strict=True)
        if not all(state_TE.isfinite().all() for state_TE in states)
    ]
    broken = sorted(gather_object(broken))
    if broken:
        where = f"the stored states of training conversations {_some(broken)} are not finite"
        remedy = "Build the data again; if it stays, use target.dtype=float32."
    else:
        where = f"its batches held training conversations {_some(sorted(i for batch in group for i in batch))}"
        remedy = "Lower train.lr or raise train.warmup; the checkpoints before this step are kept."
    return UserError(f"The loss or its gradient is not finite at step {step} (loss {loss:g}): {where}.", remedy)


def _some(numbers: list[int]) -> str:
    """At most eight of them.

    >>> _some([3, 5]), _some(list(range(10)))
    ('3, 5', '0, 1, 2, 3, 4, 5, 6, 7, ...')
    """
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
