"""AdamW with its state in host memory, updated by the CPU (ups, technique 002.5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from optimized.optimizers.fused_adamw import moments_of, torch_state
from optimized.optimizers.muon import MOMENTUM, momentum_step, places_by_shape


def cpu_offload_optimizer(
    params: Sequence[torch.Tensor],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> OffloadedAdamW:
    """Build `step(grads)`, which sets each parameter's `.grad` and updates the parameters in place.

    No state is kept on a GPU. Gradients and parameters are copied to pinned host memory. torch's fused CPU AdamW
    updates each parameter as soon as its copies have arrived. The parameter is copied back while the CPU updates the
    next one. The host waits for the copies from the device. Work that is queued after the step waits for the copies to
    the device. CPU parameters go through the same steps, without pinned memory and streams.

    The parameter on the device is authoritative. Each step reads it, so changes by others, such as a loaded checkpoint,
    take effect. Copies in the two directions overlap, so the read costs little. Parameters in float16 and bfloat16 have
    a float32 master copy, which keeps the digits that their dtype rounds away. Where others have changed an element of
    the parameter, the master copy takes its value from it.

    An element needs 16 bytes of host memory in float32, and 18 in a lower precision.

    params  tensors of any shapes, changed in place
    grads   one for each parameter, of its shape

    Source: ups, technique 002.5, which uses torchao's CPUOffloadOptimizer.
    """
    return OffloadedAdamW(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


class OffloadedAdamW:
    """The step of `cpu_offload_optimizer`.

    transfers  device → an object with the methods of `_Streams`; None: `_Streams` on CUDA, else `_Here`
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        options: dict[str, Any],
        transfers: Callable[[torch.device], Any] | None = None,
    ) -> None:
        self.params = list(params)
        self.hosts = [_Host(p, options) for p in self.params]
        self.steps = 0
        devices = dict.fromkeys(p.device for p in self.params)
        self.transfers = {device: (transfers or _transfers)(device) for device in devices}

    @torch.no_grad()
    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad
        self.steps += 1
        for transfers in self.transfers.values():
            transfers.begin()
        arrivals = []
        for p, grad, host in zip(self.params, grads, self.hosts, strict=True):
            transfers = self.transfers[p.device]
            arrivals.append(transfers.fetch([(host.grad, grad), (host.fetched, p)]))
        for p, host, arrival in zip(self.params, self.hosts, arrivals, strict=True):
            arrival.synchronize()
            host.update()
            self.transfers[p.device].send(p, host.sent)
        for transfers in self.transfers.values():
            transfers.end()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of both moments of each parameter, in host memory, and the number of steps.

        The master copies of parameters in a lower precision are not included: they follow the parameters.
        """
        moments = [moments_of(host.optimizer.state.get(host.param, {}), host.param) for host in self.hosts]
        return {"first": [m for m, _ in moments], "second": [v for _, v in moments], "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Its tensors are copied."""
        self.steps = state["steps"]
        for host, first, second in zip(self.hosts, state["first"], state["second"], strict=True):
            host.optimizer.state[host.param] = torch_state(host.param, self.steps, first, second, fused=True)


def offloaded_hybrid(
    params: Sequence[torch.Tensor],
    lr: float = 1.4e-3,
    weight_decay: float = 0.03,
    dtype: torch.dtype = torch.bfloat16,
) -> OffloadedHybrid:
    """Build `step(grads)` like `hybrid_muon_adamw`, with its state in host memory.

    AdamW is `cpu_offload_optimizer`. Each step copies Muon's momenta to the device and back, all matrices of one shape
    at a time, because the matrix products would take too long on a CPU.

    params  tensors of any shapes, changed in place
    dtype   dtype in which Muon orthogonalizes float32 matrices
    grads   one for each parameter, of its shape

    Source: ups, technique 002.5.
    """
    return OffloadedHybrid(params, lr, weight_decay, dtype)


