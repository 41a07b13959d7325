"""The dashboard: one page, and what it shows of a cluster from moment to moment.

`cluster_frames` turns instances and requests into frames, `decisions` describes a decision in a
line, and `page.html` draws them; `page` hands it out. A server sends frames while someone looks
(`frontend.operators.watchers`), and a recorded simulation has them in a file (`recording`).

Offers: cluster_frames, decisions, page, recording.
Imports: errors.
"""
