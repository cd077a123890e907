"""combinations.py tries all values of each option with all estimators, samplers and losses."""

import collections

from combinations import COMBINATIONS, ESTIMATORS, OPTIMIZERS, SAMPLERS

REDUCTIONS = {"mean", "sum", "none"}


def values(made):
    """Returns {option: value} of a combination."""
    options = made.options
    return {
        "optimizer": made.optimizer, "reduction": options["reduction"], "bias": options["bias"],
        "head": "head" in made.tensors, "weight": "weight" in made.tensors,
        "smoothing": "label_smoothing" in options,
        "hits": options.get("remove_accidental_hits",
                            True), "sparse": options.get("sparse_grad", True)
    }


def met(key):
    """Returns {key: {option: set of values}} over combinations of SampledSoftmaxLoss."""
    found = collections.defaultdict(lambda: collections.defaultdict(set))
    for made in COMBINATIONS.values():
        if made.loss == "SampledSoftmaxLoss":
            for option, value in values(made).items():
                found[key(made)][option].add(value)
    return found


def test_every_estimator_meets_every_option():
    found = met(lambda made: made.options["estimator"])
    assert set(found) == set(ESTIMATORS)
    for estimator, of in found.items():
        assert of["optimizer"] == set(OPTIMIZERS) and of["reduction"] == REDUCTIONS, estimator
        assert all(len(of[option]) == 2
                   for option in ("bias", "weight", "hits", "sparse")), (estimator, of)
        # these estimators need a head, or cannot have one
        assert len(of["head"]) == 2 or estimator in ("cane", "cane_log_of_mean",
                                                     "complementary_sum"), estimator
        assert len(
            of["smoothing"]) == 2 or estimator not in ("sampled_softmax", "ranking"), estimator


def test_every_sampler_meets_every_optimizer():
    found = met(lambda made: next(name for name, spec in SAMPLERS.items() if spec is made.sampler))
    assert set(found) == set(SAMPLERS)
    for sampler, of in found.items():
        assert of["optimizer"] == set(OPTIMIZERS) and of["reduction"] == REDUCTIONS and len(
            of["bias"]) == len(of["head"]) == 2, sampler


def test_other_losses_meet_every_option():
    for loss in ("CaneLoss", "BeamTreeLoss", "HierarchicalSoftmaxLoss"):
        made = [values(made) for made in COMBINATIONS.values() if made.loss == loss]
        assert {of["reduction"]
                for of in made} == REDUCTIONS and {of["bias"]
                                                   for of in made} == {False, True}, loss
        assert len({of["optimizer"] for of in made}) == min(len(OPTIMIZERS), len(made)), loss
    cane = [made for made in COMBINATIONS.values() if made.loss == "CaneLoss"]
    for option, all_values in (("reduction", REDUCTIONS), ("optimizer", OPTIMIZERS)):
        found = {(made.options["noise_reduction"], values(made)[option]) for made in cane}
        assert found == {(noise, value)
                         for noise in ("mean_of_logs", "log_of_mean")
                         for value in all_values}
