"""Losses by hand, their gradients, and the blockwise sum against the plain one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.base import HeadBatch, StepPrediction
from headstart.heads.candidates import Candidates
from headstart.model.lm_head import LogitTransform
from headstart.model.model import Target
from headstart.recipes.sections import LossName
from headstart.replay.patch import FINAL
from headstart.train import fused_loss, losses
from headstart.train.fused_loss import (
    LossTokens,
    Teacher,
    TeacherLogits,
    alphas,
    batch_loss,
    choose_loss_tokens,
    sum_losses,
)
from headstart.train.losses import LOSSES, smooth_l1
from tests.spies import spy
from tests.train.plain_loss import sum_losses_plain
from tests.train.stores import two_texts
from tests.train.test_long_texts import Largest

P_TARGET = [0.7, 0.2, 0.1]
Q_DRAFT = [0.5, 0.4, 0.1]
ALPHA = 0.5 + 0.2 + 0.1


def _by_hand(name: str) -> float:
    pairs = list(zip(P_TARGET, Q_DRAFT, strict=True))
    return {
        "soft_ce": -sum(p * math.log(q) for p, q in pairs),
        "hard_ce": -math.log(0.5),
        "tv_ce": -0.1 * sum(p * math.log(q) for p, q in pairs) + 0.9 * sum(abs(p - q) for p, q in pairs),
        "half_l1": -0.5 * sum(p * math.log(q) for p, q in pairs) + 0.5 * sum(abs(p - q) for p, q in pairs),
    }[name]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_match_values_by_hand(name: str) -> None:
    logits_MD = torch.tensor([Q_DRAFT, P_TARGET]).log() + 3.0  # a constant changes nothing
    loss_M = LOSSES[name](logits_MD, torch.tensor([P_TARGET, P_TARGET]))
    assert loss_M.shape == (2,)
    assert loss_M[0].item() == pytest.approx(_by_hand(name), abs=1e-6)


def test_smooth_l1_is_quadratic_below_one_and_linear_above() -> None:
    feature_ME, final_ME = torch.tensor([[0.5, 3.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert smooth_l1(feature_ME, final_ME).tolist() == [pytest.approx((0.5 * 0.5**2 + 3.0 - 0.5) / 2), 0]


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_right_and_finite_at_extremes(name: str) -> None:
    torch.manual_seed(0)
    logits_MD = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    probs_MD = torch.randn(3, 5, dtype=torch.float64).softmax(-1)
    assert torch.autograd.gradcheck(lambda logits: LOSSES[name](logits, probs_MD), logits_MD)
    far = torch.tensor([[200.0, -200.0, 0.0]], requires_grad=True)
    loss_M = LOSSES[name](far, torch.tensor([[0.0, 1.0, 0.0]]))
    loss_M.sum().backward()
    assert loss_M.isfinite().all()
    assert far.grad is not None and far.grad.isfinite().all()


@pytest.mark.parametrize(("name", "distance"), [("soft_ce", 0.0), ("tv_ce", 0.9), ("half_l1", 0.5)])
@pytest.mark.parametrize("mixed", [False, True])
def test_custom_gradients_match_autograd(name: str, distance: float, mixed: bool) -> None:
    """In float32, also within autocast. Some tokens have a target probability of zero, and one draft equals the
    target."""
    torch.manual_seed(0)
    logits_MD = torch.randn(6, 40).mul(4).requires_grad_()
    probs_MD = torch.where(torch.rand(6, 40) < 0.5, -torch.inf, torch.randn(6, 40).mul(4)).softmax(-1)
    probs_MD[5] = logits_MD[5].detach().softmax(-1)
    with torch.autocast("cpu", enabled=mixed):
        loss_M = LOSSES[name](logits_MD, probs_MD)
    log_probs_MD = logits_MD.log_softmax(-1)
    plain_M = (distance - 1) * (probs_MD * log_probs_MD).sum(-1)
    plain_M = plain_M + distance * (log_probs_MD.exp() - probs_MD).abs().sum(-1)
    torch.testing.assert_close(loss_M, plain_M, atol=1e-5, rtol=1e-5)  # of logits up to 15 in float32
    ours, autograds = (torch.autograd.grad(each_M.sum(), logits_MD)[0] for each_M in (loss_M, plain_M))
    torch.testing.assert_close(ours[:5], autograds[:5], atol=1e-6, rtol=1e-5)
    assert ours[5].abs().max() < 1e-6, "the draft equals the target"


# -- the blockwise sum -----------------------------------------------------------------------------------------------

ROWS, DRAFTS, WIDTH = 23, 12, 6


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of up to 5 rows, computed 2 rows per chunk: neither divides the number of rows."""
    monkeypatch.setattr(fused_loss, "_BLOCK", {"cpu": 5 * DRAFTS})
    monkeypatch.setattr(fused_loss, "_BLOCK_ROWS", 1)
    monkeypatch.setattr(fused_loss, "_CHUNK", {"cpu": 2 * DRAFTS + 1})


