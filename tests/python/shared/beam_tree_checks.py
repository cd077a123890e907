"""A BeamTreeLoss for the tests."""

import torch

from xsoftmax import BeamTreeLoss, LabelTree


def make_tree_loss(tree=None, D=5, dtype=torch.float64, **kwargs):
    torch.manual_seed(0)
    kwargs = dict(num_candidates=5, num_noises=3) | kwargs
    loss = BeamTreeLoss(D,
                        LabelTree.balanced(40, 3) if tree is None else tree, dtype=dtype, **kwargs)
    torch.nn.init.normal_(loss.edges.weight)
    return loss
