"""Changes of an argument to hostile values, by the kind of the argument."""

import math

import torch

import op_samples

LARGEST, SMALLEST = 2**63 - 1, -(2**63)

INTEGERS = [
    -1, 0, 1, 2, 3, 7, 63, 1000, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**62, LARGEST, SMALLEST,
    2**64, -100, None, 1.5, math.nan, "1", True, [1],
    torch.tensor(3),
    torch.tensor(1.5),
    torch.tensor([1, 2]), b"1"
]
FLOATS = [
    math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 0.5, 1.0, 2.0, 1e-45, 1e-320, 1e38, 3.5e38,
    1e308, 10**400, 2**63, None, "1.0", True, [0.5],
    torch.tensor(0.5),
    torch.tensor([1.0, 2.0]), 1j
]
BOOLS = [
    None, "True", 2, -1, 1.5, [True],
    torch.tensor(True),
    torch.tensor([1, 0]), LARGEST, True, False
]
STRINGS = [
    "", "x", "x\0y", "é\u200b", "\udc80", "x" * 100_000, "%s%n", "/", "/dev/null", "/nowhere/x",
    ".", None, 1, 1.5, True, b"x", ["x"]
]
OTHERS = [None, "text", 1, 1.5, True, [], {}, object(), 1j]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool, torch.complex64,
    torch.complex128, torch.float8_e4m3fn
]


def filled(value):
    return lambda t: torch.full_like(t, value)


def with_one(value, place):
    def change(t):
        t = t.clone()
        t.view(-1)[place] = value
        return t

    return change


def misaligned(t):
    memory = torch.empty(t.nbytes + 1, dtype=torch.uint8)
    whole = torch.frombuffer(memory.numpy().data, dtype=t.dtype, count=t.numel(),
                             offset=1).view(t.shape)
    return whole.copy_(t)


def huge(axis, size):
    def change(t):
        shape = list(t.shape)
        shape[axis] = size
        return t.narrow(axis, 0, 1).expand(shape)

    return change


def inference(t):
    with torch.inference_mode():
        return t.clone()


VALUES = {torch.bool: [True, False]}
for dtype in (torch.float32, torch.float64):
    VALUES[dtype] = [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-45, 3e38, -3e38, 0.5, 1.5]
for dtype in (torch.int64, torch.int32, torch.uint8):
    VALUES[dtype] = [
        v for v in (-1, 0, 1, 2, 255, 2**31 - 1, -(2**31), 2**31, 2**40, LARGEST, SMALLEST, -100,
                    39, 40) if torch.iinfo(dtype).min <= v <= torch.iinfo(dtype).max
    ]

ELEMENTS = [-1, 0, op_samples.N, 2**40, math.nan, math.inf]  # for single elements


def element_change(t, draw):
    """Returns a change of one element (the first, the last or any): its name and its function."""
    place = draw.choice([0, -1, draw.randrange(t.numel())])
    value = draw.choice([
        v for v in ELEMENTS
        if t.is_floating_point() or t.dtype.is_complex or (not isinstance(v, float) and (
            t.dtype == torch.bool or torch.iinfo(t.dtype).min <= v <= torch.iinfo(t.dtype).max))
    ])
    return f"[{place}] = {value}", with_one(value, place)


def tensor_changes(sample):
    """Returns {name: function} of changes to a tensor."""
    changes = {
        f"to {dtype}": (lambda t, dtype=dtype: t.to(dtype))
        for dtype in DTYPES if dtype != sample.dtype
    }
    for value in VALUES[sample.dtype]:
        changes[f"all {value}"] = filled(value)
        if sample.numel() > 1:
            changes[f"first {value}"], changes[f"last {value}"] = with_one(value,
                                                                           0), with_one(value, -1)
    changes |= {
        "0-dim": lambda t: t.reshape(-1)[0],
        "no elements": lambda t: t.new_empty(0),
        "flat": lambda t: t.reshape(-1),
        "deeper": lambda t: t[None],
        "wider": lambda t: t[..., None],
        "seven dimensions": lambda t: t.reshape(*[1] * 7, -1),
        "sparse COO": lambda t: t.to_sparse(),
        "sparse COO with one dense": lambda t: torch.stack([t, t]).to_sparse(1),
        "mkldnn": lambda t: t.to_mkldnn(),
        "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
        "meta": lambda t: t.to("meta"),
        "sparse meta": lambda t: t.to_sparse().to("meta"),
        "nested": lambda t: torch.nested.nested_tensor([t, t]),
        "negative view": lambda t: torch._neg_view(t.clone()),
        "imaginary part": lambda t: torch.complex(t, t).conj().imag,
        "conjugate": lambda t: torch.complex(t.float(), t.float()).conj(),
        "zero tensor": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
        "inference": inference,
        "misaligned": misaligned,
        "a leaf": lambda t: t.clone().requires_grad_(),
        "a branch": lambda t: t.clone().requires_grad_() * 1,
        "double neg": lambda t: torch._neg_view(-t),
        "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=t.is_floating_point()),
        "one element": lambda t: t.new_ones(1),
        "one by one": lambda t: t.new_ones(1, 1),
        "two by none": lambda t: t.new_empty(2, 0),
        "none by two": lambda t: t.new_empty(0, 2),
    }
    for axis in range(sample.dim()):
        size = sample.shape[axis]
        changes |= {
            f"fewer in {axis}": lambda t, axis=axis, size=size: t.narrow(axis, 0, max(size - 1, 0)),
            f"none in {axis}": lambda t, axis=axis: t.narrow(axis, 0, 0),
            f"more in {axis}": lambda t, axis=axis: torch.cat([t, t.narrow(axis, 0, 1)], axis),
            f"reversed in {axis}": lambda t, axis=axis: t.flip(axis),
            f"every other in {axis}": lambda t, axis=axis: t.repeat_interleave(2, axis).unfold(
                axis, 1, 2).squeeze(-1),
            f"expanded in {axis}": lambda t, axis=axis: t.narrow(axis, 0, 1).expand(t.shape),
            f"2^31 + 1 in {axis}": huge(axis, 2**31 + 1),
            f"2^40 in {axis}": huge(axis, 2**40),
            f"2^62 in {axis}": huge(axis, 2**62),
        }
    if sample.dim() == 2:
        changes |= {
            "transposed": lambda t: t.t(),
            "column major": lambda t: t.t().contiguous().t(),
            "sparse CSR": lambda t: t.to_sparse_csr(),
            "sparse CSC": lambda t: t.to_sparse_csc(),
            "sparse BSR": lambda t: t[:, :1].to_sparse_bsr((1, 1)),
            "overlapping": lambda t: torch.as_strided(torch.cat([t.reshape(-1)] * 2), t.shape,
                                                      (1, 1)),
        }
    return changes


