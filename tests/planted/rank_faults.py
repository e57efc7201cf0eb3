"""Data-parallel updates that are wrong in several processes, and correct updates that resemble them.

Rank processes import this file and look the pairs up by name. In one process all of them are right, except for one.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from perfsuite import Pair, floats, size, stateful, tensor

RATE = 0.25
Update = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def gradients(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both gradients for this rank's rows alone."""
    return (x * a).mean(0), (x * x * b).mean(0)


def plain(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two weights after a step with gradients that are means over the rows of all ranks."""
    of_a, of_b = gradients(a, b, x)
    dist.all_reduce(of_a)
    dist.all_reduce(of_b)
    ranks = dist.get_world_size()
    return a - RATE * of_a / ranks, b - RATE * of_b / ranks


def pair(optimized: Update) -> Pair:
    values = floats(-2, 2)
    return Pair(
        reference=plain,
        optimized=optimized,
        inputs={
            "a": tensor("n", values=values),
            "b": tensor("n", values=values),
            "x": tensor("ranks * rows", "n", values=values, by_rank=0),
        },
        gradients=False,
        sizes={"n": size(1, 9), "rows": size(1, 5)},
        ranks=(2,),
    )


def reduced(reduce: Callable[[torch.Tensor, torch.Tensor], Any], divide: float = 1.0) -> Update:
    """Return an update that reduces its two gradients over the ranks with `reduce`.

    The result is divided by the number of ranks to the power `divide`.
    """

    def update(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_a, of_b = gradients(a, b, x)
        found = reduce(of_a, of_b)
        of_a, of_b = found if found is not None else (of_a, of_b)
        ranks = dist.get_world_size() ** divide
        return a - RATE * of_a / ranks, b - RATE * of_b / ranks

    return update


def each(*gradients: torch.Tensor) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient)


def largest(*gradients: torch.Tensor) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient, dist.ReduceOp.MAX)


def missing_on_one_rank(of_a: torch.Tensor, of_b: torch.Tensor) -> None:
    dist.all_reduce(of_a)
    if dist.get_rank() != 1:
        dist.all_reduce(of_b)


def left_out(of_a: torch.Tensor, of_b: torch.Tensor) -> None:
    dist.all_reduce(of_a)


def waited_for_too_late(of_a: torch.Tensor, of_b: torch.Tensor) -> Any:
    dist.all_reduce(of_a)
    received = of_b.clone()
    work = dist.all_reduce(received, async_op=True)
    used = of_b * dist.get_world_size()
    work.wait()
    return of_a, used


def of_the_first_rank(of_a: torch.Tensor, of_b: torch.Tensor) -> Any:
    for gradient in (of_a, of_b):
        dist.broadcast(gradient, 0)
    return of_a * dist.get_world_size(), of_b * dist.get_world_size()


def rounded_at_random(of_a: torch.Tensor, of_b: torch.Tensor) -> Any:
    """Round on each rank with its own random numbers, like dropout or stochastic rounding without a common seed."""
    each(of_a, of_b)
    generator = torch.Generator(of_a.device).manual_seed(dist.get_rank())
    noise = torch.rand(of_a.shape, generator=generator, device=of_a.device, dtype=of_a.dtype)
    return of_a * (1 + 16 * torch.finfo(of_a.dtype).eps * (noise > 0.5)), of_b


def in_two_orders(of_a: torch.Tensor, of_b: torch.Tensor) -> None:
    each(*((of_a, of_b) if dist.get_rank() == 0 else (of_b, of_a)))


def raises_on_one_rank(of_a: torch.Tensor, of_b: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        raise ValueError("no gradient here")
    each(of_a, of_b)


def dies_on_one_rank(of_a: torch.Tensor, of_b: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    each(of_a, of_b)


def exits_on_one_rank(of_a: torch.Tensor, of_b: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    each(of_a, of_b)


def hangs_on_one_rank(of_a: torch.Tensor, of_b: torch.Tensor) -> None:
    each(of_a, of_b)
    while dist.get_rank() == 1:
        time.sleep(0.1)


def ends_the_group(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Destroy the process group after the update, as a script does at its end."""
    found = plain(a, b, x)
    if dist.get_world_size() > 1:
        dist.destroy_process_group()
    return found


def in_one_bucket(of_a: torch.Tensor, of_b: torch.Tensor) -> Any:
    bucket = torch.cat([of_a, of_b])
    dist.all_reduce(bucket)
    return bucket.split([len(of_a), len(of_b)])


def waited_for(of_a: torch.Tensor, of_b: torch.Tensor) -> None:
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in (of_a, of_b)]:
        work.wait()


