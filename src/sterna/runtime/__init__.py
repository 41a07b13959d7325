"""The drivers: Ray actors that carry out the effects of the pure cores."""
