"""`sterna bench priorities`: gain of urgent requests from priorities, and cost for the others."""
