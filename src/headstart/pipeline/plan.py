"""What a recipe will cost, said before any work: memory, disk and time, from a few timed forwards on this machine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from rich.markup import escape
from rich.table import Table

from headstart.data.conversations import check_prompts
from headstart.data.questions import read_questions
from headstart.data.sampling import CACHE_PEAK
from headstart.data.workers import Workers
from headstart.errors import UserError
from headstart.files import format_bytes
from headstart.heads import DraftHead, family, make_config
from headstart.pipeline.data_stages import aux_layers, state_bytes
from headstart.pipeline.lengths import ANSWER_SHARE, SAMPLE, Lengths, expected_lengths, prompts_of
from headstart.pipeline.run import Run, left_to_do
from headstart.pipeline.speeds import Speeds, measure
from headstart.pipeline.stages import STAGES
from headstart.target import Target
from headstart.target.memory import free_bytes
from headstart.terminal import format_seconds

EVAL_METHODS = 4
"""Ways of decoding that every report times: heads, plain, transformers, transformers' prompt lookup."""
_WORKERS_GAIN = 1.3
"""What two batches side by side bring on a CPU; see `headstart.data.workers`."""
_GRADIENTS_AND_MOMENTS = 12
"""Bytes of a trained parameter beside itself: its gradient and two moments of AdamW, in float32."""


@dataclass(frozen=True)
class Plan:
    """The estimate.

    Attributes:
        facts: (what, how much) for people.
        seconds: by stage, from its beginning to its end, whether it is done or not.
        left: the stages still to do, each with why (`headstart.pipeline.run.left_to_do`).
        disk_bytes: that those may still write under the run's folder.
        free_bytes: free there.
        memory: bytes on the target's device at most, the target among them: "writing" data, "training", "report".
        problems: sentences about what would fail.
    """

    facts: list[tuple[str, str]]
    seconds: dict[str, float]
    left: dict[str, str]
    disk_bytes: int
    free_bytes: int
    memory: dict[str, int]
    problems: list[str]


