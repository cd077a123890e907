"""Uses each object that has state from three threads, then checks its invariants.

test_threaded_use.py runs it in a separate process, which may die:

    python threaded_use.py [NAME]

NAME selects the objects whose names contain it. Prints the name of each object before its test, a
line "FAIL name: reason" for each finding, and for losses the number of calls that autograd refused
because a step of another thread had changed saved tensors.
"""

import concurrent.futures
import sys
import threading
import warnings

import torch

import combinations as c
import xsoftmax as xs
from xr_linear_checks import problem, small

N, D = c.N, c.D
LOSSES = [
    "sampled-uniform-sampled_softmax", "sampled-unigram, streamed-sampled_softmax",
    "sampled-in_batch, open-sampled_softmax", "sampled-midx, updated-sampled_softmax",
    "sampled-learnable_midx-sampled_softmax", "sampled-lsh-sampled_softmax",
    "sampled-sphere-sampled_softmax", "sampled-rff-sampled_softmax", "sampled-union of both-nce",
    "cane-midx-unigram-log_of_mean", "beam-even-unigram", "hierarchical-even-none"
]
CALLS = {"IdTable": 150, "StreamingCounts": 150}  # per thread; other objects: 15
# error of autograd if a step of another thread has changed saved tensors
CHANGED = "modified by an inplace operation"


def loss_case(combination):
    """One thread computes gradients of a loss, one predicts, one steps and refreshes its index."""
    loss = combination.make()
    optimizer = combination.make_optimizer(loss)
    input, target = combination.batch()
    table = combination.table(loss)
    sampler = next((module for module in loss.modules()
                    if isinstance(module, xs.samplers.Sampler) and hasattr(module, "refresh")),
                   None)

    def use(thread):
        if thread == 0:
            torch.autograd.grad(
                combination.call(loss, input, target, None).sum(), list(loss.parameters()),
                allow_unused=True)
        elif thread == 1:
            loss.topk(input, 3)
            loss.log_prob(input)
        else:
            combination.call(loss, input, target, None).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if sampler is not None:
                sampler.refresh(table.weight, table.bias)

    def check():
        optimizer.zero_grad()
        value = combination.call(loss, input, target, None)
        value.sum().backward()
        optimizer.step()
        assert all(parameter.isfinite().all()
                   for parameter in loss.parameters()) and value.isfinite().all()
        assert all(buffer.isfinite().all() for buffer in loss.buffers()
                   if buffer.is_floating_point() and "log" not in str(buffer.dtype))
        loss.eval()
        assert (loss.log_prob(input).exp().sum(-1) - 1).abs().max() < 1e-6

    return use, check


def two_tower_case(counts):
    loss = xs.TwoTowerLoss(N, counts=counts, memory=32, dim=D)
    query, item, ids = torch.randn(6, D, requires_grad=True), torch.randn(6, D), torch.arange(6)

    def use(_):
        loss(query, item, ids).backward()

    def check():
        assert loss(query, item, ids).isfinite()
        same_again = xs.TwoTowerLoss(N, counts=counts, memory=32, dim=D)
        same_again.load_state_dict(loss.state_dict())

    return use, check


def optimizer_case(name):
    kind, options = c.OPTIMIZERS[name]
    weight = torch.nn.Parameter(torch.randn(N, D))
    optimizer = kind([weight], **options)

    def gradient():
        return torch.sparse_coo_tensor(torch.randint(N, (1, 9)), torch.randn(9, D), weight.shape)

    def use(thread):
        weight.grad = gradient()
        optimizer.step()
        if thread == 2:
            optimizer.state_dict()
            xs.optim.catch_up(weight)

    def check():
        weight.grad = gradient()
        optimizer.step()
        xs.optim.catch_up(weight)
        again = kind([torch.nn.Parameter(weight.detach().clone())], **options)
        again.load_state_dict(optimizer.state_dict())
        assert weight.isfinite().all()

    return use, check


def sampler_case(spec):
    sampler = c.make_sampler(spec, bias=True)
    weight, bias, input = torch.randn(N, D), torch.randn(N), torch.randn(5, D)
    target = torch.randint(N, (5,))

    def use(thread):
        if thread == 2 and hasattr(sampler, "refresh"):
            sampler.refresh(weight, bias)
        sampler.sample(input, target)

    def check():
        if hasattr(sampler, "refresh"):
            sampler.refresh(weight, bias)
        for part in sampler.sample(input, target):
            assert int(part.ids.min()) >= -1 and int(
                part.ids.max()) < N and not torch.as_tensor(part.log_count).isnan().any()

    return use, check


def id_table_case(**options):
    table = xs.IdTable(64, **options)
    embedding = torch.nn.Embedding(64, 4)
    table.attach(embedding)

    def use(thread):
        rows, evicted = table.insert(torch.randint(-10**9, 10**9, (40,)))
        assert int(rows.min()) >= 0 and int(rows.max()) < 64 and (evicted.numel() == 0
                                                                  or int(evicted.min()) > 0)
        table.find(torch.randint(-10**9, 10**9, (40,)))
        table.ids_of(torch.arange(64))
        if thread == 2:
            table.remove(table.ids_of(torch.randint(64, (5,))))

    def check():
        torch.ops.xsoftmax.id_table_check(table._state(), table.capacity, table.options)
        rows = table(torch.arange(40))
        known = rows > 0
        assert torch.equal(table.find(torch.arange(40)), rows) and torch.equal(
            table.ids_of(rows)[known],
            torch.arange(40)[known])
        assert table._pending.numel() == 0 and embedding.weight.isfinite().all()

    return use, check


