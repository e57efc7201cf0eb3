"""ups in several ranks over gloo: loss curves, weights, checkpoints for any number of ranks, and how a run ends."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from curves import NEIGHBOURS, a_rounding_away, deviation_of, share_of_rule
from rich.console import Console
from scale import FULL, FULLY, count
from states import same
from test_ups import DATA, SMALL, Optimized, Reference, curve, made

from optimized.buckets import Bucket
from optimized.over_ranks import clip_over_ranks
from perfsuite.errors import PerfsuiteError
from perfsuite.state.process_state import begin_group
from suite import launching
from suite.commands.train import train
from suite.runtime import DivergedError, Options, checkpoints, fit, loop, together
from suite.runtime.stopping import Stopping
from suite.runtime.timing import Trace
from suite.runtime.together import Place
from suite.ups.batches import load
from suite.ups.config import OF_RANKS, TECHNIQUES

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
EACH_BATCH = {"inverse_loss_frequency": 1}
"""Schedule with inverse losses in each batch; with others, one process with more accumulation would differ."""
LIMIT_S = 30.0
"""Seconds within which all ranks must have ended after one was killed."""


def path(*folders):
    """Return PYTHONPATH with these folders first."""
    return os.pathsep.join(map(str, (*folders, *os.environ.get("PYTHONPATH", "").split(os.pathsep)))).strip(os.pathsep)


def in_ranks(ranks, jobs, folder, monkeypatch):
    """Run the jobs in this number of processes, and return the results."""
    monkeypatch.setenv("PYTHONPATH", path(ROOT, ROOT / "tests", ROOT / "tests/trainers"))
    mixture, out = folder / "jobs.json", folder / f"found-{ranks}.json"
    mixture.write_text(json.dumps(jobs))
    program = str(ROOT / "tests/trainers/ups_rank.py")
    strict = ("-W", "error::FutureWarning", "-W", "error::UserWarning")
    assert launching.launch([sys.executable, *strict, program, str(mixture), str(out)], ranks) == 0
    return json.loads(out.read_text())


def alone(kind, accumulation, **options):
    """Return a trainer of one process, on the examples that several ranks have together."""
    config = dataclasses.replace(SMALL, **EACH_BATCH, accumulation=accumulation)
    data = dataclasses.replace(DATA, accumulation=accumulation)
    return made(kind, load(data).trainer_data, config, **options)


def known_to(steps, begin=None):
    """Return (truth, deviation by float32 rounding up to each step) of four micro-batches a step."""

    def begun(trainer):
        if begin is not None:
            trainer.load_state_dict(torch.load(begin, weights_only=True))
        return trainer

    truth = curve(begun(alone(Reference, 4, dtype=torch.float64)), steps)
    runs = [curve(begun(alone(Reference, 4)), steps)]
    runs += [curve(a_rounding_away(begun(alone(Reference, 4)), seed), steps) for seed in range(NEIGHBOURS)]
    return truth, deviation_of(runs, truth)


def share(job, known):
    """Return the largest error of a job's curve as a fraction of the error that the rule allows."""
    return share_of_rule(torch.tensor(job["losses"], dtype=torch.float64), *known, torch.float32)


SHARDED = {"use_fsdp2": True}
SWITCHED = dict.fromkeys((*TECHNIQUES, *OF_RANKS), False) | {
    "cpu_offload_optimizer": True,
    "activation_checkpoint": True,
}


