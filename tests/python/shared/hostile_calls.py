"""Calls each operator with invalid arguments, one to four of them at a time, and reports what went
wrong.

test_hostile_calls.py runs it in a separate process, since a call may kill it:

    python hostile_calls.py NOTE SHARD SHARDS SINGLE JOINT SEED FIRST

NOTE is a file that holds the number and the title of the current case. SINGLE is the number of
cases that change one argument, drawn with a fixed seed (0: all of them). JOINT is the number of
cases that change two to four places (arguments or single elements of tensors), drawn with SEED.
FIRST is the first case to run. Prints a line of JSON for each finding, and at the end the number of
cases.
"""

import json
import mmap
import os
import random
import re
import resource
import struct
import sys

import torch

import op_samples
from hostile_values import a_change, changes_of

# UnicodeError is a ValueError
ERRORS = (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError, MemoryError,
          OverflowError)
NOT_OURS = ("INTERNAL ASSERT", "report a bug")
MODES = ("plain", "reference", "inference", "grad")
JOINT_MODES = (*MODES, "reference inference", "reference grad")
# Messages of torch itself: out of memory, and errors before or after our operator runs.
OF_TORCH = (
    "can't allocate memory",
    "not enough memory",
    "size calculation overflowed",
    "integer multiplication overflow",
    "cannot be represented as a SymInt",
    "File name too long",
    "to a fixed-size array",
    "cannot be called on meta tensors",
    "Inference tensors cannot be saved for backward",
    "t() expects a tensor",
    "reshape is not implemented for sparse",
    "grad can be implicitly created only",
)
NAMES = sorted({
    s.name.split("::")[1]
    for s in torch._C._jit_get_all_schemas() if s.name.startswith("xsoftmax::")
})
OURS = re.compile(r"\b(xsoftmax::|" +
                  "|".join(re.escape(name) + r"\b" for name in [*NAMES, "XRLinear"]) + ")")
NOTE = struct.Struct("q500s")


class Target:
    """An operator or a method, and valid arguments for it."""
    def __init__(self, name, function, arguments, written):
        self.name, self.function, self.written = name, function, written
        named = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
        positional = arguments[:-1] if named else arguments
        self.values = {**dict(enumerate(positional)), **named}

    def cases(self):
        """Yields (key, name of the change, function of the value)."""
        for key, value in self.values.items():
            for name, change in changes_of(value).items():
                yield key, name, change
            if isinstance(value, torch.Tensor):
                for other, shared in self.values.items():
                    if other != key and isinstance(
                            shared, torch.Tensor) and shared.dtype == value.dtype and shared.dim(
                            ) == value.dim():
                        yield key, f"argument {other}", ("alias", other)

    def joint_case(self, draw):
        """Draws changes of two to four places, as a list of (key, name, change): arguments, or
        elements of tensors."""
        # arguments with more tensors are drawn more often
        places = [
            key for key, value in self.values.items() for _ in range(1 + 3 * len(tensors_of(value)))
        ]
        # elements are changed first, since a changed tensor may have none
        elements, whole = [], {}
        for _ in range(draw.randint(2, 4) if places else 0):
            key = draw.choice(places)
            value = self.values[key]
            of_list = [i for i, part in enumerate(value)
                       if isinstance(part, torch.Tensor)] if isinstance(value, list) else []
            if of_list and draw.random() < 0.8:
                i = draw.choice(of_list)
                name, change, single = a_change(value[i], draw)
                made = key, f"[{i}] {name}", lambda v, i=i, change=change: [
                    *v[:i], change(v[i]), *v[i + 1:]
                ]
            else:
                name, change, single = a_change(value, draw)
                made = key, name, change
            if single:
                elements.append(made)
            else:
                whole[key] = made
        return elements + list(whole.values())

    def call(self, values):
        return self.function(*(v for k, v in values.items() if isinstance(k, int)),
                             **{k: v
                                for k, v in values.items() if isinstance(k, str)})


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [copied(v) for v in value] if isinstance(value, list) else value


