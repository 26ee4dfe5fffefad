"""What has to hold on a GPU, and what it brings there, in one command of less than an hour.

    python benchmarks/on_gpu.py                                    # a random model of Llama 3 8B's shape, in bfloat16
    python benchmarks/on_gpu.py --target FOLDER --heads FOLDER
    python benchmarks/on_gpu.py --device cpu --quick --out out/on_gpu.json         # does it run?

Sections run one after the other, see `SECTIONS`. One that fails is recorded, and the others go on; the exit code is
then 1. The results are written after each. Texts are compared on a small random model in float32, speeds measured on
the target. Without --heads its heads are untrained: their drafts cost what those of trained heads cost, and hardly any
is accepted.
"""

from __future__ import annotations

import argparse
import gc
import random
import traceback
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any
from unittest import mock

import psutil
import torch
from forward import clock, compared
from record import record
from tables import written
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from headstart.api import load
from headstart.data.prompts.chat import has_template, prompt_tokens
from headstart.decode.loop import DecodeLoop, Generation
from headstart.decode.memory import reserve
from headstart.decode.options import DecodeOptions
from headstart.decoder import Decoder
from headstart.errors import UserError
from headstart.eval.audit import PROMPTS, run_audit
from headstart.eval.environment import environment, machine
from headstart.eval.options import AuditOptions
from headstart.heads.base import DraftHead, HeadBatch, family, make_config
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.recipes.sections import TrainSection
from headstart.replay.patch import FINAL
from headstart.train.losses import LOSSES
from headstart.train.optimizers import make_optimizers
from headstart.train.summing import Teacher, weighted
from headstart.tree.tree import TreeShape

OUT = Path(__file__).parent / "results" / "on_gpu.json"
WHAT = "Every section of the acceptance on a GPU: what was checked, and what was measured."
TREE = TreeShape.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
"""What untrained heads draft."""
SPREAD = 5.0
"""Standard deviation of the logits of the small model: so large that some texts are likely, and ties are rare."""
ROOM = 0.75
"""Share of the memory of a batch in which it must run out, and a half of it must not."""
COUNTED = 16
"""Tokens of the texts whose waits are counted: the profiler takes a second for every few of them."""
GIGABYTE = 1e9
PARTS = ("draft", "verify", "host")
"""Of a round."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much is done: with models of which shapes, in which batches, after and up to how many tokens, how often.

    Attributes:
        small: of the float32 model.
        samples: of each sampling test.
        texts: of a training step, and the tokens of each.
    """

    target: Mapping[str, int]
    small: Mapping[str, int]
    batches: Sequence[int]
    widths: Sequence[int]
    context: int
    new_tokens: int
    repeats: int
    samples: int
    texts: tuple[int, int]


def shape(vocab: int, hidden: int, mlp: int, layers: int, heads: int) -> dict[str, int]:
    """Sizes of a Llama, by their names in transformers; four query heads share a key head."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
    }


FULL = Sizes(
    target=shape(128256, 4096, 14336, 32, 32),
    small=shape(512, 512, 1024, 8, 8),
    batches=(1, 4, 16, 64),
    widths=(1, 8, 16, 64),
    context=512,
    new_tokens=128,
    repeats=20,
    samples=2000,
    texts=(16, 1024),
)
QUICK = Sizes(
    target=shape(128, 64, 96, 8, 4),
    small=shape(512, 64, 96, 8, 4),
    batches=(1, 4),
    widths=(1, 8),
    context=24,
    new_tokens=8,
    repeats=2,
    samples=50,
    texts=(2, 32),
)


class Bench:
    """What the sections work on; models are made when the first section asks for them.

    Args:
        options: as typed.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.started = options, perf_counter()
        self.device = torch.device(options.device)
        self.sizes = QUICK if options.quick else FULL
        self.rows: list[Row] = []
        self.section = ""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, text: str) -> None:
        print(f"[{perf_counter() - self.started:6.1f} s] {self.section}: {text}", flush=True)

    def note(self, name: str, **figures: Any) -> None:
        """Keep a row of the results."""
        self.rows.append({"name": f"{self.section}, {name}", **figures})
        self.say(", ".join([name, *(f"{key} {written(value, key)}" for key, value in figures.items())]))

    def check_forwards(self, target: Target) -> None:
        """Fail the section where forwards over trees do not run as they should."""
        expected = "CUDA graphs" if self.cuda else "replayed"
        refuse([f"Forwards run {target.forwards}."] if target.forwards != expected else [])

    @cached_property
    def decoder(self) -> Decoder:
        """The target with its heads."""
        options = self.options
        if options.heads:
            return load(options.heads, options.target, dtype="bfloat16", device=str(self.device))
        if options.target:
            target = load_target(options.target, "bfloat16", str(self.device))
        else:
            target = Target(random_model(self.sizes.target, torch.bfloat16, self.device))
        return Decoder(target, untrained(target).to(target.dtype).eval().requires_grad_(False), TREE)

    @cached_property
    def small(self) -> Decoder:
        """A small random model in float32, with untrained heads."""
        model = random_model(self.sizes.small, torch.float32, self.device)
        with torch.no_grad():
            model.lm_head.weight.mul_(SPREAD / (model.lm_head.weight.std() * model.config.hidden_size**0.5))
        target = Target(model)
        return Decoder(target, untrained(target).eval().requires_grad_(False), TREE)

    def prompts(self, target: Target, rows: int) -> list[list[int]]:
        """Questions where the target has a chat template, else random tokens; lengths differ."""
        if target.tokenizer is not None and has_template(target.tokenizer):
            asked = [prompt_tokens([{"role": "user", "content": text}], target.tokenizer) for text in PROMPTS]
            return [asked[row % len(asked)] for row in range(rows)]
        draw, length = random.Random(0), self.sizes.context
        return [[draw.randrange(target.vocab_size) for _ in range(length - row % 5)] for row in range(rows)]


