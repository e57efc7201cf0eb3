"""The class names of leak_cnn."""

CLASSES = ("BACKGROUND", "CRACK", "LEAK", "NORMAL", "UNCLASSIFIED")
LEAK = CLASSES.index("LEAK")
"""Label of the class LEAK."""