def gathered(of_a: torch.Tensor, of_b: torch.Tensor) -> Any:
    found = []
    for gradient in (of_a, of_b):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient)
        found.append(torch.stack(parts).sum(0))
    return found


def sent_by_the_first_rank(of_a: torch.Tensor, of_b: torch.Tensor) -> None:
    for gradient in (of_a, of_b):
        dist.reduce(gradient, 0)
        dist.broadcast(gradient, 0)


def with_a_common_seed(of_a: torch.Tensor, of_b: torch.Tensor) -> Any:
    each(of_a, of_b)
    generator = torch.Generator(of_a.device).manual_seed(7)
    noise = torch.rand(of_a.shape, generator=generator, device=of_a.device, dtype=of_a.dtype)
    return of_a * (1 + 16 * torch.finfo(of_a.dtype).eps * (noise > 0.5)), of_b


WRONG = {
    "missing_on_one_rank": pair(reduced(missing_on_one_rank)),
    "left_out": pair(reduced(left_out)),
    "waited_for_too_late": pair(reduced(waited_for_too_late)),
    "of_the_first_rank": pair(reduced(of_the_first_rank)),
    "not_averaged": pair(reduced(each, divide=0)),
    "averaged_twice": pair(reduced(each, divide=2)),
    "largest_for_mean": pair(reduced(largest, divide=0)),
    "rounded_at_random": pair(reduced(rounded_at_random)),
    "in_two_orders": pair(reduced(in_two_orders)),
    "raises_on_one_rank": pair(reduced(raises_on_one_rank)),
    "dies_on_one_rank": pair(reduced(dies_on_one_rank)),
    "exits_on_one_rank": pair(reduced(exits_on_one_rank)),
    "hangs_on_one_rank": pair(reduced(hangs_on_one_rank)),
    "ends_the_group": pair(ends_the_group),
}


