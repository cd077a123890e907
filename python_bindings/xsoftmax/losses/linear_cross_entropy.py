"""The exact cross entropy over a class table."""

from typing import Optional

from torch import Tensor

from .linear_loss import LinearLoss


class LinearCrossEntropyLoss(LinearLoss):
    r"""Exact cross entropy of a linear layer and a softmax over its outputs, computed without the
    logits in memory.

    Equivalent to::

        F.cross_entropy(loss.linear(input), target, weight, reduction=..., ignore_index=...,
                        label_smoothing=...)

    Loss and gradients are computed over chunks of classes. Gradients of the table are dense.

    With `logit_scale`, `softcap` and `z_loss`, and without class weights, it is equivalent to::

        t = loss.linear(input) * logit_scale
        t = softcap * (t / softcap).tanh()                        # if softcap is not None
        F.cross_entropy(t, target, ...) + z_loss * t.logsumexp(-1).square().mean()

    Args:
        in_features: D, the width of a query; at least 0.
        num_classes: N, at least 1.
        bias: whether the classes have a bias.
        weight: floating [N], a tensor, an array or a list: rescales the loss of each class, as in
            :class:`torch.nn.CrossEntropyLoss`.
        reduction: "mean" (weighted, over targets that are not ignored), "sum" or "none".
        ignore_index: targets of this value contribute no loss and no gradient.
        label_smoothing: in [0, 1]. Must be 0 with multiple positives.
        positives: how multiple positives of a query, target [*, T], are reduced. "mean": the mean
            over its positives y of -log softmax(s)_y, where the softmax runs over y and the classes
            that are not positives of the query; the class weights of the positives apply. "sum":
            -log of the sum of the positives' probabilities; class weights are not supported.
            Entries of ignore_index are padding, repeated classes count once, and a query with only
            padding is ignored.
        logit_scale: a finite number above 0 that multiplies the scores ``linear(input)``, as in
            Cohere's models.
        softcap: a finite number above 0: logits are ``softcap * tanh(logit_scale * linear(input) /
            softcap)``, as in Gemma 2. None: no cap.
        z_loss: a finite number of at least 0: adds ``z_loss * log_normaliser ** 2`` to the loss of
            each query (Chowdhery et al., 2022), weighted by its class weight and reduced like the
            loss. The log normaliser is the logsumexp of all logits. With positives="mean" each
            positive has its own: the logsumexp of its logit and those of the classes that are not
            positives.
        device, dtype: of the table. The dtype is float32, float64, bfloat16 or float16.

    On CUDA the attribute ``workspace_mb`` (default 512, assignable) limits the memory of a training
    step in MB: the logits that exist at once and the float32 gradients of table and input. If these
    gradients take more than half of it, it limits the logits alone. On the CPU logits take a few
    MB.

    Shape:
        - input: [*, D], in the dtype of the table; under autocast, 16-bit inputs are accepted too.
        - target: int64 [*] in [0, N) or ignore_index; or [*, T] with T below N. One-hot targets [*,
          N] raise ValueError.
        - output: a scalar, or [*] with reduction="none"; float64 for a float64 table, else float32.
          If no query counts (an empty batch, or all targets ignored), "sum" is 0 and "mean" is NaN,
          as in torch.

    Raises:
        ValueError: an option is out of range; a shape does not fit; label_smoothing with multiple
            positives; class weights with multiple positives and positives="sum".
        TypeError: an option has another type; an argument is not a dense tensor; the dtype or
            device of `input` differs from the table's; `target` is not int64.
        IndexError: a target is neither in [0, N) nor ignore_index (checked on the CPU only). The
            message contains its position.
        RuntimeError: a call inside a transform of ``torch.func``.
    """
    def _has_row_gradients(self) -> bool:
        return False

    def forward(self, input: Tensor, target: Tensor,
                target_prob: Optional[Tensor] = None) -> Tensor:
        """Computes the exact loss, as :meth:`exact` does.

        With `target_prob` targets are soft. The loss of each query is::

            -(target_prob * log_prob.gather(-1, target)).sum(-1)

        which equals ``F.cross_entropy`` with class probabilities [*, N] that are 0 for classes not
        listed. The probabilities need not sum to 1, and get no gradient. Entries of ignore_index or
        -1 are padding. Entries of probability 0 add nothing, and repeated classes add up. `z_loss`
        adds ``z_loss * log_normaliser ** 2`` times the sum of the query's probabilities. "mean"
        averages over the queries that have at least one entry that is not padding, also with class
        weights, as in torch.

        Args:
            input: [*, D], in the dtype of the table.
            target: int64 [*] or [*, T], in [0, N) or ignore_index.
            target_prob: floating [*, T], the probability of each entry of target [*, T]. None:
                targets are hard.

        Returns:
            A scalar, or [*] with reduction="none"; float64 for a float64 table, else float32.

        Raises:
            ValueError, TypeError, IndexError: same as :class:`LinearCrossEntropyLoss`; also
                ValueError if the shapes of target_prob and target differ, or with label_smoothing.
        """
        return self.exact(input, target, target_prob)
