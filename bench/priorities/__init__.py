"""`sterna bench priorities`: what priorities give to urgent requests and cost the others."""
