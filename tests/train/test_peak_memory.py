"""Memory of a training, as `headstart plan` estimates it from small steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data.conversations.records import Conversation
from headstart.data.states.shards import build_store
from headstart.data.states.store import StateStore
from headstart.heads.base import family, make_config
from headstart.model.model import Target
from headstart.pipeline.dry_run import _DryRun
from headstart.pipeline.peak_memory import peak_bytes
from headstart.pipeline.workload import Lengths, Speeds, Workload
from headstart.replay.patch import FINAL
from tests.train.conftest import MakeRecipe, Train
from tests.train.test_golden import HEADS

ROWS, TOKENS, ANSWER = 8, 96, 64


def test_peak_counts_tensors_that_exist_at_once() -> None:
    kept = torch.zeros(1000)

    def work() -> int:
        for _ in range(3):
            sums = kept + torch.ones(1000)
        return len(sums)

    assert peak_bytes(torch.device("cpu"), work) == (3 * 4000, 1000), "the last sums exist until they are replaced"


@pytest.mark.parametrize("name", ["medusa", "eagle3", "dspark", "dflash2"])
def test_a_training_takes_the_planned_memory(
    name: str, recipe: MakeRecipe, run: Train, tiny_target: Target, tmp_path: Path
) -> None:
    """Within 15 % of the most bytes of tensors that exist at once in a training."""
    random = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, tiny_target.vocab_size, (TOKENS,), generator=random).tolist() for _ in range(2 * ROWS)]
    supervised = [token >= TOKENS - ANSWER for token in range(TOKENS)]
    made = [Conversation(f"c{number}", text, supervised, []) for number, text in enumerate(texts)]
    build_store(tmp_path / "train", made, tiny_target, [1, 2, 3, FINAL], budget_bytes=10**8)
    # Only tensors of this thread are counted, so it reads the batches.
    settings: dict[str, Any] = {"heads": HEADS[name], "batch_tokens": ROWS * TOKENS, "steps": 2, "prefetch": 0}

    given = recipe(**settings)
    heads = family(name)(make_config(given.heads, tiny_target))
    heads.warm_start(tiny_target)
    layers, lengths = sorted({*heads.aux_layers, FINAL}), Lengths(TOKENS, ANSWER, turns=1, longest=TOKENS)
    tried = _DryRun(tiny_target, heads, layers, given, lengths)
    speeds = Speeds(batch_bytes=tried.step_bytes(ROWS // 2 * TOKENS))
    work = Workload(given, tiny_target, heads, layers, lengths, speeds)
    planned = work.memory()["train"] - work._teacher_bytes  # the target is here before

    train_store = StateStore(tmp_path / "train")
    peak, _ = peak_bytes(torch.device("cpu"), lambda: run(tmp_path / "run", train_on=train_store, **settings))
    assert planned == pytest.approx(peak, rel=0.15)
