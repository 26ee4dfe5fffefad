"""What a recipe will cost, said before any work: memory, disk and time, from a few timed forwards on this machine.

Shape suffixes: B rows, T tokens, E hidden size.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from headstart.data.conversations import check_template
from headstart.data.questions import read_questions
from headstart.data.sampling import CACHE_PEAK
from headstart.data.workers import Workers
from headstart.errors import UserError
from headstart.files import format_bytes
from headstart.heads import DraftHead, HeadBatch, family, make_config
from headstart.pipeline.data_stages import aux_layers, state_bytes
from headstart.pipeline.lengths import ANSWER_SHARE, SAMPLE, Lengths, expected_lengths, prompts_of
from headstart.pipeline.run import Run, left_to_do
from headstart.pipeline.stages import STAGES
from headstart.target import DraftTree, Target, TreeShape
from headstart.target.memory import free_bytes
from headstart.terminal import format_seconds
from headstart.train.losses import Teacher, soft_ce, weighted

EVAL_METHODS = 4
"""Ways of decoding that every report times: heads, plain, transformers, transformers' prompt lookup."""
_WORKERS_GAIN = 1.3
"""What two batches side by side bring on a CPU; see `headstart.data.workers`."""
_GRADIENTS_AND_MOMENTS = 12
"""Bytes of a trained parameter beside itself: its gradient and two moments of AdamW, in float32."""


