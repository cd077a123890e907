"""Files with wrong contents but right checksums load as valid data or raise a ValueError that names
the file."""

import json
import struct

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import xsoftmax as xs
from test_xr_linear_files import file_checksum, seal, sections_of
from xr_linear_checks import problem, small

INTEGERS = [-1, 0, 1, 2, 255, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]
BYTES = [0x00, 0x01, 0x22, 0x5C, 0x7F, 0x80, 0xC0, 0xED, 0xFF]


def outcome(load, name, use):
    """Returns whether loading was refused with a proper error; otherwise uses what was loaded."""
    try:
        loaded = load()
    except ValueError as error:
        assert not isinstance(error, UnicodeError) and name in str(error), repr(error)
        assert "INTERNAL ASSERT" not in str(error)
        return True
    use(loaded)
    return False


class Model:
    """A saved model, and changed copies of its file."""
    def __init__(self, folder):
        self.folder, self.X = folder, problem()[0]
        small(*problem()).save(folder)
        self.file = folder / "model.bin"
        self.whole = self.file.read_bytes()
        self.refused = self.answered = 0

    def try_change(self, change, section=None):
        data = bytearray(self.whole)
        change(data)
        if section is not None:
            entry, begin, size = section
            data[entry + 24:entry + 32] = file_checksum(data[begin:begin + size]).to_bytes(
                8, "little")
        seal(data, self.file)
        if outcome(lambda: xs.XRLinear.load(self.folder), str(self.folder), self.use):
            self.refused += 1
        else:
            self.answered += 1

    def use(self, model):
        scores, labels = model.topk(sp.csr_matrix((5, model.num_features), dtype=np.float32), 5, 5)
        if model.num_features == self.X.shape[1]:
            scores, labels = model.topk(self.X[:5], 5, 5)
        assert scores.isfinite().all() and labels.max() < model.num_labels
        repr(model), model.notes, model.stats


def placed(value, at, layout):
    """Returns a change that writes a number in a `struct` format, truncated to its width."""
    size = struct.calcsize(layout)
    bits = value.to_bytes(8, "little", signed=True)[:size] if isinstance(
        value, int) else struct.pack(layout, value)
    return lambda data: data.__setitem__(slice(at, at + size), bits)


@pytest.fixture()
def model(tmp_path):
    return Model(tmp_path / "model")


def test_wrong_headers_of_models_are_refused_or_load_as_valid_data(model):
    fields = {"version": (8, "<I"), "features": (16, "<q"), "bytes": (48, "<q")}
    for at, layout in fields.values():
        for value in INTEGERS:
            model.try_change(placed(value, at, layout))
    for bias in (np.nan, np.inf, -np.inf, 1e308, -1e30):
        model.try_change(placed(bias, 24, "<d"))
    for at in range(32, 48):  # name of the transform
        for byte in BYTES:
            model.try_change(lambda data: data.__setitem__(at, byte))
    for text in (b"", b"sigmoid", b"\xff" * 16, b"identity\0\0\xff", b"log-l3-hinge", b"l9-hinge"):
        model.try_change(lambda data: data.__setitem__(slice(32, 48), text.ljust(16, b"\0")))
    for depth in (1, 2, 4, 64):  # the table of sections is misread
        data = bytearray(model.whole)
        data[12:16] = depth.to_bytes(4, "little")
        if 64 + 32 * (2 + 6 * depth) < len(data):
            seal(data, model.file)
            outcome(lambda: xs.XRLinear.load(model.folder), str(model.folder), model.use)
    assert model.refused > 60 and model.answered > 5


