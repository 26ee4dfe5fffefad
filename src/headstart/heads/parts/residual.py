"""Base of Medusa and Hydra: settings, residual blocks and sessions; and ridge regressions for closed-form starts.

Shape suffixes: B rows, T tokens, E hidden size, V vocabulary, F head inputs, M predictions, L blocks per head, K heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from headstart.heads.base import HeadBatch, HeadConfig
from headstart.heads.int8_weights import linear, unstack
from headstart.heads.parts.graphed import GraphedHead
from headstart.kernels.memory import Memory
from headstart.model.frozen import FrozenModel
from headstart.replay.patch import FINAL
from headstart.support.uploads import upload
from headstart.tree.tree import Committed

_RIDGE = 1e-3
"""Ridge of the linear start, relative to the mean square of the inputs."""
_ENOUGH = 12
"""Most positions per input dimension; more reduce the loss by at most a tenth."""


class ResidualConfig(HeadConfig):
    """Settings of K stacks of residual blocks."""

    num_heads: int = Field(4, ge=1, le=16, description="Number of heads, one per draft step.")
    num_layers: int = Field(1, ge=1, le=8, description="Residual blocks in each head.")
    shared_lm_head: bool = Field(
        False, description="Read logits through the target's frozen LM head instead of one trained LM head per head."
    )


@dataclass
class FinalSession:
    """Each row's final state after its last committed token, and the inputs of the round's last heads: [B, F] for all
    heads, or [B, W, F] at the nodes of a level."""

    final_BE: Tensor
    inputs: Tensor
    memory: FinalMemory | None = None


class FinalMemory(Memory):
    """Final states and roots of a session, at fixed addresses."""

    def __init__(self, like_BE: Tensor, rows: int, capacity: int) -> None:
        super().__init__(rows, capacity)
        with torch.inference_mode(False):
            self.final_BE = torch.zeros(rows, like_BE.shape[1], dtype=like_BE.dtype, device=like_BE.device)
            self.root_B = torch.zeros(rows, dtype=torch.long, device=like_BE.device)

    def begin(self, session: FinalSession, root_B: Tensor) -> None:
        self.final_BE[: len(root_B)], self.root_B[: len(root_B)] = session.final_BE, root_B

    def clear(self) -> None:
        self.final_BE.zero_()


class ResidualHead(GraphedHead):
    """Heads on the final state of the last committed token."""

    config: ResidualConfig
    lm_head_DE: Tensor
    """The frozen LM head, if shared."""

    def __init__(self, config: ResidualConfig) -> None:
        super().__init__(config)
        if config.shared_lm_head:
            self.register_buffer("lm_head_DE", torch.zeros(config.draft_width, config.hidden_size), persistent=False)

    def bind(self, target: FrozenModel) -> None:
        super().bind(target)
        if self.config.shared_lm_head:
            self.lm_head_DE = self.frozen_lm_head(target, next(self.parameters()))

    @property
    def draft_steps(self) -> int:
        return self.config.num_heads

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> FinalSession:
        counts_B = torch.tensor([len(prompt) for prompt in prompts], device=states[FINAL].device)
        final_BE = _last_states(states[FINAL], counts_B)
        return FinalSession(final_BE, final_BE)

    def new_memory(self, session: FinalSession, rows: int, capacity: int) -> FinalMemory:
        return FinalMemory(session.final_BE, rows, capacity)

    def slots(self, session: FinalSession) -> int:
        return 0

    def move(self, session: FinalSession, memory: FinalMemory) -> None:
        session.memory = memory

    def commit(self, session: FinalSession, committed: Committed) -> None:
        session.final_BE = _last_states(committed.states[FINAL], committed.counts_B)

    def reorder(self, session: FinalSession, rows: Sequence[int]) -> None:
        session.final_BE = session.final_BE[upload(rows, session.final_BE.device)]

    def join(self, session: FinalSession, other: FinalSession) -> None:
        session.final_BE = torch.cat([session.final_BE, other.final_BE])


def embed_normalized(tokens: Tensor, embedding_VE: Tensor, like: Tensor) -> Tensor:
    """Normalised target embeddings [..., E] of tokens [...], in the dtype and on the device of `like`. Raw ones are an
    order of magnitude smaller than final states."""
    embedded = F.embedding(tokens.to(embedding_VE.device), embedding_VE).float()
    return F.rms_norm(embedded, embedded.shape[-1:]).to(like)


def _last_states(states_BTE: Tensor, counts_B: Tensor) -> Tensor:
    return states_BTE[torch.arange(len(counts_B), device=counts_B.device), counts_B - 1]


def head_hidden(input_MF: Tensor, input_EF: Tensor | None, weight_LEE: Tensor, bias_LE: Tensor) -> Tensor:
    """LM head input of one head, [..., E], from its inputs, [..., F]; F is E without an input map."""
    x_ME = input_MF if input_EF is None else linear(input_MF, input_EF)
    for weight_EE, bias_E in zip(unstack(weight_LEE), bias_LE, strict=True):
        x_ME = x_ME + F.silu(linear(x_ME, weight_EE, bias_E))
    return x_ME


def principal_outputs(map_EI: Tensor, gram_II: Tensor, rank: int) -> Tensor:
    """Return the output directions of a linear map with the largest variance, [E, rank]; `gram_II` are the second
    moments of its inputs."""
    axes_EE: Tensor = torch.linalg.eigh((map_EI @ gram_II @ map_EI.T).double())[1].flip(1).to(map_EI)
    return axes_EE[:, :rank]


def map_by_direction(read_MX: Tensor, label_ME: Tensor) -> Tensor:
    """Return the ridge regression [E, X] on normalised rows: some components of a few tokens are a hundred times as
    large as the rest."""
    scale_X = read_MX.abs().median(0).values.clamp(min=1e-6)
    scaled_MX = read_MX / scale_X
    rms_M1 = scaled_MX.square().mean(-1, keepdim=True).sqrt()
    start = LinearStart([read_MX.shape[1]], label_ME.shape[1], read_MX.device)
    start.add(scaled_MX / rms_M1, [label_ME / rms_M1])
    return start.maps()[0] / scale_X


class LinearStart:
    """Ridge regression from head inputs to states of size E, batch by batch. Head k reads the first `widths[k]` inputs
    of the last head."""

    def __init__(self, widths: Sequence[int], size: int, device: torch.device | str = "cpu") -> None:
        self.gram_FF = torch.zeros(widths[-1], widths[-1], device=device)
        self.cross_KFE = [torch.zeros(width, size, device=device) for width in widths]
        self.rows = 0

    def solve(
        self, batches: Iterable[HeadBatch], read: Callable[[HeadBatch], tuple[Tensor, Sequence[Tensor]]]
    ) -> list[Tensor]:
        """Add batches, converted by `read`, until there is enough data; return `maps`."""
        for batch in batches:
            self.add(*read(batch))
            if self.rows >= _ENOUGH * len(self.gram_FF):
                break
        return self.maps()

    @torch.no_grad()
    def add(self, input_MF: Tensor, label_KME: Sequence[Tensor]) -> None:
        """Add the last head's inputs at some positions, and each head's label."""
        input_MF = input_MF.to(self.gram_FF)
        self.gram_FF.addmm_(input_MF.T, input_MF)
        for cross_FE, label_ME in zip(self.cross_KFE, label_KME, strict=True):
            cross_FE.addmm_(input_MF[:, : len(cross_FE)].T, label_ME.to(cross_FE))
        self.rows += len(input_MF)

    def maps(self) -> list[Tensor]:
        """Return the input map [E, F] of each head; an empty list without data."""
        scale = self.gram_FF.diagonal().mean()
        if not scale > 0:
            return []
        ridged_FF = self.gram_FF + _RIDGE * scale * torch.eye(len(self.gram_FF), device=scale.device)
        return [
            torch.linalg.solve(ridged_FF[: len(cross_FE), : len(cross_FE)], cross_FE).T for cross_FE in self.cross_KFE
        ]
