"""Peak memory and time of training on one long conversation with the packaged target's sizes.

    python benchmarks/long_sequences.py --family eagle3 --family medusa --tokens 4096 --tokens 32768

Each case runs in a process of its own, since a peak is never forgotten: one forward and backward of the heads in
bfloat16 autocast on random states, then a line with the resident memory before it, at its peak, and the seconds.
`--gigabytes` limits the address space, so that what does not fit fails instead of taking the machine with it.
Compare versions with PYTHONPATH=<checkout>/src.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from functools import partial
from time import monotonic
from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"family": "eagle3", "draft_steps": 5, "draft_vocab_size": 8192},
    "medusa": {"family": "medusa", "num_heads": 4, "draft_vocab_size": 8192},
}


def one(family: str, tokens: int, vocabulary: int, checkpointing: bool) -> dict[str, Any]:
    """Learn from one conversation in this process."""
    import torch

    from headstart.heads import base as kinds
    from headstart.heads.base import HeadBatch, make_config
    from headstart.target.fitting import FINAL
    from headstart.target.loading import load_target
    from headstart.train.losses import find_loss
    from headstart.train.machine import keep_freed_memory
    from headstart.train.summing import Teacher, weighted
    from headstart.train.wrapped import Unrolled

    keep_freed_memory()
    torch.manual_seed(0)
    target = load_target("smollm2-135m", "bfloat16", "cpu")
    heads = kinds.family(family)(make_config({**SETTINGS[family], "draft_vocab_size": vocabulary}, target))
    heads.warm_start(target)
    model = Unrolled(heads)
    if checkpointing:
        heads.gradient_checkpointing = True
    layers = sorted({*heads.aux_layers, FINAL})
    states = {layer: torch.randn(1, tokens, target.hidden_size, dtype=torch.bfloat16) for layer in layers}
    tokens_BT = torch.randint(target.vocab_size, (1, tokens))
    batch = HeadBatch(tokens_BT, torch.arange(tokens)[None] >= 32, states)
    before, begun = _resident(), monotonic()
    with torch.autocast("cpu", torch.bfloat16):
        teacher_logits = Teacher(target, heads.draft_to_target_D).read(batch)
        consume = partial(weighted, loss=find_loss("soft_ce"), teacher_logits=teacher_logits, step_weight=0.8)
        loss = model(batch, consume)
    loss.backward()
    return {
        "family": family,
        "tokens": tokens,
        "vocabulary": vocabulary or target.vocab_size,
        "checkpointing": checkpointing,
        "before_gigabytes": round(before, 2),
        "peak_gigabytes": round(_resident(), 2),
        "seconds": round(monotonic() - begun, 1),
        "loss": round(float(loss) / tokens, 4),
    }


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", action="append", choices=sorted(SETTINGS))
    parser.add_argument("--tokens", action="append", type=int)
    parser.add_argument("--vocabulary", type=int, default=8192, help="draft vocabulary; 0 is the target's own")
    parser.add_argument("--gigabytes", type=float, default=16.0, help="address space of a case at most")
    parser.add_argument("--checkpointing", action="store_true", help="as train.gradient_checkpointing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        limit = int(asked.gigabytes * 1e9)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        print(json.dumps(one(asked.family[0], asked.tokens[0], asked.vocabulary, asked.checkpointing)))
        return
    rest = ["--vocabulary", str(asked.vocabulary), "--gigabytes", str(asked.gigabytes)]
    rest += ["--checkpointing"] if asked.checkpointing else []
    for family in asked.family or sorted(SETTINGS):
        for tokens in asked.tokens or [4096, 32768]:
            words = [sys.executable, __file__, "--here", "--family", family, "--tokens", str(tokens), *rest]
            ended = subprocess.run(words, capture_output=True, text=True, check=False)
            said = ended.stdout.strip().splitlines()
            why = ended.stderr.strip().splitlines()
            if said and not ended.returncode:
                print(said[-1], flush=True)
            else:
                print(
                    json.dumps({"family": family, "tokens": tokens, "failed": why[-1] if why else "killed"}), flush=True
                )


if __name__ == "__main__":
    main()
