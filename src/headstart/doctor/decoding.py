"""Checks that drafting is what was trained: logits step by step, then acceptance in real decoding.

Shape suffixes: B rows, T tokens, D draft vocabulary, M predictions, O origins, K steps, P committed tokens of a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.data.conversations.conversations import Conversation
from headstart.decode.loop import Engine, Generation
from headstart.decode.options import DecodeOptions
from headstart.doctor.findings import Finding, bad, check, good, unknown
from headstart.doctor.subject import Absent, Subject
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.heads.base import DraftHead, HeadBatch
from headstart.pipeline.layout import TRAIN
from headstart.support.files import read_jsonl
from headstart.target.model import Target
from headstart.tree.proposal import Committed
from headstart.tree.tree import TreeShape
from headstart.tuning.acceptance import Text, measure_ranks
from headstart.tuning.tune import replay

_TOLERANCE = 5e-3
"""Largest difference of two logits that are the same, as a share of the largest logit. Both are computed in float32
from the same states: sums in another order are off by 1e-6 of it, and a head that feeds back its own states can make a
thousand times that of it in a few steps. Another state, token, position or norm changes logits by about their size."""

_ROUNDS = (1, 2, 3, 1, 4)
"""Tokens committed in the rounds that are compared: whatever a family does after each length shows."""

_LOW = 0.2
"""Acceptance of the first draft below which drafting is hardly worth its cost."""


@check("decoding")
def equality(subject: Subject) -> Finding:
    """Whether drafting gives the logits that training unrolled, at the same positions, at every step."""
    target, heads = subject.target, subject.heads
    if not all(weight.isfinite().all() for weight in heads.parameters()):
        raise Absent("the heads' weights are not finite (see dtype)")
    compared, worst = 0, 0.0
    for item in subject.judged:
        with _in_float32(heads, target):
            states = {
                layer: state_TE[None].float()
                for layer, state_TE in target.hidden_states([item.tokens], heads.aux_layers)[0].items()
            }
            trained, drafts = _unrolled(target, heads, item, states), _drafted(target, heads, item, states)
        for origin, observed, drafted in drafts:
            if origin not in trained:
                continue
            compared += 1
            for step, (one_D, other_D) in enumerate(zip(drafted, trained[origin], strict=True)):
                scale = float(other_D.abs().max().clamp_min(1e-30))
                off = float((one_D - other_D).abs().max()) / scale
                worst = max(worst, off)
                if off <= _TOLERANCE:
                    continue
                when = (
                    f"after {observed} committed round{'s' * (observed > 1)}" if observed else "right after the prefill"
                )
                figures = {"step": step, "origin": origin, "observed_rounds": observed, "difference": off}
                cause = (
                    "`commit` leaves the state of the draft otherwise than reading the text does."
                    if observed and step == 0
                    else "`prefill` and `unroll` read other states, positions or norms."
                    if step == 0
                    else f"`draft_step` goes on from draft {step} otherwise than `unroll` does (tokens, positions, "
                    "norms, what is fed back)."
                )
                return bad(
                    f"Decoding does not draft what training taught: {when}, draft {step + 1} of {heads.draft_steps} "
                    f"has other logits than the training unroll at the same position ({off:.1%} of the largest; token "
                    f"{origin} of {item.id!r}).",
                    f"{cause} Fix the family in heads/; its test compares drafting with `unroll`.",
                    **figures,
                )
    if not compared:
        return unknown(f"No answer is longer than the {heads.draft_steps + 1} tokens that the heads look ahead.")
    return good(
        f"Drafting equals the training unroll at {compared} positions, all {heads.draft_steps} steps.",
        positions=compared, difference=worst,
    )  # fmt: skip


@contextmanager
def _in_float32(heads: DraftHead, target: Target) -> Iterator[None]:
    """Heads in float32 for a while: in bfloat16 rounding grows from draft to draft as a mistake would."""
    heads.float().bind(target)
    try:
        yield
    finally:
        heads.to(target.dtype).bind(target)


@torch.no_grad()
def _unrolled(
    target: Target, heads: DraftHead, item: Conversation, states: dict[int, Tensor]
) -> dict[int, list[Tensor]]:
    """Logits of every step, by origin, where each step has them."""
    batch = HeadBatch(
        torch.tensor([item.tokens], device=target.device), torch.tensor([item.supervised], device=target.device), states
    )
    wanted = set(_origins(item))
    found: dict[int, list[Tensor]] = {}
    for prediction in heads.unroll(batch):
        rows = [row for row, origin in enumerate(prediction.origin_M.tolist()) if origin in wanted]
        some = replace(prediction, hidden_MH=prediction.hidden_MH[rows])
        for row, logits_D in zip(rows, some.logits_MD.float(), strict=True):
            found.setdefault(int(prediction.origin_M[row]), []).append(logits_D)
    return {origin: logits for origin, logits in found.items() if len(logits) == heads.draft_steps}


def _origins(item: Conversation) -> list[int]:
    """The last token read when each round of `_ROUNDS` drafts, in the first answer."""
    start, stop = item.supervised_spans[0]
    origins = [start - 1]
    for count in _ROUNDS:
        origins.append(origins[-1] + count)
    return [origin for origin in origins if 0 <= origin < stop]


@torch.no_grad()
def _drafted(
    target: Target, heads: DraftHead, item: Conversation, states: dict[int, Tensor]
) -> list[tuple[int, int, list[Tensor]]]:
    """(origin, rounds observed before, logits of every step) as decoding would draft along this text."""
    tokens, found = item.tokens, list[tuple[int, int, list[Tensor]]]()
    origins = [origin for origin in _origins(item) if origin + heads.draft_steps < len(tokens)]
    if not origins:
        return found
    read = origins[0] + 1
    state = heads.prefill([tokens[:read]], {layer: state_BTE[:, :read] for layer, state_BTE in states.items()})
    level_BW = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    for observed, origin in enumerate(origins):
        if origin >= read:
            part = {layer: state_BTE[:, read : origin + 1] for layer, state_BTE in states.items()}
            heads.commit(state, Committed.of([tokens[read : origin + 1]], part, target.device))
            read = origin + 1
        drafted = []
        for depth in range(heads.draft_steps):
            token_BW = torch.tensor([[tokens[origin + 1 + depth]]], device=target.device)
            drafted.append(heads.draft_step(state, token_BW, level_BW, depth)[0, 0].float())
        found.append((origin, observed, drafted))
    return found


# -- acceptance ------------------------------------------------------------------------------------------------------


@dataclass
class _Decoded:
    """Real decoding of some prompts with a chain, and what the training forward predicts on the very same texts.

    Attributes:
        tau: tokens per round, measured.
        predicted: tokens per round that the training unroll predicts there; None where the texts are too short.
        first: of the rounds, the share whose first draft was accepted.
        error: what the drafter raised.
    """

    tau: float
    predicted: float | None
    first: float
    error: str | None


@check("decoding")
def acceptance(subject: Subject) -> Finding:
    """Whether what is accepted in decoding is what training reached; and which of the two is low."""
    target, heads = subject.target, subject.heads
    if not all(weight.isfinite().all() for weight in heads.parameters()):
        raise Absent("the heads' weights are not finite (see dtype)")
    ranks_OK = measure_ranks(target, heads, subject.judged, max_rank=1)
    first, learned = float((ranks_OK[:, 0] == 0).float().mean()), replay(ranks_OK, _chain(heads).paths)
    prompts = [item.tokens[: item.supervised.index(True)] for item in subject.judged]
    real = _decode(subject, prompts)
    figures = {"first_draft": first, "tau_on_stored_answers": learned, "tau_decoding": real.tau,
               "tau_predicted_on_decoded_texts": real.predicted}  # fmt: skip
    if real.error:
        return bad(
            f"The drafter fails in decoding ({real.error}); decoding then goes on plainly.",
            "Fix the family's prefill, draft_step (depth_logits) or commit.", **figures
        )  # fmt: skip
    drafts = f"{heads.draft_steps} drafts a round"
    if real.predicted is not None and real.tau - 1 < 0.75 * (real.predicted - 1) - 0.05:
        return bad(
            f"Only decoding is low: on the same texts the training forward predicts {real.predicted - 1:.2f} accepted "
            f"of {drafts}, decoding accepts {real.tau - 1:.2f}. Training is not the problem.",
            "Drafting does not match training: see equality; and load the heads with the target they were trained on.",
            **figures,
        )
    if first < _LOW:
        return bad(
            f"Training accuracy itself is low: on held-out answers the first draft is right in {first:.0%} of cases, "
            f"{learned - 1:.2f} of {drafts} would be accepted; decoding accepts {real.tau - 1:.2f}, so it does what "
            "training taught.",
            _train_more(subject), **figures
        )  # fmt: skip
    if real.tau - 1 < 0.6 * (learned - 1) - 0.05:
        return bad(
            f"The heads know the stored answers ({learned - 1:.2f} of {drafts}) better than what the target writes to "
            f"the same prompts ({real.tau - 1:.2f}): the data are off-policy.",
            "Let the target write the answers with the dtype and template it decodes with (data.regenerate=true).",
            **figures,
        )
    if subject.asked:
        asked = _decode(subject, subject.asked)
        figures["tau_on_questions"] = asked.tau
        if asked.tau - 1 < 0.6 * (real.tau - 1) - 0.05:
            return bad(
                f"The data are too narrow for these questions: {asked.tau - 1:.2f} of {drafts} are accepted on them, "
                f"{real.tau - 1:.2f} on prompts like those of the training.",
                "Train on prompts like these: data.prompts=FILE, data.seed_prompts=broad, or more data.conversations.",
                **figures,
            )
    return good(
        f"Decoding accepts {real.tau - 1:.2f} of {drafts}; the training forward predicts "
        f"{(real.predicted or learned) - 1:.2f}.", **figures
    )  # fmt: skip


def _chain(heads: DraftHead) -> TreeShape:
    return TreeShape.chain(heads.draft_steps)


def decode_chain(target: Target, heads: DraftHead, prompts: Sequence[Sequence[int]], longest: int) -> list[Generation]:
    """Greedy decoding that drafts a chain as deep as the heads go in every round."""
    drafter = HeadDrafter(heads, _chain(heads), "chain")
    options = DecodeOptions(max_new_tokens=longest, draft="on")
    return [Engine(target, drafter).generate([prompt], options)[0] for prompt in prompts]


def _decode(subject: Subject, prompts: Sequence[Sequence[int]]) -> _Decoded:
    longest = 32 if subject.quick else 96
    prompts = [prompt for prompt in prompts if len(prompt) + longest <= subject.target.max_length]
    rows = decode_chain(subject.target, subject.heads, prompts, longest)
    rounds = [one.emitted for row in rows for one in row.rounds]
    texts = [Text.of(prompt, row.tokens) for prompt, row in zip(prompts, rows, strict=True)]
    try:
        ranks_OK = measure_ranks(subject.target, subject.heads, texts, max_rank=1)
        predicted = replay(ranks_OK, _chain(subject.heads).paths)
    except UserError:  # every answer is shorter than the heads look ahead
        predicted = None
    return _Decoded(
        tau=sum(rounds) / max(1, len(rounds)),
        predicted=predicted,
        first=sum(one > 1 for one in rounds) / max(1, len(rounds)),
        error=next((row.drafter_error for row in rows if row.drafter_error), None),
    )


def _train_more(subject: Subject) -> str:
    """Longer or on more data, as the validations say."""
    file = subject.run / TRAIN / "metrics.jsonl" if subject.run else None
    if file is not None and file.is_file():
        taus = [float(row["tau"]) for _, row in read_jsonl(file)]
        if len(taus) > 2 and taus[-1] >= max(taus) and taus[-1] - taus[len(taus) // 2] > 0.02:
            return "Validation was still rising when training ended: train longer (train.minutes, train.steps)."
        if len(taus) > 2:
            return "Validation has stopped rising: more conversations (data.conversations), or another family or depth."
    return "Train longer (train.minutes, train.steps), then on more conversations (data.conversations)."
