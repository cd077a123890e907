"""load_state_dict refuses, by name, tables of a sampler that no draw can use. Otherwise the loss
would be NaN, or an error would come from inside the loading."""

import pytest
import torch

import xsoftmax as xs
from xsoftmax.samplers import StreamingCounts, UnigramSampler, make_sampler

from gradient_checks import seeded  # noqa: F401 (a fixture of every test)

N, D = 40, 6
ADAPTIVE = ("midx", "midx_exact", "midx_spread", "midx_learnable", "lsh", "sphere", "rff")


def refreshed(name):
    if name == "unigram":
        sampler = UnigramSampler(StreamingCounts(N), 5)
        sampler.prepare(torch.zeros(N, D), None)
        return sampler
    sampler = make_sampler(name, N, dim=D, bias=True)
    sampler.refresh(torch.randn(N, D), torch.randn(N))
    return sampler


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_table_with_a_nan_is_named(name, value, strict):
    saved, tried = refreshed(name).state_dict(), 0
    for key, table in saved.items():
        if not table.is_floating_point() or table.numel() == 0:
            continue
        sampler = make_sampler(name, N, dim=D, bias=True)
        before = {other: kept.clone() for other, kept in sampler.state_dict().items()}
        spoilt = table.clone()
        spoilt.view(-1)[-1] = value
        with pytest.raises(
                RuntimeError, match=rf"{type(sampler).__name__}: expected {key} with "
                rf"finite values, got {value}"):
            sampler.load_state_dict({**saved, key: spoilt}, strict=strict)
        assert all(torch.equal(kept, before[other]) for other, kept in sampler.state_dict().items())
        tried += 1
    assert tried >= 1


def test_the_error_names_a_table_with_its_prefix():
    loss = xs.SampledSoftmaxLoss(D, N, sampler="midx")
    saved = loss.state_dict()
    saved["sampler.codewords2"] = torch.full_like(saved["sampler.codewords2"], float("nan"))
    with pytest.raises(
            RuntimeError, match="MidxSampler: expected sampler.codewords2 with finite "
            "values, got nan"):
        loss.load_state_dict(saved)


@pytest.mark.parametrize("name", [*ADAPTIVE, "unigram"])
def test_a_list_instead_of_a_table_is_refused(name):
    sampler = refreshed(name)
    saved = sampler.state_dict()
    for key in saved:
        with pytest.raises(
                RuntimeError, match=rf'parameter named "{key}", expected torch.Tensor .* received '
                r"<class 'list'>"):
            sampler.load_state_dict({**saved, key: saved[key].view(-1).tolist()})
    cells = {
        key: table
        for key, table in saved.items()
        if key not in ("order", "start", "mass", "prefix", "heaviest")
    }
    if "cell" in cells:  # as saved by ranks that split the classes
        with pytest.raises(RuntimeError, match='parameter named "cell"'):
            sampler.load_state_dict({**cells, "cell": [1, 2]})


def test_lists_instead_of_ids_and_trees_are_refused():
    table = xs.IdTable(8)
    for key, value in table.state_dict().items():
        with pytest.raises(RuntimeError, match=rf"IdTable.*expected {key} as a tensor, got list"):
            table.load_state_dict({**table.state_dict(), key: value.tolist()})
    loss = xs.BeamTreeLoss(D, xs.LabelTree.from_frequencies(torch.arange(1.0, 10.0), 3),
                           num_candidates=3, num_noises=1, routed=True)
    with pytest.raises(RuntimeError, match='parameter named "tree.parent"'):
        loss.load_state_dict({**loss.state_dict(), "tree.parent": [1, 2]})
