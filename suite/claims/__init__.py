"""Measurements of the sources' claims for `perfsuite claims`; docs/claims.md has the results."""
