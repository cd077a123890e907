"""Conversion of private and shared candidates to the sets that operators take."""

import torch

from xsoftmax._core.options import option_text


def as_sets(private_ids=None, shared_ids=None, private_log_count=None, shared_log_count=None,
            target_log_count=None, distinct_private=0, distinct_shared=0):
    """Returns (ids, log_count, target_log_count, distinct) of up to four sets, in column order.

    The first `distinct_private` private and `distinct_shared` shared columns form sets without
    replacement. target_log_count belongs to the first set with replacement, or to the first set.
    Missing log counts are 0.
    """
    sets = []
    for ids, counts, distinct in ((private_ids, private_log_count, distinct_private),
                                  (shared_ids, shared_log_count, distinct_shared)):
        if ids is not None:
            counts = torch.zeros(ids.shape, device=ids.device) if counts is None else counts
            sets += [(ids[..., :distinct], counts[..., :distinct], True)] if distinct else []
            sets += [(ids[..., distinct:], counts[..., distinct:],
                      False)] if distinct < ids.shape[-1] or not distinct else []
    counted = next((i for i, part in enumerate(sets) if not part[2]), 0)
    return ([part[0] for part in sets], [part[1] for part in sets],
            [target_log_count if i == counted else None
             for i in range(len(sets))], [part[2] for part in sets])


def split(arguments):
    """Returns as_sets of its arguments, and the text of the other options."""
    names = ("private_ids", "shared_ids", "private_log_count", "shared_log_count",
             "target_log_count", "distinct_private", "distinct_shared")
    return as_sets(**{name: arguments[name]
                      for name in names if name in arguments}), option_text(
                          **{name: value
                             for name, value in arguments.items() if name not in names})


def columns(private_ids=None, shared_ids=None, private_log_count=None, shared_log_count=None,
            target_log_count=None, distinct_private=0, distinct_shared=0, **options):
    """Returns (candidates, distinct, options) as operators below autograd take them."""
    zeros = [
        None if ids is None else torch.zeros(ids.shape, device=ids.device)
        for ids in (private_ids, shared_ids)
    ]
    counts = [
        zero if count is None else count
        for zero, count in zip(zeros, (private_log_count, shared_log_count))
    ]
    return [private_ids, shared_ids, *counts,
            target_log_count], [distinct_private, distinct_shared], option_text(**options)
