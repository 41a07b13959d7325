/* What can happen. Each process is one party that goes on as long as it can (weak fairness). */

byte i; /* Scratch of one atomic step, 0 between steps. */

#define NOTHING_UNDER_WAY \
    (net[Reserve] == 0 && net[Reserved] == 0 && net[StageCopied] == 0 && net[Commit] == 0 \
    && net[CommitQuery] == 0 && net[Committed] == 0 && net[Aborted] == 0 && net[Abort] == 0 \
    && net[Released] == 0 && net[ForwardedAbort] == 0 && a_effect == 0 && a_outcome == 0 \
    && b_effect == 0 && b_outcome == 0 && copying == 0 && received == 0 && failed == 0 \
    && copy_failed == 0)

/* With FAULTS, deadlines are long against what is under way, except for a fault. */
#ifdef FAULTS
#define ON_TIME NOTHING_UNDER_WAY
#else
#define ON_TIME true
#endif

inline spend_unless(is_on_time) {
    if
    :: is_on_time
    :: else -> SPEND
    fi
}



inline drain() {
    if
    :: at_a == GONE -> a_outcome = DrainRefused
    :: at_a != GONE && ARE_OTHER_BLOCKS(num_preemptions) -> a_outcome = DrainRefused
    :: else ->
        if
        :: FAULT -> SPEND; a_outcome = DrainRefused /* Immovable at this moment. */
        :: at_a == RUNNING && !mode_recompute -> a_outcome = DrainRefusedTooManyBlocks
        :: at_a == QUEUING || s_kind == LAST || mode_recompute ->
            a_outcome = Drained;
            if
            :: s_kind == LAST && at_a == RUNNING -> o_has_blocks = 1
            :: s_kind == LAST_EMPTY || s_stage > 0 -> o_has_blocks = 0
            fi;
            drained_queuing = (at_a == QUEUING);
            at_a = DRAINED
        fi
    fi
}


inline adopt_in_engine() {
    assert((is_in_place & must_be_copied) == must_be_copied);
    listening = 0; is_in_place = 0;
    at_b = 1; b_ever_adopted = 1;
    b_holds = d_stage + d_has_blocks;
    assert(b_holds <= b_reserved);
    b_free = b_free + b_reserved - b_holds;
    b_reserved = 0
}


/* The copies. What is read from A is right as long as the request has not lost its blocks. */
#define A_HAS_WHAT_IT_COPIES \
    ((at_a == RUNNING || at_a == DRAINED) && num_preemptions == s_num_preemptions)


/* What is asked again when `query_interval_s` has passed, unless it is under way already. */
#ifdef BREAK_NEVER_ASKS_AGAIN
#define ASKS_FOR_THE_VERDICT false
#else
#define ASKS_FOR_THE_VERDICT (source == SOURCE_COMMITTING && !s_has_client_aborted)
#endif
#define SOURCE_ASKS \
    (a_is_alive && b_is_alive && (source == SOURCE_RESERVING || source == SOURCE_COPYING \
        || source == SOURCE_COMMITTING || source == SOURCE_FORWARDING))
#define DESTINATION_ASKS \
    (b_is_alive && destination == DESTINATION_COMMITTED && a_is_alive && !b_knows_a_dead)

inline source_asks() {
    if
    :: source == SOURCE_RESERVING || source == SOURCE_COPYING -> send_reserve()
    :: ASKS_FOR_THE_VERDICT -> send(b_is_alive, CommitQuery, s_reservation)
    :: source == SOURCE_FORWARDING || (source == SOURCE_COMMITTING && s_has_client_aborted) ->
        send_forwarded_abort()
    :: else
    fi
}

inline destination_asks() { answer(Committed, d_reservation) }

/* Leases are longer than the interval of questions: without a fault the source's ends only if
   nobody answers, and the destination's only if nobody asks. */
#define NOBODY_ANSWERS (ON_TIME && !b_is_alive)
#define NOBODY_ASKS (ON_TIME && (!a_is_alive || !SOURCE_HAS_MACHINE))

