"""Deployed models: docs/howto/deployment.md runs, AOTInductor packages and ONNX give the answers of
`topk`, and unsupported exports raise errors."""

import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

import xsoftmax as xs

ROOT = Path(__file__).parents[3]
SERVE = ROOT / "build/cpp_app/serve"
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/howto/deployment.md").read_text(),
                    re.DOTALL | re.MULTILINE)
DYNAMIC = {0: torch.export.Dim("Q")}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's exporters


class Topk(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, input, exclude=None):
        return self.loss.topk(input, 5, exclude=exclude)


class Search(Topk):
    def forward(self, input):
        return self.loss.search(input, 5).ids


def exported(module, *args):
    return torch.export.export(module, args, dynamic_shapes=(DYNAMIC,) * len(args))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Runs the blocks of the page except ONNX; returns their names and the folder they wrote to."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler: apt-get install g++")
    folder, names = tmp_path_factory.mktemp("page"), {"__name__": "page"}
    torch.manual_seed(0)
    for block in BLOCKS:
        if "onnx" not in block:
            exec(compile(block.replace("/tmp/", f"{folder}/"), "<deployment.md>", "exec"), names)
    return names, folder


@pytest.mark.slow
def test_the_package_of_the_page_gives_the_answers_of_the_model(page):
    names, _ = page
    for count in (1, 3, 8, 0):
        queries = torch.randn(count, 32)
        log_probs, ids = names["served"](queries)
        want = names["model"](queries)
        assert torch.equal(ids, want[1])
        # the encoder is compiled, so sums may differ
        torch.testing.assert_close(log_probs, want[0].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_exported_index_of_the_page_gives_the_results_of_search(page):
    names, _ = page
    queries = torch.randn(4, 32)
    scores, ids = names["searching"].module()(queries)
    want = names["loss"].search(names["encoder"](queries), 5)
    assert torch.equal(ids, want.ids) and torch.equal(scores, want.scores)


# ---- the C++ program


def serve(*arguments, text=""):
    if not SERVE.is_file():
        pytest.skip("examples/cpp_app/serve is not built: make exchange")
    return subprocess.run([SERVE, *map(str, arguments)], input=text, capture_output=True, text=True,
                          timeout=60)


def lines(queries):
    return "".join(" ".join(map(repr, query)) + "\n" for query in queries.tolist())


@pytest.mark.parametrize("batch, from_file", [(1, False), (3, True)])
def test_the_cpp_program_gives_the_answers_of_the_model(page, batch, from_file):
    names, folder = page
    queries = torch.randn(7, 32)
    (folder / "queries.txt").write_text(lines(queries))
    arguments, text = ([folder / "queries.txt"], "") if from_file else ([], lines(queries))
    done = serve(folder / "model.pt2", *arguments, "--batch", batch, text=text)
    assert done.returncode == 0, done.stderr
    answers = [[pair.split(":") for pair in line.split()] for line in done.stdout.splitlines()]
    log_probs, ids = names["model"](queries)
    assert [[int(id) for id, _ in answer] for answer in answers] == ids.tolist()
    torch.testing.assert_close(
        torch.tensor([[float(value) for _, value in answer] for answer in answers]),
        log_probs.detach(), rtol=1e-5, atol=2e-5)
    assert re.search(
        rf"^{-(-7 // batch)} calls of up to {batch} queries, 1 threads: median [\d.]+ "
        r"us", done.stderr)


@pytest.mark.parametrize("text, message", [("1 2 3\n", "line 1: expected 32 numbers, got 3"),
                                           ("\n", "line 1: expected 32 numbers, got 0"),
                                           ("0 " * 32 + "\n1 a\n", "line 2: expected numbers, got "
                                            "'a'")])
def test_the_cpp_program_refuses_malformed_queries(page, text, message):
    done = serve(page[1] / "model.pt2", text=text)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stdout.splitlines()) == text.count("\n") - 1  # queries before it are answered


def test_the_cpp_program_refuses_a_file_that_is_no_package(tmp_path):
    (tmp_path / "model.pt2").write_text("no archive")
    assert serve(tmp_path / "model.pt2").returncode == 1
    gone = serve(tmp_path / "gone.pt2")
    assert gone.returncode == 2 and f"cannot read {tmp_path}/gone.pt2" in gone.stderr


