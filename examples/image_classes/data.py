"""Images of many classes: from folders, or glyphs of the fonts included in matplotlib."""

import random
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from examples.common.errors import DataError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
# Each font draws characters in its own shape.
FONTS = [
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSansMono-Oblique",
    "DejaVuSansMono-BoldOblique",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "DejaVuSerif-BoldItalic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "STIXGeneralBolIta",
]


@dataclass
class Part:
    images: Tensor  # uint8 [n, channels, size, size], with a dark background
    labels: Tensor  # int64 [n]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class Dataset:
    name: str
    classes: list[str]
    train: Part
    valid: Part
    test: Part

    @property
    def counts(self) -> Tensor:
        return torch.bincount(self.train.labels, minlength=len(self.classes))

    @property
    def fingerprint(self) -> int:
        """A checksum of classes and images, to which a checkpoint is bound."""
        crc = zlib.crc32("\n".join(self.classes).encode())
        for part in (self.train, self.valid, self.test):
            crc = zlib.crc32(part.labels.numpy().tobytes(),
                             zlib.crc32(part.images.numpy().tobytes(), crc))
        return crc

    def means(self, size: int = 16) -> Tensor:
        """Returns the mean training image of each class, downscaled, as a vector [classes, channels
        size size]."""
        total = torch.zeros(len(self.classes), self.train.images.shape[1] * size * size)
        for images, labels in zip(self.train.images.split(1024), self.train.labels.split(1024)):
            total.index_add_(0, labels,
                             F.adaptive_avg_pool2d(images.float() / 255, size).flatten(1))
        return total / self.counts.clamp(min=1).unsqueeze(1)


def load_dataset(path: str | None, size: int, max_classes: int | None = None,
                 color: bool = False) -> Dataset:
    """Loads images and splits them into training, validation and test data.

    Args:
        path: a folder in which each subfolder with images is a class; or None for glyphs.
        size: the height and width of the images.
        max_classes: the largest number of classes; the first by name are used.
    """
    if path is None:
        return glyphs(size, max_classes)
    root = Path(path)
    if not root.is_dir():
        raise DataError(f"--data: {path} is not a folder")
    files = defaultdict(list)
    for file in sorted(root.rglob("*")):
        if file.suffix.lower() in SUFFIXES and file.is_file():
            files[file.parent.relative_to(root).as_posix()].append(file)
    # By decreasing number of images, as a head and log-uniform sampling require, then by name.
    classes = sorted(sorted(files)[:max_classes], key=lambda name: -len(files[name]))
    if len(classes) < 2:
        raise DataError(f"--data: expected images of at least 2 classes, a folder each, in {path}, "
                        f"found {len(classes)}")
    few = next((name for name in classes if len(files[name]) < 3), None)
    if few is not None:
        raise DataError("--data: expected at least 3 images of each class, to train, to validate "
                        f"and to test, found {len(files[few])} of {few}")
    parts = {split: ([], []) for split in ("train", "valid", "test")}
    for label, name in enumerate(tqdm(classes, desc="reading", disable=None)):
        for split, members in split_class(files[name]).items():
            parts[split][0].extend(read(file, size, color) for file in members)
            parts[split][1].extend([label] * len(members))
    parts = {
        split: Part(torch.stack(images), torch.tensor(labels))
        for split, (images, labels) in parts.items()
    }
    if parts["train"].images.float().mean() > 127.5:  # invert dark on light
        for part in parts.values():
            part.images.bitwise_not_()
    return Dataset(str(path), classes, **parts)


def split_class(files: list[Path]) -> dict[str, list[Path]]:
    """Assigns one file in five to test and one in ten to validation, at least one each, in a fixed
    pseudorandom order."""
    files = files.copy()
    random.Random(len(files)).shuffle(files)
    test, valid = max(1, len(files) // 5), max(1, len(files) // 10)
    return {"test": files[:test], "valid": files[test:test + valid], "train": files[test + valid:]}


def read(file: Path, size: int, color: bool) -> Tensor:
    """Reads a whole image as uint8 [channels, size, size], scaled to fit and padded."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            image = ImageOps.pad(image.convert("RGB" if color else "L"), (size, size))
    except (OSError, Image.DecompressionBombError) as error:
        raise DataError(f"--data: {file} is not an image ({error})") from error
    return torch.frombuffer(bytearray(image.tobytes()),
                            dtype=torch.uint8).view(size, size, -1).permute(2, 0, 1).contiguous()


def glyphs(size: int, max_classes: int | None = None) -> Dataset:
    """Draws the characters that at least eight of FONTS contain, without characters that look the
    same as an earlier one in the first font. Training images are as drawn; validation and test
    images are distorted."""
    from PIL import Image, ImageDraw, ImageFont
    from matplotlib import get_data_path
    from matplotlib.ft2font import FT2Font

    folder = Path(get_data_path()) / "fonts" / "ttf"
    paths = [folder / f"{name}.ttf" for name in FONTS if (folder / f"{name}.ttf").is_file()]
    characters = [set(FT2Font(str(path)).get_charmap()) for path in paths]
    fonts = [ImageFont.truetype(str(path), round(0.7 * size)) for path in paths]
    codes = [
        code for code in sorted(characters[0]) if sum(
            code in known
            for known in characters) >= 8 and chr(code).isprintable() and not chr(code).isspace()
    ]
    seen: set[bytes] = set()
    classes, images, labels = [], [], []
    for code in tqdm(codes, desc="drawing", disable=None):
        drawn = []
        for font, known in zip(fonts, characters):
            if code in known:
                image = Image.new("L", (size, size))
                ImageDraw.Draw(image).text((size / 2, size / 2), chr(code), fill=255, font=font,
                                           anchor="mm")
                drawn.append(image.tobytes())
        if not any(drawn[0]) or drawn[0] in seen:
            continue
        seen.add(drawn[0])
        labels.extend([len(classes)] * len(drawn))
        classes.append(f"U+{code:04X}")
        images.extend(drawn)
        if len(classes) == max_classes:
            break
    train = Part(
        torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8).view(-1, 1, size, size),
        torch.tensor(labels))
    parts = {}
    for split, seed in (("valid", 1), ("test", 2)):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(train),
                              generator=generator)[:len(train) // (4 if split == "valid" else 1)]
        distorted = [
            distort(part.float(), generator).round().to(torch.uint8)
            for part in train.images[rows].split(1024)
        ]
        parts[split] = Part(torch.cat(distorted), train.labels[rows])
    return Dataset("glyphs", classes, train, **parts)


def distort(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Rotates, shears, scales and shifts each image by small random amounts: [n, channels, size,
    size], padded with black."""
    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(images), generator=generator)

    angle, scale = uniform(-0.25, 0.25), uniform(0.85, 1.2)
    stretch, shear = uniform(0.9, 1.1), uniform(-0.25, 0.25)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    theta = torch.stack([
        torch.stack([cos * stretch, shear - sin, uniform(-0.12, 0.12)], 1),
        torch.stack([sin, cos / stretch, uniform(-0.12, 0.12)], 1)
    ], 1)
    grid = F.affine_grid(theta.to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
