"""Losses by hand, their gradients, and the chunked sum against the plain one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.errors import UserError
from headstart.heads import HeadBatch, StepPrediction
from headstart.target import FINAL, Target
from headstart.train import losses
from headstart.train.losses import LOSSES, Lesson, Teacher, find_loss, summed, weighted

P_TARGET = [0.7, 0.2, 0.1]
Q_DRAFT = [0.5, 0.4, 0.1]
ALPHA = 0.5 + 0.2 + 0.1


def _by_hand(name: str) -> float:
    pairs = list(zip(P_TARGET, Q_DRAFT, strict=True))
    forward_kl = sum(p * math.log(p / q) for p, q in pairs)
    mix = math.exp(-3 * ALPHA)
    return {
        "soft_ce": -sum(p * math.log(q) for p, q in pairs),
        "hard_ce": -math.log(0.5),
        "reverse_kl": sum(q * math.log(q / p) for p, q in pairs),
        "tv": 1 - ALPHA,
        "nla": -math.log(ALPHA),
        "lk": mix * forward_kl + (1 - mix) * (1 - ALPHA),
    }[name]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_the_value_computed_by_hand(name: str) -> None:
    logits_MD = torch.tensor([Q_DRAFT, P_TARGET]).log() + 3.0  # a constant changes nothing
    loss_M = LOSSES[name](logits_MD, torch.tensor([P_TARGET, P_TARGET]))
    assert loss_M.shape == (2,)
    assert loss_M[0].item() == pytest.approx(_by_hand(name), abs=1e-6)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("hard_ce", "soft_ce")])
def test_a_perfect_draft_costs_nothing(name: str) -> None:
    probs_MD = torch.tensor([P_TARGET])
    assert LOSSES[name](probs_MD.log(), probs_MD).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_right_and_finite_in_the_extreme(name: str) -> None:
    torch.manual_seed(0)
    logits_MD = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    probs_MD = torch.randn(3, 5, dtype=torch.float64).softmax(-1)
    if name == "lk":  # its weight is held fixed on purpose, which a numerical gradient does not see
        with torch.no_grad():
            weight_M = torch.exp(-3 * torch.minimum(logits_MD.softmax(-1), probs_MD).sum(-1))

        def fixed(logits: Tensor) -> Tensor:
            forward_kl = (probs_MD * (probs_MD.log() - logits.log_softmax(-1))).sum(-1)
            return weight_M * forward_kl + (1 - weight_M) * losses.tv(logits, probs_MD)

        expected = torch.autograd.grad(fixed(logits_MD).sum(), logits_MD)[0]
        torch.testing.assert_close(torch.autograd.grad(losses.lk(logits_MD, probs_MD).sum(), logits_MD)[0], expected)
    else:
        assert torch.autograd.gradcheck(lambda logits: LOSSES[name](logits, probs_MD), logits_MD)
    far = torch.tensor([[200.0, -200.0, 0.0]], requires_grad=True)
    loss_M = LOSSES[name](far, torch.tensor([[0.0, 1.0, 0.0]]))
    loss_M.sum().backward()
    assert loss_M.isfinite().all()
    assert far.grad is not None and far.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunked_sum_equals_the_plain_sum(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_CHUNK", {"cpu": 3 * 11})  # 3 rows at a time: the last chunk is cut
    torch.manual_seed(0)
    lesson = Lesson(torch.randn(9, 11), torch.arange(-2, 9).clamp_min(-1))
    source_M = torch.tensor([2, 3, 3, 5, 8, 10, 7])
    logits_MD = torch.randn(7, 11).to(dtype).requires_grad_()
    total = summed(LOSSES[name], logits_MD, lesson, source_M)
    (3 * total).backward()
    fast = logits_MD.grad
    plain = logits_MD.detach().float().requires_grad_()
    reference = LOSSES[name](plain, lesson.logits_SD[source_M - 2].softmax(-1)).sum()
    (3 * reference).backward()
    assert fast is not None and plain.grad is not None and fast.dtype == dtype
    torch.testing.assert_close(total, reference)
    # In bfloat16 the gradient is rounded when it is kept and when it is scaled: twice 2**-9.
    torch.testing.assert_close(fast.float(), plain.grad, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-5)


def test_a_step_without_predictions_costs_nothing_and_has_a_gradient() -> None:
    lesson = Lesson(torch.randn(2, 5), torch.tensor([0, 1]))
    logits_MD = torch.zeros(0, 5, requires_grad=True)
    total = summed(losses.soft_ce, logits_MD, lesson, torch.zeros(0, dtype=torch.long))
    total.backward()
    assert total.item() == 0
    assert logits_MD.grad is not None and logits_MD.grad.shape == (0, 5)


def test_a_source_that_no_supervised_token_follows_is_refused() -> None:
    lesson = Lesson(torch.randn(1, 5), torch.tensor([-1, 0]))
    with pytest.raises(AssertionError, match="supervised"):
        summed(losses.soft_ce, torch.zeros(1, 5), lesson, torch.tensor([0]))


def test_later_steps_weigh_less() -> None:
    lesson = Lesson(torch.randn(3, 5), torch.arange(3))
    logits_MD, source_M = torch.randn(3, 5), torch.arange(3)
    steps = [StepPrediction(logits_MD, source_M, source_M)] * 3
    one = summed(losses.tv, logits_MD, lesson, source_M)
    torch.testing.assert_close(weighted(steps, losses.tv, lesson, 0.5), one * (1 + 0.5 + 0.25))


def test_the_teacher_says_what_the_target_says_cut_to_the_draft_vocabulary(tiny_target: Target) -> None:
    tokens = [[5, 9, 30, 7, 8], [11, 4, 2]]
    rows = tiny_target.hidden_states(tokens, [FINAL])
    final_BTE = torch.nn.utils.rnn.pad_sequence([row[FINAL] for row in rows], batch_first=True)
    supervised_BT = torch.tensor([[False, False, False, True, True], [False, True, True, False, False]])
    ids_D = torch.tensor([2, 7, 8, 30])
    lesson = Teacher(tiny_target, ids_D).read(HeadBatch(torch.zeros(2, 5).long(), supervised_BT, {FINAL: final_BTE}))
    assert lesson.row_X.tolist() == [-1, -1, 0, 1, -1, 2, 3, -1, -1, -1]
    with tiny_target.stock() as model:
        expected = model(torch.tensor([tokens[0]])).logits[0, 2:4][:, ids_D]
    torch.testing.assert_close(lesson.logits_SD[:2], expected, rtol=1e-4, atol=1e-5)


def test_the_teacher_adds_the_bias_of_an_lm_head(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    head = torch.nn.Linear(tiny_target.hidden_size, tiny_target.vocab_size)
    monkeypatch.setattr(tiny_target.model, "get_output_embeddings", lambda: head)
    final_1TE = torch.randn(1, 3, tiny_target.hidden_size)
    batch = HeadBatch(torch.zeros(1, 3).long(), torch.tensor([[False, True, True]]), {FINAL: final_1TE})
    for ids_D in (torch.tensor([4, 6]), torch.arange(tiny_target.vocab_size)):
        lesson = Teacher(tiny_target, ids_D).read(batch)
        torch.testing.assert_close(lesson.logits_SD, F.linear(final_1TE[0, :2], head.weight, head.bias)[:, ids_D])


def test_an_unknown_loss_names_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'soft_ce'"):
        find_loss("softce")
