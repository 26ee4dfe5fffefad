"""Acceptance of heads' drafts on known texts.

Greedy decoding accepts the true token; sampling accepts a draft with the target's own probability. Sampled texts are
harder to draft than greedy ones, so `sampled_answers` generates some.

Shape suffixes: B rows, T tokens, V vocabulary, D draft vocabulary, M predictions, O origins, K steps, R ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from headstart.data.conversations.records import Conversation
from headstart.data.states.store import all_finite
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.errors import UserError
from headstart.heads.base import DraftHead, HeadBatch
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.support.terminal import tracked

_MAX_TEXTS, _MAX_ANSWER = 24, 64
"""Maximum prompts to answer again at temperature 1, and tokens of an answer."""
_MIN_SAMPLED = 256
"""Tokens of such answers below which the given answers count as well."""
_CHUNK = 256
"""Positions with full-vocabulary probabilities in memory at once."""
_SAMPLED_RANKS = 4
"""Ranks at which a sampled child in place of the draft is measured; a node seldom has more children."""


@dataclass
class Text:
    """A prompt and an answer to it, as tokens."""

    tokens: list[int]
    supervised: list[bool]

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int]) -> Text:
        """Join prompt and answer; only the answer is supervised.

        >>> Text.of([5, 6], [7])
        Text(tokens=[5, 6, 7], supervised=[False, False, True])
        """
        return cls([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))


Supervised = Text | Conversation


class Drafts(NamedTuple):
    """Drafts of heads on texts, and their acceptance, at origins with every step supervised, in text order.

    Attributes:
        ranks_OK: rank of the true token among each step's drafts, int64; the maximum also stands for worse ranks.
        log_probs_OKR: of the best drafts of each step, float32; R is at most that maximum.
        likely_OKR: the target's own probabilities of the best drafts; None for greedy decoding.
        sampled_OKR: acceptance probability of a child sampled in place of each of the first drafts, next to the better
            ones: the overlap of the target's distribution and the child's. R may be smaller.
        text_O: index of the origin's text, int64.
        entropy_O: entropy of the target's full distribution at the first draft, in nats; None for sampling.
    """

    ranks_OK: Tensor
    log_probs_OKR: Tensor
    likely_OKR: Tensor | None = None
    sampled_OKR: Tensor | None = None
    text_O: Tensor | None = None
    entropy_O: Tensor | None = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The first four tables in numpy, for `fit_calibration`."""
        return tuple(None if part is None else part.numpy() for part in self[:4])


@torch.inference_mode()
def measure_drafts(
    target: Target,
    heads: DraftHead,
    conversations: Sequence[Supervised],
    max_rank: int,
    console: Console | None = None,
    sampling: bool = False,
) -> Drafts:
    """Draft after every token of the texts and measure acceptance in greedy decoding, or in sampling at temperature 1.
    Raises UserError if no origin has every step supervised."""
    to_draft_V = torch.full((target.vocab_size,), -1, device=target.device)
    to_draft_V[heads.draft_to_target_D] = torch.arange(len(heads.draft_to_target_D), device=target.device)
    measured: list[dict[str, Tensor]] = []
    for number, conversation in enumerate(tracked(conversations, "measuring acceptance", len(conversations), console)):
        states = target.hidden_states([conversation.tokens], sorted({*heads.aux_layers, FINAL}))[0]
        if not all_finite(states):
            warnings.warn(f"Text {number} (from 0) is left out: its hidden states are not finite.", stacklevel=2)
            continue
        tokens_BT = torch.tensor([list(conversation.tokens)], device=target.device)
        batch = HeadBatch(
            tokens_BT,
            torch.tensor([list(conversation.supervised)], dtype=torch.bool),
            {layer: state[None] for layer, state in states.items()},
        )
        p_target_TD = None
        if sampling:  # only after states that a supervised token follows
            p_target_TD = torch.zeros(tokens_BT.shape[1], len(heads.draft_to_target_D), device=target.device)
            read = batch.supervised_BT[0, 1:].nonzero()[:, 0].to(target.device)
            p_target_TD[read] = target.lm_head(states[FINAL][read]).float().softmax(-1)[:, heads.draft_to_target_D]
        tables: list[dict[str, Tensor]] = []
        indices: list[dict[int, int]] = []  # of each step's origins
        for step in heads.unroll(batch):
            logits_MD, truth_M = step.logits_MD.float(), to_draft_V[tokens_BT.flatten()[step.teacher_M + 1]]
            if p_target_TD is None:
                parts: tuple[Tensor, ...] = _rank(logits_MD, truth_M, max_rank), _best(logits_MD, max_rank)[0]
            else:
                parts = sampling_tables(logits_MD, truth_M, p_target_TD[step.teacher_M], max_rank)
            tables.append({name: part.cpu() for name, part in zip(Drafts._fields, parts, strict=False)})
            indices.append({origin: index for index, origin in enumerate(step.origin_M.tolist())})
        if len(tables) < heads.draft_steps:  # too short: families may end before a step without origins
            continue
        origins = sorted(set.intersection(*map(set, indices)))
        rows = [[index[origin] for origin in origins] for index in indices]
        table = {
            name: torch.stack([of_step[name][row] for of_step, row in zip(tables, rows, strict=True)], 1)
            for name in tables[0]
        }
        table["text_O"] = torch.full((len(origins),), number)
        if not sampling:
            table["entropy_O"] = entropies(target, states[FINAL][[origin + 1 for origin in origins]]).cpu()
        measured.append(table)
    if not sum(len(table["ranks_OK"]) for table in measured):
        raise UserError(
            f"No calibration answer is longer than the {heads.draft_steps + 1} tokens that the heads look ahead.",
            "Write longer answers (data.max_new_tokens), or more of them (data.validation).",
        )
    return Drafts(**{name: torch.cat([table[name] for table in measured]) for name in measured[0]})