def random_model(sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> Any:
    """A random Llama, made on the device."""
    config = LlamaConfig(**sizes, max_position_embeddings=8192, tie_word_embeddings=False)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def untrained(target: Target) -> DraftHead:
    """EAGLE-3 heads in float32 as training starts with, but that nothing is solved for."""
    settings = {"family": "eagle3", "draft_steps": 7, "draft_vocab_size": min(32000, target.vocab_size)}
    config = make_config(settings, target)
    torch.manual_seed(0)
    heads = family(config.family)(config)
    heads.warm_start(target)
    return heads.to(target.device)


# -- sections ----------------------------------------------------------------------------------------------------------


def correctness(bench: Bench) -> None:
    """In float32, every drafter's greedy text is plain decoding's, and samples have the model's own distribution."""
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
    """A forward of the target over a tree as a CUDA graph, replayed and through the modules, in turns."""
    target = bench.decoder.target
    bench.check_forwards(target)
    for rows, width in product(bench.sizes.batches[:2], bench.sizes.widths):
        figures = compared(target, rows, width, bench.sizes.context, bench.sizes.repeats)
        bench.note(f"batch {rows}, width {width}", forward=figures)
    bench.check_forwards(target)  # still: what cannot be captured is found on the way


def decoding(bench: Bench) -> None:
    """Tokens a second with heads and plainly, in turns; greedy."""
    target, decoder = bench.decoder.target, bench.decoder
    loops = {"plain": decoder.loop("none"), "heads": decoder.loop("heads")}
    asked = DecodeOptions(bench.sizes.new_tokens, ignore_end=True)
    for rows in bench.sizes.batches:
        prompts = bench.prompts(target, rows)
        seconds, outputs = dict.fromkeys(loops, 0.0), dict[str, list[Generation]]()
        for number in range(4):
            for name in loops if number % 2 else reversed(loops):
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
        )


def training(bench: Bench) -> None:
    """A training step of EAGLE-3 heads over one batch of states, as the training loop takes it, in mixed precision."""
    target, section = bench.decoder.target, TrainSection(lr=1e-4, max_grad_norm=0.5)
    heads = untrained(target).train()
    rows, length = bench.sizes.texts
    tokens_BT = torch.randint(target.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    states = target.hidden_states(tokens_BT.tolist(), sorted({*heads.aux_layers, FINAL}))
    stacked = {layer: torch.stack([row[layer] for row in states]) for layer in states[0]}
    supervised_BT = (torch.arange(length) >= length // 4).expand(rows, length)
    batch = HeadBatch(tokens_BT.to(target.device), supervised_BT.to(target.device), stacked)
    optimizers, teacher = make_optimizers(heads, section), Teacher(target, heads.draft_to_target_D)
    spent, losses = list[float](), list[float]()

    def work() -> None:
        for _ in range(bench.sizes.repeats + 1):
            start = clock(target)
            with torch.autocast(target.device.type, target.dtype, enabled=target.dtype != torch.float32):
                loss = weighted(heads.unroll(batch), LOSSES[section.loss], teacher.read(batch), section.step_weight)
            (loss / int(supervised_BT.sum())).backward()  # type: ignore[no-untyped-call]  # torch's own
            torch.nn.utils.clip_grad_norm_(heads.parameters(), section.max_grad_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()) / int(supervised_BT.sum()))
            spent.append(clock(target) - start)

    peak = peak_bytes(bench, work)
    step = median(spent[1:])
    figures = {"train_step_ms": 1e3 * step, "train_tokens_per_second": rows * length / step}
    figures |= {"first_loss": losses[0], "last_loss": losses[-1], "train_peak_gigabytes": peak / GIGABYTE}
    bench.note(f"{rows} texts of {length} tokens", **figures)
    refuse([] if losses[-1] < losses[0] else [f"The loss goes from {losses[0]} to {losses[-1]}."])


def memory(bench: Bench) -> None:
    """What decoding takes at most, beside the free memory that a batch is asked to have before it begins."""
    target, loop = bench.decoder.target, bench.decoder.loop("heads")
    asked = DecodeOptions(bench.sizes.new_tokens, ignore_end=True)
    for rows in bench.sizes.batches:
        prompts = bench.prompts(target, rows)
        needed = needed_bytes(loop, prompts, asked)
        peak = peak_bytes(bench, lambda: generate(loop, prompts, asked))  # noqa: B023  # called at once
        figures = {"asked_gigabytes": needed / GIGABYTE, "peak_gigabytes": peak / GIGABYTE}
        bench.note(f"batch {rows}", **figures, peak_of_asked=peak / needed)


def splitting(bench: Bench) -> None:
    """A batch that memory does not hold is decoded in parts, with the same texts: where that is counted before, and on
    a GPU where an allocation fails."""
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
        refuse(["The texts are others."] if texts != expected else [])


def waits(bench: Bench) -> None:
    """How often a round makes the host wait, and what it launches: what a longer text takes beyond a shorter one."""
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
    "correctness": correctness,
    "decoding": decoding,
    "forwards": forwards,
    "training": training,
    "memory": memory,
    "splitting": splitting,
    "waits": waits,
}
"""In their order."""


