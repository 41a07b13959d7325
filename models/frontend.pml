/* The front end, as far as the migration needs it: the client's abort, and the request's owner
   after a death (src/sterna/frontend/requests/ownership.py; docs/internals/model.md says what of it is left out).

   A death puts the request in doubt. Every live instance is asked whether it has the request; one
   that all deny is continued on a third instance, under another id. B may deny it, get it, and A deny
   it then: where A, which was known to have it, denies it, it has passed it on, and all are asked once
   more. */

mtype:claim = { UNASKED, ASKED, HERE, ARRIVING, DENIES, DENIED };

bit frontend_knows_a_dead;
bit frontend_knows_b_dead;
bit third_has_died; /* An instance that has nothing to do with this migration. */
bit is_in_doubt;
mtype:claim a_answer = UNASKED;
mtype:claim b_answer = UNASKED;

/* Ownership._owners: where it is, as far as the front end knows; and _Doubt.is_passed_on. */
bit frontend_takes_it_for_a = 1;
bit frontend_takes_it_for_b;
bit is_passed_on;

/* AbortRequests under way to A or B, from the front end or forwarded by the other side. */
bit abort_to_a;
bit abort_to_b;

inline end_doubt() { is_in_doubt = 0; is_passed_on = 0; a_answer = UNASKED; b_answer = UNASKED }

/* All answers so far are void. */
inline begin_round() {
    is_in_doubt = 1;
    is_passed_on = 0;
    a_answer = (frontend_knows_a_dead -> UNASKED : ASKED);
    b_answer = (frontend_knows_b_dead -> UNASKED : ASKED)
}

#ifdef WITHOUT_RECOVERY
#define IS_PUT_IN_DOUBT false
#else
#define IS_PUT_IN_DOUBT true
#endif

inline doubt() {
    if
    :: IS_PUT_IN_DOUBT && !is_ended && !at_c && (!client_gone || is_in_doubt) -> begin_round()
    :: else
    fi
}

/* `InstanceCore._answer_owner_query`: a request is here, or may come by a migration that has not
   ended: a message of the dead, still under way, could end it well. */
#define MAY_COME_TO_B (!DESTINATION_IS_SETTLED)

/* What is committed may be B's already, and have died with it: to claim it would end the doubt. */
#ifdef BREAK_CLAIMS_WHAT_IT_GIVES_AWAY
#define MAY_BE_GIVEN_AWAY false
#else
#define MAY_BE_GIVEN_AWAY (source == SOURCE_COMMITTING)
#endif

inline a_answers() {
    if
    :: at_a == GONE -> a_answer = DENIES
    :: at_a != GONE && MAY_BE_GIVEN_AWAY -> a_answer = ARRIVING
    :: else -> a_answer = HERE
    fi
}

inline b_answers() {
    if
    :: at_b -> b_answer = HERE
    :: !at_b && MAY_COME_TO_B -> b_answer = ARRIVING
    :: else -> b_answer = DENIES
    fi
}

/* Denied by its owner, as far as is known: that one has passed it on. */
#ifdef BREAK_BELIEVES_ALL_DENIALS
#define SHOWS_THAT_IT_WAS_PASSED_ON false
#else
#define SHOWS_THAT_IT_WAS_PASSED_ON true
#endif

inline a_is_owner() { frontend_takes_it_for_a = 1; frontend_takes_it_for_b = 0 }
inline b_is_owner() { frontend_takes_it_for_a = 0; frontend_takes_it_for_b = 1 }
inline nobody_is_owner() { frontend_takes_it_for_a = 0; frontend_takes_it_for_b = 0 }

#define A_IS_OUT (frontend_knows_a_dead || a_answer == DENIED)
#define B_IS_OUT (frontend_knows_b_dead || b_answer == DENIED)

/* `Llumlet.on_client_abort` */
inline client_abort_at_a() {
    if
    :: !SOURCE_IS_SETTLED -> source_on_client_aborted()
    :: else ->
        if
        :: a_moved_out -> abort_to_b = b_is_alive
        :: else -> abort_request_at_a()
        fi
    fi
}

inline client_abort_at_b() {
    if
    :: !DESTINATION_IS_SETTLED ->
        abort_to_a = a_is_alive && !b_knows_a_dead;
        destination_on_client_aborted()
    :: else ->
        if
        :: b_moved_out -> abort_at_c()
        :: else -> abort_request_at_b()
        fi
    fi
}

inline abort_at_c() {
    if
    :: at_c -> at_c = 0; is_ended = 1
    :: else
    fi
}
