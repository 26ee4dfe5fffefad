"""Trees whose drafts follow their own paths, beside trees of independent depths and chains, at the same verify cost.

    python benchmarks/path_conditioned.py HEADS QUESTIONS.jsonl --conversations validation.jsonl --out out/paths

Every arm may verify the same number of nodes a round, and takes as many: a chain of that length, as far as the heads
reach; the best tree whose depths are drafted along the best path alone, whatever path a node is on (as DDTree,
arXiv 2604.12989, builds trees of one block pass); and the best tree of the heads' own, each node's children drafted
after its own path. Both kinds of trees are calibrated on the same texts, each with what it drafts. `one curve` is the
last arm with a calibration that knows depth alone. All arms answer each question in turns. Accepted tokens do not
depend on the clock.

Sampled texts differ from arm to arm, and so does luck. With --every-position all arms read the same sampled texts, of
the target alone, and draft a round at each of their positions; what a round counts is how many tokens it emits on
average, given its drafts.

Works with heads of any family. Where depths are drafted in one forward, both trees hold the same drafts.

Shape suffixes: B rows, W nodes of a level, D draft vocabulary, V vocabulary, K steps, T tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from arms import alternate
from record import record
from rich.console import Console
from tables import table, times
from torch import Tensor

import headstart
from headstart.data.conversations.records import read_conversations
from headstart.data.prompts.questions import read_questions
from headstart.decode.loop import Drafter
from headstart.decode.options import DecodeOptions
from headstart.decode.sampling import warp
from headstart.decode.verify import SamplingVerifier
from headstart.drafters.heads import HeadDrafter
from headstart.eval.environment import environment
from headstart.eval.figures import Totals, Unit, method_rounds, ratio_interval
from headstart.eval.methods import Method, Ours, Run
from headstart.heads.base import DraftHead
from headstart.model.model import Target, TargetOutput
from headstart.replay.patch import FINAL
from headstart.tree.calibration import Calibration
from headstart.tree.tree import Committed, Tree, TreeBatch, TreeShape
from headstart.tuning.acceptance import (
    Drafts,
    Supervised,
    measure_drafts,
    sampled_answers,
    sampling_tables,
)
from headstart.tuning.calibrate import fit_calibration

MAX_RANK = 10
"""Drafts of a depth that are told apart when trees are calibrated."""
CHAIN, INDEPENDENT, ONE_CURVE, PATHS = "chain", "independent depths", "own paths, one curve", "own paths"
ARMS = (CHAIN, INDEPENDENT, ONE_CURVE, PATHS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path, help="a heads folder")
    parser.add_argument("questions", type=Path)
    parser.add_argument("--conversations", type=Path, required=True, help="to calibrate on, answered by the target")
    parser.add_argument("--texts", type=int, default=24, help="of these conversations at most")
    parser.add_argument("--nodes", nargs="+", type=int, help="of a round, root included; by default a chain's and 16")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--limit", type=int, default=16, help="questions at most")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--every-position", action="store_true", help="sampling: a round at each, on the same texts")
    parser.add_argument("--target", help="instead of the one that the heads name")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=Path("out/path_conditioned"))
    options = parser.parse_args(arguments)

    decoder = headstart.load(options.heads, options.target, dtype=options.dtype)
    target, heads = decoder.target, decoder.heads
    nodes = sorted(set(options.nodes or (heads.draft_steps + 1, 16)))
    texts = [item for item in read_conversations(options.conversations) if True in item.supervised][: options.texts]
    fitted = calibrations(target, heads, texts)
    questions = read_questions(options.questions)[: options.limit]
    settings = {
        "heads": options.heads.name,
        "family": heads.family,
        "draft_steps": heads.draft_steps,
        "questions": len(questions),
        "max_new_tokens": options.max_new_tokens,
        "calibrated_on": len(texts),
    }
    rows: list[dict[str, Any]] = []
    for temperature in options.temperatures:
        every_position = options.every_position and temperature > 0
        methods = methods_of(target, heads, fitted, nodes, temperature, every_position)
        folder = options.out / f"temperature-{temperature:g}{'-every-position' * every_position}"
        of_arm = {**settings, "every_position": every_position}
        units = alternate(target, methods, questions, folder, of_arm, options.max_new_tokens)
        rows += rows_of(units, nodes, temperature)
        what = "Tokens a round of chains and trees that verify equally many nodes, all arms taking turns."
        record(options.out / "path_conditioned.json", what, rows, environment(target), __file__, arguments, settings)
    print(report(rows))


# -- what is compared --------------------------------------------------------------------------------------------------


class AlongBestPath:
    """Heads that draft along the best path alone: all nodes of a depth share what is drafted there.

    Whatever a node's own path is, its children are those of the best path at this depth. All else is the heads' own.
    """

    def __init__(self, heads: DraftHead) -> None:
        self.heads = heads
        self._best_B1 = torch.zeros(1, 1, dtype=torch.long)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.heads, name)

    def eval(self) -> AlongBestPath:
        self.heads.eval()
        return self

    def draft_step(self, session: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        """Logits [B, 1, D] after the best path, whatever nodes are asked for."""
        last_B1 = self._best_B1 if depth else tokens_BW
        logits_B1D = self.heads.draft_step(session, last_B1, torch.zeros_like(last_B1), depth)
        self._best_B1 = self.heads.draft_to_target_D[logits_B1D[:, :1].argmax(-1)]
        return logits_B1D


@dataclass(frozen=True)
class Fitted:
    """Calibrations of one way to draft: for greedy decoding, and for temperature 1."""

    greedy: Calibration
    sampled: Calibration


def calibrations(target: Target, heads: DraftHead, texts: Sequence[Supervised]) -> dict[str, Fitted]:
    """Those of each arm that needs one, all on the same texts."""
    console = Console()
    sampled = sampled_answers(target, texts, heads.draft_steps + 2, console)
    drafts = [
        measure_drafts(target, heads, texts, MAX_RANK, console),
        measure_drafts(target, heads, sampled, MAX_RANK, console, sampling=True),
    ]
    along = [
        measure_along(target, heads, texts)._replace(likely_OKR=None, sampled_OKR=None),
        measure_along(target, heads, sampled),
    ]

    def fitted(measured: Sequence[Drafts]) -> Fitted:
        return Fitted(*(fit_calibration(*of_texts.arrays) for of_texts in measured))

    plain = Fitted(*(fit_calibration(*measured.arrays, by_path=False) for measured in drafts))
    return {ONE_CURVE: plain, PATHS: fitted(drafts), INDEPENDENT: fitted(along)}


@torch.inference_mode()
def measure_along(target: Target, heads: DraftHead, texts: Sequence[Supervised]) -> Drafts:
    """What `measure_drafts` measures for sampling, for drafts along the best path, whatever the text goes on with.

    Drafted as decoding does, from every position of the answers in turn.
    """
    along, device = AlongBestPath(heads.eval()), target.device
    to_draft_V = torch.full((target.vocab_size,), -1, device=device)
    to_draft_V[heads.draft_to_target_D] = torch.arange(len(heads.draft_to_target_D), device=device)
    steps = range(heads.draft_steps)
    tables_of: list[list[Tensor]] = []
    for text in texts:
        states = target.hidden_states([text.tokens], sorted({*heads.aux_layers, FINAL}))[0]
        own_TD = target.lm_head(states[FINAL]).float().softmax(-1)[:, heads.draft_to_target_D]
        truth_T = to_draft_V[torch.tensor(text.tokens, device=device)]
        start = max(1, text.supervised.index(True))
        read = {layer: states[layer][None] for layer in heads.aux_layers}
        session = heads.prefill([text.tokens[:start]], {layer: part[:, :start] for layer, part in read.items()})
        for root in range(start, len(text.tokens) - heads.draft_steps):
            node_11 = torch.tensor([[text.tokens[root]]], device=device)
            logits_KD = torch.cat([along.draft_step(session, node_11, node_11, step)[0] for step in steps])
            next_K = slice(root, root + heads.draft_steps)
            truth_K = truth_T[root + 1 : root + 1 + heads.draft_steps]
            tables = sampling_tables(logits_KD.float(), truth_K, own_TD[next_K], MAX_RANK)
            tables_of.append([part.cpu() for part in tables])
            here = {layer: part[:, root : root + 1] for layer, part in read.items()}
            heads.commit(session, Committed.of([[text.tokens[root]]], here, device))
    return Drafts(*(torch.stack(parts) for parts in zip(*tables_of, strict=True)))


class EveryPosition:
    """A round at every position of a text that the target draws alone, the same text with every drafter.

    A round emits, for the record, what it would on average: the sum over its nodes of how likely each is accepted by
    the rule that sampling follows by default, given the drafts.

    Args:
        target: the frozen model.
        drafters: what drafts.
        temperature: of sampling.
    """

    def __init__(self, target: Target, drafters: Sequence[Drafter], temperature: float) -> None:
        self._ours = Ours(target, drafters, DecodeOptions(temperature=temperature, draft="on"))

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Run:
        """As any method; one prompt at a time."""
        assert len(prompts) == 1, "rounds are told apart by their order"
        expected: list[float] = []

        def one_token(options: DecodeOptions, prompts: Sequence[Sequence[int]], _: Target) -> SamplingVerifier:
            return OneToken(expected, options, prompts)

        with patch("headstart.decode.loop.make_verifier", one_token):
            run = self._ours.run(prompts, max_new_tokens, seed)
        means = cast(list[int], expected)  # not whole numbers, and nothing below needs them to be
        rounds = [replace(done, emitted=mean) for done, mean in zip(run.rounds[0], means, strict=True)]
        return replace(run, rounds=[rounds])


class OneToken(SamplingVerifier):
    """Emits one token a round, and notes in `expected` how many sampling would emit on average, given the drafts."""

    def __init__(self, expected: list[float], options: DecodeOptions, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(options, prompts, options.seed or 0, True)
        self._expected = expected

    def accept(self, batch: TreeBatch, out: TargetOutput) -> tuple[Committed, TreeBatch]:
        (tree,) = batch.trees
        self._expected.append(expected_tokens(tree, warp(self._sampling, out.logits_BTV[0])))
        states = {layer: state_BNE[:, :1] for layer, state_BNE in out.aux_hidden_states.items()}
        roots = TreeBatch.roots(batch.root_tokens, on_device=batch.root_B)
        return super().accept(roots, TargetOutput(out.logits_BTV[:, :1], states))


def expected_tokens(tree: Tree, p_target_NV: Tensor) -> float:
    """Tokens that sampling emits in a round on average, given the drafts and the target's distributions."""
    accepted = [1.0, *[0.0] * (tree.size - 1)]
    for node, children in enumerate(tree.children):
        rejected, rest_V = 1.0, p_target_NV[node]
        for child in children:
            if child in tree.drawn:
                q_draft_V, token = tree.drawn[child].q_draft_V(len(rest_V)), tree.tokens[child]
                kept = min(1.0, float(rest_V[token]) / float(q_draft_V[token]))
                accepted[child], rejected = accepted[node] * kept, 1.0 - kept
                rest_V = (rest_V - q_draft_V).clamp(min=0.0)
                rest_V = rest_V / rest_V.sum().clamp(min=1e-30)
        for child in children:
            if child not in tree.drawn:
                accepted[child] = accepted[node] * rejected * float(rest_V[tree.tokens[child]])
    return sum(accepted)


