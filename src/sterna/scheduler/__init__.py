"""The global scheduler (Section 4.3): loads in; dispatch, pairing and scaling decisions out.

`global_scheduler` decides, by what is known of the instances (`known_instances`); `held_requests`
are the line before it, `prefix_waits` those that left it for the sake of their prefixes, and `room`
the memory for all of them, less what they share with `running_prompts`. `prefix_copies` are between
prefix caches, for requests and for the turns to come of `sessions`; `prefix_index` knows the caches
and, by `coming_prompts`, what they will have. `core` is the actor without sockets and clock (all
pure), `shell` drives it; `description` is what operators read, and `explanation` why it decided.

Offers: global_scheduler, prefix_copies, shell.
Imports: config, messages, messaging, policy, types.
"""
