"""Kinds of models, by the state that a request of theirs has."""
