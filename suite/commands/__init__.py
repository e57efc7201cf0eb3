"""Commands that join `perfsuite` through the entry-point group "perfsuite.commands"."""
