"""A process with the real Hub client, because huggingface_hub reads its environment once, on import.

Each line of standard input is a call {"do": name, "token": token or null, ...}. Each answer is a line of JSON, with
"problem" and "remedy" for a UserError.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub.utils import _http
from transformers import AutoModelForCausalLM

import headstart
from headstart.data.prompts.questions import find_questions
from headstart.errors import UserError
from headstart.hub.engines.importing import import_heads
from headstart.hub.pull import fetch
from headstart.hub.push import push
from headstart.model.loading import load_target


def do_push(folder: str, repo_id: str, **options: Any) -> dict[str, Any]:
    return asdict(push(Path(folder), repo_id, **options))


def do_push_conversations(run: str, repo_id: str, **options: Any) -> dict[str, Any]:
    return asdict(push(Path(run), repo_id, conversations=True, **options))


def do_fetch(repo_id: str, revision: str | None = None) -> dict[str, Any]:
    folder = fetch(repo_id, revision)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {"folder": str(folder), "files": files}


def do_import(source: str, target: str, out: str) -> dict[str, Any]:
    return {"family": import_heads(source, load_target(target, dtype="float32"), Path(out)).family}


def do_generate(heads: str, target: str | None, prompt: str, revision: str | None = None) -> dict[str, Any]:
    decoder = headstart.load(heads, target=target and load_target(target, dtype="float32"), revision=revision)
    return {"tokens": decoder.generate(prompt, max_new_tokens=12).tokens, "nodes": decoder.shape.size}


def do_transformers(heads: str, target: str, tokens: list[int], **options: Any) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(target)
    both = [
        model.generate(torch.tensor([tokens]), max_new_tokens=12, **more).tolist()
        for more in ({}, {"custom_generate": heads, "trust_remote_code": True, **options})
    ]
    return {"same": both[0] == both[1], "attention": model.config._attn_implementation}


def do_target(spec: str) -> dict[str, Any]:
    return {"vocabulary": load_target(spec, dtype="float32").vocab_size}


def do_suite(name: str, limit: int | None = None) -> dict[str, Any]:
    questions, _ = find_questions(name, limit)
    return {"questions": [asdict(question) for question in questions]}


def main() -> None:
    known = {name.removeprefix("do_"): value for name, value in globals().items() if name.startswith("do_")}
    # Skip the waits between six tries on an unreachable Hub, 24 seconds in total.
    _http.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        os.environ.pop("HF_TOKEN", None)
        if token := call.pop("token", None):
            os.environ["HF_TOKEN"] = token
        try:
            answer = known[call.pop("do")](**call)
        except UserError as error:
            answer = {"problem": error.problem, "remedy": error.remedy}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
