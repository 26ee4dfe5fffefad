"""The training loop on a tiny target: losses, gradients, empty steps and refusals."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import weakref
from functools import cache, partial
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter

from headstart.data.states.store import StateStore
from headstart.errors import UserError
from headstart.heads.base import HeadBatch, families
from headstart.heads.io import load_heads
from headstart.heads.parts.residual import head_hidden
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.support import regions
from headstart.train import trainer
from headstart.train.batches import count_predictions, read_batch
from headstart.train.fused_loss import Teacher, batch_loss
from headstart.train.losses import LOSSES
from headstart.train.starting_heads import build_heads
from headstart.train.wrapped import Unrolled
from tests.tiny import tiny_model
from tests.train.conftest import MakeRecipe, Train, before_step, on_read
from tests.train.plain_loss import sum_losses_plain
from tests.train.results import Killed, assert_same, metrics, weights
from tests.train.stores import Masked, Silent, Unsupervised
from tests.train.test_golden import HEADS


def test_run_leaves_heads_metrics_and_a_result(run: Train, tmp_path: Path, tiny_target: Target) -> None:
    # Hard labels: soft labels of a random target are nearly flat, and the linear start already reaches their entropy.
    result = run(tmp_path, steps=60, eval_every=20, save_every=20, loss="hard_ce")
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 20, 40, 60]
    assert rows[1]["loss"] > rows[3]["loss"], "it learns"
    assert result.steps == 60 and result.heads_folder == tmp_path / "best"
    assert result.metrics["tau"] == max(row["tau"] for row in rows)
    assert result.metrics["tau"] > rows[0]["tau"]
    assert json.loads((tmp_path / "result.json").read_text())["best"] == result.metrics
    assert 0 < result.coverage < 1 and rows[0]["coverage"] == pytest.approx(result.coverage, abs=1e-4)
    heads = load_heads(result.heads_folder, tiny_target)
    assert 2 in heads.draft_to_target_D.tolist(), "the end of a turn can be drafted"
    assert {p.dtype for p in heads.parameters()} == {torch.float32}


def test_first_loss_by_definition(run: Train, tmp_path: Path, tiny_target: Target, train_store: StateStore) -> None:
    """The loop's first loss against the definition, per conversation, without batches or chunks."""
    run(tmp_path, steps=1, eval_every=1, batch_tokens=100_000, lr=1e-9)
    heads = load_heads(tmp_path / "best", tiny_target)
    total, count = 0.0, 0
    for index in range(len(train_store)):
        sample = train_store.get(index)
        final_TE, length = sample.states[FINAL], len(sample.tokens_T)
        for step in range(heads.draft_steps):
            for t in range(length - step - 2):
                if not sample.supervised_T[t + 1 : t + step + 3].all():
                    continue
                *body, lm_head_DE = heads.parts()[step]
                draft = (lm_head_DE @ head_hidden(final_TE[t], *body)).log_softmax(-1)
                own = tiny_target.lm_head(final_TE[t + step + 1])[heads.draft_to_target_D].softmax(-1)
                total -= 0.8**step * (own * draft).sum().item()
                count += step == 0
    assert metrics(tmp_path)[-1]["loss"] == pytest.approx(total / count, rel=1e-5)


def test_accumulation_equals_larger_batches(run: Train, tmp_path: Path, train_store: StateStore) -> None:
    """All conversations in one step, as one batch or as several: the same gradient up to the order of sums. Adam turns
    the difference of a near-zero gradient into a fraction of the learning rate (3e-3), hence the absolute tolerance."""
    complete = run(tmp_path / "whole", steps=3, epochs=3, batch_tokens=100_000)
    batches = len(trainer.epoch_batches(train_store.lengths, 128, seed=0, epoch=0))
    assert batches > 3
    parts = run(tmp_path / "parts", steps=3, epochs=3, batch_tokens=128, gradient_accumulation_steps=batches)
    torch.testing.assert_close(weights(complete.last_folder), weights(parts.last_folder), rtol=1e-3, atol=2e-4)


