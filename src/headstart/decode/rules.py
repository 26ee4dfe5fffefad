"""Verification rules for sampling: which drafts of a row are accepted, and the token that follows them.

A rule is lossless when its tokens, continued by the target alone, are distributed as the target's own text, whatever
was drafted. Every rule below proves this for one node: its outcome, taken over all its random choices, is a draw from
p, the target's distribution after the node. The proofs need of a tree that

- the children of a node hold different tokens;
- sampled children are listed in the order in which they were drawn, each from q, the drafter's distribution, without
  those before it, and with noise that nothing else used;
- whether a sampled child is kept never depends on which token it holds. It may depend on tokens drawn elsewhere.

Children chosen without randomness (top-k children) may stand beside sampled ones, and hold any tokens.

Shape suffixes: V vocabulary. In formulas p is `p_target_V`, q is `q_draft_V` and norm(x+) is the positive part of x,
scaled to sum to 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

from headstart.decode.verify import Accepted, Row, Rule, Streams, Visited, uniform
from headstart.support.rng import draw, draw_at
from headstart.tree.proposal import Children


def top_k(row: Row, streams: Streams) -> Accepted:
    """Draw the next token from p; go on after the child that holds it, if there is one.

    The verification of EAGLE-2 and EAGLE-3 (arXiv 2406.16858, 2503.01840) up to the order of its draws. No rule accepts
    more of top-k children. Of sampled children it accepts less than the others, because it does not use q.
    """
    return _walk(row, lambda node: draw(row.p_target(node), streams.residual))


def greedy_draft(row: Row, streams: Streams) -> Accepted:
    """Greedy-draft sampling (arXiv 2502.18779): plain speculative sampling of one sampled child, then the top-k ones.

    The sampled child x ~ q is accepted with probability min(1, p(x) / q(x)). Otherwise the next token is drawn from
    norm((p - q)+), and the walk goes on after the child that holds it. Together min(p, q) + (p - q)+ = p.

    Drafters guess the most likely children and draw one more from the rest of their distribution, so q is 0 at the
    guessed tokens, and the residual keeps all of p there.
    """

    def next_token(node: int) -> int:
        p_target_V = row.p_target(node)
        for child, q_draft_V in islice(drawn_children(row, node), 1):
            if uniform(streams.accept) < ratio(p_target_V, q_draft_V, row.tokens[child]):
                return row.tokens[child]
            p_target_V, _ = residual(p_target_V, q_draft_V)
        return draw(p_target_V, streams.residual)

    return _walk(row, next_token)


def traversal(row: Row, streams: Streams) -> Accepted:
    """Traversal verification of a tree (arXiv 2505.12398): from the leaves up, in the order of the draws.

    Each node is visited with `reach`, the probability with which it or one of its descendants is to be accepted: 1 at
    the root, reach(child) = min(1, reach p(x) / q(x)). A node without children left is accepted with probability
    `reach`, and the next token is drawn from p. When a child was visited in vain, its parent goes on with

        p <- norm((reach p - q)+),  reach <- mass / (mass + 1 - reach),  q without the child's token,

    where mass is the sum of (reach p - q)+. The child takes sum of min(reach p, q) = reach - mass of the probability,
    the parent then (1 - reach + mass) times its new reach = mass: together `reach`, and of the tokens, reach p.

    Top-k children come after the sampled ones and count as drawn from a distribution that holds nothing else. For
    chains this is block verification (arXiv 2403.10444). Trying siblings one after the other from the root down (RRS,
    arXiv 2305.09781) never accepts more.
    """

    def visit(path: list[int], reach: float) -> Accepted | None:
        node, p_target_V = path[-1], row.p_target(path[-1])
        for child, q_draft_V in _tries(row, node):
            if reach == 0:
                return None
            below = reach * ratio(p_target_V, q_draft_V, row.tokens[child])
            if below > 0 and (found := visit([*path, child], min(1.0, below))):
                return found
            p_target_V, mass = residual(p_target_V, q_draft_V, reach)
            reach = _keep(mass, reach)
        if uniform(streams.accept) < reach:
            return _accepted(row, path, draw(p_target_V, streams.residual))
        return None

    accepted = visit([0], 1.0)
    assert accepted is not None, "the root's reach stays 1"
    return accepted


def typical(row: Row, streams: Streams, epsilon: float = 0.09, delta: float = 0.3) -> Accepted:
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1). Lossy: the output is not the target's distribution.

    A child is accepted when p(x) > min(epsilon, delta exp(-H(p))), H being the entropy in nats; delta is the square
    root of epsilon. Of the deepest accepted paths the most likely one wins, and the next token is drawn from p there.
    """
    paths, best = [([0], 0.0)], ([0], 0.0)
    while paths:
        path, log_prob = paths.pop()
        best = max(best, (path, log_prob), key=lambda found: (len(found[0]), found[1]))
        p_target_V = row.p_target(path[-1])
        threshold = min(epsilon, delta * math.exp(-float(torch.special.entr(p_target_V).sum())))
        for child in row.children[path[-1]]:
            p_child = float(p_target_V[row.tokens[child]])
            if p_child > threshold:
                paths.append(([*path, child], log_prob + math.log(p_child)))
    return _accepted(row, best[0], draw(row.p_target(best[0][-1]), streams.residual))


