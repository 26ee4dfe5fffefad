"""Training the target together with its heads, as Medusa-2 does (Cai et al., arXiv 2401.10774).

A LoRA adapter is put into the target. During warm-up the heads learn alone, from stored states of the original target.
Then both learn: the adapted target reads each batch with gradients, and the loss over the target's own answers is

    KL(target without the adapter || adapted target) + heads_weight * loss of the heads

The first term is self-distillation, with the original distribution from stored final states. The second trains the
heads to predict the *adapted* target, and the adapter to make its states predictive. The teacher's logits carry no
gradient, or the target would become predictable by losing entropy.

The resulting heads are for the adapted model: an adapter folder is saved beside their weights.

Shape suffixes: B rows, T tokens, E hidden size, S positions that precede a supervised token, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headstart.heads.base import HeadBatch
from headstart.model.adapter import NOTE
from headstart.model.identity import BUNDLED
from headstart.model.model import Target
from headstart.recipes.sections import TrainSection
from headstart.replay.patch import FINAL
from headstart.support.files import write_atomic, write_json

_ROWS = 512  # positions per chunk of full-vocabulary logits


class Drift:
    """Divergence of the adapted target from the original, summed over batches."""

    def __init__(self, device: torch.device) -> None:
        # KL in nats, negative log-likelihoods without and with the adapter, token count.
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)

    @property
    def count(self) -> int:
        """Number of tokens; 0 until the adapter has changed anything."""
        return int(self.sums[3])

    def to_json(self) -> dict[str, float]:
        """Means over tokens."""
        kl, before, after, count = self.sums.cpu().tolist()
        perplexities = [float(torch.tensor(part / max(count, 1)).exp()) for part in (before, after)]
        return {
            "kl": round(kl / max(count, 1), 5),
            "perplexity_before": round(perplexities[0], 4),
            "perplexity_after": round(perplexities[1], 4),
            "tokens": int(count),
        }


class Joint:
    """The adapter in training, in the target from `begin` to `release`; accelerate can prepare its module `weights`."""

    def __init__(self, target: Target, section: TrainSection) -> None:
        self.settings = section.joint
        self._target, self._section = target, section
        self._adapted: Any = None
        self.weights = nn.ParameterList()

    def begin(self) -> None:
        """Add the adapter to the target, without effect so far."""
        import peft

        joint = self.settings
        config = peft.LoraConfig(
            r=joint.rank,
            lora_alpha=joint.alpha,
            lora_dropout=joint.dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        self._adapted = peft.get_peft_model(self._target.model, config)
        self.weights = nn.ParameterList(self._trained())

    def release(self) -> None:
        if self._adapted is not None:
            self._adapted.unload()
            self._adapted = None
            vars(self._target.model).pop("peft_config", None)

    def optimizer(self) -> torch.optim.Optimizer:
        lr = self._section.lr * self.settings.lr_ratio
        return torch.optim.AdamW(self._trained(), lr=lr, betas=self._section.betas, weight_decay=0.0)

    def lr(self, lr: float, fraction: float) -> float:
        """The adapter's learning rate for the heads' `lr`; 0 during warm-up."""
        return lr * self.settings.lr_ratio if self.learns(fraction) else 0.0

    def learns(self, fraction: float) -> bool:
        """Whether the adapter learns at this fraction of the run."""
        return fraction >= self.settings.warmup

    @property
    def moved(self) -> bool:
        """Whether the adapter has any effect yet."""
        return any(bool(weight.any()) for name, weight in self._adapted.named_parameters() if "lora_B" in name)

    def read(self, batch: HeadBatch) -> HeadBatch:
        """Replace the batch's states by the adapted target's, with gradients to the adapter."""
        lengths = [int(row.nonzero()[-1]) + 1 if row.any() else 1 for row in batch.supervised_BT]
        for name, module in self._adapted.named_modules():
            if "lora_dropout" in name:
                module.train(torch.is_grad_enabled())
        states = self._target.states_with_gradients(batch.tokens_BT, lengths, sorted(batch.states))
        dtypes = {layer: state.dtype for layer, state in batch.states.items()}
        return dataclasses.replace(batch, states={layer: states[layer].to(dtypes[layer]) for layer in batch.states})

    def distillation(self, batch: HeadBatch, adapted: HeadBatch) -> Tensor:
        """Sum of KL(original || adapted) over supervised tokens."""
        total = adapted.states[FINAL].new_zeros((), dtype=torch.float32)
        for base_SE, adapted_SE, _ in self._positions(batch, adapted):
            total = total + checkpoint(self._kl, base_SE, adapted_SE, use_reentrant=False)
        return total

    def untouched(self) -> Tensor:
        """0, with zero gradients for every adapter weight: DDP waits for the gradients of all weights."""
        return torch.stack([weight.flatten()[:0].sum() for weight in self._trained()]).sum()

    @torch.no_grad()
    def judge(self, batch: HeadBatch, drift: Drift) -> HeadBatch:
        """`read` for validation; accumulates `drift`."""
        adapted = self.read(batch)
        for base_SE, adapted_SE, tokens_S in self._positions(batch, adapted):
            both = [self._log_probs(final_SE) for final_SE in (base_SE, adapted_SE)]
            drift.sums[0] += _kl(*both).double()
            for column, log_probs_SV in enumerate(both, start=1):
                drift.sums[column] -= log_probs_SV.gather(1, tokens_S[:, None]).double().sum()
            drift.sums[3] += len(tokens_S)
        return adapted

    def save(self, folder: Path, drift: Drift) -> None:
        def write(partial: Path) -> None:
            self._adapted.save_pretrained(partial)
            (partial / "README.md").unlink(missing_ok=True)  # peft's unfilled template
            write_json(partial / NOTE, {"trained": "with the heads", **drift.to_json()})

        write_atomic(folder / BUNDLED, write)

    def _trained(self) -> list[nn.Parameter]:
        return [weight for name, weight in self._adapted.named_parameters() if "lora_" in name]

    def _positions(self, batch: HeadBatch, adapted: HeadBatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield chunks of final states without and with the adapter before supervised tokens, and those tokens."""
        supervised_BT = batch.supervised_BT[:, 1:]
        base_SE, adapted_SE = (read.states[FINAL][:, :-1][supervised_BT] for read in (batch, adapted))
        tokens_S = batch.tokens_BT[:, 1:][supervised_BT]
        for start in range(0, len(tokens_S), _ROWS):
            part = slice(start, start + _ROWS)
            yield base_SE[part], adapted_SE[part], tokens_S[part]

    def _kl(self, base_SE: Tensor, adapted_SE: Tensor) -> Tensor:
        return _kl(self._log_probs(base_SE), self._log_probs(adapted_SE))

    def _log_probs(self, final_SE: Tensor) -> Tensor:
        with torch.autocast(final_SE.device.type, enabled=False):
            return self._target.lm_head(final_SE.to(self._target.dtype)).float().log_softmax(-1)


def _kl(base_SV: Tensor, adapted_SV: Tensor) -> Tensor:
    """Sum of KL(base || adapted) over rows of log-probabilities."""
    return (base_SV.exp() * (base_SV - adapted_SV)).sum()
