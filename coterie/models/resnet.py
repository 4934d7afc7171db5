"""ResNet-18 with GroupNorm instead of batch normalisation, which mixes examples and has no per-example gradients."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu


class ResNet18(nn.Module):
    """Map images (n, C, H, W) to logits (n, num_classes): 11,181,642 parameters for three channels and ten classes.

    The layers are those of K. He et al. 2016 for ImageNet, as in torchvision.

    Args:
        channels: C.
        num_classes: number of logits.
        groups: number of groups of every GroupNorm.
    """

    def __init__(self, channels: int, num_classes: int, *, groups: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.norm = nn.GroupNorm(groups, 64)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        widths = (64, 64, 128, 128, 256, 256, 512, 512)
        self.blocks = nn.ModuleList(_Block(a, b, groups) for a, b in zip((64, *widths[:-1]), widths, strict=True))
        self.output = nn.Linear(512, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, C, H, W) to logits (n, num_classes)."""
        hidden = self.pool(relu(self.norm(self.stem(images))))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.output(hidden.mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    """Two convolutions with a residual connection; the first halves the image if the block has more channels."""

    def __init__(self, before: int, after: int, groups: int) -> None:
        super().__init__()
        stride = after // before
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, after)
        self.around = (
            nn.Identity()
            if before == after
            else nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.GroupNorm(groups, after))
        )

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.norm2(self.conv2(relu(self.norm1(self.conv1(x))))) + self.around(x))
