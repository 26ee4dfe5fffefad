"""Initial heads of a training: from the target, earlier heads, and closed-form fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from itertools import accumulate, islice
from pathlib import Path

import torch
from torch import Tensor

from headstart.data.states.store import States
from headstart.errors import UserError
from headstart.heads.base import DraftHead, HeadBatch, HeadConfig, family, make_config, supervised_origins
from headstart.heads.io import load_heads
from headstart.model.frozen import FrozenModel
from headstart.recipes.recipe import Recipe
from headstart.replay.patch import FINAL
from headstart.train.batches import read_ahead, read_batch
from headstart.train.processes import raise_on_all_ranks

_READERS = 16  # concurrent reads of conversations: servers answer several at once
_FIRST_TOKENS = 200_000  # of the training data, for closed-form fits and the choice of weights to freeze


def load_earlier_heads(recipe: Recipe, target: FrozenModel | None) -> DraftHead | None:
    """Load the heads of `train.start_from`, on the CPU; a UserError for a family that cannot start the recipe's."""
    if recipe.train.start_from is None:
        return None
    earlier, name = load_heads(Path(recipe.train.start_from).expanduser(), target, "cpu"), recipe.heads.family
    if earlier.family not in (allowed := [name, *filter(None, [family(name).starts_from])]):
        raise UserError(
            f"{recipe.train.start_from} holds {earlier.family} heads, which {name} heads cannot start from.",
            f"Name {' or '.join(allowed)} heads, or set train.start_from=null.",
        )
    return earlier


def build_heads(
    recipe: Recipe, target: FrozenModel, train_store: States, say: Callable[[str], None] = lambda text: None
) -> DraftHead:
    """Build the recipe's heads, warm-started from the target and from earlier heads, if any.

    The draft vocabulary is the earlier heads' if it has the same size, else chosen from the training data. `say` prints
    a line. Raises a UserError for unusable data or earlier heads.
    """
    with raise_on_all_ranks():
        heads, earlier = _unfitted_heads(recipe, target, train_store)
    # Online reads are collective with a sharded target; `raise_on_all_ranks` must not contain collectives.
    reading = raise_on_all_ranks if train_store.stored else nullcontext
    # Else `copy_matching` replaces every weight, or those that the fit would start.
    same_family = earlier is not None and earlier.family == heads.family
    if earlier is None or (earlier.config != heads.config and (same_family or heads.fits_new_parts)):
        with reading():
            heads.fit(_first_batches(train_store, heads))
    if earlier is not None:
        with raise_on_all_ranks():
            say(f"Started from {recipe.train.start_from}: {copy_matching(heads, earlier)}.")
    with reading():
        heads.before_training(_first_batches(train_store, heads))
    return heads


def _unfitted_heads(recipe: Recipe, target: FrozenModel, train_store: States) -> tuple[DraftHead, DraftHead | None]:
    """Build heads with the target's weights; return them and the earlier heads, if any."""
    config = make_config(recipe.heads, target)
    heads = family(config.family)(config)
    check_store(train_store, target, heads)
    counts_V = train_store.supervised_counts(target.vocab_size)
    if int(counts_V.sum()) == 0:
        raise UserError(
            "Nothing is supervised in the training data: no token was written by the assistant.",
            "Look at it with `headstart data show`; the conversations need assistant turns.",
        )
    _check_depth(heads, train_store)
    earlier = load_earlier_heads(recipe, target)
    if recipe.train.lora_rank and earlier is not None:
        _check_same(config, earlier.config)
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
    return heads, earlier


