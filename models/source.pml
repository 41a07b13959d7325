/* The source's machine (src/sterna/migration/source.py), and what A's coordinator answers when it
   has none (coordinator.py). What the code calls illegal is an assertion here. */

mtype:source_state = {
    SOURCE_NEW, SOURCE_INSPECTING, SOURCE_RESERVING, SOURCE_COPYING, SOURCE_DRAINING,
    SOURCE_UNDOING, SOURCE_COMMITTING, SOURCE_FORWARDING, SOURCE_OVER
};

mtype:source_state source = SOURCE_NEW;
byte s_stage;
byte s_kind;
byte s_reservation;
bit s_is_copying;
bit s_has_client_aborted;
bit s_knows_preemptions;
bit s_num_preemptions;

mtype:effect a_effect;
mtype:event a_outcome;
bit o_num_preemptions; /* What Inspected tells. */
bit o_is_queuing;
bit o_has_blocks; /* What Drained tells: the last stage has blocks. */

#define SOURCE_HAS_MACHINE (source != SOURCE_NEW && source != SOURCE_OVER)
#define SOURCE_IS_SETTLED (source == SOURCE_NEW || source == SOURCE_FORWARDING || source == SOURCE_OVER)

inline source_over() {
    source = SOURCE_OVER;
    s_stage = 0; s_kind = 0; s_reservation = 0;
    s_is_copying = 0; s_has_client_aborted = 0; s_knows_preemptions = 0; s_num_preemptions = 0
}

inline inspect(stage) {
    s_stage = stage; s_kind = NOT_LAST;
    source = SOURCE_INSPECTING; a_effect = Inspect
}

inline send_reserve() { send(b_is_alive, Reserve, RESERVE(s_stage, s_kind, s_reservation)) }

inline copy_blocks() {
    s_is_copying = 1;
    copying = copying | (1 << s_stage);
    must_be_copied = must_be_copied | (1 << s_stage)
}

inline stop_copying() {
    if
    :: s_is_copying -> copying = 0
    :: else
    fi
}

/* `_notify_peer`: the destination knows of the migration once Reserve was sent. */
inline tell(is_client) {
    if
    :: s_knows_preemptions -> send(b_is_alive, Abort, is_client)
    :: else
    fi
}

/* `_abort`: end the migration before the drain. */
inline source_abort(is_client, is_peer_told) {
    stop_copying();
    if
    :: is_client -> abort_request_at_a()
    :: else
    fi;
    if
    :: is_peer_told -> tell(is_client)
    :: else
    fi;
    source_over()
}

/* `_undo`: give up while Drain is under way. */
inline source_undo(is_client, is_peer_told) {
    if
    :: is_client -> s_has_client_aborted = 1
    :: else
    fi;
    if
    :: is_peer_told && source == SOURCE_DRAINING -> tell(is_client)
    :: else
    fi;
#ifdef BREAK_ENDS_BEFORE_THE_DRAIN_IS_OVER
    source_over()
#else
    source = SOURCE_UNDOING
#endif
}

/* `_keep_drained`: step it again, or free it for its client. */
inline keep_drained() {
    stop_copying();
    if
#ifdef BREAK_RELEASES_BEFORE_COMMITTED
    :: at_a == GONE -> skip
#endif
    :: at_a == DRAINED && s_has_client_aborted ->
        assert(client_gone || is_ended || is_continued);
        at_a = GONE; a_frees(); is_ended = is_ended | !is_continued
    :: at_a == DRAINED && !s_has_client_aborted && drained_queuing -> at_a = QUEUING
    :: at_a == DRAINED && !s_has_client_aborted && !drained_queuing -> at_a = RUNNING
#ifndef BREAK_RELEASES_BEFORE_COMMITTED
    :: else -> assert(false)
#endif
    fi;
    drained_queuing = 0;
    source_over()
}

inline send_forwarded_abort() { send(b_is_alive, ForwardedAbort, s_reservation) }

/* The effect Release. Blocks that are being sent must not be freed: whoever gets them next would
   write into what is sent. */
inline release() {
    assert(copying == 0);
    at_a = GONE; drained_queuing = 0; a_frees()
}

/* ------------------------------------------------------------------------------ arrived messages */

inline source_on_reserved(fields) {
    if
    :: !SOURCE_HAS_MACHINE -> send(b_is_alive, Abort, 0)
    :: else ->
        if
        :: s_reservation != 0 && s_reservation != RESERVATION_IN(fields) -> skip
        :: else ->
            if
            :: source == SOURCE_RESERVING && REST_OF(fields) == s_stage ->
                s_reservation = RESERVATION_IN(fields);
                if
                :: s_kind == NOT_LAST -> source = SOURCE_COPYING; copy_blocks()
                :: else -> source = SOURCE_DRAINING; a_effect = Drain
                fi
            :: source == SOURCE_FORWARDING -> skip
            :: else ->
                /* Repeated or overtaken. */
                assert(REST_OF(fields) < s_stage || (REST_OF(fields) == s_stage
                    && source != SOURCE_INSPECTING))
            fi
        fi
    fi
}

inline source_on_stage_copied(fields) {
    if
    :: !SOURCE_HAS_MACHINE -> send(b_is_alive, Abort, 0)
    :: SOURCE_HAS_MACHINE && s_reservation == RESERVATION_IN(fields) ->
        if
        :: source == SOURCE_COPYING && REST_OF(fields) == s_stage ->
            s_is_copying = 0; inspect(s_stage + 1)
        :: source == SOURCE_FORWARDING -> skip
        :: else -> assert(REST_OF(fields) < s_stage)
        fi
    :: else /* Another reservation. */
    fi
}

