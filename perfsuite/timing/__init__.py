"""Stage 4, timing: a proven workload becomes a `Measurement` of one process.

Begin with `measuring.py` (`measure`), `sampling.py` (interleaved blocks), `runner.py` (calls one side repeatedly),
`clocks.py` and `timing_checks.py` (faults that a side has only while it is timed).
"""
