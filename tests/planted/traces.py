"""Faults 52 and 53: changes that a call leaves in the process, and on its input tensors and modules."""

from __future__ import annotations

import logging
import os
import signal
import types
import warnings
from typing import Any

import torch
from catalogue import Time, fast, fault, honest, pair, wave

from perfsuite import Pair, floats, module, size, tensor

LATER = "for all that runs after it"


def after(action: Any) -> Pair:
    """Return a pair whose optimized side calls `action` after its work."""

    def optimized(x: torch.Tensor) -> torch.Tensor:
        made = fast(x)
        action(x)
        return made

    return pair(optimized)


@fault(52, "warnings silenced", f"changes filters of warnings {LATER}", stage="effects")
def silences_warnings(time: Time) -> Pair:
    return after(lambda x: warnings.simplefilter("ignore"))


@fault(52, "logging switched off", f"changes the level below which nothing is logged {LATER}", stage="effects")
def switches_logging_off(time: Time) -> Pair:
    return after(lambda x: logging.disable(logging.CRITICAL))


@fault(52, "an environment variable", f"changes environment variables {LATER}", stage="effects")
def sets_variable(time: Time) -> Pair:
    return after(lambda x: os.environ.update(PLANTED="1"))


@fault(52, "a signal ignored", f"changes signal handlers {LATER}", stage="effects")
def ignores_signal(time: Time) -> Pair:
    return after(lambda x: signal.signal(signal.SIGUSR2, signal.SIG_IGN))


@honest(52, "warnings silenced for a while")
def silences_for_a_while(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fast(x)

    return pair(optimized)


TOOLS = types.ModuleType("planted_tools")
TOOLS.double = lambda x: 2 * x  # type: ignore[attr-defined]  # a module made here has any attributes
SCALES = [2.0]


def by_module(x: torch.Tensor) -> torch.Tensor:
    doubled: torch.Tensor = TOOLS.double(x)
    return doubled


def by_list(x: torch.Tensor) -> torch.Tensor:
    return x * SCALES[0]


@fault(52, "a helper in a module replaced", "replaces planted_tools.double, which the reference uses", stage="effects")
def replaces_in_a_module(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        TOOLS.double = lambda x: x + x  # type: ignore[attr-defined]  # as above
        return x + x

    return pair(optimized, reference=by_module)


@fault(52, "a list replaced", "replaces traces.SCALES, which the reference uses", stage="effects")
def appends(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        SCALES.append(1.0)
        return x + x

    return pair(optimized, reference=by_list)


@honest(52, "a list that is read")
def reads(time: Time) -> Pair:
    return pair(lambda x: SCALES[0] * x, reference=by_list)


# --- 53: changes of inputs that their values do not show -------------------------------------------------------------

NETWORK = {
    "x": tensor("m", 8, values=floats(-2, 2)),
    "net": module(lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.0))),
}


def through(x: torch.Tensor, net: torch.nn.Module) -> torch.Tensor:
    made: torch.Tensor = net(x)
    return made


def with_network(optimized: Any) -> Pair:
    return pair(optimized, reference=through, inputs=NETWORK, sizes={"m": size(1, 9)}, workloads=[])


@fault(53, "an input that needs a gradient since", "changes requires_grad of x from False to True", stage="effects")
def marks_its_input(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        made = fast(x)
        if torch.is_grad_enabled() and x.is_leaf:
            x.requires_grad_()
        return made.detach()

    return pair(optimized, reference=lambda x: wave(x).detach())


@fault(53, "a module left in evaluation", "changes the training mode of net from True to False", stage="effects")
def leaves_evaluation(time: Time) -> Pair:
    return with_network(lambda x, net: through(x, net.eval()))


@fault(53, "a hook left on a module", "changes the number of hooks on net.0 from 0 to 1", stage="effects")
def leaves_a_hook(time: Time) -> Pair:
    def optimized(x: torch.Tensor, net: torch.nn.Module) -> torch.Tensor:
        next(net.children()).register_forward_hook(lambda module, given, made: made)
        return through(x, net)

    return with_network(optimized)


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x)
        return made


class Evaluating(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.eval()
        return super().forward(x)


@fault(
    53, "its own module in evaluation", "changes the training mode of its module from True to False", stage="effects"
)
def evaluates(time: Time) -> Pair:
    inputs = {"x": tensor("m", 8, values=floats(-2, 2))}
    return pair(Evaluating(), reference=Linear(), inputs=inputs, sizes={"m": size(1, 9)}, workloads=[])


class Scale(torch.nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Tied(torch.nn.Module):
    """Two layers with one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale(), Scale()
        self.second.scale = self.first.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x))
        return made


class Untied(Tied):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.second.scale = self.second.scale.clone()
        return super().forward(x)


def with_one_buffer(optimized: Any, **fields: Any) -> Pair:
    inputs = {"x": NETWORK["x"], "net": module(Tied)}
    fields = {"reference": through, "inputs": inputs, "sizes": {"m": size(1, 9)}, "workloads": [], **fields}
    return pair(optimized, **fields)


UNTIES = "changes the tensor under {0}.second.scale from that of {0}.first.scale to its own"


@fault(53, "buffers that are no longer one", UNTIES.format("net"), stage="integrity")
def unties_buffers(time: Time) -> Pair:
    def optimized(x: torch.Tensor, net: Any) -> torch.Tensor:
        net.second.scale = net.second.scale.clone()
        return through(x, net)

    return with_one_buffer(optimized)


@fault(53, "its own buffers that are no longer one", UNTIES.format("its module"), stage="effects")
def unties_its_own(time: Time) -> Pair:
    return with_one_buffer(Untied(), reference=Tied(), inputs={"x": NETWORK["x"]})


@honest(53, "a new buffer under both names")
def exchanges_both(time: Time) -> Pair:
    def optimized(x: torch.Tensor, net: Any) -> torch.Tensor:
        net.first.scale = net.second.scale = net.first.scale.clone()
        return x * net.first.scale * net.second.scale

    return with_one_buffer(optimized)


@honest(53, "a module put back in training")
def puts_back(time: Time) -> Pair:
    def optimized(x: torch.Tensor, net: torch.nn.Module) -> torch.Tensor:
        handle = next(net.children()).register_forward_hook(lambda module, given, made: made)
        made: torch.Tensor = net.eval()(x)
        handle.remove()
        net.train()
        return made

    return with_network(optimized)