active proctype clock() {
end:
    do
#ifdef FAULTS
    :: atomic { (SOURCE_ASKS || DESTINATION_ASKS) && ON_TIME ->
        if
        :: SOURCE_ASKS -> source_asks()
        :: else
        fi;
        if
        :: DESTINATION_ASKS -> destination_asks()
        :: else
        fi }
#endif
    :: atomic { SOURCE_ASKS && FAULT -> SPEND; source_asks() }
    :: atomic { DESTINATION_ASKS && FAULT -> SPEND; destination_asks() }
    :: atomic { (a_is_alive && (source == SOURCE_RESERVING || source == SOURCE_COPYING)
        && (NOBODY_ANSWERS || FAULT)) ->
        spend_unless(NOBODY_ANSWERS); source_abort(0, 1) /* PEER_SILENT */ }
#ifdef BREAK_RESUMES_ON_A_TIME_OUT
    :: atomic { a_is_alive && source == SOURCE_COMMITTING && FAULT -> SPEND; keep_drained() }
#endif
#ifndef BREAK_HAS_NO_LEASE
    :: atomic { b_is_alive && IS_LEASED && (NOBODY_ASKS || FAULT) ->
        spend_unless(NOBODY_ASKS); destination_on_lease_over() }
#endif
    od
}


/* All that goes on by itself: messages, engines, copies, deaths that are told. One process is enough
   for weak fairness, since none of it goes on for ever unless the clock or the front end asks. */
