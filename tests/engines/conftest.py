"""A target of eight layers in a folder, and heads of every published layout for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.errors import UserError
from headstart.heads.base import DraftHead, family, make_config
from headstart.hub.engines.importing import import_heads, untuned
from headstart.hub.format import export_heads
from headstart.model.model import Target
from tests.tiny import tiny_model, tiny_tokenizer

Made = Callable[[str], tuple[DraftHead, Path]]
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
FUSED = {"family": "eagle3", "draft_steps": 3, "aux_layers": (3, 5, 7)}
DEEP = {"family": "eagle3", "draft_steps": 3, "aux_layers": (2, 8), "num_layers": 2}
PARALLEL = {**FUSED, "family": "peagle", "mask_token_id": 7}
CASES: dict[str, dict[str, Any]] = {
    "eagle3": FUSED,
    "eagle3-reduced": {**FUSED, "draft_vocab_size": 40},
    "eagle3-qk-norm": {**FUSED, "draft_vocab_size": 40, "qk_norm": True},
    "eagle3-normed-residual": {**FUSED, "norm_before_residual": True},
    "eagle3-heads": {**FUSED, **FOUR_HEADS, "draft_vocab_size": 40},
    "eagle3-six-heads": {**FUSED, **SIX_HEADS},
    "eagle3-deep": {**DEEP, "draft_vocab_size": 40, "aux_norms": True, "feedback": "post_norm"},
    "peagle": {**PARALLEL, "num_layers": 2, "draft_vocab_size": 40},
    "peagle-own": {**PARALLEL, "train_embeddings": True, "norm_before_residual": True, "qk_norm": True},
    "eagle": {"family": "eagle", "draft_steps": 3},
    "eagle-plain": {"family": "eagle", "draft_steps": 3, "embedding_norm": False},
    "medusa": {"family": "medusa", "num_heads": 3, "num_layers": 2, "input_map": False},
    "medusa-shared": {"family": "medusa", "num_heads": 2, "input_map": False, "shared_lm_head": True},
}
BLOCK = {"family": "dflash", "block_size": 4, "aux_layers": (2, 4, 7), "mask_token_id": 7}
DSPARK = {**BLOCK, "family": "dspark", "markov_rank": 8}
DFLASH2 = {**BLOCK, "family": "dflash2", "selector_rank": 8, "selector_top_k": 7}
WINDOW = {"num_layers": 2, "sliding_window": 6}
CASES |= {
    "dflash": BLOCK,
    "dflash-reduced": {**BLOCK, "draft_vocab_size": 40},
    "dspark": {**DSPARK, **WINDOW, "confidence": True, "causal": True},
    "dspark-plain": {**DSPARK, "block_size": 3},
    "dspark-reduced": {**DSPARK, "draft_vocab_size": 40},
    "dflash2": {**DFLASH2, **WINDOW, **SIX_HEADS, "full_layers": (1,), "conv_group_size": 8},
    "dflash2-plain": {**DFLASH2, "conv_kernel_size": 3},
    "dflash2-reduced": {**DFLASH2, "draft_vocab_size": 40, "selector_top_k": 40},
    "dflash-deep": {**BLOCK, **WINDOW, **SIX_HEADS, "full_layers": (1,)},
    "dflash-causal": {**BLOCK, "causal": True},
    "dflash-mixed": {**BLOCK, "num_layers": 2, "sliding_window": 5, "full_layers": (0,), "causal": True},
}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Target with untied embeddings and LM head, and weights large enough to matter."""
    folder, tokenizer = tmp_path_factory.mktemp("eight") / "größe", tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), layers=8)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Target(model, tokenizer, str(folder))


def heads_for(target: Target, settings: dict[str, Any]) -> DraftHead:
    """Heads with random offsets, so that a forgotten tensor changes the logits."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = make_config(settings, target)
        heads = family(config.family)(config)
        if config.draft_vocab_size:
            ids = torch.randperm(target.vocab_size)[: config.draft_vocab_size]
            heads.set_draft_vocabulary(ids.sort().values)
        heads.warm_start(target)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return heads.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def made(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Make the heads of a case and their exported folder, once per session."""
    known: dict[str, tuple[DraftHead, Path]] = {}

    def make(case: str) -> tuple[DraftHead, Path]:
        if case not in known:
            heads, folder = heads_for(target, CASES[case]), tmp_path_factory.mktemp("heads") / case
            export_heads(folder, heads, target, untuned(heads), {})
            known[case] = heads, folder
        return known[case]

    return make


@contextmanager
def edited(folder: Path) -> Iterator[dict[str, Any]]:
    """Change the config.json of a folder."""
    config = json.loads((folder / "config.json").read_text())
    yield config
    (folder / "config.json").write_text(json.dumps(config))


def change(folder: Path, **settings: Any) -> None:
    """Change settings of config.json; None removes one."""
    with edited(folder) as config:
        config.update(settings)
        for name in [name for name, value in config.items() if value is None]:
            del config[name]


def problem(folder: Path, target: Target) -> str:
    """Return the problem of an import that is refused."""
    with pytest.raises(UserError) as caught:
        import_heads(folder, target, folder.parent / "ours")
    assert not (folder.parent / "ours").exists(), "nothing is written"
    return caught.value.problem