def test_loss_curves_and_checkpoints_of_ranks_match_those_of_one_process(tmp_path, monkeypatch):
    begin, middle, sharded = (str(tmp_path / f"{name}.pt") for name in ("begin", "middle", "sharded"))
    torch.save(alone(Reference, 4).state_dict(), begin)
    two, four = {**EACH_BATCH, "accumulation": 2}, {**EACH_BATCH, "accumulation": 1}
    by_rule = [
        {"side": "reference", "changes": two, "steps": STEPS},
        {"side": "optimized", "changes": two, "steps": STEPS, "leave": middle},
        {"side": "optimized", "changes": two | SWITCHED, "steps": STEPS, "begin": begin},
        {"side": "optimized", "changes": two | SHARDED, "steps": STEPS, "leave": sharded},
    ]
    # This schedule leaves some batches without inverse losses, so that some weights have no gradient.
    by_tolerance = [
        {"side": "reference", "changes": {"accumulation": 1}, "steps": STEPS, "dtype": "float64"},
        {"side": "optimized", "changes": {"accumulation": 1}, "steps": STEPS},
    ]
    alike = [{"side": "optimized", "changes": {"lambda_enc": 0.0, "lambda_dec": 0.0}, "steps": 2}]
    if FULL:
        by_rule += [
            {"side": "optimized", "changes": two | SWITCHED | SHARDED, "steps": STEPS, "begin": begin},
            {"side": "optimized", "changes": two | {"cpu_offload_optimizer": True}, "steps": STEPS, "begin": begin},
            {"side": "optimized", "changes": two | {"shared_optimizer": False}, "steps": STEPS, "begin": begin},
        ]
        by_tolerance += [
            {"side": "reference", "changes": {"accumulation": 1}, "steps": STEPS},
            {"side": "optimized", "changes": SHARDED | {"accumulation": 1}, "steps": STEPS},
        ]
        alike += [
            {"side": "optimized", "changes": SHARDED | {"lambda_enc": 0.0, "lambda_dec": 0.0}, "steps": 2},
            # Of weights with a single row, only rank 0 has a part.
            {"side": "optimized", "changes": SHARDED | {"precision": "fp16", "grad_clip": 0.5}, "steps": 2},
            {"side": "optimized", "changes": {"precision": "fp16", "grad_clip": 0.5, "accumulation": 1}, "steps": 2},
        ]
    found = in_ranks(2, by_rule + by_tolerance + alike, tmp_path, monkeypatch)
    assert all(job["equal"] for job in found)
    known = known_to(STEPS)
    assert all(share(job, known) <= 1 for job in found[: len(by_rule)])
    compared = found[len(by_rule) :][: len(by_tolerance)]
    truth, *others = (torch.tensor(job["losses"], dtype=torch.float64) for job in compared)
    for other in others:
        torch.testing.assert_close(other, truth, rtol=1e-4, atol=0)
    # Resume the two ranks' state in one rank, and in four.
    for left in (middle, sharded) if FULL else (sharded,):
        resumed = alone(Optimized, 4)
        resumed.load_state_dict(torch.load(left, weights_only=True))
        assert share({"losses": curve(resumed, STEPS).tolist()}, known_to(STEPS, left)) <= 1
    if not FULL:  # on two cores, four processes start slowly
        return
    jobs = [
        {"side": "optimized", "changes": four, "steps": STEPS, "begin": middle},
        {"side": "optimized", "changes": four | SHARDED, "steps": STEPS, "begin": sharded},
    ]
    for left, job in zip((middle, sharded), in_ranks(4, jobs, tmp_path, monkeypatch), strict=True):
        assert share(job, known_to(STEPS, left)) <= 1
        assert job["equal"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bucket_splits_weights_evenly_between_ranks(ranks):
    sizes = [(12, 8), (8, 8), (8,), (8,), (16, 8), (8, 8), (12, 8), (12,), (16, 8)]
    buckets = [
        Bucket([torch.full(size, 1.0 + i) for i, size in enumerate(sizes)], ranks, rank) for rank in range(ranks)
    ]
    owned = [bucket.owned for bucket in buckets]
    assert sorted(itertools.chain.from_iterable(owned)) == list(range(len(sizes)))
    loads = [sum(math.prod(sizes[i]) for i in own) for own in owned]
    assert max(loads) - min(loads) <= max(map(math.prod, sizes))
    for bucket in buckets:
        assert all(w.eq(1.0 + i).all() for i, w in enumerate(bucket.weights))
        ends = [(owner, at, at + math.prod(size)) for (owner, at), size in zip(bucket.places, sizes, strict=True)]
        followed = zip(sorted(ends), sorted(ends)[1:], strict=False)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in followed)
        assert max(end for *_, end in ends) < bucket.buffer.shape[1]  # the last element holds an extra number


