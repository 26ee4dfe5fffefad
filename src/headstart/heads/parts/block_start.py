"""Closed-form start of block drafters (`heads.init=linear`): constructed attention, and solved output maps.

All mask slots of a block read the same embedding, so only relative positions tell them apart. Some attention heads
therefore get queries and keys that depend on distance and kind alone: a linear probe of the layer's input gives 1 for
the context and -1 for a block, and a fixed pattern, rotated by RoPE, puts the highest score on the context's newest
token (with the sign flipped, on the root) from every slot. Their values are the most predictive directions for the
states to come. The other heads keep the target's queries and keys on the slowly rotating pairs only.

The output maps of attention and MLP are then ridge regressions to the target's final states.

Shape suffixes: E hidden size, B rows, T tokens, M origins, S drafted slots, K all slots of a block, X slots of a row's
blocks (or all tokens), R pairs of a head, A atoms (a pair at a phase), P distances, F inputs of a map, I inputs at an
origin, C features, H heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.base import HeadBatch, supervised_origins
from headstart.heads.parts.block import BlockHead, Blocks
from headstart.heads.parts.block_layer import BlockLayer, looking
from headstart.heads.parts.layer import by_token, normed
from headstart.heads.parts.own_position import play
from headstart.heads.parts.text_attention import positions_of
from headstart.replay.patch import FINAL

_MARGIN = 6.0
"""Margin of the wanted position's score over any other."""
_RIDGE = 0.03
"""Ridge of the solved maps, relative to the mean square of each input."""
_SOFT = (1.0, 0.1, 0.03)
"""Pattern scale of the query heads that share a key head, in turn. Soft ones spread over the rest of the text."""
_ROWS = 8
"""Origins per input dimension to solve an output map from."""
_WEIGHT = 0.5
"""Decay of the regression weight per draft step."""
_STEPS = (1.0, 0.5, 0.25)
"""Weights of the coming states in the choice of the heads' features."""
_KINDS = 8192
"""Sample size of vocabulary embeddings."""
_PHASES = 8
_ROUNDS, _RATE = 1500, 0.1
"""Pattern search."""
_FAR = 2048
"""Largest distance considered by patterns."""


@dataclass(frozen=True)
class _Lesson:
    """A batch to solve from, and its origins with all drafts inside an answer."""

    batch: HeadBatch
    origin_M: Tensor

    def wanted(self, norm: nn.RMSNorm, step: int) -> Tensor:
        """Pre-norm states for a step, [M, E]: the target predicts the step's token from them."""
        final_XE = self.batch.states[FINAL].flatten(0, 1)
        scale_E = torch.where(norm.weight.abs() < 1e-3, 1.0, norm.weight)
        return final_XE[self.origin_M + step + 1].float() / scale_E


