"""Combines an FSDP2 encoder with a replicated class table:
torchrun --nproc-per-node 2 examples/integrations/fsdp2.py"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import xsoftmax as xs


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Embedding(5000, 64), torch.nn.Linear(64, 64),
            torch.nn.Tanh())
        self.head = xs.SampledSoftmaxLoss(64, 5000, bias=True,
                                          sampler="log_uniform",
                                          num_samples=512)

    def forward(self, ids, target):
        return self.head(self.encoder(ids), target)


dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = Words()
fully_shard(xs.distributed.replicate(model, mesh), mesh=mesh,
            ignored_params=set(model.head.parameters()))
optimizer = xs.optim.RowAdam(model.parameters(), lr=1e-3,
                             weight_decay=0.01)

torch.manual_seed(1 + dist.get_rank())
losses = []
for step in range(5):
    ids, target = torch.randint(5000, (2, 64))
    optimizer.zero_grad()
    value = model(ids, target)
    value.backward()
    optimizer.step()
    losses.append(value.item())
dist.destroy_process_group()
