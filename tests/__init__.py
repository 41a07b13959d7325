"""Tests, in folders that mirror those of src/sterna; helpers that several share lie beside them."""
