"""Checks of the heads: vocabulary, weights, drafting against the training unroll, and acceptance.

Shape suffixes: B rows, T tokens, D draft vocabulary, M predictions, O origins, K steps, W width of a tree level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.data.conversations.records import Conversation
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.doctor.findings import Finding, bad, good
from headstart.doctor.subject import SPLITS, Absent, Subject
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.eval.audit import random_weights
from headstart.heads.base import DraftHead, HeadBatch, HeadConfig, family, make_config
from headstart.model.model import Target
from headstart.tree.tree import Committed, TreeShape
from headstart.tuning.acceptance import Drafts, Supervised, Text, measure_drafts
from headstart.tuning.tune import by_kind, replay

_MIN_COVERAGE = 0.85  # 8192 of the packaged target's 49152 tokens give 0.93
_MIN_FIRST = 0.2  # acceptance of the first draft below which drafting hardly pays
_NEARLY_ALL = 0.95  # fraction of accepted drafts that counts as all: near-ties may differ
_ROUNDS = (1, 2, 3, 1, 4)  # tokens committed in the compared rounds: code may depend on their number
_TOLERANCE = 5e-3
"""Tolerance for equal logits, relative to the largest. Both sides are float32 from the same states: summation order
gives 1e-6, amplified up to a thousandfold in a few steps by heads that feed back their states. A wrong state, token,
position or norm gives about 1."""

Steps = dict[int, list[Tensor]]
"""Logits [D] of each draft step, by origin: the position of the last token read."""


def vocabulary(subject: Subject) -> Finding:
    """Check that the draft vocabulary covers the target's answers."""
    try:
        answers = [item for split in SPLITS for item in subject.conversations[split]]
    except Absent:
        answers = subject.heldout
    drafted = set(subject.heads.draft_to_target_D.tolist())
    size = len(drafted)
    pairs = [pair for item in answers for pair in zip(item.tokens, item.supervised, strict=True)]
    tokens = [token for token, supervised in pairs if supervised]
    covered = sum(token in drafted for token in tokens) / max(1, len(tokens))
    figures: dict[str, Any] = {"draft_tokens": size, "coverage": round(covered, 4)}
    if covered < _MIN_COVERAGE:
        return bad(
            f"The draft vocabulary is truncated: {1 - covered:.1%} of the answers' tokens are not among its {size} "
            "tokens and can never be drafted.",
            "Train again: the draft vocabulary is then picked from the data. If it was already, raise "
            "heads.draft_vocab_size.",
            **figures,
        )
    return good(f"The draft vocabulary of {size} tokens covers {covered:.1%} of the answers' tokens.", **figures)


def weights(subject: Subject) -> Finding:
    """Check that training changed the weights. Loading already refuses weights that are not finite."""
    heads = subject.heads
    start = dict(untrained(heads.config, heads.draft_to_target_D, subject.target).named_parameters())
    if all(torch.equal(weight, start[name].to(weight)) for name, weight in heads.named_parameters()):
        real = decode(subject, heldout_prompts(subject))
        if real.accepted >= _NEARLY_ALL * heads.draft_steps:
            return good(
                f"The weights equal the warm start: {real.accepted:.2f} of {heads.draft_steps} "
                "drafts per round are accepted without any training.",
                accepted=real.accepted,
            )
        return bad(
            "The heads equal the warm start: training never improved them.",
            "See train/metrics.jsonl: raise train.minutes or train.steps, lower train.lr if the loss rose.",
            stage="training",
        )
    return good("Training changed the weights.")


def untrained(config: HeadConfig, vocabulary_D: Tensor, target: Target) -> DraftHead:
    with torch.random.fork_rng(devices=[]):
        heads = family(config.family)(config).to(target.device)
        heads.set_draft_vocabulary(vocabulary_D)
        heads.warm_start(target)
    return heads


def equality(subject: Subject) -> Finding:
    """Check that drafting gives the logits of the training unroll, at the same positions, at every step."""
    target, heads = subject.target, _compared_heads(subject)
    heads.float().bind(target)  # in bfloat16, rounding errors grow from step to step like a misalignment
    try:
        items = [(item, *_compared_logits(target, heads, item)) for item in subject.heldout]
    finally:
        heads.to(target.dtype).bind(target)
    compared, largest = 0, 0.0
    for item, trained, drafted in items:
        for rounds, (origin, steps) in enumerate(drafted.items()):
            if origin not in trained:
                continue
            compared += 1
            for step, (drafted_D, trained_D) in enumerate(zip(steps, trained[origin], strict=True)):
                difference = _difference(drafted_D, trained_D)
                largest = max(largest, difference)
                if difference > _TOLERANCE:
                    return bad(
                        f"Drafting does not match training: after the prefill and {rounds} committed "
                        f"rounds, the logits of draft {step + 1} of {heads.draft_steps} differ from the training "
                        f"unroll at the same position ({difference:.1%} of the largest; token {origin} of "
                        f"{item.id!r}).",
                        "Fix the family in heads/: `prefill` or `unroll` if the first draft after the prefill is "
                        "wrong, `commit` if it is wrong after a committed round, `draft_step` (tokens, positions, "
                        "norms, feedback) if a later draft is wrong.",
                        step=step,
                        origin=origin,
                        observed_rounds=rounds,
                        difference=difference,
                    )
    if not compared:
        raise _too_short(heads)
    sentence = f"Drafting equals the training unroll at {compared} positions, in all {heads.draft_steps} steps."
    return good(sentence, positions=compared, difference=largest)


