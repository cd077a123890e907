"""Files of examples: what is read, and errors of malformed files."""

import gzip

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from xsoftmax.datasets import read_annif, read_examples, read_libsvm, read_sparse

GOOD = "3 5 4\n0,2 0:1.5 4:-2e-1\n 1:3\n3\n"


def test_a_file_is_read(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text(GOOD)
    X, Y = read_examples(path)
    np.testing.assert_allclose(X.toarray(),
                               [[1.5, 0, 0, 0, -0.2], [0, 3, 0, 0, 0], [0, 0, 0, 0, 0]], rtol=1e-6)
    assert Y.toarray().tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]
                                    ] and X.dtype == Y.dtype == np.float32
    # Windows line ends, and none after the last line
    path.write_bytes(GOOD.replace("\n", "\r\n").encode()[:-2])
    assert (read_examples(str(path))[0] != X).nnz == 0
    path.write_text("0 5 4\n")
    assert read_examples(path)[0].shape == (0, 5) and read_examples(path)[1].shape == (0, 4)


def test_a_large_file_is_read_in_parts(tmp_path):
    X, Y = sp.random(20000, 500, 0.02, format="csr", random_state=0,
                     dtype=np.float32), sp.random(20000, 90, 0.02, format="csr", random_state=1)
    path, lines = tmp_path / "data.txt", ["20000 500 90"]
    for i in range(20000):
        x, y = X[i], Y[i]
        lines.append(",".join(map(str, y.indices)) +
                     "".join(f" {j}:{v!r}" for j, v in zip(x.indices, x.data.tolist())))
    path.write_text("\n".join(lines) + "\n")
    assert path.stat().st_size > 3 << 20
    found = read_examples(path)
    assert (found[0] != X).nnz == 0 and (found[1] != (Y != 0)).nnz == 0
    lines[15001] += " 12x:1"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"data.txt:15002: expected a pair as feature:value, got "
                       r"\"12x:1\""):
        read_examples(path)


@pytest.mark.parametrize("text, message", [
    ("", r":1: expected a header .*, got \"\""),
    ("3 5\n", r":1: expected a header"),
    ("3 5 4 1\n", r":1: expected a header"),
    ("3 5 4 1 2 3 4 5 6 7 8\n", r":1: expected a header"),
    ("3 -5 4\n", r":1: expected a header"),
    ("1 5 99999999999\n0 1:1\n", r":1: expected a header"),
    ("2 5 4\n0 1:1\n", r":2: expected 2 examples, as the header says, got 1"),
    ("1 5 4\n0 1:1\n1 1:1\n", r":3: expected 1 examples, as the header says, got 2"),
    ("1 5 4\n4 1:1\n", r":2: expected labels in \[0, 4\), got \"4\""),
    ("1 5 4\n-1 1:1\n", r":2: expected labels in \[0, 4\), got \"-1\""),
    ("1 5 4\n1.5 1:1\n", r":2: expected labels in \[0, 4\), got \"1.5\""),
    ("1 5 4\n1,1 1:1\n", r":2: expected different labels, got \"1\""),
    ("1 5 4\n1, 1:1\n", r":2: expected a label after each comma"),
    ("1 5 4\n1:1\n", r":2: expected labels, then a space"),
    ("1 5 4\n0 5:1\n", r":2: expected features in \[0, 5\), got \"5:1\""),
    ("1 5 4\n0 -1:1\n", r":2: expected features in \[0, 5\), got \"-1:1\""),
    ("1 5 4\n0 2:1 1:1\n", r":2: expected features that rise, after 2, got \"1:1\""),
    ("1 5 4\n0 2:1 2:1\n", r":2: expected features that rise, after 2, got \"2:1\""),
    ("1 5 4\n0 2:nan\n", r":2: expected a finite value, got \"2:nan\""),
    ("1 5 4\n0 2:inf\n", r":2: expected a finite value"),
    ("1 5 4\n0 2:+-1\n", r":2: expected a finite value"),
    ("1 5 4\n0 2:\n", r":2: expected a finite value, got \"2:\""),
    ("1 5 4\n0 2:1e999\n", r":2: expected a finite value"),
    ("1 5 4\n0 2\n", r":2: expected a pair as feature:value, got \"2\""),
    ("1 5 4\n0 " + "9" * 100 + ":1\n",
     r":2: expected a pair as feature:value, got \"9{40}\.\.\.\""),
])
def test_malformed_files_are_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "data.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}{message}"):
        read_examples(path)


