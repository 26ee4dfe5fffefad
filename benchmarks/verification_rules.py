"""How many tokens a round emits under each verification rule, each with the children that suit it.

    python benchmarks/verification_rules.py [--rounds 2000] [--out FILE.json]

Simulated: after every node of a tree the target has a random distribution over 1,000 tokens, with normally distributed
logits, and the drafter's logits correlate with them. Trees have the same shape for all rules, and all rules see the
same distributions. What differs is how children are chosen: the most likely ones, all drawn, or all but one the most
likely and one drawn.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from record import here, record
from torch import Tensor

from headstart.decode.rules import RULES
from headstart.decode.verify import Row, streams
from headstart.tree.proposal import Children, SampledChildren
from headstart.tree.tree import TreeShape

VOCAB = 1000
SPREAD = 4.5
"""Standard deviation of logits; at temperature 1 the best token then has half of the probability on average."""
LIKENESS = {"poor": 0.75, "fair": 0.88, "good": 0.95}
"""Correlation of the drafter's logits with the target's."""
SHAPES = {
    "chain of 3": TreeShape.chain(3),
    "chain of 5": TreeShape.chain(5),
    "tree of 8": TreeShape.from_paths([(0, 0, 0), (0, 1), (1, 0), (2,)]),
    "tree of 16": TreeShape.from_paths([(0, 0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1), (2, 0), (3,), (0, 2)]),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000, help="of each rule in each setting")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.6, 1.0])
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args(arguments)
    rules = [name for name, rule in RULES.items() if rule.lossless]
    results: list[dict[str, Any]] = []
    print("| temperature | drafts | shape | " + " | ".join(rules) + " |\n|---|---|---|" + "---|" * len(rules))
    for temperature in options.temperatures:
        for likeness in LIKENESS:
            for shape in SHAPES:
                tokens = {
                    rule: emitted(rule, LIKENESS[likeness], SHAPES[shape], temperature, options.rounds)
                    for rule in rules
                    if SHAPES[shape].width == 1 or not RULES[rule].chains_only
                }
                results.append({"temperature": temperature, "drafts": likeness, "shape": shape, "tokens": tokens})
                cells = [f"{tokens[rule][0]:.3f} ±{tokens[rule][1]:.3f}" if rule in tokens else "" for rule in rules]
                print(f"| {temperature:g} | {likeness} | {shape} | " + " | ".join(cells) + " |", flush=True)
    if options.out:
        what = "Tokens of a round by verification rule, on drawn pairs of target and drafter; mean, half its interval."
        record(options.out, what, results, here(), __file__, arguments, {"rounds": options.rounds})


def emitted(rule: str, likeness: float, shape: TreeShape, temperature: float, rounds: int) -> tuple[float, float]:
    """Mean tokens of a round, and the half width of its 95 % interval."""
    verify, draft = streams(0)
    tables = torch.Generator().manual_seed(1)
    counts = []
    for _ in range(rounds):
        logits_2NV = SPREAD * torch.randn(2, shape.size, VOCAB, generator=tables)
        likely_NV = likeness * logits_2NV[0] + math.sqrt(1 - likeness**2) * logits_2NV[1]
        p_target_NV = (logits_2NV[0] / temperature).softmax(-1)
        q_draft_NV = (likely_NV / temperature).softmax(-1)
        tokens, sampled = grown(shape, q_draft_NV, RULES[rule].children, draft)
        row = Row(tokens, shape.parents, sampled, p_target_NV, lambda p_target_V, _: p_target_V)
        counts.append(len(RULES[rule].accept_row(row, verify).tokens))
    mean = sum(counts) / rounds
    return mean, 1.96 * math.sqrt(sum((count - mean) ** 2 for count in counts)) / rounds


def grown(
    shape: TreeShape, q_draft_NV: Tensor, children: Children, stream: torch.Generator
) -> tuple[list[int], dict[int, SampledChildren]]:
    """Tokens of each node of a shape, and how the drawn ones were drawn."""
    tokens, sampled = [0] * shape.size, {}
    for node, below in enumerate(shape.children):
        if not below:
            continue
        fixed = {Children.TOP_K: len(below), Children.TOP_K_AND_SAMPLED: len(below) - 1, Children.SAMPLED: 0}[children]
        q_draft_V = q_draft_NV[node].clone()
        top = q_draft_V.topk(fixed).indices
        q_draft_V[top] = 0.0
        children_tokens = top.tolist()
        if fixed < len(below):
            q_draft_V /= q_draft_V.sum()
            children_tokens += torch.multinomial(q_draft_V, len(below) - fixed, generator=stream).tolist()
            sampled[node] = SampledChildren(list(below[fixed:]), q_draft_V)
        for child, token in zip(below, children_tokens, strict=True):
            tokens[child] = token
    return tokens, sampled


if __name__ == "__main__":
    main()
