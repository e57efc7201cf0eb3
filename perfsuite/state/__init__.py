"""State that a call can change: settings of torch, patched functions, Python's own state, properties of tensors.

Begin with `process_state.py` (`kept` restores the state after a block).
"""
