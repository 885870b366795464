"""Checks an ONNX file with the `onnx` checker and runs it with onnxruntime.

    python -m venv venv && venv/bin/pip install -r tools/requirements.txt
    venv/bin/python tools/judge_onnx.py FILE.onnx [--inputs FILE.npy] [--expected FILE.npy] [--step S]
    venv/bin/python tools/judge_onnx.py resnet8.onnx --cifar DIR     # accuracy on both test sets

With `--expected`, the classes of all rows must be the same, and the outputs within `--step`. With
`--cifar`, the folder has `original_test_1017.bin.gz` and `test_batch.bin.gz` in CIFAR-10's binary
layout, and pixels are floats from 0 to 255. Exits with 1 where something is wrong.
"""

import argparse
import gzip
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime


def session(path, optimized):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = (
        levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    )
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def read_cifar(path):
    with gzip.open(path) as file:
        records = np.frombuffer(file.read(), np.uint8).reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32), records[:, 0]


def outputs(model, inputs, batch=100):
    name = model.get_inputs()[0].name
    parts = [inputs[i : i + batch] for i in range(0, len(inputs), batch)]
    return np.concatenate([model.run(None, {name: part})[0] for part in parts])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--inputs")
    parser.add_argument("--expected")
    parser.add_argument("--step", type=float, default=1e-4)
    parser.add_argument("--cifar")
    arguments = parser.parse_args()
    onnx.checker.check_model(onnx.load(arguments.file), full_check=True)
    print("the checker finds nothing")
    good = True
    for optimized in (False, True):
        model = session(arguments.file, optimized)
        name = "optimized" if optimized else "as written"
        if arguments.inputs:
            found = outputs(model, np.load(arguments.inputs))
            if arguments.expected:
                expected = np.load(arguments.expected)
                same = (found.argmax(-1) == expected.argmax(-1)).mean()
                off = np.abs(found - expected).max()
                print(f"{name}: {100 * same:.2f} % same classes, outputs within {off:.2e}")
                good &= same == 1 and off <= arguments.step
        if arguments.cifar:
            for data in ("original_test_1017", "test_batch"):
                images, labels = read_cifar(pathlib.Path(arguments.cifar) / f"{data}.bin.gz")
                found = outputs(model, images).argmax(-1)
                print(f"{name}, {data}: {100 * (found == labels).mean():.2f} %")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