def counts_case(**options):
    counts = xs.samplers.StreamingCounts(**options)
    ids = 64 if options["num_ids"] else 10**9
    seen = [0, 0, 0]

    def use(thread):
        seen[thread] += 40
        counts(torch.randint(ids, (40,)))
        counts.log_prob(torch.randint(ids, (40,)))
        if thread == 2 and options["num_ids"]:
            counts.forget(torch.randint(ids, (2,)))

    def check():
        if options["num_ids"]:
            each = counts.counts(torch.arange(64))
            assert (each >= 0).all() and abs(
                float(counts.total - each.sum())) <= 1e-9 * float(each.sum())
        if "half_life" in options:
            assert int(counts.seen) == sum(seen)
        counts(torch.arange(40))
        assert not counts.log_prob(torch.arange(40)).isnan().any()
        again = xs.samplers.StreamingCounts(**options)
        again.load_state_dict(counts.state_dict())

    return use, check


def xr_linear_case():
    X, Y = problem()
    model = small(X, Y)
    expected = model.topk(X[:20], 5)

    def use(thread):
        found = model.topk(X[:20], 5)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])

    return use, lambda: use(0)


def replaced_head_case(number):
    """Calls of a model with mean reduction, with a sum divided by `number`, and without labels."""
    import transformers

    config = transformers.LlamaConfig(vocab_size=N, hidden_size=16, intermediate_size=16,
                                      num_hidden_layers=1, pad_token_id=0, num_attention_heads=1,
                                      num_key_value_heads=1)
    plain = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(N, (2, 6))
    batches = [dict(labels=ids), dict(labels=ids, num_items_in_batch=number), {}]
    want = [plain(input_ids=ids, **batch)[0].detach() for batch in batches]
    xs.integrations.transformers.replace_head(plain, xs.LinearCrossEntropyLoss)

    def use(thread):
        got = plain(input_ids=ids, **batches[thread])[0]
        assert type(got) is torch.Tensor and torch.allclose(got, want[thread]), got
        got.sum().backward()

    def check():
        for thread in range(3):
            use(thread)

    return use, check


def cases():
    yield "IdTable", lambda: id_table_case()
    yield "IdTable, lru and admission", lambda: id_table_case(eviction="lru", admission=2)
    yield "StreamingCounts", lambda: counts_case(num_ids=64)
    yield "StreamingCounts, half-life", lambda: counts_case(num_ids=64, half_life=100.0)
    yield "StreamingCounts, open ids", lambda: counts_case(num_ids=None, half_life=100.0, buckets=64
                                                           )
    yield "XRLinear", xr_linear_case
    for name in LOSSES:
        yield f"loss {name}", lambda name=name: loss_case(c.COMBINATIONS[name])
    for name in c.OPTIMIZERS:
        yield f"optimizer {name}", lambda name=name: optimizer_case(name)
    for name, spec in c.SAMPLERS.items():
        yield f"sampler {name}", lambda spec=spec: sampler_case(spec)
    for counts in (None, False):
        yield f"TwoTowerLoss, counts={counts}", lambda counts=counts: two_tower_case(counts)


def drive(use, thread, number, barrier, is_loss):
    """Calls `use` `number` times, and then until one call has succeeded.

    Returns the number of successful calls, of calls that autograd refused, and the other errors.
    """
    done, refused, failures = 0, 0, []
    barrier.wait()
    for attempt in range(20 * number):
        if attempt >= number and done:
            break
        try:
            use(thread)
            done += 1
        except Exception as error:
            if is_loss and CHANGED in str(error):
                refused += 1
            else:
                failures.append(f"{type(error).__name__}: {error}")
    return done, refused, failures


def findings(name, make, number):
    """Tests an object; returns (errors, number of refused calls, number of calls)."""
    use, check = make()
    barrier, interval = threading.Barrier(3), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # threads take turns within calls
    try:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            driven = [
                pool.submit(drive, use, thread, number, barrier, name.startswith("loss"))
                for thread in range(3)
            ]
    finally:
        sys.setswitchinterval(interval)
    results = [each.result() for each in driven]
    failures = [failure for _, _, failures in results for failure in failures]
    for thread, (done, _, _) in enumerate(results):
        if done == 0:
            failures.append(f"thread {thread} finished no call")
    try:
        check()
    except Exception as error:
        failures.append(f"afterwards: {type(error).__name__}: {error}")
    refused = sum(refused for _, refused, _ in results)
    return sorted(set(failures)), refused, refused + sum(done for done, _, _ in results)


def run(name, make, number):
    print(name, flush=True)
    failures, refused, calls = findings(name, make, number)
    if refused:
        print(f"  {refused} of {calls} calls were refused")
    for failure in failures[:3]:
        print(f"FAIL {name}: {failure[:300]}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, make in cases():
        if len(sys.argv) < 2 or sys.argv[1] in name:
            run(name, make, CALLS.get(name.split(",")[0], 15))
    print("done")
