"""Live migration of Section 4.2: messages, effects and the two state machines. Pure."""
