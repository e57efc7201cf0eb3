"""The history of runs: a file for each run, an index over the files, and the changes of each workload's time.

Begin with `records.py` (figures of a run), `store.py` (the files), `index.py` (the index) and `command.py`.
"""