def test_the_cpp_program_refuses_a_package_without_a_query_width(page, tmp_path):
    with zipfile.ZipFile(page[1] / "model.pt2") as whole, zipfile.ZipFile(
            tmp_path / "model.pt2", "w") as part:
        for name in whole.namelist():
            part.writestr(
                name,
                whole.read(name).replace(b'"width"', b'"depth"')
                if name.endswith("_metadata.json") else whole.read(name))
    done = serve(tmp_path / "model.pt2", text="1 2 3\n")
    assert done.returncode == 2 and "got none" in done.stderr
    assert "expected the width of a query in the package's metadata" in done.stderr


# ---- ONNX


def problem(dtype=torch.float32, bias=True):
    """Returns a loss, queries (the last one is NaN) and the ids that they exclude.

    Numbers are small integers, so scores are exact in any order of sums and many are equal.
    """
    torch.manual_seed(1)
    loss = xs.SampledSoftmaxLoss(16, 300, sampler="uniform", num_samples=8, bias=bias,
                                 dtype=dtype).eval()
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    queries = torch.randint(-2, 3, (6, 16)).to(dtype)
    queries[5, 0] = float("nan")
    best = loss.topk(queries, 1)[1]
    return loss, queries, torch.cat([best, torch.full_like(best, 7), torch.full_like(best, -1)], 1)


def by_formula(loss, queries, exclude):
    """Returns log-probabilities and ids of the best five by sorting all classes in float64.

    Of equal classes the lower id is first.
    """
    bias = 0 if loss.linear.bias is None else loss.linear.bias.detach().double()
    log_probs = (queries.double() @ loss.linear.weight.detach().double().T + bias).log_softmax(1)
    for row, ids in enumerate(exclude):
        log_probs[row, ids[ids >= 0]] = -float("inf")
    values, ids = log_probs.sort(dim=1, descending=True, stable=True)
    return values[:, :5].float(), ids[:, :5]


@pytest.mark.parametrize("dtype, bias, excludes", [(torch.float32, True, True),
                                                   (torch.float32, False, False),
                                                   (torch.float16, True, False)])
def test_onnx_gives_the_answers_of_topk(dtype, bias, excludes, tmp_path):
    pytest.importorskip("onnxscript", reason="onnx is not installed: pip install "
                        "xsoftmax[deployment]")
    runtime = pytest.importorskip(
        "onnxruntime", reason="onnxruntime is not installed: pip install "
        "xsoftmax[deployment]")
    loss, queries, exclude = problem(dtype, bias)
    args = (queries, exclude) if excludes else (queries,)
    with torch.no_grad():
        program = exported(Topk(loss).eval(),
                           *(x[:4] for x in args)).run_decompositions(xs.decompositions())
        torch.onnx.export(program, f=str(tmp_path / "model.onnx"), verbose=False)
        want = Topk(loss)(*args)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    values, ids = map(
        torch.from_numpy,
        session.run(None, {given.name: x.numpy()
                           for given, x in zip(session.get_inputs(), args)}))
    exact, exact_ids = by_formula(loss, queries[:5], exclude[:5] if excludes else [])
    assert torch.equal(ids[:5], exact_ids) and torch.equal(
        ids, want[1]) and values.dtype == torch.float32
    torch.testing.assert_close(values[:5], exact, rtol=1e-5, atol=1e-5)
    # some scores are equal, so their order was compared
    assert len(exact_ids) == 5 and (exact[:, 1:] == exact[:, :-1]).any()
    torch.testing.assert_close(values, want[0], rtol=1e-5, atol=1e-5, equal_nan=True)


def test_the_onnx_program_of_the_page_runs(page):
    pytest.importorskip("onnxscript", reason="onnx is not installed: pip install "
                        "xsoftmax[deployment]")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install "
                        "xsoftmax[deployment]")
    names, folder = page
    (block,) = (block for block in BLOCKS if "onnx" in block)
    exec(compile(block.replace("/tmp/", f"{folder}/"), "<deployment.md>", "exec"), names)
    assert torch.equal(torch.from_numpy(names["best"]), names["model"](names["queries"])[1])


