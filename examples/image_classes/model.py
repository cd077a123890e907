"""VGG-16 (Simonyan and Zisserman, 2015) without its last layer, with the usual layer names."""

import torch
from torch import Tensor, nn

# channels as multiples of the width; M: max pooling
CONFIGURATION = [1, 1, "M", 2, 2, "M", 4, 4, 4, "M", 8, 8, 8, "M", 8, 8, 8, "M"]


class VGG16(nn.Module):
    """Maps images [B, channels, size, size] in [0, 1] to features [B, 64 * width]. The loss
    replaces `classifier.6`.

    Args:
        width: the number of channels of the first layers; 64 is the VGG-16 of the paper.
        channels: the number of channels of the images.
        size: the height and width of the images. The last feature map is size / 32 wide, at least
            1.
        batch_norm: add batch normalisation after each convolution, as in the variant that trains
            from scratch on little data.
        dropout: the dropout probability.
    """
    def __init__(self, width: int = 64, channels: int = 3, size: int = 224, batch_norm: bool = True,
                 dropout: float = 0.5):
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
        self.classifier = nn.Sequential(nn.Linear(8 * width * side * side, self.num_features),
                                        nn.ReLU(inplace=True), nn.Dropout(dropout),
                                        nn.Linear(self.num_features, self.num_features),
                                        nn.ReLU(inplace=True), nn.Dropout(dropout))
        for module in self.modules():
            # Linear layers too: the default of nn.Linear reduces the mean square of activations to
            # a sixth per layer.
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(
                    module.weight, mode="fan_out" if isinstance(module, nn.Conv2d) else "fan_in",
                    nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
