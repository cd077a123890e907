"""logit_scale, softcap and z_loss as options: samplers, tools and estimators use them, and parts
that cannot refuse them."""

import pytest
import torch

import xsoftmax as xs
from logit_transform_checks import (TRANSFORMS, D, N, Q, drawn_sets, losses, ops, plain, problem,
                                    transformed)
from xsoftmax._core.options import option_text


class Recorder(xs.samplers.UniformSampler):
    def sample(self, queries, target, generator=None):
        self.seen = queries
        return super().sample(queries, target, generator)


def test_samplers_see_scaled_queries():
    input, _, _, target = problem(dtype=torch.float32)
    sampler = Recorder(N, 4)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=sampler, logit_scale=3.0, softcap=5.0)
    loss(input, target)
    torch.testing.assert_close(sampler.seen, torch.where((target >= 0)[:, None], 3 * input, 0.0))
    xs.diagnose(loss, input, target, draws=2)
    torch.testing.assert_close(sampler.seen, 3 * input[target >= 0])


def test_diagnose_measures_transformed_logits():
    """With all classes as candidates the error is 0; the proposal is uniform, so its distance is
    that of the transformed softmax."""
    input, _, _, target = problem(dtype=torch.float64)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=None, head_classes=N, dtype=torch.float64,
                                 **TRANSFORMS["all"])
    found = xs.diagnose(loss, input, target, draws=2)
    assert abs(found.log_z_bias) < 1e-6 and found.gradient_bias < 1e-6
    log_p = transformed(loss.linear(input[1:]), **TRANSFORMS["all"]).log_softmax(1)
    torch.testing.assert_close(found.kl, (-torch.tensor(float(N)).log() - log_p).mean().item())


def test_advise_keeps_the_options(monkeypatch):
    """The suggested code of every loss names the options, and the sampled losses that were measured
    use them."""
    monkeypatch.setattr(xs.tools.advise_bench, "_ROUNDS", 3)
    torch.manual_seed(0)
    input, target = torch.randn(64, D), torch.arange(64) % N
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4, logit_scale=2.0,
                                 softcap=30.0, z_loss=1e-4)
    rows = {
        row.name: row
        for row in xs.advise(loss, input, target, 10, samplers=["uniform"], draws=[4]).rows
    }
    assert all("logit_scale=2.0, softcap=30.0, z_loss=0.0001" in rows[name].code
               for name in ("exact", "uniform 4"))
    assert rows["uniform 4"].bias < 0.5  # relative to the exact gradient with these options


def test_assigned_options_are_used():
    input, _, _, target = problem(dtype=torch.float32)
    for loss in losses():
        for name, value in TRANSFORMS["all"].items():
            setattr(loss, name, value)
        want = plain(input, loss.linear.weight, loss.linear.bias, target, **TRANSFORMS["all"])
        torch.testing.assert_close(loss.exact(input, target), want)
        assert "logit_scale=1.7, softcap=3.0, z_loss=0.1" in repr(loss)
        copied = xs.LinearCrossEntropyLoss.from_linear(loss.linear, **TRANSFORMS["all"])
        assert torch.equal(copied(input, target), loss.exact(input, target))
        loss.resize_classes(N + 2)
        assert torch.equal(
            loss.topk(input, 1)[1].squeeze(1),
            loss.linear(input).argmax(1)) and loss.log_prob(input).shape == (Q, N + 2)


@pytest.mark.parametrize("name, value, error", [("logit_scale", 0.0, ValueError),
                                                ("logit_scale", -1.0, ValueError),
                                                ("logit_scale", float("inf"), ValueError),
                                                ("logit_scale", "2", TypeError),
                                                ("logit_scale", None, TypeError),
                                                ("softcap", 0.0, ValueError),
                                                ("softcap", -3.0, ValueError),
                                                ("softcap", float("nan"), ValueError),
                                                ("softcap", True, TypeError),
                                                ("z_loss", -0.1, ValueError),
                                                ("z_loss", float("inf"), ValueError)])
