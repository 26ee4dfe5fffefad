"""Real acceptance while training: decoding a few validation prompts with the heads as they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from headstart.decode.loop import Engine, Generation, Round
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.heads.base import DraftHead
from headstart.target.model import Target
from headstart.tree.tree import TreeShape

if TYPE_CHECKING:
    from headstart.data.states.online import States

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


@dataclass(frozen=True)
class Decoded:
    """What came of decoding a few prompts.

    Attributes:
        told: what to say of it.
        tau: mean tokens emitted a round, the target's own included, over the rounds of all prompts (1 is plain
            decoding); None where nothing could be drafted.
        acceptance: for each position of a draft, how often it was accepted when those before it were.
        examples: a row of `EXAMPLE` for each prompt; none without a tokenizer.
    """

    told: str
    tau: float | None = None
    acceptance: list[float] = field(default_factory=list)
    examples: list[list[Any]] = field(default_factory=list)

    def values(self) -> dict[str, float]:
        """What trackers log."""
        by_position = {f"decoded/acceptance_step{k}": share for k, share in enumerate(self.acceptance)}
        return {} if self.tau is None else {"decoded/tokens_per_round": self.tau, **by_position}


EXAMPLE = ("prompt", "answer, a bar after each round", "tokens per round")
"""Columns of the examples."""
_SHOWN = 200
"""Last characters of a prompt that an example shows."""


def decode(heads: DraftHead, target: Target, store: States) -> Decoded:
    """Greedy decoding that drafts one chain, as deep as the heads go, in every round.

    A copy of the heads decodes, in the target's dtype as they will later; neither the heads in training nor the random
    numbers that they draw are touched.

    Args:
        heads: in training.
        target: the frozen model.
        store: of the validation conversations.
    """
    if not (prompts := validation_prompts(store, target)):
        return Decoded(f"decoding: no validation prompt leaves room for {NEW_TOKENS} tokens")
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        copy = type(heads)(heads.config)
    copy.load_state_dict(heads.state_dict())
    copy.to(target.device, target.dtype).requires_grad_(False)
    copy.bind(target)
    drafter = HeadDrafter(copy, TreeShape.chain(heads.draft_steps), "chain")
    options = DecodeOptions(max_new_tokens=NEW_TOKENS, draft="on")
    rows = [Engine(target, drafter).generate([prompt], options)[0] for prompt in prompts]
    if error := next((row.drafter_error for row in rows if row.drafter_error is not None), None):
        return Decoded(f"decoding: the heads cannot draft ({error})")
    rounds = [one for row in rows for one in row.rounds]
    tau = sum(one.emitted for one in rounds) / max(1, len(rounds))
    told = f"decoding {len(prompts)} prompts: {tau:.2f} tokens per round"
    return Decoded(told, tau, by_position(rounds), _examples(target.tokenizer, prompts, rows))


def by_position(rounds: Sequence[Round]) -> list[float]:
    """For each position of a chain, the share of the drafts there that were accepted, of those whose forerunners were.

    >>> by_position([Round(4, 3, 0, 0, 0), Round(4, 1, 0, 0, 0), Round(2, 2, 0, 0, 0)])
    [0.6666666666666666, 1.0, 0.0]
    """
    shares = []
    for position in range(1, max((one.nodes for one in rounds), default=1)):
        reached = [one.emitted > position for one in rounds if one.nodes > position and one.emitted >= position]
        if not reached:
            break
        shares.append(sum(reached) / len(reached))
    return shares


def _examples(tokenizer: Any, prompts: Sequence[Sequence[int]], rows: Sequence[Generation]) -> list[list[Any]]:
    if tokenizer is None:
        return []
    made: list[list[Any]] = []
    for prompt, row in zip(prompts, rows, strict=True):
        ends = [*itertools.accumulate((one.emitted for one in row.rounds), initial=1)]  # the first has no round
        texts = [tokenizer.decode(row.tokens[:end]) for end in ends]
        pieces = [text[len(before) :] for before, text in zip(["", *texts], texts, strict=False)]
        tau = sum(one.emitted for one in row.rounds) / max(1, len(row.rounds))
        made.append([tokenizer.decode(prompt)[-_SHOWN:], "|".join(pieces), round(tau, 2)])
    return made
