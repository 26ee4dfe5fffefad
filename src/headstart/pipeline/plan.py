"""What a recipe will cost, said before any work: memory, disk and time, from a few timed forwards on this machine.

Shape suffixes: B rows, T tokens, E hidden size.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from headstart.data.conversations import check_template
from headstart.data.questions import read_questions
from headstart.files import format_bytes
from headstart.heads import DraftHead, HeadBatch, family, make_config
from headstart.pipeline.run import Run, format_seconds, left_to_do
from headstart.pipeline.stages import ANSWER_SHARE, PROMPT_TOKENS, STAGES, state_bytes, taps
from headstart.target import DraftTree, Target, TreeShape
from headstart.train.losses import Teacher, soft_ce, weighted

EVAL_METHODS = 4
"""Ways of decoding that every report times: heads, plain, transformers, transformers' prompt lookup."""


@dataclass(frozen=True)
class Speeds:
    """Seconds measured on this machine.

    Attributes:
        step_B: one new token for each row of a data batch.
        prefill_token: reading one token in a long forward.
        single: one new token at batch 1.
        train_step: forward and backward of the heads on one batch of train.batch_tokens.
    """

    step_B: float
    prefill_token: float
    single: float
    train_step: float


@dataclass(frozen=True)
class Plan:
    """The estimate.

    Attributes:
        facts: (what, how much) for people.
        seconds: by stage, from its beginning to its end, whether it is done or not.
        left: the stages still to do, each with why (`headstart.pipeline.run.left_to_do`).
        disk_bytes: that those may still write under the run's folder.
        free_bytes: free there.
        problems: sentences about what would fail.
    """

    facts: list[tuple[str, str]]
    seconds: dict[str, float]
    left: dict[str, str]
    disk_bytes: int
    free_bytes: int
    problems: list[str]


def make_plan(run: Run) -> Plan:
    """Estimate a run.

    Raises:
        UserError: anything in the recipe that would stop the run before its first minute.
    """
    data, training = run.recipe.data, run.recipe.train
    start = perf_counter()
    target = run.target
    loading = perf_counter() - start
    check_template(target.tokenizer)
    needed = taps(run)
    config = make_config(run.recipe.heads, target)
    heads = family(config.family)(config).to(target.device)
    heads.warm_start(target)
    speeds = measure(target, heads, needed, data.batch_size, training.batch_tokens)

    answer = ANSWER_SHARE * data.max_new_tokens
    # A batch is written together: its steps are those of its longest answer, and its prompts are written the same way.
    rounds = (data.max_new_tokens + (data.max_new_tokens / 2 if data.prompts == "self" else 0)) * speeds.step_B
    per_conversation = rounds / data.batch_size
    train_seconds = data.conversations * per_conversation
    count = float(data.conversations)
    if data.minutes is not None and train_seconds > 60 * data.minutes:
        count = 60 * data.minutes / per_conversation
        train_seconds = 60 * data.minutes
    kept_apart = (data.calibration + data.heldout) * per_conversation
    tokens = int((count + data.calibration) * (PROMPT_TOKENS + answer))
    states = state_bytes(run, count + data.calibration)
    weights = sum(parameter.numel() for parameter in heads.parameters())
    # A checkpoint has float32 weights, two Adam moments and the best heads; two are kept while one is being written.
    checkpoints = 4 * weights * 4 * 3
    written = {
        "conversations": 12 * tokens,
        "states": states,
        "train": checkpoints + 8 * weights,
        "export": 4 * weights,
    }
    left = left_to_do(run, STAGES)
    disk = sum(size for stage, size in written.items() if stage in left)
    free = shutil.disk_usage(_existing(run.folder)).free

    steps = training.epochs * max(1.0, tokens / training.batch_tokens / training.accumulate)
    steps = min(steps, training.steps or steps)
    seconds_training = steps * training.accumulate * speeds.train_step
    if training.minutes is not None:
        seconds_training = min(seconds_training, 60 * training.minutes)
    asked = run.recipe.eval.questions
    prompts = data.heldout if asked == "heldout" else len(read_questions(Path(asked).expanduser()))
    prompts = min(prompts, run.recipe.eval.limit or prompts)
    ways = EVAL_METHODS + len(run.recipe.eval.compare)
    seconds = {
        "target": loading,
        "conversations": train_seconds + kept_apart,
        "states": tokens * speeds.prefill_token,
        "train": seconds_training,
        # Widths are timed 32 times, wide ones cost more; 64 rounds of sampling 24 answers cost about three each.
        "tune": (48 * len(run.recipe.tune.widths) + 100 + 3 * 64) * speeds.single
        + data.calibration * 2 * answer * speeds.prefill_token,
        "eval": prompts * run.recipe.eval.max_new_tokens * speeds.single * ways,
        "export": 2.0,
    }
    problems = []
    if free < 1.05 * disk:
        problems.append(
            f"The disk has {format_bytes(free)} free at {run.folder} and the run may write {format_bytes(disk)}: free "
            "some space, choose another --run-dir, or lower data.cache_gigabytes."
        )
    longest = data.max_prompt_tokens + data.max_new_tokens
    if longest > target.max_length:
        problems.append(
            f"A prompt and its answer may take {longest} tokens and {target.name} reads {target.max_length}: lower "
            "data.max_prompt_tokens or data.max_new_tokens."
        )
    size = target.dtype.itemsize
    draft_logits = training.batch_tokens * config.draft_width * 4
    facts = [
        ("Target", f"{target.name}, {str(target.dtype).removeprefix('torch.')} on {target.device}"),
        ("Parameters", f"{target.parameters / 1e6:.1f} M, {format_bytes(target.parameters * size)}"),
        ("Heads", f"{config.family}, {heads.steps} steps, {heads.trainable_parameters / 1e6:.1f} M to train"),
        ("A drafted token", f"{heads.flops_per_draft() / 1e6:.1f} MFLOP"),
        ("Conversations", f"about {count:.0f} (of {data.conversations} at most), {tokens} tokens"),
        ("Hidden states on disk", f"{format_bytes(states)} ({len(needed)} of each token)"),
        (
            "Disk in all",
            f"{format_bytes(sum(written.values()))}; {format_bytes(disk)} still to write, {format_bytes(free)} free",
        ),
        (
            "KV cache while writing data",
            format_bytes(data.batch_size * (PROMPT_TOKENS + data.max_new_tokens) * target.kv_bytes_per_token),
        ),
        (
            "Memory while training",
            f"about {format_bytes(target.parameters * size + 16 * weights + 3 * draft_logits)}",
        ),
    ]
    return Plan(facts, seconds, left, disk, free, problems)


