"""Profiles of engines: what `sterna profile` measures, times that are fitted to it, the files that
hold it, and the target load that these give.

Offers: fitting, measurement_plan, profile_file, target_load.
Imports: config, engine.emulated, errors, types.
"""