def _difference(drafted_D: Tensor, trained_D: Tensor) -> float:
    """Return the largest difference of drafts that neither excludes (-inf), relative to their largest logit. Infinite
    if the excluded drafts differ by more than two candidates that nearly tie."""
    one_D, other_D = drafted_D.isneginf(), trained_D.isneginf()
    if int((one_D != other_D).sum()) > 2:
        return inf
    kept_D = ~(one_D | other_D)
    if not kept_D.any():
        return 0.0
    scale = trained_D[kept_D].abs().max().clamp_min(1e-30)
    return float((drafted_D - trained_D)[kept_D].abs().max() / scale)


def _compared_heads(subject: Subject) -> DraftHead:
    """Return the trained heads, or random heads of the recipe if there are none: misalignment shows in both."""
    if subject.heads_folder is not None or subject.recipe is None:
        return subject.heads
    config = make_config(subject.recipe.heads, subject.target)
    vocabulary_D = torch.arange(config.draft_vocab_size or subject.target.vocab_size)
    return random_weights(untrained(config, vocabulary_D, subject.target))


def _compared_logits(target: Target, heads: DraftHead, item: Conversation) -> tuple[Steps, Steps]:
    """Return the logits of the training unroll and of drafting."""
    hidden = target.hidden_states([item.tokens], heads.aux_layers)[0]
    states = {layer: state_TE[None].float() for layer, state_TE in hidden.items()}
    return _unroll(target, heads, item, states), _draft(target, heads, item, states)


@torch.no_grad()
def _unroll(target: Target, heads: DraftHead, item: Conversation, states: dict[int, Tensor]) -> Steps:
    """Compute the training unroll's logits, at origins that have all steps."""
    batch = HeadBatch(
        torch.tensor([list(item.tokens)], device=target.device),
        torch.tensor([list(item.supervised)], dtype=torch.bool),
        states,
    )
    origins = set(_origins(item))
    steps: Steps = {}
    for prediction in heads.unroll(batch):
        rows = [row for row, origin in enumerate(prediction.origin_M.tolist()) if origin in origins]
        for row, logits_D in zip(rows, prediction.rows(rows).logits_MD.float(), strict=True):
            steps.setdefault(int(prediction.origin_M[row]), []).append(logits_D)
    return {origin: logits for origin, logits in steps.items() if len(logits) == heads.draft_steps}


def _origins(item: Conversation) -> list[int]:
    """Return the last token read when each round of `_ROUNDS` drafts, in the first answer."""
    start, stop = item.supervised_spans[0]
    return [origin for origin in accumulate(_ROUNDS, initial=start - 1) if 0 <= origin < stop]


@torch.no_grad()
def _draft(target: Target, heads: DraftHead, item: Conversation, states: dict[int, Tensor]) -> Steps:
    """Draft along this text as decoding does: a prefill, then round after round."""
    tokens, steps = list(item.tokens), Steps()
    origins = [origin for origin in _origins(item) if origin + heads.draft_steps < len(tokens)]
    if not origins:
        return steps
    length = origins[0] + 1
    session = heads.prefill([tokens[:length]], {layer: state_BTE[:, :length] for layer, state_BTE in states.items()})
    level_BW = torch.zeros(1, 1, dtype=torch.long)
    for origin in origins:
        if origin >= length:
            committed = {layer: state_BTE[:, length : origin + 1] for layer, state_BTE in states.items()}
            heads.commit(session, Committed.of([tokens[length : origin + 1]], committed, target.device))
            length = origin + 1
        steps[origin] = []
        for depth in range(heads.draft_steps):
            token_BW = torch.tensor([[tokens[origin + 1 + depth]]], device=target.device)
            steps[origin].append(heads.draft_step(session, token_BW, level_BW, depth)[0, 0].float())
    return steps