def _teacher_logits(rows: int, drafts: int = DRAFTS, size: int = 4) -> TeacherLogits:
    """Random teacher logits of flat positions 2 .. rows + 1."""
    return TeacherLogits(torch.randn(rows, drafts), torch.randn(rows, size), torch.arange(-2, rows).clamp_min(-1))


def _predicted(hidden_MH: Tensor, lm_head_DH: Tensor, teacher_M: Tensor, **of_lm_head: Any) -> StepPrediction:
    return StepPrediction(hidden_MH, lm_head_DH, teacher_M, teacher_M, **of_lm_head)


def _problem(trained: bool, pairs: bool = False) -> tuple[StepPrediction, TeacherLogits, Tensor]:
    torch.manual_seed(0)
    hidden_MH = torch.randn(ROWS, WIDTH, requires_grad=True)
    lm_head_DH = torch.randn(DRAFTS, WIDTH, requires_grad=trained)
    teacher_logits, teacher_M = _teacher_logits(9), torch.randint(2, 11, (ROWS,))
    prediction = _predicted(hidden_MH, lm_head_DH, teacher_M)
    if pairs:
        parents_MWR, table_DR = (torch.randn(*shape, requires_grad=True) for shape in ((ROWS, 1, 3), (DRAFTS, 3)))
        prediction = replace(prediction, candidates=Candidates(parents_MWR, table_DR, 4))
    return prediction, teacher_logits, torch.rand(ROWS)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("pairs", [False, True], ids=["logits", "pairs"])
@pytest.mark.usefixtures("small_blocks")
def test_blockwise_sum_equals_the_plain_sum(name: str, trained: bool, mixed: bool, pairs: bool) -> None:
    results = []
    for way in (sum_losses, sum_losses_plain):
        prediction, teacher_logits, weight_M = _problem(trained, pairs)
        with torch.autocast("cpu", dtype=torch.bfloat16) if mixed else nullcontext():
            total = way(LOSSES[name], prediction, teacher_logits, weight_M)
        (3 * total).backward()
        hidden_MH, lm_head_DH = prediction.hidden_MH, prediction.lm_head_DH
        assert (lm_head_DH.grad is not None) == trained
        results.append([total.detach(), hidden_MH.grad, *([lm_head_DH.grad] if trained else [])])
        if prediction.candidates is not None:
            results[-1] += [prediction.candidates.parents_MWR.grad, prediction.candidates.table_DR.grad]
    for fast, plain in zip(*results, strict=True):
        assert fast.dtype == plain.dtype == torch.float32
        # float32: sums in another order. bfloat16: gradients of logits and products are rounded to 2**-9 of their size,
        # once before the factor 3 and once after it, so the two differ by a few roundings.
        share = 1e-2 if mixed else 1e-6
        torch.testing.assert_close(fast, plain, rtol=share, atol=share * plain.abs().max().item())


def test_pairwise_loss_is_over_the_candidates_and_the_targets_token() -> None:
    """By hand: two candidates, of which the less likely one makes room for the target's token."""
    table_DR, parents_MWR = torch.tensor([[0.0], [1.0], [0.5]]), torch.tensor([[[2.0]]])
    logits_MD, probs_MD = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.1, 0.3, 0.6]])
    candidates = Candidates(parents_MWR, table_DR, 2)
    assert candidates.top(logits_MD, torch.tensor([1])).tolist() == [[0, 1]]
    prediction = replace(_predicted(logits_MD, torch.eye(3), torch.tensor([0])), candidates=candidates)
    teacher_logits = TeacherLogits(probs_MD.log(), torch.zeros(1, 4), torch.tensor([0]))
    total, plain = (
        sum_losses(losses.soft_ce, one, teacher_logits, torch.ones(1))
        for one in (prediction, replace(prediction, candidates=None))
    )
    q_draft = [math.exp(3.0), math.exp(1.0 + 2.0 * 0.5)]
    wanted = -sum(p * math.log(q / sum(q_draft)) for p, q in zip((0.1 / 0.7, 0.6 / 0.7), q_draft, strict=True))
    assert (total - plain).item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("scheme", ["exponential", "dpace"])
