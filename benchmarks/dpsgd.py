"""How much faster ghost clipping sums the clipped gradients of a batch than Opacus: ratios, in one run.

    OMP_NUM_THREADS=1 python benchmarks/dpsgd.py [--networks cnn resnet text] [--batches 20 250] [--repeat 9]

Both ways alternate, after one pass of each that compares them. Prints one JSON document: for each network and batch
size the median seconds of both, the median of their ratios, the largest difference relative to the norm of the sum, and
the seconds of a client's check of the network.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from coterie import models as networks
from coterie.client.dpsgd import DPSGD, clipped_gradients
from coterie.client.gradients import check_supported
from coterie.tasks import AUTO


def cnn() -> nn.Module:
    """Convolutions 5×5 of 16 and 32 channels, fully connected 512→128→10: 80,202 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


class Block(nn.Module):
    """Two convolutions with GroupNorm and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(4, width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (n, width, height, width)."""
        return relu(x + self.norm2(self.conv2(relu(self.norm1(self.conv1(x))))))


def resnet() -> nn.Module:
    """A residual network with GroupNorm, 16 to 64 channels."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), Block(16),
        nn.Conv2d(16, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.ReLU(), Block(32),
        nn.Conv2d(32, 64, 3, 2, 1), nn.GroupNorm(4, 64), nn.ReLU(), Block(64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class Text(nn.Module):
    """Embedding, LSTM, linear layer: sentences (n, L) of 2,000 tokens to two logits."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        from opacus.layers import DPLSTM

        self.embedding, self.lstm = nn.Embedding(2000, 32), DPLSTM(32, width, batch_first=True)
        self.output = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify by the last state."""
        logits: Tensor = self.output(self.lstm(self.embedding(tokens))[0][:, -1])
        return logits


#: Networks and shapes of a record; tokens have one dimension.
NETWORKS = {
    "cnn": (cnn, (1, 28, 28)),
    "resnet": (resnet, (3, 32, 32)),
    "text": (Text, (30,)),
    "cnn-small": (lambda: networks.build("cnn-small", (1, 28, 28), 10), (1, 28, 28)),
    "lstm-char": (lambda: networks.build("lstm-char", (80,), 80), (80,)),
    "resnet18-gn": (lambda: networks.build("resnet18-gn", (3, 32, 32), 10), (3, 32, 32)),
}


def first_class(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every record with class 0."""
    return cross_entropy(output, targets.long(), reduction="none")


def compare(name: str, batch: int, repeat: int, clip_norm: float) -> dict[str, float]:
    """Measure one network and batch size."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    x = torch.randn(batch, *shape) if len(shape) > 1 else torch.randint(80, (batch, *shape))
    began = time.perf_counter()
    check_supported(model, shape, AUTO, "images" if len(shape) > 1 else "tokens")
    seconds_check = time.perf_counter() - began
    settings = DPSGD(batch, batch, 1, 0.1, clip_norm, 0.0)

    def once(ghost: bool) -> tuple[float, Tensor]:
        began = time.perf_counter()
        total = clipped_gradients(model, x, first_class, settings, ghost=ghost)
        return time.perf_counter() - began, total

    (_, plain), (_, fast) = once(False), once(True)
    pairs = [(once(False)[0], once(True)[0]) for _ in range(repeat)]
    return {
        "parameters": networks.num_parameters(model),
        "seconds_opacus": statistics.median(opacus for opacus, _ in pairs),
        "seconds_ghost": statistics.median(ghost for _, ghost in pairs),
        "times_faster": statistics.median(opacus / ghost for opacus, ghost in pairs),
        "seconds_check": seconds_check,
        "relative_difference": float((plain - fast).norm() / plain.norm()),
    }


def main() -> None:
    """Measure all networks and batch sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["cnn", "resnet", "text"])
    parser.add_argument("--batches", nargs="+", type=int, default=[20, 250])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--clip-norm", type=float, default=0.1)
    chosen = parser.parse_args()
    results = {
        f"{name}, batches of {batch}": compare(name, batch, chosen.repeat, chosen.clip_norm)
        for name in chosen.networks
        for batch in chosen.batches
    }
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, **results}, indent=2))


if __name__ == "__main__":
    main()
