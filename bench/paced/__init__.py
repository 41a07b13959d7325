"""`sterna bench paced`: policies on real engines whose steps take the time of measured hardware."""
