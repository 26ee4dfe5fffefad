"""Real acceptance while training: decoding a few validation prompts with the heads as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headstart.decode.loop import Engine
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.heads import DraftHead
from headstart.target import Target, TreeShape

if TYPE_CHECKING:
    from headstart.data.online import States

PROMPTS = 4
NEW_TOKENS = 64


def validation_prompts(store: States, target: Target) -> list[list[int]]:
    """What comes before the first answer in the first conversations of a store that leave room for new tokens."""
    found: list[list[int]] = []
    for index in range(len(store)):
        sample = store.get(index)
        first = int(sample.supervised_T.long().argmax())  # 0 without an answer
        if 0 < first <= target.max_length - NEW_TOKENS:
            found.append(sample.tokens_T[:first].tolist())
        if len(found) == PROMPTS:
            break
    return found


def decode(heads: DraftHead, state: Mapping[str, Tensor], target: Target, store: States) -> tuple[float | None, str]:
    """τ of greedy decoding that drafts one chain, as deep as the heads go, in every round.

    A copy of the heads decodes, in the target's dtype as they will later; neither the heads in training nor the random
    numbers that they draw are touched.

    Args:
        heads: in training.
        state: their weights, all of them (`processes.whole_state`).
        target: the frozen model.
        store: of the validation conversations.

    Returns:
        Mean tokens emitted a round, the target's own included, over the rounds of all prompts (1 is plain decoding),
        or None where nothing could be drafted; and what to say of it.
    """
    if not (prompts := validation_prompts(store, target)):
        return None, f"decoding: no validation prompt leaves room for {NEW_TOKENS} tokens"
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        copy = type(heads)(heads.config)
    copy.load_state_dict(state)
    copy.to(target.device, target.dtype).requires_grad_(False)
    copy.bind(target)
    drafter = HeadDrafter(copy, TreeShape.chain(heads.draft_steps), "chain")
    options = DecodeOptions(max_new_tokens=NEW_TOKENS, draft="on")
    rows = [Engine(target, drafter).generate([prompt], options)[0] for prompt in prompts]
    if error := next((row.drafter_error for row in rows if row.drafter_error is not None), None):
        return None, f"decoding: the heads cannot draft ({error})"
    emitted = [one.emitted for row in rows for one in row.rounds]
    tau = sum(emitted) / max(1, len(emitted))
    return tau, f"decoding {len(prompts)} prompts: {tau:.2f} tokens per round"
