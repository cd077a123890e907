"""VGG-16 (Simonyan and Zisserman, 2015) up to its last layer, under the names that its layers usually have."""

import torch
from torch import Tensor, nn

CONFIGURATION = [1, 1, "M", 2, 2, "M", 4, 4, 4, "M", 8, 8, 8, "M", 8, 8, 8, "M"]  # channels in units of the width; M: pooling


class VGG16(nn.Module):
    """images [B, channels, size, size] in [0, 1] -> features [B, 64 * width]; the loss stands in the place of `classifier.6`.

    Args:
        width: channels of the first layers; 64 is the VGG-16 of the paper.
        size: of the images; the last feature map has size / 32 to a side, at least 1.
        batch_norm: after each convolution, as in the variant that trains from scratch on little data.
    """

    def __init__(self, width: int = 64, channels: int = 3, size: int = 224, batch_norm: bool = True, dropout: float = 0.5):
        super().__init__()
        layers: list[nn.Module] = []
        for units in CONFIGURATION:
            if units == "M":
                layers.append(nn.MaxPool2d(2, ceil_mode=True))
            else:
                layers.append(nn.Conv2d(channels, units * width, 3, padding=1))
                layers += [nn.BatchNorm2d(units * width)] if batch_norm else []
                layers.append(nn.ReLU(inplace=True))
                channels = units * width
        self.features = nn.Sequential(*layers)
        side, self.num_features = max(1, size // 32), 64 * width
        self.avgpool = nn.AdaptiveAvgPool2d(side)
        self.classifier = nn.Sequential(nn.Linear(8 * width * side * side, self.num_features), nn.ReLU(inplace=True), nn.Dropout(dropout),
                                        nn.Linear(self.num_features, self.num_features), nn.ReLU(inplace=True), nn.Dropout(dropout))
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):  # the two linear layers, too: as nn.Linear starts, each leaves a sixth of the mean square
                nn.init.kaiming_normal_(module.weight, mode="fan_out" if isinstance(module, nn.Conv2d) else "fan_in", nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
