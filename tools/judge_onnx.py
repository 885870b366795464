"""Checks ONNX files with the `onnx` checker and runs them with onnxruntime.

    python -m venv venv && venv/bin/pip install -r tools/requirements.txt
    venv/bin/python tools/judge_onnx.py FILE.onnx [--inputs FILE.npy] [--expected FILE.npy] [--step S]
    venv/bin/python tools/judge_onnx.py resnet8.onnx --cifar DIR     # accuracy on both test sets
    venv/bin/python tools/judge_onnx.py resnet8.onnx --time          # one thread, batches of 1 and 32

    mkdir DIR && LEAN_ONNX=DIR cargo test --workspace --features wgpu,train --test deploy
    venv/bin/python tools/judge_onnx.py --folder DIR                 # every file of those tests

    cargo bench --bench inference -- --threads 1 --onnx DIR --json ROWS.json
    venv/bin/python tools/judge_onnx.py --folder DIR --rows ROWS.json   # engine and onnxruntime, a table

With `--expected`, the classes of all rows must be the same, and the outputs within `--step`. With
`--cifar`, the folder has `original_test_1017.bin.gz` and `test_batch.bin.gz` in CIFAR-10's binary
layout, and pixels are floats from 0 to 255. With `--rows`, onnxruntime has as many threads as the title of
the rows says; where it says none, `--threads` does. In a folder each file has its inputs, what comes out, and
how far apart that may be: rounding of floats, or one step of a quantized output. Exits with 1 where
something is wrong.
"""

import argparse
import gzip
import json
import pathlib
import re
import statistics
import sys
import time

import numpy as np
import onnx
import onnxruntime


def session(path, optimized, threads=1):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
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


def distance(found, expected):
    """The largest difference; numbers that are not finite must be the same."""
    if found.shape != expected.shape:
        return np.inf
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0, np.abs(found - expected))
    return np.nan_to_num(off, nan=np.inf).max(initial=0)


def judge_folder(folder):
    """Each file as it is written, and as onnxruntime optimizes it."""
    files = sorted(folder.glob("*.json"))
    counts = {}
    for path in files:
        about = json.loads(path.read_text())
        name = path.name.removesuffix(".json")
        model = str(path.with_name(f"{name}.onnx"))
        kind = "quantized" if about["quantized"] else "float"
        count = counts.setdefault(kind, {"files": 0, "checked": 0, "same": 0, "as written": 0, "optimized": 0})
        count["files"] += 1
        try:
            onnx.checker.check_model(onnx.load(model), full_check=True)
            count["checked"] += 1
        except Exception as error:
            print(f"{name}: the checker says: {error}")
        given = [np.load(path.with_name(f"{name}.input{k}.npy")) for k in range(len(about["inputs"]))]
        given = dict(zip(about["inputs"], given))
        expected = np.load(path.with_name(f"{name}.expected.npy"))
        for optimized in (False, True):
            way = "optimized" if optimized else "as written"
            try:
                found = session(model, optimized).run(None, given)[0]
            except Exception as error:
                print(f"{name}, {way}: {error}")
                continue
            off = distance(found, expected)
            count["same"] += off == 0 and not optimized
            if off <= about["within"]:
                count[way] += 1
            else:
                print(f"{name}, {way}: {off:.2e} apart, more than {about['within']:.2e}")
    for kind, count in counts.items():
        print(
            f"{kind}: {count['files']} files, {count['checked']} without a complaint of the checker, "
            f"{count['as written']} agree as written ({count['same']} to the bit), "
            f"{count['optimized']} optimized"
        )
    agree = ("checked", "as written", "optimized")
    good = all(count[key] == count["files"] for count in counts.values() for key in agree)
    return good and bool(files)


def median_time(path, batch, samples, threads=1):
    """Milliseconds of a run, the median, optimized; the first five do not count."""
    model = session(path, True, threads)
    [given] = model.get_inputs()
    shape = [batch if k == 0 else size for k, size in enumerate(given.shape)]
    inputs = {given.name: np.random.default_rng(0).random(shape, np.float32)}
    times = []
    for _ in range(samples + 5):
        start = time.perf_counter()
        model.run(None, inputs)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[5:])


def threads_of(table):
    """How many threads the engine had, as the title says; None where it does not."""
    said = re.search(r"(\d+) threads$", table.get("title", ""))
    return int(said[1]) if said else None


def time_rows(folder, table, samples, threads):
    """What `--bench inference` measured of the engine, beside onnxruntime with the files that it wrote."""
    times = {}
    for row in table["rows"]:
        if row["onnx"]:
            theirs = median_time(str(folder / row["onnx"]), row["batch"], samples, threads)
            times.setdefault((row["model"], row["batch"]), {})[row["variant"]] = (row["ms"], theirs)
    print("| model, batch | engine FP32 [ms] | W8A8 | onnxruntime FP32 | INT8 | onnxruntime over engine, FP32 | INT8 |")
    print("|---|---|---|---|---|---|---|")
    for (model, batch), of in times.items():
        # What the engine does not run has no row.
        nothing = (float("nan"), float("nan"))
        (full, full_there), (integer, integer_there) = (of.get(kind, nothing) for kind in ("fp32 engine", "w8a8"))
        numbers = [f"{ms:.3f}" for ms in (full, integer, full_there, integer_there)]
        numbers += [f"{full_there / full:.2f}", f"{integer_there / integer:.2f}"]
        print(f"| {model}, {batch} | {' | '.join(numbers)} |")


def existing(text):
    if not pathlib.Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text} is not there")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=existing)
    parser.add_argument("--folder", type=existing)
    parser.add_argument("--rows", type=existing)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--inputs", type=existing)
    parser.add_argument("--expected", type=existing)
    parser.add_argument("--step", type=float, default=1e-4)
    parser.add_argument("--cifar", type=existing)
    arguments = parser.parse_args()
    if arguments.rows:
        if not arguments.folder:
            parser.error("--rows needs --folder, where the files are")
        table = json.loads(pathlib.Path(arguments.rows).read_text())
        threads = threads_of(table) or arguments.threads
        if not threads:
            parser.error("the rows do not say how many threads the engine had: --threads N")
        if arguments.threads not in (None, threads):
            parser.error(f"the engine had {threads} threads, and onnxruntime is to have {arguments.threads}")
        time_rows(pathlib.Path(arguments.folder), table, arguments.samples, threads)
        sys.exit(0)
    if arguments.folder:
        sys.exit(0 if judge_folder(pathlib.Path(arguments.folder)) else 1)
    if not arguments.file:
        parser.error("a file or --folder")
    onnx.checker.check_model(onnx.load(arguments.file), full_check=True)
    print("the checker finds nothing")
    if arguments.time:
        for batch in (1, 32):
            ms = median_time(arguments.file, batch, arguments.samples)
            print(f"{arguments.file}, batch {batch}: {ms:.3f} ms, the median of {arguments.samples}")
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
