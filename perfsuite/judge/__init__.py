"""Check untrusted modules that follow KernelBench's convention: are they correct, and how fast are they?"""
