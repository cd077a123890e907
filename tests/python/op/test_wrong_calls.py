"""Errors of wrong calls name the call, what it got, and what to write instead."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import xsoftmax as xs
from xsoftmax.samplers import StreamingCounts

from gradient_checks import seeded  # noqa: F401 (an autouse fixture)

D, N, Q = 4, 9, 3
TREE = xs.LabelTree.balanced(N, 3)
X, Y = torch.ones(Q, D), torch.tensor([1, 2, 3])
WEIGHTS = torch.ones(N)
P = sp.csr_matrix(np.eye(Q, dtype=np.float32))
IN_CONSTRUCTOR = "class weights are an argument of the constructor, weight=..."


@pytest.mark.parametrize("matrix, use", [(P, "[P]"), (P.tocsc(), "[P]"), (sp.coo_array(P), "[P]"),
                                         (P.toarray(), "[scipy.sparse.csr_matrix(P)]"),
                                         (torch.eye(Q), "[scipy.sparse.csr_matrix(P)]")])
def test_a_single_matrix_of_predictions_is_refused(matrix, use):
    with pytest.raises(TypeError) as caught:
        xs.combine_predictions(matrix)
    assert str(caught.value) == ("combine_predictions: expected predictions as a list of matrices, "
                                 "got "
                                 f"{type(matrix).__name__}: use {use}")


def cross_entropy():
    return xs.LinearCrossEntropyLoss(D, N)


def sampled():
    return xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3)


def cane():
    return xs.CaneLoss(D, N, candidates=3)


def hierarchical():
    return xs.HierarchicalSoftmaxLoss(D, TREE)


def counts():
    return StreamingCounts(N)


def streamed(name):
    def call(ids):
        return getattr(counts(), name)(ids)

    return call


CALLS = [
    # third arguments
    (lambda: cross_entropy()(X, Y, WEIGHTS), ValueError, "LinearCrossEntropyLoss: expected "
     "target_prob", IN_CONSTRUCTOR),
    (lambda: cross_entropy().exact(X, Y, WEIGHTS), ValueError, "LinearCrossEntropyLoss: expected "
     "target_prob", IN_CONSTRUCTOR),
    (lambda: cross_entropy()(X, Y[:, None], WEIGHTS), ValueError, "LinearCrossEntropyLoss: "
     "expected target_prob", IN_CONSTRUCTOR),
    (lambda: sampled().exact(X, Y, WEIGHTS), ValueError, "SampledSoftmaxLoss: expected target_prob",
     IN_CONSTRUCTOR),
    (lambda: sampled()(X, Y, target_prob=WEIGHTS), ValueError, "SampledSoftmaxLoss: expected "
     "target_prob", IN_CONSTRUCTOR),
    (lambda: hierarchical()(X, Y, WEIGHTS), TypeError, "HierarchicalSoftmaxLoss: expected "
     "generator", IN_CONSTRUCTOR),
    (lambda: cross_entropy()(X, Y, torch.Generator()), TypeError, "target_prob as a tensor or "
     "None, got Generator", "draws nothing"),
    (lambda: cross_entropy().exact(X, Y, torch.Generator()), TypeError, "target_prob as a tensor "
     "or None, got Generator", "draws nothing"),
    (lambda: xs.TwoTowerLoss(N)(X, X, Y, torch.ones(Q)), TypeError, "TwoTowerLoss: expected "
     "negatives as (vectors, ids), "
     "got Tensor", "weight=..."),
    (lambda: cane()(X, Y, target_prob=torch.ones(Q)), ValueError, "CaneLoss: expected hard targets",
     "LinearCrossEntropyLoss, SampledSoftmaxLoss"),
    (lambda: cane().eval()(X, Y, target_prob=torch.ones(Q)), ValueError, "CaneLoss: expected hard "
     "targets", "exact(input, target, target_prob)"),
    # arrays, lists and sets
    *[(lambda name=name, ids=ids: streamed(name)(ids), TypeError, "StreamingCounts: expected ids "
       "as a tensor, got "
       f"{type(ids).__name__}", "use torch.as_tensor(ids)")
      for name in ("update", "forward", "forget", "counts", "log_prob")
      for ids in ([1, 2], np.array([1, 2]))],
    (lambda: counts().update(Y, [True] * Q), TypeError, "StreamingCounts: expected mask as a "
     "tensor, got list", "torch.as_tensor(mask)"),
    (lambda: xs.metrics.precision_at_k(np.array([[1]]), [[1]], 1), TypeError, "predictions as a "
     "tensor", "got ndarray: use torch.as_tensor"),
    (lambda: xs.metrics.recall_at_k(torch.tensor([[1]]), np.array([1]), 1), TypeError,
     "truth as an int64 tensor", "got ndarray: use torch.as_tensor"),
    (lambda: xs.metrics.ndcg_at_k(torch.tensor([[1]]), {1}, 1), TypeError, "truth as an int64 "
     "tensor", "got set: use sorted(...)"),
    (lambda: xs.metrics.ndcg_at_k(torch.tensor([[1]]), [{1}], 1), TypeError, "class ids in "
     "truth[0]", "got set: use sorted(...)"),
    (lambda: xs.metrics.psp_at_k(torch.tensor([[1]]), [[1]], 1, np.ones(2)), TypeError,
     "propensity as a floating tensor", "got ndarray: use torch"),
    (lambda: xs.metrics.coverage(np.array([1]), Y), TypeError, "candidates as an int64 tensor",
     "got ndarray: use torch.as_tensor"),
    # modules
    (lambda: xs.clip_grad_norm_(cross_entropy(), 1.0), TypeError, "clip_grad_norm_: expected "
     "parameters", "got LinearCrossEntropyLoss: pass loss.parameters()"),
    (lambda: xs.clip_grad_norm_([cross_entropy()], 1.0), TypeError, "clip_grad_norm_: expected "
     "parameters", "pass loss.parameters()"),
    (lambda: xs.clip_grad_norm_(3, 1.0), TypeError, "clip_grad_norm_: expected parameters",
     "got int"),
    # head classes
    (lambda: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3, head_classes=np.array(
        [1, 2], np.int32)), TypeError, "head_classes as a number or 1-D int64 ids, got int32",
     "use .long()"),
    (lambda: xs.CaneLoss(D, N, candidates=torch.tensor([1, 2], dtype=torch.int16)), TypeError,
     "1-D int64 ids, got int16", "use .long()"),
    (lambda: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3, head_classes=
                                   [5, 1, 7, 1]), ValueError, "head_classes without repeats",
     "got 1 more than once"),
    # keywords
    (lambda: xs.XRLinear.train(P, P, arty=3), TypeError, "XRLinear.train: expected arguments of "
     "the function, got arty", "did you mean arity?"),
    (lambda: xs.XRLinear.train(P, P).predict(P, top_k=3), TypeError, "XRLinear.predict: expected "
     "arguments of the function, "
     "got top_k", "did you mean topk?"),
    (lambda: xs.LabelTree.balanced(N, arty=3), TypeError, "LabelTree.balanced: expected arguments "
     "of the function, got arty", "did you mean arity?"),
    (lambda: xs.functional.linear_cross_entropy(X, torch.ones(N, D), Y, smoothing=0.1), TypeError,
     "linear_cross_entropy: expected arguments of the function", "did you mean label_smoothing?"),
    (lambda: xs.functional.linear_cross_entropy(X, torch.ones(N, D), Y, weights=WEIGHTS), TypeError,
     "linear_cross_entropy: expected arguments of the function", "did you mean class_weight?"),
    (lambda: xs.functional.linear_log_prob(X, torch.ones(N, D), Y, soft_cap=3.0), TypeError,
     "got soft_cap", "did you mean softcap?"),
    (lambda: xs.functional.linear_entropy(X, torch.ones(N, D), logits_scale=3.0), TypeError,
     "got logits_scale", "did you mean logit_scale?"),
    (lambda: xs.functional.tower_loss(X, X, Y, [], weights=WEIGHTS), TypeError,
     "tower_loss: expected arguments of the function", "did you mean weight?"),
]


@pytest.mark.parametrize("call, error, expected, hint", CALLS, ids=range(len(CALLS)))
def test_the_error_names_what_to_write(call, error, expected, hint):
    with pytest.raises(error) as caught:
        call()
    assert expected in str(caught.value) and hint in str(caught.value)


def test_a_replaced_head_is_not_replaced_again():
    model = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Linear(D, N))
    loss = xs.replace_head(model, "1", xs.LinearCrossEntropyLoss)
    with pytest.raises(
            ValueError, match=r"^replace_head: expected '1' .* its head is replaced "
            r"already, by a LinearCrossEntropyLoss: .*restore_head"):
        xs.replace_head(model, "1", xs.LinearCrossEntropyLoss)
    assert model[1].loss is loss


def test_losses_over_trees_accept_a_generator():
    """Also those that draw nothing, so that losses can be exchanged."""
    for loss in (hierarchical(), xs.BeamTreeLoss(D, TREE, num_candidates=3, num_noises=1)):
        generator = torch.Generator().manual_seed(3)
        assert loss(X, Y, generator).isfinite() and torch.jit.script(loss)(X, Y,
                                                                           generator).isfinite()
    assert hierarchical()(X, Y, torch.Generator()).isfinite()
