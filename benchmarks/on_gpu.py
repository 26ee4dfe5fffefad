"""Check correctness on a GPU and measure speed there, in one command of less than half an hour.

    python benchmarks/on_gpu.py                                    # a random model of Llama 3 8B's shape, in bfloat16
    python benchmarks/on_gpu.py --target FOLDER --heads FOLDER
    python benchmarks/on_gpu.py --sections training quickstart                    # these only
    python benchmarks/on_gpu.py --device cpu --quick --out out/on_gpu.json         # smoke test

`SECTIONS` run in order, and the results are written after each. A failed section is recorded, the others still run, and
the exit code is 1. Texts are compared on a small random model in float32, speeds are measured on the target. Without
--heads its heads are untrained: drafting costs the same, but hardly any draft is accepted.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import traceback
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import psutil
import torch
from gpu_bench import Bench, Row, refuse, untrained
from record import in_turn, record, rows_of
from torch.profiler import ProfilerActivity, profile

from headstart.data.states.store import Sample
from headstart.decode.loop import DecodeLoop
from headstart.decode.memory import reserve
from headstart.decode.options import DecodeOptions
from headstart.decode.texts import Generation
from headstart.errors import UserError
from headstart.eval.audit import run_audit
from headstart.eval.environment import environment, machine
from headstart.eval.options import AuditOptions
from headstart.heads.base import DraftHead, HeadBatch
from headstart.model.model import Target
from headstart.recipes.sections import TrainSection
from headstart.replay.patch import FINAL
from headstart.replay.recorded import Recorded
from headstart.support.files import read_json
from headstart.support.regions import compile_region
from headstart.train.batches import count_predictions, read_batch
from headstart.train.fused_loss import Teacher, batch_loss
from headstart.train.losses import LOSSES
from headstart.train.optimizers import make_optimizers
from headstart.tree.tree import Tree, TreeBatch

OUT = Path(__file__).parent / "results" / "on_gpu.json"
WHAT = "Checks and measurements on a GPU, by section."
ROOM = 0.75
"""Fraction of a batch's memory that is too little for the batch, and enough for half of it."""
COUNTED = 16
"""Tokens of the texts for counting waits: the profiler takes seconds per token."""
GIGABYTE = 1e9
LIMIT, QUICKSTART_MINUTES = 240, 2.5
"""Seconds of a section, and minutes of a quickstart's work without loading and report."""
PARTS = ("draft", "forward", "host")
"""Parts of a round."""


# -- sections ----------------------------------------------------------------------------------------------------------


def correctness(bench: Bench) -> None:
    """Check in float32 that greedy texts equal plain decoding and samples follow the model's distribution."""
    prompts = [prompt[:16] for prompt in bench.prompts(bench.small.target, 6)]
    asked = AuditOptions(
        batch_sizes=(1, 4), max_new_tokens=bench.sizes.new_tokens, temperature=(1.0,), samples=bench.sizes.samples
    )
    report = run_audit(bench.small, prompts, asked)
    for row in report["greedy"]:
        counts = {key: row[key] for key in ("tokens", "different_tokens", "drafts_accepted")}
        bench.note(f"{row['drafter']}, batch {row['batch_size']}", **counts)
    for row in report["sampling"]:
        figures = {key: row[key] for key in ("samples", "cells", "p_value", "drafts_accepted")}
        bench.note(f"{row['verifier']}, prompt {row['prompt']}", **figures)
    refuse(report["problems"])
    bench.check_forwards(bench.small.target)


def forwards(bench: Bench) -> None:
    """Time a tree forward as a CUDA graph (replayed on a CPU) and through the modules, in turns."""
    target = bench.decoder.target
    bench.check_forwards(target)
    for rows, width in product(bench.sizes.batches[:2], bench.sizes.widths):
        figures = compared(target, rows, width, bench.sizes.context, bench.sizes.repeats)
        bench.note(f"batch {rows}, width {width}", forward=figures)
    bench.check_forwards(target)  # again: a failed capture shows up during the timing


