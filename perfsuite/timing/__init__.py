"""Timing in one process: a proven workload becomes a `Measurement`.

Begin with `measuring.py` (`measure`), `sampling.py` (interleaved blocks), `runner.py` (calls one side repeatedly),
`clocks.py` (timers, and the flush of the L2 cache before each call), `bench.py` (a workload's sides with their inputs)
and `timing_checks.py` (faults that a side has only while it is timed).
"""
