"""State that a call can change: settings of torch, replaced functions, Python's own state, properties of tensors.

Begin with `process_state.py` (`kept`: restore it after a block).
"""
