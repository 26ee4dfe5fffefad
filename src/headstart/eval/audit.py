"""The audit: proof on a user's own target and heads that drafting changes nothing.

Three parts, in float32 or with exact bits (`Target.exact`):

- greedy: every drafter's tokens equal plain decoding's, at every batch size (below float32: plain decoding of
  the same batch);
- bits: whether a tree's logits equal those of single steps to the last bit;
- sampling: under every verifier, the first tokens after a prompt have the frequencies that transformers' own model and
  logits warpers give them (`headstart.eval.enumeration`). The first token comes from the prefill, later ones from
  drafting and verifying. Samples are drawn from a target with memoised logits (`headstart.eval.memoized`). In float32
  some are redrawn from the target itself, in batches with prompts of other lengths, and the same seeds must give the
  same tokens.

Shape suffixes: N tree nodes, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, product, zip_longest
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from headstart.decode.drafting import Drafter
from headstart.decode.loop import DecodeLoop, check
from headstart.decode.options import DecodeOptions
from headstart.decode.texts import Generation
from headstart.decode.verify import SAMPLES_DRAFTS
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.eval.divergence import Judge
from headstart.eval.enumeration import MIN_EXPECTED, Distribution, enumerate_texts, fit, least_seen
from headstart.eval.environment import environment
from headstart.eval.labels import label_of
from headstart.eval.memoized import MemoizedTarget
from headstart.eval.methods import Source, drafters_named
from headstart.eval.options import AuditOptions
from headstart.heads.base import DraftHead
from headstart.model.model import Target
from headstart.support.terminal import Bar, progress_bar
from headstart.tree.tree import Committed, Request, Tree, TreeBatch, TreeShape

SCHEMA_VERSION = 1  # of audit.json
LEVEL = 0.01  # false-alarm rate of the whole audit: all sampling tests together (Bonferroni)
RANDOM, WRONG = "random heads", "always wrong"
AUDITED = ("dynamic", "static", RANDOM, WRONG, "ngram", "heads+ngram", "lookahead")
"""Default drafters of the greedy proof."""
TEMPERATURES = (0.7, 1.0)  # default temperatures of the sampling proof
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
"""Default questions: short and diverse, some with a nearly certain answer."""

_CANDIDATES = 8  # number of leading prompts considered by the sampling proof
_ROWS = 32  # batch size of sampling
_DEPTH = 4  # text tokens in each tree of the bit comparison; each but the root follows two wrong siblings
_TEXTS, _TOKENS = 4, 16  # maximum texts of the bit comparison, and tokens of each

Prompts = Sequence[Sequence[int]]


def run_audit(
    source: Source, prompts: Prompts, options: AuditOptions | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Run all proofs on these prompts, in token ids, at least two each; the target is in float32 or exact="bits".

    Returns the content of audit.json: schema_version, clean, problems (a sentence each), prompts (as text), greedy,
    sampling, bits (rows of logits compared, and how many differ in any bit), settings (with the version of the heads),
    environment. Raises UserError, before anything runs, for unsupported settings.
    """
    options = options or AuditOptions()
    options = replace(
        options,
        drafters=options.drafters or AUDITED,
        verifier=options.verifier or tuple(SAMPLES_DRAFTS),
        temperature=[temperature for temperature in options.temperature or TEMPERATURES if temperature != 0],
    )
    started = perf_counter()
    target = source.target
    _check(target, prompts, options)
    drafters = {name: _drafters(source, name) for name in options.drafters if name != WRONG}
    parts = (part for resolved in drafters.values() for part in resolved if isinstance(part, HeadDrafter))
    total = len(prompts) * (1 + len(options.drafters) * len(options.batch_sizes))
    with progress_bar(console, "greedy", total) as bar:
        greedy, answers = _greedy(source, drafters, prompts, options, bar)
    bits = count_bits(target, list(zip(prompts, answers, strict=True)))
    samples = options.texts * options.samples * len(options.temperature) * len(options.verifier)
    with progress_bar(console, "sampling", samples) as bar:
        sampling = _sampling(source, prompts, options, bar) if options.temperature else []
    problems = [problem for row in [*greedy, *sampling] if (problem := row["problem"])]
    if target.exact == "bits" and bits["differ"]:
        problems.append(f"{bits['differ']} of {bits['rows']} rows of logits differ from single steps in some bit.")
    tokenizer = target.tokenizer
    return {
        "schema_version": SCHEMA_VERSION,
        "clean": not problems,
        "prompts": [tokenizer.decode(prompt) if tokenizer else str(prompt) for prompt in prompts],
        "problems": problems,
        "greedy": greedy,
        "sampling": sampling,
        "bits": bits,
        "settings": {
            **asdict(options),
            "target": target.name,
            "target_fingerprint": target.identity().fingerprint,
            "heads_version": next((part.heads.version for part in parts if part.heads.version), None),
            "prompts": len(prompts),
            "level": LEVEL,
            "least_expected": MIN_EXPECTED,
            "seconds": round(perf_counter() - started, 1),
        },
        "environment": environment(target),
    }


