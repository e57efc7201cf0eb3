"""Origin of the installed perfsuite, so that a workflow can install the same version."""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from perfsuite import errors
from perfsuite.revisions import revision


@dataclass(frozen=True, slots=True)
class Source:
    """A repository of perfsuite, and a commit or tag in it."""

    host: str
    repository: str
    """OWNER/NAME."""
    ref: str

    @property
    def url(self) -> str:
        """URL to clone from."""
        return f"https://{self.host}/{self.repository}"

    @property
    def raw(self) -> str:
        """URL below which its files are served unrendered."""
        if self.host == "github.com":
            return f"https://raw.githubusercontent.com/{self.repository}/{self.ref}"
        return f"{self.url}/-/raw/{self.ref}"


PLACEHOLDER = Source("github.com", "OWNER/perfsuite", "v0.1.0")


def source() -> Source:
    """Return the origin of the installed perfsuite from pip's record (PEP 610); `PLACEHOLDER` if that names no
    repository on a server."""
    try:
        record = json.loads(importlib.metadata.distribution("perfsuite").read_text("direct_url.json") or "{}")
        if "vcs_info" in record:
            return parse(record["url"], record["vcs_info"]["commit_id"]) or PLACEHOLDER
        clone = Path(unquote(urlsplit(record["url"]).path))
        address = revision.git("remote", "get-url", "origin", cwd=clone)
        return parse(address, revision.git("rev-parse", "HEAD", cwd=clone)) or PLACEHOLDER
    except (importlib.metadata.PackageNotFoundError, errors.PerfsuiteError, ValueError, KeyError, TypeError, OSError):
        return PLACEHOLDER


def parse(address: str, commit: str) -> Source | None:
    """Return the repository that a URL such as git@github.com:OWNER/NAME.git names, at this commit.

    None for other text, and for a commit that is not a full hash.
    """
    found = re.fullmatch(
        r"(?:(?:https|ssh|git)://(?:[^/@]+@)?|[^/@:]+@)([\w.-]+)(?::\d+)?[:/]([\w.-]+(?:/[\w.-]+)+)",
        address.removesuffix("/").removesuffix(".git"),
        re.ASCII,
    )
    return Source(found[1], found[2], commit) if found and re.fullmatch("[0-9a-f]{40}", commit) else None
