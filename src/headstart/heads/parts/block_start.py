"""Closed-form start of block drafters (`heads.init=linear`): positional attention heads, and output maps by regression.

All mask slots of a block read the same embedding, so only relative positions tell them apart. Some attention heads
therefore become positional heads: their scores depend on distance and on whether a key is from the context or the
block. A linear probe of the layer's input gives 1 for the context and -1 for a block. A fixed pattern, rotated by RoPE,
puts the highest score on the context's newest token (with the sign flipped, on the root) from every slot. Their values
are the most predictive directions of the context and of the root. The other heads keep the target's queries and keys on
the slowly rotating pairs only.

The output maps of attention and MLP are then ridge regressions to the target's final states.

Shape suffixes: E hidden size, B rows, T tokens, M origins, S drafted slots, K all slots of a block, X slots of a row's
blocks (or all tokens), R pairs of a head (rank of the Markov head), A pairs times phases, P distances, F inputs of a
map, I embedding inputs, C directions, H heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.base import HeadBatch, supervised_origins
from headstart.heads.parts.block import BlockHead, Blocks
from headstart.heads.parts.block_layer import BlockLayer, positional_heads
from headstart.heads.parts.layer import concat_heads, rms_norm
from headstart.heads.parts.own_position import solve_matrix_game
from headstart.heads.parts.residual import embed_normalized, principal_outputs
from headstart.replay.patch import FINAL

_MARGIN = 6.0
"""Score margin of the attended position over any other."""
_RIDGE = 0.03
"""Ridge of the output maps, relative to the mean square of each input."""
_SCALES = (1.0, 0.1, 0.03)
"""Pattern scale of the query heads that share a key head, in turn. Small ones attend to the rest of the text too."""
_ROWS = 8
"""Origins per input dimension of an output map."""
_WEIGHT = 0.5
"""Decay of the regression weight per draft step."""
_STEPS = (1.0, 0.5, 0.25)
"""Weights of the next states in the regression that chooses the positional heads' values."""
_SAMPLE = 8192
"""Sample size of vocabulary embeddings and of context vectors."""
_PHASES = 8
_ROUNDS, _RATE = 1500, 0.1
"""Pattern search."""
_FAR = 2048
"""Largest distance that patterns account for."""


class _FitBatch:
    """A batch to fit on, and the blocks of its origins with all drafts inside an answer."""

    def __init__(self, heads: BlockHead, batch: HeadBatch, origin_M: Tensor) -> None:
        self.tokens_X, self.origin_M, norm_E = batch.tokens_BT.flatten(), origin_M, heads.norm.weight
        self.context_BTE = heads.fuse_states(batch.states)
        self.rotary = heads.context_rotary(batch, self.context_BTE)
        self.blocks = Blocks(heads, batch, origin_M, self.context_BTE)
        self._final_XE = batch.states[FINAL].flatten(0, 1)
        self._scale_E = torch.where(norm_E.abs() < 1e-3, 1.0, norm_E)

    def label(self, step: int) -> Tensor:
        """Return the target's state for the step's token, before the final norm, [M, E]."""
        return self._final_XE[self.origin_M + step + 1].float() / self._scale_E

    def attend(self, layer: BlockLayer) -> Tensor:
        """Return the attention output of every slot in a layer, [B, X, F]."""
        return concat_heads(self.blocks.attend(layer, *layer.context(self.context_BTE, self.rotary)))


