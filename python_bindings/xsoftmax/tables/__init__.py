"""Class tables in files, for tables larger than memory: only rows that are touched are read; and
tables in huge pages of memory, or in memory of the host for a GPU.

Example::

    # Creates the file, or opens it if it exists.
    weight = xs.tables.mapped("classes.safetensors", 120_000_000, 64)
    loss = xs.SampledSoftmaxLoss.from_linear(
        xs.tables.linear(weight), sampler=..., num_samples=512
    )
    # Its state is in a file too: classes.safetensors.row_adagrad.
    optimizer = xs.optim.RowAdagrad([weight], lr=0.1)
    ...
    # Writes table and state to the disk, and marks both files as whole.
    xs.tables.flush(weight)

The file has the safetensors format, with one tensor, ``weight``, at byte offset 4,096. Read it with
``safetensors.torch.load_file(path)`` or ``numpy.memmap(path, numpy.float32, "r", 4096, (N, D))``.
Its metadata contain the key ``state``: ``whole``, ``dirty`` (being written to, or left behind by a
process that died) or ``begun`` (its creation was not finished).
"""

from .._core.public import public_names
from .mapped_tables import flush, in_memory, linear, mapped, open, pinned, prefetch

__all__ = ["flush", "in_memory", "linear", "mapped", "open", "pinned", "prefetch"]
__dir__ = public_names(__all__)
