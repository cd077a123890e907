"""Kernels and composites refuse invalid arguments before they write (found by hostile calls).

If these fail, memory outside a tensor is accessed, an error leaves tables half updated, or users
see an assertion of torch.
"""

import pytest
import torch

import op_samples
import xsoftmax as xs

ops = torch.ops.xsoftmax
both = pytest.mark.parametrize("impl", ["kernel", "reference"])


def arguments_of(name):
    return [[*value] if isinstance(value, list) else value for value in op_samples.samples()[name]]


@both
@pytest.mark.parametrize("name, first_child", [("hierarchical_topk", 3), ("beam_search", 3)])
@pytest.mark.parametrize("place, value", [(1, 2**40), (1, -1), (2, 0), (5, op_samples.N),
                                          (5, 2**40), (-1, 2**40)])
def test_searches_refuse_children_that_do_not_rise(impl, name, first_child, place, value):
    arguments = arguments_of(name)
    arguments[first_child] = arguments[first_child].clone()
    arguments[first_child][place] = value
    # a kernel's search may not reach the other places
    met = impl == "reference" or place in (1, 2)
    with xs.use_impl(impl):
        try:
            _, ids = getattr(ops, name)(*arguments)
        except ValueError as error:
            assert str(error).startswith(f"{name}: expected first_child to rise")
        else:
            assert not met and ids.min() >= -1 and ids.max() < op_samples.N


@both
def test_path_scores_refuse_nodes_without_a_parent(impl):
    arguments = arguments_of("hierarchical_softmax")
    arguments[4] = torch.full_like(arguments[4], -1)
    with xs.use_impl(impl), pytest.raises(ValueError, match="expected the parent of node"):
        ops.hierarchical_softmax(*arguments)


@both
@pytest.mark.parametrize("cell, error", [(-1, ValueError), (op_samples.K**2, IndexError),
                                         (2**31 - 1, IndexError)])
def test_a_refused_update_leaves_the_index_unchanged(impl, cell, error):
    """Cells of rows that are not updated are invalid, while updated rows have moved."""
    arguments = arguments_of("midx_update_")
    index, rows = arguments[4], arguments[2].tolist()
    index[0].copy_(index[0].flip(0))
    index[2][next(i for i in range(op_samples.N) if i not in rows)] = cell
    before = [table.clone() for table in index]
    with xs.use_impl(impl), pytest.raises(error, match="midx_cells: expected"):
        ops.midx_update_(*arguments)
    assert all(map(torch.equal, index, before))


@both
def test_sampling_refuses_classes_without_a_cell(impl):
    arguments = arguments_of("midx_sample")
    arguments[3][2] = torch.full_like(arguments[3][2], -1)
    with xs.use_impl(impl), pytest.raises(
            ValueError, match="midx_sample: expected order with "
            "classes that are in a cell"):
        ops.midx_sample(*arguments)


@pytest.mark.parametrize("inference", [False, True])
def test_a_batch_that_corrects_targets_needs_their_counts(inference):
    arguments = arguments_of("candidate_batch")
    arguments[6] = "corrects_target=true,remove_accidental_hits=true,label_smoothing=0.1"
    with torch.inference_mode(inference), pytest.raises(
            ValueError, match="candidate_batch: "
            "expected "
            "target_log_count"):
        ops.candidate_batch(*arguments)


@both
@pytest.mark.parametrize("name",
                         ["tower_losses", "linear_topk", "candidate_scores", "counted_queries"])
@pytest.mark.parametrize("other", [
    lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8), lambda t: t.to_sparse(),
    lambda t: t.to_sparse_csr(), lambda t: torch.nested.nested_tensor([t]), lambda t: None
], ids=["quantized", "coo", "csr", "nested", "none"])
def test_unsupported_layouts_raise_our_error(impl, name, other):
    arguments = arguments_of(name)
    arguments[0] = other(arguments[0])
    with xs.use_impl(impl), pytest.raises(TypeError, match="expected .* as a"):
        getattr(ops, name)(*arguments)


@pytest.mark.parametrize("tensor",
                         [lambda t: torch._efficientzerotensor(t.shape), lambda t: t.to_sparse()],
                         ids=["zeros without memory", "coo"])
def test_tensors_that_cannot_be_written_to_are_refused(tensor):
    arguments = arguments_of("reset_rows_")
    arguments[0] = tensor(arguments[0])
    with pytest.raises(TypeError, match="reset_rows_: expected"):
        ops.reset_rows_(*arguments)


def test_inference_tensors_are_not_written_to_outside_inference_mode():
    arguments = arguments_of("reset_rows_")
    with torch.inference_mode():
        arguments[0] = arguments[0].clone()
    with pytest.raises(TypeError, match="reset_rows_: expected .* made under inference_mode"):
        ops.reset_rows_(*arguments)


@pytest.mark.parametrize("bias, error, message", [
    (torch.zeros(1).expand(op_samples.samples()["beam_tree_balance_"][1].shape), ValueError,
     "bias, which is written to, with separate memory for each element"),
    (torch._efficientzerotensor(op_samples.samples()["beam_tree_balance_"][1].shape), TypeError,
     "bias, which is written to, with memory for its elements"),
])
def test_a_bias_that_cannot_be_written_to_leaves_the_weight_unchanged(bias, error, message):
    weight, _, *tree = arguments_of("beam_tree_balance_")
    before = weight.clone()
    with pytest.raises(error, match=f"beam_tree_step: expected {message}"):
        ops.beam_tree_balance_(weight, bias, *tree)
    assert torch.equal(weight, before)


@both
@pytest.mark.parametrize("name", ["tree_class_scores", "hierarchical_log_prob"])
@pytest.mark.parametrize(
    "change", [lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype), torch._neg_view],
    ids=["zeros without memory", "negative view"])
def test_the_values_of_parents_in_special_views_are_checked(impl, name, change):
    arguments = arguments_of(name)
    arguments[1] = change(arguments[1])
    with xs.use_impl(impl), pytest.raises(ValueError, match=f"{name}: expected the parent of node"):
        getattr(ops, name)(*arguments)


@pytest.mark.parametrize("layer_sizes", [[-100], [2**62, 2**62], [2**32 + 1], []])
def test_layers_must_add_up_to_the_tree(layer_sizes):
    tree, _ = arguments_of("label_layers")
    with pytest.raises(ValueError, match="label_layers: expected layer_sizes"):
        ops.label_layers(tree, layer_sizes)


@pytest.mark.parametrize("rule", ["row_sgd", "row_adam", "row_adagrad"])
def test_terms_need_a_row_of_input(rule):
    arguments = arguments_of(f"{rule}_terms_")
    arguments[5] = arguments[5][:0]
    with pytest.raises(ValueError, match=f"{rule}_terms_: expected input of at least one row"):
        getattr(ops, f"{rule}_terms_")(*arguments)
