"""ResNets, written for the presets: bottleneck networks for 224-pixel images, and 1,001 layers for 32-pixel ones.

Sources: He et al., "Deep Residual Learning for Image Recognition" (2016), with the stride in the 3x3 convolution as
torchvision has it; He et al., "Identity Mappings in Deep Residual Networks" (2016) for the pre-activation bottleneck
of the 1,001-layer network. Batch norms and ReLUs work in place where the papers' do.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from autoremat._errors import UsageError

_IMAGENET_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_EXPANSION = 4


class ImageOutput(NamedTuple):
    """What an image classifier returns.

    Attributes:
        loss: Mean cross entropy; None without labels.
        logits: Scores by class.
    """

    loss: Tensor | None
    logits: Tensor


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3, 1x1 beside an identity; activations after."""

    def __init__(self, in_channels: int, width: int, *, stride: int = 1) -> None:
        super().__init__()
        out_channels = width * _EXPANSION
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to images of shape (batch, channels, height, width)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += self.shortcut(x)
        out: Tensor = self.relu(y)
        return out


class PreActBottleneck(nn.Module):
    """As `Bottleneck`, with norm and activation before each convolution and a bare identity."""

    def __init__(self, in_channels: int, width: int, *, stride: int = 1) -> None:
        super().__init__()
        out_channels = width * _EXPANSION
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to images of shape (batch, channels, height, width)."""
        h = self.conv1(self.relu(self.bn1(x)))
        h = self.conv2(self.relu(self.bn2(h)))
        y: Tensor = self.conv3(self.relu(self.bn3(h)))
        y += self.shortcut(x)
        return y


class ResNet(nn.Module):
    """A stem, stages of blocks, and a linear classifier.

    Args:
        stem: From images to the first stage.
        stages: In order.
        head: From the last stage's images to vectors.
        num_features: Length of those vectors.
        num_classes: Number of classes.
    """

    def __init__(
        self, stem: nn.Module, stages: list[nn.Sequential], *, head: nn.Module, num_features: int, num_classes: int
    ) -> None:
        super().__init__()
        self.stem = stem
        self.stages = nn.ModuleList(stages)
        self.head = head
        self.classifier = nn.Linear(num_features, num_classes)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageOutput:
        """Classify images.

        Args:
            pixel_values: Images, shape (batch, 3, height, width).
            labels: Class of each.
        """
        x = self.stem(pixel_values)
        for stage in self.stages:
            x = stage(x)
        logits = self.classifier(self.head(x))
        return ImageOutput(None if labels is None else functional.cross_entropy(logits, labels), logits)


def imagenet_resnet(depth: int, *, num_classes: int = 1000) -> ResNet:
    """A bottleneck ResNet for 224-pixel images.

    Args:
        depth: 50, 101 or 152 layers.
        num_classes: Number of classes.

    Raises:
        UsageError: For another depth.
    """
    if depth not in _IMAGENET_BLOCKS:
        raise UsageError(f"No ResNet of {depth} layers for 224-pixel images: one of {sorted(_IMAGENET_BLOCKS)}.")
    stem = nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    stages, channels = [], 64
    for index, num_blocks in enumerate(_IMAGENET_BLOCKS[depth]):
        width = 64 * 2**index
        stages.append(_stage(Bottleneck, channels, width=width, num_blocks=num_blocks, stride=1 if index == 0 else 2))
        channels = width * _EXPANSION
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return ResNet(stem, stages, head=head, num_features=channels, num_classes=num_classes)


def cifar_resnet(depth: int, *, num_classes: int = 10) -> ResNet:
    """A pre-activation bottleneck ResNet for 32-pixel images.

    Args:
        depth: ``9 n + 2`` layers; 1,001 is the paper's.
        num_classes: Number of classes.

    Raises:
        UsageError: For a depth that is not of this form.
    """
    if depth < 11 or (depth - 2) % 9:
        raise UsageError(f"A ResNet for 32-pixel images has 9 n + 2 layers (11, 20, ... 1001), not {depth}.")
    stages, channels = [], 16
    for index in range(3):
        width = 16 * 2**index
        stages.append(
            _stage(PreActBottleneck, channels, width=width, num_blocks=(depth - 2) // 9, stride=1 if index == 0 else 2)
        )
        channels = width * _EXPANSION
    head = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    return ResNet(stem, stages, head=head, num_features=channels, num_classes=num_classes)


def _stage(
    block: type[Bottleneck | PreActBottleneck], channels: int, *, width: int, num_blocks: int, stride: int
) -> nn.Sequential:
    first = block(channels, width, stride=stride)
    return nn.Sequential(first, *(block(width * _EXPANSION, width) for _ in range(num_blocks - 1)))
