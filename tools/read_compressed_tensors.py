"""Reads files in the layout of compressed-tensors with the library of that name, and compares values.

    python -m venv venv && venv/bin/pip install -r tools/requirements-compressed-tensors.txt
    LEAN_COMPRESSED=DIR cargo test --features wgpu,train --test quant compressed_tensors
    venv/bin/python tools/read_compressed_tensors.py DIR

For each `NAME.safetensors` of the folder `NAME.expected.safetensors` has the float weights, outputs
first, as Burn computes with them. Values must be equal to the bit. Affine weights in packed words are
unpacked with the library's own function, since its decompressor refuses them. Exits with 1 where
something differs.
"""

import json
import pathlib
import sys

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.quantized_compressors.pack_quantized import (
    unpack_from_int32,
)
from compressed_tensors.config import SparsityCompressionConfig
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors import safe_open
from safetensors.torch import load_file


def schemes(config):
    return {
        layer: group
        for group in config.config_groups.values()
        for layer in group.targets
    }


def weight_of(layer, tensors, compressor, scheme):
    data = {
        name: tensors[f"{layer}.{name}"]
        for name in compressor.compression_param_names
        if f"{layer}.{name}" in tensors
    }
    packed = data.get("weight_packed")
    if packed is None or scheme.weights.symmetric:
        return compressor.decompress_weight(data, scheme.weights)
    bits, scale = scheme.weights.num_bits, data["weight_scale"]
    codes = unpack_from_int32(packed, bits, data["weight_shape"])
    zeros = data["weight_zero_point"]
    if scheme.weights.strategy != "tensor":
        zeros = unpack_from_int32(zeros, bits, scale.shape, packed_dim=0)
    return dequantize(x_q=codes, scale=scale, zero_point=zeros)


def check(path):
    tensors = load_file(path)
    expected = load_file(path.with_suffix(".expected.safetensors"))
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
    sparsity = config.pop("sparsity_config", None)
    found = {}
    if sparsity:
        sparsity = SparsityCompressionConfig.load_from_registry(sparsity["format"], **sparsity)
        compressor = BaseCompressor.load_from_registry(sparsity.format, config=sparsity)
        for layer in sparsity.targets:
            data = {name: tensors[f"{layer}.{name}"] for name in ("shape", "compressed", "bitmask")}
            found[layer] = compressor.decompress_weight(data)
    config = QuantizationConfig.model_validate(config)
    if config.config_groups:
        compressor = BaseCompressor.load_from_registry(config.format, config=config)
        for layer, scheme in schemes(config).items():
            found[layer] = weight_of(layer, tensors, compressor, scheme)
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
