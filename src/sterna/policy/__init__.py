"""The scheduling policy of Section 4.4: pure functions over views and loads."""
