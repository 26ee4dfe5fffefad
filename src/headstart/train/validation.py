"""Validation: how often each draft step names the token that the target itself would choose, foretold and in decoding.

Shape suffixes: B rows (of a batch, or of a block of logits), T tokens, X = B * T flat positions, M predictions of one
step, D draft vocabulary, R ranks, V target vocabulary, E hidden size, K draft steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headstart.decode.loop import Engine, Generation, Round
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.heads.base import DraftHead, HeadBatch, StepPrediction
from headstart.target.fitting import FINAL
from headstart.target.frozen import FrozenModel
from headstart.target.model import Target
from headstart.train.summing import logits_by_block, positions_before_answers
from headstart.tree.tree import TreeShape

if TYPE_CHECKING:
    from headstart.data.states.online import States


TOPS = (1, 4, 8)
"""Ranks counted: the target's choice is among the head's best 1, 4, 8."""

_ROWS = 512
"""Positions whose logits over the whole vocabulary exist at once."""


@dataclass(frozen=True)
class Validation:
    """What validation measures.

    Attributes:
        accuracy: {"top1": [one share for each step], "top4": ..., "top8": ...}: the share of predictions whose best
            1, 4 or 8 drafts hold the target's own most likely token (of its whole vocabulary: a token that the
            heads cannot draft is a miss). Step k is judged on its own, whatever the steps before it said.
        tau: predicted tokens per round of a greedy chain of all steps, 1 + sum over k of P(steps 0..k all right),
            counted jointly along each draft; 1 is plain decoding. Each P is over the drafts that reach that deep
            before the answer ends.
        predictions: how many predictions of each step were judged.
    """

    accuracy: dict[str, list[float]]
    tau: float
    predictions: list[int]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, rounded to what is worth reading."""
        return {
            "tau": round(self.tau, 4),
            **{name: [round(share, 4) for share in shares] for name, shares in self.accuracy.items()},
            "predictions": self.predictions,
        }


@torch.no_grad()
def chosen_tokens(target: FrozenModel, batch: HeadBatch) -> Tensor:
    """The token that the target chooses greedily after each flat position, int64 [X]; -1 where nothing is judged."""
    positions_S = positions_before_answers(batch)
    final_XE = batch.states[FINAL].flatten(0, 1)
    chosen_X = torch.full((final_XE.shape[0],), -1, device=final_XE.device)
    for part_S in torch.split(positions_S, _ROWS):
        # max is argmax, several times faster in bfloat16 on a CPU
        chosen_X[part_S] = target.lm_head(final_XE[part_S].to(target.dtype)).max(-1).indices
    return chosen_X


class Tally:
    """Counts over the batches of one validation, kept as one tensor so that processes can add theirs up.

    Attributes:
        counts_KC: float64 [K, 2 + len(TOPS)]: predictions, drafts right up to and with this step, hits by `TOPS`.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        self.counts_KC = torch.zeros(steps, 2 + len(TOPS), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, predictions: Iterable[StepPrediction], draft_to_target_D: Tensor, chosen_X: Tensor) -> None:
        """Judge one batch's predictions; `chosen_X` is from `chosen_tokens`."""
        alive_X = torch.ones_like(chosen_X, dtype=torch.bool)
        for step, prediction in enumerate(predictions):
            ranks = min(max(TOPS), len(draft_to_target_D))
            best = [logits_BD.topk(ranks, dim=-1).indices for _, logits_BD in logits_by_block(prediction)]
            drafts_MR = draft_to_target_D[torch.cat([draft_to_target_D.new_zeros(0, ranks), *best])]
            hits_MR = drafts_MR == chosen_X[prediction.source_M][:, None]
            right_M = hits_MR[:, 0] & alive_X[prediction.origin_M]
            alive_X = torch.zeros_like(alive_X).index_put_((prediction.origin_M,), right_M)
            self.counts_KC[step, 0] += len(right_M)
            self.counts_KC[step, 1] += right_M.sum()
            for column, top in enumerate(TOPS):
                self.counts_KC[step, 2 + column] += hits_MR[:, :top].any(-1).sum()

    def result(self) -> Validation:
        """The shares."""
        counts = self.counts_KC.cpu()
        shares_KC = (counts[:, 1:] / counts[:, :1].clamp_min(1)).tolist()
        return Validation(
            accuracy={f"top{top}": [row[1 + i] for row in shares_KC] for i, top in enumerate(TOPS)},
            tau=1 + sum(row[0] for row in shares_KC),
            predictions=[int(count) for count in counts[:, 0].tolist()],
        )


