"""Profiles of engines: what `sterna profile` measures, times that are fitted to it, and the files
that hold it.

Offers: fitting, measurement_plan, profile_file.
Imports: engine.emulated, errors.
"""
