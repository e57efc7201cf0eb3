"""Code that the reference and the optimized trainers share: run-time services, configurations, data and commands.

The package imports neither side. `suite.trainers` lists their trainers by name and imports one on demand.
"""