@dataclass(frozen=True)
class Speeds:
    """Seconds measured on this machine.

    Attributes:
        step_B: one new token for each row of a data batch.
        prefill_token: reading one token in a long forward.
        single: one new token at batch 1.
        train_step: forward and backward of the heads on one batch of train.batch_tokens.
        kept_bytes: what a forward on such a batch keeps for its backward.
    """

    step_B: float
    prefill_token: float
    single: float
    train_step: float
    kept_bytes: int


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
    data, training = run.recipe.data, run.recipe.train
    start = perf_counter()
    target = run.target
    loading = perf_counter() - start
    check_template(target.tokenizer)
    needed = aux_layers(run)
    config = make_config(run.recipe.heads, target)
    heads = family(config.family)(config).to(target.device)
    heads.warm_start(target)
    speeds = measure(target, heads, needed, data.batch_size, training.batch_tokens)

    lengths, problems = _lengths(run, target)

    answer = ANSWER_SHARE * data.max_new_tokens
    workers = Workers(target.device, -(-data.conversations // data.batch_size)).count
    # A batch is written together: its steps are those of its longest answer, and its prompts are written the same way.
    rounds = data.max_new_tokens * lengths.turns + (data.max_new_tokens / 2 if data.prompts == "self" else 0)
    per_conversation = rounds * speeds.step_B / data.batch_size + lengths.read * speeds.prefill_token
    per_conversation /= _WORKERS_GAIN if workers > 1 else 1.0
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
    states = state_bytes(run, count + data.validation, lengths.tokens)
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

    steps = training.epochs * max(1.0, tokens / training.batch_tokens / training.gradient_accumulation_steps)
    steps = min(steps, training.steps or steps)
    seconds_training = steps * training.gradient_accumulation_steps * speeds.train_step
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
        + data.validation * 2 * answer * speeds.prefill_token,
        "eval": prompts * run.recipe.eval.max_new_tokens * speeds.single * ways,
        "export": 2.0,
    }
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
    cache = data.batch_size * lengths.cached * target.kv_bytes_per_token
    memory = _memory(run, target, heads, lengths, speeds, workers)
    own = target.parameters * target.dtype.itemsize
    room = free_bytes(target.device)
    for what, more in (
        ("Training", memory["training"] - own),
        ("The report", memory["report"] - own),
        ("Writing the longest conversation", lengths.cached * target.kv_bytes_per_token),
    ):
        if more > room:
            problems.append(
                f"{what} takes about {format_bytes(more)} beside the target, and {format_bytes(room)} are free on "
                f"{target.device}: lower {_REMEDIES[what]}."
            )
    beside = f"{format_bytes(cache)} at most, {data.batch_size} conversations of {lengths.cached} tokens"
    beside += ", and two batches at once" if workers > 1 else ""
    if memory["writing"] - own > room:
        beside += f"; {format_bytes(room)} are free: larger batches are written in halves"
    facts = [
        ("Target", f"{target.name}, {str(target.dtype).removeprefix('torch.')} on {target.device}"),
        ("Parameters", f"{target.parameters / 1e6:.1f} M, {format_bytes(own)}"),
        ("Heads", f"{config.family}, {heads.draft_steps} steps, {heads.trainable_parameters / 1e6:.1f} M to train"),
        ("A drafted token", f"{heads.flops_per_draft() / 1e6:.1f} MFLOP"),
        ("Conversations", f"about {count:.0f} (of {data.conversations} at most), {tokens} tokens"),
        ("A conversation", _described(lengths)),
        ("Hidden states on disk", f"{format_bytes(states)} ({len(needed)} of each token)"),
        (
            "Disk in all",
            f"{format_bytes(sum(written.values()))}; {format_bytes(disk)} still to write, {format_bytes(free)} free",
        ),
        ("KV cache while writing data", beside),
        ("Memory while writing data", f"about {format_bytes(memory['writing'])}"),
        ("Memory while training", f"about {format_bytes(memory['training'])}"),
        ("Memory of the report", f"about {format_bytes(memory['report'])}"),
    ]
    return Plan(facts, seconds, left, disk, free, memory, problems)


_REMEDIES = {
    "Training": "train.batch_tokens",
    "The report": "eval.max_new_tokens",
    "Writing the longest conversation": "data.max_new_tokens or data.max_prompt_tokens",
}
"""What to lower when memory does not hold it."""


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


def _memory(
    run: Run, target: Target, heads: DraftHead, lengths: Lengths, speeds: Speeds, workers: int
) -> dict[str, int]:
    """Bytes on the target's device at most, by what needs them; the target itself is in each."""
    data, training, size = run.recipe.data, run.recipe.train, target.dtype.itemsize
    own = target.parameters * size
    cache = data.batch_size * lengths.cached * target.kv_bytes_per_token
    weights = sum(parameter.numel() for parameter in heads.parameters())
    draft = heads.config.draft_width
    # The teacher's LM head is the target's own unless it is cut to the draft vocabulary.
    teacher = draft * target.hidden_size * size if draft < target.vocab_size else 0
    state = (len(aux_layers(run)) * target.hidden_size + draft) * (4 if target.dtype == torch.float32 else size)
    exact = 0
    if target.dtype.itemsize < 4:  # where a difference is judged, one part at a time is cast to float32
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in target.layers]
        exact = 4 * max(*layers, target.vocab_size * target.hidden_size)
    asked = data.max_prompt_tokens + run.recipe.eval.max_new_tokens + run.recipe.tune.max_nodes
    return {
        "writing": int(own + workers * CACHE_PEAK * cache),
        "training": own
        + 4 * weights
        + _GRADIENTS_AND_MOMENTS * heads.trainable_parameters
        + teacher
        + training.batch_tokens * state
        + speeds.kept_bytes,
        # transformers has a cache of its own beside ours.
        "report": own + weights * size + exact + 2 * asked * target.kv_bytes_per_token,
    }


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

    states = read()[0]
    kind = torch.float32 if target.dtype == torch.float32 else target.dtype
    teacher = Teacher(target, heads.draft_to_target_D)

    def learn(copies: int) -> None:
        batch = HeadBatch(
            torch.ones(copies, length, dtype=torch.long, device=target.device),
            torch.ones(copies, length, dtype=torch.bool, device=target.device),
            {aux_layer: state.to(kind).expand(copies, -1, -1) for aux_layer, state in states.items()},
        )
        with torch.autocast(target.device.type, dtype=kind, enabled=kind != torch.float32):
            loss = weighted(heads.unroll(batch), soft_ce, teacher.read(batch), 1.0)
        torch.autograd.backward([loss])
        heads.zero_grad(set_to_none=True)

    # A quarter of a training batch: the cost of a step grows with its tokens, and so does what it keeps.
    copies = max(1, batch_tokens // length // 4)
    one, two = (_kept(partial(learn, count), heads) for count in (1, 2))
    return Speeds(
        step_B=_seconds(step(rows), target),
        prefill_token=_seconds(read, target) / (4 * length),
        single=_seconds(step(1), target),
        train_step=_seconds(partial(learn, copies), target) * batch_tokens / (copies * length),
        kept_bytes=one + int((two - one) * max(0.0, batch_tokens / length - 1)),
    )


def _kept(learn: Callable[[], object], heads: DraftHead) -> int:
    """Bytes that a forward keeps for its backward, the heads' own weights left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in heads.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        learn()
    return sum(kept.values())


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
