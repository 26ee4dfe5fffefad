"""Blocks that draft before they are trained: attention that looks where it should, and output maps that are solved for.

All mask slots of a block read the same embedding, so what tells them apart is their distance to everything else. Some
attention heads are therefore given queries and keys that see distances and kinds alone: a number read off the layer's
input is 1 for the context and -1 for a block, whatever the token, and head norms make it exactly one of the two. Times
a fixed pattern, which rotary positions turn, it gives a score that is highest at the newest token of the context, from
every slot; with the other sign, at the root. What such heads find there is passed on by as many directions as they
have numbers, those that say most about the states to come. The other heads keep the target's queries and keys, on the
slowly turning pairs of a head alone.

What all heads find, and what the MLP makes of it, then goes through linear maps that are solved for: ridge regression
on the target's final states.

Shape suffixes: E hidden size, B rows, T tokens, M origins, S drafted slots, X all slots of a row's blocks (or all
tokens), R pairs of a head, F what a map reads, I what is read at an origin, C features, H heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.base import HeadBatch, supervised_origins
from headstart.heads.parts.block import BlockHead, BlockLayer, Blocks, looking
from headstart.heads.parts.block_pattern import Pattern, newest, pattern, root
from headstart.heads.parts.layer import by_token, normed
from headstart.heads.parts.text_attention import positions_of
from headstart.target.fitting import FINAL

_MARGIN = 6.0
"""How far the score of where a head looks stands above any other."""
_RIDGE = 0.03
"""Of the solved maps, as a share of the mean squared size of each number that they read."""
_SOFT = (1.0, 0.1, 0.03)
"""Of the query heads that share a key head, in turn: how much of their size is the pattern. Soft ones see the rest of
the text, each slot another share of it."""
_ROWS = 8
"""Origins for each number that an output map reads, from which it is solved."""
_WEIGHT = 0.5
"""Each further step of a draft counts so much less."""
_STEPS = (1.0, 0.5, 0.25)
"""How much of the states to come the features that heads pass on are chosen by."""
_KINDS = 8192
"""Embeddings of the vocabulary that are looked at."""


@dataclass(frozen=True)
class _Lesson:
    """Conversations to solve from, and the origins whose drafts all lie in an answer."""

    batch: HeadBatch
    origin_M: Tensor

    def wanted(self, heads: SolvedBlockHead, step: int) -> Tensor:
        """The state before the norm from which the target predicts what a step drafts, [M, E]."""
        final_XE = self.batch.states[FINAL].flatten(0, 1)
        scale_E = torch.where(heads.norm.weight.abs() < 1e-3, 1.0, heads.norm.weight)
        return final_XE[self.origin_M + step + 1].float() / scale_E


class SolvedBlockHead(BlockHead):
    """Block drafters whose start can be solved for (`heads.init=linear`)."""

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Let some attention heads look at the newest state and at the root, and solve for all output maps.

        See `block_start`. What the layers add together is the best guess of the state, before the norm, from which the
        target itself predicts what a slot drafts.
        """
        layer = self.stack[0]
        heads = looking(self.config.hidden_size, self.config.head_dim)
        if self.config.init != "linear":
            return
        if sum(heads) > self.config.num_key_value_heads:
            raise UserError(
                f"heads.init=linear needs {sum(heads)} key heads or more, and heads.num_key_value_heads is "
                f"{self.config.num_key_value_heads}.",
                "Leave out heads.num_key_value_heads and heads.num_attention_heads, or set heads.init=target.",
            )
        enough = _ROWS * (self.config.num_attention_heads * self.config.head_dim + self.config.hidden_size)
        lessons, rows = list[_Lesson](), 0
        for batch in batches:
            origin_M = supervised_origins(batch.supervised_BT, self.draft_steps - 1)
            if len(origin_M):
                lessons.append(_Lesson(batch, origin_M))
                rows += len(origin_M)
            if rows >= enough:
                break
        if rows < self.config.hidden_size:  # too few to solve anything
            return
        self._look(layer, heads, lessons)
        self._solve(lessons)

    def _look(self, layer: BlockLayer, heads: tuple[int, int], lessons: Sequence[_Lesson]) -> None:
        """Set what heads look at, and what they pass on."""
        config, size = self.config, self.config.hidden_size
        fast_d = fast_pairs(layer)
        angles_R = self._angles()[: int(fast_d.sum()) // 2]
        seen = (pattern(angles_R, newest(config.block_size)), pattern(angles_R, root(config.block_size)))
        if min(one.margin for one in seen) <= 0:  # heads of few pairs cannot tell all distances apart
            return
        features, sample = Ridge(), list[Tensor]()
        asked = list[Tensor]()
        for one in lessons:
            context_XE = self.read_states(one.batch.states).flatten(0, 1)
            root_ME = self._asked(layer, one.batch.tokens_BT.flatten()[one.origin_M + 1], context_XE)
            wanted_ME = sum(weight * one.wanted(self, step) for step, weight in enumerate(_STEPS[: self.draft_steps]))
            features.add(torch.cat([context_XE[one.origin_M], root_ME], -1), cast(Tensor, wanted_ME) * self.norm.weight)
            sample.append(context_XE)
            asked.append(root_ME)
        context_XE = torch.cat(sample)
        assert self._embedding_VE is not None
        every = torch.arange(0, len(self._embedding_VE), max(1, len(self._embedding_VE) // _KINDS))
        mask = torch.tensor([config.mask_token_id])
        blocks = (self._asked(layer, every, context_XE), torch.cat(asked), self._asked(layer, mask, context_XE))
        number_E = telling(context_XE, *blocks)
        size_of_head = config.head_dim
        taken = sum(heads)
        own = layer.qkv.weight.view(-1, size_of_head, size)
        queries = config.num_attention_heads
        groups = queries // config.num_key_value_heads
        for norm, rows in (
            (layer.q_norm, own[taken * groups : queries]),
            (layer.k_norm, own[queries + taken : queries + config.num_key_value_heads]),
        ):
            if len(rows):
                read = context_XE[:_KINDS] @ rows[:, ~fast_d].flatten(0, 1).T
                share = float((~fast_d).float().mean())
                norm.weight[~fast_d] = float(read.square().mean().sqrt()) * share**0.5
        look(layer, heads, seen, number_E)
        first = (queries + config.num_key_value_heads) * size_of_head
        for kind, part in enumerate((slice(0, size), slice(size, 2 * size))):
            count = heads[kind] * size_of_head
            found_CE = features.features(part, min(count, size))
            layer.qkv.weight[first : first + len(found_CE)] = found_CE.to(layer.qkv.weight)
            first += count

    def _solve(self, lessons: Sequence[_Lesson]) -> None:
        """Solve for the output maps, one after the other."""
        runs = []
        for one in lessons:
            like = self.read_states(one.batch.states)
            runs.append((one, Blocks(self, one.batch, one.origin_M, like), like))
        for number, layer in enumerate(self.stack):
            ridge, width = Ridge(), layer.o.in_features
            positions = [positions_of(one.batch.tokens_BT, one.batch.starts_BT) for one, *_ in runs]
            found = []
            for (one, run, like), at in zip(runs, positions, strict=True):
                rotary = self._rotary.at(at, like.dtype, at.shape[1])
                mixed_BXF = by_token(run.mix(layer, *layer.context(like, rotary)))
                found.append(mixed_BXF)
                read_MSF, stream_MSE = run.drafted(mixed_BXF), run.drafted(run.stream_BXE)
                for step in range(self.draft_steps):
                    wanted_ME = one.wanted(self, step) - stream_MSE[:, step]
                    beside_MI = self.beside(one.batch, one.origin_M, step)
                    if number:
                        wanted_ME = wanted_ME - self.beside_guess(beside_MI)
                    parts = [read_MSF[:, step], *([] if number or beside_MI is None else [beside_MI])]
                    ridge.add(torch.cat(parts, -1), wanted_ME, _WEIGHT**step)
            map_EF = ridge.solve()
            layer.o.weight.copy_(map_EF[:, :width])
            if number == 0 and map_EF.shape[1] > width:
                assert ridge.gram_FF is not None
                self.take_beside(map_EF[:, width:], ridge.gram_FF[width:, width:] / ridge.rows)
            ridge = Ridge()
            for (one, run, _), mixed_BXF in zip(runs, found, strict=True):
                run.stream_BXE = run.stream_BXE + layer.o(mixed_BXF)
                inner_MSF, stream_MSE = run.drafted(layer.inside(run.stream_BXE)), run.drafted(run.stream_BXE)
                for step in range(self.draft_steps):
                    guess_ME = stream_MSE[:, step] + self.beside_guess(self.beside(one.batch, one.origin_M, step))
                    ridge.add(inner_MSF[:, step], one.wanted(self, step) - guess_ME, _WEIGHT**step)
            layer.down.weight.copy_(ridge.solve())
            for _, run, _ in runs:
                run.stream_BXE = run.stream_BXE + layer.down(layer.inside(run.stream_BXE))
        sizes = torch.cat([run.drafted(run.stream_BXE).flatten(0, 1).square().mean(-1).sqrt() for _, run, _ in runs])
        self.settle_beside(float(sizes.mean()))

    def beside(self, batch: HeadBatch, origin_M: Tensor, step: int) -> Tensor | None:
        """What a family reads beside a slot, [M, I], as far as it enters linearly; None where there is nothing."""
        return None

    def beside_guess(self, beside_MI: Tensor | None) -> Tensor | float:
        """What `take_beside` made of that adds to the guess of a state."""
        return 0.0

    def take_beside(self, map_EI: Tensor, products_II: Tensor) -> None:
        """Start with this map of what is read beside the slots, whose mean products are given."""

    def settle_beside(self, size: float) -> None:
        """The streams have this size before the norm, on average."""

    def _asked(self, layer: BlockLayer, tokens: Tensor, like: Tensor) -> Tensor:
        """Normed embeddings as the first layer reads them."""
        assert self._embedding_VE is not None and layer.input_norm is not None
        return normed(layer.input_norm, F.embedding(tokens.to(self._embedding_VE.device), self._embedding_VE).to(like))

    def _angles(self) -> Tensor:
        """By how much each pair of a head turns over one position, [R]."""
        cos, sin = self._rotary.at(torch.arange(2)[None], torch.float32, 2)
        half = self.config.head_dim // 2
        angles_R: Tensor = torch.atan2(sin[0, 1, :half], cos[0, 1, :half])
        return angles_R


def fast_pairs(layer: BlockLayer) -> Tensor:
    """Components of a head that patterns take: the first half of its pairs, which turn quickly, bool [d]."""
    width = layer.config.head_dim
    return (torch.arange(width) % (width // 2)) < (width + 2) // 4


@torch.no_grad()
def look(layer: BlockLayer, heads: tuple[int, int], seen: tuple[Pattern, Pattern], number_E: Tensor) -> None:
    """Set the queries and keys of a layer's first key heads so that they look at the context's newest token, and those
    of the next ones so that they look at the root; the others keep what the slow pairs hold.

    Args:
        layer: whose `qkv` and head norms are written.
        heads: how many key heads look at the newest token, and how many at the root.
        seen: patterns of the two kinds, with margins above 0.
        number_E: gives 1 for the context and -1 for a block.
    """
    config, width = layer.config, layer.config.head_dim
    groups = config.num_attention_heads // config.num_key_value_heads
    fast_d = fast_pairs(layer)
    count = int(fast_d.sum()) // 2
    weight_HdE = layer.qkv.weight.view(-1, width, layer.qkv.in_features)
    keys = config.num_attention_heads
    taken = sum(heads)
    weight_HdE[groups * taken : keys, fast_d] = 0
    weight_HdE[keys + taken : keys + config.num_key_value_heads, fast_d] = 0
    spare = int((~fast_d).nonzero()[-1])
    for head in range(taken):
        kind = 0 if head < heads[0] else 1
        sign = 1.0 if kind == 0 else -1.0
        key_d = torch.zeros(width)
        key_d[:count] = 1.0
        weight_HdE[keys + head] = (key_d[:, None] * (sign * number_E)).to(weight_HdE)
        one = seen[kind]
        for group in range(groups):
            soft = _SOFT[min(group, len(_SOFT) - 1)]
            query_d = torch.zeros(width)
            query_d[:count], query_d[width // 2 : width // 2 + count] = soft * one.real_R, soft * one.imaginary_R
            query_d[spare] = (1 - soft**2) ** 0.5
            weight_HdE[head * groups + group] = (query_d[:, None] * -number_E).to(weight_HdE)
    margin = min(one.margin for one in seen)
    layer.q_norm.weight[fast_d] = _MARGIN / (margin * (width / count) ** 0.5)
    layer.k_norm.weight[fast_d] = 1.0


@torch.no_grad()
def telling(context_ME: Tensor, *blocks: Tensor) -> Tensor:
    """What gives 1 for the context and -1 for what a block reads, as nearly as a linear map can, [E].

    Args:
        context_ME: of some tokens.
        blocks: normed embeddings, of kinds that count alike.
    """
    gram_EE = context_ME.T @ context_ME / len(context_ME)
    wanted_E = context_ME.mean(0)
    for block_ME in blocks:
        gram_EE = gram_EE + block_ME.T @ block_ME / len(block_ME) / len(blocks)
        wanted_E = wanted_E - block_ME.mean(0) / len(blocks)
    ridge = 1e-4 * gram_EE.diagonal().mean()
    number_E: Tensor = torch.linalg.solve(gram_EE + ridge * torch.eye(len(gram_EE)).to(gram_EE), wanted_E)
    return number_E


class Ridge:
    """Ridge regression from what is read to what is wanted, in parts."""

    def __init__(self) -> None:
        self.gram_FF: Tensor | None = None
        self.cross_FE: Tensor | None = None
        self.rows = 0.0

    @torch.no_grad()
    def add(self, read_MF: Tensor, wanted_ME: Tensor, weight_M1: Tensor | float = 1.0) -> None:
        read_MF = read_MF.float()
        left_FM = (read_MF * weight_M1).T
        gram_FF, cross_FE = left_FM @ read_MF, left_FM @ wanted_ME.float()
        self.gram_FF = gram_FF if self.gram_FF is None else self.gram_FF.add_(gram_FF)
        self.cross_FE = cross_FE if self.cross_FE is None else self.cross_FE.add_(cross_FE)
        self.rows += len(read_MF)

    def solve(self) -> Tensor:
        """The map [E, F]."""
        assert self.gram_FF is not None and self.cross_FE is not None, "there is something to learn from"
        # Some of what is read is a hundred times as large as the rest: the ridge is a share of each number's own size.
        sizes_F = self.gram_FF.diagonal().sqrt().clamp_min(1e-6)
        scaled_FF = self.gram_FF / sizes_F / sizes_F[:, None]
        ridged_FF = scaled_FF + _RIDGE * torch.eye(len(scaled_FF)).to(scaled_FF)
        found_EF: Tensor = (torch.linalg.solve(ridged_FF, self.cross_FE / sizes_F[:, None]) / sizes_F[:, None]).T
        return found_EF

    def features(self, part: slice, count: int) -> Tensor:
        """Of some of what is read, the directions that say most about what is wanted, [count, part]."""
        assert self.gram_FF is not None
        map_EI = self.solve()[:, part]
        gram_II = self.gram_FF[part, part] / self.rows
        ridge = 1e-4 * gram_II.diagonal().mean()
        lower_II = torch.linalg.cholesky(gram_II + ridge * torch.eye(len(gram_II)).to(gram_II))
        axes_II = torch.linalg.svd(lower_II.T @ map_EI.T, full_matrices=False)[0][:, :count]
        found_CI: Tensor = torch.linalg.solve(lower_II.T, axes_II).T
        return found_CI
