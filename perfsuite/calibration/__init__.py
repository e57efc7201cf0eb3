"""`perfsuite calibrate`: what the gate's rule assumes of a device, measured on that device.

    workloads → worker (a process) → record → resample (the real gate) → analysis → report

The recording is JSON and holds every quad; all that follows it works on that alone and imports no torch.
"""
