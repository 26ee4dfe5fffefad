"""What a run needs before its first step: heads, accelerator, tracker, schedule."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

from headstart.errors import UserError
from headstart.heads import DraftHead, HeadBatch, family, make_config
from headstart.heads.base import positions
from headstart.heads.io import load_heads
from headstart.target import FINAL, Target
from headstart.train.batches import collate
from headstart.train.config import Recipe, TrainSection
from headstart.train.metrics import pick_vocabulary

if TYPE_CHECKING:
    from headstart.data.store import StateStore


_FIRST_LOOK = 200_000


def learning_rate(section: TrainSection, fraction: float) -> float:
    """Linear warm-up, then a cosine down to `min_lr_ratio` of the peak.

    Args:
        section: lr, warmup and min_lr_ratio.
        fraction: of the run that is done, in [0, 1].

    >>> section = TrainSection(lr=1.0, warmup=0.2, min_lr_ratio=0.1)
    >>> [round(learning_rate(section, f), 3) for f in (0.0, 0.1, 0.2, 0.6, 1.0)]
    [0.1, 0.55, 1.0, 0.55, 0.1]
    """
    if fraction < section.warmup:
        share_of_peak = fraction / section.warmup
    else:
        share_of_peak = 0.5 + 0.5 * math.cos(math.pi * (fraction - section.warmup) / (1 - section.warmup))
    return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * share_of_peak)


def build_heads(
    recipe: Recipe, target: Target, train_store: StateStore, say: Callable[[str], None] = lambda text: None
) -> DraftHead:
    """Heads of the recipe, warm-started from the target and from earlier heads when the recipe names some.

    The draft vocabulary is that of the earlier heads when it has the same size, else that of the training data.

    Args:
        recipe: its `heads` and `train.start_from` are read.
        target: the frozen model.
        train_store: conversations to learn from.
        say: takes a sentence for the user.

    Raises:
        UserError: unknown family or setting, nothing is supervised in the training data or no answer is as long as a
            draft, or earlier heads that are missing or do not fit.
    """
    config = make_config(recipe.heads, target)
    counts_V = train_store.supervised_counts(target.vocab_size)
    if int(counts_V.sum()) == 0:
        raise UserError(
            "Nothing is supervised in the training data: no token was written by the assistant.",
            "Look at it with `headstart data show`; the conversations need assistant turns.",
        )
    heads = family(config.family)(config)
    _check_depth(heads, train_store)
    folder = None if recipe.train.start_from is None else Path(recipe.train.start_from).expanduser()
    earlier = None if folder is None else load_heads(folder, target, "cpu")
    if earlier is not None and earlier.config.draft_width == config.draft_width:
        heads.set_draft_vocabulary(earlier.draft_to_target_D)
    elif config.draft_vocab_size:
        ends = sorted(end for end in target.end_tokens if end < target.vocab_size)
        if config.draft_vocab_size < len(ends):
            raise UserError(
                f"A draft vocabulary of {config.draft_vocab_size} cannot hold the {len(ends)} end-of-turn tokens.",
                "Raise heads.draft_vocab_size; a few thousand is usual.",
            )
        heads.set_draft_vocabulary(pick_vocabulary(counts_V, config.draft_vocab_size, ends))
    heads.warm_start(target)
    if earlier is None or earlier.config != config:  # else every weight is replaced
        heads.fit(_first_look(train_store, heads))
    if earlier is not None:
        say(f"Started from {folder}: {take_over(heads, earlier)}.")
    return heads


@torch.no_grad()
def take_over(heads: DraftHead, earlier: DraftHead) -> str:
    """Copy into `heads` every tensor of `earlier` that has the same name and shape, in place.

    Of tables over draft vocabularies of two sizes, the rows of the tokens that both can draft are copied.

    Returns:
        What was taken over, as a part of a sentence.

    Raises:
        UserError: when nothing fits.
    """
    ours_D, theirs_D = heads.draft_to_target_D.cpu(), earlier.draft_to_target_D
    ours_C = torch.isin(ours_D, theirs_D).nonzero()[:, 0]  # places of the common tokens
    theirs_C = torch.searchsorted(theirs_D, ours_D[ours_C])
    given = earlier.state_dict()
    whole, rows = 0, 0
    state = {name: tensor for name, tensor in heads.state_dict().items() if name != "draft_to_target_D"}
    for name, tensor in state.items():
        if name not in given or tensor.ndim != given[name].ndim:
            continue
        sizes = zip(tensor.shape, given[name].shape, strict=True)
        differing = [(axis, pair) for axis, pair in enumerate(sizes) if pair[0] != pair[1]]
        if not differing:
            tensor.copy_(given[name])
            whole += 1
        elif [pair for _, pair in differing] == [(len(ours_D), len(theirs_D))]:
            axis = differing[0][0]
            tensor.index_copy_(axis, ours_C, given[name].index_select(axis, theirs_C).to(tensor))
            rows += 1
    if not whole + rows:
        raise UserError(
            f"None of the {len(given) - 1} tensors of these {earlier.family} heads has a name and shape of the "
            f"{heads.family} heads to train.",
            "Start from heads of the same family and width, or set train.start_from=null.",
        )
    by_token = f" ({rows} of them for {len(ours_C)} common draft tokens)" if rows else ""
    return f"{whole + rows} of {len(state)} tensors are those of earlier {earlier.family} heads{by_token}"


def check_store(store: StateStore, target: Target, taps: Sequence[int]) -> None:
    """Refuse states that heads with these taps on this target cannot learn from.

    Raises:
        UserError: a tap is missing, or the states are another model's.
    """
    missing = sorted(set(taps) - set(store.taps))
    if missing or store.hidden_size != target.hidden_size:
        what = f"lacks tap {missing[0]}" if missing else f"has states of size {store.hidden_size}"
        raise UserError(
            f"The store {store.folder} {what}, which these heads on {target.name} cannot learn from.",
            "Build the data again with this recipe.",
        )
    if store.target_fingerprint not in (None, target.identity().fingerprint):
        raise UserError(
            f"The states in {store.folder} are those of another model than {target.name}.",
            "Train for the model that wrote the data, or build the data again in another --run-dir.",
        )


def _check_depth(heads: DraftHead, store: StateStore) -> None:
    """Refuse to train a step that no conversation reaches."""
    masks = (store.get(index).supervised_T for index in range(len(store)))
    if not any(len(positions(supervised_T[None], heads.steps - 1)) for supervised_T in masks):
        raise UserError(
            f"The heads draft {heads.steps} tokens ahead and no answer of the training data has the "
            f"{heads.steps + 1} tokens in a row that the last step learns from.",
            "Draft fewer steps, or write longer answers (data.max_new_tokens).",
        )


def _first_look(store: StateStore, heads: DraftHead) -> Iterator[HeadBatch]:
    """Up to `_FIRST_LOOK` tokens of the training data, in float32, for a closed-form start."""
    taps, read = sorted({*heads.taps, FINAL}), 0
    for index in range(len(store)):
        if read >= _FIRST_LOOK:
            return
        read += store.lengths[index]
        yield collate(store, [index], taps, torch.float32, torch.device("cpu"))


def make_accelerator(recipe: Recipe, target: Target, folder: Path) -> Accelerator:
    """The accelerator of a run: the recipe's precision and tracker, on the target's device.

    Raises:
        UserError: fp16 without a GPU, or a tracker that is not installed.
    """
    precision: str = recipe.train.mixed_precision
    tracker = recipe.train.tracker
    if precision == "auto":
        precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(target.dtype, "no")
    if precision == "fp16" and recipe.train.optimizer == "muon":
        raise UserError(
            "muon works beside AdamW, and fp16 scales gradients for one optimiser.",
            "Set train.mixed_precision=bf16, or train.optimizer=adamw.",
        )
    if precision == "fp16" and target.device.type == "cpu":
        raise UserError("fp16 training needs a GPU.", "Set train.mixed_precision=bf16 (or no).")
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise UserError(f"The tracker {tracker} is not installed.", f"Run: pip install {tracker}")
    if target.device.type == "cuda":
        torch.cuda.set_device(target.device)  # the accelerator of a single process takes the current one
    return Accelerator(
        cpu=target.device.type == "cpu",
        mixed_precision=precision,
        log_with=None if tracker == "none" else tracker,
        project_dir=str(folder),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )


def start_tracker(accelerator: Accelerator, section: TrainSection, settings: dict[str, Any]) -> None:
    """Start the recipe's tracker, on the main process only.

    Raises:
        UserError: when it does not start; the message is the tracker's own.
    """
    if section.tracker == "none":
        return
    try:
        accelerator.init_trackers(section.project, config=settings)
    except Exception as error:  # every tracker has its own kinds
        raise UserError(
            f"The tracker {section.tracker} did not start: {error}",
            "For wandb, log in (wandb login) or set WANDB_MODE=offline; or set train.tracker=none.",
        ) from error


def describe_processes(accelerator: Accelerator) -> list[str]:
    """Lines that say how many processes train, and where; a launcher may quietly start fewer than it was asked for."""
    ranks = accelerator.num_processes
    precision = accelerator.mixed_precision.replace("no", "float32")
    lines = [
        f"Training on {ranks} process{'es' if ranks > 1 else ''} ({accelerator.device.type}, {precision}, "
        f"{torch.get_num_threads()} CPU threads each)."
    ]
    # `accelerate launch --cpu --num_processes 2` sets the address of a group, and then starts one process.
    if ranks == 1 and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        lines.append(
            "The launcher was asked for more processes, but only this one runs. For several on a CPU: "
            "ACCELERATE_USE_CPU=true torchrun --nproc_per_node N -m headstart.train RECIPE"
        )
    return lines
