"""What modules are to a checker of types: their buffers and submodules are found by torch's __getattr__, which says Tensor or Module of each. A call gives
what `forward` gives, a tensor, where torch says Any."""

from typing import TYPE_CHECKING, Any, Sequence, Union

import numpy as np
from torch import Tensor, nn

# What constructors take as numbers.
Numbers = Union[Tensor, "np.ndarray[Any, Any]", Sequence[int], Sequence[float]]

if TYPE_CHECKING:
    class Module(nn.Module):
        def __getattr__(self, name: str) -> Any: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...
else:
    Module = nn.Module
