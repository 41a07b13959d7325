"""Workloads: traces, arrivals and lengths of requests.

`catalog` builds the trace of a `Workload`, from what a user can name. It puts together requests
that are `drawn` and `arrivals` (pure, given a stream of random numbers), `class_mix`, and the rows
of files: `files` reads them, `formats` parses their lines, `rows` holds them. `block_hashes` has
what an engine with prefix caching knows of their contents. docs/traces.md is the user's page.

Offers: block_hashes, catalog, seeds, trace, turns.
Imports: errors, types.
"""