def make_plan(run: Run) -> Plan:
    """Estimate a run.

    Raises:
        UserError: anything in the recipe that would stop the run before its first minute.
    """
    data = run.recipe.data
    start = perf_counter()
    target = run.target
    loading = perf_counter() - start
    check_prompts(target.tokenizer, data.prompts)
    needed = aux_layers(run)
    config = make_config(run.recipe.heads, target)
    heads = family(config.family)(config).to(target.device)
    heads.warm_start(target)
    speeds = measure(target, heads, needed, data.batch_size, run.recipe.train.batch_tokens)
    lengths, problems = _lengths(run, target)
    workers = Workers(target.device, -(-data.conversations // data.batch_size)).count

    planned = _Planned(run, target, heads, needed, speeds, lengths, workers)
    amounts = _amounts(planned)
    left = left_to_do(run, STAGES)
    disk = sum(size for stage, size in amounts.disk.items() if stage in left)
    free = shutil.disk_usage(_existing(run.folder)).free
    memory, room = _memory(planned), free_bytes(target.device)
    return Plan(
        facts=_facts(planned, amounts, disk, free, memory, room),
        seconds={"target": loading, **_seconds(planned, amounts)},
        left=left,
        disk_bytes=disk,
        free_bytes=free,
        memory=memory,
        problems=[*problems, *_problems(planned, disk, free, memory, room)],
    )


@dataclass(frozen=True)
class _Planned:
    """What an estimate starts from.

    Attributes:
        run: recipe and folder.
        target: the model.
        heads: as the recipe wants them, warm-started.
        needed: layers whose states are kept.
        speeds: as measured.
        lengths: of the conversations to expect.
        workers: batches that are written at once.
    """

    run: Run
    target: Target
    heads: DraftHead
    needed: list[int]
    speeds: Speeds
    lengths: Lengths
    workers: int

    @property
    def weights(self) -> int:
        """Numbers that the heads hold."""
        return sum(parameter.numel() for parameter in self.heads.parameters())

    @property
    def own_bytes(self) -> int:
        """What the target itself takes."""
        return self.target.parameters * self.target.dtype.itemsize

    @property
    def cache_bytes(self) -> int:
        """KV cache of a batch of the longest conversations."""
        return self.run.recipe.data.batch_size * self.lengths.cached * self.target.kv_bytes_per_token


@dataclass(frozen=True)
class _Amounts:
    """How much the data stages make.

    Attributes:
        conversations: to train on.
        tokens: of these and of the validation conversations.
        seconds: to write them all, those kept apart included.
        state_bytes: hidden states on disk.
        disk: bytes by stage that writes them.
    """

    conversations: float
    tokens: int
    seconds: float
    state_bytes: int
    disk: dict[str, int]


def _amounts(planned: _Planned) -> _Amounts:
    data, lengths, speeds = planned.run.recipe.data, planned.lengths, planned.speeds
    # A batch is written together: its steps are those of its longest answer, and its prompts are written the same way.
    rounds = data.max_new_tokens * lengths.turns + (data.max_new_tokens / 2 if data.prompts == "self" else 0)
    per_conversation = rounds * speeds.step_B / data.batch_size + lengths.read * speeds.prefill_token
    per_conversation /= _WORKERS_GAIN if planned.workers > 1 else 1.0
    count = float(data.conversations)
    if 0 < lengths.sample < SAMPLE:  # these are all there are
        count = min(count, max(1.0, lengths.sample - data.heldout - data.validation))
    train_seconds = count * per_conversation
    if data.minutes is not None and train_seconds > 60 * data.minutes:
        count = 60 * data.minutes / per_conversation
        train_seconds = 60 * data.minutes
    kept_apart = data.validation * per_conversation
    if data.prompts == "self":
        kept_apart += data.heldout * per_conversation / 3  # written, and not answered
    tokens = int((count + data.validation) * lengths.tokens)
    states = state_bytes(planned.run, count + data.validation, lengths.tokens)
    # A checkpoint has float32 weights, two Adam moments and the best heads; two are kept while one is being written.
    checkpoints = 4 * planned.weights * 4 * 3
    disk = {
        "conversations": 12 * tokens,
        "states": states,
        "train": checkpoints + 8 * planned.weights,
        "export": 4 * planned.weights,
    }
    return _Amounts(count, tokens, train_seconds + kept_apart, states, disk)


def _seconds(planned: _Planned, amounts: _Amounts) -> dict[str, float]:
    """Seconds of each stage after the target is loaded."""
    recipe, speeds = planned.run.recipe, planned.speeds
    data, training = recipe.data, recipe.train
    steps = training.epochs * max(1.0, amounts.tokens / training.batch_tokens / training.gradient_accumulation_steps)
    steps = min(steps, training.steps or steps)
    seconds_training = steps * training.gradient_accumulation_steps * speeds.train_step
    if training.minutes is not None:
        seconds_training = min(seconds_training, 60 * training.minutes)
    asked = recipe.eval.questions
    prompts = data.heldout if asked == "heldout" else len(read_questions(Path(asked).expanduser()))
    prompts = min(prompts, recipe.eval.limit or prompts)
    answer = ANSWER_SHARE * data.max_new_tokens
    ways = EVAL_METHODS + len(recipe.eval.compare)
    return {
        "conversations": amounts.seconds,
        "states": amounts.tokens * speeds.prefill_token,
        "train": seconds_training,
        # Widths are timed 32 times, wide ones cost more; 64 rounds of sampling 24 answers cost about three each.
        "tune": (48 * len(recipe.tune.widths) + 100 + 3 * 64) * speeds.single
        + data.validation * 2 * answer * speeds.prefill_token,
        "eval": prompts * recipe.eval.max_new_tokens * speeds.single * ways,
        "export": 2.0,
    }


def _problems(planned: _Planned, disk: int, free: int, memory: dict[str, int], room: int) -> list[str]:
    """Sentences about what the disk, the target's context or the device's memory does not hold."""
    run, target, data = planned.run, planned.target, planned.run.recipe.data
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
    for what, more, remedy in (
        ("Training", memory["training"] - planned.own_bytes, "train.batch_tokens"),
        ("The report", memory["report"] - planned.own_bytes, "eval.max_new_tokens"),
        (
            "Writing the longest conversation",
            planned.lengths.cached * target.kv_bytes_per_token,
            "data.max_new_tokens or data.max_prompt_tokens",
        ),
    ):
        if more > room:
            problems.append(
                f"{what} takes about {format_bytes(more)} beside the target, and {format_bytes(room)} are free on "
                f"{target.device}: lower {remedy}."
            )
    return problems


def _facts(
    planned: _Planned, amounts: _Amounts, disk: int, free: int, memory: dict[str, int], room: int
) -> list[tuple[str, str]]:
    """What is planned and what it takes, for people."""
    target, heads, lengths, data = planned.target, planned.heads, planned.lengths, planned.run.recipe.data
    cache = f"{format_bytes(planned.cache_bytes)} at most, {data.batch_size} conversations of {lengths.cached} tokens"
    cache += ", and two batches at once" if planned.workers > 1 else ""
    if memory["writing"] - planned.own_bytes > room:
        cache += f"; {format_bytes(room)} are free: larger batches are written in halves"
    by_servers = f"{', '.join(data.server)}; time and memory below are as if this machine wrote" if data.server else ""
    return [
        ("Target", f"{target.name}, {str(target.dtype).removeprefix('torch.')} on {target.device}"),
        ("Parameters", f"{target.parameters / 1e6:.1f} M, {format_bytes(planned.own_bytes)}"),
        (
            "Heads",
            f"{heads.config.family}, {heads.draft_steps} steps, {heads.trainable_parameters / 1e6:.1f} M to train",
        ),
        ("A drafted token", f"{heads.flops_per_draft() / 1e6:.1f} MFLOP"),
        (
            "Conversations",
            f"about {amounts.conversations:.0f} (of {data.conversations} at most), {amounts.tokens} tokens",
        ),
        ("A conversation", _described(lengths)),
        *([("Written by", by_servers)] if by_servers else []),
        ("Hidden states on disk", f"{format_bytes(amounts.state_bytes)} ({len(planned.needed)} of each token)"),
        (
            "Disk in all",
            f"{format_bytes(sum(amounts.disk.values()))}; {format_bytes(disk)} still to write, "
            f"{format_bytes(free)} free",
        ),
        ("KV cache while writing data", cache),
        ("Memory while writing data", f"about {format_bytes(memory['writing'])}"),
        ("Memory while training", f"about {format_bytes(memory['training'])}"),
        ("Memory of the report", f"about {format_bytes(memory['report'])}"),
    ]


def _lengths(run: Run, target: Target) -> tuple[Lengths, list[str]]:
    """What to expect of the conversations; prompts that cannot be read are a problem, and are assumed."""
    data = run.recipe.data
    try:
        return expected_lengths(data, target, prompts_of(data, target.tokenizer)), []
    except UserError as error:
        return expected_lengths(data, target), [f"{error.problem} {error.remedy}"]


def _described(lengths: Lengths) -> str:
    known = f"from {lengths.sample} of the prompts" if lengths.sample else "assumed"
    turns = f"{lengths.turns:.1f} answers" if lengths.turns else "answers as given"
    return f"about {lengths.tokens:.0f} tokens, {turns} ({known})"


def _memory(planned: _Planned) -> dict[str, int]:
    """Bytes on the target's device at most, by what needs them; the target itself is in each."""
    recipe, target, heads = planned.run.recipe, planned.target, planned.heads
    own, weights, size = planned.own_bytes, planned.weights, target.dtype.itemsize
    draft = heads.config.draft_width
    # The teacher's LM head is the target's own unless it is cut to the draft vocabulary.
    teacher = draft * target.hidden_size * size if draft < target.vocab_size else 0
    state = (len(planned.needed) * target.hidden_size + draft) * (4 if target.dtype == torch.float32 else size)
    exact = 0
    if target.dtype.itemsize < 4:  # where a difference is judged, one part at a time is cast to float32
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in target.layers]
        exact = 4 * max(*layers, target.vocab_size * target.hidden_size)
    asked = recipe.data.max_prompt_tokens + recipe.eval.max_new_tokens + recipe.tune.max_nodes
    return {
        "writing": int(own + planned.workers * CACHE_PEAK * planned.cache_bytes),
        "training": own
        + 4 * weights
        + _GRADIENTS_AND_MOMENTS * heads.trainable_parameters
        + teacher
        + recipe.train.batch_tokens * state
        + planned.speeds.kept_bytes,
        # transformers has a cache of its own beside ours.
        "report": own + weights * size + exact + 2 * asked * target.kv_bytes_per_token,
    }


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
