"""Code of other revisions: trees from git, pairs imported from them, and digests of everything that a workload ran.

Begin with `revision.py` (`Tree`), `second_import.py` and `digests.py`. No torch.
"""
