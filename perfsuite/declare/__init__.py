"""Declaration of pairs: what a `Pair` is, and how pytest finds the pairs of a test module. Never imports torch.

Begin with `pair.py` (`Pair`), `specs.py` (its inputs), `sides.py` (its two sides), `workload.py` (`Workload`, `Cost`)
and `discovery.py` (the pairs of a module).
"""
