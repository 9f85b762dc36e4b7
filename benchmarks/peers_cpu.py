"""What other engines reach on the same CPU, model, prompts and threads: transformers, llama.cpp.

Reads the prompts out of a result of ``benchmarks.speed``, so that it runs in an environment of
its own: only torch and transformers (with gguf), or xllamacpp (llama.cpp as a wheel), are needed,
nothing of this package. Greedy decoding, batch 1, real stops. transformers reads the GGUF file
into the dtype asked for; llama.cpp keeps the weights quantised as they are.

    python benchmarks/peers_cpu.py speed.json model.gguf --threads 2 --json peers.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Decode = Callable[[list[int], int], int]
"""Answer one prompt with that many tokens at most; returns the tokens generated."""


def transformers_decoder(gguf: Path, dtype: str, threads: int) -> Decode:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=getattr(torch, dtype),
        # weights left in GGUF blocks would be unpacked again at every product
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.eval()

    def decode(prompt: list[int], max_new_tokens: int) -> int:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            answer = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return answer.shape[1] - ids.shape[1]

    return decode


def llama_cpp_decoder(gguf: Path, context: int, threads: int) -> Decode:
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx, params.n_parallel = context, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def decode(prompt: list[int], max_new_tokens: int) -> int:
        asked = {"prompt": prompt, "max_tokens": max_new_tokens, "temperature": 0.0, "top_k": 1}
        return server.handle_completions(asked)["usage"]["completion_tokens"]

    return decode


def measure(decode: Decode, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
    """Tokens per second over all prompts, after a short warm-up on the first."""
    decode(prompts[0], min(8, max_new_tokens))
    begin = time.perf_counter()
    counts = [decode(prompt, max_new_tokens) for prompt in prompts]
    seconds = time.perf_counter() - begin
    if not all(counts):
        raise RuntimeError(f"an answer is empty: {counts}")
    rate = sum(counts) / seconds
    return {"tokens": counts, "seconds": seconds, "tokens_per_second": rate}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="JSON written by benchmarks.speed")
    parser.add_argument("gguf", type=Path, help="the target's GGUF file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    prompts, limit = record["prompt_ids"]["1"], record["max_new_tokens"]
    context = max(map(len, prompts)) + limit + 1
    arms: dict[str, Callable[[], Decode]] = {}
    if importlib.util.find_spec("transformers"):
        for dtype in ("float32", "bfloat16"):
            arms[f"transformers {dtype}"] = lambda dtype=dtype: transformers_decoder(
                options.gguf, dtype, options.threads
            )
    if importlib.util.find_spec("xllamacpp"):
        arms["llama.cpp"] = lambda: llama_cpp_decoder(options.gguf, context, options.threads)
    if not arms:
        print("neither transformers nor xllamacpp is installed")
        return 1
    result = {
        "command": sys.argv,
        "threads": options.threads,
        "machine": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version()} | _versions(),
        "max_new_tokens": limit,
        "arms": [],
    }
    failed = 0
    for name, load in arms.items():
        arm: dict[str, Any] = {"name": name}
        try:
            arm |= measure(load(), prompts, limit)
            print(f"{name:24} {arm['tokens_per_second']:8.1f} tokens/s")
        except Exception as error:
            failed, arm["error"] = 1, f"{type(error).__name__}: {error}"
            print(f"{name:24} FAILED: {arm['error']}")
        result["arms"].append(arm)
        if options.json:
            options.json.write_text(json.dumps(result) + "\n")
    return failed


def _versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "transformers", "xllamacpp"):
        if importlib.util.find_spec(package):
            found[package] = importlib.metadata.version(package)
    return found


if __name__ == "__main__":
    sys.exit(main())