@pytest.mark.parametrize("shapes", [[], [(3,), (2, 2)]])
def test_a_rank_with_or_without_weights_clips_by_the_norm_over_all_ranks(shapes):
    like = torch.zeros(2, dtype=torch.float64)
    grads = [torch.full(shape, 2.0, dtype=torch.float64) for shape in shapes]
    begin_group("cpu")
    try:
        norm = clip_over_ranks(grads, 1.0, like=like)
    finally:
        dist.destroy_process_group()
    assert norm.dtype == like.dtype
    assert norm.item() == pytest.approx(math.sqrt(4.0 * sum(grad.numel() for grad in grads)))
    clipped = math.sqrt(sum(grad.square().sum().item() for grad in grads))
    assert clipped == pytest.approx(1.0 if grads else 0.0, rel=1e-6)


# --- the command ----------------------------------------------------------------------------------------------------


def begun(folder, *more, ranks=2):
    """Start `perfsuite train ups` in this number of ranks."""
    config = ["--config", "configs/ups/tiny.yaml", "--device", "cpu", "--folder", str(folder)]
    command = launching.command_of("train", "ups", *config, "--ranks", str(ranks), *more)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process):
    """Return (exit code, lines except those about the data)."""
    out, _ = process.communicate(timeout=120)
    return process.returncode, [line for line in out.splitlines() if not line.startswith("data: ")]


def ranks_of(process):
    """Return rank → process id of the running ranks."""
    found = {}
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {int(v[5:]): int(child) for v in variables if v.startswith(b"RANK=")}
    return found


def both(process):
    """Return rank → process id once two ranks run, else None."""
    assert process.poll() is None, process.stdout.read()
    return found if len(found := ranks_of(process)) == 2 else None


def once(condition, limit_s=60.0):
    """Wait until the condition is true, and return its value."""
    until = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return value


def new_files(process, folder, before):
    """Return whether a run has written a new checkpoint, or ended."""
    return process.poll() is not None or checkpoints.Store(folder).files() != before


def last_of(folder):
    return checkpoints.load(checkpoints.Store(folder).latest(), "ups")


def test_killed_rank_ends_all_with_one_line_and_the_run_resumes_bit_identically(tmp_path):
    steps, folder, rng = count(quick=100, full=1500), tmp_path / "killed", random.Random(0)
    kills = 0
    every = ("--checkpoint_every", "10", "--steps", str(steps))
    for _ in range(count(quick=1, full=20)):
        resume = ("--resume", "latest") if checkpoints.Store(folder).files() else ("--overwrite",)
        process = begun(folder, *every, *resume)
        pids = once(functools.partial(both, process))
        before = checkpoints.Store(folder).files()
        if rng.random() < 0.7:  # otherwise kill while they start
            once(functools.partial(new_files, process, folder, before))
        time.sleep(rng.uniform(0, 0.5))
        rank = rng.randrange(2)
        try:
            os.kill(pids[rank], signal.SIGKILL)
        except ProcessLookupError:  # the run had already ended
            ended(process)
            break
        killed = time.monotonic()
        code, lines = ended(process)
        assert time.monotonic() - killed < LIMIT_S
        if code == 0:  # the run had already ended
            break
        assert (code, len(lines)) == (128 + signal.SIGKILL, 1), lines
        assert lines[0].startswith(
            f"Error: rank {rank} was ended by SIGKILL; all others were ended: go on with --resume"
        )
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
        kills += 1
    assert kills >= count(quick=0, full=20)
    if not FULL:  # tests without ranks also resume runs bit for bit
        return
    resume = ("--resume", "latest") if checkpoints.Store(folder).files() else ()
    assert ended(begun(folder, *every, *resume))[0] == 0
    assert ended(begun(tmp_path / "whole", *every))[0] == 0
    assert last_of(folder).windows == last_of(tmp_path / "whole").windows == steps
    assert same(last_of(folder).trainer, last_of(tmp_path / "whole").trainer)


