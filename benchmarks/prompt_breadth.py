"""What wider self-prompts buy: the same minutes of data and the same training steps, broad openers against none.

    python benchmarks/prompt_breadth.py QUESTIONS.jsonl [--data-minutes 2] [--steps 300] [--folder runs/breadth]

Both arms write conversations for the same wall-clock time, train the same heads for the same steps, and are judged on
the plain greedy answers to the question file: τ of a greedy chain, and τ of the best tree of 16 nodes chosen on the
arm's own calibration conversations. Run it on a quiet machine: the arms take turns only as wholes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from arms import answered
from rich.console import Console

from headstart.data.generate import build_conversations
from headstart.data.questions import read_questions
from headstart.data.store import build_store
from headstart.decode.tune import measure_ranks, path_values
from headstart.files import write_json
from headstart.heads.io import load_heads
from headstart.target import FINAL, load_target
from headstart.train.config import load_recipe
from headstart.train.loop import train

NODES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--data-minutes", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("runs/breadth"))
    options = parser.parse_args()

    target = load_target("smollm2-135m")
    texts = answered(target, read_questions(options.questions), options.folder / "answers.json", 128)
    results = {}
    for openers in ("none", "broad"):
        folder = options.folder / openers
        recipe = load_recipe(
            "quickstart",
            [
                f"data.openers={openers}",
                f"data.minutes={options.data_minutes}",
                "data.heldout=1",
                "data.calibration=48",
                "train.minutes=null",
                f"train.steps={options.steps}",
            ],
        )
        splits = build_conversations(target, recipe.data, folder / "conversations", Console())
        parts = {"train": splits.train, "calibration": splits.calibration}
        stores = {
            name: build_store(folder / "states" / name, part, target, [FINAL], budget_bytes=4_000_000_000)
            for name, part in parts.items()
        }
        found = train(recipe, target, stores["train"], stores["calibration"], folder / "train", Console())
        heads = load_heads(found.heads_folder, target).to(target.dtype)
        own = path_values(measure_ranks(target, heads, splits.calibration, 10), 10)
        tree = sorted(own, key=lambda path: (-own[path], len(path), path))[: NODES - 1]
        ranks_OK = measure_ranks(target, heads, texts, 10)
        values = path_values(ranks_OK, 10)
        chain = sum(values.get((0,) * depth, 0.0) for depth in range(1, ranks_OK.shape[1] + 1))
        results[openers] = {
            "conversations": len(splits.train),
            "answer_tokens": sum(sum(item.supervised) for item in splits.train),
            "steps": found.steps,
            "own_chain_tau": found.metrics["tau"],
            "questions_chain_tau": round(1 + chain, 3),
            "questions_tree_tau": round(1 + sum(values.get(path, 0.0) for path in tree), 3),
            "questions_top1": [round(float((ranks_OK[:, k] == 0).float().mean()), 3) for k in range(ranks_OK.shape[1])],
            "threads": torch.get_num_threads(),
        }
        print(json.dumps({openers: results[openers]}, indent=2), flush=True)
    write_json(options.folder / "breadth.json", results)


if __name__ == "__main__":
    main()
