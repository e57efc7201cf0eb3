"""One of several ranks that train ups: `python ups_rank.py JOBS OUT` reads jobs and writes results, in JSON.

A job has a side, changes of the configuration and the number of steps; optionally a dtype, a state file to begin from,
and one to save. OUT gets each job's losses, and whether all ranks ended with the same weights.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from test_ups import DATA, SMALL, Optimized, Reference, curve

from suite.runtime import together
from suite.ups.batches import load


def done(job, here):
    config = dataclasses.replace(SMALL, **job["changes"])
    sizes = {name: getattr(config, name) for name in ("batch_size", "accumulation")}
    mixture = load(dataclasses.replace(DATA, **sizes), here.rank, here.ranks).trainer_data
    options = {"dtype": getattr(torch, job["dtype"])} if "dtype" in job else {}
    trainer = {"reference": Reference, "optimized": Optimized}[job["side"]](config, mixture, "cpu", **options)
    if "begin" in job:
        trainer.load_state_dict(torch.load(job["begin"], weights_only=True))
    losses = curve(trainer, job["steps"]).tolist()
    left = trainer.state_dict()  # all ranks must call it: it gathers sharded state
    if here.first and "leave" in job:
        torch.save(left, job["leave"])
    own = torch.cat([w.flatten() for w in left["weights"].values()])
    first = own.clone()
    dist.broadcast(first, 0)
    equal = torch.tensor(int(torch.equal(own, first)))
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    return {"losses": losses, "equal": bool(equal)}


def main():
    torch.set_num_threads(1)
    here = together.place()
    with together.joined(here, torch.device("cpu")):
        found = [done(job, here) for job in json.loads(Path(sys.argv[1]).read_text())]
    if here.first:
        Path(sys.argv[2]).write_text(json.dumps(found))
    together.leave(here, 0)


if __name__ == "__main__":
    main()
