"""What the checkers say when a promise was broken."""


class Violation(AssertionError):
    """A promise was broken; the message says which, and by whom."""
