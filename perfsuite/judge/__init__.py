"""Check untrusted modules that follow KernelBench's convention: are they correct, and how fast are they?

Begin with `command.py`, `verdict.py` (one verdict for each candidate), `trial.py` (is it correct?), `timing.py` (how
fast is it?) and `sandbox.py` (confines the processes that run the modules).
"""