def test_options_out_of_range(name, value, error):
    for make in (xs.LinearCrossEntropyLoss, lambda *args, **options: xs.SampledSoftmaxLoss(
            *args, sampler="uniform", num_samples=3, **options),
                 lambda *args, **options: xs.CaneLoss(*args, candidates=3, **options)):
        with pytest.raises(error, match=f"expected {name} as a"):
            make(D, N, **{name: value})
    input, weight, _, target = problem()
    if isinstance(value, float):
        with pytest.raises(ValueError, match=f"expected {name} as a finite number"):
            xs.functional.linear_cross_entropy(input, weight, target, **{name: value})
        with pytest.raises(ValueError, match=f"expected {name} as a finite number"):
            xs.functional.sampled_softmax_loss(input, weight, target, drawn_sets(), **{name: value})
    if isinstance(value, float) and (name, value) != ("softcap", 0.0):
        for call in (lambda text: ops.linear_cross_entropy(input, weight, None, target, None, text),
                     lambda text: ops.linear_positives_loss(input, weight, None, target[:, None],
                                                            None, text), lambda text: ops.
                     sampled_softmax_loss(input, weight, None, target,
                                          *xs.samplers.columns_of(drawn_sets()), None, None, text)):
            with pytest.raises(ValueError, match=f"expected {name} as a finite number"):
                call(option_text(**{name: value}))
        if name != "z_loss":
            with pytest.raises(ValueError,
                               match=f"linear_topk: expected {name} as a finite number"):
                ops.linear_topk(input, weight, None, 1, option_text(**{name: value}))


@pytest.mark.parametrize("estimator", ["nce", "negative_sampling", "one_vs_each", "blackout"])
def test_estimators_without_a_normaliser_refuse_z_loss(estimator):
    with pytest.raises(
            ValueError, match=f"expected z_loss=0 with estimator='{estimator}', which "
            "has no log normaliser, got 0.1"):
        xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3, estimator=estimator,
                              z_loss=0.1)
    input, weight, _, target = problem()
    with pytest.raises(
            ValueError, match=f'expected z_loss of 0 with estimator "{estimator}", which has no '
            "log normaliser, got 0.1"):
        xs.functional.sampled_softmax_loss(input, weight, target, drawn_sets(), estimator=estimator,
                                           z_loss=0.1)


def test_tables_split_over_ranks_refuse_the_options():
    from xsoftmax.distributed.class_parallel import check_splits
    for options in TRANSFORMS.values():
        with pytest.raises(
                ValueError, match="shard_classes: expected a loss with logit_scale=1, "
                "softcap=None and z_loss=0"):
            check_splits("shard_classes", xs.LinearCrossEntropyLoss(D, N, **options), "auto")


def test_steps_without_scores_refuse_the_options():
    """Operators that never hold the scores would ignore the options silently."""
    input, weight, bias, target = problem(dtype=torch.float32, ignored=0)
    candidates = [None, torch.arange(3), None, torch.zeros(3), None]
    with pytest.raises(ValueError, match="expected logit_scale of 1, no softcap and no z_loss"):
        ops.linear_candidate_loss(input, weight, bias, target, candidates, [0, 3], "softcap=2.0")
    tree = xs.LabelTree.balanced(N, 3)
    edges = torch.randn(tree.num_edges, D)
    with pytest.raises(
            ValueError, match="beam_tree_loss: expected logit_scale of 1, no softcap "
            "and no z_loss"):
        ops.beam_tree_loss(input, edges, None, target, tree.tables(), list(tree.layer_sizes),
                           *xs.samplers.columns_of(drawn_sets()), None, "z_loss=0.1")


def test_an_estimator_in_python_gets_transformed_logits():
    name = "test_logit_transforms"
    if name not in xs.estimators._PYTHON_ESTIMATORS:
        xs.register_estimator(name, lambda batch: batch.adjusted.logsumexp(1) - batch.target,
                              weighs=True)
    input, _, _, target = problem(dtype=torch.float64)
    options = dict(sampler=None, head_classes=N, bias=True, dtype=torch.float64, estimator=name,
                   logit_scale=1.7, softcap=3.0)
    loss = xs.SampledSoftmaxLoss(D, N, **options)
    torch.testing.assert_close(loss(input, target), loss.exact(input, target))
    with pytest.raises(ValueError, match="which has no log normaliser"):
        xs.SampledSoftmaxLoss(D, N, z_loss=0.1, **options)
