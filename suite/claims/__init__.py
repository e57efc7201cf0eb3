"""What the sources claim, measured: `perfsuite claims` writes docs/claims.md."""
