"""What decoding the bytes of others raises, where it is not only msgspec that finds fault. Pure."""

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""They are no message of the kind that was asked for, their text is not UTF-8, or they are nested
so deeply that nobody can read them."""
