#!/usr/bin/env python3
"""The tables of docs/scaling.md, and a simulation of data-parallel training steps. Python alone.

Each device computes its share of a step in a time that varies from step to step; what it then
exchanges goes around a ring in 2 (N - 1) hops of P / N gradients (Patarasu and Yuan, 2009), each of
which waits for the neighbour it comes from. With --overlap the exchange begins with the gradients of
the last layers, while those of the first are computed.

    python3 tools/scaling.py
    python3 tools/scaling.py --weights 7e9 --bandwidth 50e9 --jitter 0.1
"""

import argparse
import random


def positive(text):
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def not_negative(text):
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def memory(weights, devices, qat=False, masked=False):
    """Bytes of a training in mixed precision on each device, without activations."""
    master, gradients, half = 4, 4, 2
    moments = 8 / devices
    # Values, and a bool of each until the backward pass: 1 byte, 4 in WGSL.
    fake = 4 + 1 if qat else 0
    # An I32 for each weight, then the same.
    mask = 4 + 4 + 1 if masked else 0
    return (master + gradients + half + moments + fake + mask) * weights


def ring(ready, chunk_bytes, bandwidth, latency):
    """When each device has all sums, from when each has its gradients."""
    devices = len(ready)
    now = list(ready)
    for _ in range(2 * (devices - 1)):
        # A hop from the left neighbour starts when both are there.
        now = [
            max(now[at], now[at - 1]) + latency + chunk_bytes / bandwidth
            for at in range(devices)
        ]
    return now


def step(now, devices, given, rng):
    """One optimizer step: all devices end it at their own time."""
    compute = [given.compute * rng.lognormvariate(0.0, given.jitter) for _ in now]
    if devices == 1:
        return [now[0] + compute[0]]
    chunk = 4.0 * given.weights / devices
    if not given.overlap:
        ready = [start + own for start, own in zip(now, compute)]
        return ring(ready, chunk, given.bandwidth, given.latency)
    # A third of a step is the forward pass; buckets follow one another through the backward pass.
    buckets = 8
    done = list(now)
    for bucket in range(1, buckets + 1):
        share = 1 / 3 + 2 / 3 * bucket / buckets
        ready = [
            max(start + share * own, before)
            for start, own, before in zip(now, compute, done)
        ]
        done = ring(ready, chunk / buckets, given.bandwidth, given.latency)
    return done


def throughput(devices, given):
    """Shares computed in a second."""
    rng = random.Random(given.seed)
    now = [0.0] * devices
    for _ in range(given.steps):
        now = step(now, devices, given, rng)
    return devices * given.steps / max(now)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=positive, default=1e8, help="P (default: 100 M)")
    parser.add_argument(
        "--compute",
        type=positive,
        help="seconds of one device for its share of a step (default: 6 P · --tokens / --flops)",
    )
    parser.add_argument("--tokens", type=positive, default=16384, help="of a share")
    parser.add_argument("--flops", type=positive, default=2e14, help="in a second")
    parser.add_argument("--bandwidth", type=positive, default=25e9, help="bytes in a second")
    parser.add_argument("--latency", type=not_negative, default=1e-5, help="seconds of a hop")
    parser.add_argument(
        "--jitter", type=not_negative, default=0.05, help="standard deviation of log time"
    )
    parser.add_argument("--overlap", action="store_true", help="exchange while computing")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.steps < 1:
        parser.error("--steps must be at least 1")
    if given.compute is None:
        given.compute = 6 * given.weights * given.tokens / given.flops

    print("bytes of each device, without activations [GB]")
    print(f"{'P':>8} {'N = 1':>9} {'N = 8':>9} {'N = 64':>9} {'mask, QAT':>10}")
    for weights in (1e8, 7e9, 7e10):
        row = [memory(weights, devices) for devices in (1, 8, 64)]
        row.append(memory(weights, 1, qat=True, masked=True))
        cells = "".join(f"{size / 1e9:10.1f}" for size in row)
        print(f"{weights:8.0e}{cells}")

    print(f"\nP = {given.weights:.0e}, a share in {given.compute:.3f} s, jitter {given.jitter}")
    print(f"{'N':>4} {'exchange [s]':>13} {'step [s]':>9} {'speed-up':>9} {'efficiency':>11}")
    one = throughput(1, given)
    for devices in (1, 2, 4, 8, 16, 64):
        chunk = 4.0 * given.weights / devices
        exchange = ring([0.0] * devices, chunk, given.bandwidth, given.latency)[0]
        many = throughput(devices, given)
        print(
            f"{devices:4} {exchange:13.4f} {devices / many:9.3f} "
            f"{many / one:9.2f} {many / one / devices:11.2f}"
        )


if __name__ == "__main__":
    main()
