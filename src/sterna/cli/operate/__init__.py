"""Commands for operators, which ask a running server over HTTP."""
