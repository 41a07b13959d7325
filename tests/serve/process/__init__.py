"""Starting and ending servers, and what the command line says."""
