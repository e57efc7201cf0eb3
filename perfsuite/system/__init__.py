"""The machine and this process: GPU, CPU, folders, time limits, and checks that no clock was replaced.

These modules never import torch.

Begin with `machine.py` (`identify` returns the `Machine`), `host.py` (CPU, cores, memory, load) and `tamper.py`
(`check` raises if the harness or a clock is not as installed).
"""