@pytest.mark.usefixtures("small_blocks")
def test_full_logits_are_never_materialised(scheme: Any) -> None:
    torch.manual_seed(0)
    lm_head_DH = torch.randn(DRAFTS, 2, requires_grad=True)
    origin_M = torch.arange(40)
    hidden_MH = torch.randn(40, 2, requires_grad=True)
    steps = [StepPrediction(hidden_MH, lm_head_DH, origin_M + step, origin_M) for step in range(4)]
    teacher_logits = TeacherLogits(torch.randn(43, DRAFTS), torch.zeros(43, 1), torch.arange(43))
    with Largest() as largest:
        batch_loss(steps, losses.soft_ce, teacher_logits, 0.8, scheme).backward()
    assert largest.numbers <= 4 * 40 * 2 < 40 * DRAFTS, "hidden states of all steps are larger than any logits"
    with Largest() as largest:
        sum_losses_plain(losses.soft_ce, steps[0], teacher_logits, torch.ones(40))
    assert largest.numbers == 40 * DRAFTS, "the plain sum has a step's logits"


def test_float16_gradients_do_not_overflow_before_scaling() -> None:
    """400 rows of size 1000 with equal errors: their products with the gradient sum beyond float16's 65504."""
    hidden_MH = torch.full((400, 2), 1000.0, requires_grad=True)
    lm_head_DH = torch.tensor([[1.0, 0.0], [0.0, 0.0]], requires_grad=True)
    teacher_logits = TeacherLogits(torch.tensor([[-60.0, 0.0]]), torch.zeros(1, 1), torch.tensor([0]))
    with torch.autocast("cpu", dtype=torch.float16):
        teacher_M, weight_M = torch.zeros(400, dtype=torch.long), torch.ones(400)
        total = sum_losses(losses.soft_ce, _predicted(hidden_MH, lm_head_DH, teacher_M), teacher_logits, weight_M)
    (1e-3 * total).backward()
    assert lm_head_DH.grad is not None
    torch.testing.assert_close(lm_head_DH.grad, torch.tensor([[400.0, 400.0], [-400.0, -400.0]]))


def test_empty_step_has_zero_loss_and_gradients() -> None:
    teacher_logits = TeacherLogits(torch.randn(2, 5), torch.zeros(2, 1), torch.tensor([0, 1]))
    hidden_MH, lm_head_DH = torch.zeros(0, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    nowhere = torch.zeros(0, dtype=torch.long)
    total = sum_losses(losses.soft_ce, _predicted(hidden_MH, lm_head_DH, nowhere), teacher_logits, torch.zeros(0))
    total.backward()
    assert total.item() == 0
    assert hidden_MH.grad is not None and hidden_MH.grad.shape == (0, 3)
    assert lm_head_DH.grad is not None and not lm_head_DH.grad.any()


def test_source_without_a_supervised_successor_is_refused() -> None:
    teacher_logits = TeacherLogits(torch.randn(1, 5), torch.zeros(1, 1), torch.tensor([-1, 0]))
    prediction = _predicted(torch.zeros(1, 3), torch.zeros(5, 3), torch.tensor([0]))
    with pytest.raises(RuntimeError, match="supervised"):
        sum_losses(losses.soft_ce, prediction, teacher_logits, torch.ones(1))


@pytest.mark.parametrize("logit_transform", [None, LogitTransform(divisor=2.0, cap=3.0)], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_frozen_columns_get_no_gradient_and_alpha_is_noted(logit_transform: LogitTransform | None) -> None:
    torch.manual_seed(0)
    hidden_MH, lm_head_DH = torch.randn(40, 5, requires_grad=True), torch.randn(DRAFTS, 5, requires_grad=True)
    teacher_logits = TeacherLogits(torch.randn(40, DRAFTS), torch.zeros(40, 1), torch.arange(40))
    prediction = _predicted(hidden_MH, lm_head_DH, torch.arange(40), logit_transform=logit_transform, frozen_columns=3)
    operands = (losses.soft_ce, prediction, teacher_logits, torch.rand(40))
    every = [hidden_MH, lm_head_DH]
    wanted = torch.autograd.grad(sum_losses_plain(*operands), every)
    alpha_M = torch.zeros(40)
    found = torch.autograd.grad(sum_losses(*operands, alpha_M), every)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1][:, 3:], wanted[1][:, 3:], rtol=1e-5, atol=1e-5)
    assert not found[1][:, :3].any()
    torch.testing.assert_close(alpha_M, alphas(prediction, teacher_logits))


