"""Heads that begin as a transition: a solved step from one final state of the target to the next.

Two things are solved for before the first gradient step. The linear part of the step, a guess of the next final state
from a final state and the embedding of the token that follows it: the published layer has no place for such a map, so
attention heads that look at their own position alone hold it (see `own_position`). And an attention that copies what
followed the present token before (see `induction`).

Shape suffixes: B rows, T tokens, E hidden size, M positions, P distances, R pairs of a head, X = aux layers * E, I what
attention reads, J what the solved map reads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.base import HeadBatch, supervised_origins
from headstart.heads.int8_weights import Linear
from headstart.heads.parts import induction, own_position
from headstart.heads.parts.layer import by_token, normed
from headstart.heads.parts.recurrent import RecurrentConfig, RecurrentHead
from headstart.heads.parts.residual import LinearStart, map_by_direction
from headstart.heads.parts.text_attention import causal_attention
from headstart.target.fitting import FINAL

_FEW_ROWS, _ROWS, _MANY = 2, 6, 20_000
"""Tokens for each number that is read, from which the code of a token is learnt: `_ROWS`, but beyond `_MANY` in all
no more than `_FEW_ROWS`."""
_BLOCK = 8192
"""Embeddings that are normed at a time."""
_LONGEST, _ENOUGH = 1024, 8192
"""Tokens of a text, and of all, on which it is checked whether heads find their own position."""


class TransitionConfig(RecurrentConfig):
    """Settings of heads whose start can be solved for."""

    @property
    def own_heads(self) -> int:
        """Key heads that look at their own position alone, with `init: transition`."""
        return own_position.heads_needed(self.hidden_size, self.head_dim)


class TransitionStart(RecurrentHead):
    """Heads of one layer over fused states, whose start can be solved for (`heads.init=transition`)."""

    config: TransitionConfig
    fc: Linear
    embedding_norm: nn.RMSNorm
    hidden_norm: nn.RMSNorm
    norm: nn.RMSNorm

    @abstractmethod
    def normed_states(self, seen: Tensor) -> Tensor:
        """What was read of the target, [..., X], as the fusion takes it."""

    def warm_start_transition(self) -> None:
        """A layer without any effect yet, whose own heads look at themselves."""
        self.stack[0].zero_init()
        self.hidden_norm.weight.fill_(1)
        self._look_at_themselves([])

    def fit_transition(self, batches: Iterator[HeadBatch], normed_residual: bool) -> None:
        """Fuse to the final state before its norm, make some heads copy, and let the others hold the linear part of
        the step to the next final state: ridge regression, undone by the target's norm. With `normed_residual` the
        layer adds to the normed fused state, rather than to that state."""
        first = self._first(batches)
        if not first:
            return
        size, layer, own = self.config.hidden_size, self.stack[0], self.config.own_heads
        self._look_at_themselves(first)
        self.fc.weight.copy_(self._to_final_state(first))
        copies = self._copy(first)

        def read(batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
            final_BTE, origin_M = batch.states[FINAL].float(), supervised_origins(batch.supervised_BT, 0)
            attended_BTI = self._attended(self.select_states(batch.states).float(), _following(batch))
            parts = [attended_BTI]
            if copies:
                queries, keys, values = self._read(attended_BTI)
                parts.append(by_token(causal_attention(queries[:, own:], keys[:, own:], values[:, own:])))
            read_MJ = torch.cat(parts, dim=-1).flatten(0, 1)[origin_M]
            return read_MJ, [final_BTE.flatten(0, 1)[origin_M + 1] / self.norm.weight.float()]

        of_own_heads = layer.o.in_features // self.config.num_key_value_heads * own
        copied = layer.o.in_features - of_own_heads if copies else 0
        start = LinearStart([2 * size + copied], size, self.target_embeddings.device)
        for map_EJ in start.solve(chain(first, batches), read):
            products_JJ = start.gram_FF / start.rows
            residual = 1.0  # the size of the state that the layer adds to
            if not normed_residual:
                # That is the fused state as it is: it is given the size of the guesses that are fed back.
                residual = float(((map_EJ @ products_JJ) * map_EJ).sum() / size) ** 0.5
                fused_MX = torch.cat(
                    [self.project(self.select_states(batch.states).float()).flatten(0, 1) for batch in first]
                )
                self.fc.weight *= residual / float(fused_MX.square().mean(-1).sqrt().median())
            linear_EI = map_EJ[:, : 2 * size].clone()
            linear_EI[:, size:] -= residual * torch.eye(size).to(linear_EI)
            own_position.hold(layer, own, linear_EI, products_JJ[: 2 * size, : 2 * size])
            if copies:
                layer.o.weight[:, of_own_heads:] = map_EJ[:, 2 * size :]

    def keep_own_heads(self, batches: Iterable[HeadBatch]) -> None:
        """Let training take as given that heads look at their own position alone, where they really do."""
        layer, own = self.stack[0], self.config.own_heads
        layer.own_heads = 0
        if own == self.config.num_key_value_heads:
            return
        least, tokens = 1.0, 0
        for batch in batches:
            seen_BTX = self.select_states(batch.states)[:, :_LONGEST]
            attended_BTI = self._attended(seen_BTX, _following(batch)[:, :_LONGEST])
            queries, keys, _ = self._read(attended_BTI)
            least = min(least, float(own_position.shares(queries[:, :own], keys[:, :own]).mean((0, 2, 3)).min()))
            tokens += attended_BTI.shape[1]
            if tokens >= _ENOUGH:
                break
        layer.own_heads = own if least >= own_position.ALONE else 0

    def _attended(self, seen_BTX: Tensor, following_BT: Tensor) -> Tensor:
        return self.layer_input(self.project(seen_BTX), self._embed(following_BT, seen_BTX))[0]

    def _read(self, attended_BTI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the layer, every row a text of its own."""
        width = attended_BTI.shape[1]
        index_BT = torch.arange(width, device=attended_BTI.device).expand(attended_BTI.shape[:2])
        return self.stack[0].read(attended_BTI, self._rotary.at(index_BT, attended_BTI.dtype, width))

    def _first(self, batches: Iterator[HeadBatch]) -> list[HeadBatch]:
        """As many batches as the code of a token is learnt from."""
        read = self.fc.in_features
        enough = min(_ROWS * read, max(_FEW_ROWS * read, _MANY))
        first: list[HeadBatch] = []
        while sum(batch.tokens_BT.numel() for batch in first) < enough and (batch := next(batches, None)) is not None:
            first.append(batch)
        return first

    def _look_at_themselves(self, batches: list[HeadBatch]) -> None:
        """Let the first heads look at their own position, whatever token of the vocabulary or of the texts it has."""
        like = self.embedding_norm.weight.float()

        def normed_of(tokens: Tensor) -> Iterator[Tensor]:
            return (normed(self.embedding_norm, self._embed(part, like)) for part in torch.split(tokens, _BLOCK))

        kinds = [normed_of(torch.arange(len(self.target_embeddings)))]
        if batches:
            kinds.append(normed_of(torch.cat([batch.tokens_BT.flatten() for batch in batches])))
        number_E, mean_E = own_position.number_of_all(*kinds)
        cos_PR = self._cosines(own_position.FAR)[:, : self.config.head_dim // 2]
        cos_PR = cos_PR[1:] / cos_PR[0, 0]  # tables of long contexts may carry a factor
        own_position.look_at_itself(self.stack[0], self.config.own_heads, cos_PR, number_E=number_E, mean_E=mean_E)

    def _copy(self, batches: list[HeadBatch]) -> bool:
        """Set the fusion and the attention of the other heads so that they copy; says whether they do."""
        fused_EX = self.fc.weight.clone()
        aux_MX = self._aux_states(batches)
        embedded_ME = torch.cat([self._embed(batch.tokens_BT.flatten(), aux_MX) for batch in batches])
        embedded_ME = normed(self.embedding_norm, embedded_ME)
        slow = induction.slow_pairs(self.config, self._cosines(induction.FAR))
        final_ME = aux_MX @ fused_EX.T
        spare = self.config.own_heads
        code = induction.solve(self.stack[0], slow, aux_MX, final_ME=final_ME, own_ME=embedded_ME, spare=spare)
        if code is None:
            return False
        self.hidden_norm.weight.fill_(1)
        self.fc.weight.copy_(code.into(fused_EX))
        return True

    def _cosines(self, far: int) -> Tensor:
        """Of the angles by which each component of a head turns over distances from 0 to `far`, [P, d]."""
        return self._rotary.at(torch.arange(far + 1)[None], torch.float32, far + 1)[0][0]

    def _aux_states(self, batches: list[HeadBatch]) -> Tensor:
        seen = (self.normed_states(self.select_states(batch.states)) for batch in batches)
        return torch.cat([seen_BTX.flatten(0, 1).float() for seen_BTX in seen])

    def _to_final_state(self, batches: list[HeadBatch]) -> Tensor:
        """The map from normed aux layers to the final state before its norm, as large as the deepest of them, [E, X]:
        ridge regression of what the last layers add to the deepest aux hidden state."""
        size = self.config.hidden_size
        aux_MX = self._aux_states(batches)
        final_ME = torch.cat([batch.states[FINAL].flatten(0, 1).float() for batch in batches])
        final_ME = final_ME / self.norm.weight.float()
        good_M = aux_MX.isfinite().all(-1) & final_ME.isfinite().all(-1) & (aux_MX != 0).any(-1)
        aux_MX, final_ME = aux_MX[good_M], final_ME[good_M]
        deepest_ME = aux_MX[:, -size:]
        added_ME = final_ME * deepest_ME.square().mean(-1, keepdim=True).sqrt() - deepest_ME
        map_EX = map_by_direction(aux_MX, added_ME)
        map_EX[:, -size:] += torch.eye(size).to(map_EX)
        return map_EX


def _following(batch: HeadBatch) -> Tensor:
    """The token after each, [B, T]; after the last one anything."""
    return F.pad(batch.tokens_BT[:, 1:], (0, 1))