def pick_vocabulary(counts_V: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """The draft vocabulary, int64 [size], sorted: the most frequent tokens, ties by id, with `always` among them (those
    that end a turn). `counts_V` says how often each token is supervised in the training data.

    >>> pick_vocabulary(torch.tensor([5, 0, 9, 5, 0, 7]), 3, always=[1]).tolist()
    [1, 2, 5]
    >>> pick_vocabulary(torch.tensor([5, 0, 9, 5, 0, 7]), 3, always=[]).tolist()
    [0, 2, 5]
    """
    assert len(always) <= size <= len(counts_V), "the draft vocabulary has room for what must be in it"
    weights = counts_V.clone()
    weights[list(always)] = torch.iinfo(torch.int64).max
    return weights.sort(descending=True, stable=True).indices[:size].sort().values


def draftable_share(store: States, vocab_size: int, draft_to_target_D: Tensor) -> float:
    """Share of the validation data's supervised tokens that the heads can draft at all.

    Raises:
        UserError: nothing is supervised.
    """
    counts_V = store.supervised_counts(vocab_size)
    if int(counts_V.sum()) == 0:
        raise UserError(
            "Nothing is supervised in the validation data.",
            "Raise data.validation, or look at the data with `headstart data show`.",
        )
    return coverage(counts_V, draft_to_target_D)


def coverage(counts_V: Tensor, draft_to_target_D: Tensor) -> float:
    """Share of the supervised tokens counted in `counts_V` that the heads can draft at all."""
    return float(counts_V[draft_to_target_D.cpu()].sum() / counts_V.sum().clamp_min(1))


# -- decoding while training -----------------------------------------------------------------------------------------


PROMPTS = 4
NEW_TOKENS = 64


def validation_prompts(store: States, target: Target) -> list[list[int]]:
    """What comes before the first answer in the first conversations of a store that leave room for new tokens."""
    prompts: list[list[int]] = []
    for index in range(len(store)):
        sample = store.get(index)
        first = int(sample.supervised_T.long().argmax())  # 0 without an answer
        if 0 < first <= target.max_length - NEW_TOKENS:
            prompts.append(sample.tokens_T[:first].tolist())
        if len(prompts) == PROMPTS:
            break
    return prompts


@dataclass(frozen=True)
class Decoded:
    """What came of decoding a few prompts.

    Attributes:
        summary: what to say of it.
        tau: mean tokens emitted a round, the target's own included, over the rounds of all prompts (1 is plain
            decoding); None where nothing could be drafted.
        acceptance: for each position of a draft, how often it was accepted when those before it were.
        examples: a row of `EXAMPLE` for each prompt; none without a tokenizer.
    """

    summary: str
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
    """Greedy decoding of validation prompts, with one chain of drafts in every round, as deep as the heads go.

    A copy of the heads decodes, in the target's dtype as they will later; neither the heads in training nor the random
    numbers that they draw are touched.
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
    rounds = [round for row in rows for round in row.rounds]
    tau = sum(round.emitted for round in rounds) / max(1, len(rounds))
    summary = f"decoding {len(prompts)} prompts: {tau:.2f} tokens per round"
    return Decoded(summary, tau, by_position(rounds), _examples(target.tokenizer, prompts, rows))


def by_position(rounds: Sequence[Round]) -> list[float]:
    """For each position of a chain, the share of the drafts there that were accepted, of those whose forerunners were.

    >>> by_position([Round(4, 3, 0, 0, 0), Round(4, 1, 0, 0, 0), Round(2, 2, 0, 0, 0)])
    [0.6666666666666666, 1.0, 0.0]
    """
    shares = []
    for position in range(1, max((round.nodes for round in rounds), default=1)):
        reached = [round.emitted > position for round in rounds if round.nodes > position and round.emitted >= position]
        if not reached:
            break
        shares.append(sum(reached) / len(reached))
    return shares


def _examples(tokenizer: Any, prompts: Sequence[Sequence[int]], rows: Sequence[Generation]) -> list[list[Any]]:
    if tokenizer is None:
        return []
    made: list[list[Any]] = []
    for prompt, row in zip(prompts, rows, strict=True):
        ends = [*itertools.accumulate((round.emitted for round in row.rounds), initial=1)]  # the first has no round
        texts = [tokenizer.decode(row.tokens[:end]) for end in ends]
        pieces = [text[len(before) :] for before, text in zip(["", *texts], texts, strict=False)]
        tau = sum(emitted.emitted for emitted in row.rounds) / max(1, len(row.rounds))
        made.append([tokenizer.decode(prompt)[-_SHOWN:], "|".join(pieces), round(tau, 2)])
    return made
