"""API keys: whose a request is, found in a time that tells nothing of the keys."""

import hashlib
import secrets
from collections.abc import Sequence

from sterna.classes import ApiKey


class ApiKeys:
    """All keys of a server; without any, everybody may do everything."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    @property
    def are_needed(self) -> bool:
        """Whether the server has keys at all."""
        return bool(self._keys)

    def refuse(self, authorization: str | None) -> bool:
        """Whether the server has keys, and this header has none of them."""
        return self.are_needed and self.find(authorization) is None

    def find(self, authorization: str | None) -> ApiKey | None:
        """Return the key of an `Authorization: Bearer KEY` header; None where it is none."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.encode()).digest()
        # Every key is compared, so that the time taken does not tell which one was close.
        matches = [each for each in self._keys if secrets.compare_digest(digest, each.digest)]
        return matches[0] if matches and scheme.lower() == "bearer" else None
