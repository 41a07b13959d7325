"""Tests on real vLLM instances in real Ray actors."""