def test_all_number_formats_are_read(tmp_path):
    (tmp_path / "data.txt").write_text("1 6 2\n0 0:+0.5 1:1e-400 2:-2.5E+1 3:.25 4:7\n")
    X, _ = read_examples(tmp_path / "data.txt")
    assert X.toarray().tolist() == [[0.5, 0.0, -25.0, 0.25, 7.0, 0.0]]


@settings(max_examples=300)
@given(st.data())
def test_randomly_changed_files_are_read_or_refused(tmp_path_factory, data):
    """They never crash the process or give ids outside the range of the header."""
    text = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        change = data.draw(st.sampled_from(["put", "cut", "add"]))
        if change == "put":
            text[at] = data.draw(st.integers(0, 255))
        elif change == "cut" and len(text) > 1:
            del text[at]
        else:
            text[at:at] = data.draw(st.binary(max_size=6))
    path = tmp_path_factory.mktemp("changed") / "data.txt"
    path.write_bytes(text)
    try:
        X, Y = read_examples(path)
    except ValueError as error:
        assert str(error).startswith(f"{path}:")
        return
    for part in (X, Y):
        part.check_format(full_check=True)
        assert np.isfinite(part.data).all() and part.has_canonical_format


def test_npz_files_are_read(tmp_path):
    X, Y = sp.random(6, 5, 0.5, format="csc"), sp.random(6, 3, 0.5)
    for name, part in (("x.npz", X), ("y.npz", Y), ("short.npz", Y.tocsr()[:5])):
        sp.save_npz(tmp_path / name, part)
    found = read_examples(tmp_path / "x.npz", tmp_path / "y.npz")
    assert found[0].format == "csr" and (found[0] != X.astype(
        np.float32)).nnz == 0 and (found[1] != (Y != 0)).nnz == 0
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    np.savez(tmp_path / "other.npz", a=np.ones(3))
    for call, error, message in ((lambda: read_examples(tmp_path / "x.npz"), ValueError,
                                  "expected labels for"),
                                 (lambda: read_examples(tmp_path / "x.npz", tmp_path / "short.npz"),
                                  ValueError, "got 6 and 5"),
                                 (lambda: read_examples(tmp_path / "data.txt", tmp_path / "y.npz"),
                                  ValueError, "only for a .npz file"),
                                 (lambda: read_examples(tmp_path / "none.txt"), FileNotFoundError,
                                  "no file"), (lambda: read_sparse(tmp_path / "none.npz"),
                                               FileNotFoundError, "no file"),
                                 (lambda: read_sparse(tmp_path / "bad.npz"), ValueError,
                                  "got another file"), (lambda: read_sparse(tmp_path / "other.npz"),
                                                        ValueError, "got another file")):
        with pytest.raises(error, match=message):
            call()


def test_npz_files_with_wrong_numbers_are_refused(tmp_path):
    sound = sp.csr_matrix(np.eye(3))
    sp.save_npz(tmp_path / "sound.npz", sound)
    for name, change, message in (("far", lambda m: m.indices.__setitem__(1, 77),
                                   "contradict each other"),
                                  ("nan", lambda m: m.data.__setitem__(0, np.nan),
                                   "got nan in row 0, column 0")):
        broken = sound.copy()
        change(broken)
        sp.save_npz(tmp_path / f"{name}.npz", broken)
        for pair in ((name, "sound"), ("sound", name)):
            with pytest.raises(ValueError, match=message):
                read_examples(*(tmp_path / f"{part}.npz" for part in pair))
    X, Y = read_examples(tmp_path / "sound.npz", tmp_path / "sound.npz")
    assert X.dtype == Y.dtype == np.float32 and (Y.data == 1).all()