@FULLY
def test_sigterm_ends_ranks_after_a_whole_step_and_saves_a_checkpoint(tmp_path):
    process = begun(tmp_path, "--steps", "100000", "--checkpoint_every", "10")
    once(lambda: checkpoints.Store(tmp_path).files())
    process.send_signal(signal.SIGTERM)
    code, lines = ended(process)
    assert code == 128 + signal.SIGTERM
    assert "finishing the step, then saving" in lines[0]
    assert lines[1].endswith("ended by SIGTERM")
    last = last_of(tmp_path)
    assert last.windows == last.trainer["steps"] == last.trainer["optimizers"]["operator"]["adamw"]["steps"]


WAITS = """
import os, pathlib, signal, sys, time
asked = lambda number, frame: os._exit(128 + number)
signal.signal(signal.SIGINT, asked)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
time.sleep(60 if os.environ["RANK"] == "0" or sys.argv[2] == "both" else 0)
"""
"""Program of two ranks. Rank 0, or both, wait for a signal."""


def signalled(folder, which, *signals):
    """Run `launching.launch` with waiting ranks; only this process gets the signals, half a second apart.

    Each is sent after the launcher has handled the one before: a busy machine may take longer.
    """
    folder.mkdir()
    before, handled, add = signal.getsignal(signal.SIGTERM), threading.Event(), launching._Asked.add

    def noted(asked, number):
        add(asked, number)
        handled.set()

    def send():
        once(lambda: len(list(folder.iterdir())) == 2 and signal.getsignal(signal.SIGTERM) is not before)
        for number in signals:
            handled.clear()
            os.kill(os.getpid(), number)
            handled.wait(60)
            time.sleep(0.5)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launching._Asked, "add", noted)
            return launching.launch([sys.executable, "-c", WAITS, str(folder), which], 2)
    finally:
        sender.join()


def test_second_sigterm_ends_all_ranks_at_once(tmp_path):
    with pytest.raises(launching.RankFailedError, match="all ranks were ended at once by a second SIGTERM") as failed:
        signalled(tmp_path / "ranks", "both", signal.SIGTERM, signal.SIGTERM)
    assert failed.value.code == 128 + signal.SIGTERM


def test_launcher_forwards_sigint_to_the_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "PASSED_ON_S", 0.1)
    assert signalled(tmp_path / "ranks", "first", signal.SIGINT) == 128 + signal.SIGINT


def test_launched_rank_treats_repeated_signals_as_one():
    """The system may send SIGTERM to all processes of a service, and the launcher forwards its own, too."""
    messages = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        with Stopping(messages.append, "step", once=True) as stop:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # while the process ends
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.signal == signal.SIGTERM
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("program", "grace", "message"),
    [
        (
            "print('Error: rank', rank, 'does not answer (NCCL error)'); sys.exit(75)",
            60,
            "rank 1 does not answer .NCCL",
        ),
        ("sys.exit(75)", 60, "the ranks have lost one another"),
        ("rank == '1' and time.sleep(60); sys.exit(75)", 0.5, "rank 1 did not end when others had"),
    ],
)
def test_ranks_that_lose_contact_raise_rank_failed_error(program, grace, message, monkeypatch):
    monkeypatch.setattr(launching, "GRACE_S", grace)  # on a busy machine, one rank may start seconds after the other
    program = f"import os, sys, time; rank = os.environ['RANK']; {program}"
    with pytest.raises(launching.RankFailedError, match=message) as failed:
        launching.launch([sys.executable, "-c", program], 2)
    assert failed.value.code == launching.LOST


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[rank1]: RuntimeError: CUDA error: invalid\n[rank1]: Compile with DSA",
            "rank 1: RuntimeError: CUDA error: invalid",
        ),
        ("Traceback:\nE: x\nMemoryError\nnote", "rank 1: MemoryError"),
        ("Error: no such file", "no such file"),
        ("gone", "rank 1: gone"),
        ("", "rank 1 ended with exit code 3"),
    ],
)
def test_error_of_a_failed_rank_is_its_exception_in_one_line(text, message):
    program = f"import os, sys; rank = os.environ['RANK']; rank == '1' and (print({text!r}), sys.exit(3))"
    with pytest.raises(launching.RankFailedError) as failed:
        launching.launch([sys.executable, "-c", program], 2)
    assert (str(failed.value), failed.value.code) == (message, 3)