active proctype machinery() {
end:
    do
    /* Messages to the source. */
    :: atomic { a_is_alive && net[Reserved] -> take(Reserved, i); source_on_reserved(i); i = 0 }
    :: atomic {
        a_is_alive && net[StageCopied] -> take(StageCopied, i); source_on_stage_copied(i); i = 0 }
    :: atomic { a_is_alive && net[Committed] -> take(Committed, i); source_on_committed(i); i = 0 }
    :: atomic { a_is_alive && net[Aborted] -> take(Aborted, i); source_on_aborted(i); i = 0 }
    /* Messages to the destination. */
    :: atomic { b_is_alive && net[Reserve] ->
        take(Reserve, i);
        destination_on_reserve(REST_OF(i) / 3, REST_OF(i) % 3, RESERVATION_IN(i)); i = 0 }
    :: atomic { b_is_alive && net[Commit] ->
        take(Commit, i);
        destination_on_commit(REST_OF(i) / 2, REST_OF(i) % 2, RESERVATION_IN(i)); i = 0 }
    :: atomic { b_is_alive && net[CommitQuery] ->
        take(CommitQuery, i); destination_on_commit_query(i); i = 0 }
    :: atomic { b_is_alive && net[Abort] -> take(Abort, i); destination_on_abort(i); i = 0 }
    :: atomic { b_is_alive && net[Released] -> take(Released, i); destination_on_released(); i = 0 }
    :: atomic { b_is_alive && net[ForwardedAbort] ->
        take(ForwardedAbort, i); destination_on_forwarded_abort(i); i = 0 }
    /* A's llumlet and engine. An effect is carried out between two steps; its outcome arrives later. */
    /* The migration begins, by itself (`_start_migrations`) or by order. */
    :: atomic { a_is_alive && source == SOURCE_NEW && !a_knows_b_dead ->
        if
        :: mode_recompute = 0
        :: mode_recompute = 1
        fi;
        if
        :: at_a == RUNNING -> at_a = QUEUING; a_frees() /* It has never run here. */
        :: true
        fi;
        inspect(0) }
    :: atomic { a_is_alive && a_effect == Inspect ->
        a_effect = 0;
        if
        :: at_a == GONE -> a_outcome = InspectedGone
        :: else ->
            a_outcome = Inspected;
            o_num_preemptions = num_preemptions; o_is_queuing = (at_a == QUEUING)
        fi }
    :: atomic { a_is_alive && a_effect == Drain -> a_effect = 0; drain() }
    :: atomic { a_is_alive && a_outcome == Inspected ->
        a_outcome = 0;
        if
        :: source == SOURCE_INSPECTING -> source_on_inspected()
        :: else
        fi;
        o_num_preemptions = 0; o_is_queuing = 0 }
    :: atomic { a_is_alive && a_outcome == InspectedGone ->
        a_outcome = 0;
        if
        :: source == SOURCE_INSPECTING -> source_abort(0, 1)
        :: else
        fi }
    :: atomic { a_is_alive && a_outcome == Drained ->
        a_outcome = 0;
#ifdef BREAK_ENDS_BEFORE_THE_DRAIN_IS_OVER
        if
        :: source == SOURCE_DRAINING -> source_on_drained()
        :: else
        fi;
#else
        source_on_drained();
#endif
        o_has_blocks = 0 }
    :: atomic { a_is_alive && a_outcome == DrainRefused ->
        a_outcome = 0;
#ifdef BREAK_ENDS_BEFORE_THE_DRAIN_IS_OVER
        if
        :: source == SOURCE_DRAINING -> source_on_drain_refused(false)
        :: else
        fi
#else
        source_on_drain_refused(false)
#endif
        }
    :: atomic { a_is_alive && a_outcome == DrainRefusedTooManyBlocks ->
        a_outcome = 0;
#ifdef BREAK_ENDS_BEFORE_THE_DRAIN_IS_OVER
        if
        :: source == SOURCE_DRAINING -> source_on_drain_refused(true)
        :: else
        fi
#else
        source_on_drain_refused(true)
#endif
        }
    :: atomic { a_is_alive && copy_failed != 0 ->
        i = 0;
        do
        :: (copy_failed >> i) & 1 -> break
        :: else -> i++
        od;
        copy_failed = copy_failed & ~(1 << i);
        source_on_copy_failed(i); i = 0 }
    /* B's llumlet and engine. Outcomes do not overtake what its receivers told before. */
    :: atomic { b_is_alive && b_effect == ReserveBlocks ->
        b_effect = 0;
        if
        :: FAULT -> SPEND; b_outcome = ReserveFailed
        :: b_outcome = BlocksReserved;
            /* A stage has one block, a last one a spare block, too; see docs/internals/model.md. */
            i = d_stage + (d_kind == LAST -> 2 : (d_kind == NOT_LAST -> 1 : 0));
            if
            :: i > b_reserved -> b_free = b_free - (i - b_reserved); b_reserved = i
            :: else
            fi;
            i = 0;
            if
            :: d_kind != LAST_EMPTY -> listening = listening | (1 << d_stage)
            :: else
            fi
        fi }
    :: atomic { b_is_alive && b_effect == FreeReservation ->
        b_effect = 0; b_outcome = ReservationFreed;
        listening = 0; is_in_place = 0;
        b_free = b_free + b_reserved; b_reserved = 0 }
    :: atomic { b_is_alive && b_effect == Adopt ->
        b_effect = 0;
        if
        :: FAULT -> SPEND; b_outcome = AdoptFailed
        :: b_outcome = Adopted;
            adopt_in_engine()
        fi }
    :: atomic { b_is_alive && b_outcome == BlocksReserved ->
        b_outcome = 0; destination_on_blocks_reserved() }
    :: atomic { b_is_alive && b_outcome == ReserveFailed ->
        b_outcome = 0; destination_on_reserve_failed() }
    :: atomic { b_is_alive && b_outcome == ReservationFreed && !received && !failed ->
        b_outcome = 0; destination_end(d_gives_up_for_client) }
    :: atomic { b_is_alive && b_outcome == Adopted && !received && !failed ->
        b_outcome = 0; destination_on_adopted() }
    :: atomic { b_is_alive && b_outcome == AdoptFailed && !received && !failed ->
        b_outcome = 0; destination_free(d_has_source_aborted || d_has_client_aborted) }
    :: atomic { b_is_alive && received != 0 ->
        i = 0;
        do
        :: (received >> i) & 1 -> break
        :: else -> i++
        od;
        received = received & ~(1 << i);
        destination_on_stage_received(i); i = 0 }
    :: atomic { b_is_alive && failed != 0 ->
        i = 0;
        do
        :: (failed >> i) & 1 -> break
        :: else -> i++
        od;
        failed = failed & ~(1 << i);
        destination_on_stage_failed(i); i = 0 }
    /* The copies. */
    :: atomic { copying & listening ->
        i = 0;
        do
        :: ((copying & listening) >> i) & 1 -> break
        :: else -> i++
        od;
        copying = copying & ~(1 << i);
        listening = listening & ~(1 << i);
        if
        :: received = received | (1 << i);
            if
            :: A_HAS_WHAT_IT_COPIES -> is_in_place = is_in_place | (1 << i)
            :: else
            fi
        :: FAULT -> SPEND; copy_failed = copy_failed | (1 << i); failed = failed | (1 << i)
        fi;
        i = 0 }
    /* Nobody listens. */
    :: atomic { copying & ~listening ->
        i = 0;
        do
        :: ((copying & ~listening) >> i) & 1 -> break
        :: else -> i++
        od;
        copying = copying & ~(1 << i);
        copy_failed = copy_failed | (1 << i);
        i = 0 }
    /* The receivers heard nothing for too long. */
    :: atomic { listening && (ON_TIME || FAULT) ->
        spend_unless(ON_TIME);
        i = 0;
        do
        :: (listening >> i) & 1 -> break
        :: else -> i++
        od;
        listening = listening & ~(1 << i);
        failed = failed | (1 << i);
        i = 0 }
    /* The supervisor confirms deaths; each party hears of it at a time of its own. */
    :: atomic { !b_is_alive && a_is_alive && !a_knows_b_dead ->
        a_knows_b_dead = 1; a_moved_out = 0; source_on_peer_dead() }
    :: atomic { !a_is_alive && b_is_alive && !b_knows_a_dead ->
        b_knows_a_dead = 1; destination_on_peer_dead() }
    :: atomic { !a_is_alive && !frontend_knows_a_dead -> frontend_knows_a_dead = 1;
        frontend_takes_it_for_a = 0; doubt() }
    :: atomic { !b_is_alive && !frontend_knows_b_dead -> frontend_knows_b_dead = 1;
        frontend_takes_it_for_b = 0; doubt() }
    od
}