def entropies(target: Target, final_TE: Tensor) -> Tensor:
    """Compute the entropy of the target's distribution after each final state, in nats, float32 [T]."""
    parts = [torch.zeros(0, device=final_TE.device)]
    for part_TE in torch.split(final_TE, _CHUNK):
        log_TV = target.lm_head(part_TE).float().log_softmax(-1)
        parts.append(-(log_TV.exp() * log_TV).sum(-1))
    return torch.cat(parts)


def sampling_tables(logits_MD: Tensor, truth_M: Tensor, p_target_MD: Tensor, max_rank: int) -> tuple[Tensor, ...]:
    """Compute the first four tables of `Drafts` for one step of sampling.

    `truth_M` is the true token's index in the draft vocabulary, negative if it cannot be drafted; `p_target_MD` are the
    target's probabilities of the draft vocabulary.
    """
    log_probs_MR, best_MR = _best(logits_MD, max_rank)
    q_draft_MD = logits_MD.softmax(-1)
    sampled = []
    for rank in range(min(_SAMPLED_RANKS, best_MR.shape[1])):
        rest_M1 = q_draft_MD.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        sampled.append(torch.minimum(p_target_MD, q_draft_MD / rest_M1).sum(-1))
        q_draft_MD.scatter_(1, best_MR[:, rank, None], 0.0)
    return _rank(logits_MD, truth_M, max_rank), log_probs_MR, p_target_MD.gather(1, best_MR), torch.stack(sampled, 1)


def _rank(logits_MD: Tensor, truth_M: Tensor, max_rank: int) -> Tensor:
    """Return the rank [M] of the true token, `max_rank` for worse ranks and tokens that cannot be drafted."""
    truth_M1 = logits_MD.gather(1, truth_M.clamp(min=0)[:, None])
    return torch.where(truth_M < 0, max_rank, (logits_MD > truth_M1).sum(-1).clamp(max=max_rank))


def _best(logits_MD: Tensor, max_rank: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and indices of the best drafts, [M, R]."""
    best = logits_MD.topk(min(max_rank, logits_MD.shape[1]), dim=-1)
    return best.values - logits_MD.logsumexp(-1, keepdim=True), best.indices


def sampled_answers(
    target: Target, conversations: Sequence[Supervised], minimum: int, console: Console | None = None
) -> list[Supervised]:
    """Answer the first prompts of some conversations at temperature 1, always the same ones.

    Leaves out answers with fewer than `minimum` tokens, and adds the given answers if too few tokens remain. Raises
    UserError if a prompt does not fit into memory.
    """
    answered = [text for text in conversations if True in text.supervised]
    longest = min(_MAX_ANSWER, max((sum(text.supervised) for text in answered), default=0))
    prompts = [list(text.tokens[: text.supervised.index(True)]) for text in answered]
    prompts = [prompt for prompt in prompts if len(prompt) + longest <= target.max_length][:_MAX_TEXTS]
    texts: list[Supervised] = []
    start, rows = 0, _MAX_TEXTS
    with console.status("sampling answers") if console else nullcontext():
        while start < len(prompts):
            part = prompts[start : start + rows]
            try:
                answers = DecodeLoop(target).generate(part, DecodeOptions(longest, temperature=1.0, seed=start))
            except UserError:  # out of memory
                if rows == 1:
                    raise
                rows //= 2
                continue
            start += len(part)
            pairs = zip(part, answers, strict=True)
            texts += [Text.of(prompt, one.tokens) for prompt, one in pairs if len(one.tokens) >= minimum]
    return texts if sum(sum(text.supervised) for text in texts) >= _MIN_SAMPLED else [*texts, *conversations]