class OffloadedHybrid:
    """The step of `offloaded_hybrid` and its state."""

    def __init__(self, params: Sequence[torch.Tensor], lr: float, weight_decay: float, dtype: torch.dtype) -> None:
        self.matrices = [i for i, p in enumerate(params) if p.dim() == 2]
        self.others = [i for i, p in enumerate(params) if p.dim() != 2]
        self.lr, self.weight_decay, self.dtype = lr, weight_decay, dtype
        self.params = [params[i] for i in self.matrices]
        self.places = places_by_shape(self.params)
        self.momenta = [host_buffer(p, p.dtype).zero_() for p in self.params]
        self.adamw = cpu_offload_optimizer([params[i] for i in self.others], lr, weight_decay=weight_decay)

    @torch.no_grad()
    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        given = [grads[i] for i in self.matrices]
        for at in self.places:
            group = [self.params[i] for i in at]
            held = [self.momenta[i].to(p.device, non_blocking=True) for i, p in zip(at, group, strict=True)]
            momentum_step(group, held, [given[i] for i in at], self.lr, MOMENTUM, self.weight_decay, self.dtype)
            for i, momentum in zip(at, held, strict=True):
                self.momenta[i].copy_(momentum, non_blocking=True)
        self.adamw([grads[i] for i in self.others])

    def state_dict(self) -> dict[str, Any]:
        """Return copies of both optimizers' states in host memory. `hybrid_muon_adamw` can load them, too."""
        self._wait()
        return {"muon": {"momenta": [m.clone() for m in self.momenta]}, "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Its tensors are copied."""
        self._wait()
        for own, given in zip(self.momenta, state["muon"]["momenta"], strict=True):
            own.copy_(given)
        self.adamw.load_state_dict(state["adamw"])

    def _wait(self) -> None:
        """Wait until all copies to host memory are complete."""
        for device in {p.device for p in self.params if p.is_cuda}:
            torch.cuda.synchronize(device)


class _Host:
    """A parameter's buffers and state in host memory.

    grad, fetched  gradient and parameter as copied from the device, in its dtype
    param          the tensor that AdamW updates, in float32 or float64
    sent           the tensor that is copied to the device, in its dtype; unchanged until the next step
    """

    def __init__(self, p: torch.Tensor, options: dict[str, Any]) -> None:
        wide = torch.promote_types(p.dtype, torch.float32)
        self.grad, self.fetched = host_buffer(p, p.dtype), host_buffer(p, p.dtype)
        # A float32 or float64 parameter is updated in the buffer of its copies.
        self.param = self.fetched if wide == p.dtype else host_buffer(p, wide)
        self.sent = self.fetched if wide == p.dtype else host_buffer(p, p.dtype)
        self.is_first = True
        self.optimizer = torch.optim.AdamW([self.param], fused=True, **options)

    def update(self) -> None:
        """Make one AdamW step on the fetched gradient and parameter; write the result to `sent`."""
        if self.param is not self.fetched:
            theirs = self.fetched.to(self.param.dtype)
            # Take over the elements that others have changed since the last step: in the first step all, and NaN, which
            # differs from itself.
            others = torch.ones_like(theirs, dtype=torch.bool) if self.is_first else self.fetched != self.sent
            torch.where(others, theirs, self.param, out=self.param)
            self.is_first = False
        self.param.grad = self.grad.to(self.param.dtype)
        self.optimizer.step()
        self.param.grad = None
        if self.sent is not self.param:
            self.sent.copy_(self.param)


class _Here:
    """Synchronous copies within host memory."""

    def begin(self) -> None:
        pass

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> _Here:
        for to, source in pairs:
            to.copy_(source)
        return self

    def send(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def synchronize(self) -> None:
        pass

    def end(self) -> None:
        pass


class _Streams:
    """Copies between a GPU and pinned memory, with one stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.from_device, self.to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def begin(self) -> None:
        """Make the copies wait for the work queued before the step: the backward pass and the last step's copies."""
        current = torch.cuda.current_stream(self.device)
        self.from_device.wait_stream(current)
        # If this step runs on another stream than the last one, its copies into the host buffers must still wait for
        # the last step's copies out of them.
        self.from_device.wait_stream(self.to_device)
        self.to_device.wait_stream(current)

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event:
        """Queue the copies to host memory; return the event that is recorded after them."""
        with torch.cuda.stream(self.from_device):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        return self.from_device.record_event()

    def send(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Queue the copy to the device."""
        with torch.cuda.stream(self.to_device):
            to.copy_(source, non_blocking=True)

    def end(self) -> None:
        """Make the work queued after the step wait for its copies."""
        torch.cuda.current_stream(self.device).wait_stream(self.to_device)


def _transfers(device: torch.device) -> _Here | _Streams:
    return _Streams(device) if device.type == "cuda" else _Here()


def host_buffer(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(p.shape, dtype=dtype, pin_memory=p.is_cuda)
