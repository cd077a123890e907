"""Losses under torch.nn.utils.parametrize and torch.func work or raise a clear error."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize, prune

import xsoftmax as xs

N, D, Q = 50, 6, 9


class Cosine(torch.nn.Module):
    def forward(self, weight):
        return F.normalize(weight, dim=-1)


def data():
    torch.manual_seed(0)
    return torch.randn(Q, D), torch.randint(0, N, (Q,))


def sampled(**options):
    return xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=N, **options)


@pytest.mark.parametrize("wrap", [
    parametrizations.weight_norm,
    lambda linear: parametrize.register_parametrization(linear, "weight", Cosine())
])
def test_parametrized_tables_train_with_dense_gradients(wrap):
    input, target = data()
    loss, exact = sampled(sparse_grad=False, bias=True), xs.LinearCrossEntropyLoss(D, N, bias=True)
    for made in (loss, exact):
        wrap(made.linear)
        made(input, target).backward()
        for parameter in made.linear.parametrizations.parameters():
            assert parameter.grad is not None and parameter.grad.layout == torch.strided
            assert parameter.grad.abs().sum() > 0
    before = exact.linear.weight.detach().clone()
    torch.testing.assert_close(exact(input, target),
                               F.cross_entropy(F.linear(input, before, exact.linear.bias), target))
    torch.optim.SGD(exact.parameters(), lr=1.0).step()
    assert not torch.equal(exact.linear.weight, before)
    torch.testing.assert_close(exact.eval().topk(input, 3)[0], exact.log_prob(input).topk(3).values)
    sparse = sampled()
    wrap(sparse.linear)
    with pytest.raises(
            ValueError, match=r"SampledSoftmaxLoss: .*got linear with one \(weight\): "
            r"make the loss with sparse_grad=False"):
        sparse(input, target)


@pytest.mark.parametrize("make", [
    lambda: xs.LinearCrossEntropyLoss(D, N), lambda: sampled(sparse_grad=False), lambda: sampled()
])
def test_functional_call_uses_the_given_parameters(make):
    input, target = data()
    loss = make()
    other = {
        name: torch.randn_like(parameter).requires_grad_()
        for name, parameter in loss.named_parameters()
    }
    torch.manual_seed(1)
    value = functional_call(loss, other, (input, target))
    got, = torch.autograd.grad(value, list(other.values()))
    with torch.no_grad():
        loss.linear.weight.copy_(other["linear.weight"])
    torch.manual_seed(1)
    plain = loss(input, target)
    plain.backward()
    assert torch.equal(value, plain) and torch.equal(got.to_dense(),
                                                     loss.linear.weight.grad.to_dense())


def test_grad_and_vmap_of_torch_func_are_refused():
    input, target = data()
    tree = xs.LabelTree.balanced(N, 4)
    for loss in (xs.LinearCrossEntropyLoss(D, N), sampled(), sampled(sparse_grad=False).eval(),
                 xs.HierarchicalSoftmaxLoss(D, tree),
                 xs.BeamTreeLoss(D, tree, num_candidates=3, num_noises=2)):
        parameters = {name: parameter.detach() for name, parameter in loss.named_parameters()}
        for call in (lambda: grad(lambda p: functional_call(loss, p, (input, target)))
                     (parameters), lambda: vmap(lambda x, y: loss(x.unsqueeze(0), y.unsqueeze(0)),
                                                randomness="different")(input, target)):
            with pytest.raises(
                    RuntimeError, match=f"{type(loss).__name__}: expected a call "
                    "outside of torch.func's transforms"):
                call()


@pytest.mark.parametrize("wrap", [
    torch.nn.utils.spectral_norm, torch.nn.utils.weight_norm,
    lambda linear: prune.l1_unstructured(linear, "weight", 0.1)
], ids=["spectral_norm", "weight_norm", "prune"])
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_weight_that_a_hook_computes_is_refused(wrap):
    """Such a hook runs before the forward pass of the Linear, which the loss never calls."""
    with pytest.raises(
            ValueError, match="from_linear: expected an nn.Linear whose weight and bias "
            "are parameters"):
        xs.LinearCrossEntropyLoss.from_linear(wrap(torch.nn.Linear(D, N)))


def test_from_linear_refuses_parametrized_and_lazy_layers():
    make, options = xs.SampledSoftmaxLoss.from_linear, dict(sampler="uniform", num_samples=4)
    with pytest.raises(
            ValueError, match=r"table without parametrization for sparse_grad=None, got "
            r"linear with one \(weight\)"):
        make(parametrizations.weight_norm(torch.nn.Linear(D, N)), **options)
    make(parametrizations.weight_norm(torch.nn.Linear(D, N)), **options, sparse_grad=False)
    with pytest.raises(TypeError, match="expected an nn.Linear whose sizes are known, got "
                       "LazyLinear"):
        make(torch.nn.LazyLinear(N), **options)
