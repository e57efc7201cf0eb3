"""A judge of modules that nobody has read, by the convention of KernelBench."""
