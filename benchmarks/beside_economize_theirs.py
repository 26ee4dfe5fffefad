"""The half of beside_economize.py that runs in the other library's environment; it knows nothing of headstart.

    python beside_economize_theirs.py train FOLDER --name defaults --minutes 13
    python beside_economize_theirs.py serve FOLDER --name defaults

FOLDER holds `model/` (a transformers model), `conversations.jsonl` ({"tokens", "supervised"} a line) and
`vocabulary.json` (the draft vocabulary's token ids). `train` leaves `theirs/NAME/` with the drafter and result.json.
`serve` answers one JSON line with another: {"tokens", "max_new_tokens", "cycle_length", "ends"} with {"tokens",
"seconds", "rounds"}, where a round is [drafted, accepted] and a cycle length of 1 decodes plainly.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import economize
import torch
from economize.techniques.eagle3 import Eagle3Config
from economize.train import Example, fit
from transformers import AutoModelForCausalLM

TIMED_STEPS = 6
"""Steps that are timed to find how many fit the minutes; the first two warm up."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["train", "serve"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="defaults")
    parser.add_argument("--dtype", default="bfloat16", help="of the model; training computes in it, too")
    parser.add_argument("--minutes", type=float, default=13.0)
    parser.add_argument("--steps", type=int, help="train for so many steps instead")
    parser.add_argument("--unroll", type=int, default=5, help="draft steps of the training-time test")
    parser.add_argument("--batch-size", type=int, default=8, help="conversations of a step; the library's default is 8")
    parser.add_argument("--lr", type=float, help="the library's default is 1e-4")
    parser.add_argument("--warmup", type=float, help="as a share of the steps; the library's default is 100 steps")
    options = parser.parse_args()
    (serve if options.action == "serve" else train)(options)


def load(options: argparse.Namespace) -> Any:
    """The model, in evaluation mode."""
    kind = getattr(torch, options.dtype)
    return AutoModelForCausalLM.from_pretrained(options.folder / "model", dtype=kind).eval()


def attach(options: argparse.Namespace) -> Any:
    """The model with a fresh EAGLE-3 drafter over the draft vocabulary."""
    vocabulary = json.loads((options.folder / "vocabulary.json").read_text())
    config = Eagle3Config(draft_vocab=len(vocabulary), train_steps=options.unroll)
    torch.manual_seed(0)
    model = economize.apply(load(options), config)
    model.techniques["eagle3"].set_draft_vocab(vocabulary)
    return model


def examples(folder: Path) -> list[Example]:
    """The conversations; a position counts when the token after it was written by the assistant."""
    rows = [json.loads(line) for line in (folder / "conversations.jsonl").read_text().splitlines()]
    return [
        Example(torch.tensor(row["tokens"]), torch.tensor([*row["supervised"][1:], False], dtype=torch.long))
        for row in rows
    ]


def train(options: argparse.Namespace) -> None:
    """Train for the minutes, and note what came of it."""
    data, out = examples(options.folder), options.folder / "theirs" / options.name
    settings = {
        "batch_size": options.batch_size,
        "autocast": None if options.dtype == "float32" else options.dtype,
        "seed": 0,
        "log_every": 1,
    } | ({"lr": options.lr} if options.lr is not None else {})
    steps = options.steps
    if steps is None:
        timed = fit(attach(options), data, steps=TIMED_STEPS, **settings).history
        step_seconds = (timed[-1]["time"] - timed[1]["time"]) / (TIMED_STEPS - 2)
        steps = max(1, round(60 * options.minutes / step_seconds))
        print(f"{step_seconds:.2f} s a step, so {steps} steps", flush=True)
    if options.warmup is not None:
        settings["warmup_steps"] = round(options.warmup * steps)
    model = attach(options)
    start = time.perf_counter()
    fitted = fit(model, data, steps=steps, callbacks=[_progress], **settings)
    seconds = time.perf_counter() - start
    model.save_pretrained(out)
    result = {
        "economize": economize.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "steps": fitted.steps,
        "seconds": seconds,
        "parameters": sum(parameter.numel() for parameter in model.technique_parameters()),
        "tokens_a_step": options.batch_size * sum(len(item.input_ids) for item in data) / len(data),
        "settings": {**settings, "unroll": options.unroll},
        "loss": [round(loss, 4) for loss in fitted.losses],
        "last": {key: value for key, value in fitted.history[-1].items() if key.startswith("acc")},
    }
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")


def _progress(row: dict[str, Any]) -> None:
    if row["step"] % 20 == 0:
        print(f"step {row['step']}: loss {row['loss']:.3f}, {row['time']:.0f} s", flush=True)


def serve(options: argparse.Namespace) -> None:
    """Answer prompts until the input ends."""
    model = economize.load(load(options), str(options.folder / "theirs" / options.name))
    model.techniques.to(getattr(torch, options.dtype))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        decoding = economize.DecodeConfig(cycle_length=asked["cycle_length"])
        start = time.perf_counter()
        prompt = torch.tensor(asked["tokens"])
        decoded = model.decode(prompt, asked["max_new_tokens"], decoding=decoding, stop=asked["ends"])
        tokens = decoded.tokens.tolist()
        seconds = time.perf_counter() - start
        print(json.dumps({"tokens": tokens, "seconds": seconds, "rounds": decoded.acceptance}), flush=True)


if __name__ == "__main__":
    main()
