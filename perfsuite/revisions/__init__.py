"""Code of other revisions: trees from git, pairs imported from them, and digests of everything that a workload ran.

Begin with `revision.py` (`Tree`), `second_import.py` (imports a tree under another name) and `digests.py`. These
modules never import torch.
"""
