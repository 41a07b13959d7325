"""Small runs of `sterna simulate`, with the plain engines, which need no compiled code."""

from sterna.cli.main import main

PLAIN = ("--set", "is_fast=false")
SMALL = ("--trace", "S-S", "--rate", "2", "--requests", "20", "--instances", "2", *PLAIN)
HERE = ("--processes", "1")


def simulate(*options: str) -> int:
    return main(["simulate", *SMALL, *HERE, *options])
