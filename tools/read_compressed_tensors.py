"""Reads files in the layout of compressed-tensors with the library of that name, and compares values.

    python -m venv venv && venv/bin/pip install -r tools/requirements-compressed-tensors.txt
    LEAN_COMPRESSED=DIR cargo test --features wgpu,train --test quant compressed_tensors
    venv/bin/python tools/read_compressed_tensors.py DIR

For each `NAME.safetensors` of the folder `NAME.expected.safetensors` has the float weights, outputs
first, as Burn computes with them. Values must be equal to the bit. Exits with 1 where something differs.
"""

import json
import pathlib
import sys

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open
from safetensors.torch import load_file


def quantized(layer, tensors, scheme):
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    data = {
        name: tensors[f"{layer}.{name}"]
        for name in compressor.compression_param_names(scheme)
    }
    zeros = data.get("weight_zero_point")
    if zeros is not None:
        # The library takes the bytes of its transposed view, which one word alone does not allow.
        data["weight_zero_point"] = torch.tensor(zeros.t().tolist(), dtype=zeros.dtype).t()
    return compressor.decompress(data, scheme)["weight"]


def check(path):
    tensors = load_file(path)
    expected = load_file(path.with_suffix(".expected.safetensors"))
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
    found = {}
    config.pop("version")
    for scheme in QuantizationConfig.model_validate(config).config_groups.values():
        found |= {layer: quantized(layer, tensors, scheme) for layer in scheme.targets}
    same = True
    for name, value in expected.items():
        layer = name.removesuffix(".weight")
        equal = torch.equal(found.get(layer, tensors.get(name)).float(), value)
        same = same and equal
        print(f"{path.name}: {name} {'equal' if equal else 'DIFFERS'}")
    return same and bool(expected)


def main():
    paths = sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors"))
    paths = [path for path in paths if ".expected." not in path.name]
    results = [check(path) for path in paths]
    print(f"{sum(results)} of {len(results)} files read as written")
    sys.exit(0 if results and all(results) else 1)


if __name__ == "__main__":
    main()
