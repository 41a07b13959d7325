"""The check that nothing has become slower: short runs beside the committed results."""
