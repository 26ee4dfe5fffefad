"""What wider self-prompts buy: the same minutes of data and the same training steps, broad seed prompts against none.

    python benchmarks/prompt_breadth.py QUESTIONS.jsonl [--data-minutes 2] [--steps 300]

Both arms write conversations for the same wall-clock time, train the same heads for the same steps, and are judged on
the plain greedy answers to the question file: τ of a greedy chain, and τ of the best tree of 16 nodes chosen on the
arm's own calibration conversations. Run it on a quiet machine: the arms take turns only as wholes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from arms import MAX_RANK, answered, arm, budget, chain_tau, facts, options_of, trained, training_data
from record import record
from rich.console import Console

from headstart.data.conversations.building import build_conversations
from headstart.data.prompts.questions import read_questions
from headstart.eval.environment import environment
from headstart.pipeline.run import CONVERSATIONS
from headstart.support.files import read_jsonl
from headstart.target.loading import load_target
from headstart.tuning.acceptance import measure_drafts
from headstart.tuning.tune import path_values

NODES = 16


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__, Path("out/prompt_breadth"), runs=False)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--data-minutes", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)

    target = load_target(options.target, options.dtype)
    questions = read_questions(options.questions)[: options.limit]
    texts = answered(target, questions, options.out / "answers.json", options.max_new_tokens)
    rows = []
    for seed_prompts in ("none", "broad"):
        folder = options.out / seed_prompts
        data_settings = [f"data.seed_prompts={seed_prompts}", f"data.minutes={options.data_minutes}", "data.heldout=1"]
        one = arm(seed_prompts, options.recipe, [*data_settings, *budget(steps=options.steps), *options.set])
        build_conversations(target, one.recipe.data, folder / CONVERSATIONS, Console())
        data = training_data(folder, folder, target, [one], options.gigabytes)
        heads = trained(one, target, data, folder / "train")
        own = path_values(measure_drafts(target, heads, data.texts, MAX_RANK).ranks_OK, MAX_RANK)
        tree = sorted(own, key=lambda path: (-own[path], len(path), path))[: NODES - 1]
        values = path_values(measure_drafts(target, heads, texts, MAX_RANK).ranks_OK, MAX_RANK)
        written = [row["supervised"] for _, row in read_jsonl(folder / CONVERSATIONS / "train.jsonl")]
        rows.append(
            {
                "seed_prompts": seed_prompts,
                "conversations": len(written),
                "answer_tokens": sum(stop - start for spans in written for start, stop in spans),
                **facts(folder / "train"),
                "chain": chain_tau(target, heads, texts, options.chain),
                "tree_tau": round(1 + sum(values.get(path, 0.0) for path in tree), 3),
            }
        )
        print(json.dumps(rows[-1], indent=2), flush=True)
    what = (
        f"{options.data_minutes:g} minutes of writing and {options.steps} training steps for each arm; "
        f"τ on {len(texts)} questions."
    )
    settings = {"recipe": options.recipe, "set": options.set, "chain": options.chain, "tree_nodes": NODES}
    record(options.out / "prompt_breadth.json", what, rows, environment(target), __file__, arguments, settings)


if __name__ == "__main__":
    main()
