"""The scheduling policy (Section 4.4): pure functions over views and loads. Pure.

`virtual_usage` and `headroom` say how loaded an instance is, `dispatch` where a new request goes
(`prefix_dispatch`: by prefix caches; `candidate_table` has what it compares), `pairing` between
which instances requests move, `selection` which request moves, `survival` how long requests are
likely to go on, `scaling` how many instances there should be. `own` is the base of classes that
decide in place of these, `guarded` such a class in a server, `setting_text` reads its settings.

Offers: candidate_table, dispatch, guarded, headroom, load_report, own, pairing, prefix_dispatch,
presets, scaling, selection, setting_text, virtual_usage.
Imports: config, errors, types.
"""