def acceptance(subject: Subject) -> Finding:
    """Check that decoding reaches the acceptance that training predicts, and that it is high enough."""
    heads = subject.heads
    real = decode(subject, heldout_prompts(subject))
    figures: dict[str, Any] = {"first_draft": real.first, "accepted": real.accepted}
    figures["accepted_as_predicted"] = real.predicted
    drafts = f"{heads.draft_steps} drafts per round"
    if real.accepted < 0.75 * real.predicted - 0.05:
        return bad(
            f"Only decoding is low: on the same texts the training forward predicts {real.predicted:.2f} accepted of "
            f"{drafts}, decoding accepts {real.accepted:.2f}. Training is not the problem.",
            "Drafting does not match training: see equality, and load the heads with the target they were trained on.",
            **figures,
        )
    if real.first < _MIN_FIRST:
        return bad(
            f"Training accuracy itself is low: on answers to held-out prompts the first draft is right in "
            f"{real.first:.0%} of cases, and {real.predicted:.2f} of {drafts} would be accepted. Decoding matches: it "
            f"accepts {real.accepted:.2f}.",
            "Train longer (train.minutes, train.steps) while validation improves (train/metrics.jsonl), then on more "
            "conversations (data.conversations), or another family or depth.",
            stage="training",
            **figures,
        )
    if subject.question_prompts:
        on_questions = decode(subject, subject.question_prompts).accepted
        figures["accepted_on_questions"] = on_questions
        if on_questions < 0.6 * real.accepted - 0.05:
            return bad(
                f"The data are too narrow for these questions: {on_questions:.2f} of {drafts} are accepted on them, "
                f"{real.accepted:.2f} on held-out prompts of the run.",
                "Train on prompts like these: data.prompts=FILE, data.seed_prompts=broad, or more data.conversations.",
                stage="data",
                **figures,
            )
    return good(
        f"Decoding accepts {real.accepted:.2f} of {drafts}; the training forward predicts {real.predicted:.2f}.",
        **figures,
    )


def heldout_prompts(subject: Subject) -> list[list[int]]:
    return [list(item.tokens[: item.supervised.index(True)]) for item in subject.heldout]


class Acceptance(NamedTuple):
    """Drafts accepted per round of a chain, the training forward's prediction, and its accuracy at the first draft."""

    accepted: float
    predicted: float
    first: float


def decode(subject: Subject, prompts: Sequence[Sequence[int]]) -> Acceptance:
    """Decode after these prompts, drafting a chain of full depth in every round."""
    target, heads = subject.target, subject.heads
    chain = TreeShape.chain(heads.draft_steps)
    loop = DecodeLoop(target, HeadDrafter(heads, chain, "chain"))
    options = DecodeOptions(max_new_tokens=32 if subject.quick else 96, draft="on")
    prompts = [prompt for prompt in prompts if len(prompt) + options.max_new_tokens <= target.max_length]
    rows = [loop.generate([prompt], options)[0] for prompt in prompts]
    if error := next((row.drafter_error for row in rows if row.drafter_error), None):
        raise UserError(
            f"The drafter fails in decoding ({error}); decoding then continues without drafts.",
            "Fix the family's prefill, draft_step (depth_logits) or commit.",
        )
    accepted = [done.emitted - 1 for row in rows for done in row.rounds]
    mean = sum(accepted) / max(1, len(accepted))
    texts = [Text.of(prompt, row.tokens) for prompt, row in zip(prompts, rows, strict=True)]
    ranks_OK = _measure(target, heads, texts).ranks_OK
    return Acceptance(mean, replay(ranks_OK, chain.paths) - 1, float((ranks_OK[:, 0] == 0).float().mean()))


def _measure(target: Target, heads: DraftHead, texts: Sequence[Supervised]) -> Drafts:
    try:
        return measure_drafts(target, heads, texts, max_rank=1)
    except UserError:
        raise _too_short(heads) from None


def _too_short(heads: DraftHead) -> Absent:
    return Absent(f"no answer is longer than the {heads.draft_steps + 1} tokens that the heads look ahead")


def breadth(subject: Subject) -> Finding:
    """Report a chain's tokens per round, with the target's entropy, on other requests and on validation prompts by
    kind."""
    heads, target = subject.heads, subject.target
    try:
        own = [item for item in subject.conversations["validation"] if any(item.supervised)]
    except Absent:
        own = []

    def measure(texts: Sequence[Conversation]) -> list[dict[str, Any]]:
        return by_kind(_measure(target, heads, texts), [item.category for item in texts])

    others = measure(subject.other_answers)[0]
    requests = "the questions" if subject.question_prompts else "everyday requests outside the data"
    figures: dict[str, Any] = {"others": others}
    sentence = f"A chain gives {_in_words(others)} on answers to {requests}"
    if own:
        figures["own"], *kinds = measure(own[: 16 if subject.quick else None])
        figures["kinds"] = kinds
        sentence += f", {_in_words(figures['own'])} on the run's validation answers"
        if len(kinds) > 1:
            sentence += f", least on {kinds[0]['kind']!r}: {_in_words(kinds[0])}"
    return good(f"{sentence}. The nats are the target's entropy.", **figures)


def _in_words(row: Mapping[str, Any]) -> str:
    return f"{row['tau']:.2f} tokens per round ({row['entropy']:.2f} nats)"
