"""Static types of modules.

torch's ``__getattr__`` declares buffers and submodules as Tensor or Module, and a call returns Any.
Here an attribute is Any, and a call returns a tensor, as ``forward`` does.
"""

from typing import TYPE_CHECKING, Any, Sequence, Union

import numpy as np
from torch import Tensor, nn

# Sequences of numbers that constructors accept.
Numbers = Union[Tensor, "np.ndarray[Any, Any]", Sequence[int], Sequence[float]]

if TYPE_CHECKING:

    class Module(nn.Module):
        def __getattr__(self, name: str) -> Any:
            ...

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            ...
else:
    Module = nn.Module
