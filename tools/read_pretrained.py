"""Loads a folder of `llama_compress --pretrained` with Transformers, and measures its perplexity there.

    python -m venv venv && venv/bin/pip install -r tools/requirements-compressed-tensors.txt
    cargo run -p burn-lean --release --example llama_compress -- --checkpoint model.safetensors \
        --tokens tokens.safetensors --preset w4a16-g32 --pretrained DIR --json rows.json
    venv/bin/python tools/read_pretrained.py DIR tokens.safetensors [rows.json]

The windows and the rule are those of the example: each token but the first of a window of `eval` predicted
from those before it. Exits with 1 where Transformers misses a weight or takes one for another, or where the
perplexity is not that of the rows within 0.1 %: sums of another order round inputs to other codes. Weights that are packed alone are
dequantized when they are loaded; rounded inputs are rounded in each call.
"""

import json
import math
import pathlib
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig


def perplexity(model, windows):
    losses = []
    with torch.no_grad():
        for tokens in windows.long().split(8):
            logits = model(tokens[:, :-1]).logits.float()
            losses.append(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
                )
            )
    return math.exp(torch.cat(losses).double().mean().item())


def main():
    folder, tokens = sys.argv[1], load_file(sys.argv[2])
    with open(pathlib.Path(folder) / "config.json") as file:
        quantization = json.load(file).get("quantization_config", {})
    options = {}
    if quantization.get("format") == "pack-quantized":
        # Weights alone: floats as they are read. Otherwise Transformers 5.24 makes zero points of another
        # shape than the library packs.
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True, **options
    )
    wrong = {what: names for what, names in loading.items() if names}
    found = perplexity(model.eval(), tokens["eval"])
    print(f"{folder}: perplexity {found:.4f}")
    if wrong:
        print(f"not loaded as they are: {wrong}")
    same = not wrong
    if len(sys.argv) > 3:
        with open(sys.argv[3]) as file:
            row = json.load(file)["rows"][-1]
        expected = row["perplexity"]
        same = same and abs(found / expected - 1) < 1e-3
        print(f"{row['method']}: {expected:.4f} in Burn")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
