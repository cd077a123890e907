"""Kills ranks during training, and checks that the result is the same as without kills.

    python benchmarks/kill_ranks.py [--kills 20] [--ranks 2] [--classes 20000] [--json [FILE]]

torchrun trains a sharded class table and an encoder, and saves a checkpoint every five steps. This
program kills (SIGKILL) a random rank at a random time within a step or within a save, `--kills`
times each. torchrun then restarts all ranks, which load the last checkpoint. A kill counts if the
rank had not reported the end of that step or save. Finally the losses of all steps, including
repeated ones, the table, the optimizer's state and the generators are compared bit for bit with
those of an undisturbed run. If no event is reported for two minutes, the run counts as hanging.
"""

import argparse
import datetime
import gc
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import Dict, List, Optional

import torch

import xsoftmax as xs
from common.records import add_json, report, table

QUERIES, WIDTH, SAVE_EVERY = 64, 32, 5


class Model(torch.nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1))
        self.loss = xs.SampledSoftmaxLoss(WIDTH, classes, sampler="log_uniform", num_samples=256,
                                          bias=True)

    def forward(self, input, target):
        return self.loss(self.encoder(input), target)


def train(folder: str, classes: int, steps: int) -> None:
    """Trains as one rank started by torchrun, and reports events to the parent program."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(rank)
    model = xs.distributed.shard_classes(Model(classes))
    # Without find_unused_parameters, DistributedDataParallel reorders gradients after its first
    # step, which changes sums over three and more ranks.
    called = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = xs.optim.RowAdam(model.parameters(), lr=0.01)
    state, checkpoints = {"model": model,
                          "optimizer": optimizer}, os.path.join(folder, "checkpoints")
    begin = xs.distributed.load_checkpoint(checkpoints, state) or 0
    with open(os.path.join(folder, "events"),
              "w") as events, open(os.path.join(folder, f"losses of rank {rank}"), "a") as losses:

        def tell(what, step):
            print(what, step, rank, os.getpid(), file=events, flush=True)

        tell("start", begin)
        for step in range(begin, steps):
            tell("step", step)
            data = torch.Generator().manual_seed(step * size + rank)
            optimizer.zero_grad()
            loss = called(torch.randn(QUERIES, WIDTH, generator=data),
                          torch.randint(classes, [QUERIES], generator=data))
            loss.backward()
            xs.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            print(step, loss.item().hex(), file=losses, flush=True)
            if (step + 1) % SAVE_EVERY == 0:
                tell("save", step + 1)
                xs.distributed.save_checkpoint(checkpoints, state, step + 1)
            tell("done", step)
        tell("end", steps)


class Run:
    """A torchrun job in a folder, whose ranks are killed at the moments in `plan`, each "step" or
    "save"."""
    def __init__(self, folder: str, args: argparse.Namespace, plan: List[str], seed: int) -> None:
        self.folder, self.plan, self.ranks, self.random = folder, list(
            plan), args.ranks, random.Random(seed)
        self.kills, self.missed, self.starts = {"step": 0, "save": 0}, 0, []
        os.makedirs(folder)
        fifo = os.path.join(folder, "events")
        os.mkfifo(fifo)
        # open for writing too, so that no end of file occurs between two starts
        self.events, self.unread = os.open(fifo, os.O_RDWR), b""
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(args.ranks), "--max-restarts",
            str(3 * len(plan)), "--monitor-interval", "0.1",
            os.path.abspath(__file__), "--folder", folder, "--classes",
            str(args.classes), "--steps",
            str(args.steps)
        ]
        with open(os.path.join(folder, "log"), "w") as log:
            # Use a separate store for each start: in a shared one, ranks would find the addresses
            # of killed ranks.
            environment = {
                **os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
            }
            self.job = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            self._watch()
        finally:
            self.job.terminate()
            self.job.wait()
            os.close(self.events)

    def _fail(self, text: str) -> None:
        with open(os.path.join(self.folder, "log")) as log:
            raise SystemExit(f"kill_ranks: {text}\n{log.read()[-4000:]}")

    def _next(self):
        """Returns (what, step, rank, process) of the next event."""
        deadline = time.monotonic() + 120
        while b"\n" not in self.unread:
            if self.job.poll() is not None:
                self._fail(f"torchrun ended with {self.job.returncode}")
            if time.monotonic() > deadline:
                self._fail("nothing happened in two minutes")
            if select.select([self.events], [], [], 0.2)[0]:
                self.unread += os.read(self.events, 65536)
        line, self.unread = self.unread.split(b"\n", 1)
        what, *numbers = line.decode().split()
        return (what, *map(int, numbers))

    def _watch(self) -> None:
        """Follows the job to its end, and kills ranks."""
        # the last event of each process, when it began, and how long a step or save took
        ended, saved, saving, last, begun, spans = 0, 0, 0, {}, {}, {}
        target, killed = self._draw(), None
        while ended < self.ranks:
            event = self._next()
            what, step, rank, process = event
            if process in last and last[process][0] in ("step", "save"):
                spans[last[process][0]] = time.monotonic() - begun[process]
            before, last[process], begun[process] = last.get(process), event, time.monotonic()
            if what == "start" and rank == 0:
                if killed is not None:
                    self._count(target, killed, last[killed[3]])
                    target, killed = self._draw(), None
                if step not in (saved, saving):
                    self._fail(f"expected a start from step {saved}, or from {saving}, which was "
                               f"being saved, got {step}")
                self.starts.append(step)
                saved = saving = step
            elif what == "save":
                saving = step
            elif what == "done" and before[0] == "save":
                saved = before[1]
            ended += what == "end"
            if killed is None and target is not None and (what, rank) == (target["what"],
                                                                          target["rank"]):
                target["after"] -= 1
                if target["after"] == 0:
                    time.sleep(0.8 * self.random.random() * spans.get(what, 0.005))
                    os.kill(process, signal.SIGKILL)
                    killed = event
        self.job.wait(60)
        if self.job.returncode != 0 or self.plan:
            self._fail("expected torchrun to end with 0 after all kills, got "
                       f"{self.job.returncode} with {len(self.plan)} left: try more --steps")

    def _draw(self) -> Optional[Dict]:
        """Draws the next kill: its rank, its moment, and after how many moments of that kind."""
        if not self.plan:
            return None
        after = self.random.randint(
            1, 2 * SAVE_EVERY) if self.plan[-1] == "step" else self.random.randint(1, 3)
        return {"what": self.plan[-1], "rank": self.random.randrange(self.ranks), "after": after}

    def _count(self, target: Dict, killed, last) -> None:
        if last == killed:
            self.kills[target["what"]] += 1
            self.plan.pop()
        else:
            self.missed += 1

    def losses(self, rank: int) -> Dict[int, str]:
        """Returns the loss of each step, after checking that repeated steps have the same loss."""
        losses: Dict[int, str] = {}
        with open(os.path.join(self.folder, f"losses of rank {rank}")) as file:
            for line in file:
                step, loss = line.split()
                if losses.setdefault(int(step), loss) != loss:
                    raise SystemExit(f"kill_ranks: step {step} of rank {rank}: expected the loss "
                                     f"{losses[int(step)]} again, got {loss}")
        return losses

    def state(self) -> Dict[str, torch.Tensor]:
        """Returns the contents of the last checkpoint."""
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
        file = os.path.join(self.folder, "plain.pt")
        dcp_to_torch_save(
            xs.distributed.latest_checkpoint(os.path.join(self.folder, "checkpoints")), file)
        flat, left = {}, [("", torch.load(file))]
        while left:
            name, value = left.pop()
            if isinstance(value, (dict, list)):
                left += [(f"{name}/{key}", part) for key, part in (
                    value.items() if isinstance(value, dict) else enumerate(value))]
            else:
                flat[name] = value
        return flat


def same(a: Dict, b: Dict) -> bool:
    return set(a) == set(b) and all(
        torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name]
        for name, value in a.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of kills within steps, and "
                        "within saves")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--classes", type=int, default=20_000)
    parser.add_argument("--steps", type=int, help="number of training steps (default: 30 for each "
                        "pair of kills)")
    parser.add_argument("--seed", type=int, default=0)
    add_json(parser)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # marks a rank
    args = parser.parse_args()
    if args.folder is not None:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        train(args.folder, args.classes, args.steps)
        # Remaining references to the group keep its threads alive, which may abort the process if
        # they release a tensor while Python exits.
        gc.collect()
        torch.distributed.destroy_process_group()
        return
    if args.steps is None:
        args.steps = SAVE_EVERY * max(6, 6 * args.kills)
    plan = ["step", "save"] * args.kills
    random.Random(args.seed).shuffle(plan)
    with tempfile.TemporaryDirectory() as folder:
        calm, killed = Run(os.path.join(folder, "calm"), args, [],
                           args.seed), Run(os.path.join(folder, "killed"), args, plan, args.seed)
        losses = all(
            calm.losses(rank) == killed.losses(rank) and len(calm.losses(rank)) == args.steps
            for rank in range(args.ranks))
        found = {
            "ranks": args.ranks, "classes": args.classes, "steps": args.steps,
            "kills within a step": killed.kills["step"],
            "kills within a save": killed.kills["save"], "kills between": killed.missed,
            "starts": len(killed.starts), "losses equal": losses,
            "state equal": same(calm.state(), killed.state())
        }
    report(args, __doc__, question="Is training the same after ranks are killed?",
           against="the same run without kills",
           tables=[table([{"figure": name, "value": value}
                          for name, value in found.items()])], **found)
    if not (losses and found["state equal"]
            and len(killed.starts) == 1 + len(plan) + killed.missed):
        raise SystemExit("kill_ranks: the run with kills differs from the run without")


if __name__ == "__main__":
    main()