def decoding(bench: Bench) -> None:
    """Time greedy decoding with heads and plainly, in turns, and compare its peak memory with the reserved memory."""
    target, decoder = bench.decoder.target, bench.decoder
    loops = {"plain": decoder.loop("none"), "heads": decoder.loop("heads")}
    asked = DecodeOptions(bench.sizes.new_tokens, ignore_end=True)
    for rows in bench.sizes.batches:
        prompts = bench.prompts(target, rows)
        seconds, outputs = dict.fromkeys(loops, 0.0), dict[str, list[Generation]]()
        for number in range(4):
            for name in in_turn(list(loops), number):
                start = clock(target)
                outputs[name] = generate(loops[name], prompts, asked)
                seconds[name] += (clock(target) - start) if number else 0.0  # the first one captures graphs
        speeds = {name: 3 * rows * asked.max_new_tokens / seconds[name] for name in loops}
        rounds = {name: [done for output in outputs[name] for done in output.rounds] for name in loops}
        mean_ms = {
            name: {part: mean(getattr(done, f"{part}_ms") for done in rounds[name]) for part in PARTS} for name in loops
        }
        bench.note(
            f"batch {rows}",
            plain_tokens_per_second=speeds["plain"],
            heads_tokens_per_second=speeds["heads"],
            over_plain=speeds["heads"] / speeds["plain"],
            tokens_per_round=mean(done.emitted for done in rounds["heads"]),
            plain_step_ms=sum(mean_ms["plain"].values()),
            round_ms=mean_ms["heads"],
            reserved_gigabytes=needed_bytes(loops["heads"], prompts, asked) / GIGABYTE,
            peak_gigabytes=peak_bytes(bench, partial(generate, loops["heads"], prompts, asked)) / GIGABYTE,
        )


