"""Commands that the suite adds to `perfsuite` through the entry-point group "perfsuite.commands"."""
