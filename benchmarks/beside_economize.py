"""Our EAGLE-3 heads beside those of the library economize: same target, data, draft vocabulary, dtype and minutes.

    python -m venv ENV && ENV/bin/pip install -c constraints.txt economize
    python benchmarks/beside_economize.py QUESTIONS.jsonl --their-python ENV/bin/python --run runs/quickstart \\
        --minutes 13

economize lives in an environment of its own and is trained first, through beside_economize_theirs.py, for about the
minutes asked for. Ours then gets the seconds that theirs took, less those of computing its hidden states (theirs
computes them as it trains), and once more the same number of steps with as many tokens a step. Then both answer the
questions greedily at batch 1, in turns: their process keeps its model and waits while ours decodes, and the other way
round. Stages that are done are skipped, so the command can be stopped and given again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from arms import Arm, alternate, arm, budget, facts, once, options_of, row_of, trained, training_data, tuned
from record import record
from tables import shares, table, times

from headstart.data.conversations.records import read_conversations
from headstart.data.prompts.questions import read_questions
from headstart.data.states.store import StateStore
from headstart.decode.loop import Round
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.eval.environment import environment
from headstart.eval.labels import PLAIN
from headstart.eval.methods import Method, Ours, Run
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.pipeline.run import CONVERSATIONS
from headstart.support.files import read_json, write_json, write_jsonl, write_text
from headstart.train.validation import pick_vocabulary
from headstart.tree.tree import TreeShape

SETTINGS: dict[str, list[str]] = {"defaults": [], "tuned": ["--lr", "1e-3", "--warmup", "0.03"]}
"""How theirs is trained: as it comes, and with the learning rate that so few steps ask for."""
THEIR_PLAIN = "economize plain"


class Theirs:
    """A trained drafter of the other library, in a process of its own.

    Args:
        command: starts `beside_economize_theirs.py serve`.
        target: whose end-of-turn tokens end a text.
    """

    def __init__(self, command: Sequence[str], target: Target) -> None:
        self.ends = sorted(target.end_tokens)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def ask(self, **question: Any) -> dict[str, Any]:
        """One line there, one line back."""
        assert self._process.stdin is not None, "the process reads from a pipe"
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Let the process end."""
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "the process writes to a pipe"
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"The other process ended with {self._process.wait()}.")
        answer: dict[str, Any] = json.loads(line)
        return answer


