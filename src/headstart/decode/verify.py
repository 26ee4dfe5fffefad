"""Verification: greedy (`GreedyVerifier`) and sampling (`SamplingVerifier`); `make_verifier` chooses.

On a CPU, or with processors, sampling walks down the trees of all rows depth by depth and computes the target's
distribution only at visited nodes. On other devices, where launches cost more than arithmetic, it draws the next token
at every node at once and then walks as in greedy verification, with one device synchronisation.

Lossless: whatever the drafts, the emitted tokens have exactly the target's distribution. `tests/reference.py` states
the rule for one node; the tests prove it by enumeration and compare this code with it. The proof requires of every
tree:

- The children of a node hold different tokens.
- At most one child of a node is sampled, from random numbers used for nothing else.
- Whether a sampled child is pruned never depends on its own token. It may depend on tokens sampled elsewhere.

Deterministic siblings of a sampled child may hold any other tokens, also ones with q > 0.

Shape suffixes: B rows, N tree nodes, K depths, M running rows or nodes, X nodes of all rows (in `parts_BX`, columns of
packed numbers), W sampled nodes, P nodes of an accepted path, V vocabulary, D draft vocabulary. In formulas p is the
target's distribution after a node, q the distribution of its sampled child, and norm(x+) the positive part of x,
normalised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import MinNewTokensLengthLogitsProcessor

from headstart.decode.options import DecodeOptions, Processor, SamplingOptions
from headstart.decode.sampling import Prefixes, warp
from headstart.kernels import draft_kernels
from headstart.model.model import Target, TargetOutput
from headstart.support.rng import UniformStream, draw_at, in_parts
from headstart.support.uploads import upload
from headstart.tree.tree import Committed, Tree, TreeBatch, build_commit

SAMPLES_DRAFTS = {"top_k": False, "greedy_draft": True}
"""Whether drafters sample, by the name in `DecodeOptions.verifier`. `greedy_draft` (arXiv 2502.18779): a node's last
child is sampled, its siblings are the most likely tokens. `top_k` (unrelated to the option top_k): no child is sampled.
Both sample the same distribution; `greedy_draft` accepts more, and `top_k` repeats the text of plain sampling."""


class GreedyVerifier:
    """Greedy verification: accepts a draft if it is the target's argmax, so the output equals plain decoding.

    `samples_drafts`: see `Request.sample_drafts`; `draft_generators`: one generator per row for sampling drafts.
    """

    samples_drafts = False
    draft_generators: Sequence[torch.Generator] = ()

    def first(self, logits_BV: Tensor) -> list[int]:
        """Choose each row's first token from the logits after its prompt."""
        return draft_kernels.argmax(logits_BV).tolist()

    def accept(self, batch: TreeBatch, out: TargetOutput) -> tuple[Committed, TreeBatch]:
        """Accept the nodes to commit in every row; return them with the target's own next tokens as new roots."""
        choice_BN = draft_kernels.argmax(out.logits_BTV)
        if choice_BN.device.type == "cpu":
            paths, next_tokens = walk(batch.trees, choice_BN.tolist())
            return build_commit(batch, paths, next_tokens, out.aux_hidden_states, out.logits_BTV)
        return walk_on_device(batch, out, choice_BN)

    def reorder(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""

    def join(self, other: GreedyVerifier) -> None:
        """Append the rows of another verifier with the same options."""

    def resume(self, emitted: Sequence[Sequence[int]]) -> None:
        """Continue after the tokens that each row has emitted."""


def walk(trees: Sequence[Tree], choices: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """Follow the target's choice after each node down the trees; return each row's accepted nodes, root first, and the
    choice after the last one."""
    paths = []
    for tree, choice in zip(trees, choices, strict=True):
        index, path = tree.index, [0]
        while (child := index.get((path[-1], choice[path[-1]]))) is not None:
            path.append(child)
        paths.append(path)
    return paths, [choice[path[-1]] for choice, path in zip(choices, paths, strict=True)]


class SamplingVerifier:
    """Verification by sampling, with uniforms per row.

    A sampled child x ~ q is accepted with probability min(1, p(x) / q(x)). Otherwise, or without a sampled child
    (q = 0), the next token is drawn from norm((p - q)+), and the walk continues at the child that holds it, if any.
    Together min(p, q) + (p - q)+ = p. In greedy-draft sampling (arXiv 2502.18779) q is 0 at siblings from the same
    drafter, so the residual keeps all of p there. After `union` a sibling from another drafter may have q > 0; the rule
    is exact for any q. Without sampled children it is equal in distribution to the verification of EAGLE-2 and EAGLE-3
    (arXiv 2406.16858 and 2503.01840).

    Each token of a row's text uses one uniform for accepting and one for drawing, independent of drafts and other rows.
    `seeds` holds one for each row. `samples_drafts` and `draft_generators` are as in `GreedyVerifier`;
    `row_processors`, empty or one for each row, come before those of all rows.
    """

    def __init__(
        self,
        sampling: SamplingOptions,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        samples_drafts: bool,
        row_processors: Sequence[Processor] = (),
    ) -> None:
        self.samples_drafts = samples_drafts
        self._sampling = sampling
        processes = sampling.processes_logits or bool(row_processors)
        self._prefixes = Prefixes(sampling, prompts, row_processors) if processes else None
        generators = [row_generators(seed) for seed in seeds]
        self._uniforms = [(UniformStream(accept), UniformStream(residual)) for accept, residual, _ in generators]
        self.draft_generators = [draft for _, _, draft in generators]

    def first(self, logits_BV: Tensor) -> list[int]:
        """Draw each row's first token, see `GreedyVerifier.first`."""
        _, residual_BK = self._upload_uniforms(1, logits_BV.device)
        parts = in_parts(len(logits_BV), logits_BV.shape[1], logits_BV.device)
        row_B = torch.arange(len(logits_BV), device=logits_BV.device)
        path_B0 = row_B.new_empty(len(row_B), 0)
        drawn = [
            draw_at(self._distributions(logits_BV[part], row_B[part], path_B0[part]), residual_BK[part, 0])[0]
            for part in parts
        ]
        token_B = torch.cat(drawn)
        tokens: list[int] = token_B.tolist()
        self._append([1] * len(tokens), token_B[:, None])
        return tokens

    def accept(self, batch: TreeBatch, out: TargetOutput) -> tuple[Committed, TreeBatch]:
        """Accept the nodes to commit, see `GreedyVerifier.accept`."""
        runs_processors = self._prefixes is not None and self._prefixes.runs_processors
        if out.logits_BTV.device.type == "cpu" or runs_processors:
            return self._accept_by_depth(batch, out)
        committed, roots = walk_on_device(batch, out, self._choose_at_all_nodes(batch, out.logits_BTV))
        self._append(committed.counts, committed.emitted_BP(roots) if self._prefixes is not None else None)
        return committed, roots

    def _choose_at_all_nodes(self, batch: TreeBatch, logits_BNV: Tensor) -> Tensor:
        """Choose the token after each node, int64 [B, N], with one upload."""
        (rows, nodes, vocab), device, depths = logits_BNV.shape, logits_BNV.device, batch.depth + 1
        sampled = _SampledNodes(batch, vocab)
        packed = [
            [*accept, *residual, *children, *indices]  # float64 holds every index
            for accept, residual, children, indices in zip(*self._next_uniforms(depths), *sampled.places(), strict=True)
        ]
        parts_BX = torch.split(upload(packed, device, torch.float64), [depths, depths, nodes, nodes], dim=1)
        depths_BN = batch.depths_BN.expand(rows, -1)
        accept_X, residual_X = (part_BK.gather(1, depths_BN).flatten() for part_BK in parts_BX[:2])
        child_BN, index_X = parts_BX[2].long(), parts_BX[3].long().flatten()
        tokens_BN = batch.tokens_BN.gather(1, child_BN.clamp(min=0)).masked_fill(child_BN < 0, -1)
        logits_XV, sampled_X = logits_BNV.flatten(0, 1), tokens_BN.flatten()
        texts: tuple[Tensor, ...] = ()
        if self._prefixes is not None:
            off_path_BNN = ~batch.visible_BNN | (batch.depths_BN == 0)[:, None]
            path_BNN = batch.tokens_BN[:, None].expand(-1, nodes, -1).masked_fill(off_path_BNN, -1)
            texts = torch.arange(rows * nodes, device=device) // nodes, path_BNN.flatten(0, 1)
        chosen = [
            accept_or_draw(
                self._distributions(logits_XV[part], *(text_X[part] for text_X in texts)),
                accept_X[part],
                residual_X[part],
                *((sampled_X[part], sampled.q_draft(index_X[part])) if sampled else ()),
            )
            for part in in_parts(rows * nodes, vocab, device)
        ]
        return torch.cat(chosen).view(rows, nodes)

    def _accept_by_depth(self, batch: TreeBatch, out: TargetOutput) -> tuple[Committed, TreeBatch]:
        """Walk down the trees with all rows at once, dropping each row at the end of its path."""
        device, (rows, _, vocab) = out.logits_BTV.device, out.logits_BTV.shape
        depths = batch.depth + 1
        accept_BK, residual_BK = self._upload_uniforms(depths, device)
        sampled, parents_BN = _SampledNodes(batch, vocab), batch.parents_BN.expand(rows, -1)
        child_BN, index_BN = upload(sampled.places(), device).unbind() if sampled else (None, None)
        tokens_BK, path_BK = torch.full((2, rows, depths), -1, device=device)
        row_M, node_M = torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.long, device=device)
        for depth in range(depths):
            logits_MV = out.logits_BTV[row_M, node_M] if depth else out.logits_BTV[:, 0]
            chosen = []
            for part in in_parts(len(row_M), vocab, device):
                rows_M, nodes_M = row_M[part], node_M[part]
                texts = () if self._prefixes is None else (rows_M, tokens_BK[rows_M, :depth])
                p_target_MV = self._distributions(logits_MV[part], *texts)
                sampled_M = q_draft_MV = None
                if child_BN is not None and index_BN is not None:
                    child_M = child_BN[rows_M, nodes_M]
                    sampled_M = batch.tokens_BN[rows_M, child_M.clamp(min=0)].masked_fill(child_M < 0, -1)
                    q_draft_MV = sampled.q_draft(index_BN[rows_M, nodes_M])
                accept_M, residual_M = accept_BK[rows_M, depth], residual_BK[rows_M, depth]
                chosen.append(accept_or_draw(p_target_MV, accept_M, residual_M, sampled_M, q_draft_MV))
            next_M = torch.cat(chosen)
            match_MN = (parents_BN[row_M] == node_M[:, None]) & (batch.tokens_BN[row_M] == next_M[:, None])
            child_M, found_M = match_MN.int().argmax(1), match_MN.any(1)
            tokens_BK[row_M, depth] = next_M
            path_BK[row_M, depth] = child_M.masked_fill(~found_M, -1)
            row_M, node_M = row_M[found_M], child_M[found_M]
            if not len(row_M):
                break
        tokens, paths = torch.stack([tokens_BK, path_BK]).tolist()
        emitted = [[token for token in row if token >= 0] for row in tokens]
        self._append(list(map(len, emitted)), tokens_BK)
        accepted = [[0, *(node for node in path if node >= 0)] for path in paths]
        return build_commit(batch, accepted, [row[-1] for row in emitted], out.aux_hidden_states, out.logits_BTV)

    def reorder(self, rows: Sequence[int]) -> None:
        if self._prefixes is not None:
            self._prefixes.reorder(rows)
        self._uniforms = [self._uniforms[row] for row in rows]
        self.draft_generators = [self.draft_generators[row] for row in rows]

    def join(self, other: SamplingVerifier) -> None:
        if self._prefixes is not None and other._prefixes is not None:
            self._prefixes.join(other._prefixes)
        self._uniforms += other._uniforms
        self.draft_generators += other.draft_generators

    def resume(self, emitted: Sequence[Sequence[int]]) -> None:
        """Skip the uniforms consumed by each row's emitted tokens, and reseed its draft generator so that no draft
        noise is reused."""
        self._append(list(map(len, emitted)))
        if self._prefixes is not None:
            self._prefixes.resume(emitted)
        for generator, tokens in zip(self.draft_generators, emitted, strict=True):
            generator.manual_seed(generator.initial_seed() + len(tokens))

    def _next_uniforms(self, count: int) -> tuple[list[list[float]], list[list[float]]]:
        """Return the next uniforms of each row, for accepting and for drawing."""
        accept, residual = ([pair[kind].peek(count) for pair in self._uniforms] for kind in (0, 1))
        return accept, residual

    def _upload_uniforms(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Upload `_next_uniforms` at once, [B, count] each."""
        accept_BK, residual_BK = upload(self._next_uniforms(count), device, torch.float64).unbind()
        return accept_BK, residual_BK

    def _append(self, sizes: Sequence[int], token_BK: Tensor | None = None) -> None:
        """Append to each row's text and skip the uniforms that it used; see `Prefixes.extend`."""
        if self._prefixes is not None and token_BK is not None:
            self._prefixes.extend(token_BK, sizes)
        for uniforms, size in zip(self._uniforms, sizes, strict=True):
            for stream in uniforms:
                stream.skip(size)

    def _distributions(self, logits_MV: Tensor, *texts: Tensor) -> Tensor:
        """Compute the distribution, float [M, V], after each of `texts`: rows and paths as in `Prefixes.process`."""
        if self._prefixes is not None:
            logits_MV = self._prefixes.process(logits_MV, *texts)
        return warp(self._sampling, logits_MV)


def row_generators(seed: int) -> tuple[torch.Generator, torch.Generator, torch.Generator]:
    """Create a row's independent random generators: for accepting, for drawing tokens, and for drafting."""
    seeds = torch.randint(1 << 62, (3,), generator=torch.Generator().manual_seed(seed)).tolist()
    accept, residual, draft = (torch.Generator().manual_seed(one) for one in seeds)
    return accept, residual, draft


def accept_or_draw(
    p_target_MV: Tensor,
    accept_M: Tensor,
    residual_M: Tensor,
    sampled_M: Tensor | None = None,
    q_draft_MV: Tensor | None = None,
) -> Tensor:
    """Choose the token after each of M nodes, int64 [M]: its sampled child with probability min(1, p / q), else a token
    drawn from norm((p - q)+); without a sampled child a token drawn from p. See `SamplingVerifier`.

    Overwrites `p_target_MV`. The uniforms for accepting and drawing are float64 in [0, 1). `sampled_M` is the token of
    the node's sampled child, -1 without one, and `q_draft_MV` its distribution.
    """
    next_M, _ = draw_at(p_target_MV, residual_M)
    if sampled_M is None or q_draft_MV is None:
        return next_M
    is_sampled_M, sampled_M1 = sampled_M >= 0, sampled_M.clamp(min=0)[:, None]
    p_sampled_M, q_sampled_M = (probs_MV.gather(1, sampled_M1)[:, 0].double() for probs_MV in (p_target_MV, q_draft_MV))
    kept_M = is_sampled_M & (accept_M * q_sampled_M < p_sampled_M)
    residual_MV = p_target_MV.sub_(q_draft_MV).clamp_(min=0.0)
    # An empty residual means that p equals q, and that only rounding rejected the draft. Without rounding this has
    # probability 0, so any fallback is lossless; drawing from p stays in the target's support.
    rest_M, mass_M = draw_at(residual_MV, residual_M)
    next_M = torch.where(is_sampled_M & (mass_M > 0), rest_M, next_M)
    return torch.where(kept_M, sampled_M, next_M)


class _SampledNodes:
    """The sampled nodes of a batch, with their distributions."""

    def __init__(self, batch: TreeBatch, vocab: int) -> None:
        self._batch, self._vocab = batch, vocab
        self._distributions = [one for tree in batch.trees for one in tree.sampled.values()]
        self._q_draft_WD: Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._distributions)

    def places(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return each node's sampled child (-1 without one), and its index in the batch's sampled nodes."""
        children, indices = ([[value] * self._batch.size for _ in self._batch.trees] for value in (-1, 0))
        sampled = ((row, tree, child) for row, tree in enumerate(self._batch.trees) for child in tree.sampled)
        for index, (row, tree, child) in enumerate(sampled):
            parent = tree.parents[child]
            children[row][parent], indices[row][parent] = child, index
        return children, indices

    def q_draft(self, index_M: Tensor) -> Tensor:
        """Return distributions of sampled nodes over the target's vocabulary, [M, V]."""
        if index_M.device.type == "cpu":  # stack only the needed ones
            q_draft_MD = torch.stack([self._distributions[index].q_draft_D for index in index_M.tolist()])
        else:
            if self._q_draft_WD is None:
                self._q_draft_WD = torch.stack([one.q_draft_D for one in self._distributions])
            q_draft_MD = self._q_draft_WD[index_M]
        draft_to_target_D = self._distributions[0].draft_to_target_D
        if draft_to_target_D is None:
            return q_draft_MD
        return q_draft_MD.new_zeros(len(index_M), self._vocab).index_copy_(1, draft_to_target_D, q_draft_MD)


def walk_on_device(batch: TreeBatch, out: TargetOutput, choice_BN: Tensor) -> tuple[Committed, TreeBatch]:
    """Do the work of `walk` and `build_commit` in device operations, with one synchronisation."""
    if batch.size == 1:  # nothing was drafted
        zeros_BP = batch.depths_BN.expand(len(choice_BN), 1)
        committed = Committed(
            batch, [[0]] * len(choice_BN), zeros_BP, zeros_BP[:, 0] + 1, out.aux_hidden_states, out.logits_BTV
        )
        return committed, TreeBatch.roots([token for (token,) in choice_BN.tolist()], on_device=choice_BN[:, 0])
    parents_BN = batch.parents_BN.expand_as(choice_BN)
    # A node is right if it holds its parent's choice, and accepted if all nodes on its path are right.
    right_BN = (choice_BN.gather(1, parents_BN.clamp(min=0)) == batch.tokens_BN) & (parents_BN >= 0)
    right_BN = right_BN | (batch.depths_BN == 0)
    accepted_BN = ~(batch.visible_BNN & ~right_BN[:, None]).any(-1)
    last_B1 = (accepted_BN * (batch.depths_BN + 1)).max(-1, keepdim=True).indices
    on_path_BN = batch.visible_BNN.expand(len(choice_BN), -1, -1).gather(
        1, last_B1[:, :, None].expand(-1, -1, choice_BN.shape[1])
    )[:, 0]
    paths_BN = (~on_path_BN).long().argsort(dim=1, stable=True)  # its nodes first, in order
    counts_B1 = on_path_BN.sum(-1, keepdim=True)
    paths_BN = paths_BN.where(torch.arange(choice_BN.shape[1], device=choice_BN.device) < counts_B1, last_B1)
    next_B1 = choice_BN.gather(1, last_B1)
    on_host = torch.cat([counts_B1, next_B1, paths_BN], dim=1).tolist()  # the synchronisation
    paths = [path[:count] for count, _, *path in on_host]
    paths_BP = paths_BN[:, : max(map(len, paths))]
    committed = Committed(batch, paths, paths_BP, counts_B1[:, 0], out.aux_hidden_states, out.logits_BTV)
    return committed, TreeBatch.roots([token for _, token, *_ in on_host], on_device=next_B1[:, 0])


def make_verifier(
    options: Sequence[DecodeOptions], prompts: Sequence[Sequence[int]], target: Target
) -> GreedyVerifier | SamplingVerifier:
    """Create the verifier of rows with these options, which differ only in seeds, lengths and ends."""
    row_processors, shared = min_length_processors(options, prompts, target), options[0]
    if shared.verifier == "auto" and shared.greedy and not shared.processes_logits and not row_processors:
        return GreedyVerifier()
    samples_drafts = not shared.greedy if shared.verifier == "auto" else SAMPLES_DRAFTS[shared.verifier]
    seeds = [one.seed for one in options if one.seed is not None]  # the loop sets them
    return SamplingVerifier(shared, prompts, seeds, samples_drafts, row_processors)


def min_length_processors(
    options: Sequence[DecodeOptions], prompts: Sequence[Sequence[int]], target: Target
) -> list[Processor]:
    """Create a processor per prompt that bans end tokens before `min_new_tokens`; return [] if not needed."""
    count, device = options[0].min_new_tokens, target.device
    ends = [sorted({*target.end_tokens, *one.stop_token_ids}) for one in options]
    if not count or not all(ends):
        return []
    return [
        MinNewTokensLengthLogitsProcessor(len(prompt), count, of_row, device=device)
        for prompt, of_row in zip(prompts, ends, strict=True)
    ]