# -- for many rows at once ---------------------------------------------------------------------------------------------


def next_of_target(visited: Visited) -> Tensor:
    """`top_k` for many rows."""
    return draw_at(visited.p_target_MV, visited.residual_M)[0]


def next_by_greedy_draft(visited: Visited) -> Tensor:
    """`greedy_draft` for many rows."""
    next_M, _ = draw_at(visited.p_target_MV, visited.residual_M)
    if visited.sampled_M is None or visited.q_draft_MV is None:
        return next_M
    is_sampled_M, sampled_M1 = visited.sampled_M >= 0, visited.sampled_M.clamp(min=0)[:, None]
    p_sampled_M, q_sampled_M = (
        probs.gather(1, sampled_M1)[:, 0].double() for probs in (visited.p_target_MV, visited.q_draft_MV)
    )
    kept_M = is_sampled_M & (visited.accept_M * q_sampled_M < p_sampled_M)
    residual_MV = visited.p_target_MV.sub_(visited.q_draft_MV).clamp_(min=0.0)
    # Without a rest p equals q, and the draft was rejected by a rounding error: p decides, see `residual`.
    rest_M, mass_M = draw_at(residual_MV, visited.residual_M)
    next_M = torch.where(is_sampled_M & (mass_M > 0), rest_M, next_M)
    return torch.where(kept_M, visited.sampled_M, next_M)


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("top_k", top_k, Children.TOP_K, next_of_target),
        Rule("greedy_draft", greedy_draft, Children.TOP_K_AND_SAMPLED, next_by_greedy_draft),
        Rule("traversal", traversal, Children.SAMPLED),
        Rule("typical", typical, Children.TOP_K, lossless=False),
    )
}


def _walk(row: Row, next_token: Callable[[int], int]) -> Accepted:
    """From the root down: draw the token after a node, and go on for as long as a child holds it."""
    path = [0]
    while True:
        token = next_token(path[-1])
        child = row.child(path[-1], token)
        if child is None:
            return _accepted(row, path, token)
        path.append(child)


def _accepted(row: Row, path: list[int], token: int) -> Accepted:
    return Accepted(path, [*(row.tokens[node] for node in path[1:]), token])


def drawn_children(row: Row, node: int) -> Iterator[tuple[int, Tensor]]:
    """A node's sampled children in the order of their draws, each with the distribution [V] that it was drawn from."""
    if node not in row.sampled:
        return
    q_draft_V = row.q_draft(node)
    for child in row.sampled[node].children:
        yield child, q_draft_V / q_draft_V.sum()
        q_draft_V = q_draft_V.index_fill(0, torch.tensor(row.tokens[child], device=q_draft_V.device), 0.0)


def _tries(row: Row, node: int) -> Iterator[tuple[int, Tensor]]:
    """The sampled children, then the top-k ones, each as if drawn from a distribution that holds its token alone."""
    sampled = row.sampled[node].children if node in row.sampled else []
    yield from drawn_children(row, node)
    for child in row.children[node]:
        if child not in sampled:
            q_draft_V = torch.zeros_like(row.p_target(node))
            q_draft_V[row.tokens[child]] = 1.0
            yield child, q_draft_V


def ratio(p_target_V: Tensor, q_draft_V: Tensor, token: int) -> float:
    """p / q of a token; a q that was rounded to 0 counts as the smallest number, so that p = 0 is never accepted."""
    return float(p_target_V[token]) / max(float(q_draft_V[token]), sys.float_info.min)


def residual(p_target_V: Tensor, q_draft_V: Tensor, reach: float = 1.0) -> tuple[Tensor, float]:
    """norm((reach p - q)+), and the mass that it was scaled from.

    Where nothing is left p is returned. With a reach of 1 that means p = q, so the draft was rejected by a rounding
    error: any distribution would do in theory, and p is the one that cannot leave the target's support. With a
    smaller reach the node is not going to be kept.
    """
    residual_V = (reach * p_target_V - q_draft_V).clamp_(min=0.0)
    mass = float(residual_V.sum())
    return (residual_V / mass, mass) if mass > 0 else (p_target_V, 0.0)


def _keep(mass: float, reach: float) -> float:
    """Probability of keeping a node whose children were rejected; see `traversal`. 1 when reach is 1."""
    return mass / (mass + 1.0 - reach) if reach < 1 else 1.0
