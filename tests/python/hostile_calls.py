"""Calls each operator with arguments that nobody meant, one to four of them at a time, and reports what went wrong.

Run by test_hostile_calls.py as a process of its own, which may die:

    python hostile_calls.py NOTE SHARD SHARDS SINGLE JOINT SEED FIRST

NOTE: a file that holds the number and the name of the case at work. SINGLE: how many cases change one argument, drawn
by a fixed seed (0: all of them). JOINT: how many cases change two to four places, arguments or single elements of
tensors, drawn by SEED. FIRST: the case to begin with. Prints a line of JSON for each finding; the last one says how
many cases there were.
"""

import json
import math
import mmap
import os
import random
import re
import resource
import struct
import sys

import torch

import op_samples

ERRORS = (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError, MemoryError, OverflowError)  # UnicodeError is a ValueError
NOT_OURS = ("INTERNAL ASSERT", "report a bug")
MODES = ("plain", "reference", "inference", "grad")
JOINT_MODES = (*MODES, "reference inference", "reference grad")
# Words of torch itself: no memory for what was asked for, and what it says before or after a call of ours.
OF_TORCH = (
    "can't allocate memory", "not enough memory", "size calculation overflowed", "integer multiplication overflow",
    "cannot be represented as a SymInt", "File name too long", "to a fixed-size array",
    "cannot be called on meta tensors", "Inference tensors cannot be saved for backward", "t() expects a tensor",
    "reshape is not implemented for sparse", "grad can be implicitly created only",
)
NAMES = sorted({s.name.split("::")[1] for s in torch._C._jit_get_all_schemas() if s.name.startswith("xsoftmax::")})
OURS = re.compile(r"\b(xsoftmax::|" + "|".join(re.escape(name) + r"\b" for name in [*NAMES, "XRLinear"]) + ")")
NOTE = struct.Struct("q500s")
LARGEST, SMALLEST = 2**63 - 1, -(2**63)

INTEGERS = [-1, 0, 1, 2, 3, 7, 63, 1000, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**62, LARGEST, SMALLEST, 2**64, -100, None, 1.5, math.nan, "1", True, [1],
            torch.tensor(3), torch.tensor(1.5), torch.tensor([1, 2]), b"1"]
FLOATS = [math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 0.5, 1.0, 2.0, 1e-45, 1e-320, 1e38, 3.5e38, 1e308, 10**400, 2**63, None, "1.0", True, [0.5],
          torch.tensor(0.5), torch.tensor([1.0, 2.0]), 1j]
BOOLS = [None, "True", 2, -1, 1.5, [True], torch.tensor(True), torch.tensor([1, 0]), LARGEST, True, False]
STRINGS = ["", "x", "x\0y", "é\u200b", "\udc80", "x" * 100_000, "%s%n", "/", "/dev/null", "/nowhere/x", ".", None, 1, 1.5, True, b"x", ["x"]]
OTHERS = [None, "text", 1, 1.5, True, [], {}, object(), 1j]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16,
          torch.uint64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn]


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
    whole = torch.frombuffer(memory.numpy().data, dtype=t.dtype, count=t.numel(), offset=1).view(t.shape)
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
    VALUES[dtype] = [v for v in (-1, 0, 1, 2, 255, 2**31 - 1, -(2**31), 2**31, 2**40, LARGEST, SMALLEST, -100, 39, 40)
                     if torch.iinfo(dtype).min <= v <= torch.iinfo(dtype).max]


ELEMENTS = [-1, 0, op_samples.N, 2**40, math.nan, math.inf]  # of single places


def element_change(t, draw):
    """Returns the name and the function of a change of one element: the first, the last or any."""
    place = draw.choice([0, -1, draw.randrange(t.numel())])
    value = draw.choice([v for v in ELEMENTS if t.is_floating_point() or t.dtype.is_complex or (
        not isinstance(v, float) and (t.dtype == torch.bool or torch.iinfo(t.dtype).min <= v <= torch.iinfo(t.dtype).max))])
    return f"[{place}] = {value}", with_one(value, place)


