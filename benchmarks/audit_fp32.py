"""Token identity in float32 over whole question files: trained heads, random heads, heads that always guess wrong.

    python benchmarks/audit_fp32.py runs/quickstart/heads QUESTIONS.jsonl [MORE.jsonl ...]

Plain greedy answers are written in batches through the same engine; every drafter must then give the same tokens.
Exits with 1 when a token differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from record import record

import headstart
from headstart.data.prompts.chat import prompt_tokens
from headstart.data.prompts.questions import read_questions
from headstart.decode.loop import Drafter, Engine
from headstart.drafters.heads import HeadDrafter
from headstart.eval.audit import decode_in_batches, tokens_that_differ
from headstart.eval.audit_drafters import AlwaysWrongDrafter, random_weights, unused_tokens
from headstart.eval.environment import environment
from headstart.tree.tree import TreeShape


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads")
    parser.add_argument("questions", nargs="+", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=80)
    parser.add_argument("--target", help="where it is, when it is not where the heads say")
    parser.add_argument("--out", type=Path, default=Path("out/audit_fp32.json"))
    options = parser.parse_args(arguments)

    decoder = headstart.load(options.heads, options.target, dtype="float32")
    target = decoder.target
    questions = [question for path in options.questions for question in read_questions(path)]
    prompts = [prompt_tokens([{"role": "user", "content": item.turns[0]}], target.tokenizer) for item in questions]
    batches = prompts, options.max_new_tokens, options.batch_size
    started = time.perf_counter()
    answers = [output.tokens for output in decode_in_batches(Engine(target), *batches)]
    print(f"plain answers to {len(prompts)} prompts: {time.perf_counter() - started:.0f} s", flush=True)
    narrow = TreeShape.chain(1)  # its drafts are read for nothing, nearly all of them
    drafters: dict[str, Drafter] = {
        "trained heads": HeadDrafter(decoder.heads, TreeShape.chain(min(2, decoder.heads.draft_steps))),
        "random heads": HeadDrafter(random_weights(decoder.heads), narrow),
        "always wrong": AlwaysWrongDrafter(narrow, unused_tokens(answers, target.vocab_size, narrow.width)),
    }
    rows = []
    for name, drafter in drafters.items():
        started = time.perf_counter()
        counts = tokens_that_differ(answers, decode_in_batches(Engine(target, drafter), *batches))
        counts["accepted_drafts"] = counts.pop("drafts_accepted")
        rows.append({"drafter": name, **counts, "seconds": round(time.perf_counter() - started)})
        print(rows[-1], flush=True)
    what = (
        f"Tokens that differ from plain greedy decoding in float32: {len(prompts)} questions, "
        f"at most {options.max_new_tokens} tokens each, batches of {options.batch_size}."
    )
    settings = {"prompts": len(prompts), "max_new_tokens": options.max_new_tokens, "batch_size": options.batch_size}
    record(options.out, what, rows, environment(target), __file__, arguments, settings)
    sys.exit(any(row["different_tokens"] for row in rows))


if __name__ == "__main__":
    main()
