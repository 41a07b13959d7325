"""Inference engines, behind the one interface that a llumlet asks for."""