class SolvedBlockHead(BlockHead):
    """Block drafters with a closed-form start (`heads.init=linear`)."""

    rank = 0
    """Rank of the correction by the previous token; 0 without one."""

    def start_markov(self, axes_ER: Tensor, map_RI: Tensor, stream_ME: Tensor) -> None:
        """Start the correction with `axes_ER @ map_RI`, from the previous token's normalised embedding to a difference
        of the slot's stream; `stream_ME` are streams without it."""

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Make some attention heads positional, then solve all output maps, so that the layers' sum predicts the
        target's state before its final norm at each slot."""
        config = self.config
        if config.init != "linear":
            return
        needed = sum(positional_heads(config.hidden_size, config.head_dim))
        if needed > config.num_key_value_heads:
            raise UserError(
                f"heads.init=linear needs {needed} key heads or more, and heads.num_key_value_heads is "
                f"{config.num_key_value_heads}.",
                "Leave out heads.num_key_value_heads and heads.num_attention_heads, or set heads.init=target.",
            )
        enough = _ROWS * (config.num_attention_heads * config.head_dim + config.hidden_size)
        fit_batches, rows = list[_FitBatch](), 0
        for batch in batches:
            origin_M = supervised_origins(batch.supervised_BT, self.draft_steps - 1)
            if len(origin_M):
                fit_batches.append(_FitBatch(self, batch, origin_M))
                rows += len(origin_M)
            if rows >= enough:
                break
        if rows < config.hidden_size:  # underdetermined
            return
        self._set_positional_heads(fit_batches)
        self._solve(fit_batches)

    def _set_positional_heads(self, fit_batches: Sequence[_FitBatch]) -> None:
        config, layer, size = self.config, self.layers[0], self.config.hidden_size
        fast_d = fast_pairs(layer)
        angles_R = self._angles()[: int(fast_d.sum()) // 2]
        patterns = (
            find_pattern(angles_R, config.block_size, at_root=False),
            find_pattern(angles_R, config.block_size, at_root=True),
        )
        if min(pattern.margin for pattern in patterns) <= 0:  # too few pairs to tell all distances apart
            return
        ridge, contexts, roots = Ridge(), list[Tensor](), list[Tensor]()
        for part in fit_batches:
            contexts.append(part.context_BTE.flatten(0, 1))
            roots.append(self._first_input(part.tokens_X[part.origin_M + 1], contexts[-1]))
            steps = enumerate(_STEPS[: self.draft_steps])
            label_ME = cast(Tensor, sum(weight * part.label(step) for step, weight in steps))
            ridge.add(torch.cat([contexts[-1][part.origin_M], roots[-1]], -1), label_ME * self.norm.weight)
        context_XE = torch.cat(contexts)
        tokens = len(self.target_embeddings)
        vocabulary_ME = self._first_input(torch.arange(0, tokens, max(1, tokens // _SAMPLE)), context_XE)
        mask_1E = self._first_input(torch.tensor([config.mask_token_id]), context_XE)
        probe_E = fit_context_probe(context_XE, vocabulary_ME, torch.cat(roots), mask_1E)
        counts, groups = positional_heads(size, config.head_dim), layer.groups
        taken, queries, keys = sum(counts), config.num_attention_heads, config.num_key_value_heads
        rows_HdE = layer.qkv.weight.view(-1, config.head_dim, size)
        others = (
            (layer.q_norm, rows_HdE[taken * groups : queries]),
            (layer.k_norm, rows_HdE[queries + taken : queries + keys]),
        )
        for norm, rows in others:
            if len(rows):
                slow = context_XE[:_SAMPLE] @ rows[:, ~fast_d].flatten(0, 1).T
                fraction = float((~fast_d).float().mean())
                norm.weight[~fast_d] = float(slow.square().mean().sqrt()) * fraction**0.5
        set_patterns(layer, counts, patterns, probe_E)
        first = (queries + keys) * config.head_dim
        for count, inputs in zip(counts, (slice(0, size), slice(size, 2 * size)), strict=True):
            value_CE = ridge.top_directions(inputs, min(count * config.head_dim, size))
            layer.qkv.weight[first : first + len(value_CE)] = value_CE.to(layer.qkv.weight)
            first += count * config.head_dim

    def _solve(self, fit_batches: Sequence[_FitBatch]) -> None:
        markov = None

        def markov_input(part: _FitBatch, step: int) -> Tensor:
            return embed_normalized(part.tokens_X[part.origin_M + step + 1], self.target_embeddings, self.fc.weight)

        def markov_output(part: _FitBatch, step: int) -> Tensor | float:
            return 0.0 if markov is None else markov_input(part, step) @ markov[1].T @ markov[0].T

        for number, layer in enumerate(self.layers):
            solves_markov = number == 0 and self.rank > 0
            ridge, width, attended = Ridge(), layer.o.in_features, list[Tensor]()
            for part in fit_batches:
                attended.append(part.attend(layer))
                read_MSF, stream_MSE = map(part.blocks.drafting_slots, (attended[-1], part.blocks.stream_BXE))
                for step in range(self.draft_steps):
                    inputs = [read_MSF[:, step], *([markov_input(part, step)] if solves_markov else [])]
                    label_ME = part.label(step) - stream_MSE[:, step] - markov_output(part, step)
                    ridge.add(torch.cat(inputs, -1), label_ME, _WEIGHT**step)
            map_EF = ridge.solve()
            layer.o.weight.copy_(map_EF[:, :width])
            if solves_markov:
                gram_II = ridge.gram_FF[width:, width:] / ridge.rows
                axes_ER = principal_outputs(map_EF[:, width:], gram_II, self.rank)
                markov = axes_ER, axes_ER.T @ map_EF[:, width:]
            ridge = Ridge()
            for part, attention_output_BXF in zip(fit_batches, attended, strict=True):
                blocks = part.blocks
                blocks.stream_BXE = blocks.stream_BXE + layer.o(attention_output_BXF)
                inner_MSF = blocks.drafting_slots(layer.mlp_inner(blocks.stream_BXE))
                stream_MSE = blocks.drafting_slots(blocks.stream_BXE)
                for step in range(self.draft_steps):
                    predicted_ME = stream_MSE[:, step] + markov_output(part, step)
                    ridge.add(inner_MSF[:, step], part.label(step) - predicted_ME, _WEIGHT**step)
            layer.down.weight.copy_(ridge.solve())
            for part in fit_batches:
                part.blocks.stream_BXE = part.blocks.stream_BXE + layer.down(layer.mlp_inner(part.blocks.stream_BXE))
        if markov is not None:
            streams = (part.blocks.drafting_slots(part.blocks.stream_BXE).flatten(0, 1) for part in fit_batches)
            self.start_markov(*markov, torch.cat(list(streams)))

    def _first_input(self, tokens: Tensor, like: Tensor) -> Tensor:
        assert self.layers[0].input_norm is not None, "as of every layer of a block"
        return rms_norm(self.layers[0].input_norm, self.embed_tokens(tokens, like))

    def _angles(self) -> Tensor:
        """Rotation angle of each pair per position, [R]."""
        cos, sin = self._rotary.at(torch.arange(2)[None], torch.float32, 2)
        half = self.config.head_dim // 2
        angles_R: Tensor = torch.atan2(sin[0, 1, :half], cos[0, 1, :half])
        return angles_R


@dataclass(frozen=True, eq=False)
class Pattern:
    """Query of a positional head: its components in each rotary pair, and its smallest score margin over the other
    positions, for keys of size 1 in each pair."""

    real_R: Tensor
    imaginary_R: Tensor
    margin: float


def key_signs(block: int, at_root: bool) -> tuple[Tensor, Tensor]:
    """Return the distance [K] from each slot to the position to attend to (the context's newest token, or the root),
    and the sign [K, P] of keys at distances 1 - K to `_FAR`: opposite in context and block, 0 at that position and
    outside of both.

    >>> [signs[:2, :6].int().tolist() for _, signs in (key_signs(2, False), key_signs(2, True))]  # distances -1 to 4
    [[[-1, -1, 0, 1, 1, 1], [0, -1, -1, 0, 1, 1]], [[1, 0, -1, -1, -1, -1], [0, 1, 0, -1, -1, -1]]]
    """
    slots_K1, distances_P = torch.arange(block)[:, None], torch.arange(1 - block, _FAR + 1)
    distance_K = slots_K1[:, 0] if at_root else slots_K1[:, 0] + 1
    context = -1.0 if at_root else 1.0
    signs_KP = torch.where(distances_P > slots_K1, context, -context)
    signs_KP = signs_KP.masked_fill(distances_P < slots_K1 - block + 1, 0.0)
    return distance_K, signs_KP.masked_fill(distances_P == distance_K[:, None], 0.0)


def find_pattern(angles_R: Tensor, block: int, at_root: bool) -> Pattern:
    """Find the unit query with the largest margin under these `key_signs`, for pairs that rotate by `angles_R` per
    position: the solution of a matrix game of positions against pairs at phases."""
    distance_K, signs_KP = key_signs(block, at_root)
    phases = torch.arange(_PHASES) * (2 * torch.pi / _PHASES)
    angle_A = angles_R.repeat_interleave(_PHASES)
    distances_P1 = torch.arange(1 - block, _FAR + 1)[:, None]
    cos_PA = (distances_P1 * angle_A - phases.repeat(len(angles_R))).cos()
    index_K = distance_K + block - 1

    def margins(weights_A: Tensor) -> Tensor:
        scores_P = cos_PA @ weights_A
        margins_KP = scores_P[index_K, None] - signs_KP * scores_P
        return margins_KP.masked_fill(signs_KP == 0, torch.inf)

    def payoff(weights_A: Tensor) -> Tensor:
        slot, other = divmod(int(margins(weights_A).argmin()), signs_KP.shape[1])
        return cos_PA[index_K[slot]] - signs_KP[slot, other] * cos_PA[other]

    weights_A = solve_matrix_game(payoff, len(angle_A), _ROUNDS, _RATE)
    weights_A /= weights_A.sum()
    weights_RP = weights_A.view(-1, _PHASES)
    real_R, imaginary_R = weights_RP @ phases.cos(), -(weights_RP @ phases.sin())
    norm = float((real_R.square() + imaginary_R.square()).sum().sqrt())
    return Pattern(real_R / norm, imaginary_R / norm, float(margins(weights_A).min()) / norm)


def fast_pairs(layer: BlockLayer) -> Tensor:
    """Mask of the head components used by patterns, the fast half of the pairs, bool [d]."""
    width = layer.config.head_dim
    return (torch.arange(width) % (width // 2)) < (width + 2) // 4


@torch.no_grad()
def set_patterns(
    layer: BlockLayer, counts: tuple[int, int], patterns: tuple[Pattern, Pattern], probe_E: Tensor
) -> None:
    """Set queries and keys of a layer's positional heads: `counts` of them for the newest token, then for the root.

    Margins must be positive. Other heads keep their slow pairs only. `probe_E` is from `fit_context_probe`.
    """
    config, width = layer.config, layer.config.head_dim
    keys, taken, groups = config.num_attention_heads, sum(counts), layer.groups
    fast_d = fast_pairs(layer)
    pairs = int(fast_d.sum()) // 2
    rows_HdE = layer.qkv.weight.view(-1, width, layer.qkv.in_features)
    rows_HdE[groups * taken : keys, fast_d] = 0
    rows_HdE[keys + taken : keys + config.num_key_value_heads, fast_d] = 0
    spare = int((~fast_d).nonzero()[-1])
    for head in range(taken):
        pattern, sign = (patterns[0], 1.0) if head < counts[0] else (patterns[1], -1.0)
        key_d = torch.zeros(width)
        key_d[:pairs] = 1.0
        rows_HdE[keys + head] = (key_d[:, None] * (sign * probe_E)).to(rows_HdE)
        for group in range(groups):
            scale = _SCALES[min(group, len(_SCALES) - 1)]
            query_d = torch.zeros(width)
            query_d[:pairs] = scale * pattern.real_R
            query_d[width // 2 : width // 2 + pairs] = scale * pattern.imaginary_R
            query_d[spare] = (1 - scale**2) ** 0.5
            rows_HdE[head * groups + group] = (query_d[:, None] * -probe_E).to(rows_HdE)
    margin = min(pattern.margin for pattern in patterns)
    layer.q_norm.weight[fast_d] = _MARGIN / (margin * (width / pairs) ** 0.5)
    layer.k_norm.weight[fast_d] = 1.0


@torch.no_grad()
def fit_context_probe(context_ME: Tensor, *blocks: Tensor) -> Tensor:
    """Fit a linear probe [E] that gives 1 for the context and -1 for all `blocks` inputs, equally weighted."""
    gram_EE = context_ME.T @ context_ME / len(context_ME)
    label_E = context_ME.mean(0)
    for block_ME in blocks:
        gram_EE = gram_EE + block_ME.T @ block_ME / len(block_ME) / len(blocks)
        label_E = label_E - block_ME.mean(0) / len(blocks)
    ridge = 1e-4 * gram_EE.diagonal().mean()
    probe_E: Tensor = torch.linalg.solve(gram_EE + ridge * torch.eye(len(gram_EE)).to(gram_EE), label_E)
    return probe_E


class Ridge:
    """Ridge regression, accumulated in parts."""

    def __init__(self) -> None:
        self.gram_FF, self.cross_FE = torch.zeros(()), torch.zeros(())
        self.rows = 0

    @torch.no_grad()
    def add(self, read_MF: Tensor, label_ME: Tensor, weight: float = 1.0) -> None:
        read_MF = read_MF.float()
        weighted_FM = (read_MF * weight).T
        self.gram_FF = weighted_FM @ read_MF + self.gram_FF
        self.cross_FE = weighted_FM @ label_ME.float() + self.cross_FE
        self.rows += len(read_MF)

    def solve(self) -> Tensor:
        """Return the map [E, F]."""
        # Some inputs are a hundred times as large as others: scale the ridge to each one.
        rms_F = self.gram_FF.diagonal().sqrt().clamp_min(1e-6)
        scaled_FF = self.gram_FF / rms_F / rms_F[:, None]
        ridged_FF = scaled_FF + _RIDGE * torch.eye(len(scaled_FF)).to(scaled_FF)
        map_EF: Tensor = (torch.linalg.solve(ridged_FF, self.cross_FE / rms_F[:, None]) / rms_F[:, None]).T
        return map_EF

    def top_directions(self, inputs: slice, count: int) -> Tensor:
        """Return the most predictive directions of some inputs, [C, I]."""
        map_EI = self.solve()[:, inputs]
        gram_II = self.gram_FF[inputs, inputs] / self.rows
        ridge = 1e-4 * gram_II.diagonal().mean()
        lower_II = torch.linalg.cholesky(gram_II + ridge * torch.eye(len(gram_II)).to(gram_II))
        axes_II = torch.linalg.svd(lower_II.T @ map_EI.T, full_matrices=False)[0][:, :count]
        directions_CI: Tensor = torch.linalg.solve(lower_II.T, axes_II).T
        return directions_CI