@pytest.mark.parametrize("scheme", ["exponential", "dpace"])
def test_confidence_learns_the_shared_mass(scheme: Any) -> None:
    """Its gradient is sigmoid - alpha, times the draft's weight."""
    torch.manual_seed(0)
    lm_head_DH, origin_M = torch.randn(7, 3), torch.arange(20)
    teacher_logits = TeacherLogits(torch.randn(22, 7), torch.zeros(22, 1), torch.arange(22))
    confidences = [torch.randn(20, requires_grad=True) for _ in range(2)]
    steps = [
        StepPrediction(torch.randn(20, 3), lm_head_DH, origin_M + step + 1, origin_M, confidence_M=one)
        for step, one in enumerate(confidences)
    ]
    bare = [replace(step, confidence_M=None) for step in steps]
    total = batch_loss(steps, losses.soft_ce, teacher_logits, 0.8, scheme)
    weights = fused_loss._position_weights(bare, teacher_logits, 0.8, scheme)
    shared = [alphas(step, teacher_logits) for step in steps]
    total.backward()
    missed = 0.0
    for confidence_M, alpha_M, weight_M in zip(confidences, shared, weights, strict=True):
        torch.testing.assert_close(confidence_M.grad, weight_M * (confidence_M.detach().sigmoid() - alpha_M))
        chance_M = confidence_M.detach().sigmoid()
        missed -= float((weight_M * (alpha_M * chance_M.log() + (1 - alpha_M) * (1 - chance_M).log())).sum())
    plain = batch_loss(bare, losses.soft_ce, teacher_logits, 0.8, scheme)
    assert float(total.detach() - plain) == pytest.approx(missed, rel=1e-4)


# -- the sum over a batch --------------------------------------------------------------------------------------------


def _steps(lengths: Sequence[int], lm_heads: Sequence[Tensor]) -> list[StepPrediction]:
    """Step k drafts from origins 2 .. lengths[k] + 1, as at the end of a text."""
    made = []
    for step, (length, lm_head_DH) in enumerate(zip(lengths, lm_heads, strict=True)):
        hidden_MH, origin_M = torch.randn(length, WIDTH, requires_grad=True), torch.arange(length) + 2
        made.append(StepPrediction(hidden_MH, lm_head_DH, origin_M + step, origin_M))
    return made


def _logits(prediction: StepPrediction) -> Tensor:
    return prediction.hidden_MH @ prediction.lm_head_DH.T


def _brute_force(
    steps: Sequence[StepPrediction], teacher_logits: TeacherLogits, scheme: str, step_weight: float
) -> float:
    """Sum draft by draft and prediction by prediction."""
    total = 0.0
    for origin in steps[0].origin_M.tolist():
        terms = []
        for prediction in steps:
            index = (prediction.origin_M == origin).nonzero()
            if not len(index):
                break
            draft_D = _logits(prediction)[index[0, 0]].softmax(-1)
            target_D = teacher_logits.logits_SD[prediction.teacher_M[index[0, 0]] - 2].softmax(-1)
            cost = -(target_D * draft_D.log()).sum().item()
            alpha = torch.minimum(draft_D, target_D).sum().item()
            terms.append((cost, alpha))
        for k, (cost, _) in enumerate(terms):
            if scheme == "dpace":
                reached = [math.prod(0.5 * alpha + 0.5 for _, alpha in terms[: j + 1]) for j in range(len(terms))]
                weight = sum(reached[k:])
            else:
                weight = step_weight**k
            total += weight * cost
    return total