def test_failure_to_start_ranks_raises_perfsuite_error(monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(PerfsuiteError, match="cannot start 2 ranks: Too many open files; start fewer"):
        launching.launch([sys.executable], 2)


FEEDS = """
import dataclasses, os
from test_ups import DATA, SMALL
from suite.ups.batches import Feed, Maker, load
config = dataclasses.replace(SMALL, num_workers=1, prefetch_factor=2)
feed = Feed(Maker(mixture=load(DATA).trainer_data, config=config))
feed.batch(0)
os.kill(os.getpid(), 9)
"""


@FULLY
def test_workers_end_when_their_rank_is_killed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", path(ROOT, ROOT / "tests", ROOT / "tests/trainers"))
    command = [sys.executable, "-c", FEEDS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            process.communicate(timeout=60)  # until no process holds the pipe
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


@FULLY
def test_torchrun_can_start_the_ranks(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "perfsuite"]
    options = ["--config", "configs/ups/tiny.yaml", "--device", "cpu", "--folder", str(tmp_path), "--steps", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path(ROOT)}
    done = subprocess.run([*command, "train", "ups", *options], cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == 0
    assert last_of(tmp_path).items == 5 * 2 * 4 * 2


# --- user errors ----------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets torchrun's variables."""

    def mixture(**variables):
        usual = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
        for name, value in (usual | variables).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))

    return mixture


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"LOCAL_RANK": None}, "RANK is set and LOCAL_RANK is not"),
        ({"RANK": "first"}, "RANK, WORLD_SIZE or LOCAL_RANK is no number"),
        ({"RANK": 2}, "RANK=2 of WORLD_SIZE=2 cannot be"),
    ],
)
def test_invalid_torchrun_variables_raise_perfsuite_error(environment, variables, message):
    environment(**variables)
    with pytest.raises(PerfsuiteError, match=message):
        together.place()


def test_single_process_under_torchrun_is_placed_alone(environment):
    environment(WORLD_SIZE=1)
    assert together.place() == together.ALONE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trainer2", "--ranks", "2"), "trainer trainer2 trains in one process; these train in several ranks: ups"),
        (("ups", "--ranks", "0"), "0 is not in the range x>=1"),
    ],
)
def test_invalid_use_of_the_ranks_option_is_reported(arguments, message):
    done = CliRunner().invoke(train, list(arguments))
    assert done.exit_code
    assert message in done.output


@FULLY
def test_invalid_configuration_prints_one_line_for_all_ranks(tmp_path):
    code, lines = ended(begun(tmp_path, "--batch_size", "3"))
    assert (code, len(lines)) == (2, 1), lines
    assert "is no whole number of examples" in lines[0]


def test_too_few_gpus_are_reported_before_ranks_are_started(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launching, "launch", None)  # a call would raise
    done = CliRunner().invoke(train, ["ups", "--ranks", "3", "--device", "cuda"])
    assert "3 ranks need as many GPUs, and this machine has 2" in done.output


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_ranks_option_under_torchrun_is_rejected(ranks, environment):
    environment()
    done = CliRunner().invoke(train, ["ups", "--ranks", ranks])
    assert "torchrun has started the ranks already; leave out --ranks" in done.output


