"""Models, sizes and results of `on_gpu.py`."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any

import torch
from tables import written
from transformers import AutoModelForCausalLM, LlamaConfig

from headstart.api import load
from headstart.data.prompts.chat import has_template, prompt_tokens
from headstart.decoder import Decoder
from headstart.eval.audit import PROMPTS
from headstart.heads.base import DraftHead, family, make_config
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.tree.tree import TreeShape

TREE = TreeShape.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
"""Tree of untrained heads."""
SPREAD = 5.0
"""Standard deviation of the small model's logits: large enough for likely texts and rare ties."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models and of the work.

    Attributes:
        target: shape of the random target.
        small: shape of the float32 model.
        batches: rows.
        widths: nodes of a tree.
        context: tokens of a prompt.
        new_tokens: tokens of an answer.
        repeats: of each timing.
        samples: of each sampling test.
        texts: number of texts in a training step, and tokens of each.
    """

    target: Mapping[str, int]
    small: Mapping[str, int]
    batches: Sequence[int]
    widths: Sequence[int]
    context: int
    new_tokens: int
    repeats: int
    samples: int
    texts: tuple[int, int]


def shape(vocab: int, hidden: int, mlp: int, layers: int, heads: int) -> dict[str, int]:
    """Return the sizes of a Llama by their names in transformers, with four query heads per key head."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
    }


FULL = Sizes(
    target=shape(128256, 4096, 14336, 32, 32),
    small=shape(512, 512, 1024, 8, 8),
    batches=(1, 4, 16),
    widths=(1, 8, 16, 64),
    context=512,
    new_tokens=128,
    repeats=20,
    samples=2000,
    texts=(16, 1024),
)
QUICK = Sizes(
    target=shape(128, 64, 96, 8, 4),
    small=shape(512, 64, 96, 8, 4),
    batches=(1, 4),
    widths=(1, 8),
    context=24,
    new_tokens=8,
    repeats=2,
    samples=50,
    texts=(2, 32),
)


class Bench:
    """State of the run; models are created at first use."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.started = options, perf_counter()
        self.device = torch.device(options.device)
        self.sizes = QUICK if options.quick else FULL
        self.rows: list[Row] = []
        self.section = ""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, text: str) -> None:
        print(f"[{perf_counter() - self.started:6.1f} s] {self.section}: {text}", flush=True)

    def note(self, name: str, **figures: Any) -> None:
        """Add a row to the results."""
        self.rows.append({"name": f"{self.section}, {name}", **figures})
        self.say(", ".join([name, *(f"{key} {written(value, key)}" for key, value in figures.items())]))

    def check_forwards(self, target: Target) -> None:
        """Fail the section unless tree forwards run as CUDA graphs, or replayed on a CPU."""
        expected = "CUDA graphs" if self.cuda else "replayed"
        refuse([f"Forwards run {target.forwards}."] if target.forwards != expected else [])

    @cached_property
    def decoder(self) -> Decoder:
        """The target with its heads."""
        options = self.options
        if options.heads:
            return load(options.heads, options.target, dtype="bfloat16", device=str(self.device))
        if options.target:
            target = load_target(options.target, "bfloat16", str(self.device))
        else:
            target = Target(random_model(self.sizes.target, torch.bfloat16, self.device))
        return Decoder(target, untrained(target).to(target.dtype).eval().requires_grad_(False), TREE)

    @cached_property
    def small(self) -> Decoder:
        """A small random model in float32, with untrained heads."""
        model = random_model(self.sizes.small, torch.float32, self.device)
        with torch.no_grad():
            model.lm_head.weight.mul_(SPREAD / (model.lm_head.weight.std() * model.config.hidden_size**0.5))
        target = Target(model)
        return Decoder(target, untrained(target).eval().requires_grad_(False), TREE)

    def prompts(self, target: Target, rows: int) -> list[list[int]]:
        """Return questions if the target has a chat template, else random tokens; lengths differ."""
        if target.tokenizer is not None and has_template(target.tokenizer):
            asked = [prompt_tokens([{"role": "user", "content": text}], target.tokenizer) for text in PROMPTS]
            return [asked[row % len(asked)] for row in range(rows)]
        draw, length = random.Random(0), self.sizes.context
        return [[draw.randrange(target.vocab_size) for _ in range(length - row % 5)] for row in range(rows)]


def random_model(sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> Any:
    """Create a random Llama on the device."""
    config = LlamaConfig(**sizes, max_position_embeddings=8192, tie_word_embeddings=False)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def untrained(target: Target) -> DraftHead:
    """Return untrained EAGLE-3 heads in float32, without the solved start."""
    settings = {"family": "eagle3", "draft_steps": 7, "draft_vocab_size": min(32000, target.vocab_size)}
    config = make_config(settings, target)
    torch.manual_seed(0)
    heads = family(config.family)(config)
    heads.warm_start(target)
    return heads.to(target.device)


def refuse(problems: Sequence[str]) -> None:
    """Fail the section on any problem."""
    if problems:
        raise RuntimeError(" ".join(problems))
