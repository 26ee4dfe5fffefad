"""The training loop: draft heads learn the frozen target's predictions from its stored hidden states.

One optimiser step reads `gradient_accumulation_steps` batches per rank, sums the losses of all draft steps and divides
once by the total predictions of the first draft step, so the gradient does not depend on how one optimiser step's
batches are split over ranks and accumulation. Batch order and learning rate are pure functions of the trainer state, so
a resumed run equals an uninterrupted one. With `train.minutes`, the learning rate and the end follow the clock.
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from rich.console import Console
from torch import Tensor, nn

from headstart.data.states.store import States
from headstart.errors import UserError, out_of_memory
from headstart.heads.base import HeadBatch
from headstart.heads.io import save_heads
from headstart.heads.settings import Role
from headstart.model.frozen import FrozenModel
from headstart.model.teacher import TeacherModel
from headstart.recipes.recipe import Recipe
from headstart.replay.patch import FINAL
from headstart.support.artifacts import link_into_run
from headstart.support.files import need_disk, read_jsonl, size, write_json, write_jsonl
from headstart.support.regions import compile_region
from headstart.support.terminal import format_seconds, progress_bar
from headstart.train import checkpoint
from headstart.train.batches import (
    Batch,
    BatchSchedule,
    ReadBatch,
    count_predictions,
    epoch_batches,
    rank_slice,
    read_batch,
    sample_anchors,
    subsample,
)
from headstart.train.checkpoint import TrainerState
from headstart.train.checks import check_training
from headstart.train.fused_loss import Teacher, batch_loss
from headstart.train.interrupt import Interrupt
from headstart.train.losses import LOSSES
from headstart.train.optimizers import learning_rate_now, make_optimizers
from headstart.train.processes import (
    COLLECTIVE_TIMEOUT,
    broadcast_from_main,
    describe_processes,
    is_main,
    make_accelerator,
    raise_on_all_ranks,
)
from headstart.train.starting_heads import build_heads, check_store
from headstart.train.tensor_memory import cache_tensor_memory
from headstart.train.tracking import finish_trackers, log_to_tracker, memory, start_tracker
from headstart.train.training_log import Display, Log, not_finite
from headstart.train.validation import Tally, Validation, draft_coverage, greedy_tokens
from headstart.train.wrapped import LowRank, Unrolled


@dataclass(frozen=True)
class TrainResult:
    """Result of a finished training."""

    heads_folder: Path  # of the best heads, by predicted tokens per round
    last_folder: Path
    steps: int
    metrics: dict[str, Any]  # of the best heads
    coverage: float  # fraction of the validation answers in the draft vocabulary


def train(
    recipe: Recipe,
    target: FrozenModel,
    train_store: States,
    valid_store: States,
    folder: Path,
    console: Console | None = None,
) -> TrainResult:
    """Train heads, or resume an interrupted run in `folder`.

    Writes `best/` and `last/` (heads), `checkpoints/`, `metrics.jsonl` (one line per validation), `log.txt` and
    `result.json`. `target` may be a TeacherModel (embeddings and LM head, without most layers). Ctrl-C during
    training finishes the step, writes a checkpoint and raises KeyboardInterrupt; a later one raises at once. Invalid
    settings, unusable data and a loss that is not finite raise a UserError.
    """
    check_training(recipe, target)
    with torch.cuda.device(target.device) if target.device.type == "cuda" else nullcontext():
        try:
            accelerator = make_accelerator(recipe, target, folder)
            log = Log(console, folder) if accelerator.is_main_process else Log(None, None)
            try:
                with cache_tensor_memory(target.device):
                    return _Trainer(recipe, target, (train_store, valid_store), log, accelerator).train()
            finally:
                finish_trackers(accelerator, log.say)
                accelerator.free_memory()
        finally:
            AcceleratorState._reset_state()  # the next run of this process may choose another precision


@dataclass(frozen=True)
class _Unread:
    """Loss sum and gradient norm of an optimiser step, still on the device.

    `group` are the batches of all ranks, `count` their predictions of the first draft step.
    """

    number: int
    group: list[Batch]
    count: int
    figures_2: Tensor


class _Trainer:
    """One session of training, in the accelerator's project folder; see `train`."""

    def __init__(
        self, recipe: Recipe, target: FrozenModel, stores: tuple[States, States], log: Log, accelerator: Accelerator
    ) -> None:
        self.started = monotonic()
        self.recipe, self.section, self.target = recipe, recipe.train, target
        self.store, self.valid_store = stores
        self.log, self.accelerator = log, accelerator
        self.folder = Path(accelerator.project_dir)
        self.rank, self.ranks = int(accelerator.process_index), int(accelerator.num_processes)
        self.loss = LOSSES[self.section.loss]
        set_seed(self.section.seed)
        self.heads = build_heads(recipe, target, self.store, log.say)
        with raise_on_all_ranks():
            self.heads.gradient_checkpointing = self.section.gradient_checkpointing
            self.heads.compiled = self.section.compile is True or (
                self.section.compile == "auto" and target.device.type == "cuda"
            )
            check_store(self.valid_store, target, self.heads)
            self.coverage = draft_coverage(self.valid_store, target.vocab_size, self.heads.draft_to_target_D)
            # A checkpoint holds at most four float32 copies of the parameters (heads, best heads, two moments); reserve
            # space for `keep_checkpoints` + 1.
            copies = 4 * (self.section.keep_checkpoints + 1)
            needed = 4 * copies * sum(p.numel() for p in self.heads.parameters())
            need_disk(self.folder, max(0, needed - size(self.folder / "checkpoints")), "Training")
            self.settings = self._settings()
            # Other ranks may see a stale shared disk: the main rank chooses for all.
            newest = checkpoint.find(self.folder / "checkpoints", self.settings, log.say) if is_main() else None
        self.newest, settings = broadcast_from_main((newest, self.settings))
        with raise_on_all_ranks():
            self._check_same(settings)
            if self.newest is not None:
                checkpoint.wait_for(*self.newest)
        # Without autocast, weights are float32.
        self.dtype = torch.float32 if accelerator.mixed_precision == "no" else target.dtype
        unrolled, rank = Unrolled(self.heads), self.section.lora_rank
        self.low_rank = LowRank(unrolled, rank) if rank else None
        self.trained = self.low_rank or self.heads
        self.wrapped, optimizers = self.low_rank or unrolled, make_optimizers(self.trained, self.section)
        with warnings.catch_warnings():
            # Buffers are equal on all ranks; accelerate cannot pass torch's replacement for the option yet.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self.model, *self.optimizers = accelerator.prepare(self.wrapped, *optimizers)
        self.teacher = Teacher(target, self.heads.draft_to_target_D, self.section.loss_tokens)
        self.schedule = BatchSchedule(self.store, self.section, self.rank, self.ranks)
        self.validation_batches = self._read_validation_batches()
        self.budget = [self.section.steps, self.section.minutes, self.section.epochs]
        self.total = min(self.section.steps or math.inf, self.section.epochs * self.schedule.steps_per_epoch)
        self.trainer_state = TrainerState()
        self.seconds_before = self.grad_norm = 0.0
        self.unread: list[_Unread] = []
        self.losses: list[float] = []  # since the last validation
        self.latest: float | None = None
        # Ranks synchronise counts on the host, so that none waits for its GPU.
        self.host_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if self.ranks > 1 else None
        self.records: list[dict[str, Any]] = []

    def _settings(self) -> dict[str, Any]:
        """Settings that must match to resume from a checkpoint."""
        section = self.section.of_role(Role.CONTENT)
        return {
            "heads": self.heads.config.model_dump(mode="json"),
            **{f"train.{key}": value for key, value in section.items() if key != "start_from"},
            "data fingerprint": self.store.fingerprint,
            checkpoint.PROCESSES: self.ranks,
        }

    def _check_same(self, of_main: dict[str, Any]) -> None:
        """Raise a UserError if this rank's settings differ from the main one's: it would train on other batches."""
        if differing := [key for key, value in self.settings.items() if of_main[key] != value]:
            raise UserError(
                f"Process {self.rank} and process 0 of this training differ in {differing[0]}.",
                "Let all processes see the same folder of runs, and start them with the same command; if the data has "
                "just been written, wait a minute (a shared disk may lag) and start again.",
            )

    # -- the run -------------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Train until the budget is spent."""
        self._announce()
        step = self.newest[1].step if self.newest else None
        # Start the tracker before any file of an earlier session changes, because starting it may fail.
        with raise_on_all_ranks():
            start_tracker(self.accelerator, self.section, self.settings, self.recipe.name, step)
        with self.log:
            self._resume()
            bar = progress_bar(self.log.console, "training", total=100, unit="%", lines=False)
            with Interrupt() as interrupt, bar as line:
                self._take_steps(interrupt, Display(self.log, line, self._fraction(self.trainer_state.elapsed)))
            result = self._finish()
            if interrupt.requested:  # after the last step: the training is complete, but the pipeline must stop
                raise KeyboardInterrupt
            return result

    def _announce(self) -> None:
        self.log.say(describe_processes(self.accelerator))
        if isinstance(self.target, TeacherModel):
            self.log.say(
                f"{self.target.name} is not loaded: training only reads its embeddings and LM head."
                if self.store.stored
                else f"Each process holds a part of the weights of {self.target.name}."
            )
        self.log.say(
            f"{self.heads.draft_steps} draft steps, {self.trained.trainable_parameters / 1e6:.1f} M parameters to "
            f"train, {self.heads.flops_per_draft() / 1e6:.1f} MFLOP a drafted token; the "
            f"draft vocabulary of {self.heads.config.draft_width} tokens covers {self.coverage:.1%} of the validation "
            f"answers. {len(self.store)} conversations, {self.schedule.steps_per_epoch} steps per epoch."
        )

    def _take_steps(self, interrupt: Interrupt, display: Display) -> None:
        """Step, validate and checkpoint until the end or an interruption."""
        state, interrupted = self.trainer_state, False
        saved = state.step if state.step else -1
        if not self.records:
            self._validate(display)
        started, predictions = monotonic(), 0
        with closing(
            self.schedule.batches(state, self.total, self._read, self.accelerator.device, self.dtype)
        ) as steps:
            for group, batches in steps:
                own_count = sum(count_predictions(batch, self.section.anchors) for batch in batches)
                count, elapsed, interrupted = self._synchronise(own_count, interrupt.requested)
                fraction = self._fraction(elapsed)
                if interrupted or fraction >= 1:
                    break
                if self.heads.compiled and self.loss is LOSSES[self.section.loss]:
                    self._compile(batches[0])
                state.lr = learning_rate_now(self.section, fraction, state)
                if count:
                    self._step(group, batches, count)
                else:  # no predictions on any rank
                    state.skipped += 1
                predictions += count
                state.advance(count, self.schedule.steps_per_epoch)
                if logs := state.step % self.section.log_every == 0:
                    self._read_losses()
                loss = self.latest if count else None
                now = monotonic()
                speed = predictions / (now - started)
                shown = "none" if loss is None else f"{loss:.3f}"
                figures = f"step {state.step} · loss {shown} · lr {state.lr:.1e} · {speed:,.0f} tok/s"
                display.step(self._fraction(self._elapsed()), now - self.started, figures)
                if loss is not None and logs:
                    self._log({"loss": loss, "lr": state.lr, "tokens_per_second": speed, "grad_norm": self.grad_norm})
                if state.step % self.section.eval_every == 0:
                    self._validate(display)
                if state.step % self.section.save_every == 0:
                    self._save()
                    saved = state.step
        if self.records[-1]["step"] != state.step and not interrupted:
            self._validate(display)
            saved = -1  # this step's checkpoint does not know this validation's best heads
        # If the clock ended the run, the last checkpoint's `elapsed` is still under the budget, and resuming would
        # train on: save again.
        if saved != state.step or (not interrupted and self._fraction(state.elapsed) < 1):
            self._save()
        if interrupted:
            self.log.say(f"Stopped after step {state.step}; the same command continues from there.")
            raise KeyboardInterrupt

    def _step(self, group: list[Batch], batches: list[HeadBatch], count: int) -> None:
        """Take one optimiser step. Its loss is summed over all draft steps, batches and ranks, and divided by `count`,
        the predictions of the first draft step. On a GPU, `_read_losses` reads it later."""
        for optimizer in self.optimizers:
            for parameters in optimizer.param_groups:
                parameters["lr"] = self.trainer_state.lr
        self.model.train()
        total = torch.zeros((), device=self.accelerator.device)
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                loss = self._loss(self.model, batch, i)
                # The one place that normalises: DDP averages gradients, hence the factor.
                self.accelerator.backward(loss * (self.ranks / count))
            total += loss.detach()
        grad_norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.section.max_grad_norm)
        figures = torch.stack([self.accelerator.reduce(total, "sum"), grad_norm])
        self.unread.append(_Unread(self.trainer_state.step + 1, group, count, figures))
        if self.accelerator.device.type == "cpu":
            self._read_losses()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _read_losses(self) -> None:
        """Read the losses of unread steps with one device synchronisation. A UserError if a step is not finite: before
        any validation or checkpoint, but on a GPU possibly some steps later."""
        unread, self.unread = self.unread, []
        if not unread:
            return
        for step, (total, self.grad_norm) in zip(
            unread, torch.stack([step.figures_2 for step in unread]).tolist(), strict=True
        ):
            mean, fp16 = total / step.count, self.accelerator.mixed_precision == "fp16"
            # With fp16 gradients may overflow occasionally; the scaler skips such steps.
            if not math.isfinite(mean) or not (math.isfinite(self.grad_norm) or fp16):
                raise not_finite(step.number, mean, step.group)
            self.latest = mean
            self.losses.append(mean)

    def _compile(self, batch: HeadBatch) -> None:
        """Compile on a first batch. If that fails on any rank, all ranks run uncompiled."""
        self.loss, failure = compile_region(self.loss), ""
        self.wrapped.train()
        try:
            weights = [weight for weight in self.wrapped.parameters() if weight.requires_grad]
            torch.autograd.grad(self._loss(self.wrapped, batch, 0), weights, allow_unused=True)
        except UserError:
            raise
        except Exception as error:  # a compiler may raise any exception
            if out_of_memory(error):
                raise
            failure = f" ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        if self._synchronise(bool(failure), False)[0]:
            self.heads.compiled, self.loss = False, LOSSES[self.section.loss]
            self.log.say(
                f"torch.compile failed{failure}, so training runs uncompiled, which is slower. It needs a C compiler, "
                "and on a GPU a triton that fits this torch; train.compile=false skips it."
            )

    def _loss(self, model: nn.Module, batch: HeadBatch, number: int) -> Tensor:
        """Summed loss of one batch, with the recipe's random subsampling."""
        seed = self._seed(number)
        consume = partial(
            batch_loss,
            loss=self.loss,
            teacher_logits=self.teacher.logits(batch, seed),
            step_weight=self.section.step_weight,
            position_weight=self.section.position_weight,
            feature_weight=self.section.feature_weight,
        )
        if self.section.position_weight == "subsampled":
            batch = subsample(batch, self.section.step_weight, seed)
        if self.section.anchors:
            batch = sample_anchors(batch, self.section.anchors, seed)
        loss: Tensor = model(batch, consume)
        return loss

    def _seed(self, number: int) -> list[int]:
        """Return a batch's seed. It depends on the step and the index in the global batch, not on the ranks."""
        return [self.section.seed, self.trainer_state.step, self.rank + number * self.ranks]

    def _finish(self) -> TrainResult:
        state = self.trainer_state
        if state.skipped:
            self.log.say(f"{state.skipped} of {state.step} steps had no predictions to learn from and were skipped.")
        best = next(row for row in self.records if row["step"] == state.best_step)
        result = TrainResult(self.folder / "best", self.folder / "last", state.step, best, self.coverage)
        if self.accelerator.is_main_process:
            with self._merged():
                save_heads(self.heads, result.last_folder)
            write_json(
                self.folder / "result.json",
                {
                    "steps": result.steps,
                    "skipped_steps": state.skipped,
                    "epochs": state.epoch + state.index / self.schedule.steps_per_epoch,
                    "elapsed_seconds": round(state.elapsed, 1),
                    "trainable_parameters": self.trained.trainable_parameters,
                    "coverage": result.coverage,
                    "best": best,
                    "last": self.records[-1],
                },
            )
        self.accelerator.wait_for_everyone()
        return result

    # -- validation ----------------------------------------------------------------------------------------------

    def _read_validation_batches(self) -> list[tuple[Batch, Tensor]]:
        """Return this rank's validation batches: indices and greedy tokens only. Each validation rereads the states."""
        batches = epoch_batches(self.valid_store.lengths, self.section.batch_tokens, seed=0, epoch=0)
        own = rank_slice(batches, self.rank, self.ranks)
        self.missing_batches = len(rank_slice(batches, 0, self.ranks)) - len(own)
        chosen = [(batch, greedy_tokens(self.target, self._read_padded(self.valid_store, batch))) for batch in own]
        self._join_last_reads()
        return chosen

    def _join_last_reads(self) -> None:
        """Call the collective `samples` with no indices while other ranks read their extra batch."""
        for _ in range(self.missing_batches):
            self.valid_store.samples([])

    def _merged(self) -> AbstractContextManager[None]:
        """A context with low-rank updates merged into the heads, for validation and saving."""
        return nullcontext() if self.low_rank is None else self.low_rank.merged()

    def _validate(self, display: Display) -> None:
        """Validate the heads, record it, and save them if they are the best so far; empties `losses`."""
        self._read_losses()
        self.model.eval()
        tally, draft_to_target_D = Tally(self.heads.draft_steps, self.accelerator.device), self.heads.draft_to_target_D
        with self._merged():
            for indices, greedy_X in self.validation_batches:
                batch = self._read_padded(self.valid_store, indices)
                with torch.no_grad():
                    self.model(batch, partial(tally.add, draft_to_target_D=draft_to_target_D, greedy_X=greedy_X))
            self._join_last_reads()
            tally.counts_KC = self.accelerator.reduce(tally.counts_KC, "sum")
            validation = tally.result()
            loss = sum(self.losses) / len(self.losses) if self.losses else None
            self.losses.clear()
            self._record(validation, loss)
            display.show_validation(self.trainer_state.step, self._elapsed(), loss, validation)
            if validation.tau > self.trainer_state.best_tau:
                self.trainer_state.best_tau, self.trainer_state.best_step = validation.tau, self.trainer_state.step
                if self.accelerator.is_main_process:
                    save_heads(self.heads, self.folder / "best")

    def _record(self, validation: Validation, loss: float | None) -> None:
        row = {
            "step": self.trainer_state.step,
            "epoch": self.trainer_state.epoch,
            "elapsed_seconds": round(self._elapsed(), 1),
            "tokens": self.trainer_state.tokens,
            "loss": loss,
            **validation.to_json(),
            "coverage": round(self.coverage, 4),
        }
        self.records.append(row)
        if self.accelerator.is_main_process:
            write_jsonl(self.folder / "metrics.jsonl", self.records)
        top1 = {f"valid/top1_step{k}": share for k, share in enumerate(validation.accuracy["top1"])}
        self._log({"valid/tau": validation.tau, "valid/coverage": self.coverage, **top1})

    def _log(self, values: dict[str, float]) -> None:
        """Log to trackers, with the main rank's memory and the position in the data."""
        state = self.trainer_state
        position = {"data/epoch": state.epoch, "data/step_in_epoch": state.index}
        values = {**values, **memory(self.accelerator.device), **position}
        log_to_tracker(self.accelerator, values, state.step, self.log.say)

    # -- data, time and checkpoints ------------------------------------------------------------------------------

    def _read(self, store: States, batch: Batch, packed: bool = False) -> ReadBatch:
        # One width, so that code is compiled once.
        width = self.section.batch_tokens if packed and self.heads.compiled else 0
        return read_batch(store, batch, sorted({*self.heads.aux_layers, FINAL}), packed, width)

    def _read_padded(self, store: States, batch: Batch) -> HeadBatch:
        return self._read(store, batch).on(self.accelerator.device, self.dtype)

    def _elapsed(self) -> float:
        return self.seconds_before + monotonic() - self.started

    def _fraction(self, elapsed: float) -> float:
        """Fraction of the run done, by steps or by the clock, whichever is further."""
        by_clock = elapsed / (60 * self.section.minutes) if self.section.minutes else 0.0
        return max(self.trainer_state.step / self.total, by_clock)

    def _synchronise(self, count: int, interrupted: bool) -> tuple[int, float, bool]:
        """(predictions over all ranks, seconds of the main rank, whether any rank was interrupted); collective."""
        elapsed = self._elapsed()
        if self.ranks == 1:
            return count, elapsed, interrupted
        totals = torch.tensor([count, elapsed if self.rank == 0 else 0.0, interrupted], dtype=torch.float64)
        dist.all_reduce(totals, group=self.host_group)
        count_of_all, seconds, interruptions = totals.tolist()
        return int(count_of_all), seconds, interruptions > 0

    def _save(self) -> None:
        self._read_losses()
        state, keep = self.trainer_state, self.section.keep_checkpoints
        # The clock decides whether another checkpoint is due at the end: all ranks must use the same one.
        state.elapsed, state.budget = self._synchronise(0, False)[1], self.budget
        folder, best = self.folder / "checkpoints", self.folder / "best"
        checkpoint.save(self.accelerator, folder, state, self.settings, best, keep=keep)

    def _resume(self) -> None:
        if self.newest is None:
            return
        path, self.trainer_state = self.newest
        state = self.trainer_state
        checkpoint.load(self.accelerator, path)
        self.seconds_before = state.elapsed
        if state.budget and state.budget != self.budget:
            state.extended_at, state.lr_at_extension = self._fraction(state.elapsed), state.lr
        with raise_on_all_ranks():
            rows = list(read_jsonl(self.folder / "metrics.jsonl")) if self.accelerator.is_main_process else []
            if self.accelerator.is_main_process and all(row["step"] != state.best_step for _, row in rows):
                raise UserError(
                    f"{self.folder / 'metrics.jsonl'} lacks the best validation of the checkpoint {path.name}, at step "
                    f"{state.best_step}.",
                    "Restore the file, or begin anew in another folder of runs (--run-dir elsewhere/NAME).",
                )
        self.records = broadcast_from_main([row for _, row in rows if row["step"] <= state.step])
        if self.accelerator.is_main_process:  # discard records after the checkpoint
            link_into_run(path / checkpoint.BEST, self.folder / "best")
            write_jsonl(self.folder / "metrics.jsonl", self.records)
        self.log.say(f"Continuing from step {state.step} ({format_seconds(state.elapsed)} spent).")