def measure(target: Target, heads: DraftHead, needed: list[int], rows: int, batch_tokens: int) -> Speeds:
    """Time a few forwards; a few seconds on a small model."""
    root = TreeShape.chain(0)

    def step(batch: int) -> Callable[[], None]:
        cache = target.new_cache(batch, 160)
        target.prefill(cache, [[1] * 128] * batch)
        tree = DraftTree.from_shape(torch.ones(batch, 1, dtype=torch.long, device=target.device), root)

        def forward() -> None:
            target.forward_tree(cache, tree)
            cache.commit([[]] * batch)

        return forward

    length = min(256, target.max_length)
    rows_read = [[1] * length] * 4

    def read() -> list[dict[int, Tensor]]:
        return target.hidden_states(rows_read, needed)

    # A quarter of a training batch: the cost of a step grows with its tokens.
    copies = max(1, batch_tokens // length // 4)
    states = read()[0]
    kind = torch.float32 if target.dtype == torch.float32 else target.dtype
    batch = HeadBatch(
        torch.ones(copies, length, dtype=torch.long, device=target.device),
        torch.ones(copies, length, dtype=torch.bool, device=target.device),
        {tap: state.to(kind).expand(copies, -1, -1) for tap, state in states.items()},
    )
    teacher = Teacher(target, heads.draft_to_target_D)

    def learn() -> None:
        with torch.autocast(target.device.type, dtype=kind, enabled=kind != torch.float32):
            loss = weighted(heads.unroll(batch), soft_ce, teacher.read(batch), 1.0)
        torch.autograd.backward([loss])
        heads.zero_grad(set_to_none=True)

    return Speeds(
        step_B=_seconds(step(rows), target),
        prefill_token=_seconds(read, target) / (4 * length),
        single=_seconds(step(1), target),
        train_step=_seconds(learn, target) * batch_tokens / (copies * length),
    )


def _seconds(work: Callable[[], object], target: Target, times: int = 3) -> float:
    """The median of a few timings, after one that warms up."""
    taken = []
    for _ in range(times + 1):
        start = perf_counter()
        work()
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        taken.append(perf_counter() - start)
    return statistics.median(taken[1:])


def show_plan(run: Run, plan: Plan) -> None:
    """Print a plan."""
    console = run.console
    facts = Table(title=f"Plan of {run.recipe.name}", title_justify="left", show_header=False, box=None)
    for what, much in plan.facts:
        facts.add_row(what, much)
    console.print(facts)
    times = Table(title="\nTime, estimated from forwards timed on this machine now", title_justify="left", box=None)
    times.add_column("stage")
    times.add_column("estimate", justify="right")
    times.add_column("")
    for stage in STAGES:
        if stage.name in plan.left:
            times.add_row(stage.name, format_seconds(plan.seconds[stage.name]), escape(plan.left[stage.name]))
        else:
            record = run.record(stage.name)
            assert record is not None, "a stage that is done has a record"
            times.add_row(stage.name, "–", f"done before, {format_seconds(record.seconds)}")
    if len(plan.left) == len(STAGES):
        times.add_row("in all", format_seconds(sum(plan.seconds.values())), style="bold")
    elif plan.left:
        times.add_row("left", format_seconds(sum(plan.seconds[name] for name in plan.left)), style="bold")
    console.print(times)
    if not plan.left:
        console.print("Nothing is left to do: every stage is done.", style="bold")


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