def test_wrong_sections_of_models_are_refused_or_load_as_valid_data(model):
    """Wrong begin, size and dtype of each section, with a fitting checksum."""
    for entry, begin, size in sections_of(model.whole):
        for field, old in ((0, begin), (8, size)):
            for value in [*INTEGERS, old - 64, old + 64, old - 1, old - 8, old - 4, old // 2, 64]:

                def change(data, field=field, value=value):
                    placed(value, entry + field, "<q")(data)
                    at, length = (int.from_bytes(data[i:i + 8], "little")
                                  for i in (entry, entry + 8))
                    if at + length <= len(data):
                        data[entry + 24:entry + 32] = file_checksum(data[at:at + length]).to_bytes(
                            8, "little")

                model.try_change(change)
        for dtype in [*range(6), *INTEGERS]:
            model.try_change(placed(dtype, entry + 16, "<q"))
    assert model.refused > 500


def test_wrong_contents_of_models_are_refused_or_load_as_valid_data(model):
    """Wrong numbers at the ends and in the middle of each section."""
    widths = [8, 4, 1, 4, 2]
    for section in sections_of(model.whole):
        entry, begin, size = section
        width = widths[int.from_bytes(model.whole[entry + 16:entry + 24], "little")]
        places = sorted(
            {begin, begin + width, begin + size // width // 2 * width, begin + size - width})
        for at in places:
            for value in (-1, 0, 2, 255, 2**31 - 1, 2**62, 2**63 - 1):
                model.try_change(placed(value, at, {8: "<q", 4: "<I", 2: "<H", 1: "<B"}[width]),
                                 section)
        swapped = slice(begin, begin + size // width * width)
        model.try_change(lambda data: data.__setitem__(swapped, data[swapped][::-1]), section)
    assert model.refused > 150 and model.answered > 30


def test_wrong_notes_of_models_are_refused_or_load_as_valid_data(model):
    """Notes of any bytes load if they are UTF-8, as JSON or text."""
    section = entry, begin, size = sections_of(model.whole)[-1]
    unicode = "ä€😀".encode()
    texts = [
        b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82",
        b"\xf5\x80\x80\x80", b"[" * size, b"null", b'{"layers": 1}', b"1e999",
        b'{"layers": [], "notes": [1]}', b'{"layers": {"a": 1}, "notes": {}}', unicode, b"\0"
    ]
    for text in texts:
        for at in (begin, begin + size - len(text)):
            model.try_change(lambda data: data.__setitem__(slice(at, at + len(text)), text),
                             section)
        filled = (text + b" " * size)[:size]
        model.try_change(lambda data: data.__setitem__(slice(begin, begin + size), filled), section)
    assert model.refused >= 3 * 6 and model.answered >= 3 * 6


def tables_of_trees():
    """Yields state dicts of a tree with one wrong table."""
    state = dict(xs.LabelTree.balanced(40, 3).state_dict())
    for name, table in state.items():
        changes = [
            torch.empty(0, dtype=torch.int64), table[:-1].clone(),
            torch.cat([table, table[-1:]]), table[None].clone(),
            table.sum(),
            table.flip(0),
            table.to(torch.int32),
            table.double(),
            table.to(torch.complex64),
            table.bool(),
            table.to_sparse(),
            table.to("meta"), table[:1].expand(2**40),
            table.unsqueeze(1).expand(-1, 2)[:, 0],
            torch.full_like(table, table.numel()),
            table.repeat(2)[::2]
        ]
        changes += [torch.full_like(table, value) for value in INTEGERS]
        changes += [None, 3, "text", [1, 2], {"a": 1}]
        for place in (0, 1, len(table) // 2, len(table) - 1):
            for value in [*INTEGERS, len(table), len(table) - 1, 39, 40]:
                changes.append(table.clone())
                changes[-1][place] = value
        for change in changes:
            yield {**state, name: change}
        yield {other: tensor for other, tensor in state.items() if other != name}
        for other in state:
            yield {**state, name: state[other], other: table}


def test_wrong_tables_of_trees_are_refused_or_load_as_valid_data(tmp_path):
    path = tmp_path / "tree.pt"
    refused = loaded = 0

    def use(tree):
        nodes = tree.path(torch.arange(tree.num_classes))
        assert int(nodes.max()) < tree.num_nodes and tree.num_classes == 40

    for state in tables_of_trees():
        torch.save(state, path)
        if outcome(lambda: xs.LabelTree.load(path), str(path), use):
            refused += 1
        else:
            loaded += 1
    assert refused > 200 and 0 < loaded < 80
    for other in ([1, 2], None, torch.zeros(3), {}, {1: 2}, "text"):
        torch.save(other, path)
        assert outcome(lambda: xs.LabelTree.load(path), str(path), use)
    whole = path.read_bytes()
    for cut in range(0, len(whole), len(whole) // 20):
        path.write_bytes(whole[:cut])
        assert outcome(lambda: xs.LabelTree.load(path), str(path), use)


def texts_of_tables(text):
    """Yields JSON headers of a mapped table with one wrong value."""
    known = json.loads(text)
    for key, value in (("state", "whole"), ("format", "pt"), ("xsoftmax", "1"), ("kind", "table"),
                       ("table", known["__metadata__"]["table"])):
        for lie in ("", "x", "y" * 70, "\u00e9", "\udcff", "\x01", "\x7f", "\\", "begun ",
                    "row_adam"):
            yield text.replace(f'"{key}":"{value}"', f'"{key}":"{lie}"')
    for key, value in (("dtype", '"F32"'), ("shape", "[30,4]"), ("data_offsets", "[0,480]")):
        for lie in ('"F64"', '"F16"', '"I64"', '"F99"', "[]", "[30]", "[4,30]", "[120]",
                    "[-1,-120]", "[0,480]", "[480,960]", "[0,0]", f"[{2**62},{2**62}]",
                    f"[{2**63},1]", f"[{10**30},1]", "[1e3,1]", "[1.5,2]", "null", "[30,4,1]",
                    "[1,1,1,1,1,1,1,1,1,1,1,1]", "[30, 4]"):
            yield text.replace(f'"{key}":{value}', f'"{key}":{lie}')
    for name in ("", "bias", "\udcfe", "w" * 70):
        yield text.replace('"weight"', f'"{name}"')
    yield text.replace("}}", '},"weight":{"dtype":"F32","shape":[0],"data_offsets":[480,480]}}')
    yield text.replace("}}", "}")
    yield text[:-1]
    yield ""


def test_wrong_headers_of_mapped_tables_are_refused_or_load_as_valid_data(tmp_path):
    """Only a file whose header equals that of a created file is opened."""
    path = tmp_path / "t.safetensors"
    made = xs.tables.mapped(path, 30, 4, progress=False)
    expected = made.detach().clone()
    xs.tables.flush(made)
    del made
    whole = path.read_bytes()
    text = whole[8:4096].decode().rstrip(" ")
    refused = 0

    def use(weight):
        assert weight.shape in ((30, 4), (4, 30), (120,),
                                (30, 4, 1)) and weight.flatten()[:120].equal(expected.flatten())

    for lie in texts_of_tables(text):
        header = lie.encode(
            "utf-8", "surrogateescape") if "\udcff" in lie or "\udcfe" in lie else lie.encode()
        path.write_bytes(whole[:8] + header.ljust(4088, b" ")[:4088] + whole[4096:])
        for writable in (False, True):
            refused += outcome(lambda: xs.tables.open(path, writable=writable), str(path), use)
    for value in INTEGERS:  # length of the header
        path.write_bytes(value.to_bytes(8, "little", signed=True) + whole[8:])
        refused += outcome(lambda: xs.tables.open(path, writable=False), str(path), use)
    for size in (1, 7, 8, 4095, 4096, 4097, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused += outcome(lambda: xs.tables.open(path, writable=False), str(path), use)
    path.write_bytes(whole + b"\0")
    refused += outcome(lambda: xs.tables.open(path, writable=False), str(path), use)
    assert refused > 150