class SolvedBlockHead(BlockHead):
    """Block drafters with a closed-form start (`heads.init=linear`)."""

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Point some attention heads at the newest state and the root, then solve all output maps: the layers' sum
        should best predict the target's pre-norm state before each slot's token."""
        config = self.config
        if config.init != "linear":
            return
        needed = sum(looking(config.hidden_size, config.head_dim))
        if needed > config.num_key_value_heads:
            raise UserError(
                f"heads.init=linear needs {needed} key heads or more, and heads.num_key_value_heads is "
                f"{config.num_key_value_heads}.",
                "Leave out heads.num_key_value_heads and heads.num_attention_heads, or set heads.init=target.",
            )
        enough = _ROWS * (config.num_attention_heads * config.head_dim + config.hidden_size)
        lessons, rows = list[_Lesson](), 0
        for batch in batches:
            origin_M = supervised_origins(batch.supervised_BT, self.draft_steps - 1)
            if len(origin_M):
                lessons.append(_Lesson(batch, origin_M))
                rows += len(origin_M)
            if rows >= enough:
                break
        if rows < config.hidden_size:  # underdetermined
            return
        self._look(lessons)
        self._solve(lessons)

    def _look(self, lessons: Sequence[_Lesson]) -> None:
        config, layer, size = self.config, self.stack[0], self.config.hidden_size
        fast_d = fast_pairs(layer)
        angles_R = self._angles()[: int(fast_d.sum()) // 2]
        patterns = (pattern(angles_R, config.block_size, False), pattern(angles_R, config.block_size, True))
        if min(query.margin for query in patterns) <= 0:  # too few pairs to tell all distances apart
            return
        features, contexts, roots = Ridge(), list[Tensor](), list[Tensor]()
        for lesson in lessons:
            batch, origin_M = lesson.batch, lesson.origin_M
            context_XE = self.read_states(batch.states).flatten(0, 1)
            root_ME = self._first_input(batch.tokens_BT.flatten()[origin_M + 1], context_XE)
            steps = enumerate(_STEPS[: self.draft_steps])
            wanted_ME = cast(Tensor, sum(weight * lesson.wanted(self.norm, step) for step, weight in steps))
            features.add(torch.cat([context_XE[origin_M], root_ME], -1), wanted_ME * self.norm.weight)
            contexts.append(context_XE)
            roots.append(root_ME)
        context_XE = torch.cat(contexts)
        tokens = len(self.target_embeddings)
        vocabulary = torch.arange(0, tokens, max(1, tokens // _KINDS))
        mask = torch.tensor([config.mask_token_id])
        number_E = telling(
            context_XE, self._first_input(vocabulary, context_XE), torch.cat(roots), self._first_input(mask, context_XE)
        )
        counts, queries, keys = looking(size, config.head_dim), config.num_attention_heads, config.num_key_value_heads
        taken, groups = sum(counts), queries // keys
        rows_HdE = layer.qkv.weight.view(-1, config.head_dim, size)
        others = (
            (layer.q_norm, rows_HdE[taken * groups : queries]),
            (layer.k_norm, rows_HdE[queries + taken : queries + keys]),
        )
        for norm, rows in others:
            if len(rows):
                read = context_XE[:_KINDS] @ rows[:, ~fast_d].flatten(0, 1).T
                share = float((~fast_d).float().mean())
                norm.weight[~fast_d] = float(read.square().mean().sqrt()) * share**0.5
        look(layer, counts, patterns, number_E)
        first = (queries + keys) * config.head_dim
        for count, part in zip(counts, (slice(0, size), slice(size, 2 * size)), strict=True):
            feature_CE = features.features(part, min(count * config.head_dim, size))
            layer.qkv.weight[first : first + len(feature_CE)] = feature_CE.to(layer.qkv.weight)
            first += count * config.head_dim

    def _solve(self, lessons: Sequence[_Lesson]) -> None:
        contexts = [self.read_states(lesson.batch.states) for lesson in lessons]
        runs = [
            Blocks(self, lesson.batch, lesson.origin_M, context_BTE)
            for lesson, context_BTE in zip(lessons, contexts, strict=True)
        ]
        for number, layer in enumerate(self.stack):
            ridge, width = Ridge(), layer.o.in_features
            attended = []
            for lesson, run, context_BTE in zip(lessons, runs, contexts, strict=True):
                positions_BT = positions_of(lesson.batch.tokens_BT, lesson.batch.starts_BT)
                rotary = self._rotary.at(positions_BT, context_BTE.dtype, positions_BT.shape[1])
                mixed_BXF = by_token(run.mix(layer, *layer.context(context_BTE, rotary)))
                attended.append(mixed_BXF)
                read_MSF, stream_MSE = run.drafted(mixed_BXF), run.drafted(run.stream_BXE)
                for step in range(self.draft_steps):
                    wanted_ME = lesson.wanted(self.norm, step) - stream_MSE[:, step]
                    beside_MI = self.beside(lesson.batch, lesson.origin_M, step)
                    if number:
                        wanted_ME = wanted_ME - self.beside_guess(beside_MI)
                    parts = [read_MSF[:, step], *([] if number or beside_MI is None else [beside_MI])]
                    ridge.add(torch.cat(parts, -1), wanted_ME, _WEIGHT**step)
            map_EF = ridge.solve()
            layer.o.weight.copy_(map_EF[:, :width])
            if number == 0 and map_EF.shape[1] > width:
                self.take_beside(map_EF[:, width:], ridge.gram_FF[width:, width:] / ridge.rows)
            ridge = Ridge()
            for lesson, run, mixed_BXF in zip(lessons, runs, attended, strict=True):
                run.stream_BXE = run.stream_BXE + layer.o(mixed_BXF)
                inner_MSF, stream_MSE = run.drafted(layer.inside(run.stream_BXE)), run.drafted(run.stream_BXE)
                for step in range(self.draft_steps):
                    beside_MI = self.beside(lesson.batch, lesson.origin_M, step)
                    guess_ME = stream_MSE[:, step] + self.beside_guess(beside_MI)
                    ridge.add(inner_MSF[:, step], lesson.wanted(self.norm, step) - guess_ME, _WEIGHT**step)
            layer.down.weight.copy_(ridge.solve())
            for run in runs:
                run.stream_BXE = run.stream_BXE + layer.down(layer.inside(run.stream_BXE))
        sizes = [run.drafted(run.stream_BXE).flatten(0, 1).square().mean(-1).sqrt() for run in runs]
        self.settle_beside(float(torch.cat(sizes).mean()))

    def beside(self, batch: HeadBatch, origin_M: Tensor, step: int) -> Tensor | None:
        """A family's extra linear inputs of a slot, [M, I]; None by default."""
        return None

    def beside_guess(self, beside_MI: Tensor | None) -> Tensor | float:
        """Contribution of the map of `take_beside` to the predicted state."""
        return 0.0

    def take_beside(self, map_EI: Tensor, products_II: Tensor) -> None:
        """Take this initial map of the extra inputs, with their second moments."""

    def settle_beside(self, size: float) -> None:
        """Finish that start, given the mean RMS of the streams before the norm."""

    def _first_input(self, tokens: Tensor, like: Tensor) -> Tensor:
        assert self.stack[0].input_norm is not None, "as of every layer of a block"
        return normed(self.stack[0].input_norm, self.embedded(tokens, like))

    def _angles(self) -> Tensor:
        """Rotation angle of each pair per position, [R]."""
        cos, sin = self._rotary.at(torch.arange(2)[None], torch.float32, 2)
        half = self.config.head_dim // 2
        angles_R: Tensor = torch.atan2(sin[0, 1, :half], cos[0, 1, :half])
        return angles_R


