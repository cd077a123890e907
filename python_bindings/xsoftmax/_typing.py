"""What modules are to a checker of types: their buffers and submodules are found by torch's __getattr__, which says Tensor or Module of each."""

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    class Module(nn.Module):
        def __getattr__(self, name: str) -> Any: ...
else:
    Module = nn.Module