def targets():
    schemas = {
        s.name.split("::")[1]: s
        for s in torch._C._jit_get_all_schemas() if s.name.startswith("xsoftmax::")
    }
    samples = op_samples.samples()
    assert set(schemas) == set(
        samples), f"op_samples.py and the operators differ in {sorted(set(schemas) ^ set(samples))}"
    for name in sorted(samples):
        written = [
            i if not a.kwarg_only else a.name for i, a in enumerate(schemas[name].arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        yield Target(name, getattr(torch.ops.xsoftmax, name), samples[name], written)
    for name, (function, arguments) in sorted(op_samples.class_samples().items()):
        yield Target(name, function, arguments, [])


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (list, tuple)) else []


def same(before, after):
    """Whether two tensors are equal bit for bit, NaN included."""
    return before.shape == after.shape and torch.equal(
        *(t.detach().clone().reshape(-1).contiguous().view(torch.uint8) for t in (before, after)))


def backward(result):
    wanted = [t for t in tensors_of(result) if t.requires_grad and t.numel() < 2**20]
    if wanted:
        torch.autograd.backward([t.sum() for t in wanted])


def changed_values(target, mode, changes):
    """Returns the arguments of a call, or None if torch cannot make such a tensor."""
    values = {k: copied(v) for k, v in target.values.items()}
    if "grad" in mode:
        for tensor in (t for value in values.values()
                       for t in tensors_of(value) if t.is_floating_point()):
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
    written = [
        k for k, v, before in watched
        if not same(before, v) and not (returned and k in target.written)
    ]
    return wrong_error(error) or (f"changed arguments {written}: {type(error).__name__} "
                                  f"{str(error)[:200]}" if written else None)


def wrong_error(error):
    """Returns what is wrong with an error, or None.

    Wrong are undocumented types, internal assertions of torch, and RuntimeErrors that do not name
    an operator of ours.
    """
    text = str(error)
    if error is None or isinstance(error,
                                   (MemoryError, OverflowError)) or any(words in text
                                                                        for words in OF_TORCH):
        return None
    if not isinstance(error, ERRORS) or any(words in text for words in NOT_OURS):
        return f"{type(error).__name__}: {text[:300]}"
    if type(error) is RuntimeError and not OURS.search(text):
        return f"RuntimeError of another operator: {text[:300]}"
    return None


def plain(tensor):
    return (type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
            and tensor.device.type == "cpu" and 0 < tensor.numel() < 2**20
            and not (tensor.is_quantized or tensor.is_nested or tensor.is_neg() or tensor.is_conj()
                     or tensor._is_zerotensor()))


def single_cases(all_targets, count):
    """Returns `count` cases (0: all) that change one argument: (title, arguments of attempt)."""
    cases = [(f"{target.name}({key}: {name}) {mode}", (target, mode, [(key, change)]))
             for target in all_targets for key, name, change in target.cases() for mode in MODES]
    return cases if count == 0 else random.Random(20).sample(cases, min(count, len(cases)))


def joint_case(all_targets, seed, number):
    """Returns case `number` of those that change several places: (title, arguments of attempt)."""
    draw = random.Random(f"{seed} {number}")
    target, mode = draw.choice(all_targets), draw.choice(JOINT_MODES)
    changes = target.joint_case(draw)
    title = "; ".join(f"{key}: {name}" for key, name, _ in changes)
    return f"{target.name}({title}) {mode}, {seed} {number}", (target, mode, [
        (key, change) for key, _, change in changes
    ])


def limit_memory():
    """Limits memory, so that huge allocations raise an error instead of being overcommitted."""
    if "asan" not in os.environ.get("LD_PRELOAD", ""):
        used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, used + 2**32))


def main(note_path, shard, shards, single, joint, seed, first):
    torch.set_num_threads(2)
    model, arguments = op_samples.linear_model()
    model(*arguments).save("model", "notes")  # for operators that load one
    all_targets = list(targets())
    singles = single_cases(all_targets, single)[shard::shards] if single >= 0 else []
    count = len(singles) + len(range(shard, joint, shards))
    with open(note_path, "r+b") as file:
        note = mmap.mmap(file.fileno(), NOTE.size)
    limit_memory()
    for i in range(first, count):
        title, case = singles[i] if i < len(singles) else joint_case(
            all_targets, seed, shard + shards * (i - len(singles)))
        note[:] = NOTE.pack(i, title.encode(errors="replace")[:500])
        problem = attempt(*case)
        if problem is not None:
            print(json.dumps([title, problem]), flush=True)
    print(json.dumps(count), flush=True)


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    main(sys.argv[1], *map(int, sys.argv[2:]))
