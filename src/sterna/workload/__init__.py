"""What requests come when: traces, arrivals and lengths.

`catalog` builds the trace of a `Workload`, from what a user can name. It puts together `lengths`
and `arrivals` (pure, given a stream of random numbers), `classes`, and the rows of files: `files`
reads them, `formats` understands their lines, `rows` holds them; `seed` says which seeds there
are. docs/traces.md is the user's page.
"""
