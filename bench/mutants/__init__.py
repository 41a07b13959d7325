"""Mutation run: plants small mistakes in the pure modules, one at a time, and runs their tests.

`operators` makes the mutants of a module, `trials` runs the tests over one of them, `targets` says
which modules and which tests, `equivalents.toml` lists the mutants that no test can tell from the
original. docs/internals/mutants.md says how to run it and how to read the result.
"""