# -- where heads look --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pattern:
    """First and second components of a query's pairs that score highest at one place from every slot of a block, with
    the smallest margin over all other positions for keys of size 1 in each pair."""

    real_R: Tensor
    imaginary_R: Tensor
    margin: float


def places(block: int, at_root: bool) -> tuple[Tensor, Tensor]:
    """Distances [K] from each slot to the wanted place (the context's newest token, or the root), and the key signs
    [K, P] at distances 1 - K to `_FAR`: opposite in block and context, 0 outside of both and at the wanted place.

    >>> [part[:2, :6].int().tolist() for part in (*places(2, False)[1:], *places(2, True)[1:])]  # distances -1 to 4
    [[[-1, -1, 0, 1, 1, 1], [0, -1, -1, 0, 1, 1]], [[1, 0, -1, -1, -1, -1], [0, 1, 0, -1, -1, -1]]]
    """
    slots_K1, distances_P = torch.arange(block)[:, None], torch.arange(1 - block, _FAR + 1)
    wanted_K = slots_K1[:, 0] if at_root else slots_K1[:, 0] + 1
    context = -1.0 if at_root else 1.0
    signs_KP = torch.where(distances_P > slots_K1, context, -context)
    signs_KP = signs_KP.masked_fill(distances_P < slots_K1 - block + 1, 0.0)
    return wanted_K, signs_KP.masked_fill(distances_P == wanted_K[:, None], 0.0)


def pattern(angles_R: Tensor, block: int, at_root: bool) -> Pattern:
    """Find the unit query with the largest margin at these `places`: a matrix game of positions against pairs (rotating
    by `angles_R` per position) at phases."""
    distance_K, signs_KP = places(block, at_root)
    phases = torch.arange(_PHASES) * (2 * torch.pi / _PHASES)
    angle_A = angles_R.repeat_interleave(_PHASES)
    distances_P1 = torch.arange(1 - block, _FAR + 1)[:, None]
    table_PA = (distances_P1 * angle_A - phases.repeat(len(angles_R))).cos()
    wanted_K = distance_K + block - 1

    def above(shares_A: Tensor) -> Tensor:
        scores_P = table_PA @ shares_A
        above_KP = scores_P[wanted_K, None] - signs_KP * scores_P
        return above_KP.masked_fill(signs_KP == 0, torch.inf)

    def gains(shares_A: Tensor) -> Tensor:
        slot, place = divmod(int(above(shares_A).argmin()), signs_KP.shape[1])
        return table_PA[wanted_K[slot]] - signs_KP[slot, place] * table_PA[place]

    mean_A = play(gains, len(angle_A), _ROUNDS, _RATE)
    mean_A /= mean_A.sum()
    weights_RP = mean_A.view(-1, _PHASES)
    real_R, imaginary_R = weights_RP @ phases.cos(), -(weights_RP @ phases.sin())
    size = float((real_R.square() + imaginary_R.square()).sum().sqrt())
    return Pattern(real_R / size, imaginary_R / size, float(above(mean_A).min()) / size)


