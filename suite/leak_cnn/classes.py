"""The classes of leak_cnn."""

CLASSES = ("BACKGROUND", "CRACK", "LEAK", "NORMAL", "UNCLASSIFIED")
LEAK = CLASSES.index("LEAK")