@pytest.mark.parametrize(
    ("name", "gpus", "nccl", "message"),
    [
        ("cuda:1", 2, True, "each of 2 ranks has a GPU of its own; name cuda, or cpu"),
        ("cuda", 1, True, "2 ranks need as many GPUs, and this machine has 1"),
        (None, 2, False, "ranks on GPUs need NCCL, which this PyTorch is built without"),
    ],
)
def test_unusable_gpus_for_ranks_raise_perfsuite_error(monkeypatch, name, gpus, nccl, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    with pytest.raises(PerfsuiteError, match=message):
        together.device_of(together.Place(rank=1, ranks=2, local=1), name)


def test_more_ranks_than_a_cpu_can_run_are_refused(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert together.device_of(together.Place(rank=15, ranks=16, local=15), "cpu") == "cpu"
    with pytest.raises(
        PerfsuiteError, match=r"^3000 ranks are too many for this machine's 2 CPU cores; start at most 16$"
    ):
        together.device_of(together.Place(rank=2999, ranks=3000, local=2999), "cpu")


def test_different_torch_versions_of_ranks_raise_perfsuite_error(monkeypatch):
    def gathered(every, own):
        every[:] = [own, {**own, "torch": "2.9.0"}]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    with pytest.raises(PerfsuiteError, match=r"rank 1 runs torch 2\.9\.0, and rank 0 .*; install the same"):
        together.check_versions(together.Place(rank=0, ranks=2))


def test_resuming_ranks_from_different_checkpoints_raises_perfsuite_error(monkeypatch):
    def gathered(every, own):
        every[:] = [own, 2]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    with pytest.raises(PerfsuiteError, match="rank 1 goes on from a checkpoint of 2 windows, and rank 0 from one of 4"):
        together.Together(together.Place(rank=0, ranks=2)).check_begin(4)


def test_port_in_use_raises_perfsuite_error(environment):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        environment(MASTER_PORT=port)
        here, device = together.place(), torch.device("cpu")
        with (
            pytest.raises(PerfsuiteError, match=f"another program has port {port}; start again"),
            together.joined(here, device),
        ):
            pass


def test_only_rank_0_writes_a_profile(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(loop, "Trace", lambda path, *rest: asked.append(path) or Trace(None, *rest))
    monkeypatch.setattr(together.Together, "ends", lambda self, wish: wish)
    options = Options(windows=0, profile=str(tmp_path / "trace.json"))
    for rank in range(2):
        fit(alone(Optimized, 1), iter(()), options, console=Console(quiet=True), place=Place(rank=rank, ranks=2))
    assert asked == [tmp_path / "trace.json", None]


class Diverging:
    """Trainer whose third loss is NaN."""

    window_name = "step"

    def __init__(self):
        self.steps = 0

    def train_window(self, batch):
        self.steps += 1

    def metrics(self):
        return {"loss": float("nan") if self.steps == 3 else 0.5}

    last_metrics = metrics

    def state_dict(self):
        return {"steps": self.steps}


@pytest.mark.parametrize(
    ("rank", "message"),
    [(0, r"the last checkpoint is .*window-00000002\.pt"), (1, "the last checkpoint is of step 2")],
)
def test_divergence_error_of_each_rank_names_the_last_checkpoint(rank, message, tmp_path, monkeypatch):
    monkeypatch.setattr(together.Together, "ends", lambda self, wish: wish)
    monkeypatch.setattr(together.Together, "by_first", lambda self, value: value)
    options = Options(checkpoint_every=1, folder=str(tmp_path))
    batches = iter([{"x": torch.zeros(1)}] * 5)
    with pytest.raises(DivergedError, match=message):
        fit(Diverging(), batches, options, console=Console(quiet=True), place=Place(rank=rank, ranks=2))
