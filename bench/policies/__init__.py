"""`sterna reproduce policies`: Sterna's policy, its parts, and the rules of other systems.

`families` has the workloads, `contenders` the policies and their parameters, `runs` the
simulations, `measures` the numbers of one, `search` the choice of parameters; `goals` judges, and
`report` and `plots` make what docs/policies.md shows.
"""