def test_a_file_of_libsvm_is_read(tmp_path):
    """Classes and features get ids; a test file takes those of the training file."""
    train, test = tmp_path / "train.svm", tmp_path / "test.svm"
    text = "3 1:0.5 7:2\n-1 2:1\n3,8 7:1\n"
    train.write_text(text)
    test.write_text("8 1:1\n")
    packed = tmp_path / "train.svm.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    X, Y, classes = read_libsvm(packed)
    assert (read_libsvm(train)[0] != X).nnz == 0
    assert classes.tolist() == [-1, 3, 8]
    np.testing.assert_array_equal(X.toarray()[:, [0, 1, 6]], [[0.5, 0, 2], [0, 1, 0], [0, 0, 1]])
    assert X.shape == (3, 7) and Y.toarray().tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 1]]
    assert X.dtype == Y.dtype == np.float32
    X, Y, again = read_libsvm(test, classes=classes, num_features=7)
    assert X.shape == (1, 7) and Y.toarray().tolist() == [[0, 0, 1]]
    assert again.tolist() == classes.tolist()
    with pytest.raises(ValueError, match="labels out of 2, got 8.0 in example 3 of .*train.svm"):
        read_libsvm(train, classes=[-1, 3])
    with pytest.raises(ValueError, match="read_libsvm: expected .*train.svm in the format"):
        read_libsvm(train, num_features=3)
    for options in (dict(classes=3), dict(num_features=2.0), dict(zero_based="no")):
        with pytest.raises(TypeError, match="read_libsvm: expected " + next(iter(options))):
            read_libsvm(train, **options)
    train.write_text("one 1:2\n")
    with pytest.raises(ValueError, match="read_libsvm: expected .*train.svm in the format"):
        read_libsvm(train)
    with pytest.raises(FileNotFoundError, match="read_libsvm: there is no file"):
        read_libsvm(tmp_path / "none")


def test_a_corpus_of_annif_is_read(tmp_path):
    path, packed = tmp_path / "corpus.tsv", tmp_path / "corpus.tsv.gz"
    text = "Satz eins, kurz\t<http://b/2> <http://a/1>\nzwei\t\nthree\t<http://b/2>\n"
    path.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    for name in (path, packed):
        texts, Y, subjects = read_annif(name)
        assert texts == ["Satz eins, kurz", "zwei", "three"]
        assert subjects == ["http://a/1", "http://b/2"]
        assert Y.toarray().tolist() == [[1, 1], [0, 0], [0, 1]] and Y.dtype == np.float32
    subjects = ["http://c/3", "http://b/2", "http://a/1"]
    assert read_annif(path, subjects=subjects)[1].toarray().tolist() == [[0, 1, 1], [0, 0, 0],
                                                                         [0, 1, 0]]
    path.write_bytes(b"\xef\xbb\xbfone\t<a>\r\n\r\ntwo\t<b>")  # as Windows writes it
    assert read_annif(path)[0] == ["one", "two"] and read_annif(path)[2] == ["a", "b"]
    for content, message in (("no tab\n", "line 1, got 'no tab"), ("a\t<b>\nc\td\n", "line 2"),
                             ("a\t<b\n", "a tab and <URI>s")):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_annif(path)
    path.write_bytes(b"\xff\xfe\t<a>\n")
    with pytest.raises(ValueError, match="as text in UTF-8"):
        read_annif(path)
    packed.write_bytes(b"text")
    with pytest.raises(ValueError, match="as text in UTF-8"):
        read_annif(packed)
    path.write_text(text)
    with pytest.raises(ValueError, match="labels out of 1, got http://b/2 in example 1"):
        read_annif(path, subjects=["http://a/1"])
    with pytest.raises(ValueError, match="different labels"):
        read_annif(path, subjects=["http://a/1", "http://a/1"])
    with pytest.raises(TypeError, match="subjects as a list of URIs, got str"):
        read_annif(path, subjects="http://a/1")
