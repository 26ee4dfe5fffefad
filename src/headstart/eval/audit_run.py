"""The run of an audit on a user's own target and heads: two proofs, and the figures they leave.

Two proofs, in float32 or where the bits are kept (`Target.exact`). Greedy: every drafter's tokens are those of plain
decoding, at every batch size. Sampling: under every verifier, the first tokens after a prompt come with the frequencies
that transformers' own model and logits warpers give them. The first token comes from the prefill; those after it were
decided by drafting and verifying.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from rich.console import Console

from headstart.decode.budget import Costs
from headstart.decode.drafting import Drafter
from headstart.decode.loop import Engine, check
from headstart.decode.options import DecodeOptions
from headstart.decode.sampling import Sampling
from headstart.decode.verify import RULES
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.eval.audit import AlwaysWrongDrafter, AuditResult, audit, plain_answers, random_weights, unused_tokens
from headstart.eval.bits import count_bits
from headstart.eval.compare import Drafters, named
from headstart.eval.distribution import MIN_EXPECTED, Exact, Text, compare, enumerate_texts
from headstart.eval.divergence import Judge
from headstart.eval.measure import environment
from headstart.eval.target_wrappers import RememberingTarget
from headstart.heads.base import DraftHead
from headstart.support.terminal import Bar, progress_bar
from headstart.target.model import Target
from headstart.tree.tree import TreeShape

SCHEMA_VERSION = 1
"""Of audit.json."""
LEVEL = 0.01
"""How often an honest audit is called not clean by chance, all sampling tests taken together (Bonferroni)."""
RANDOM, WRONG = "random heads", "always wrong"
DRAFTERS = ("dynamic", "static", RANDOM, WRONG, "ngram", "heads+ngram", "lookahead")
"""Drafters of the greedy proof."""
PROMPTS = (
    "What is the capital of France?",
    "Say yes or no: is water wet?",
    "Count from one to twenty.",
    "Repeat after me: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers.",
    "What is 17 + 25?",
    "Translate 'good morning' to Spanish.",
    "Name three primary colours.",
    "Write a short poem about the sea.",
    "Explain how a bicycle stays upright.",
    "List the days of the week.",
    "Who wrote Romeo and Juliet?",
    "Give me a JSON object with the keys name and age.",
    "Why is the sky blue?",
    "Continue: 2, 4, 8, 16,",
    "Summarise in one sentence: The cat sat on the mat and looked at the moon until morning came.",
)
"""What is asked when the user brings no questions: short, of many kinds, some with a nearly certain answer."""

_CANDIDATES = 8
"""Prompts that those of the sampling proof are chosen from: the first ones."""
_ROWS = 32
"""Rows that are sampled together."""


@dataclass(frozen=True)
class AuditOptions:
    """What to audit.

    Attributes:
        drafters: of the greedy proof, by name: `DRAFTERS`, or what the catalog knows.
        batch_sizes: of the greedy proof.
        max_new_tokens: longest output of the greedy proof.
        verifiers: of the sampling proof; by default all.
        temperatures: of the sampling proof; 0 is the greedy proof and always there.
        top_p: of the sampling proof.
        samples: drawn for each prompt, verifier and temperature.
        texts: prompts of the sampling proof: of the first few, the ones whose distribution is tested most sharply.
        depth: tokens of a sample; all but the first are decided by verifying drafts.
        seed: of sampling.
        heads_name: what the report calls the heads.
    """

    drafters: tuple[str, ...] = DRAFTERS
    batch_sizes: tuple[int, ...] = (1, 16)
    max_new_tokens: int = 32
    verifiers: tuple[str, ...] = tuple(RULES)
    temperatures: tuple[float, ...] = (0.7, 1.0)
    top_p: float = 0.9
    samples: int = 2000
    texts: int = 2
    depth: int = 3
    seed: int = 0
    heads_name: str = "heads"


class Source(Drafters, Protocol):
    """What is audited: `headstart.decoder.Decoder`."""

    @property
    def target(self) -> Target: ...

    @property
    def heads(self) -> DraftHead: ...


def run_audit(
    source: Source,
    prompts: Sequence[Sequence[int]],
    options: AuditOptions | None = None,
    progress: Console | None = None,
) -> dict[str, Any]:
    """Run both proofs.

    Args:
        source: target and heads, in float32 or with exact="bits".
        prompts: token ids of what is asked, at least two tokens each.
        options: what to audit.
        progress: where to draw progress bars; None for none.

    Returns:
        The content of audit.json: schema_version, clean, problems (a sentence each), prompts (as read by the target),
        greedy, sampling, bits (rows of logits compared, and how many differ in any bit), settings, environment.

    Raises:
        UserError: no prompts, an option out of range, or an unknown drafter or verifier; all before anything runs.
    """
    options = options or AuditOptions()
    started = perf_counter()
    warm = [temperature for temperature in options.temperatures if temperature != 0]
    _check(source.target, prompts, options)
    drafters = {name: _drafter(source, name) for name in options.drafters if name != WRONG}
    total = len(prompts) * (1 + len(options.drafters) * len(options.batch_sizes))
    with progress_bar(progress, "greedy", total) as bar:
        greedy, answers = _greedy(source, drafters, prompts, options, bar)
    drawn = options.texts * options.samples * len(warm) * len(options.verifiers)
    with progress_bar(progress, "sampling", drawn) as bar:
        sampling = _sampling(source, prompts, options, warm, bar) if warm else []
    bits = count_bits(source.target, list(zip(prompts, answers, strict=True)))
    problems = [problem for row in [*greedy, *sampling] if (problem := row["problem"])]
    if source.target.exact == "bits" and bits.differ:
        problems.append(f"{bits.differ} of {bits.rows} rows of logits differ from single steps in some bit.")
    return {
        "schema_version": SCHEMA_VERSION,
        "clean": not problems,
        "prompts": [_text(source.target, prompt) for prompt in prompts],
        "problems": problems,
        "greedy": greedy,
        "sampling": sampling,
        "bits": asdict(bits),
        "settings": {
            **asdict(options),
            "target": source.target.name,
            "target_fingerprint": source.target.identity().fingerprint,
            "prompts": len(prompts),
            "level": LEVEL,
            "least_expected": MIN_EXPECTED,
            "seconds": round(perf_counter() - started, 1),
        },
        "environment": environment(source.target),
    }


# -- greedy ----------------------------------------------------------------------------------------------------------


def _greedy(
    source: Source,
    drafters: dict[str, Drafter],
    prompts: Sequence[Sequence[int]],
    options: AuditOptions,
    bar: Bar,
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Every drafter at every batch size against plain decoding one prompt at a time, and what that said.

    Where bits are promised, in a short dtype, against plain decoding of the same batch: a prompt that is read beside
    others rounds otherwise.
    """

    def done(name: str, count: int) -> None:
        bar.advance(count, title=f"greedy, {name}")

    target, length = source.target, options.max_new_tokens
    answers = plain_answers(target, prompts, length, 1, done)
    by_batch = dict.fromkeys(options.batch_sizes, answers)
    if target.dtype not in (torch.float32, torch.float64):
        for batch in options.batch_sizes:
            if batch > 1:
                by_batch[batch] = plain_answers(target, prompts, length, batch)
    judge, rows = Judge(target), []
    for name in options.drafters:
        if name == WRONG:
            narrow = _narrow(source.heads)
            said = [answer for answers in by_batch.values() for answer in answers]
            drafters[name] = AlwaysWrongDrafter(narrow, unused_tokens(said, target.vocab_size, narrow.width))
        for batch in options.batch_sizes:
            plain = by_batch[batch]
            found = audit(target, {name: drafters[name]}, prompts, length, batch, plain, done, source.costs)[name]
            rows.append({"drafter": name, "batch_size": batch, **_identity(found, judge, prompts, plain)})
            if rows[-1]["problem"]:
                rows[-1]["problem"] = f"{name}, batch {batch}: {rows[-1]['problem']}"
    return rows, answers


