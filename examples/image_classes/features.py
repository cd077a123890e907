"""Writes the features that a trained VGG-16 passes to its last layer, to train other last layers on
them.

    python examples/image_classes/train.py --checkpoint out/vgg.ckpt
    python examples/image_classes/features.py --checkpoint out/vgg.ckpt --output out/features.pt

The file (for torch.load) holds `x` float32 [n, D] and `y` int64 [n] for each of "train", "valid"
and "test". Training images occur in --copies distorted copies.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

# the repository's root, so that this file can be started from anywhere
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.common.arguments import positive, report_errors
from examples.common.training import load_run
from examples.image_classes import data, train


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="checkpoint written by "
        "train.py; of several losses, the last is used")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--copies", type=positive(int), default=1, help="number of distorted "
        "copies of each training image (default: "
        "%(default)s)")
    return parser.parse_args(argv)


@torch.no_grad()
def features(run: train.Run, part: data.Part, distorted: bool) -> tuple[Tensor, Tensor]:
    run.encoder.eval()
    rows = []
    for images in tqdm(part.images.split(256), disable=None):
        images = images.float() / 255
        rows.append(
            run.encoder((data.distort(images) if distorted else images).to(run.device)).cpu())
    return torch.cat(rows), part.labels


def write(args: argparse.Namespace) -> int:
    run, _ = load_run(args.checkpoint, train, "cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(run.args.seed)
    found = {}
    for split, copies in (("train", args.copies), ("valid", 1), ("test", 1)):
        parts = [
            features(run, run.parts[split], split == "train" and not run.args.no_distortion)
            for _ in range(copies)
        ]
        found[split] = {
            "x": torch.cat([x for x, _ in parts]), "y": torch.cat([y for _, y in parts])
        }
    torch.save(found, args.output)
    print(f"{args.output}: " + ", ".join(f"{split} {list(part['x'].shape)}"
                                         for split, part in found.items()))
    return 0


def main(argv: list[str] | None = None) -> int:
    return report_errors(write, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