@pytest.mark.parametrize("scheme", ["exponential", "dpace"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.usefixtures("small_blocks")
def test_batch_sum_equals_the_sum_over_drafts(scheme: Any, shared: bool) -> None:
    torch.manual_seed(1)
    heads = [torch.randn(DRAFTS, WIDTH)] * 3 if shared else [torch.randn(DRAFTS, WIDTH) for _ in range(3)]
    steps, teacher_logits = _steps([9, 8, 6], heads), _teacher_logits(12)
    with torch.no_grad():  # let the first drafts be right for a while
        teacher_logits.logits_SD[0] += 20 * F.one_hot(_logits(steps[0])[0].argmax(), DRAFTS)
        teacher_logits.logits_SD[1] += 20 * F.one_hot(_logits(steps[1])[0].argmax(), DRAFTS)
    total = batch_loss(iter(steps), losses.soft_ce, teacher_logits, 0.5, scheme)
    assert total.item() == pytest.approx(_brute_force(steps, teacher_logits, scheme, 0.5), rel=1e-5)
    total.backward()
    assert all(prediction.hidden_MH.grad is not None for prediction in steps)


def test_shared_lm_head_accumulates_over_steps() -> None:
    torch.manual_seed(0)
    shared = torch.randn(DRAFTS, WIDTH, requires_grad=True)
    apart = [shared.detach().clone().requires_grad_() for _ in range(2)]
    teacher_logits, together, separate = _teacher_logits(6), _steps([4, 3], [shared] * 2), _steps([4, 3], apart)
    for one, other in zip(together, separate, strict=True):
        other.hidden_MH = one.hidden_MH.detach().clone().requires_grad_()
    totals = [batch_loss(steps, losses.soft_ce, teacher_logits, 0.8) for steps in (together, separate)]
    torch.testing.assert_close(*totals)
    (totals[0] + totals[1]).backward()
    assert shared.grad is not None
    first, second = (one.grad for one in apart)
    assert first is not None and second is not None
    torch.testing.assert_close(shared.grad, first + second)


@pytest.mark.usefixtures("small_blocks")
def test_alpha_is_the_shared_mass() -> None:
    logits_MD = torch.tensor([Q_DRAFT, P_TARGET[::-1], P_TARGET]).log()
    teacher_logits = TeacherLogits(
        torch.tensor([P_TARGET, P_TARGET]).log(), torch.zeros(2, 1), torch.tensor([-1, 0, 1])
    )
    prediction = StepPrediction(logits_MD, torch.eye(3), torch.tensor([1, 2, 2]), torch.tensor([0, 1, 2]))
    torch.testing.assert_close(alphas(prediction, teacher_logits), torch.tensor([ALPHA, 0.1 + 0.2 + 0.1, 1.0]))


def test_drafted_features_learn_the_final_state_of_their_source() -> None:
    torch.manual_seed(0)
    steps, teacher_logits = _steps([4, 3], [torch.randn(DRAFTS, WIDTH)] * 2), _teacher_logits(5)
    features = [torch.randn(len(prediction.teacher_M), 4, requires_grad=True) for prediction in steps]
    for prediction, feature_ME in zip(steps, features, strict=True):
        prediction.feature_ME = feature_ME
    without = batch_loss(steps, losses.tv_ce, teacher_logits, 0.5)
    total = batch_loss(steps, losses.tv_ce, teacher_logits, 0.5, feature_weight=2.0)
    expected = sum(
        2.0 * 0.5**step * F.smooth_l1_loss(feature_E, teacher_logits.final_SE[source - 2])
        for step, prediction in enumerate(steps)
        for feature_E, source in zip(features[step], prediction.teacher_M, strict=True)
    )
    torch.testing.assert_close(total - without, expected)
    total.backward()
    assert all(feature_ME.grad is not None and feature_ME.grad.abs().sum() > 0 for feature_ME in features)


# -- the teacher -----------------------------------------------------------------------------------------------------


def test_teacher_reads_the_targets_logits_of_the_draft_vocabulary(tiny_target: Target) -> None:
    tokens, batch = two_texts(tiny_target)
    ids_D, final_BTE = torch.tensor([2, 7, 8, 30]), batch.states[FINAL]
    teacher_logits = Teacher(tiny_target, ids_D).logits(batch)
    assert teacher_logits.row_X.tolist() == [-1, -1, 0, 1, -1, 2, 3, -1, -1, -1]
    expected = tiny_target.model(torch.tensor([tokens[0]])).logits[0, 2:4][:, ids_D]
    torch.testing.assert_close(teacher_logits.logits_SD[:2], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(teacher_logits.final_SE, torch.cat([final_BTE[0, 2:4], final_BTE[1, :2]]))


def test_teacher_adds_the_lm_head_bias(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    head = torch.nn.Linear(tiny_target.hidden_size, tiny_target.vocab_size)
    monkeypatch.setattr(tiny_target.model, "get_output_embeddings", lambda: head)
    final_1TE = torch.randn(1, 3, tiny_target.hidden_size)
    batch = HeadBatch(torch.zeros(1, 3).long(), torch.tensor([[False, True, True]]), {FINAL: final_1TE})
    for ids_D in (torch.tensor([4, 6]), torch.arange(tiny_target.vocab_size)):
        teacher_logits = Teacher(tiny_target, ids_D).logits(batch)
        torch.testing.assert_close(
            teacher_logits.logits_SD, F.linear(final_1TE[0, :2], head.weight, head.bias)[:, ids_D]
        )


# -- sampled loss tokens ---------------------------------------------------------------------------------------------


def _taught(raised: bool, seed: int | None = None) -> Tensor:
    """Return the gradient at the LM head's input for a loss over 60 tokens, or 30 drawn by a seed."""
    generator = torch.Generator().manual_seed(0)
    hidden_ME, lm_head_DE = torch.randn(24, 8, generator=generator), torch.randn(60, 8, generator=generator)
    other_ME = (0.5 * hidden_ME + 0.5 * torch.randn(24, 8, generator=generator)).requires_grad_()
    table = TeacherLogits(hidden_ME @ lm_head_DE.T, torch.zeros(24, 1), torch.arange(24))
    assert table.logits_SD is not None
    if seed is not None:
        counts_D = torch.bincount(table.logits_SD.argmax(-1), minlength=60)
        over = choose_loss_tokens(table.logits_SD[::4], counts_D, 30, [seed])
        table = _over(table, over if raised else over._replace(shift_L=torch.zeros(30)))
    total = batch_loss([_predicted(other_ME, lm_head_DE, torch.arange(24))], losses.soft_ce, table, 0.8)
    return torch.autograd.grad(total, other_ME)[0]


def _over(table: TeacherLogits, over: LossTokens) -> TeacherLogits:
    assert table.logits_SD is not None
    return replace(table, logits_SD=over.shift(table.logits_SD[:, over.ids_L]), loss_tokens=over)


def test_loss_over_some_tokens_is_unbiased() -> None:
    """Drawn tokens are weighted for those not drawn. Without the weights, the mean of all draws is further off."""
    whole = _taught(True)
    apart = [
        float((torch.stack([_taught(raised, seed) for seed in range(300)]).mean(0) - whole).norm() / whole.norm())
        for raised in (True, False)
    ]
    assert apart[0] < 0.5 * apart[1] and apart[0] < 0.1, apart


def _batch(target: Target, answers: int) -> HeadBatch:
    torch.manual_seed(0)
    tokens_BT = torch.randint(4, target.vocab_size, (1, answers + 1))
    supervised_BT = torch.arange(answers + 1)[None] > 0
    return HeadBatch(tokens_BT, supervised_BT, {FINAL: torch.randn(1, answers + 1, target.hidden_size)})


def test_loss_tokens_depend_on_the_seed_alone(tiny_target: Target) -> None:
    """They always include the answers' own tokens."""
    ids_D, batch = torch.arange(4, tiny_target.vocab_size, 2), _batch(tiny_target, 12)

    def read(count: int, seed: int) -> TeacherLogits:
        return Teacher(tiny_target, ids_D, count).logits(batch, [seed])

    whole_SD = read(0, 0).logits_SD
    for count in (len(ids_D), len(ids_D) + 1):  # all of them
        assert read(count, 0).loss_tokens is None and torch.equal(read(count, 0).logits_SD, whole_SD)
    first, again, other = (read(20, seed) for seed in (0, 0, 1))
    assert torch.equal(first.loss_tokens.ids_L, again.loss_tokens.ids_L)
    assert not torch.equal(first.loss_tokens.ids_L, other.loss_tokens.ids_L)
    assert len(set(first.loss_tokens.ids_L.tolist())) == 20
    torch.testing.assert_close(first.logits_SD, whole_SD[:, first.loss_tokens.ids_L] + first.loss_tokens.shift_L)
    said = {token for token in batch.tokens_BT[0, 1:].tolist() if token in set(ids_D.tolist())}
    assert said and said <= set(ids_D[first.loss_tokens.ids_L[:16]].tolist())


def test_long_batches_pick_loss_tokens_by_stride(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's size limits the positions that vote. Whether the loss itself gets a table changes no loss token."""
    ids_D, batch = torch.arange(4, tiny_target.vocab_size), _batch(tiny_target, 40)
    monkeypatch.setattr(fused_loss, "_MIN_POSITIONS", 10)
    rows = spy(monkeypatch, fused_loss, "choose_loss_tokens", lambda logits_SD, *_: len(logits_SD))
    whole = Teacher(tiny_target, ids_D, 20).logits(batch)
    monkeypatch.setattr(fused_loss, "_TABLE", {"cpu": 40 * 20})
    shorter = Teacher(tiny_target, ids_D, 20).logits(batch)
    monkeypatch.setattr(fused_loss, "_TABLE", {"cpu": 40 * 20 - 1})
    none = Teacher(tiny_target, ids_D, 20).logits(batch)
    stride = -(-40 * len(ids_D) // (40 * 20))
    assert rows == [10, -(-40 // stride), -(-40 // stride)] and stride > 4
    assert whole.logits_SD is not None and shorter.logits_SD is not None and none.logits_SD is None
    table_SL, at_B = none.table(torch.arange(40))
    assert torch.equal(table_SL[at_B], shorter.logits_SD)


def test_logit_shifts_are_not_rounded() -> None:
    over = LossTokens(torch.arange(2), torch.tensor([0.0, math.log(16)]))
    logits_L = torch.tensor([20.0, 30.0], dtype=torch.bfloat16)
    assert torch.equal(over.shift(logits_L), logits_L.float() + over.shift_L)


def test_shared_lm_head_is_cut_once() -> None:
    torch.manual_seed(0)
    shared, table = torch.randn(DRAFTS, WIDTH, requires_grad=True), _teacher_logits(6)
    ids_L, shift_L = over = choose_loss_tokens(table.logits_SD, torch.zeros(DRAFTS), 10, [0])
    cut = _over(table, over)
    steps = cut.restrict(_steps([4, 3], [shared] * 2))
    assert steps[0].lm_head_DH is steps[1].lm_head_DH
    assert torch.equal(steps[0].lm_head_DH, shared[ids_L])
    bias_D, logit_transform = torch.randn(DRAFTS), LogitTransform(cap=3.0)
    (capped,) = cut.restrict([replace(steps[0], lm_head_DH=shared, bias_D=bias_D, logit_transform=logit_transform)])
    expected = logit_transform(F.linear(capped.hidden_MH, shared[ids_L], bias_D[ids_L])) + shift_L
    torch.testing.assert_close(capped.logits_MD, expected)


def test_pairwise_scores_are_not_shifted() -> None:
    """The unlikely tokens are equally likely, so sampling some of them changes neither the loss over the candidates nor
    alpha. Shifted by log 10, the sampled tokens would be the best candidates."""
    torch.manual_seed(0)
    over = LossTokens(torch.arange(8), torch.tensor([0.0] * 6 + [math.log(10)] * 2))  # 2 of 20
    target_MD, draft_MD = torch.zeros(7, 26), torch.zeros(7, 26)
    for logits_MD in (target_MD, draft_MD):
        logits_MD[:, :6] = torch.rand(7, 6) + 0.1
    draft_MD[:3, 6] = 2.0  # a sampled token that is a candidate by itself
    parents_MWR, table_DR = torch.randn(7, 1, 3), torch.randn(26, 3)
    table = TeacherLogits(target_MD, torch.zeros(7, 4), torch.arange(7))
    results = []
    for teacher_logits in (table, _over(table, over)):
        inputs = [one.clone().requires_grad_() for one in (draft_MD, parents_MWR, table_DR)]
        plain = _predicted(inputs[0], torch.eye(26), torch.arange(7))
        steps = [replace(plain, candidates=Candidates(*inputs[1:], 3))]
        of_pairs = batch_loss(steps, losses.soft_ce, teacher_logits, 1.0)
        of_pairs = of_pairs - batch_loss([plain], losses.soft_ce, teacher_logits, 1.0)
        gradients = torch.autograd.grad(of_pairs, inputs)
        results.append([of_pairs.detach(), *gradients, alphas(*teacher_logits.restrict(steps), teacher_logits)])
    for exact, sampled in zip(*results, strict=True):
        torch.testing.assert_close(sampled, exact)


def test_recipes_name_every_loss() -> None:
    assert set(get_args(LossName)) == set(LOSSES)