def rows(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def all_rows(x: torch.Tensor) -> torch.Tensor:
    """Gather the rows of all ranks on every rank."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts) * 2


def wrong_on_one_rank(x: torch.Tensor) -> torch.Tensor:
    return x * (2 + dist.get_rank())


def writes_an_input(x: torch.Tensor) -> torch.Tensor:
    """Zero the second rank's input rows, if there are several ranks."""
    result = x * 2
    if dist.get_rank() == 1:
        x.zero_()
    return result


def positive(x: torch.Tensor) -> torch.Tensor:
    """Count the positive elements of each row."""
    return (x > 0).sum(1)


def narrow_on_one_rank(x: torch.Tensor) -> torch.Tensor:
    return positive(x).to(torch.int32) if dist.get_rank() == 1 else positive(x)


def reads_an_empty_file(x: torch.Tensor) -> torch.Tensor:
    if dist.get_world_size() > 1:
        pickle.load(io.BytesIO())
    return rows(x)


def has_no_peer_access(x: torch.Tensor) -> torch.Tensor:
    if dist.get_world_size() > 1:
        raise RuntimeError("peer access is not supported between these two devices")
    return rows(x)


def waits_in_the_standard_library(x: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1:
        threading.Event().wait()
    return rows(x)


def of_rows(
    optimized: Callable[[torch.Tensor], torch.Tensor], reference: Callable[[torch.Tensor], torch.Tensor] = rows
) -> Pair:
    inputs = {"x": tensor("ranks * rows", "n", values=floats(-2, 2), by_rank=0)}
    sizes = {"n": size(1, 9), "rows": size(1, 5)}
    return Pair(reference=reference, optimized=optimized, inputs=inputs, gradients=False, sizes=sizes, ranks=(2,))


def mean_of_positive(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of the positive elements of each column."""
    total, count = x.clamp(min=0).sum(0), (x > 0).sum(0)
    dist.all_reduce(total)
    dist.all_reduce(count)
    return total / count.clamp(min=1)


def mean_of_means(x: torch.Tensor) -> torch.Tensor:
    mean = x.clamp(min=0).sum(0) / (x > 0).sum(0).clamp(min=1)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def total_and_count_together(x: torch.Tensor) -> torch.Tensor:
    both = torch.stack([x.clamp(min=0).sum(0), (x > 0).sum(0).to(x.dtype)])
    dist.all_reduce(both)
    return both[0] / both[1].clamp(min=1)


def returned_before_complete(x: torch.Tensor) -> torch.Tensor:
    total = x.sum(0)
    dist.all_reduce(total, async_op=True)
    return total


def returned_when_complete(x: torch.Tensor) -> torch.Tensor:
    total = x.sum(0)
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    return total


def sum_of_rows(x: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    total = x.sum(0)
    dist.all_reduce(total, operation)
    return total


def noisy(a: torch.Tensor, by_rank: bool) -> Callable[[torch.Tensor], None]:
    """Return steps along a mean over all ranks, with noise from the step's seed, and the rank's if `by_rank`."""
    count = itertools.count(1000, 1000)

    def step(x: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(next(count) + dist.get_rank() * by_rank)
        noise = torch.randn(a.shape, generator=generator).to(a)
        of_a = (x * a).mean(0)
        dist.all_reduce(of_a)
        a.sub_(RATE * of_a / dist.get_world_size() + noise / 64)

    return step


def gathered_from(first: Callable[[int], int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that gathers the rows of all ranks. Those of the rank `first(own rank)` come first."""

    def all_of(x: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(every, x.contiguous())
        at = first(dist.get_rank())
        return torch.cat(every[at:] + every[:at])

    return all_of


def in_one_tensor(x: torch.Tensor) -> torch.Tensor:
    every = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather(list(every.chunk(dist.get_world_size())), x.contiguous())
    return every


def sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of two inputs over the rows of all ranks."""
    of_x, of_y = x.sum(0), y.sum(0)
    each(of_x, of_y)
    return of_x, of_y


def in_shards(x: torch.Tensor, y: torch.Tensor, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same sums; each rank reduces its part of one buffer. Elements after the last whole part are reduced
    only if the buffer is `padded`."""
    ranks, buffer = dist.get_world_size(), torch.cat([x.sum(0), y.sum(0)])
    if padded:
        buffer = torch.nn.functional.pad(buffer, (0, -len(buffer) % ranks))
    parts = list(buffer[: len(buffer) // ranks * ranks].chunk(ranks))
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, [part.clone() for part in parts])
    dist.all_gather(parts, own)
    return buffer[: x.shape[1]].clone(), buffer[x.shape[1] :][: y.shape[1]].clone()


def of_shards(padded: bool) -> Pair:
    return Pair(
        reference=sums,
        optimized=lambda x, y: in_shards(x, y, padded),
        inputs={
            name: tensor("ranks * rows", n, values=floats(-2, 2), by_rank=0) for name, n in (("x", "n"), ("y", "m"))
        },
        gradients=False,
        sizes={"n": size(1, 9), "m": size(1, 9), "rows": size(1, 5)},
        ranks=(2,),
    )


SHARDS = {"padded": of_shards(padded=True), "unpadded": of_shards(padded=False)}


def part_of_mean(x: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor], of: Callable[[int], int]) -> Any:
    """Return the rows of x from which a mean, reduced by `reduce`, is subtracted, of the rank `of(own rank)`."""
    every = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(every, (x - reduce(x.mean(0))).contiguous())
    return every[of(dist.get_rank())]


def mean_over_ranks(own: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(own)
    return own / dist.get_world_size()


def sum_over_ranks(own: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(own)
    return own


def of_parts(reduce: Callable[[torch.Tensor], torch.Tensor], of: Callable[[int], int] = lambda rank: rank) -> Pair:
    return of_rows(lambda x: part_of_mean(x, reduce, of), lambda x: part_of_mean(x, mean_over_ranks, lambda rank: rank))


def of_steps(optimized: Callable[[torch.Tensor], Any]) -> Pair:
    given = of_rows(rows).inputs
    return Pair(
        reference=stateful(lambda a: noisy(a, by_rank=False)),
        optimized=stateful(optimized),
        inputs={"a": tensor("n", values=floats(-2, 2))},
        step_inputs=given,
        mutates={"a"},
        steps=(1, 2),
        ranks=(2,),
    )


WRONG["returned_before_complete"] = of_rows(returned_before_complete, sum_of_rows)
WRONG["largest_sum"] = of_rows(lambda x: sum_of_rows(x, dist.ReduceOp.MAX), sum_of_rows)
WRONG["mean_over_unequal_counts"] = of_rows(mean_of_means, mean_of_positive)
WRONG["wrong_in_one_process_too"] = of_rows(lambda x: 1.5 * mean_of_positive(x), mean_of_positive)
WRONG["noise_of_its_own_in_each_rank"] = of_steps(lambda a: noisy(a, by_rank=True))
WRONG["all_rows"] = of_rows(all_rows)
WRONG["wrong_on_one_rank"] = of_rows(wrong_on_one_rank)
WRONG["parts_of_own_means"] = of_parts(lambda own: own)
WRONG["parts_of_a_sum"] = of_parts(sum_over_ranks)
WRONG["parts_exchanged"] = of_parts(mean_over_ranks, lambda rank: dist.get_world_size() - 1 - rank)
WRONG["writes_an_input"] = of_rows(writes_an_input)
WRONG["narrow_on_one_rank"] = of_rows(narrow_on_one_rank, positive)
WRONG["reads_an_empty_file"] = of_rows(reads_an_empty_file)
WRONG["has_no_peer_access"] = of_rows(has_no_peer_access)
WRONG["waits_in_the_standard_library"] = of_rows(waits_in_the_standard_library)
WRONG["gathered_in_another_order"] = of_rows(gathered_from(lambda rank: 1), gathered_from(lambda rank: 0))
WRONG["gathered_from_the_own_rank"] = of_rows(gathered_from(lambda rank: rank), gathered_from(lambda rank: 0))
RIGHT = {
    "gathered_in_one_tensor": of_rows(in_one_tensor, gathered_from(lambda rank: 0)),
    "in_one_bucket": pair(reduced(in_one_bucket)),
    "waited_for": pair(reduced(waited_for)),
    "gathered": pair(reduced(gathered)),
    "sent_by_the_first_rank": pair(reduced(sent_by_the_first_rank)),
    "rows": of_rows(lambda x: x + x),
    "parts_of_a_mean": of_parts(lambda own: mean_over_ranks(own / 2) * 2),
    "returned_when_complete": of_rows(returned_when_complete, sum_of_rows),
    "total_and_count_together": of_rows(total_and_count_together, mean_of_positive),
    "noise_of_each_step": of_steps(lambda a: noisy(a, by_rank=False)),
    "with_a_common_seed": pair(reduced(with_a_common_seed)),
    "narrow": of_rows(lambda x: positive(x.clone()), positive),
    # Parts that are equal to zero on all ranks of the reference, and not quite on one of the optimized side.
    "nearly_zero": of_rows(lambda x: 0 * x + 1e-39 * dist.get_rank(), lambda x: 0 * x),
}