def methods_of(
    target: Target,
    heads: DraftHead,
    fitted: Mapping[str, Fitted],
    nodes: Sequence[int],
    temperature: float,
    every_position: bool = False,
) -> dict[str, Method]:
    """Each arm with each number of nodes. Without costs, trees take all the nodes they may."""
    shape, along = TreeShape.chain(heads.draft_steps), cast(DraftHead, AlongBestPath(heads))
    dynamic = {
        arm: partial(HeadDrafter, along if arm == INDEPENDENT else heads, shape, "dynamic", calibrations.greedy)
        for arm, calibrations in fitted.items()
    }
    methods: dict[str, Method] = {}
    ours: Callable[[list[Drafter]], Method] = partial(
        Ours, target, options=DecodeOptions(temperature=temperature, draft="on")
    )
    if every_position:
        ours = partial(EveryPosition, target, temperature=temperature)
    for count in nodes:
        chain = HeadDrafter(heads, TreeShape.chain(min(count - 1, heads.draft_steps)))
        methods[named(CHAIN, count)] = ours([chain])
        for arm in ARMS[1:]:
            methods[named(arm, count)] = ours([dynamic[arm](max_nodes=count, sampled=fitted[arm].sampled)])
    return methods


def named(arm: str, nodes: int) -> str:
    """An arm that may verify so many nodes."""
    return f"{arm}, {nodes} nodes"


