"""Token identity in float32 over whole question files: trained heads, random heads, heads that always guess wrong.

    python benchmarks/audit_fp32.py runs/quickstart/heads QUESTIONS.jsonl [MORE.jsonl ...] [--out audit.json]

Plain greedy answers are written in batches through the same engine; every drafter must then give the same tokens.
Exits with 1 when a token differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import headstart
from headstart.data.conversations import prompt_tokens
from headstart.data.questions import read_questions
from headstart.decode.drafting import Drafter
from headstart.drafters.heads import HeadDrafter
from headstart.eval import AlwaysWrongDrafter, audit, plain_answers, random_weights, unused_tokens
from headstart.files import write_json
from headstart.target import TreeShape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads")
    parser.add_argument("questions", nargs="+", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=80)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    decoder = headstart.load(options.heads, dtype="float32")
    target = decoder.target
    questions = [question for path in options.questions for question in read_questions(path)]
    prompts = [prompt_tokens([{"role": "user", "content": item.turns[0]}], target.tokenizer) for item in questions]
    started = time.perf_counter()
    answers = plain_answers(target, prompts, options.max_new_tokens, options.batch_size)
    print(f"plain answers to {len(prompts)} prompts: {time.perf_counter() - started:.0f} s", flush=True)
    narrow = TreeShape.chain(1)  # its drafts are read for nothing, nearly all of them
    drafters: dict[str, Drafter] = {
        "trained heads": HeadDrafter(decoder.heads, TreeShape.chain(min(2, decoder.heads.steps))),
        "random heads": HeadDrafter(random_weights(decoder.heads), narrow),
        "always wrong": AlwaysWrongDrafter(narrow, unused_tokens(answers, target.vocab_size, narrow.width)),
    }
    rows = {}
    for name, drafter in drafters.items():
        started = time.perf_counter()
        found = audit(target, {name: drafter}, prompts, options.max_new_tokens, options.batch_size, answers)[name]
        rows[name] = {
            "prompts": found.prompts,
            "tokens": found.tokens,
            "different_tokens": found.different_tokens,
            "accepted_drafts": found.accepted,
            "rounds": found.rounds,
            "seconds": round(time.perf_counter() - started),
        }
        print(name, rows[name], flush=True)
    if options.out is not None:
        write_json(options.out, rows)
    sys.exit(any(row["different_tokens"] for row in rows.values()))


if __name__ == "__main__":
    main()