inline source_on_committed(fields) {
    if
    :: !SOURCE_HAS_MACHINE -> send(b_is_alive, Released, 0)
    :: SOURCE_HAS_MACHINE && s_reservation == RESERVATION_IN(fields) ->
        if
        :: source == SOURCE_COMMITTING ->
            release();
            a_moved_out = 1;
            if
            :: !s_has_client_aborted -> send(b_is_alive, Released, 0); source_over()
            :: else -> source = SOURCE_FORWARDING; send_forwarded_abort()
            fi
        :: source == SOURCE_FORWARDING -> skip
        :: else -> assert(false)
        fi
    :: else
    fi
}

inline source_on_aborted(fields) {
    if
    :: SOURCE_HAS_MACHINE && (s_reservation == 0 || s_reservation == RESERVATION_IN(fields)) ->
        if
        :: source == SOURCE_INSPECTING || source == SOURCE_RESERVING || source == SOURCE_COPYING ->
            source_abort(REST_OF(fields), 0)
        :: source == SOURCE_DRAINING || source == SOURCE_UNDOING ->
            source_undo(REST_OF(fields), 0)
        :: source == SOURCE_COMMITTING ->
            s_has_client_aborted = s_has_client_aborted | REST_OF(fields);
            keep_drained()
        :: source == SOURCE_FORWARDING -> source_over()
        fi
    :: else
    fi
}

/* ------------------------------------------------------------------------------ outcomes and time */

/* `_plan_stage`. How many blocks remain is left open, so each stage may be the last one. */
inline source_plan_stage() {
    s_knows_preemptions = 1; s_num_preemptions = o_num_preemptions;
    if
    :: o_is_queuing || mode_recompute -> s_kind = LAST_EMPTY
    :: !o_is_queuing && !mode_recompute -> s_kind = LAST
    :: !o_is_queuing && !mode_recompute -> s_kind = NOT_LAST
    fi;
    if
    :: s_stage + (s_kind == NOT_LAST) >= STAGES -> source_abort(0, 1) /* TOO_MANY_STAGES */
    :: else -> source = SOURCE_RESERVING; send_reserve()
    fi
}

#ifdef BREAK_PREEMPTIONS_ARE_NOT_COMPARED
#define ARE_OTHER_BLOCKS(preemptions) false
#else
#define ARE_OTHER_BLOCKS(preemptions) ((preemptions) != s_num_preemptions)
#endif

inline source_on_inspected() {
    if
    :: s_knows_preemptions && ARE_OTHER_BLOCKS(o_num_preemptions) -> source_abort(0, 1)
    :: else ->
        if
        :: FAULT -> SPEND; source_abort(0, 1) /* Immovable at this moment. */
        :: source_plan_stage()
        fi
    fi
}

inline source_on_drained() {
    if
    :: source == SOURCE_DRAINING ->
        source = SOURCE_COMMITTING;
        if
        :: o_has_blocks -> copy_blocks()
        :: else
        fi;
#ifdef BREAK_RELEASES_BEFORE_COMMITTED
        release();
#endif
        send(b_is_alive, Commit, COMMIT(s_stage, o_has_blocks, s_reservation))
    :: source == SOURCE_UNDOING -> keep_drained()
    fi
}

inline source_on_drain_refused(has_too_many_blocks) {
    if
    :: source == SOURCE_DRAINING && has_too_many_blocks -> inspect(s_stage + 1)
    :: source == SOURCE_DRAINING && !has_too_many_blocks -> source_abort(0, 1)
    :: source == SOURCE_UNDOING ->
        if
        :: s_has_client_aborted -> abort_request_at_a()
        :: else
        fi;
        source_over()
    fi
}

inline source_on_copy_failed(stage) {
    if
    :: !SOURCE_HAS_MACHINE || source == SOURCE_FORWARDING || stage < s_stage -> skip
    :: source == SOURCE_COPYING && stage == s_stage -> source_abort(0, 1)
    :: source == SOURCE_COMMITTING && stage == s_stage && s_is_copying ->
        s_is_copying = 0; send(b_is_alive, Abort, 0)
    :: else -> assert(false)
    fi
}

inline source_on_client_aborted() {
    if
    :: source == SOURCE_INSPECTING || source == SOURCE_RESERVING || source == SOURCE_COPYING ->
        source_abort(1, 1)
    :: source == SOURCE_DRAINING || source == SOURCE_UNDOING -> source_undo(1, 1)
    :: source == SOURCE_COMMITTING ->
#ifndef BREAK_IGNORES_THE_ABORT
        if
        :: s_has_client_aborted -> skip
        :: else -> s_has_client_aborted = 1; send_forwarded_abort()
        fi
#else
        skip
#endif
    fi
}

/* RequestEnded and Cancelled: the first is a hint that Drain need not have. */
inline source_on_cancelled() {
    if
    :: source == SOURCE_INSPECTING || source == SOURCE_RESERVING || source == SOURCE_COPYING ->
        source_abort(0, 1)
    :: source == SOURCE_DRAINING -> source_undo(0, 1)
    fi
}

inline source_on_peer_dead() {
    if
    :: source == SOURCE_INSPECTING || source == SOURCE_RESERVING || source == SOURCE_COPYING ->
        source_abort(0, 0)
    :: source == SOURCE_DRAINING -> source_undo(0, 0)
    :: source == SOURCE_COMMITTING -> keep_drained()
    :: source == SOURCE_FORWARDING -> source_over()
    :: else
    fi
}
