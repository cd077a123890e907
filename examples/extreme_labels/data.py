"""Labelled texts as words, tf-idf features and a label matrix."""

import ast
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from examples.common.errors import DataError
from xsoftmax.datasets import read_examples
from xsoftmax.label_vectors import unit_rows

WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")  # splits snake_case and CamelCase


@dataclass
class Part:
    X: sp.csr_matrix  # tf-idf, rows of length 1
    Y: sp.csr_matrix
    texts: list[str] | None  # None if only features are available


@dataclass
class Dataset:
    name: str
    train: Part
    test: Part


def load_dataset(path: str | None, max_examples: int | None = None, seed: int = 0) -> Dataset:
    """Loads the training and test data.

    Args:
        path: a folder with train.txt and test.txt in the format of the Extreme Classification
            Repository; or the common prefix of {path}.train.x.npz, {path}.train.y.npz,
            {path}.test.x.npz and {path}.test.y.npz; or None, for the functions of Python's standard
            library, whose text is the name and docstring and whose labels are the names used in the
            body.
        max_examples: the largest number of training examples.
    """
    if path is None:
        return standard_library(max_examples, seed)
    try:
        if (Path(path) / "train.txt").is_file():
            parts = {part: read_examples(Path(path) / f"{part}.txt") for part in ("train", "test")}
        else:
            parts = {
                part: read_examples(f"{path}.{part}.x.npz", f"{path}.{part}.y.npz")
                for part in ("train", "test")
            }
    except (FileNotFoundError, ValueError) as error:
        raise DataError(f"--data: {error}") from error
    (X, Y), (queries, truth) = parts["train"], parts["test"]
    if X.shape[1] != queries.shape[1] or Y.shape[1] != truth.shape[1] or min(
            X.shape[0], queries.shape[0], Y.nnz) == 0:
        raise DataError("--data: expected examples to train and to test of as many features and "
                        f"labels, got matrices {list(X.shape)}, {list(Y.shape)} and "
                        f"{list(queries.shape)}, {list(truth.shape)}")
    made = {
        part: Part(unit_rows(X[:max_examples] if part == "train" else X),
                   Y[:max_examples] if part == "train" else Y, None)
        for part, (X, Y) in parts.items()
    }
    return Dataset(path, made["train"], made["test"])


def standard_library(max_examples: int | None, seed: int) -> Dataset:
    texts, labels = [], []
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in file.parts:
            for text, names in functions(file):
                texts.append(text)
                labels.append(names)
    order = np.random.default_rng(seed).permutation(len(texts))
    cut = len(texts) * 9 // 10
    train, test = order[:cut][:max_examples], order[cut:]
    return from_texts("the functions of Python's standard library",
                      [[texts[i] for i in part] for part in (train, test)],
                      [[labels[i] for i in part] for part in (train, test)])


def functions(file: Path):
    """Yields, for each function in the file, the text of its name and docstring, and the names in
    its body."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # Python's own tests contain invalid files
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = {
                part.id
                for line in node.body
                for part in ast.walk(line) if isinstance(part, ast.Name)
            }
            names |= {
                part.attr
                for line in node.body
                for part in ast.walk(line) if isinstance(part, ast.Attribute)
            }
            if names:
                yield f"{node.name} {ast.get_docstring(node) or ''}", sorted(names)


def from_texts(name: str, texts: list[list[str]], labels: list[list[list[str]]],
               least: int = 5) -> Dataset:
    """Builds a dataset from texts. Labels need at least `least` training examples."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import MultiLabelBinarizer

    vectorizer = TfidfVectorizer(tokenizer=words, lowercase=False, token_pattern=None, min_df=2,
                                 sublinear_tf=True, dtype=np.float32)
    X = [vectorizer.fit_transform(texts[0]), vectorizer.transform(texts[1])]
    counts: dict[str, int] = {}
    for row in labels[0]:
        for label in row:
            counts[label] = counts.get(label, 0) + 1
    known = sorted(label for label, count in counts.items() if count >= least)
    if not known:
        raise DataError(f"{name}: expected a label with at least {least} examples, got none")
    binarizer = MultiLabelBinarizer(classes=known, sparse_output=True).fit(labels[0])
    Y = [
        binarizer.transform([[label for label in row if counts.get(label, 0) >= least]
                             for row in part]).astype(np.float32) for part in labels
    ]
    parts = [Part(x.tocsr(), y.tocsr(), text) for x, y, text in zip(X, Y, texts)]
    return Dataset(name, *parts)


def words(text: str) -> list[str]:
    return [word.lower() for word in WORDS.findall(text)]
