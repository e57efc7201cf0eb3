"""A pytest run: its tasks, the worker processes that run them, and the items that pytest collects.

Begin with `modes/base.py` (state of every kind of run), `modes/` (one class for each kind), `pytest_items.py`,
`worker_pool.py` (the worker processes) and `worker_main.py` (what a worker does).
"""
