"""The checkpoint file of XRLinear.train."""

import os
import zipfile
from typing import Any, Dict, List, NamedTuple, Union

import torch
from torch import Tensor

from .._core.files import open_regular, replace_file
from ..trees.label_tree import LabelTree

_KIND = "xsoftmax training of XRLinear, 1"


def _text(value: Any) -> str:
    """Returns the same text for 1 and 1.0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return repr(float(value)).removesuffix(".0") if is_number else str(value)


class TrainingState(NamedTuple):
    """The state of a partly trained model."""

    tree: List[Tensor]
    seed: int
    parts: List[List[Tensor]]
    """Parts of the finished layers."""
    stats: List[Dict[str, float]]


class TrainingFile:
    """Keeps the state of a training with the given arguments."""
    def __init__(self, path: Union[str, "os.PathLike[str]"], arguments: Dict[str, Any]):
        self.path = os.fspath(path)
        self.arguments = {name: _text(value) for name, value in arguments.items()}

    def load(self) -> Union[TrainingState, None]:
        """Returns the state in the file; None if there is no file yet.

        Raises:
            ValueError: the file is not a checkpoint of XRLinear.train, or has other arguments.
        """
        if not os.path.exists(self.path):
            folder = os.path.dirname(os.path.abspath(self.path))
            if not os.path.isdir(folder):
                raise FileNotFoundError(f"XRLinear.train: there is no folder {folder} for the file "
                                        "of resume")
            return None
        with open_regular("XRLinear.train", self.path) as file:
            try:
                damaged = zipfile.ZipFile(file).testzip()  # torch.load ignores the checksums
                if damaged is not None:
                    raise ValueError(f"{damaged} is damaged")
                file.seek(0)
                content = torch.load(file, weights_only=True)
                if content["kind"] != _KIND:
                    raise ValueError(content["kind"])
                arguments, state = content["arguments"], TrainingState(**content["state"])
                layers = LabelTree(*state.tree).depth
                if not len(state.parts) == len(state.stats) <= max(layers, 1):
                    raise ValueError(f"{len(state.parts)} layers and {len(state.stats)} statistics "
                                     f"of layers, the tree has {layers}")
                if not isinstance(state.seed, int):
                    raise ValueError(f"a seed of type {type(state.seed).__name__}")
            except Exception as error:
                raise ValueError(f"XRLinear.train: expected resume as a file that train wrote, got "
                                 f"{self.path}: {type(error).__name__}: {error}") from error
        for name, value in self.arguments.items():
            other = arguments.get(name, "none")
            if other != value:
                hint = (": the tree depends on its options, label vectors and random seed"
                        if name == "tree" else "")
                raise ValueError(f"XRLinear.train: expected the arguments of the training in "
                                 f"{self.path}, got {name}={value}, the file has {other}{hint}")
        return state

    def save(self, state: TrainingState) -> None:
        with replace_file("XRLinear.train", self.path) as draft:
            torch.save({"kind": _KIND, "arguments": self.arguments, "state": state._asdict()},
                       draft)