class TheirMethod:
    """One way of decoding with it, as `alternate` wants it.

    Args:
        theirs: the process.
        drafts: in a round; 0 decodes plainly.
    """

    def __init__(self, theirs: Theirs, drafts: int) -> None:
        self._theirs, self._drafts = theirs, drafts

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Run:
        (prompt,) = prompts
        reply = self._theirs.ask(
            tokens=list(prompt),
            max_new_tokens=max_new_tokens,
            cycle_length=self._drafts + 1,
            ends=self._theirs.ends,
        )
        rounds = [Round(drafted + 1, accepted + 1, 0.0, 0.0, 0.0, drafted) for drafted, accepted in reply["rounds"]]
        return Run([reply["tokens"]], reply["seconds"], [], [rounds])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__, Path("out/beside_economize"), "bfloat16")
    parser.add_argument("questions", type=Path)
    parser.add_argument("--their-python", required=True, help="interpreter of the environment with economize")
    parser.add_argument("--recipe", default="eagle3", help="ours")
    parser.add_argument("--minutes", type=float, default=13.0)
    parser.add_argument("--steps", type=int, help="theirs trains for so many steps instead")
    parser.add_argument("--theirs", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--drafts", nargs="+", type=int, default=[3, 5], help="of their chains")
    options = parser.parse_args(arguments)

    target = load_target(options.target, options.dtype)
    overrides = [*options.set, f"heads.draft_vocab_size={options.vocabulary}"]
    start = perf_counter()
    data = training_data(
        options.run, options.out, target, [arm("", options.recipe, overrides)], options.gigabytes, reuse=False
    )
    clock = options.out / "states" / "seconds.json"
    if not clock.is_file():
        write_json(clock, perf_counter() - start)
    hand_over(options, target, data.train)

    theirs = {name: their_training(options, name) for name in options.theirs}
    seconds = min(read["seconds"] for read in theirs.values()) - read_json(clock)
    steps = min(read["steps"] for read in theirs.values())
    tokens = round(next(iter(theirs.values()))["tokens_a_step"])
    arms = {
        "same minutes": arm("same minutes", options.recipe, [*overrides, *budget(minutes=max(seconds, 1.0) / 60)]),
        "same steps": arm(
            "same steps", options.recipe, [*overrides, f"train.batch_tokens={tokens}", *budget(steps=steps)]
        ),
    }
    decoding, always = DecodeOptions(), DecodeOptions(draft="on")
    chain = TreeShape.chain(options.chain)
    methods: dict[str, Method] = {PLAIN: Ours(target, (), decoding)}
    for name, candidate in arms.items():
        heads = trained(candidate, target, data, folder_of(options, candidate) / "train")
        methods[f"ours, {name}, chain"] = Ours(target, [HeadDrafter(heads, chain)], always)
    decoder = tuned(arms["same minutes"], target, data, folder_of(options, arms["same minutes"]))
    methods["ours, same minutes, tree"] = Ours(target, decoder.drafters("heads"), decoding, decoder.costs)
    processes = []
    for name in options.theirs:
        processes.append(Theirs(their_command(options, "serve", name), target))
        for drafts in options.drafts:
            methods[f"economize {name}, {drafts} drafts"] = TheirMethod(processes[-1], drafts)
    methods[THEIR_PLAIN] = TheirMethod(processes[0], 0)

    trainings = {f"economize {name}": read for name, read in theirs.items()}
    trainings |= {f"ours, {name}": facts(folder_of(options, candidate) / "train") for name, candidate in arms.items()}
    questions = read_questions(options.questions)[: options.limit]
    settings = {name: read["steps"] for name, read in trainings.items()}
    folder = options.out / options.questions.stem
    units = alternate(target, methods, questions, folder, settings, options.max_new_tokens)
    for process in processes:
        process.close()
    results = {
        "states_seconds": read_json(clock),
        "trainings": trainings,
        "methods": {
            name: row_of(units, name, {"over_plain": PLAIN, "over_their_plain": THEIR_PLAIN}) for name in methods
        },
    }
    what = "Ours and economize on the same target, data, draft vocabulary and time, both answering in turns."
    rows = [{"name": name, **row} for name, row in results["methods"].items()]
    record(options.out / "beside_economize.json", what, rows, environment(target), __file__, arguments, None, results)
    write_text(options.out / "beside_economize.md", report(results))
    print(report(results))


def hand_over(options: argparse.Namespace, target: Target, store: StateStore) -> None:
    """Write the model, the conversations and the draft vocabulary for the other process."""

    def work() -> None:
        with target.stock() as model:
            model.save_pretrained(options.out / "model")
        texts = read_conversations(options.run / CONVERSATIONS / "train.jsonl")[: len(store)]
        rows = ({"tokens": list(text.tokens), "supervised": list(map(bool, text.supervised))} for text in texts)
        write_jsonl(options.out / "conversations.jsonl", rows)
        ends = sorted(end for end in target.end_tokens if end < target.vocab_size)
        vocabulary = pick_vocabulary(store.supervised_counts(target.vocab_size), options.vocabulary, ends)
        write_json(options.out / "vocabulary.json", vocabulary.tolist())

    settings = {"data": store.fingerprint, "vocabulary": options.vocabulary, "dtype": options.dtype}
    once(options.out / "model", settings, work)


def their_command(options: argparse.Namespace, action: str, name: str) -> list[str]:
    """A command for the other interpreter."""
    script = Path(__file__).with_name("beside_economize_theirs.py")
    command = [options.their_python, str(script), action, str(options.out), "--name", name, "--dtype", options.dtype]
    if action == "train":
        command += ["--steps", str(options.steps)] if options.steps else ["--minutes", str(options.minutes)]
        command += SETTINGS[name]
    return command


def their_training(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """What their training says of itself, trained now unless it was before."""
    command = their_command(options, "train", name)
    folder = options.out / "theirs" / name

    def work() -> None:
        subprocess.run(command, check=True)

    once(folder, {"command": command[2:]}, work)
    result: dict[str, Any] = read_json(folder / "result.json")
    return result


def folder_of(options: argparse.Namespace, candidate: Arm) -> Path:
    """Where an arm of ours is kept."""
    folder: Path = options.out / "ours" / candidate.name.replace(" ", "-")
    return folder


def report(results: Mapping[str, Any]) -> str:
    """The figures as Markdown, with what ours is over the best of theirs."""
    rows = results["methods"]
    theirs = {name: row for name, row in rows.items() if name.startswith("economize") and name != THEIR_PLAIN}
    ours = {name: row for name, row in rows.items() if name.startswith("ours")}
    accepted = max(row["accepted_per_round"] for row in theirs.values())
    speed = max(row["tokens_per_second"]["mean"] for row in theirs.values())
    fastest = max(row["tokens_per_second"]["mean"] for row in ours.values())
    compared = [f"the best of theirs accepts {accepted:.3f} drafts a round"]
    for name, row in ours.items():
        if name.endswith("chain") and accepted > 0:
            compared.append(f"{name}: {row['accepted_per_round'] / accepted:.2f}x as many")
    trainings = [
        [name, f"{read['parameters'] / 1e6:.1f} M", read["steps"], f"{read['seconds']:.0f}"]
        for name, read in results["trainings"].items()
    ]
    lines = [
        [
            name,
            f"{row['accepted_per_round']:.3f}" if row["accepted_per_round"] is not None else "",
            shares(row["acceptance_by_position"]),
            f"{row['tokens_per_second']['mean']:.1f}",
            times(row["over_plain"]),
            times(row["over_their_plain"]),
        ]
        for name, row in rows.items()
    ]
    return (
        "\n\n".join(
            [
                table(["training", "parameters", "steps", "seconds"], trainings),
                f"Computing our hidden states took {results['states_seconds']:.0f} s more, taken off our minutes.",
                table(
                    ["", "accepted drafts a round", "by position", "tokens/s", "over plain", "over their plain"], lines
                ),
                "; ".join([*compared, f"the fastest of ours: {fastest / speed:.2f}x their tokens/s"]) + ".",
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
