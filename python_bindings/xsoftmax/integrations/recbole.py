"""RecBole: sequential recommenders that score all items by the rows of `item_embedding`, as SASRec, GRU4Rec and NARM do with `loss_type="CE"`."""

import functools
from typing import Any, Type, TypeVar

from torch import Tensor, nn

from .. import tables
from .._public import public_names
from ..linear_losses import LinearLoss, check_loss_class

__all__ = ["replace_head"]
__dir__ = public_names(__all__)

Loss = TypeVar("Loss", bound=LinearLoss)


class _WithLoss:
    def calculate_loss(self: Any, interaction: Any) -> Tensor:
        hidden = self.forward(interaction[self.ITEM_SEQ], interaction[self.ITEM_SEQ_LEN])
        value: Tensor = self.loss(hidden, interaction[self.POS_ITEM_ID])
        return value


@functools.cache
def _with_loss(base: Any) -> Type[nn.Module]:
    return type(base.__name__, (_WithLoss, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def replace_head(model: nn.Module, loss_class: Type[Loss], **kwargs: Any) -> Loss:
    """Gives a sequential recommender of RecBole a loss of this package over its `item_embedding`, in the place of its cross entropy over all items::

        loss = xs.integrations.recbole.replace_head(model, xs.SampledSoftmaxLoss, sampler="uniform", num_samples=512)
        trainer.optimizer = xs.optim.RowAdam(model.parameters(), lr=1e-3)

    The loss is `model.loss`, and its table is the embedding's, whose gradient stays row-sparse. Prediction and evaluation are RecBole's: they read the
    embedding, which `model.eval()` brings up to date.

    Args:
        model: changed in place. Its loss_type is "CE", and its scores are `forward(...) @ item_embedding.weight.T`.
        loss_class: xs.SampledSoftmaxLoss, xs.CaneLoss or xs.LinearCrossEntropyLoss.
        **kwargs: the loss's own arguments, without in_features, num_classes and bias.

    Raises:
        TypeError: a model without an `item_embedding`, or with another loss_type
    """
    check_loss_class("recbole.replace_head", loss_class)
    embedding = getattr(model, "item_embedding", None)
    if not isinstance(embedding, nn.Embedding) or getattr(model, "loss_type", None) != "CE":
        raise TypeError("recbole.replace_head: expected a sequential recommender with an item_embedding and loss_type \"CE\", got a "
                        f"{type(model).__name__} with loss_type {getattr(model, 'loss_type', None)!r}")
    loss = loss_class.from_linear(tables.linear(embedding.weight), **kwargs)
    embedding.sparse = loss._row_gradients()
    model.loss = loss
    kind: Any = type(model)
    model.__class__ = _with_loss(kind)
    return loss
