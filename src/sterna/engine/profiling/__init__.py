"""Profiles of engines: what `sterna profile` measures, and the files that hold it.

Offers: measurement_plan, profile_file.
Imports: engine.emulated, errors.
"""
