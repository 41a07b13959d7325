"""What requests come when: traces, arrivals and lengths."""
