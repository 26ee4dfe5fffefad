"""Base of autoregressive heads (EAGLE-1, EAGLE-3, MTP): unrolling in training, drafting level by level.

Entry t of such a head reads the target's state after token t and the embedding of token t + 1, and drafts token t + 2.
The state is the final one (EAGLE-1, MTP) or a fusion of several layers' (EAGLE-3). The head's output and the drafted
token's embedding are the entry of the next step. On tokens a b c d e (positions 0-4), the draft from the state after
`b` (origin 1):

    step 0   state(b), emb(c) -> d                      attends to the entries of a and b; b's is the step itself
    step 1   its own output of step 0, emb(d) -> e      attends to the entries of a and b, and to itself

If the target generated c d e, step 0 trains on origins 1 and 2, step 1 on origin 1. Origin 0 is excluded because the
target did not generate its root `b`, as it does in decoding:

>>> from headstart.heads.base import supervised_origins
>>> supervised = torch.tensor([[False, False, True, True, True]])
>>> [supervised_origins(supervised, step).tolist() for step in range(2)]
[[1, 2], [1]]

The entry of step k is at position t + k. Training computes step k of all origins of a conversation at once. An origin
sees the text's entries up to itself (its step 0) and its own steps up to k, never another origin's, as in drafting (the
"training-time test" of EAGLE-3, arXiv 2503.01840).

Shape suffixes: B rows, T tokens, A origins of a row, M predictions, P pending entries, W nodes of a level, S cache
slots, K draft steps, E hidden size, I attention inputs, X a family's inputs from the target, D draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headstart.heads.base import HeadBatch, StepPrediction, host_origins
from headstart.heads.int8_weights import in_panels, linear
from headstart.heads.parts.cache import Entries, LayerCache, WriteKV, cached_attention, text_attention
from headstart.heads.parts.graphed import GraphedHead, IntArray, Level
from headstart.heads.parts.layer import Angles, DraftLayer, LayerConfig, Rotary, angles, rms_norm
from headstart.heads.parts.recurrent_session import RecurrentMemory, RecurrentSession
from headstart.heads.parts.text_attention import attend, causal_attention
from headstart.heads.parts.unrolled_text import UnrolledText
from headstart.kernels import draft_kernels
from headstart.replay.attention import CHUNK
from headstart.replay.cuda_graphs import WIDTHS, bucket_slots, next_power_of_two
from headstart.support.uploads import upload
from headstart.tree.calibration import DEEPEST
from headstart.tree.tree import Committed, Request, Tree

AttendLayer = Callable[[int, Tensor, Tensor | None], Tensor]
"""Attention of a layer's queries over the cache. If row indices are given, queries are each row's last entry only."""
_FEW_PENDING = 8
"""Minimum padded number of pending entries, over all rows. Avoids separate graphs for 1, 2 and 4, as counts are rounded
up to powers of two."""
_MOST_READ = 1024
"""Most pending entries to read with graphs, in pieces of `WIDTHS[-1]` tokens. Beyond, eager forwards are faster."""


class RecurrentConfig(LayerConfig):
    """Settings of heads that feed their own state back."""

    draft_steps: int = Field(5, ge=1, le=DEEPEST, description="Draft steps, in training and in decoding.")
    init: str = Field("target", description="Initial weights; see each family.")


class RecurrentHead(GraphedHead):
    """Decoder layers over (state, next token's embedding); families define the layers' inputs and outputs."""

    config: RecurrentConfig

    def __init__(self, config: RecurrentConfig, layers: Sequence[DraftLayer]) -> None:
        super().__init__(config)
        self.layers = cast(list[DraftLayer], nn.ModuleList(layers))
        self._rotary = Rotary(config)

    @property
    def draft_steps(self) -> int:
        return self.config.draft_steps

    @property
    def bytes_per_token(self) -> int:
        return super().bytes_per_token + LayerCache.bytes_per_token(self.config, len(self.layers), self._dtype.itemsize)

    # -- defined by families -------------------------------------------------------------------------------------

    @abstractmethod
    def select_states(self, states: dict[int, Tensor]) -> Tensor:
        """Select the head's inputs [..., X] from the target's states."""

    @abstractmethod
    def project(self, states: Tensor) -> Tensor:
        """Map the selected states to the size of the feedback, [..., E]."""

    @abstractmethod
    def layer_input(self, feedback: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention input of the first layer [..., I], and its residual stream [..., E]."""

    def later_inputs(self, tokens: Tensor, feedback: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens and the feedback that training steps after the first read, given the text's next tokens and
        the previous step's feedback."""
        return tokens, feedback

    @property
    def output_norm(self) -> nn.RMSNorm | None:
        """Norm between the last layer's stream and the LM head, if any."""
        return None

    @property
    def feeds_normed(self) -> bool:
        """Whether the feedback is the stream after that norm."""
        return False

    def layer_output(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return LM head input and feedback, both [..., E], from the last layer's stream."""
        hidden = stream if self.output_norm is None else rms_norm(self.output_norm, stream)
        return hidden, hidden if self.feeds_normed else stream

    def embedding_input(self, like: Tensor) -> draft_kernels.EmbeddingInput | None:
        """Return `layer_input` for the C kernels, with weights in the dtype of `like`; None to leave it to torch."""
        return None

    def own_heads(self, layer: DraftLayer, like: Tensor) -> int:
        """Number of a layer's leading own-position heads. The C kernels skip their attention."""
        return 0

    @property
    @abstractmethod
    def lm_head_DE(self) -> Tensor:
        """LM head over the draft vocabulary."""

    # -- training ------------------------------------------------------------------------------------------------

    def _read_first_layer(
        self, feedback: Tensor, tokens: Tensor, rotary: Angles, trained_qkv: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        attention_input, stream = self.layer_input(feedback, self.embed_tokens(tokens, feedback))
        return *self.layers[0].read(attention_input, rotary, trained_qkv), stream

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        text: UnrolledText | None = None
        for step in range(self.draft_steps):
            origin_M = host_origins(batch, step)
            if not len(origin_M):
                return
            if text is None:
                feedback_BTE = self.project(self.select_states(batch.states))
                text = UnrolledText(self.layers, feedback_BTE, batch, origin_M, self.uses_flex)
            else:
                text.select(origin_M)
            tokens, positions = text.entries(step)
            if step:
                tokens, text.feedback_BAE = self.later_inputs(tokens, text.feedback_BAE)
            rotary = self._rotary.at(positions, text.feedback_BAE.dtype, batch.tokens_BT.shape[1] + step)
            hidden_BAE, text.feedback_BAE = self.layer_output(self.run_text(text, tokens, rotary))
            feature_ME = text.without_padding(text.feedback_BAE) if self.drafts_features else None
            origin_M = upload(origin_M, hidden_BAE.device)
            yield self.prediction(text.without_padding(hidden_BAE), self.lm_head_DE, origin_M, step, feature_ME)

    def run_text(self, text: UnrolledText, tokens: Tensor, rotary: Angles) -> Tensor:
        """Run the layers over the next training step of every origin and append keys and values to `text`. Returns the
        last layer's stream, [B, A, E]."""
        first, index_BA = not text.kv, text.visible.index_BA
        inputs = text.feedback_BAE, tokens, rotary, text.trained_qkv[0]
        queries, keys, values, stream = self.run_region(self._read_first_layer, *inputs)
        for number, layer in enumerate(self.layers):
            if number:
                queries, keys, values = self.run_region(layer.read, stream, rotary, text.trained_qkv[number])
            own = values.shape[1] - keys.shape[1]  # own-position heads, which output their value
            own_values, values = values[:, :own], values[:, own:]
            if first:
                text.kv.append((keys, values))
                if number == len(self.layers) - 1:  # after the last layer only the origins matter
                    stream = text.gather_origins(stream)
                    index_BA1 = index_BA[:, :, None]
                    own_values = own_values.gather(2, index_BA1[:, None].expand(-1, own, -1, own_values.shape[3]))
                    index = index_BA[:, None, None, :, None].expand(-1, *queries.shape[1:3], -1, queries.shape[4])
                    attention_output = attend(queries.gather(3, index), keys, values, text.visible)
                else:
                    attention_output = causal_attention(queries, keys, values, text.complete)
            else:
                text.chains[number].append((keys, values))
                attention_output = attend(queries, *text.kv[number], text.visible, text.chains[number])
            if own:
                own_output = own_values[:, :, None].expand(-1, -1, attention_output.shape[2], -1, -1)
                attention_output = torch.cat([own_output, attention_output], dim=1)
            stream = self.run_region(layer.write, stream, attention_output)
        return stream

    # -- drafting ------------------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> RecurrentSession:
        pending_BPX = self.select_states(states)
        width = pending_BPX.shape[1]
        cache = LayerCache(self.config, len(self.layers), len(prompts), prompt=width, like=pending_BPX)
        following, counts = [list(prompt[1:]) for prompt in prompts], [len(prompt) for prompt in prompts]
        kernel_heads = self._kernel_heads(pending_BPX[:1, :1])
        return RecurrentSession(
            cache, pending_BPX, following, counts, [], pending_BPX[:, :0], kernel_heads=kernel_heads
        )

    def read_text(self, session: RecurrentSession, check: Callable[[], None] | None) -> None:
        while max(session.counts) > CHUNK:
            if check is not None:
                check()
            self._read_piece(session)

    def _read_piece(self, session: RecurrentSession) -> None:
        width = min(CHUNK, max(session.counts) - 1)
        read, tokens = session.next_piece(width)
        tokens_BW = upload(tokens, session.pending_BPX.device)
        entries = Entries.of_text(session.cache.lengths, width, [max(count, 1) - 1 for count in read])
        session.cache.reserve(entries.stop)
        self._run(session, self.project(session.pending_BPX[:, :width]), tokens_BW, entries)
        session.drop_pending(read)

    def _kernel_heads(self, like: Tensor) -> draft_kernels.Recurrent | None:
        """Return the heads for the C kernels, in the dtype of `like`; None without int8 weights."""
        layers = [
            layer.kernel_layer(like, self.own_heads(layer, like)) if isinstance(layer, DraftLayer) else None
            for layer in self.layers
        ]
        if not all(layers) or (lm_head := in_panels(self.lm_head_DE, like)) is None:
            return None
        norm_E = None if self.output_norm is None else self.output_norm.weight.to(like.dtype)
        kernel_layers, eps = cast(list[draft_kernels.Layer], layers), self.config.rms_norm_eps
        return draft_kernels.Recurrent(
            kernel_layers, lm_head, norm_E, self.feeds_normed, eps, self.embedding_input(like)
        )

    def draft_step(self, session: RecurrentSession, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        if depth == 0:
            session.begin_round()
            pending, last = max(session.counts), [count - 1 for count in session.counts]
            entries = Entries.of_text(session.cache.lengths, pending, last)
            above_BWX = session.pending_BPX.narrow(1, 0, pending)
            if pending > 1:
                device, roots_B1 = tokens_BW.device, tokens_BW
                tokens_BW = upload(session.pending_tokens([0] * len(last), pending), device)
                tokens_BW.scatter_(1, upload(last, device)[:, None], roots_B1)
        else:
            entries, above_BWX = session.next_entries(parents_BW.numpy()), session.feedback_BWE
        session.cache.reserve(entries.stop)
        functions = draft_kernels.kernels_for(above_BWX) if tokens_BW.numel() <= draft_kernels.ROWS else None
        if functions and session.kernel_heads is not None:
            nodes = tokens_BW, parents_BW
            logits_BWD, session.feedback_BWE = self._run_kernels(functions, session, above_BWX, nodes, entries)
            return self.transform_logits(logits_BWD if self.lm_bias_D is None else logits_BWD + self.lm_bias_D)
        feedback_BWE = _parent_feedback(above_BWX, parents_BW) if depth else self.project(above_BWX)
        stream_BWE = self._run(session, feedback_BWE, tokens_BW, entries)
        hidden_BWE, session.feedback_BWE = self.layer_output(stream_BWE)
        return self.transform_logits(linear(hidden_BWE, self.lm_head_DE, self.lm_bias_D))

    def draft_tree(self, session: RecurrentSession, root: int, request: Request, max_children: int) -> Tree | None:
        (pending, *others), levels = session.counts, min(self.draft_steps, request.max_nodes - 1)
        above_1PX, heads = session.pending_BPX.narrow(1, 0, pending), session.kernel_heads
        functions = draft_kernels.kernels_for(above_1PX) if pending <= draft_kernels.ROWS else None
        if others or functions is None or heads is None or not heads.grows:
            return None
        if not 1 <= levels <= DEEPEST or request.max_nodes > draft_kernels.MOST_NODES:
            return None
        if self.lm_bias_D is not None or self.logit_transform is not None:
            return None
        session.begin_round()
        (base,) = session.root_slots
        entries = Entries.of_text(session.cache.lengths, pending, [pending - 1])
        entries = replace(entries, stop=base + 1 + (levels - 1) * (request.max_nodes - 1))
        session.cache.reserve(entries.stop)
        views = self._kv_views(session.cache, entries, above_1PX)
        growth = draft_kernels.Growth(request, self.draft_to_target_D, levels, max_children, base)
        return heads.grow(functions, array("q", [*session.next_tokens[0], root]), above_1PX, views, growth)

    def commit(self, session: RecurrentSession, committed: Committed) -> None:
        pending_BPX, tokens, counts = self.select_states(committed.states), committed.tokens, committed.counts
        if session.drafted:  # the pending entries are in the cache, with the root
            session.cache.lengths = [a + b for a, b in zip(session.cache.lengths, session.counts, strict=True)]
            session.pending_BPX, session.counts, session.drafted = pending_BPX, counts, False
            session.next_tokens = [of_row[1:] for of_row in tokens]
            return
        old, session.counts = session.counts, [a + b for a, b in zip(session.counts, counts, strict=True)]
        width = session.pending_BPX.shape[1]
        if max(session.counts) > width:  # amortized: many rounds without drafting copy each state about once
            more = max(max(session.counts) - width, width)
            session.pending_BPX = F.pad(session.pending_BPX, (0, 0, 0, more))
        for row, (start, count) in enumerate(zip(old, counts, strict=True)):
            session.pending_BPX[row, start : start + count] = pending_BPX[row, :count]
            session.next_tokens[row] = session.next_tokens[row] + tokens[row]

    def reorder(self, session: RecurrentSession, rows: Sequence[int]) -> None:
        session.cache.reorder(rows)
        session.pending_BPX = session.pending_BPX[upload(rows, session.pending_BPX.device)]
        session.next_tokens = [session.next_tokens[row] for row in rows]
        session.counts = [session.counts[row] for row in rows]
        session.drafted = False

    def join(self, session: RecurrentSession, other: RecurrentSession) -> None:
        while max(other.counts) > 1:  # now, since the first level of all rows is as wide as the longest pending text
            self._read_piece(other)
        if not session.cache.join(other.cache):
            self.leave_memory(session)
        pending = zip((*session.pending_BPX, *other.pending_BPX), session.counts + other.counts, strict=True)
        states = [state_PX[:count] for state_PX, count in pending]
        session.pending_BPX = nn.utils.rnn.pad_sequence(states, batch_first=True)
        session.next_tokens, session.counts = session.next_tokens + other.next_tokens, session.counts + other.counts
        session.kernel_heads = other.kernel_heads  # of the newest weights

    def _run_kernels(
        self,
        functions: Any,
        session: RecurrentSession,
        above_BWX: Tensor,
        nodes: tuple[Tensor, Tensor],
        entries: Entries,
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, W, D] and feedback [B, W, E] of new entries, given `nodes` (tokens and parents).
        `above_BWX` is the previous level's feedback, or the target's states for text entries, which have no parents."""
        heads, (tokens_BW, parents_BW), is_text = session.kernel_heads, nodes, entries.last is not None
        assert heads is not None, "weights are int8"
        views = self._kv_views(session.cache, entries, above_BWX)
        if heads.embedding_input is None or (is_text and heads.embedding_input.fusion is None):
            feedback_BWE = self.project(above_BWX) if is_text else _parent_feedback(above_BWX, parents_BW)
            read_and_stream = self.layer_input(feedback_BWE, self.embed_tokens(tokens_BW, feedback_BWE))
            return heads.run_from_hidden(functions, *read_and_stream, views)
        index = None
        if not is_text:
            count, rows = above_BWX.shape[1], enumerate(parents_BW.tolist())
            index = array(
                "q", (row * count + (0 if count == 1 else parent) for row, parents in rows for parent in parents)
            )
        return heads.run_from_tokens(functions, tokens_BW, index, above_BWX, views)

    def _kv_views(self, cache: LayerCache, entries: Entries, like: Tensor) -> list[draft_kernels.KVView]:
        """Return each layer's view of the cache."""
        table = self._rotary.table(entries.stop, like.device, like.dtype)
        queries = [*[None] * (len(cache.kv) - 1), entries.last]
        fields, heads = (entries.fields, entries.shape), self.config.num_attention_heads
        views = zip(queries, cache.kv, strict=True)
        return [draft_kernels.KVView(fields, query_B, kv, table, heads) for query_B, kv in views]

    def _run(self, session: RecurrentSession, feedback_BWE: Tensor, tokens_BW: Tensor, entries: Entries) -> Tensor:
        """Return the last layer's stream [B, W, E] of new entries, or of each row's last one."""
        cache, slots, like = session.cache, entries.stop, feedback_BWE
        if isinstance(self.layers[0], DraftLayer) and (functions := draft_kernels.kernels_for(like)):
            read_BWI, stream_BWE = self.layer_input(like, self.embed_tokens(tokens_BW, like))
            for layer, view in zip(self.layers, self._kv_views(cache, entries, like), strict=True):
                attention_output_BWH = draft_kernels.attend(functions, layer.project_qkv(read_BWI), view)
                if view.last_B is not None:
                    stream_BWE = stream_BWE[range(len(stream_BWE)), view.last_B.tolist()][:, None]
                read_BWI = stream_BWE = layer.write_concat(stream_BWE, attention_output_BWH)
            return stream_BWE
        table = self._rotary.table(slots, like.device, like.dtype)
        starts = entries.slots_BW[:, 0].tolist()
        positions_BW = upload(torch.from_numpy(entries.fields_BWF[..., 2]), like.device)
        last_B = None if entries.last is None else upload(entries.last, like.device)
        allowed_BWS = entries.allowed(like.device) if last_B is None else None

        def attend_layer(number: int, queries: Tensor, rows_B: Tensor | None) -> Tensor:
            if last_B is None:
                return cached_attention(queries, cache.kv[number], slots, allowed_BWS)
            index_BW = positions_BW if rows_B is None else positions_BW[rows_B, last_B][:, None]
            return text_attention(queries, cache.kv[number], slots, index_BW, starts)

        put = partial(cache.put, starts)
        return self._run_layers(feedback_BWE, tokens_BW, angles(table, positions_BW), put, attend_layer, last_B)

    def _run_layers(
        self,
        feedback_BWE: Tensor,
        tokens_BW: Tensor,
        rotary: Angles,
        put: WriteKV,
        attend_layer: AttendLayer,
        last_B: Tensor | None,
    ) -> Tensor:
        """Return the last layer's stream [B, W, E] of new entries, or of each row's `last_B` entry alone. `put` writes
        keys and values, `attend_layer` attends."""
        attention_input_BWI, stream_BWE = self.layer_input(feedback_BWE, self.embed_tokens(tokens_BW, feedback_BWE))
        rows_B = None
        for number, layer in enumerate(self.layers):
            queries, keys, values = layer.read(attention_input_BWI, rotary)
            put(number, keys, values)
            if last_B is not None and number == len(self.layers) - 1:
                # Drafts read the root's entry alone. The others only need keys and values in the last layer.
                rows_B = torch.arange(len(last_B), device=last_B.device)
                queries = queries[rows_B, :, :, last_B][:, :, :, None]
                stream_BWE = stream_BWE[rows_B, last_B][:, None]
            stream_BWE = layer.write(stream_BWE, attend_layer(number, queries, rows_B))
            attention_input_BWI = stream_BWE
        return stream_BWE

    # -- drafting as CUDA graphs ---------------------------------------------------------------------------------

    def new_memory(self, session: RecurrentSession, rows: int, capacity: int) -> RecurrentMemory:
        return RecurrentMemory(self.config, len(self.layers), self._rotary, session.pending_BPX, rows, capacity)

    def slots(self, session: RecurrentSession) -> int:
        pending = zip(session.cache.lengths, session.counts, strict=True)
        return max(length + count for length, count in pending) + WIDTHS[-1] - 1  # padding of the last piece

    def move(self, session: RecurrentSession, memory: RecurrentMemory) -> None:
        session.cache.move(memory)
        session.memory = memory

    def pending_levels(self, session: RecurrentSession) -> Iterator[Level]:
        memory, widest = session.memory, WIDTHS[-1]
        assert memory is not None, "captured levels have memory"
        while widest < max(session.counts) <= _MOST_READ:
            (read, tokens), lengths = session.next_piece(widest), session.cache.lengths
            memory.pending_BPX[: len(read)] = session.pending_BPX[:, :widest]
            inputs_BX = np.concatenate([tokens, np.stack([read, lengths], axis=1)], axis=1)
            yield Level(inputs_BX, 1, (0, widest, bucket_slots(max(lengths) + widest, memory)))
            session.drop_pending(read)

    def level(
        self, session: RecurrentSession, root_B: Tensor, tokens_BW: IntArray, parents_BW: IntArray, depths: range
    ) -> Level | None:
        if depths.start == 0:
            return self._first_level(session, tokens_BW)
        memory, (rows, width), padded = session.memory, tokens_BW.shape, next_power_of_two(tokens_BW.shape[1])
        assert memory is not None, "captured levels have memory"
        base_B1, entries = np.array(session.root_slots)[:, None], session.next_entries(parents_BW)
        starts_B1 = entries.slots_BW[:, :1]
        # Pad with the root's slot, which is visible anyway.
        visible_BWK = np.broadcast_to(base_B1[:, :, None], (rows, padded, self.draft_steps)).copy()
        visible_BWK[:, :width, : depths.start] = entries.further_BWK
        nodes = [np.pad(part, ((0, 0), (0, padded - width))) for part in (tokens_BW, parents_BW)]
        inputs_BX = np.concatenate(
            [*nodes, visible_BWK.reshape(rows, -1), base_B1, starts_B1, base_B1 + depths.start], 1
        )
        above = session.feedback_BWE.shape[1]
        memory.feedback_in_BWE[:rows, :above] = session.feedback_BWE
        session.feedback_BWE = memory.feedback_out_BWE[:rows, :width]
        return Level(inputs_BX, width, (1, padded, bucket_slots(int(starts_B1.max()) + padded, memory)))

    def _first_level(self, session: RecurrentSession, tokens_BW: IntArray) -> Level | None:
        memory, lengths, counts = session.memory, session.cache.lengths, session.counts
        assert memory is not None, "captured levels have memory"
        rows, pending = len(counts), max(counts)
        if pending > WIDTHS[-1]:
            return None
        memory.pending_BPX[:rows, :pending] = session.pending_BPX[:, :pending]
        session.begin_round()
        session.feedback_BWE = memory.feedback_out_BWE[:rows, :1]
        padded = next_power_of_two(max(pending, _FEW_PENDING // memory.rows))
        tokens = session.pending_tokens(tokens_BW[:, 0].tolist(), padded)
        inputs_BX = np.concatenate([tokens, np.stack([counts, lengths], axis=1)], axis=1)
        return Level(inputs_BX, 1, (0, padded, bucket_slots(max(lengths) + padded, memory)))

    def draft_level(self, memory: RecurrentMemory, inputs_BX: Tensor, sizes: tuple[int, ...]) -> Tensor:
        after_first, width, slots = sizes
        rows, device = len(inputs_BX), inputs_BX.device
        rows_B1, index_W = torch.arange(rows, device=device)[:, None], torch.arange(width, device=device)
        slots_S, last_B = torch.arange(slots, device=device), None
        if after_first:
            parts = [width, width, width * self.draft_steps, 1, 1, 1]
            tokens_BW, parents_BW, visible_BX, base_B1, start_B1, position_B1 = torch.split(inputs_BX, parts, dim=1)
            feedback_BWE = memory.feedback_in_BWE[rows_B1, parents_BW]
            slots_BW, positions_BW = start_B1 + index_W, position_B1.expand(-1, width)
            allowed_BWS = (slots_S <= base_B1)[:, None].repeat(1, width, 1)
            allowed_BWS.scatter_(2, visible_BX.view(rows, width, -1), True)
        else:
            tokens_BW, (count_B, length_B) = inputs_BX[:, :width], inputs_BX[:, width:].unbind(1)
            last_B = count_B - 1
            feedback_BWE = self.project(memory.pending_BPX[:rows, :width])
            slots_BW = positions_BW = length_B[:, None] + index_W
            allowed_BWS = slots_S <= slots_BW[:, :, None]

        def put(number: int, keys: Tensor, values: Tensor) -> None:
            memory.write(number, rows_B1, slots_BW, keys, values)

        def attend_layer(number: int, queries: Tensor, rows_B: Tensor | None) -> Tensor:
            allowed = allowed_BWS if rows_B is None else allowed_BWS[rows_B, last_B][:, None]
            return cached_attention(queries, memory.layer(number), slots, allowed)

        rotary = angles(memory.rotary, positions_BW)
        stream_BWE = self._run_layers(feedback_BWE, tokens_BW, rotary, put, attend_layer, last_B)
        hidden_BWE, feedback_BWE = self.layer_output(stream_BWE)
        memory.feedback_out_BWE[:rows, : feedback_BWE.shape[1]] = feedback_BWE
        return self.transform_logits(linear(hidden_BWE, self.lm_head_DE, self.lm_bias_D))


def _parent_feedback(above_BWE: Tensor, parents_BW: Tensor) -> Tensor:
    if above_BWE.shape[1] == 1:  # after the root, and in chains
        return above_BWE.expand(-1, parents_BW.shape[1], -1)
    rows_B1 = torch.arange(len(above_BWE), device=above_BWE.device)[:, None]
    return above_BWE[rows_B1, upload(parents_BW, above_BWE.device)]