def tensor_changes(sample):
    """name -> function of a tensor."""
    changes = {f"to {dtype}": (lambda t, dtype=dtype: t.to(dtype)) for dtype in DTYPES if dtype != sample.dtype}
    for value in VALUES[sample.dtype]:
        changes[f"all {value}"] = filled(value)
        if sample.numel() > 1:
            changes[f"first {value}"], changes[f"last {value}"] = with_one(value, 0), with_one(value, -1)
    changes |= {
        "0-dim": lambda t: t.reshape(-1)[0], "no elements": lambda t: t.new_empty(0), "flat": lambda t: t.reshape(-1), "deeper": lambda t: t[None],
        "wider": lambda t: t[..., None], "seven dimensions": lambda t: t.reshape(*[1] * 7, -1), "sparse COO": lambda t: t.to_sparse(),
        "sparse COO with one dense": lambda t: torch.stack([t, t]).to_sparse(1), "mkldnn": lambda t: t.to_mkldnn(),
        "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8), "meta": lambda t: t.to("meta"),
        "sparse meta": lambda t: t.to_sparse().to("meta"), "nested": lambda t: torch.nested.nested_tensor([t, t]),
        "negative view": lambda t: torch._neg_view(t.clone()),
        "imaginary part": lambda t: torch.complex(t, t).conj().imag, "conjugate": lambda t: torch.complex(t.float(), t.float()).conj(),
        "zero tensor": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype), "inference": inference, "misaligned": misaligned,
        "a leaf": lambda t: t.clone().requires_grad_(), "a branch": lambda t: t.clone().requires_grad_() * 1, "double neg": lambda t: torch._neg_view(-t),
        "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=t.is_floating_point()), "one element": lambda t: t.new_ones(1),
        "one by one": lambda t: t.new_ones(1, 1), "two by none": lambda t: t.new_empty(2, 0), "none by two": lambda t: t.new_empty(0, 2),
    }
    for axis in range(sample.dim()):
        size = sample.shape[axis]
        changes |= {
            f"fewer in {axis}": lambda t, axis=axis, size=size: t.narrow(axis, 0, max(size - 1, 0)),
            f"none in {axis}": lambda t, axis=axis: t.narrow(axis, 0, 0),
            f"more in {axis}": lambda t, axis=axis: torch.cat([t, t.narrow(axis, 0, 1)], axis),
            f"reversed in {axis}": lambda t, axis=axis: t.flip(axis),
            f"every other in {axis}": lambda t, axis=axis: t.repeat_interleave(2, axis).unfold(axis, 1, 2).squeeze(-1),
            f"expanded in {axis}": lambda t, axis=axis: t.narrow(axis, 0, 1).expand(t.shape),
            f"2^31 + 1 in {axis}": huge(axis, 2**31 + 1), f"2^40 in {axis}": huge(axis, 2**40), f"2^62 in {axis}": huge(axis, 2**62),
        }
    if sample.dim() == 2:
        changes |= {
            "transposed": lambda t: t.t(), "column major": lambda t: t.t().contiguous().t(), "sparse CSR": lambda t: t.to_sparse_csr(),
            "sparse CSC": lambda t: t.to_sparse_csc(), "sparse BSR": lambda t: t[:, :1].to_sparse_bsr((1, 1)),
            "overlapping": lambda t: torch.as_strided(torch.cat([t.reshape(-1)] * 2), t.shape, (1, 1)),
        }
    return changes