def _check(target: Target, prompts: Prompts, options: AuditOptions) -> None:
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
    for temperature, verifier in product(options.temperature or [0.0], options.verifier):
        sampling = DecodeOptions(longest, temperature=temperature, top_p=options.top_p, verifier=verifier)
        check(target, prompts, sampling)
    if min(map(len, prompts)) < 2:
        raise UserError("A prompt has a single token.", "Give each prompt at least two tokens.")


def _drafters(source: Source, name: str) -> tuple[Drafter, ...]:
    """Resolve a drafter's name. Heads get a small tree if tuning found none that pays."""
    if name == RANDOM:
        return (HeadDrafter(random_weights(source.heads), _small_tree(source.heads)),)
    return drafters_named(source, name) or (HeadDrafter(source.heads, _small_tree(source.heads)),)


def _small_tree(heads: DraftHead) -> TreeShape:
    """Return a small tree, for drafters without a tuned one."""
    return TreeShape.from_paths([(0,) * min(2, heads.draft_steps), (1,)])


# -- greedy ----------------------------------------------------------------------------------------------------------


def _greedy(
    source: Source, drafters: Mapping[str, tuple[Drafter, ...]], prompts: Prompts, options: AuditOptions, bar: Bar
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Compare every drafter at every batch size with plain decoding of single prompts; return rows and plain answers.

    Below float32, compare with plain decoding of the same batch, because batching changes rounding.
    """
    target, rows = source.target, list[dict[str, Any]]()
    judge = Judge(target)

    def decode(drafting: tuple[Drafter, ...], name: str, batch_size: int) -> list[Generation]:
        loop = DecodeLoop(target, *drafting, costs=source.costs if drafting else None)
        advance = partial(bar.advance, title=f"greedy, {name}")
        return decode_in_batches(loop, prompts, options.max_new_tokens, batch_size, advance)

    single = [output.tokens for output in decode((), "plain", 1)]
    exact = target.dtype in (torch.float32, torch.float64)
    answers = {
        batch: single if exact or batch == 1 else [output.tokens for output in decode((), "plain", batch)]
        for batch in options.batch_sizes
    }
    if WRONG in options.drafters:
        shape = _small_tree(source.heads)
        unused = unused_tokens(chain.from_iterable(answers.values()), target.vocab_size, shape.width)
        drafters = {**drafters, WRONG: (AlwaysWrongDrafter(shape, unused),)}
    for name in options.drafters:
        for batch in options.batch_sizes:
            plain, outputs = answers[batch], decode(drafters[name], name, batch)
            differences = judge.judge(prompts, plain, [output.tokens for output in outputs]).differences
            counts = tokens_that_differ(plain, outputs)
            problem = _drafter_problem(outputs)
            if counts["different_tokens"]:
                problem = f"{counts['different_tokens']} of {counts['tokens']} tokens differ."
            rows.append(
                {
                    "drafter": name,
                    "batch_size": batch,
                    "prompts": len(prompts),
                    **counts,
                    "different_prompts": len(differences),
                    "differences": [asdict(difference) for difference in differences],
                    "problem": problem and f"{label_of(name)}, batch {batch}: {problem}",
                }
            )
    return rows, single


def decode_in_batches(
    loop: DecodeLoop,
    prompts: Prompts,
    max_new_tokens: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Generation]:
    """Decode greedily, drafting in every round; return outputs in the order of `prompts`.

    Prompts of similar length share a batch; batches are the same for every loop. `advance` is called with their sizes.
    """
    options = DecodeOptions(max_new_tokens=max_new_tokens, draft="on")
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    outputs: dict[int, Generation] = {}
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        outputs.update(zip(batch, loop.generate([prompts[index] for index in batch], options), strict=True))
        advance(len(batch))
    return [outputs[index] for index in range(len(prompts))]


def tokens_that_differ(plain: Sequence[Sequence[int]], outputs: Sequence[Generation]) -> dict[str, int]:
    """Count plain tokens, differing positions (missing and surplus tokens too), accepted drafts, and rounds."""
    pairs = zip(plain, outputs, strict=True)
    different = sum(a != b for answer, output in pairs for a, b in zip_longest(answer, output.tokens))
    return {"tokens": sum(map(len, plain)), "different_tokens": different, **_draft_counts(outputs)}


def _draft_counts(outputs: Sequence[Generation]) -> dict[str, int]:
    rounds = [done for output in outputs for done in output.rounds]
    return {"drafts_accepted": sum(done.emitted - 1 for done in rounds), "rounds": len(rounds)}


def _drafter_problem(outputs: Sequence[Generation]) -> str | None:
    error = next((output.drafter_error for output in outputs if output.drafter_error), None)
    return error and f"the drafter failed ({error})."


# -- bits ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def count_bits(target: Target, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, int]:
    """Compare logits of single steps and of trees on (prompt, answer) texts; count rows, and rows with other bits."""
    rows = differ = 0
    for prompt, answer in list(texts)[:_TEXTS]:
        answer = answer[: min(_TOKENS, target.max_length - len(prompt)) // _DEPTH * _DEPTH]
        if not answer:
            continue
        shape = _tree(answer[:_DEPTH], target.vocab_size)[1]
        single = target.new_cache(1, len(prompt) + len(answer))
        drafted = target.new_cache(1, len(prompt) + len(answer) + len(shape))
        target.prefill(single, [prompt])
        target.prefill(drafted, [prompt])
        for start in range(0, len(answer), _DEPTH):
            tokens, parents, path = _tree(answer[start : start + _DEPTH], target.vocab_size)
            batch = TreeBatch.of([Tree(tokens, parents)], target.device)
            tree_NV = target.forward_tree(drafted, batch).logits_BTV[0]
            drafted.commit([path])
            for node in path:
                step = TreeBatch.roots([tokens[node]], target.device)
                step_V = target.forward_tree(single, step).logits_BTV[0, 0]
                single.commit([[0]])
                rows += 1
                differ += not torch.equal(step_V, tree_NV[node])
    return {"rows": rows, "differ": differ}


def _tree(tokens: Sequence[int], vocab_size: int) -> tuple[list[int], list[int], list[int]]:
    """Return tokens, parents, and the nodes of the right path.

    >>> _tree([5, 6], vocab_size=10)
    ([5, 7, 8, 6], [-1, 0, 0, 0], [0, 3])
    """
    nodes, parents, path = [tokens[0]], [-1], [0]
    for token in tokens[1:]:
        nodes += [(token + 1) % vocab_size, (token + 2) % vocab_size, token]
        parents += [path[-1]] * 3
        path.append(len(nodes) - 1)
    return nodes, parents, path


# -- sampling --------------------------------------------------------------------------------------------------------


def _sampling(source: Source, prompts: Prompts, options: AuditOptions, bar: Bar) -> list[dict[str, Any]]:
    """Test every verifier at every temperature, on the prompts that give the sharpest tests."""
    bar.update(title="sampling, choosing prompts")
    common = DecodeOptions(options.depth, seed=options.seed, ignore_end=True, top_p=options.top_p, draft="on")
    hottest = replace(common, temperature=max(options.temperature))
    sharpness = [
        _sharpness(enumerate_texts(source.target, prompt, hottest, options.depth), options.samples)
        for prompt in prompts[:_CANDIDATES]
    ]
    chosen = sorted(range(len(sharpness)), key=lambda index: (-sharpness[index], index))[: options.texts]
    level = LEVEL / (len(options.verifier) * len(options.temperature) * len(chosen))
    # No costs: in large batches they would prune most of each tree.
    loop = DecodeLoop(MemoizedTarget(source.target, options.depth - 1), *_drafters(source, "heads"))
    uncached = DecodeLoop(source.target, *loop.drafters)
    rows = []
    for index, temperature in product(chosen, options.temperature):
        sampling = replace(common, temperature=temperature)
        exact = enumerate_texts(source.target, prompts[index], sampling, options.depth)
        for verifier in options.verifier:
            bar.update(title=f"sampling, {verifier} at {temperature:g}")
            outputs: list[Generation] = []
            while len(outputs) < options.samples:
                prompt_B = [prompts[index]] * min(_ROWS, options.samples - len(outputs))
                seed = options.seed + len(outputs)
                outputs += loop.generate(prompt_B, replace(sampling, seed=seed, verifier=verifier))
                bar.advance(len(prompt_B))
            row = _fit_row(outputs, exact, verifier, level)
            row |= {"again": {}, "temperature": temperature, "prompt": index}
            if source.target.dtype in (torch.float32, torch.float64):
                row["again"] = _redraw(uncached, prompts, index, replace(sampling, verifier=verifier), outputs)
                if not row["problem"] and (differ := row["again"]["differ"]):
                    texts = row["again"]["texts"]
                    row["problem"] = f"{differ} of {texts} texts differ in a batch on the real cache."
            where = f"{verifier} at temperature {temperature:g}, prompt {index}"
            row["problem"] = row["problem"] and f"{where}: {row['problem']}"
            rows.append(row)
    return rows


def _redraw(
    loop: DecodeLoop, prompts: Prompts, index: int, sampling: DecodeOptions, outputs: Sequence[Generation]
) -> dict[str, int]:
    """Redraw the first samples of a prompt in batches with other prompts; count samples and differences."""
    count = min(_ROWS, len(outputs))
    batch = [prompts[index if row % 2 == 0 else row // 2 % len(prompts)] for row in range(count)]
    redrawn = loop.generate(batch, sampling)
    same = [redrawn[row].tokens == outputs[row].tokens for row in range(0, count, 2)]
    return {"texts": len(same), "differ": same.count(False)}


def _fit_row(outputs: Sequence[Generation], exact: Distribution, verifier: str, level: float) -> dict[str, Any]:
    """Test samples against the exact distribution."""
    result = fit(Counter(tuple(output.tokens) for output in outputs), exact)
    problem = _drafter_problem(outputs)
    if problem is None and result.impossible:
        problem = f"{result.impossible} of {result.samples} samples should never be drawn."
    elif problem is None and not result.clean(level):
        problem = f"the samples do not fit (p = {result.p_value:.2g}, below {level:.2g})."
    return {
        "verifier": verifier,
        **asdict(result),
        "level": level,
        "least_seen": least_seen(result.cells, result.samples, level),
        "enumerated": 1.0 - exact.rest,
        **_draft_counts(outputs),
        "problem": problem,
    }


def _sharpness(exact: Distribution, samples: int) -> float:
    """Return how testable a distribution is: the probability of all texts with their own cell, times the sum of their
    standard deviations. It is 0 for a certain text, and for a distribution over a thousand rare ones.
    """
    probs = [prob for prob in exact.probs.values() if prob * samples >= MIN_EXPECTED]
    return sum(math.sqrt(prob * (1 - prob)) for prob in probs) * sum(probs)


# -- drafters that cover code paths which trained heads rarely take ---------------------------------------------------


class AlwaysWrongDrafter:
    """A drafter of fixed tokens, one per rank, that the target never chooses; see `unused_tokens`."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, shape: TreeShape, tokens: Sequence[int]) -> None:
        assert len(set(tokens)) == len(tokens) >= shape.width, "each rank needs a token of its own"
        self.shape = shape
        self.max_nodes = shape.size
        self._tokens = list(tokens)

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> None: ...

    def propose(self, session: None, roots: TreeBatch, request: Request) -> list[Tree]:
        shape = TreeShape.chain(min(self.shape.depth, request.max_nodes - 1))
        if self.shape.size <= request.max_nodes and not request.chain:
            shape = self.shape
        drafts = [self._tokens[rank] for rank in shape.ranks[1:]]
        return [Tree([root, *drafts], list(shape.parents)) for root in roots.root_tokens]

    def commit(self, session: None, committed: Committed) -> None: ...

    def reorder(self, session: None, rows: Sequence[int]) -> None: ...

    def join(self, session: None, other: None) -> None: ...


def unused_tokens(answers: Iterable[Sequence[int]], vocab_size: int, count: int) -> list[int]:
    """Return the `count` highest token ids that no answer contains.

    >>> unused_tokens([[0, 4], [2]], vocab_size=5, count=2)
    [3, 1]
    """
    used = {token for answer in answers for token in answer}
    tokens = [token for token in range(vocab_size - 1, -1, -1) if token not in used][:count]
    assert len(tokens) == count, "the answers use nearly the whole vocabulary"
    return tokens


def random_weights(heads: DraftHead, seed: int = 0) -> DraftHead:
    """Copy these heads with their own weights drawn from a normal distribution, standard deviation 0.05.

    Other tensors, such as the target's embeddings, are shared with the original.
    """
    members = [value for part in heads.modules() for value in [*vars(part).values(), *part.buffers(recurse=False)]]
    noisy = copy.deepcopy(heads, {id(value): value for value in members if isinstance(value, Tensor)})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in noisy.parameters():  # whatever requires_grad: loaded heads are frozen
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return noisy