def test_each_batch_draws_other_loss_tokens(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also every batch within a step; a second training draws the same ones."""
    drawn: list[list[int]] = []
    logits = Teacher.logits

    def noted(teacher: Teacher, *batch: Any) -> Any:
        found = logits(teacher, *batch)
        assert found.loss_tokens is not None
        drawn.append(found.loss_tokens.ids_L[found.loss_tokens.shift_L > 0].tolist())
        return found

    monkeypatch.setattr(Teacher, "logits", noted)
    settings: dict[str, Any] = {"steps": 3, "batch_tokens": 128, "gradient_accumulation_steps": 2, "loss_tokens": 20}
    run(tmp_path / "one", **settings)
    run(tmp_path / "two", **settings)
    assert len(drawn) == 12 and drawn[:6] == drawn[6:]
    assert len({tuple(tokens) for tokens in drawn}) == 6


def test_infinite_max_grad_norm_does_not_clip(run: Train, tmp_path: Path) -> None:
    for limit in (math.inf, 1e9, 1e-3):
        run(tmp_path / str(limit), steps=3, max_grad_norm=limit)
    assert_same(tmp_path / "inf" / "last", tmp_path / "1000000000.0" / "last")
    assert metrics(tmp_path / "inf")[-1]["loss"] != metrics(tmp_path / "0.001")[-1]["loss"]


def test_states_of_another_model_are_refused(run: Train, tiny_target: Target, tmp_path: Path) -> None:
    other = Target(tiny_model("llama", 1, tiny_target.vocab_size, 1024), tiny_target.tokenizer, "other")
    with pytest.raises(UserError, match="were written by another model than other"):
        run(tmp_path, target=other)


def test_epochs_bound_a_run(run: Train, tmp_path: Path, train_store: StateStore) -> None:
    per_epoch = len(trainer.epoch_batches(train_store.lengths, 128, seed=0, epoch=0))
    assert run(tmp_path, steps=None, epochs=2).steps == 2 * per_epoch


def test_not_finite_loss_names_the_conversation(
    run: Train, tmp_path: Path, train_store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, steps=4)
    end = train_store.lengths[7]

    def poison(indices: list[int], batch: HeadBatch) -> None:
        if 7 in indices:
            batch.states[FINAL][indices.index(7), end - 5 : end] = math.nan

    on_read(monkeypatch, "train", poison)
    with pytest.raises(UserError, match=r"not finite at step \d+ .*conversations .*\b7\b"):
        run(tmp_path, steps=40)
    newest = max((tmp_path / "checkpoints").iterdir())
    assert all(tensor.isfinite().all() for tensor in load_file(newest / "model.safetensors").values())


def test_not_finite_gradient_names_the_batch(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trainer.LOSSES, "soft_ce", lambda logits, probs: logits.sum(-1) * math.inf)
    with pytest.raises(UserError, match=r"at step 1 .*on training conversations \d+"):
        run(tmp_path)


@pytest.mark.parametrize("name", families())
def test_empty_batch_has_gradients(name: str, recipe: MakeRecipe, tiny_target: Target, train_store: StateStore) -> None:
    """Ranks with predictions wait for the gradients of a rank without any."""
    made = recipe(heads=HEADS[name])
    heads = build_heads(made, tiny_target, train_store)
    batch = read_batch(train_store, [0, 1], [1, 2, 3, FINAL]).on(torch.device("cpu"), torch.float32)
    batch = dataclasses.replace(batch, supervised_BT=torch.zeros_like(batch.supervised_BT))
    teacher_logits = Teacher(tiny_target, heads.draft_to_target_D).logits(batch)
    loss = Unrolled(heads)(
        batch, partial(batch_loss, loss=LOSSES["soft_ce"], teacher_logits=teacher_logits, step_weight=0.8)
    )
    loss.backward()
    assert loss.item() == 0
    for weight_name, weight in heads.named_parameters():
        assert weight.grad is not None and not weight.grad.any(), weight_name


@pytest.mark.parametrize("name", families())
def test_unanswered_conversations_are_trained(name: str, run: Train, train_store: StateStore, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"heads": HEADS[name], "batch_tokens": 64, "steps": 8}
    result = run(tmp_path, train_on=Silent(train_store, set(range(0, 24, 2))), eval_every=8, **settings)
    assert result.steps == 8
    assert all(tensor.isfinite().all() for tensor in weights(result.last_folder).values())


def test_empty_steps_are_skipped_and_counted(run: Train, train_store: StateStore, tmp_path: Path) -> None:
    """An answer of one token predicts nothing; with momentum and weight decay its step would still move the weights."""
    silent = Silent(train_store, set(range(24)) - {3})
    result = run(tmp_path, train_on=silent, batch_tokens=64, steps=30, eval_every=10, log_every=1, save_every=10)
    summary = json.loads((tmp_path / "result.json").read_text())
    per_epoch = summary["steps"] / summary["epochs"]
    learnt = summary["steps"] - summary["skipped_steps"]
    assert result.steps == 30 and 30 // per_epoch <= learnt <= -(-30 // per_epoch)
    assert f"{summary['skipped_steps']} of 30 steps had no predictions" in (tmp_path / "log.txt").read_text()
    assert all(row["loss"] is None or row["loss"] > 0 for row in metrics(tmp_path))


def test_empty_steps_do_not_move_the_weights(run: Train, train_store: StateStore, tmp_path: Path) -> None:
    silent = Silent(train_store, set(range(24)) - {3})
    run(tmp_path, train_on=silent, batch_tokens=64, steps=40, eval_every=100, save_every=1, keep_checkpoints=100)
    saved = [load_file(path / "model.safetensors") for path in sorted((tmp_path / "checkpoints").iterdir())]
    moved = sum(any(not torch.equal(before[name], after[name]) for name in before) for before, after in pairwise(saved))
    skipped = json.loads((tmp_path / "result.json").read_text())["skipped_steps"]
    assert 0 < moved <= 40 - skipped


@pytest.mark.parametrize("count", [0, 1])
def test_empty_validation_is_refused(run: Train, valid_store: StateStore, tmp_path: Path, count: int) -> None:
    with pytest.raises(UserError, match=r"validation data have nothing to predict.*"):
        run(tmp_path, validate_on=Masked(valid_store, count))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_nothing_supervised_is_refused(run: Train, train_store: Any, valid_store: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Nothing is supervised in the training data"):
        run(tmp_path, train_on=Unsupervised(train_store))
    with pytest.raises(UserError, match="Nothing is supervised in the validation data"):
        run(tmp_path, validate_on=Unsupervised(valid_store))


@pytest.mark.parametrize(("size", "problem"), [(1, "cannot hold the 2 end-of-turn tokens"), (10**6, "larger than the")])
def test_bad_draft_vocabulary_is_refused(
    run: Train, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, problem: str
) -> None:
    monkeypatch.setitem(tiny_target.__dict__, "end_tokens", frozenset({0, 2}))
    with pytest.raises(UserError, match=problem):
        run(tmp_path, heads={"draft_vocab_size": size})


@pytest.mark.parametrize("name", LOSSES)
def test_loop_trains_on_the_chosen_loss(
    name: str, recipe: MakeRecipe, run: Train, tmp_path: Path, tiny_target: Target, train_store: StateStore
) -> None:
    """The reported loss equals the loss on all logits at once, and a step on its gradient lowers it."""
    settings: dict[str, Any] = {"steps": 2, "eval_every": 1, "batch_tokens": 100_000, "loss": name, "epochs": 2}
    run(tmp_path, **settings, lr=1e-5, warmup=0.0)
    heads = build_heads(recipe(**settings), tiny_target, train_store)
    batch = read_batch(train_store, range(len(train_store)), [FINAL]).on(torch.device("cpu"), torch.float32)
    teacher_logits = Teacher(tiny_target, heads.draft_to_target_D).logits(batch)
    total = sum(
        0.8**step * sum_losses_plain(LOSSES[name], one, teacher_logits, torch.ones(1))
        for step, one in enumerate(heads.unroll(batch))
    )
    before, after = (row["loss"] for row in metrics(tmp_path)[1:])
    assert before == pytest.approx(float(total.detach()) / count_predictions(batch), rel=1e-5)
    assert after < before


def test_every_position_weight_trains(run: Train, tmp_path: Path) -> None:
    ends = {}
    for scheme in ("exponential", "dpace"):
        run(tmp_path / scheme, steps=2, eval_every=1, position_weight=scheme)
        ends[scheme] = metrics(tmp_path / scheme)[1]["loss"]
    assert 0 < ends["exponential"] < ends["dpace"] < math.inf, "weights of up to 2"


def test_feature_loss_is_added(run: Train, tmp_path: Path) -> None:
    eagle = {"family": "eagle", "draft_steps": 2}
    for weight in (0.0, 1.0):
        run(tmp_path / str(weight), steps=2, eval_every=1, heads=eagle, feature_weight=weight, lr=1e-9)
    without, added = (metrics(tmp_path / str(weight))[1]["loss"] for weight in (0.0, 1.0))
    assert added > without > 0


def test_feature_loss_without_features_is_refused(run: Train, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="draft no features"):
        run(tmp_path, feature_weight=1.0)


@pytest.mark.parametrize("steps", [2, 3])
def test_drafts_beyond_every_answer(run: Train, train_store: StateStore, tmp_path: Path, steps: int) -> None:
    settings: dict[str, Any] = {"heads": {"num_heads": steps}, "steps": 1}
    run(tmp_path / "just", train_on=Masked(train_store, steps + 1), **settings)
    with pytest.raises(UserError, match=f"draft {steps} tokens ahead and no answer .* has the {steps + 1} tokens"):
        run(tmp_path / "short", train_on=Masked(train_store, steps), **settings)


def test_bfloat16_target_trains_float32_weights(run: Train, tmp_path: Path, tiny_target_folder: Path) -> None:
    target = load_target(str(tiny_target_folder), dtype="bfloat16", device="cpu")
    result = run(tmp_path, target=target, steps=2)
    assert "(cpu, bf16" in (tmp_path / "log.txt").read_text()
    assert {tensor.dtype for tensor in weights(result.last_folder).values()} == {torch.float32, torch.int64}


def test_validation_keeps_no_states(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they would take memory from the training batches."""
    read: list[weakref.ref[Any]] = []

    def count_alive(_: Any) -> None:
        gc.collect()
        raise Killed(sum(one() is not None for one in read))

    on_read(monkeypatch, "validation", lambda _, batch: read.append(weakref.ref(batch.states[FINAL])))
    before_step(monkeypatch, count_alive)
    with pytest.raises(Killed) as stopped:
        run(tmp_path)
    assert len(read) > 1 and stopped.value.args == (0,)


def test_the_live_line_shows_steps_loss_and_time_left(run: Train, tmp_path: Path) -> None:
    written = StringIO()
    run(tmp_path, Console(file=written, width=200, force_terminal=True))
    for part in ("Training on 1 process", "step 0", "tau", "loss", "lr", "tok/s", "left", "covers"):
        assert part in written.getvalue()


def test_compiled_steps_learn_the_same(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    for module in (regions, trainer):
        monkeypatch.setattr(module, "compile_region", cache(partial(torch.compile, backend=counter)))
    heads = {"family": "eagle", "draft_steps": 2}
    for compile in (False, True):
        run(tmp_path / str(compile), heads=heads, steps=3, packing=True, compile=compile)
        assert (counter.frame_count >= 3) is compile, "the first entries, the layer's output, and the loss"
    eager, compiled = (metrics(tmp_path / name)[-1] for name in ("False", "True"))
    assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-6) and compiled["tau"] == eager["tau"]


def test_failing_compilation_is_explained(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no working C compiler")

    monkeypatch.setattr(regions, "compile_region", lambda function: refuse)
    monkeypatch.setattr(trainer, "compile_region", lambda function: partial(function))
    settings = {"heads": {"family": "eagle", "draft_steps": 2}, "steps": 3}
    for compile in (False, True):
        run(tmp_path / str(compile), compile=compile, **settings)
    assert_same(tmp_path / "False" / "last", tmp_path / "True" / "last")
    log = (tmp_path / "True" / "log.txt").read_text()
    assert "torch.compile failed (RuntimeError: no working C compiler)" in log and "train.compile=false" in log
