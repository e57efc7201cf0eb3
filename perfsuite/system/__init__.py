"""The machine and the process: GPU, host, folders, clocks that were replaced, and what ends a process. No torch.

Begin with `machine.py` (`Machine`), `tamper.py` (`check`: the harness and the clocks are as installed) and `host.py`.
"""
