"""Experiments that support perfsuite's claims. They are part of the repository, not of what a user installs."""