def list_changes(value, elements):
    """name -> function of a list; elements: what stands in the place of one."""
    changes = {"empty": lambda v: [], "shorter": lambda v: v[:-1], "longer": lambda v: [*v, *v[-1:]], "thrice": lambda v: v * 3, "backwards": lambda v: v[::-1],
               "a thousand": lambda v: (v * 1000)[:1000], "tuple": lambda v: tuple(v), "nested": lambda v: [v]}
    for i in {0, len(value) // 2, len(value) - 1} if value else ():
        for name, change in elements(value[i]).items():
            changes[f"[{i}] {name}"] = lambda v, i=i, change=change: [*v[:i], change(v[i]), *v[i + 1:]]
    return changes


def option_changes(text):
    """Of "name=value, ..."."""
    changes, parts = {}, [part.strip() for part in text.split(",") if "=" in part]
    for i, part in enumerate(parts):
        name = part.split("=")[0]
        for other in ("", "nan", "inf", "-1", "0", "1e400", "1e-50", str(LARGEST), str(2**64), "true", "x", "=", "1 2", "0x10", "x" * 10_000):
            changes[f"{name}={other[:9]}"] = lambda text, i=i, name=name, other=other: ",".join([*parts[:i], f"{name}={other}", *parts[i + 1:]])
        changes[f"{name} twice"] = lambda text, part=part: f"{text},{part}"
        changes[f"no {name}"] = lambda text, i=i: ",".join(parts[:i] + parts[i + 1:])
    if parts:
        changes |= {"unknown": lambda text: text + ",nobody=1", "comma": lambda text: text + ",", "no =": lambda text: text + ",nobody"}
    return changes


def described(value):
    return f"{type(value).__name__} {str(value)[:30]!r}"


def changes_of(value):
    """name -> function: what a value may become."""
    fixed = lambda values: {described(v): lambda _, v=v: v for v in values}  # noqa: E731
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return fixed(OTHERS) | {"dense": lambda t: t.to_dense(), "sparse COO": lambda t: t.to_sparse_coo(), "meta": lambda t: t.to("meta"),
                                    "float64": lambda t: t.double(), "int32": lambda t: torch.sparse_csr_tensor(
                                        t.crow_indices().int(), t.col_indices().int(), t.values(), t.shape, check_invariants=False)}
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
    return fixed([*OTHERS, torch.zeros(4), torch.zeros(4, 5), torch.zeros(40), torch.zeros(4, dtype=torch.int64), torch.zeros(40, 5).to_sparse()])


def a_change(value, draw):
    """Draws a change: its name, its function, and whether it is of a single element, as most of tensors are."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() > 0 and draw.random() < 0.6:
        return *element_change(value, draw), True
    return *draw.choice(list(changes_of(value).items())), False


class Target:
    """Something that is called, and its valid arguments."""

    def __init__(self, name, function, arguments, written):
        self.name, self.function, self.written = name, function, written
        named = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
        positional = arguments[:-1] if named else arguments
        self.values = {**dict(enumerate(positional)), **named}

    def cases(self):
        """(key, name of the change, function of the value)"""
        for key, value in self.values.items():
            for name, change in changes_of(value).items():
                yield key, name, change
            if isinstance(value, torch.Tensor):
                for other, shared in self.values.items():
                    if other != key and isinstance(shared, torch.Tensor) and shared.dtype == value.dtype and shared.dim() == value.dim():
                        yield key, f"argument {other}", ("alias", other)

    def joint_case(self, draw):
        """Draws changes of two to four places, as a list of (key, name, change): arguments, or elements of tensors."""
        places = [key for key, value in self.values.items() for _ in range(1 + 3 * len(tensors_of(value)))]  # more of what holds more
        elements, whole = [], {}  # of a tensor elements come first: what it becomes afterwards may have none
        for _ in range(draw.randint(2, 4) if places else 0):
            key = draw.choice(places)
            value = self.values[key]
            of_list = [i for i, part in enumerate(value) if isinstance(part, torch.Tensor)] if isinstance(value, list) else []
            if of_list and draw.random() < 0.8:
                i = draw.choice(of_list)
                name, change, single = a_change(value[i], draw)
                made = key, f"[{i}] {name}", lambda v, i=i, change=change: [*v[:i], change(v[i]), *v[i + 1:]]
            else:
                name, change, single = a_change(value, draw)
                made = key, name, change
            if single:
                elements.append(made)
            else:
                whole[key] = made
        return elements + list(whole.values())

    def call(self, values):
        return self.function(*(v for k, v in values.items() if isinstance(k, int)), **{k: v for k, v in values.items() if isinstance(k, str)})


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [copied(v) for v in value] if isinstance(value, list) else value


def targets():
    schemas = {s.name.split("::")[1]: s for s in torch._C._jit_get_all_schemas() if s.name.startswith("xsoftmax::")}
    samples = op_samples.samples()
    assert set(schemas) == set(samples), f"op_samples.py and the operators differ in {sorted(set(schemas) ^ set(samples))}"
    for name in sorted(samples):
        written = [i if not a.kwarg_only else a.name for i, a in enumerate(schemas[name].arguments)
                   if a.alias_info is not None and a.alias_info.is_write]
        yield Target(name, getattr(torch.ops.xsoftmax, name), samples[name], written)
    for name, (function, arguments) in sorted(op_samples.class_samples().items()):
        yield Target(name, function, arguments, [])


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (list, tuple)) else []


def same(before, after):
    """Bit for bit, NaN as well."""
    return before.shape == after.shape and torch.equal(*(t.detach().clone().reshape(-1).contiguous().view(torch.uint8) for t in (before, after)))


def backward(result):
    wanted = [t for t in tensors_of(result) if t.requires_grad and t.numel() < 2**20]
    if wanted:
        torch.autograd.backward([t.sum() for t in wanted])


def changed_values(target, mode, changes):
    """Returns the arguments of a call, or None where torch itself has no such tensor."""
    values = {k: copied(v) for k, v in target.values.items()}
    if "grad" in mode:
        for tensor in (t for value in values.values() for t in tensors_of(value) if t.is_floating_point()):
            tensor.requires_grad_()
    for key, change in changes:
        try:
            values[key] = values[change[1]] if isinstance(change, tuple) else change(values[key])
        except Exception:
            return None
    return values


def attempt(target, mode, changes):
    """Returns what is wrong with the outcome of a call, or None."""
    values = changed_values(target, mode, changes)
    if values is None:
        return None
    watched = [(k, t, t.clone()) for k, v in values.items() for t in tensors_of(v) if plain(t)]
    error, returned = None, False
    try:
        with torch.inference_mode("inference" in mode):
            torch.ops.xsoftmax.set_impl("reference" if "reference" in mode else "kernel")
            result = target.call(values)
            returned = True
        if "grad" in mode:
            backward(result)
    except Exception as caught:
        error = caught
    finally:
        torch.ops.xsoftmax.set_impl("kernel")
        torch.ops.xsoftmax.end_long_work()
    written = [k for k, v, before in watched if not same(before, v) and not (returned and k in target.written)]
    return wrong_error(error) or (f"changed arguments {written}: {type(error).__name__} {str(error)[:200]}" if written else None)


def wrong_error(error):
    """Returns what is wrong with an error, or None: it is of another type than users are told of, an internal
    assertion of torch, or a RuntimeError that names no operator of ours."""
    text = str(error)
    if error is None or isinstance(error, (MemoryError, OverflowError)) or any(words in text for words in OF_TORCH):
        return None
    if not isinstance(error, ERRORS) or any(words in text for words in NOT_OURS):
        return f"{type(error).__name__}: {text[:300]}"
    if type(error) is RuntimeError and not OURS.search(text):
        return f"RuntimeError of another operator: {text[:300]}"
    return None


def plain(tensor):
    return (type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and tensor.device.type == "cpu"
            and 0 < tensor.numel() < 2**20 and not (tensor.is_quantized or tensor.is_nested or tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()))


def single_cases(all_targets, count):
    """Cases that change one argument: (title, arguments of attempt), `count` of them, 0: all."""
    cases = [(f"{target.name}({key}: {name}) {mode}", (target, mode, [(key, change)])) for target in all_targets for key, name, change in target.cases()
             for mode in MODES]
    return cases if count == 0 else random.Random(20).sample(cases, min(count, len(cases)))


def joint_case(all_targets, seed, number):
    """Case `number` of those that change several places, as above."""
    draw = random.Random(f"{seed} {number}")
    target, mode = draw.choice(all_targets), draw.choice(JOINT_MODES)
    changes = target.joint_case(draw)
    title = "; ".join(f"{key}: {name}" for key, name, _ in changes)
    return f"{target.name}({title}) {mode}, {seed} {number}", (target, mode, [(key, change) for key, _, change in changes])


def limit_memory():
    """What asks for all of memory gets an error, as it would from an allocator that does not promise what it lacks."""
    if "asan" not in os.environ.get("LD_PRELOAD", ""):
        used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, used + 2**32))


def main(note_path, shard, shards, single, joint, seed, first):
    torch.set_num_threads(2)
    model, arguments = op_samples.linear_model()
    model(*arguments).save("model", "notes")  # for what loads one
    all_targets = list(targets())
    singles = single_cases(all_targets, single)[shard::shards] if single >= 0 else []
    count = len(singles) + len(range(shard, joint, shards))
    with open(note_path, "r+b") as file:
        note = mmap.mmap(file.fileno(), NOTE.size)
    limit_memory()
    for i in range(first, count):
        title, case = singles[i] if i < len(singles) else joint_case(all_targets, seed, shard + shards * (i - len(singles)))
        note[:] = NOTE.pack(i, title.encode(errors="replace")[:500])
        problem = attempt(*case)
        if problem is not None:
            print(json.dumps([title, problem]), flush=True)
    print(json.dumps(count), flush=True)


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    main(sys.argv[1], *map(int, sys.argv[2:]))
