"""`perfsuite calibrate`: measure on a device what the gate's rule assumes of it.

    workloads → worker (a process) → record → resample (the real gate) → analysis → report

The recording is JSON and holds the times of every ABBA round. All later steps work on the recording alone and import
no torch.
"""
