"""Code that the reference and the optimized trainers share: run-time services, configurations, data and commands.

Imports neither side; `suite.trainers` knows their trainers by name and loads one when it is asked for.
"""