def _identity(
    found: AuditResult, judge: Judge, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What came of one drafter; for each difference how near a tie it is, in float32 logits."""
    differences = []
    for one in found.differences:
        prefix = [*prompts[one.prompt], *answers[one.prompt][: one.position]]
        margin = None if None in one.tokens else judge.margin(prefix, one.tokens)
        differences.append({**asdict(one), "margin": margin})
    problem = None
    if found.different_tokens:
        problem = f"{found.different_tokens} of {found.tokens} tokens differ."
    elif found.drafter_error:
        problem = f"the drafter failed ({found.drafter_error})."
    return {
        "prompts": found.prompts,
        "tokens": found.tokens,
        "different_tokens": found.different_tokens,
        "different_prompts": found.different_prompts,
        "drafts_accepted": found.accepted,
        "rounds": found.rounds,
        "differences": differences,
        "problem": problem,
    }


def _drafter(source: Source, name: str) -> Drafter:
    """A drafter by its name in the audit. Where tuning found no tree that pays, heads are audited with a small one."""
    narrow = _narrow(source.heads)
    if name == RANDOM:
        return HeadDrafter(random_weights(source.heads), narrow)
    return named(source, name) or HeadDrafter(source.heads, narrow)


def _narrow(heads: DraftHead) -> TreeShape:
    """A small tree for drafters that know nothing."""
    return TreeShape.from_paths([(0,) * min(2, heads.draft_steps), (1,)])


# -- sampling --------------------------------------------------------------------------------------------------------


def _sampling(
    source: Source, prompts: Sequence[Sequence[int]], options: AuditOptions, warm: Sequence[float], bar: Bar
) -> list[dict[str, Any]]:
    """Every verifier at every temperature, on the prompts that test it most sharply."""
    target = source.target
    hottest = Sampling(max(warm), top_p=options.top_p)
    bar.update(title="sampling, choosing prompts")
    at_hand = enumerate(prompts[:_CANDIDATES])
    known = {number: enumerate_texts(target, prompt, hottest, options.depth) for number, prompt in at_hand}
    chosen = sorted(known, key=lambda number: (-_sharpness(known[number], options.samples), number))[: options.texts]
    level = LEVEL / max(1, len(options.verifiers) * len(warm) * len(chosen))
    remembering = RememberingTarget(target, options.depth - 1)
    rows = []
    for number in chosen:
        for temperature in warm:
            sampling = Sampling(temperature, top_p=options.top_p)
            exact = enumerate_texts(target, prompts[number], sampling, options.depth)
            for verifier in options.verifiers:
                done = partial(bar.advance, title=f"sampling, {verifier} at {temperature:g}")
                counts, accepted, rounds, error = draw_texts(
                    source, remembering, prompts[number], sampling, verifier, options, done
                )
                fit = compare(counts, exact)
                where = f"{verifier} at temperature {temperature:g}, prompt {number}"
                problem = None
                if error:
                    problem = f"{where}: the drafter failed ({error})."
                elif fit.impossible:
                    problem = f"{where}: {fit.impossible} of {fit.samples} samples should never be drawn."
                elif not fit.clean(level):
                    problem = f"{where}: the samples do not fit (p = {fit.p_value:.2g}, below {level:.2g})."
                rows.append(
                    {
                        "verifier": verifier,
                        "temperature": temperature,
                        "prompt": number,
                        **asdict(fit),
                        "level": level,
                        "enumerated": 1.0 - exact.rest,
                        "drafts_accepted": accepted,
                        "rounds": rounds,
                        "fits": fit.clean(level),
                        "problem": problem,
                    }
                )
    return rows


def draw_texts(
    source: Source,
    target: Target,
    prompt: Sequence[int],
    sampling: Sampling,
    verifier: str,
    options: AuditOptions,
    advance: Callable[[float], None] = lambda _: None,
) -> tuple[Counter[Text], int, int, str | None]:
    """How often each text of `options.depth` tokens is decoded after a prompt, with drafts in every round.

    Returns:
        (counts, drafts accepted, rounds, what the drafter raised if it did)
    """
    engine = Engine(target, _drafter(source, "heads"), _as_if_alone(source.costs))
    counts: Counter[Text] = Counter()
    accepted = rounds = 0
    error = None
    while (done := counts.total()) < options.samples:
        rows = min(_ROWS, options.samples - done)
        asked = DecodeOptions(
            max_new_tokens=options.depth,
            temperature=sampling.temperature,
            seed=options.seed + done,
            ignore_end=True,
            top_p=sampling.top_p,
            verifier=verifier,
            draft="on",
        )
        for output in engine.generate([prompt] * rows, asked):
            counts[tuple(output.tokens)] += 1
            accepted += sum(one.emitted - 1 for one in output.rounds)
            rounds += len(output.rounds)
            error = error or output.drafter_error
        advance(rows)
    return counts, accepted, rounds, error


def _as_if_alone(costs: Costs | None) -> Costs | None:
    """Costs under which a whole batch drafts as a single row would: large batches leave little to draft."""
    return replace(costs, widths=tuple(_ROWS * width for width in costs.widths)) if costs is not None else None


def _sharpness(exact: Exact, samples: int) -> float:
    """How much of a distribution can be tested: the probability in cells of their own, times their summed deviations.

    It is 0 for a certain text, and for one that is spread over a thousand rare ones.
    """
    kept = [prob for prob in exact.probs.values() if prob * samples >= MIN_EXPECTED]
    return sum(math.sqrt(prob * (1 - prob)) for prob in kept) * sum(kept)


def _text(target: Target, tokens: Sequence[int]) -> str:
    """Token ids as people read them, special tokens included."""
    return str(target.tokenizer.decode(tokens)) if target.tokenizer is not None else " ".join(map(str, tokens))


# -- small things ----------------------------------------------------------------------------------------------------


def _check(target: Target, prompts: Sequence[Sequence[int]], options: AuditOptions) -> None:
    for name in ("max_new_tokens", "samples", "texts"):
        if getattr(options, name) < 1:
            raise UserError(f"{name} is {getattr(options, name)}.", "Give a number of at least 1.")
    if options.depth < 2:
        raise UserError(f"depth is {options.depth}.", "Sample 2 tokens or more: the first one is never drafted.")
    if target.dtype not in (torch.float32, torch.float64) and target.exact != "bits":
        raise UserError(
            f"The target is in {target.dtype}, where trees and single tokens round differently.",
            'Load it in float32, or with exact="bits".',
        )
    longest = max(options.max_new_tokens, options.depth)
    for temperature in options.temperatures or (0.0,):
        for verifier in options.verifiers or ("auto",):
            check(target, prompts, DecodeOptions(longest, temperature, top_p=options.top_p, verifier=verifier))
    if min(map(len, prompts)) < 2:
        raise UserError("A prompt has a single token.", "Give each prompt at least two tokens.")