# -- figures -----------------------------------------------------------------------------------------------------------


def rows_of(units: Sequence[Unit], nodes: Sequence[int], temperature: float) -> list[dict[str, Any]]:
    """A row for each arm and number of nodes; both ratios are of tokens a round, paired by question."""
    rows = []
    for count in nodes:
        for arm in ARMS:
            method = named(arm, count)
            taken = method_rounds(units, method)
            tau = sum(done.emitted for done in taken) / len(taken)
            rows.append(
                {
                    "drafts": arm,
                    "nodes": count,
                    "temperature": temperature,
                    "tau": tau,
                    "accepted_per_round": tau - 1,
                    "nodes_per_round": sum(done.nodes for done in taken) / len(taken),
                    "over_chain": over(units, method, named(CHAIN, count)),
                    "over_independent": over(units, method, named(INDEPENDENT, count)),
                    "drafter_error": next((e for unit in units if (e := unit.runs[method].drafter_error)), None),
                }
            )
    return rows


def over(units: Sequence[Unit], method: str, base: str) -> Any:
    """Tokens a round of one arm over another's, with its interval."""
    rounds = {name: [method_rounds([unit], name) for unit in units] for name in (method, base)}
    ours, theirs = (
        Totals([sum(done.emitted for done in unit) for unit in rounds[name]], [*map(len, rounds[name])])
        for name in (method, base)
    )
    return ratio_interval(ours, theirs, seed=0)


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """The figures as Markdown."""
    return table(
        ["drafts", "nodes", "temperature", "τ", "accepted a round", "nodes a round", "over chain", "over independent"],
        [
            [
                *(row["drafts"], row["nodes"], f"{row['temperature']:g}", f"{row['tau']:.3f}"),
                *(f"{row['accepted_per_round']:.3f}", f"{row['nodes_per_round']:.1f}"),
                *(times(row["over_chain"]), times(row["over_independent"])),
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
