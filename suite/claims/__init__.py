"""Measurements of the sources' claims, which `perfsuite claims` makes; docs/claims.md has the results."""
