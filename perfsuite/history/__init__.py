"""The history of runs: a file for each, an index over them, and how a workload's time changed from run to run."""