def test_decompositions_leave_only_aten_operators():
    loss, queries, exclude = problem()
    with torch.no_grad():
        program = exported(Topk(loss), queries, exclude).run_decompositions(xs.decompositions())
        assert "linear_topk" not in str(program.graph) and "xsoftmax" not in str(program.graph)
        values, ids = program.module()(queries[:2], exclude[:2])
        want = loss.topk(queries[:2], 5, exclude=exclude[:2])
    # ids may differ: torch.topk may return any of equal classes
    torch.testing.assert_close(values, want[0], rtol=1e-5, atol=1e-5)
    assert not (ids.unsqueeze(2) == exclude[:2].unsqueeze(1)).any()


def test_topk_after_exclusion_is_padded_with_minus_one():
    exclude = torch.tensor([[0, 2, 3, 9], [9, 9, 8, -1]])
    arguments = (-torch.arange(4.0).expand(2, 4), torch.arange(4).expand(2, 4), exclude, 10, 3)
    values, ids = xs.decompositions()[torch.ops.xsoftmax.exclude_topk.default](*arguments)
    assert ids.tolist() == [[1, -1, -1], [0, 1, 2]] and values.tolist() == [[
        -1, -float("inf"), -float("inf")
    ], [0, -1, -2]]


def test_onnx_of_a_tree_is_refused_with_the_name_of_the_operator():
    pytest.importorskip("onnxscript", reason="onnx is not installed: pip install "
                        "xsoftmax[deployment]")
    tree = xs.HierarchicalSoftmaxLoss(8, xs.LabelTree.random(50, 4)).eval()
    with torch.no_grad(), pytest.raises(torch.onnx.errors.OnnxExporterError) as caught:
        torch.onnx.export(
            exported(Topk(tree), torch.randn(3, 8)).run_decompositions(xs.decompositions()),
            verbose=False)
    assert "xsoftmax.hierarchical_topk" in str(caught.value)


# ---- torch.export


def trees():
    tree = xs.LabelTree.random(200, 8)
    matcher = xs.HierarchicalMatcher(16, tree)
    while matcher.next_layer():
        pass
    return {
        "beam tree": xs.BeamTreeLoss(16, tree, num_candidates=8, num_noises=8),
        "hierarchical softmax": xs.HierarchicalSoftmaxLoss(16, tree), "matcher": matcher
    }


@pytest.mark.parametrize("excludes", [False, True])
@pytest.mark.parametrize("kind", ["beam tree", "hierarchical softmax", "matcher"])
def test_exported_topk_of_trees_gives_the_same_answers(kind, excludes):
    torch.manual_seed(2)
    module = Topk(trees()[kind]).eval()
    queries, exclude = torch.randn(7, 16), torch.randint(-1, 200, (7, 3))
    args = (queries, exclude) if excludes else (queries,)
    with torch.no_grad():
        found = exported(module, *(x[:4] for x in args)).module()(*args)
        assert all(torch.equal(a, b) for a, b in zip(found, module(*args)))


def test_a_matcher_exported_before_it_was_trained_refuses_to_answer():
    matcher = xs.HierarchicalMatcher(16, xs.LabelTree.random(200, 8)).eval()
    program = exported(Topk(matcher), torch.randn(4, 16))
    with pytest.raises(
            RuntimeError, match="HierarchicalMatcher: expected all of "
            f"{matcher.tree.depth} layers trained before export"):
        program.module()(torch.randn(4, 16))


def test_a_model_in_training_is_not_exported():
    """Its table may have pending updates, which an exported program cannot apply."""
    loss = xs.SampledSoftmaxLoss(16, 300, sampler="uniform", num_samples=8)
    with pytest.raises(
            RuntimeError, match=r"SampledSoftmaxLoss: expected the model in eval\(\) "
            r"for torch.export"):
        exported(Topk(loss), torch.randn(4, 16))


def test_search_is_not_exported():
    loss = xs.SampledSoftmaxLoss(16, 300, sampler="uniform", num_samples=8).eval()
    with pytest.raises(
            ValueError, match="SampledSoftmaxLoss: expected topk in torch.export, got "
            "search: export torch.ops.xsoftmax.search_topk with"):
        exported(Search(loss), torch.randn(4, 16))