active proctype front_end() {
end:
    do
    /* OwnerQuery arrives, and is answered. */
    :: atomic { a_is_alive && a_answer == ASKED -> a_answers() }
    :: atomic { b_is_alive && b_answer == ASKED -> b_answers() }
    /* The answer arrives. */
    :: atomic { is_in_doubt && a_answer == HERE ->
        abort_to_a = abort_to_a | (client_gone & a_is_alive); a_is_owner(); end_doubt() }
    :: atomic { is_in_doubt && b_answer == HERE ->
        abort_to_b = abort_to_b | (client_gone & b_is_alive); b_is_owner(); end_doubt() }
    :: atomic { is_in_doubt && a_answer == ARRIVING ->
        abort_to_a = abort_to_a | (client_gone & a_is_alive); begin_round() }
    :: atomic { is_in_doubt && b_answer == ARRIVING ->
        abort_to_b = abort_to_b | (client_gone & b_is_alive); begin_round() }
    :: atomic { is_in_doubt && a_answer == DENIES ->
        a_answer = DENIED;
        is_passed_on = is_passed_on | (SHOWS_THAT_IT_WAS_PASSED_ON && frontend_takes_it_for_a) }
    :: atomic { is_in_doubt && b_answer == DENIES ->
        b_answer = DENIED;
        is_passed_on = is_passed_on | (SHOWS_THAT_IT_WAS_PASSED_ON && frontend_takes_it_for_b) }
    :: atomic { is_in_doubt && (is_ended || at_c) -> end_doubt() }
    :: atomic { is_in_doubt && A_IS_OUT && B_IS_OUT && !is_ended && !at_c ->
        nobody_is_owner();
        if
        :: client_gone -> end_doubt()
        :: !client_gone && is_passed_on -> begin_round()
        :: else ->
            assert(!(A_STEPS || B_STEPS)); /* Nobody has it who could go on with it. */
            at_c = 1; is_continued = 1; end_doubt()
        fi }
    od
}

/* The old id of what was continued; and tokens of a stream without a client. Whoever should have
   passed the abort on may have died, or alone have known that the request had finished. */
#define IS_STOPPED_AT_SENDER (is_continued || ((client_gone || is_ended) && (!a_is_alive || !b_is_alive)))

/* AbortRequests on its way, and answered. */
active proctype aborts() {
end:
    do
    :: atomic { a_is_alive && abort_to_a -> abort_to_a = 0; client_abort_at_a() }
    :: atomic { b_is_alive && abort_to_b -> abort_to_b = 0; client_abort_at_b() }
    :: atomic { IS_STOPPED_AT_SENDER && A_STEPS && !abort_to_a ->
        abort_to_a = 1 }
    :: atomic { IS_STOPPED_AT_SENDER && B_STEPS && !abort_to_b ->
        abort_to_b = 1 }
    :: atomic { (client_gone || is_ended) && (!a_is_alive || !b_is_alive) && at_c -> abort_at_c() }
    od
}

/* RequestEnded may tell the source at once, or not at all. */
inline hint() {
    if
    :: source == SOURCE_INSPECTING || source == SOURCE_RESERVING || source == SOURCE_COPYING ->
        if
        :: source_on_cancelled()
        :: skip
        fi
    :: else
    fi
}

inline lose(message) { pick(message, i); net[message] = net[message] & ~(1 << i); i = 0 }

inline a_dies() {
    a_is_alive = 0;
    source_over();
    a_effect = 0; a_outcome = 0; o_num_preemptions = 0; o_is_queuing = 0; o_has_blocks = 0;
    at_a = GONE; drained_queuing = 0; num_preemptions = 0; a_holds = 0; a_free = 0;
    a_moved_out = 0; a_knows_b_dead = 0;
    copying = 0; copy_failed = 0; abort_to_a = 0;
    net[Reserved] = 0; net[StageCopied] = 0; net[Committed] = 0; net[Aborted] = 0
}

