"""A model in training, and comparisons of its state, for the tests of distributed checkpoints."""

import torch

import xsoftmax as xs
from ranks import ranks

N, D, QUERIES = 23, 6, 24  # chunks of 4 ranks: 6, 6, 6, 5
OPTIMIZERS = {
    "RowAdam": lambda parameters: xs.optim.RowAdam(parameters, lr=0.02, weight_decay=0.01),
    "RowSGD": lambda parameters: xs.optim.RowSGD(parameters, lr=0.05, momentum=0.5),
    "RowSGD without momentum": lambda parameters: xs.optim.RowSGD(parameters, lr=0.05),
    "RowAdagrad": lambda parameters: xs.optim.RowAdagrad(parameters, lr=0.05),
    "RowAdagrad row_wise": lambda parameters: xs.optim.RowAdagrad(parameters, lr=0.05, row_wise=True
                                                                  ),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(D, D)
        self.loss = xs.SampledSoftmaxLoss(
            D, N, **{"sampler": "log_uniform", "num_samples": 7, "bias": True, **options})

    def forward(self, input, target):
        return self.loss(self.body(input), target)


class Run:
    """A model in training, on this rank of `size` ranks or in one process (size 1)."""
    def __init__(self, size, optimizer="RowAdam", split=True, **options):
        self.size, self.model = size, Model(**options)
        if size > 1:
            (xs.distributed.shard_classes if split else xs.distributed.replicate)(self.model)
        # Without find_unused_parameters, gradients are reordered after the first step, which
        # changes sums of three or more numbers.
        self.called = torch.nn.parallel.DistributedDataParallel(
            self.model, find_unused_parameters=True) if size > 1 else self.model
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.state = {"model": self.called, "optimizer": self.optimizer}

    def train(self, rank, first, last):
        """Trains steps `first` to `last` and returns their losses."""
        values = []
        for step in range(first, last):
            random = torch.Generator().manual_seed(step)
            input, target = torch.randn(QUERIES, D, generator=random), torch.randint(
                N, [QUERIES], generator=random)
            part = slice(rank * QUERIES // self.size, (rank + 1) * QUERIES // self.size)
            self.optimizer.zero_grad()
            value = self.called(input[part], target[part])
            value.backward()
            xs.clip_grad_norm_(self.model.parameters(), 2.0)
            self.optimizer.step()
            values.append(value.item())
        return values

    def whole(self):
        """Returns the state of model and optimizer as one process would have it."""
        state = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, of_param in xs._core.placement.whole_state(
                self.optimizer, self.optimizer.state_dict())["state"].items():
            # "pending": elements after the first four may be outdated
            state |= {
                f"{number}.{name}": value[:4] if name == "pending" else value
                for name, value in of_param.items() if value is not None
            }
        return {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
            for name, value in state.items()
        }


def same(got, want):
    """Whether two states are equal bit for bit, dtypes included."""
    assert set(got) == set(want)
    return all(
        torch.equal(got[name], table) and got[name].dtype == table.dtype
        for name, table in want.items())


def run_of(size, function, *args):
    """Returns [function(rank, size, *args)] of `size` ranks, in this process if there is one."""
    return ranks(size).run(function, size, *args) if size > 1 else [function(0, 1, *args)]
