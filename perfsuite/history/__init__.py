"""The history of runs: a file for each run, an index over the files, and the changes of each workload's time."""