@torch.no_grad()
def copy_matching(heads: DraftHead, earlier: DraftHead) -> str:
    """Copy tensors of `earlier` with equal name and shape into `heads`, in place. Tables over draft vocabularies of
    different sizes get the rows of common tokens. Returns a summary phrase; a UserError if nothing fits."""
    ours_D, theirs_D = heads.draft_to_target_D.cpu(), earlier.draft_to_target_D
    ours_C = torch.isin(ours_D, theirs_D).nonzero()[:, 0]  # indices of the common tokens
    theirs_C = torch.searchsorted(theirs_D, ours_D[ours_C])
    source = earlier.state_dict()
    complete, by_token = 0, 0  # tensors copied entirely, and by common token
    state = {name: tensor for name, tensor in heads.state_dict().items() if name != "draft_to_target_D"}
    for name, tensor in state.items():
        if name not in source or tensor.ndim != source[name].ndim:
            continue
        sizes = zip(tensor.shape, source[name].shape, strict=True)
        differing = [(axis, pair) for axis, pair in enumerate(sizes) if pair[0] != pair[1]]
        if not differing:
            tensor.copy_(source[name])
            complete += 1
        elif [pair for _, pair in differing] == [(len(ours_D), len(theirs_D))]:
            axis = differing[0][0]
            tensor.index_copy_(axis, ours_C, source[name].index_select(axis, theirs_C).to(tensor))
            by_token += 1
    if not complete + by_token:
        raise UserError(
            f"None of the {len(source) - 1} tensors of these {earlier.family} heads matches the {heads.family} heads "
            "to train in name and shape.",
            "Start from heads of the same width, or set train.start_from=null.",
        )
    partly = f" ({by_token} of them for {len(ours_C)} common draft tokens)" if by_token else ""
    return f"copied {complete + by_token} of {len(state)} tensors from the earlier {earlier.family} heads{partly}"


def pick_vocabulary(counts_V: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """Choose a draft vocabulary, sorted int64 [size]: the ids `always`, and the most frequent by `counts_V`.

    >>> pick_vocabulary(torch.tensor([5, 0, 9, 5, 0, 7]), 3, always=[1]).tolist()
    [1, 2, 5]
    >>> pick_vocabulary(torch.tensor([5, 0, 9, 5, 0, 7]), 3, always=[]).tolist()
    [0, 2, 5]
    """
    assert len(always) <= size <= len(counts_V), "the size is checked before"
    weights = counts_V.clone()
    weights[list(always)] = torch.iinfo(torch.int64).max
    return weights.sort(descending=True, stable=True).indices[:size].sort().values


def check_store(store: States, target: FrozenModel, heads: DraftHead) -> None:
    """Raise a UserError for states that lack a layer or belong to another model."""
    missing = sorted({*heads.aux_layers, FINAL} - set(store.aux_layers))
    if missing or store.hidden_size != target.hidden_size:
        fault = f"lacks the states of layer {missing[0]}" if missing else f"has states of size {store.hidden_size}"
        raise UserError(
            f"The store {store.folder} {fault}, which these heads on {target.name} cannot learn from.",
            "Build the data again with this recipe.",
        )
    if store.target_fingerprint not in (None, target.identity().fingerprint):
        raise UserError(
            f"The states in {store.folder} were written by another model than {target.name}.",
            "Train for the model that wrote the data, or build the data again in another --run-dir.",
        )


def _check_same(config: HeadConfig, earlier: HeadConfig) -> None:
    """Raise a UserError if low-rank updates would apply to heads other than the recipe's."""
    ours, theirs = ({"family": heads.family, **heads.model_dump(mode="json")} for heads in (config, earlier))
    if differing := [key for key, value in ours.items() if theirs.get(key) != value]:
        key = differing[0]
        raise UserError(
            f"train.lora_rank requires the earlier heads' settings, but heads.{key} is {ours[key]!r} "
            f"(theirs: {theirs.get(key)!r}).",
            "Use the recipe of the earlier heads, or set train.lora_rank=0 to copy only matching tensors.",
        )


def _check_depth(heads: DraftHead, store: States) -> None:
    """Raise a UserError if no answer is long enough for the last draft step."""
    if not any(len(supervised_origins(mask_T[None], heads.draft_steps - 1)) for mask_T in store.supervised()):
        raise UserError(
            f"The heads draft {heads.draft_steps} tokens ahead and no answer of the training data has the "
            f"{heads.draft_steps + 1} tokens in a row that the last step learns from.",
            "Draft fewer steps, or write longer answers (data.max_new_tokens).",
        )


def _first_batches(store: States, heads: DraftHead) -> Iterator[HeadBatch]:
    """Yield the first conversations, in float32, until they have `_FIRST_TOKENS` tokens or all are read."""
    aux_layers, before = sorted({*heads.aux_layers, FINAL}), accumulate(store.lengths, initial=0)
    first = [index for index, tokens in enumerate(islice(before, len(store))) if tokens < _FIRST_TOKENS]

    def read(index: int) -> HeadBatch:
        return read_batch(store, [index], aux_layers).on(torch.device("cpu"), torch.float32)

    with closing(read_ahead(first, read, _READERS if store.stored else 0)) as steps:
        for _, batch, _ in steps:
            yield batch