# -- what sections count ----------------------------------------------------------------------------------------------


def refuse(problems: Sequence[str]) -> None:
    """Fail the section where there are any."""
    if problems:
        raise RuntimeError(" ".join(problems))


def generate(loop: DecodeLoop, prompts: Sequence[Sequence[int]], asked: DecodeOptions) -> list[Generation]:
    """Decode, with no drafter failing."""
    outputs = loop.generate(prompts, asked)
    refuse([error for output in outputs[:1] if (error := output.drafter_error)])
    return outputs


def counted(loop: DecodeLoop, prompts: Sequence[Sequence[int]], asked: DecodeOptions) -> dict[str, int]:
    """Rounds of a decode, waits of the host that torch can see, and calls that put work into the device's queue."""
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
    """The least free memory in which `reserve` lets a batch begin with all the nodes of its drafters."""
    nodes = 1 + sum(drafter.max_nodes - 1 for drafter in loop.drafters)
    keep = sum(getattr(drafter, "bytes_per_token", 0) for drafter in loop.drafters)

    def fits(free: int) -> bool:
        try:
            return reserve(loop.target, prompts, asked.max_new_tokens, nodes, keep, free=free) == nodes
        except UserError:
            return False

    return bisect_left(range(1 << 45), True, key=fits)


def peak_bytes(bench: Bench, work: Callable[[], object]) -> int:
    """Bytes that some work takes at most beyond what was there before."""
    for decoder in ("decoder", "small"):
        if decoder in vars(bench):
            forget(getattr(bench, decoder).target)
    if not bench.cuda:
        with suppress(OSError):  # the system's own peak begins anew, where it can
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
    """Let go of the memory that caches left to the next ones, and of what torch keeps for itself."""
    if target._graphs is not None:
        target._graphs.forget()
    gc.collect()
    if target.device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def memory_for(bench: Bench, more: int) -> Iterator[None]:
    """Within this context torch gets so much more memory of the device, and no byte above."""
    _, total = torch.cuda.mem_get_info(bench.device)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(bench.device) + more) / total, bench.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, bench.device)


@contextmanager
def batches_of() -> Iterator[list[int]]:
    """The rows of each batch that loops begin within this context."""
    batches: list[int] = []
    decode = DecodeLoop._decode

    def noted(loop: DecodeLoop, call: Any, numbers: Sequence[int]) -> bool:
        batches.append(len(numbers))
        return decode(loop, call, numbers)

    with mock.patch.object(DecodeLoop, "_decode", noted):
        yield batches


# -- the command -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a folder or Hub id; by default a random model of 8 billion parameters")
    parser.add_argument("--heads", help="a folder of heads for it; by default untrained ones")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="toy models, few tokens: does it run?")
    parser.add_argument("--out", type=Path, help=f"where the figures go, as JSON; {OUT.name} of the results by default")
    options = parser.parse_args(arguments)
    if options.out is None and (options.quick or options.device == "cpu"):
        parser.error("give --out: these figures are not for benchmarks/results")
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --quick --out FILE shows whether this runs")
    bench = Bench(options)
    outcomes = [run(bench, name, section, arguments) for name, section in SECTIONS.items()]
    if not all(outcomes):
        raise SystemExit(1)


def run(bench: Bench, name: str, section: Callable[[Bench], None], arguments: Sequence[str] | None) -> bool:
    """Whether a section passes; its outcome is written with all rows so far."""
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