inline b_dies() {
    b_is_alive = 0;
    destination_over();
    b_effect = 0; b_outcome = 0;
    at_b = 0; b_free = B_BLOCKS; b_reserved = 0; b_holds = 0;
    b_moved_out = 0; b_knows_a_dead = 0;
    listening = 0; received = 0; failed = 0; is_in_place = 0; abort_to_b = 0;
    net[Reserve] = 0; net[Commit] = 0; net[CommitQuery] = 0; net[Abort] = 0; net[Released] = 0;
    net[ForwardedAbort] = 0
}

#ifdef BREAK_MOVES_ON_BEFORE_RELEASED
#define MAY_MOVE_ON true
#else
#define MAY_MOVE_ON (!DESTINATION_HAS_MACHINE)
#endif

/* What the cluster does with the request besides, and what goes wrong. */
active proctype life() {
end:
    do
    /* The client goes away; the front end tells where it believes the request to be. */
    :: atomic { !client_gone && !is_ended && MAY ->
        client_gone = 1;
        if
        :: !frontend_knows_a_dead && (!at_c || b_moved_out) -> abort_to_a = a_is_alive
        :: b_ever_adopted && !frontend_knows_b_dead && (!at_c || b_moved_out) ->
            abort_to_b = b_is_alive
        :: at_c -> abort_at_c()
        :: frontend_knows_a_dead -> skip /* Whoever has it is told when that answers. */
        :: else /* Nobody has it. */
        fi }
    /* It finishes, is preempted, runs again, or its place in the queue comes. */
    :: atomic { a_is_alive && at_a == RUNNING && !client_gone && !is_continued && MAY ->
        at_a = GONE; a_frees(); is_ended = 1; hint() }
    :: atomic { b_is_alive && at_b && !client_gone && !is_continued && MAY ->
        at_b = 0; b_free = b_free + b_holds; b_holds = 0; is_ended = 1 }
    :: atomic { a_is_alive && at_a == RUNNING && num_preemptions == 0 && FAULT ->
        SPEND; at_a = QUEUING; num_preemptions = 1; a_frees(); hint() }
    :: atomic { a_is_alive && at_a == QUEUING && MAY -> at_a = RUNNING; a_takes() }
    /* Once its migration to B is forgotten there, it may leave B for a third instance. */
    :: atomic { b_is_alive && at_b && MAY_MOVE_ON && !at_c && FAULT ->
        SPEND; at_b = 0; b_free = b_free + b_holds; b_holds = 0; b_moved_out = 1; at_c = 1 }
    /* An operator cancels. */
    :: atomic { (a_is_alive && FAULT
        && (source == SOURCE_INSPECTING || source == SOURCE_RESERVING || source == SOURCE_COPYING
            || source == SOURCE_DRAINING)) -> SPEND; source_on_cancelled() }
    :: atomic { b_is_alive && FAULT && (destination == DESTINATION_RESERVING || BETWEEN_STAGES) ->
        SPEND; destination_on_cancelled() }
    /* Deaths. */
    :: atomic { a_is_alive && FAULT -> SPEND; a_dies() }
    :: atomic { b_is_alive && FAULT -> SPEND; b_dies() }
    :: atomic { IS_PUT_IN_DOUBT && !third_has_died && FAULT -> SPEND; third_has_died = 1; doubt() }
#ifdef FAULTS
    :: atomic { NOTHING_UNDER_WAY == 0 && FAULT ->
        SPEND;
        if
        :: net[Reserve] -> lose(Reserve)
        :: net[Reserved] -> lose(Reserved)
        :: net[StageCopied] -> lose(StageCopied)
        :: net[Commit] -> lose(Commit)
        :: net[CommitQuery] -> lose(CommitQuery)
        :: net[Committed] -> lose(Committed)
        :: net[Aborted] -> lose(Aborted)
        :: net[Abort] -> lose(Abort)
        :: net[Released] -> lose(Released)
        :: net[ForwardedAbort] -> lose(ForwardedAbort)
        :: else
        fi }
    :: atomic { !is_calm -> is_calm = 1; faults = 0 }
#endif
    od
}

/* Where all have come to rest, time goes on: so that the end of a run is looked at, too. */
active proctype rest() {
end:
    do
    :: timeout
    od
}