def training(bench: Bench) -> None:
    """Time training steps of EAGLE-3 heads on texts of many lengths: packed (on a GPU compiled), and padded."""
    target, section, (rows, longest) = bench.decoder.target, TrainSection(lr=1e-4, max_grad_norm=0.5), bench.sizes.texts
    draw, ways = torch.Generator().manual_seed(0), {"packed": bench.cuda, "padded": False}
    heads = {way: untrained(target).train() for way in ways}
    layers = sorted({*heads["packed"].aux_layers, FINAL})
    texts = [torch.randint(target.vocab_size, (longest * (1 + row) // rows,), generator=draw) for row in range(rows)]
    states = target.hidden_states([text.tolist() for text in texts], layers)
    pairs = zip(texts, states, strict=True)
    samples = [Sample(text_T, torch.arange(len(text_T)) >= len(text_T) // 4, of_text) for text_T, of_text in pairs]
    store = cast(Any, SimpleNamespace(samples=lambda *_: samples))
    tokens = sum(map(len, texts))
    for way, compiled in ways.items():
        packed = way == "packed"
        batch = read_batch(store, range(rows), layers, packed, -(-tokens // 1024) * 1024 if compiled else 0)
        heads[way].compiled = compiled
        trained = batch.on(target.device, target.dtype)
        losses, spent = list[float](), list[float]()
        start = clock(target)
        train_steps(bench, heads[way], trained, section, 1, losses, spent)  # compiles
        steps = partial(train_steps, bench, heads[way], trained, section, bench.sizes.repeats, losses, spent)
        peak = peak_bytes(bench, steps)
        step = median(spent[1:])
        bench.note(
            f"{way}{', compiled' * compiled}, {rows} texts of at most {longest} tokens",
            train_step_ms=1e3 * step,
            train_tokens_per_second=tokens / step,
            train_steps_per_second=1 / step,
            first_step_seconds=spent[0],
            took_seconds=clock(target) - start,
            first_loss=losses[0],
            last_loss=losses[-1],
            train_peak_gigabytes=peak / GIGABYTE,
        )
        refuse([] if losses[-1] < losses[0] else [f"The loss goes from {losses[0]} to {losses[-1]}."])


def train_steps(
    bench: Bench,
    heads: DraftHead,
    batch: HeadBatch,
    section: TrainSection,
    count: int,
    losses: list[float],
    spent: list[float],
) -> None:
    """Take training steps in mixed precision for at most a third of `LIMIT`; append each one's loss and seconds."""
    target, began = bench.decoder.target, perf_counter()
    optimizers, teacher = make_optimizers(heads, section), Teacher(target, heads.draft_to_target_D)
    loss_of = compile_region(LOSSES[section.loss]) if heads.compiled else LOSSES[section.loss]
    predictions = count_predictions(batch)
    for _ in range(count):
        start = clock(target)
        with torch.autocast(target.device.type, target.dtype, enabled=target.dtype != torch.float32):
            loss = batch_loss(heads.unroll(batch), loss_of, teacher.logits(batch), section.step_weight)
        (loss / predictions).backward()  # type: ignore[no-untyped-call]  # torch's own
        torch.nn.utils.clip_grad_norm_(heads.parameters(), section.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()) / predictions)
        spent.append(clock(target) - start)
        if perf_counter() - began > LIMIT / 3:
            return


def quickstart(bench: Bench) -> None:
    """Run the whole quickstart with SmolLM2 on the device: conversations, training, tuning and report."""
    if bench.options.quick:
        bench.note("the run", counted="not run: .ci/run has a small quickstart")
        return
    with TemporaryDirectory() as folder:
        settings = ["quickstart", f"minutes={QUICKSTART_MINUTES}", f"target.device={bench.device}", "--run-dir", folder]
        settings.append("train.compile=false")  # compiling would take most of these minutes
        start = perf_counter()
        subprocess.run([sys.executable, "-m", "headstart", "run", *settings], check=True, timeout=LIMIT)
        bench.note("the run", took_seconds=perf_counter() - start)
        for row in rows_of(read_json(Path(folder) / "report" / "results.json")["compare"]):
            bench.note(str(row.pop("name")), **row)


def splitting(bench: Bench) -> None:
    """Check that a batch too large for memory is split and gives the same texts, after a failed allocation too."""
    target, loop = bench.small.target, bench.small.loop("heads")
    prompts = bench.prompts(target, bench.sizes.batches[-1])
    asked = DecodeOptions(bench.sizes.new_tokens, ignore_end=True)
    expected: list[list[int]] = []
    peak = peak_bytes(bench, lambda: expected.extend(out.tokens for out in generate(loop, prompts, asked)))
    half = needed_bytes(loop, prompts[: len(prompts) // 2], asked)

    def counted_as(device: torch.device) -> int:
        return half - target.spare_bytes

    counting = mock.patch("headstart.decode.memory.free_bytes", side_effect=counted_as)
    ways: dict[str, AbstractContextManager[Any]] = {"counted before": counting}
    if bench.cuda:
        ways["run out"] = memory_for(bench, int(ROOM * peak))
    for name, shortage in ways.items():
        forget(target)
        with shortage, batches_of() as batches:
            texts = [out.tokens for out in generate(loop, prompts, asked)]
        bench.note(name, batches=batches, different_texts=sum(map(list.__ne__, texts, expected)))
        refuse(["It was not split."] if len(batches) < 3 else [])
        refuse(["The texts differ."] if texts != expected else [])


def waits(bench: Bench) -> None:
    """Count host waits and launches per round, as the difference between a longer and a shorter text."""
    if not bench.cuda:
        bench.note("waits and launches", counted="not counted: there is no CUDA device")
        return
    target, tokens = bench.decoder.target, min(bench.sizes.new_tokens, COUNTED)
    for drafter, temperature, rows in product(("none", "heads"), (0.0, 1.0), bench.sizes.batches[:2]):
        loop, prompts = bench.decoder.loop(drafter), bench.prompts(target, rows)
        counts = []
        for length in (tokens, tokens, tokens // 2):  # the first one captures graphs
            asked = DecodeOptions(length, temperature=temperature, seed=0, ignore_end=True)
            counts.append(counted(loop, prompts, asked))
        _, longer, shorter = counts
        rounds = longer["rounds"] - shorter["rounds"]
        figures = {key: (longer[key] - shorter[key]) / rounds for key in longer if key != "rounds"}
        bench.note(f"{drafter}, temperature {temperature:g}, batch {rows}", per_round=figures)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "training": training,
    "quickstart": quickstart,
    "decoding": decoding,
    "correctness": correctness,
    "forwards": forwards,
    "splitting": splitting,
    "waits": waits,
}
"""Sections in running order, the most informative first. On a large GPU each takes four minutes at most."""


# -- helpers of the sections ------------------------------------------------------------------------------------------


def clock(target: Target) -> float:
    """Return seconds after the device has finished its queue."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return perf_counter()


@torch.inference_mode()
def compared(target: Target, batch: int, width: int, context: int, repeats: int) -> Row:
    """Return median milliseconds, and the largest difference of logits from the modules' in standard deviations."""
    random = torch.Generator().manual_seed(width)
    cache = target.new_cache(batch, context + width)
    text_BT = torch.randint(target.vocab_size, (batch, context), generator=random)
    target.prefill(cache, text_BT.tolist())
    tokens_BN = torch.randint(target.vocab_size, (batch, width), generator=random)
    parents = [-1, *((node - 1) // 2 for node in range(1, width))]
    trees = TreeBatch.of([Tree(row, list(parents)) for row in tokens_BN.tolist()], target.device)
    target.record()
    ways = {"own": target._recorded, "modules": Recorded(refused="a benchmark compares the two")}
    spent, logits = {way: list[float]() for way in ways}, dict[str, torch.Tensor]()
    for number in range(repeats + 1):
        for way in in_turn(list(ways), number):
            with mock.patch.object(target, "_recorded", ways[way]):
                start = clock(target)
                logits[way] = target.forward_tree(cache, trees).logits_BTV.float()
                spent[way].append(1e3 * (clock(target) - start))
    ms = {way: median(spent[way][1:]) for way in ways}  # the first run warms up
    apart = (logits["own"] - logits["modules"]).abs().max() / logits["modules"].std()
    figures = {"own_ms": ms["own"], "modules_ms": ms["modules"], "over_modules": ms["modules"] / ms["own"]}
    return {**figures, "largest_difference": float(apart)}


def generate(loop: DecodeLoop, prompts: Sequence[Sequence[int]], asked: DecodeOptions) -> list[Generation]:
    """Decode; fail the section if a drafter failed."""
    outputs = loop.generate(prompts, asked)
    refuse([error for output in outputs[:1] if (error := output.drafter_error)])
    return outputs


def counted(loop: DecodeLoop, prompts: Sequence[Sequence[int]], asked: DecodeOptions) -> dict[str, int]:
    """Count rounds, host waits visible to torch, and calls that queue work on the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            outputs = generate(loop, prompts, asked)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = sum("called a synchronizing" in str(warning.message) for warning in caught)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:  # calls of CUDA's runtime among them
        generate(loop, prompts, asked)
    calls: Counter[str] = Counter()
    for event in profiled.key_averages():
        for kind, word in (("kernels", "LaunchKernel"), ("graphs", "GraphLaunch"), ("copies", "MemcpyAsync")):
            calls[kind] += event.count if word in event.key else 0
    refuse([] if calls["kernels"] else ["The profiler sees no launches; is CUPTI installed?"])
    rounds = max(len(output.rounds) for output in outputs)
    return {"rounds": rounds, "waits": waits, **{kind: calls[kind] for kind in ("kernels", "graphs", "copies")}}


def needed_bytes(loop: DecodeLoop, prompts: Sequence[Sequence[int]], asked: DecodeOptions) -> int:
    """Return the least free memory for `reserve` to admit a batch with full trees."""
    nodes = 1 + sum(drafter.max_nodes - 1 for drafter in loop.drafters)
    keep = sum(getattr(drafter, "bytes_per_token", 0) for drafter in loop.drafters)

    def fits(free: int) -> bool:
        try:
            return reserve(loop.target, prompts, asked.max_new_tokens, nodes, keep, free=free) == nodes
        except UserError:
            return False

    return bisect_left(range(1 << 45), True, key=fits)


def peak_bytes(bench: Bench, work: Callable[[], object]) -> int:
    """Return the peak memory of some work, beyond the memory in use before."""
    for decoder in ("decoder", "small"):
        if decoder in vars(bench):
            forget(getattr(bench, decoder).target)
    if not bench.cuda:
        with suppress(OSError):  # resets the peak of the process, if permitted
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = int(psutil.Process().memory_info().rss)
        work()
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return max(0, 1024 * int(status.partition("VmHWM:")[2].split()[0]) - before)
    torch.cuda.reset_peak_memory_stats(bench.device)
    reserved = torch.cuda.memory_reserved(bench.device)
    work()
    return torch.cuda.max_memory_reserved(bench.device) - reserved


def forget(target: Target) -> None:
    """Release captured graphs and the memory that torch caches."""
    if target._graphs is not None:
        target._graphs._spares = []
    gc.collect()
    if target.device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def memory_for(bench: Bench, more: int) -> Iterator[None]:
    """Limit torch to `more` further bytes of device memory."""
    _, total = torch.cuda.mem_get_info(bench.device)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(bench.device) + more) / total, bench.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, bench.device)


@contextmanager
def batches_of() -> Iterator[list[int]]:
    """Collect the number of rows of each batch that a loop begins."""
    batches: list[int] = []
    decode = DecodeLoop._decode

    def noted(loop: DecodeLoop, rows: Any, check: Any, numbers: Sequence[int]) -> bool:
        batches.append(len(numbers))
        return decode(loop, rows, check, numbers)

    with mock.patch.object(DecodeLoop, "_decode", noted):
        yield batches


# -- the command -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id; default: a random 8B model")
    parser.add_argument("--heads", help="folder of heads; default: untrained heads")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="smoke test: toy models, few tokens")
    parser.add_argument("--out", type=Path, help=f"file for the figures; default: results/{OUT.name}")
    options = parser.parse_args(arguments)
    if options.out is None and (options.quick or options.device == "cpu"):
        parser.error("add --out FILE: smoke tests and CPU figures do not belong in benchmarks/results")
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; for a smoke test add --device cpu --quick --out FILE")
    bench = Bench(options)
    outcomes = [run(bench, name, SECTIONS[name], arguments) for name in options.sections]
    if not all(outcomes):
        raise SystemExit(1)


def run(bench: Bench, name: str, section: Callable[[Bench], None], arguments: Sequence[str] | None) -> bool:
    """Run a section, write all rows so far, and return whether it passed."""
    bench.section, start, outcome = name, perf_counter(), "passed"
    bench.say((section.__doc__ or "").splitlines()[0])
    try:
        section(bench)
    except Exception as error:
        traceback.print_exc()
        outcome = f"failed: {type(error).__name__}: {error}"
    bench.rows.append({"name": name, "outcome": outcome, "took_seconds": perf_counter() - start})
    bench.say(outcome)
    gc.collect()
    if bench.cuda:
        torch.cuda.empty_cache()
    options, computer = bench.options, {**machine(), "device": str(bench.device), "torch": torch.__version__}
    settings: dict[str, Any] = {"target": options.target and Path(options.target).name, "heads": bool(options.heads)}
    if "decoder" in vars(bench):
        computer = environment(bench.decoder.target)
    settings |= {"sizes": "quick" if options.quick else "full"}
    record(options.out or OUT, WHAT, bench.rows, computer, __file__, arguments, settings)
    return outcome == "passed"


if __name__ == "__main__":
    main()
