"""How fast conversations are written in process, beside transformers' `generate` and beside other code of ours.

    python benchmarks/writing.py
    python benchmarks/writing.py --dtype float32 --base ../before
    python benchmarks/writing.py --turns 3 --arms ours --base ../before

Prompts of mixed lengths (questions, and texts to think of) are answered greedily until the target ends its answer.
All arms have as many rows at a time and answer the same prompts, one arm after the other in processes of their own, in
turns; only generating is timed. Tokens are those of answers: what fills up a batch counts for nothing. `--base` is a
checkout of other code. Tokens per second of this process are those of the time that it had a core: on a machine that
does other things, they say more than tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from record import record
from tables import table

from headstart.data.conversations.answers import Answers
from headstart.data.prompts.chat import prompt_tokens
from headstart.data.prompts.loading import LeftOut
from headstart.data.prompts.seed_prompts import TOPICS, seed_prompt_list
from headstart.data.prompts.shapes import Prompt
from headstart.eval.environment import environment
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.recipes.sections import DataSection

SOURCE = Path(__file__).resolve().parents[1]
ARMS = ("ours", "transformers")
SPEEDS = ("tokens_per_second", "tokens_per_cpu_second")
LENGTHS = (
    "",
    " Answer in one sentence.",
    " Answer in three short sentences.",
    " Explain it to a child in a few words.",
)
"""What is asked of answers, so that they end at different lengths."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="a folder, a Hub id or the packaged model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=32, help="in all")
    parser.add_argument("--batch", type=int, default=32, help="rows at a time")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer at most")
    parser.add_argument("--longest", type=int, default=400, help="tokens of the longest prompt, about")
    parser.add_argument("--turns", type=int, default=1, help="of a conversation; `transformers` writes one only")
    parser.add_argument("--repeats", type=int, default=1, help="each arm so many times")
    parser.add_argument("--base", type=Path, help="a checkout to compare with")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--only", choices=ARMS, help="one arm, once, here: what the others are started with")
    parser.add_argument("--out", type=Path, default=Path("out/writing.json"))
    options = parser.parse_args(arguments)
    if options.only:
        print(json.dumps(measured(options)))
        return
    arms = [(name, SOURCE) for name in options.arms] + ([("base", options.base.resolve())] if options.base else [])
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in arms}
    for number in range(options.repeats):
        for name, source in arms if number % 2 == 0 else arms[::-1]:
            runs[name].append(apart("ours" if name == "base" else name, source, options))
            print(name, {key: value for key, value in runs[name][-1].items() if key != "answers"}, flush=True)
    ours, ours_cpu = (median(run[key] for run in runs[arms[0][0]]) for key in SPEEDS)
    answers = runs[arms[0][0]][0]["answers"]
    rows = [
        {
            "writer": name,
            "tokens_per_second": (speed := median(run[SPEEDS[0]] for run in several)),
            "tokens_per_cpu_second": (of_cpu := median(run[SPEEDS[1]] for run in several)),
            "speedup_of_ours": ours / speed,
            "speedup_of_ours_cpu": ours_cpu / of_cpu,
            "same_answers": sum(a == b for a, b in zip(answers, several[0]["answers"], strict=True)) / len(answers),
        }
        for name, several in runs.items()
    ]
    print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    what = (
        f"{options.prompts} prompts of mixed lengths, answered greedily, {options.batch} at a time, "
        f"in {options.dtype}; medians of {options.repeats}, in turns. Tokens a second are of the time that the "
        "process had a core. Same answers: the share that is equal in every token to ours."
    )
    target = load_target(options.target, dtype=options.dtype)
    asked = prompts_of(options.prompts, options.longest, options.turns)
    prompts = sorted(len(prompt_tokens(prompt.messages[:1], target.tokenizer)) for prompt in asked)
    lengths = sorted(len(turn) for answer in answers for turn in answer)
    settings = {
        **{key: getattr(options, key) for key in ("prompts", "batch", "tokens", "turns", "repeats", "dtype")},
        "prompt_tokens": [prompts[0], prompts[len(prompts) // 2], prompts[-1]],
        "answer_tokens": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
    }
    record(options.out, what, rows, environment(target), __file__, arguments, settings)


def apart(arm: str, source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One arm, once, in a process of its own with the code of a checkout, this script of it included."""
    kept = ("target", "dtype", "prompts", "batch", "tokens", "longest", "turns")
    words = [word for name in kept for word in (f"--{name}", str(getattr(options, name)))]
    path = os.pathsep.join([str(source / "src"), str(source / "benchmarks")])
    done = subprocess.run(
        [sys.executable, str(source / "benchmarks" / "writing.py"), *words, "--only", arm],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Answers of one arm, and how fast it wrote them."""
    target = load_target(options.target, dtype=options.dtype)
    prompts = prompts_of(options.prompts, options.longest, options.turns)
    write = ours if options.only == "ours" else theirs
    write(target, prompts[:2], 2, 8)  # warms up
    begun, cpu = perf_counter(), process_time()
    answers = write(target, prompts, options.batch, options.tokens)
    seconds, cpu = perf_counter() - begun, process_time() - cpu
    tokens = sum(len(turn) for answer in answers for turn in answer)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu,
        "answers": answers,
    }


def prompts_of(count: int, longest: int, turns: int) -> list[Prompt]:
    """Requests of many lengths: questions, and texts to think of."""
    page = (SOURCE / "docs" / "serving.md").read_text().split()
    starts = [text for _, text in seed_prompt_list("broad") if "{topic}" in text]
    prompts = []
    for number in range(count):
        messages = []
        for turn in range(turns):
            place = number + count * turn
            text = starts[place % len(starts)].replace("{topic}", TOPICS[7 * place % len(TOPICS)])
            if place % 2:
                words = 1 + (place * 37) % (longest // 3)
                text += "? Think of this text first: " + " ".join(page[3 * number : 3 * number + words])
            messages.append({"role": "user", "content": text + LENGTHS[place % len(LENGTHS)]})
        prompts.append(Prompt(messages, id=str(number)))
    return prompts


def ours(target: Target, prompts: Sequence[Prompt], batch: int, tokens: int) -> list[list[list[int]]]:
    """As conversations are written; the answers of each."""
    settings = DataSection(prompts="given", max_new_tokens=tokens, max_prompt_tokens=1024, batch_size=batch)
    answers = []
    for start in range(0, len(prompts), batch):
        written = Answers(target, settings).answered(prompts[start : start + batch], 0, 0.0, LeftOut())
        by_id = {item.id: item for item in written}
        for prompt in prompts[start : start + batch]:
            item = by_id[prompt.id]
            answers.append([list(item.tokens[first:last]) for first, last in item.supervised_spans])
    return answers


@torch.inference_mode()
def theirs(target: Target, prompts: Sequence[Prompt], batch: int, tokens: int) -> list[list[list[int]]]:
    """As `generate` of transformers does, padded on the left."""
    target.release()  # the model as it was loaded, with its own attention
    ends, answers = target.end_tokens, []
    pad = next(iter(ends))
    rows = [prompt_tokens(prompt.messages, target.tokenizer) for prompt in prompts]
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        width = max(map(len, part))
        tokens_BT = torch.tensor([[pad] * (width - len(row)) + list(row) for row in part])
        mask_BT = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in part])
        out_BT = target.model.generate(
            input_ids=tokens_BT.to(target.device),
            attention_mask=mask_BT.to(target.device),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=sorted(ends),
            pad_token_id=pad,
        )
        for row in out_BT[:, width:].tolist():
            stop = next((index + 1 for index, token in enumerate(row) if token in ends), len(row))
            answers.append([row[:stop]])
    return answers


if __name__ == "__main__":
    main()