def list_changes(value, elements):
    """Returns {name: function} of changes to a list; `elements` gives those of one element."""
    changes = {
        "empty": lambda v: [], "shorter": lambda v: v[:-1], "longer": lambda v: [*v, *v[-1:]],
        "thrice": lambda v: v * 3, "backwards": lambda v: v[::-1], "a thousand": lambda v:
        (v * 1000)[:1000], "tuple": lambda v: tuple(v), "nested": lambda v: [v]
    }
    for i in {0, len(value) // 2, len(value) - 1} if value else ():
        for name, change in elements(value[i]).items():
            changes[f"[{i}] {name}"] = lambda v, i=i, change=change: [
                *v[:i], change(v[i]), *v[i + 1:]
            ]
    return changes


def option_changes(text):
    """Returns {name: function} of changes to an option text, "name=value, ..."."""
    changes, parts = {}, [part.strip() for part in text.split(",") if "=" in part]
    for i, part in enumerate(parts):
        name = part.split("=")[0]
        for other in ("", "nan", "inf", "-1", "0", "1e400", "1e-50", str(LARGEST), str(2**64),
                      "true", "x", "=", "1 2", "0x10", "x" * 10_000):
            changes[f"{name}={other[:9]}"] = lambda text, i=i, name=name, other=other: ",".join(
                [*parts[:i], f"{name}={other}", *parts[i + 1:]])
        changes[f"{name} twice"] = lambda text, part=part: f"{text},{part}"
        changes[f"no {name}"] = lambda text, i=i: ",".join(parts[:i] + parts[i + 1:])
    if parts:
        changes |= {
            "unknown": lambda text: text + ",nobody=1", "comma": lambda text: text + ",",
            "no =": lambda text: text + ",nobody"
        }
    return changes


def described(value):
    return f"{type(value).__name__} {str(value)[:30]!r}"


def changes_of(value):
    """Returns {name: function} of all changes to a value."""
    fixed = lambda values: {described(v): lambda _, v=v: v for v in values}
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return fixed(OTHERS) | {
                "dense": lambda t: t.to_dense(), "sparse COO": lambda t: t.to_sparse_coo(),
                "meta": lambda t: t.to("meta"),
                "float64": lambda t: t.double(), "int32": lambda t: torch.sparse_csr_tensor(
                    t.crow_indices().int(),
                    t.col_indices().int(), t.values(), t.shape, check_invariants=False)
            }
        return fixed(OTHERS) | tensor_changes(value)
    if isinstance(value, bool):
        return fixed(BOOLS)
    if isinstance(value, int):
        return fixed(INTEGERS)
    if isinstance(value, float):
        return fixed(FLOATS)
    if isinstance(value, str):
        return fixed(STRINGS) | option_changes(value) | {"ends in NUL": lambda text: text + "\0"}
    if isinstance(value, torch.dtype):
        return fixed([*OTHERS, *DTYPES, "float32", -1, 63, 127, 128, 255, LARGEST])
    if isinstance(value, list):
        return fixed(OTHERS) | list_changes(value, changes_of)
    assert value is None, value
    return fixed([
        *OTHERS,
        torch.zeros(4),
        torch.zeros(4, 5),
        torch.zeros(40),
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(40, 5).to_sparse()
    ])


def a_change(value, draw):
    """Draws a change: its name, its function, and whether it changes a single element.

    Most changes of tensors do.
    """
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel(
    ) > 0 and draw.random() < 0.6:
        return *element_change(value, draw), True
    return *draw.choice(list(changes_of(value).items())), False
