"""`sterna bench kinds`: kinds of models, by the state that a request of theirs has."""
