"""Compare OpenAI-compatible servers under one public load tool: vLLM's `bench serve`.

    python benchmarks/serving.py serving.json --questions mt_bench.jsonl --tool engines/vllm/bin/python \\
        --tokenizer runs/quickstart/target/tokenizer \\
        --server "ours=headstart serve runs/quickstart --port {port}" \\
        --server "ours, no drafts=headstart serve runs/quickstart --port {port}" \\
        --server "llama.cpp=engines/llama.cpp/build/bin/llama-server -m BF16.gguf -t 2 -np 8 -c 16384 --port {port}"

Every server answers the same questions greedily with 1, 4 and 8 clients at once. Servers run one at a time, in turns:
the order is reversed in the second round, and figures are of both rounds together. A server whose name ends with "no
drafts" gets {"draft": "off"} in each request.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from record import here, record

from headstart.data.prompts.questions import read_questions

_TOOL = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
_READY = 300
"""Seconds that a server has to load."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--tool", type=Path, required=True, help="Python of an environment with vLLM")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the target's tokenizer")
    parser.add_argument("--server", action="append", required=True, help="NAME=COMMAND with {port}")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--limit", type=int, default=24, help="questions per number of clients and round")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(arguments)
    servers = dict(server.split("=", 1) for server in options.server)
    questions = [question.turns[0] for question in read_questions(options.questions)]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        for number in range(options.rounds):
            chosen = questions[number * options.limit : (number + 1) * options.limit]
            lines = (json.dumps({"prompt": text, "output_tokens": options.max_new_tokens}) for text in chosen)
            prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
            for name in list(servers)[:: -1 if number % 2 else 1]:
                with served(servers[name]) as url:
                    for clients in options.clients:
                        result = load(options.tool, url, prompts, len(chosen), clients, name, Path(folder), options)
                        runs.setdefault((name, clients), []).append(result)
                        print(name, clients, result["output_throughput"], flush=True)
    rows = [{"server": name, "clients": clients, **joined(results)} for (name, clients), results in runs.items()]
    record(
        options.out,
        what="Servers of OpenAI's API under one load tool.",
        rows=rows,
        machine=here(),
        script=__file__,
        arguments=arguments,
        settings=settings_of(options, servers),
    )


def settings_of(options: argparse.Namespace, servers: dict[str, str]) -> dict[str, Any]:
    commands = {name: " ".join(Path(part).name for part in shlex.split(command)) for name, command in servers.items()}
    kept = {name: getattr(options, name) for name in ("limit", "max_new_tokens", "rounds")}
    return {**kept, "questions": options.questions.name, "servers": commands}


@contextmanager
def served(command: str) -> Iterator[str]:
    """Run a server until the block ends; yields its address once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(shlex.split(command.format(port=port)), stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _READY
        while not answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The server did not start: {command}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def load(
    tool: Path, url: str, prompts: Path, count: int, clients: int, name: str, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Run the load tool; return its figures. Raises SystemExit if it failed."""
    model = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
    extra = {"draft": "off"} if name.endswith("no drafts") else {}
    command = [
        *(str(tool), "-c", _TOOL, "--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions"),
        *(
            "--model",
            model,
            "--tokenizer",
            str(options.tokenizer),
            "--dataset-name",
            "custom",
            "--dataset-path",
            str(prompts),
        ),
        *("--custom-output-len", str(options.max_new_tokens), "--skip-chat-template", "--disable-shuffle"),
        *("--num-prompts", str(count), "--max-concurrency", str(clients), "--num-warmups", str(clients)),
        *("--temperature", "0", "--extra-body", json.dumps(extra), "--save-result", "--result-dir", str(folder)),
        *("--result-filename", "result.json", "--percentile-metrics", "ttft,itl,e2el", "--disable-tqdm"),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def joined(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Join the figures of several rounds."""
    seconds, count = sum(result["duration"] for result in results), len(results)
    return {
        "tokens_per_second": sum(result["total_output_tokens"] for result in results) / seconds,
        "first_token_ms": sum(result["median_ttft_ms"] for result in results) / count,
        "between_pieces_ms": sum(result["median_itl_ms"] for result in results) / count,
        "failed": sum(result["failed"] for result in results),
    }


if __name__ == "__main__":
    main()
