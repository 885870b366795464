"""The networks of `benches/amp.rs` in PyTorch: time of a training step with AdamW, and what it holds.

`python tools/amp_torch.py --large` on a machine with a GPU prints the rows of the benchmark for the same
card: eager F32 as PyTorch has it by default (no TF32), F32 with TF32, and `torch.autocast` with a
`GradScaler` in F16 and without one in BF16. Medians over the samples, variants in turn.
"""

import argparse
import statistics
import time

import torch
from torch import nn


def mlp(large):
    sizes = [4096] * 4 if large else [512, 1024, 1024, 10]
    layers = [module for a, b in zip(sizes, sizes[1:]) for module in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers), torch.rand(1024 if large else 128, sizes[0])


def conv_net(large):
    a, b, side, batch = (128, 256, 64, 64) if large else (32, 64, 32, 16)
    network = nn.Sequential(
        nn.Conv2d(3, a, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Linear(b * side * side // 16, 10),
    )
    return network, torch.rand(batch, 3, side, side)


def transformer(large):
    width, inside, heads, length = (1024, 4096, 16, 512) if large else (128, 512, 4, 64)
    network = nn.TransformerEncoderLayer(
        width, heads, inside, dropout=0.0, activation="gelu", batch_first=True
    )
    return network, torch.rand(16, length, width)


NETWORKS = {"mlp": mlp, "conv net": conv_net, "transformer block": transformer}
VARIANTS = [("F32", None, False), ("F32, TF32", None, True), ("F16", torch.float16, False), ("BF16", torch.bfloat16, False)]


class Variant:
    def __init__(self, network, large, dtype, tf32):
        torch.manual_seed(1)
        self.model, self.input = NETWORKS[network](large)
        self.model, self.input = self.model.cuda(), self.input.cuda()
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.dtype, self.tf32 = dtype, tf32
        self.scaler = torch.amp.GradScaler("cuda", init_scale=256.0, enabled=dtype == torch.float16)

    def loss(self):
        with torch.autocast("cuda", self.dtype or torch.float16, enabled=self.dtype is not None):
            return self.model(self.input).square().mean()

    def step(self):
        self.optim.zero_grad(set_to_none=True)
        self.scaler.scale(self.loss()).backward()
        self.scaler.step(self.optim)
        self.scaler.update()

    def held(self):
        """Bytes that a forward pass leaves for the backward pass."""
        self.step()
        self.optim.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        loss = self.loss()
        after = torch.cuda.memory_allocated()
        loss.backward()
        return after - before

    def sample(self, steps):
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / steps


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print("| network | dtype | step ms | time of F32 | held MB | of F32 |\n|---|---|---|---|---|---|")
    for network in NETWORKS:
        variants = [Variant(network, arguments.large, dtype, tf32) for _, dtype, tf32 in VARIANTS]
        held = [variant.held() for variant in variants]
        samples = [[] for _ in variants]
        for round in range(arguments.samples + 1):
            for variant, taken in zip(variants, samples):
                milliseconds = variant.sample(arguments.steps)
                if round > 0:
                    taken.append(milliseconds)
        for (name, _, _), taken, bytes in zip(VARIANTS, samples, held):
            median = statistics.median(taken)
            ratio = statistics.median(own / first for own, first in zip(taken, samples[0]))
            print(f"| {network} | {name} | {median:.3f} | {ratio:.3f} | {bytes / 1e6:.1f} | {bytes / held[0]:.3f} |")


if __name__ == "__main__":
    main()