def fast_pairs(layer: BlockLayer) -> Tensor:
    """Mask of the head components used by patterns, the fast half of the pairs, bool [d]."""
    width = layer.config.head_dim
    return (torch.arange(width) % (width // 2)) < (width + 2) // 4


@torch.no_grad()
def look(layer: BlockLayer, counts: tuple[int, int], patterns: tuple[Pattern, Pattern], number_E: Tensor) -> None:
    """Point a layer's first key heads at the context's newest token and the next few at the root (`counts` of each,
    with positive margins); other heads keep their slow pairs. `number_E` gives 1 for the context and -1 for a block."""
    config, width = layer.config, layer.config.head_dim
    keys, taken, groups = config.num_attention_heads, sum(counts), layer.groups
    fast_d = fast_pairs(layer)
    pairs = int(fast_d.sum()) // 2
    rows_HdE = layer.qkv.weight.view(-1, width, layer.qkv.in_features)
    rows_HdE[groups * taken : keys, fast_d] = 0
    rows_HdE[keys + taken : keys + config.num_key_value_heads, fast_d] = 0
    spare = int((~fast_d).nonzero()[-1])
    for head in range(taken):
        chosen, sign = (patterns[0], 1.0) if head < counts[0] else (patterns[1], -1.0)
        key_d = torch.zeros(width)
        key_d[:pairs] = 1.0
        rows_HdE[keys + head] = (key_d[:, None] * (sign * number_E)).to(rows_HdE)
        for group in range(groups):
            soft = _SOFT[min(group, len(_SOFT) - 1)]
            query_d = torch.zeros(width)
            query_d[:pairs] = soft * chosen.real_R
            query_d[width // 2 : width // 2 + pairs] = soft * chosen.imaginary_R
            query_d[spare] = (1 - soft**2) ** 0.5
            rows_HdE[head * groups + group] = (query_d[:, None] * -number_E).to(rows_HdE)
    margin = min(kind.margin for kind in patterns)
    layer.q_norm.weight[fast_d] = _MARGIN / (margin * (width / pairs) ** 0.5)
    layer.k_norm.weight[fast_d] = 1.0


@torch.no_grad()
def telling(context_ME: Tensor, *blocks: Tensor) -> Tensor:
    """Fit a linear probe [E] that gives 1 for the context and -1 for a block's normed embeddings, with equal weight for
    each kind."""
    gram_EE = context_ME.T @ context_ME / len(context_ME)
    wanted_E = context_ME.mean(0)
    for block_ME in blocks:
        gram_EE = gram_EE + block_ME.T @ block_ME / len(block_ME) / len(blocks)
        wanted_E = wanted_E - block_ME.mean(0) / len(blocks)
    ridge = 1e-4 * gram_EE.diagonal().mean()
    number_E: Tensor = torch.linalg.solve(gram_EE + ridge * torch.eye(len(gram_EE)).to(gram_EE), wanted_E)
    return number_E


class Ridge:
    """Ridge regression, accumulated in parts."""

    def __init__(self) -> None:
        self.gram_FF, self.cross_FE = torch.zeros(()), torch.zeros(())
        self.rows = 0.0

    @torch.no_grad()
    def add(self, read_MF: Tensor, wanted_ME: Tensor, weight: float = 1.0) -> None:
        read_MF = read_MF.float()
        weighted_FM = (read_MF * weight).T
        self.gram_FF = weighted_FM @ read_MF + self.gram_FF
        self.cross_FE = weighted_FM @ wanted_ME.float() + self.cross_FE
        self.rows += len(read_MF)

    def solve(self) -> Tensor:
        """The map [E, F]."""
        # Some inputs are a hundred times as large as others: scale the ridge to each one.
        sizes_F = self.gram_FF.diagonal().sqrt().clamp_min(1e-6)
        scaled_FF = self.gram_FF / sizes_F / sizes_F[:, None]
        ridged_FF = scaled_FF + _RIDGE * torch.eye(len(scaled_FF)).to(scaled_FF)
        map_EF: Tensor = (torch.linalg.solve(ridged_FF, self.cross_FE / sizes_F[:, None]) / sizes_F[:, None]).T
        return map_EF

    def features(self, part: slice, count: int) -> Tensor:
        """The most predictive directions of some inputs, [count, part]."""
        map_EI = self.solve()[:, part]
        gram_II = self.gram_FF[part, part] / self.rows
        ridge = 1e-4 * gram_II.diagonal().mean()
        lower_II = torch.linalg.cholesky(gram_II + ridge * torch.eye(len(gram_II)).to(gram_II))
        axes_II = torch.linalg.svd(lower_II.T @ map_EI.T, full_matrices=False)[0][:, :count]
        feature_CI: Tensor = torch.linalg.solve(lower_II.T, axes_II).T
        return feature_CI
