"""The state of a request's sampling that vLLM would lose, or count wrongly, where it goes on.

`generators` has the random draws of seeded requests, `thinking_budgets` the counts of thoughts, and
`structured_outputs` compiles each request's grammar by its own backend.

Offers: generators, structured_outputs, thinking_budgets.
Imports: nothing.
"""
