"""Data of the trainer ups: advection and Darcy flow, generated here or read from PDEBench's files."""
