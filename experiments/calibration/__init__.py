"""`perfsuite calibrate`: measure on a device what the gate's rule assumes about it.

    workloads → worker (a process) → record → resample (the real gate) → analysis → report

The recording is JSON and contains the times of every ABBA round. All later steps use only the recording and do not
import torch.
"""
